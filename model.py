"""Qwen2 and Qwen2.5 (dense) by hand: config, sharding, load and save, training forward, generation.

Shapes are suffixes: B rows, T query positions, S key positions, P prompt positions, D model, F feed-forward,
N query heads, K key/value heads, G = N/K, H head dim, V vocab, L layers. `wq_LDNH` has shape [L, D, N, H];
inside the scan over layers a weight keeps its name and has lost its L.

Parameters are a nested dict of arrays, layers stacked on L. Master weights are float32, sharded over the mesh
axes `dp, fsdp, tp`; a forward casts what it uses to the compute dtype, accumulates in float32, and takes
norms and softmax in float32. Architecture: Qwen2 technical report, arXiv 2407.10671.
"""

import argparse, contextlib, dataclasses, glob, itertools, json, math, os, re, tempfile, time, timeit, zlib
from collections import namedtuple
from functools import cache, partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import multihost_utils
from jax.experimental.layout import Layout as DeviceLayout, with_layout_constraint
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

AXES = ("dp", "fsdp", "tp")  # of a mesh
DEVICE, HOST = jax.memory.Space.Device, jax.memory.Space.Host  # where parameters rest: mostly the former
ROWS = ("dp", "fsdp")  # those that share out the rows of a batch

class CheckpointError(Exception):
    """A model directory that cannot be used: the message names the file, what it has and what it should."""

class IncompleteCheckpoint(CheckpointError):
    """One that lacks files, as a process was killed while it was written; those it has are not damaged."""

def everywhere(value):
    """What each process has, stacked: [processes, ...]; every process must call."""
    return np.asarray(multihost_utils.process_allgather(np.asarray(value))).reshape(-1, *np.shape(value))

# ---------------------------------------------------------------- config
@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The shape of a Qwen2 model, by the letters above."""
    V: int
    D: int
    F: int
    N: int
    K: int
    H: int
    L: int
    rope_theta: float
    rms_eps: float
    tied: bool          # the LM head is the embedding
    max_positions: int
    stop_ids: tuple     # token ids that end an answer

    @property
    def n_params(self):
        return sum(math.prod(shape) for shape in shapes(self).values())

    @property
    def n_multiplied(self):
        """Parameters less an embedding that is no head, of which only rows are looked up."""
        return self.n_params - (0 if self.tied else self.V * self.D)

def unique(pairs):
    """A JSON object's names and values -> dict."""
    if len(found := dict(pairs)) < len(pairs):
        raise ValueError(f"a name comes twice among {', '.join(name for name, _ in pairs)[:300]}")
    return found

# without NaN and infinity, which no JSON has
parse_json = partial(json.loads, object_pairs_hook=unique, parse_constant=int)

def read_json(path):
    """The object in a JSON file."""
    try:
        with open(path, encoding="utf-8") as f:
            value = parse_json(f.read())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; a model is config.json, tokenizer.json and *.safetensors")
    except (OSError, ValueError, RecursionError) as e:
        raise CheckpointError(f"{path} is not readable JSON: {e}")
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, not an object")
    return value

@contextlib.contextmanager
def written(path):
    """A binary file to write: it is there, whole and on the disk, once this is left, or not at all."""
    aside = f"{path}.{jax.process_index()}.tmp"
    try:
        with open(aside, "wb") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(aside, path)
        sync(os.path.dirname(path) or ".")
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(aside)
        raise

def sync(path):
    """Have the disk take a file, or the names in a directory."""
    number = os.open(path, os.O_RDONLY)
    os.fsync(number)
    os.close(number)

def write_json(path, value):
    with written(path) as f:
        f.write(json.dumps(value, indent=1).encode())

def read_config(directory):
    """ModelConfig of a Hugging Face directory. Raises CheckpointError, by name, for all but a dense Qwen2."""
    path = os.path.join(directory, "config.json")
    c = read_json(path)
    generation = os.path.join(directory, "generation_config.json")
    def number(name, default=None, kind=int, end=2**31, values=c):
        value = default if values.get(name) is None else values[name]
        if type(value) not in (int, kind) or not 0 < value < end:
            raise ValueError(f"{name} = {value!r} is not a positive {kind.__name__} below {end}")
        return value
    try:
        rope, old = c.get("rope_parameters") or {}, c.get("rope_scaling") or {}  # of transformers 5, 4
        ropes = [r.get("rope_type", r.get("type", "default")) for r in (rope, old)]
        both = [r["rope_theta"] for r in (rope, old, c) if r.get("rope_theta") is not None]
        for refused, what in (
                (c.get("model_type") != "qwen2", f"model_type {c.get('model_type')!r}; only 'qwen2' is"),
                (c.get("architectures") not in (None, ["Qwen2ForCausalLM"]),
                 f"architectures {c.get('architectures')}; only Qwen2ForCausalLM is"),
                (ropes != ["default"] * 2 or {*rope, *old} - {"rope_type", "type", "rope_theta"},
                 f"rope scaling {', '.join(r for r in ropes if r != 'default') or {**rope, **old}}; only plain "
                 "rotary embedding is"),
                (any(theta != both[0] for theta in both), f"rope_theta {both}; only one is"),
                (c.get("use_sliding_window"), "use_sliding_window = true; only full attention is"),
                ({*(c.get("layer_types") or [])} - {"full_attention"}, "sliding layers; only full ones are"),
                ("quantization_config" in c, "quantised weights; only float32, bfloat16 and float16 are"),
                (c.get("hidden_act", "silu") != "silu", f"hidden_act {c.get('hidden_act')!r}; only silu is"),
                (type(c.get("tie_word_embeddings", False)) not in (bool, type(None)),
                 "no true or false for tie_word_embeddings; only these are")):
            if refused:
                raise CheckpointError(f"{path} has {what} supported")
        N, D, V = map(number, ("num_attention_heads", "hidden_size", "vocab_size"))
        stop = (c | (read_json(generation) if os.path.exists(generation) else {})).get("eos_token_id")
        stop = [] if stop is None else stop if isinstance(stop, list) else [stop]
        if not all(type(i) is int and 0 <= i < V for i in stop):
            raise ValueError(f"eos_token_id = {stop} is not of vocab_size = {V}")
        cfg = ModelConfig(
            V=V, D=D, F=number("intermediate_size"), L=number("num_hidden_layers", end=10**4), N=N,
            K=number("num_key_value_heads", N), H=number("head_dim", D // N),
            rope_theta=float(number("rope_theta", 1e4, float, 1e38, {"rope_theta": [*both, None][0]})),
            rms_eps=float(number("rms_norm_eps", 1e-6, float, 1)), stop_ids=tuple(stop),
            tied=bool(c.get("tie_word_embeddings")), max_positions=number("max_position_embeddings", 32768))
        if cfg.N % cfg.K or cfg.H % 2:
            raise ValueError(f"{cfg.N} query heads, {cfg.K} key/value heads of size {cfg.H}: the first must "
                             "be a multiple of the second, the head size even")
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError, OverflowError) as e:
        raise CheckpointError(f"{path} lacks a usable value: {type(e).__name__} {e}")
    return cfg

# ---------------------------------------------------------------- parameters: names, sharding, random weights
# ours: (the Hugging Face tensor, its dimensions in our letters; two letters together are one dimension)
TENSORS = {
    "embed_VD": ("model.embed_tokens.weight", "V D"),
    "layers/attn_norm_LD": ("model.layers.{}.input_layernorm.weight", "D"),
    "layers/wq_LDNH": ("model.layers.{}.self_attn.q_proj.weight", "NH D"),
    "layers/bq_LNH": ("model.layers.{}.self_attn.q_proj.bias", "NH"),
    "layers/wk_LDKH": ("model.layers.{}.self_attn.k_proj.weight", "KH D"),
    "layers/bk_LKH": ("model.layers.{}.self_attn.k_proj.bias", "KH"),
    "layers/wv_LDKH": ("model.layers.{}.self_attn.v_proj.weight", "KH D"),
    "layers/bv_LKH": ("model.layers.{}.self_attn.v_proj.bias", "KH"),
    "layers/wo_LNHD": ("model.layers.{}.self_attn.o_proj.weight", "D NH"),
    "layers/mlp_norm_LD": ("model.layers.{}.post_attention_layernorm.weight", "D"),
    "layers/w_gate_LDF": ("model.layers.{}.mlp.gate_proj.weight", "F D"),
    "layers/w_up_LDF": ("model.layers.{}.mlp.up_proj.weight", "F D"),
    "layers/w_down_LFD": ("model.layers.{}.mlp.down_proj.weight", "D F"),
    "norm_D": ("model.norm.weight", "D"),
    "head_VD": ("lm_head.weight", "V D"),  # absent when tied
}

def letters(name):
    return name.rsplit("_", 1)[1]

def shapes(cfg):
    """{flat name: shape} of all parameters."""
    return {name: tuple(getattr(cfg, c) for c in letters(name))
            for name in TENSORS if not (cfg.tied and name == "head_VD")}

def hf_tensors(cfg):
    """(Hugging Face name, its shape, our name, layer or None) of every tensor, in our order."""
    for name in shapes(cfg):
        hf_name, groups = TENSORS[name]
        shape = tuple(math.prod(getattr(cfg, c) for c in group) for group in groups.split())
        for i in range(cfg.L) if name.startswith("layers/") else [None]:
            yield hf_name.format(i), shape, name, i

def spec(name, fsdp=True):
    """PartitionSpec of a parameter: matrices split D over fsdp, heads and F over tp; to decode, fsdp=False.
    Embedding and head split D over both axes, so V may be any number; vectors without heads stay whole."""
    dims = letters(name)
    axes = {"N": "tp", "K": "tp", "F": "tp", "D": "fsdp" if fsdp else None}
    if "V" in dims:
        axes = {"D": ("fsdp", "tp") if fsdp else None}
    elif dims in ("D", "LD"):
        axes = {}
    return P(*(axes.get(c) for c in dims))

def nest(flat):
    """{'layers/wq_LDNH': a} -> {'layers': {'wq_LDNH': a}}"""
    top = {name: a for name, a in flat.items() if "/" not in name}
    return top | {"layers": {name[7:]: a for name, a in flat.items() if "/" in name}}

def flatten(tree):
    """{'layers/wq_LDNH': a} of any tree of dicts and tuples."""
    return {jax.tree_util.keystr(path, simple=True, separator="/"): a
            for path, a in jax.tree_util.tree_leaves_with_path(tree)}

def shardings(cfg, mesh):
    """NamedSharding of every parameter, as a nested dict."""
    return nest({name: NamedSharding(mesh, spec(name)) for name in shapes(cfg)})

def write_random(directory, config, seed):
    """Write config.json and random weights (normal, of `initializer_range`) as a Hugging Face directory."""
    write_json(os.path.join(directory, "config.json"), config)
    rng = np.random.default_rng(seed)
    save_file({name: (np.ones(shape) if "norm" in name else np.zeros(shape) if "bias" in name
                      else rng.standard_normal(shape) * config["initializer_range"]).astype(np.float32)
               for name, shape, *_ in hf_tensors(read_config(directory))},
              os.path.join(directory, "model.safetensors"), metadata={"format": "pt"})

# ---------------------------------------------------------------- load and save
def place(shape, sharding, read):
    """Global array from read(index) -> NumPy; a process reads its own shards, one at a time."""
    shards = []
    for device, index in sharding.addressable_devices_indices_map(tuple(shape)).items():
        index = tuple(slice(*s.indices(n)) for s, n in zip(index, shape))
        there = SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
        shards.append(jax.device_put(read(index), there).block_until_ready())
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, shards)

GGUF = ', gguf_file="{}"'

def weight_files(directory):
    """The safetensors of a model: those that its index names, or the only one."""
    index = os.path.join(directory, "model.safetensors.index.json")
    other = [name for name in sorted(os.listdir(directory)) if name.endswith((".bin", ".gguf", ".pt", ".pth"))]
    if other and not glob.glob(f"{glob.escape(directory)}/*.safetensors"):
        raise CheckpointError(
            f"{directory} has weights as {other[0]}, and no *.safetensors; convert them: python -c 'from "
            "transformers import AutoModelForCausalLM as M; "
            f'M.from_pretrained("{directory}"{GGUF.format(other[0]) if other[0].endswith("gguf") else ""})'
            f""".save_pretrained("{directory}")'""")
    names = read_json(index).get("weight_map") if os.path.exists(index) else {"": "model.safetensors"}
    for name in names.values() if isinstance(names, dict) else [names]:
        if not isinstance(name, str) or os.path.basename(name) != name:
            raise CheckpointError(f"{index} names {name!r}, which is not a file of this directory")
    return [os.path.join(directory, name) for name in sorted(set(names.values()))]

class Checkpoint:
    """The open safetensors of a model; names, shapes and types are checked before one weight is read."""

    def __init__(self, directory, cfg):
        self.cfg, self.where = cfg, {}  # {tensor name: (what to slice, its file)}
        for path in weight_files(directory):
            try:
                f = safe_open(path, "np")
                found = {name: (f.get_slice(name), path) for name in f.keys()}
            except (SafetensorError, OSError, ValueError) as e:
                raise CheckpointError(f"{path} is not a safetensors file: {e}")
            for name in found.keys() & self.where:
                raise CheckpointError(f"{path} holds {name}, as does {self.where[name][1]}; keep one")
            self.where |= found
        wanted = {name: shape for name, shape, *_ in hf_tensors(cfg)}
        for name, shape in wanted.items():
            if name not in self.where:
                raise CheckpointError(f"{directory} lacks the tensor {name} that its config.json calls for")
            tensor, path = self.where[name]
            found, dtype = tuple(tensor.get_shape()), tensor.get_dtype()
            if found != shape:
                raise CheckpointError(f"{path}: {name} has shape {found}, config.json calls for {shape}")
            if dtype not in ("F32", "BF16", "F16"):
                raise CheckpointError(f"{path}: {name} has type {dtype}; quantised weights are not supported")
        derived = ("rotary_emb.inv_freq",) + ("lm_head.weight",) * cfg.tied  # which some writers add
        extra = [name for name in self.where if name not in wanted and not name.endswith(derived)]
        if extra:
            raise CheckpointError(f"{directory} has the tensor {extra[0]} ({len(extra)} such), not Qwen2's")

    def read(self, name, index):
        """Our parameter `name` at `index` (a slice per dimension) -> float32 NumPy; reads only that."""
        if not name.startswith("layers/"):
            return self.read_one(name, None, index)
        out = np.empty([s.stop - s.start for s in index], np.float32)
        for i, layer in enumerate(range(index[0].start, index[0].stop)):
            out[i] = self.read_one(name, layer, index[1:])
        return out

    def read_one(self, name, layer, index):
        (hf_name, groups), H = TENSORS[name], self.cfg.H  # H is never split
        part = dict(zip(letters(name).lstrip("L"), index))
        slices = tuple(part[g] if len(g) == 1 else slice(part[g[0]].start * H, part[g[0]].stop * H)
                       for g in groups.split())
        tensor, path = self.where[hf_name.format(layer)]
        value = tensor[slices].astype(np.float32, copy=False)
        if not (-np.inf < value.min() and value.max() < np.inf):  # for NaN, either is false
            raise CheckpointError(f"{path}: {hf_name.format(layer)} holds NaN or infinity; get it again")
        theirs = groups.replace(" ", "")
        value = value.reshape([part[c].stop - part[c].start for c in theirs])
        return np.einsum(f"{theirs}->{''.join(part)}", value)  # a view

def load(checkpoint, mesh, progress=lambda done, total: None):
    """Checkpoint -> float32 parameters over `mesh`; host memory holds one device's shard of one parameter."""
    flat, todo = {}, shapes(checkpoint.cfg)
    for name, shape in todo.items():
        flat[name] = place(shape, NamedSharding(mesh, spec(name)), partial(checkpoint.read, name))
        progress(len(flat), len(todo))
    return nest(flat)

def save(directory, params, cfg, mesh, dtype, file_bytes=4 << 30):
    """Write `params` as safetensors that transformers loads; process 0 writes, every process must call.
    `dtype` is a NumPy type name ("float32", "bfloat16"). Tensors are gathered one layer at a time; a file
    holds at most `file_bytes`, and an index names several. The caller adds config.json and the tokenizer."""
    dtype, flat = np.dtype(getattr(ml_dtypes, dtype, dtype)), flatten(params)
    @partial(jax.jit, static_argnames=("name", "shape"), out_shardings=NamedSharding(mesh, P()))
    def gather(a, i, name, shape):
        ours, theirs = letters(name).lstrip("L"), TENSORS[name][1].replace(" ", "")
        a = jax.device_put(a if i is None else a[i], DEVICE)
        return jnp.einsum(f"{ours}->{theirs}", a).reshape(shape).astype(dtype)
    files, filled = [[]], 0
    for tensor in hf_tensors(cfg):
        size = math.prod(tensor[1]) * dtype.itemsize
        if filled and filled + size > file_bytes:
            files, filled = files + [[]], 0
        files[-1].append(tensor)
        filled += size
    weight_map = {}
    for number, tensors in enumerate(files, 1):
        file = f"model-{number:05}-of-{len(files):05}.safetensors" if len(files) > 1 else "model.safetensors"
        weight_map |= {hf_name: file for hf_name, *_ in tensors}
        out = {}
        for hf_name, shape, name, i in tensors:
            value = gather(flat[name], i, name, shape)
            if jax.process_index() == 0:
                out[hf_name] = np.asarray(value, order="C")
        if jax.process_index() == 0:
            save_file(out, os.path.join(directory, file), metadata={"format": "pt"})
    if jax.process_index() == 0 and len(files) > 1:
        write_json(f"{directory}/model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})

# A checkpoint: `step_NNNNNN`, in which each process writes one file, of all that it holds, for its disk may
# be its own. The files of one run, as many as each says there are, are a whole; a rename brings each.
SHARDS = "shards-{:05}-of-{:05}.safetensors"
KINDS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "int32": "I32"}  # as safetensors calls them

def shards_of(tree):
    """{'name|start,start': this process's shard, each once} of a tree of arrays."""
    return {f"{name}|{','.join(str(s.start or 0) for s in shard.index)}": shard.data
              for name, array in flatten(tree).items() for shard in array.addressable_shards}

def save_shards(shards, directory, about):
    """Write shards as this process's file, one after the other; about: strings, kept in its header beside
    a checksum of all else that is in the file."""
    header, end = {"__metadata__": {"crc32": "0" * 8} | about}, 0
    for key, a in shards.items():
        place = [end, end := end + a.nbytes]
        header[key] = {"dtype": KINDS[a.dtype.name], "shape": a.shape, "data_offsets": place}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    os.makedirs(directory, exist_ok=True)
    with written(os.path.join(directory, SHARDS.format(jax.process_index(), jax.process_count()))) as f:
        f.write(len(text).to_bytes(8, "little") + text)
        crc = zlib.crc32(text)
        for a in shards.values():
            data = np.ascontiguousarray(a).reshape(-1).view(np.uint8)
            f.write(data)
            crc = zlib.crc32(data, crc)
        f.seek(8)
        f.write(text.replace(b"0" * 8, b"%08x" % crc, 1))

def read_about(path):
    """What save_shards kept in a file's header, whose sizes must be those of the file."""
    try:
        with safe_open(path, "np") as f:
            about = f.metadata()
        return about | {"run": int(about["run"]), "crc32": about["crc32"]}  # KeyError where it is damaged
    except (SafetensorError, OSError, TypeError, KeyError, ValueError) as e:
        raise CheckpointError(f"{path} is damaged: {type(e).__name__} {e}")

def verify(path):
    """Raise CheckpointError unless the file is what save_shards wrote."""
    wanted = read_about(path)["crc32"].encode()
    with open(path, "rb") as f:
        text = f.read(int.from_bytes(f.read(8), "little"))
        crc = zlib.crc32(text.replace(wanted, b"0" * 8, 1))
        while data := f.read(1 << 24):
            crc = zlib.crc32(data, crc)
    if wanted != b"%08x" % crc:
        raise CheckpointError(f"{path} is damaged: its checksum is {crc:08x}, {wanted.decode()} was written")

def saved_steps(out):
    """Steps of the directories `out`/step_NNNNNN, oldest first."""
    return sorted(int(name[5:]) for name in os.listdir(out)
                  if re.fullmatch(r"step_\d{6}", name) and os.path.isdir(f"{out}/{name}"))

def shard_files(directory):
    """{(part, of how many): path} of a checkpoint's files; of what else lies there, a killed process may have
    left it."""
    found = {}
    for name in os.listdir(directory) if os.path.isdir(directory) else []:
        if match := re.fullmatch(SHARDS.replace("{:05}", r"(\d{5})"), name):
            found[int(match[1]), int(match[2])] = os.path.join(directory, name)
    return found

def whole_checkpoint(directory):
    """-> (files of a checkpoint, what their headers keep): this process's own, all that it needs on a disk of
    its own, or as many as other processes wrote. It verifies its share of them. Raises IncompleteCheckpoint
    where files lack, and CheckpointError where one is damaged."""
    sets, faults, (me, n) = {}, [], (jax.process_index(), jax.process_count())
    for (part, of), path in sorted(shard_files(directory).items()):
        try:
            about = read_about(path)
            sets.setdefault((about["run"], of), ({}, about))[0][part] = path
        except CheckpointError as e:
            faults.append(str(e))
    for (_, of), (files, about) in sorted(sets.items(), key=lambda item: item[0], reverse=True):
        if len(files) == of or of == n and me in files:
            for part in range(me, of, n):
                verify(files[part])
            return list(files.values()), about
    if faults:
        raise CheckpointError("; ".join(faults))
    raise IncompleteCheckpoint("; ".join(
        f"{directory} has {len(files)} of the files of {of} processes" for (_, of), (files, _) in sets.items())
        or f"{directory} has no complete file")

def load_shards(files, tree):
    """The arrays saved in files, on whatever mesh, in the places of those of `tree` (shapes, types,
    shardings)."""
    pieces = {}  # array name -> {its key: (where the piece starts, its file, its key)}
    for file in files:
        f = safe_open(file, "np")
        for key in f.keys():  # several processes may hold the same
            name, _, starts = key.partition("|")
            pieces.setdefault(name, {})[key] = [int(n) for n in starts.split(",") if n], f, key
    def read(name, dtype, index):
        out, filled = np.empty([s.stop - s.start for s in index], dtype), 0
        for starts, f, key in pieces.get(name, {}).values():
            held = f.get_slice(key)
            laps = [(max(s.start, a), min(s.stop, a + n)) for s, a, n in zip(index, starts, held.get_shape())]
            if all(low < high for low, high in laps):
                part = tuple(slice(low - a, high - a) for (low, high), a in zip(laps, starts))
                here = tuple(slice(low - s.start, high - s.start) for (low, high), s in zip(laps, index))
                out[here] = held[part] if part else f.get_tensor(key)
                filled += out[here].size
        if filled != out.size:
            raise CheckpointError(f"{files[0]} and others have {filled} of the {out.size} numbers wanted of "
                                  f"{name}; on another mesh --out must be one that all processes share")
        return out
    return jax.tree.unflatten(jax.tree.structure(tree), [
        place(a.shape, a.sharding, partial(read, name, a.dtype)) for name, a in flatten(tree).items()])

# ---------------------------------------------------------------- the transformer
def constrain(x, mesh, *axes):
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*axes)))

def matmul(equation, x, w):
    """einsum in x's dtype, accumulated and returned in float32."""
    return jnp.einsum(equation, x, w.astype(x.dtype), preferred_element_type=jnp.float32)

def rms_norm(x, scale, eps):
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, -1, keepdims=True) + eps) * scale).astype(x.dtype)

def rope_tables(positions_BT, cfg):
    """cos and sin of the rotary angles, [B, 1, T, H/2] float32 (arXiv 2104.09864, in half-split form)."""
    inverse = cfg.rope_theta ** (-jnp.arange(0, cfg.H, 2, dtype=jnp.float32) / cfg.H)
    angle = positions_BT[:, None, :, None].astype(jnp.float32) * inverse
    return jnp.cos(angle), jnp.sin(angle)

def rotate(x, rope):
    """Rotate the pairs (i, i + H/2) of float32 [B, heads, T, H]."""
    (cos, sin), (a, b) = rope, jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

def attention(q_BNTH, k_BKSH, v_BKSH, mask_BTS, order="BKSH"):
    """Grouped-query attention without repeating keys -> [B, N, T, H] float32; mask: what a query sees; order:
    of the dimensions of keys and values. Queries come scaled."""
    B, N, T, H = q_BNTH.shape
    q_BKGTH = q_BNTH.reshape(B, k_BKSH.shape[order.index("K")], -1, T, H)
    scores = matmul(f"BKGTH,{order}->BKGTS", q_BKGTH, k_BKSH)
    probs = jax.nn.softmax(jnp.where(mask_BTS[:, None, None], scores, -1e30), -1)
    out = matmul(f"BKGTS,{order}->BKGTH", probs.astype(v_BKSH.dtype), v_BKSH)
    return out.reshape(B, N, T, H)

def layer(cfg, x_BTD, w, rope, attend, enter=lambda h: h, leave=lambda y: y):
    """One transformer layer -> (x_BTD, extra); attend(q, k, v) -> ([B,N,T,H], extra) is what queries see.
    enter, leave: around what a device has a part of the heads and of F for."""
    dtype, kept = x_BTD.dtype, lambda a: checkpoint_name(a.astype(x_BTD.dtype), "dot")
    h = enter(rms_norm(x_BTD, w["attn_norm_LD"], cfg.rms_eps))
    q = matmul("BTD,DNH->BNTH", h, w["wq_LDNH"]) + w["bq_LNH"][:, None]
    k = matmul("BTD,DKH->BKTH", h, w["wk_LDKH"]) + w["bk_LKH"][:, None]
    v = matmul("BTD,DKH->BKTH", h, w["wv_LDKH"]) + w["bv_LKH"][:, None]
    q = q * cfg.H ** -0.5
    out, extra = attend(kept(rotate(q, rope)), kept(rotate(k, rope)), kept(v))
    x_BTD = kept(x_BTD + leave(matmul("BNTH,NHD->BTD", kept(out), w["wo_LNHD"])).astype(dtype))
    h = enter(rms_norm(x_BTD, w["mlp_norm_LD"], cfg.rms_eps))
    gate, up = kept(matmul("BTD,DF->BTF", h, w["w_gate_LDF"])), kept(matmul("BTD,DF->BTF", h, w["w_up_LDF"]))
    return x_BTD + leave(matmul("BTF,FD->BTD", jax.nn.silu(gate) * up, w["w_down_LFD"])).astype(dtype), extra

def flops(cfg, lengths):
    """Of a forward and backward over sequences, recomputation not counted: 6 a parameter and token, and 12 a
    layer, head dimension and pair of tokens of which one sees the other (arXiv 2204.02311, appendix B)."""
    return float(sum(6 * cfg.n_multiplied * n + 6 * cfg.L * cfg.N * cfg.H * n * (n + 1) for n in lengths))

def head(params):
    """The LM head [V, D]: its own, or the tied embedding."""
    return params.get("head_VD", params["embed_VD"])

# ---------------------------------------------------------------- the training forward, and the way back
ATTENTION = "splash", "cudnn", "blockwise"
REMAT = {  # what of a layer is kept for the way back, beside its input; all else is computed again
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.save_only_these_names("dot"),
    "none": jax.checkpoint_policies.save_anything_except_these_names("weight")}
TOKENS_AT_ONCE = 2048  # of a device, in a layer: wide matrix products, yet what lies between stays small
How = namedtuple("How", "dtype attention remat", defaults=["blockwise", "full"])

def see(q_BNTH, k_BKTH, v_BKTH, segments_BT, impl, platform):
    """Causal attention within segments -> [B, N, T, H]; queries come scaled. splash: on TPUs (elsewhere its
    interpretation); cudnn: on GPUs; blockwise: anywhere, 512 queries after another."""
    T, N = q_BNTH.shape[2], q_BNTH.shape[1]
    if impl == "splash":
        from jax.experimental.pallas.ops.tpu.splash_attention import (
            splash_attention_kernel as splash, splash_attention_mask as masks)
        block, H = min(512, -(-T // 128) * 128), q_BNTH.shape[3]  # it is for heads of 64, or multiples of 128
        more, wider = -T % block, -H % (64 if H <= 64 else 128)
        q, k, v = (jnp.pad(a, ((0, 0), (0, 0), (0, more), (0, wider))) for a in (q_BNTH, k_BKTH, v_BKTH))
        segments = jnp.pad(segments_BT, ((0, 0), (0, more)), constant_values=-1)
        sizes = {f"block_{name}": block for name in "q kv kv_compute q_dkv kv_dkv kv_dkv_compute".split()}
        attend = splash.make_splash_mha(
            masks.MultiHeadMask([masks.CausalMask((q.shape[2],) * 2)] * N), head_shards=1, q_seq_shards=1,
            block_sizes=splash.BlockSizes(**sizes, use_fused_bwd_kernel=True), interpret=platform != "tpu")
        one = lambda q, k, v, s: attend(q, k, v, splash.SegmentIds(s, s))
        return jax.vmap(one)(q, k, v, segments)[:, :, :T, :H]
    mask = lambda a, b: ((segments_BT[:, a:b, None] == segments_BT[:, None, :b])
                         & (jnp.arange(a, b)[:, None] >= jnp.arange(b)))
    if impl == "cudnn":
        q, k, v = (a.transpose(0, 2, 1, 3) for a in (q_BNTH, k_BKTH, v_BKTH))
        out = jax.nn.dot_product_attention(q, k, v, mask=mask(0, T)[:, None], scale=1.0, implementation=impl)
        return out.transpose(0, 2, 1, 3)
    block = jax.checkpoint(lambda a, b: attention(q_BNTH[:, :, a:b], k_BKTH[:, :, :b], v_BKTH[:, :, :b],
                                                  mask(a, b)), static_argnums=(0, 1))
    return jnp.concatenate([block(a, min(a + 512, T)) for a in range(0, T, 512)], 2)

# What follows runs in a shard_map: on this device's rows, with its shards of the weights.
@jax.custom_vjp
def enter(h):
    """Before what tp splits: the way back sums the devices' parts of the gradient (Megatron's f)."""
    return h
enter.defvjp(lambda h: (h, None), lambda _, g: (jax.lax.psum(g, "tp"),))

@jax.custom_vjp
def leave(y):
    """After it: the devices' parts are summed (Megatron's g)."""
    return jax.lax.psum(y, "tp")
leave.defvjp(lambda y: (leave(y), None), lambda _, g: (g,))

def fsdp_axis(name):
    """The dimension of a layer's weight that fsdp splits, or None."""
    axes = spec(f"layers/{name}")[1:]
    return axes.index("fsdp") if "fsdp" in axes else None

def gather(w, dtype):
    """A layer's weights, rounded and whole over fsdp, yet float32, that their gradients add up so."""
    def whole(a, axis):
        a = jax.device_put(a, DEVICE).astype(dtype)
        return a if axis is None else jax.lax.all_gather(a, "fsdp", axis=axis, tiled=True)
    with jax.named_scope("gather"):
        return {name: whole(a, fsdp_axis(name)).astype(jnp.float32) for name, a in w.items()}

def scatter(dw):
    """Their gradients, summed over all rows, into shards."""
    def part(g, axis):
        return jax.lax.psum(g, ROWS) if axis is None else jax.lax.psum(
            jax.lax.psum_scatter(g, "fsdp", scatter_dimension=axis, tiled=True), "dp")
    with jax.named_scope("scatter"):
        return {name: part(g, fsdp_axis(name)) for name, g in dw.items()}

def some_rows(x, w, positions, segments, cfg, how, platform):
    """A layer."""
    w = {name: checkpoint_name(a.astype(how.dtype), "weight") for name, a in w.items()}
    attend = lambda q, k, v: (see(q, k, v, segments, how.attention, platform), None)
    return layer(cfg, x, w, rope_tables(positions, cfg), attend, enter, leave)[0]

def look_up(embed_Vd, tokens_BT, dtype):
    """Each device looks up its slice of D for all rows over fsdp: no table is gathered."""
    x = embed_Vd[jax.lax.all_gather(tokens_BT, "fsdp", tiled=True)].astype(dtype)
    x = jax.lax.all_gather(x, "tp", axis=2, tiled=True)
    return jax.lax.all_to_all(x, "fsdp", split_axis=0, concat_axis=2, tiled=True)

def look_up_back(grad_Vd, tokens_BT, dx_BTD):
    dx, d = jax.lax.all_to_all(dx_BTD, "fsdp", split_axis=2, concat_axis=0, tiled=True), grad_Vd.shape[1]
    dx = jax.lax.dynamic_slice_in_dim(dx, jax.lax.axis_index("tp") * d, d, 2).astype(jnp.float32)
    tokens = jax.lax.all_gather(tokens_BT, "fsdp", tiled=True)
    return grad_Vd + jax.lax.psum(jnp.zeros_like(grad_Vd).at[tokens].add(dx), "dp")

def rows_at_once(B, T):
    """Of B; so few that of rows that are empty few are computed."""
    return max(1, min(TOKENS_AT_ONCE // T, B // 8))

def forward(params, cfg, mesh, rows, how):
    """The training forward -> (hidden states after the last norm, [B, T, D]; times `head`: logits; back).
    rows: `tokens`, `positions`, `segments` int32 [B, T]: a token sees those at or before it in its row that
    have its segment; `filled` int32 [dp * fsdp]: how many of its rows, the first, a device computes.
    back(grads, d_hidden) adds to grads, float32 like the parameters, in place; by hand, as autodiff would
    hold the gradients twice. What stays in memory is [L, B, T, D], and what how.remat keeps."""
    names, of_rows, tree = ("embed_VD", "norm_D", "layers"), P(ROWS), None
    mine = {name: params[name] for name in names}
    places = {name: jax.tree.map(lambda place: place.spec, shardings(cfg, mesh)[name]) for name in names}
    packed = tuple(rows[k] for k in ("filled", "tokens", "positions", "segments"))
    some = partial(some_rows, cfg=cfg, how=how, platform=mesh.devices.flat[0].platform)
    some = jax.checkpoint(some, policy=REMAT[how.remat])
    norm = lambda x, scale: rms_norm(x, scale.astype(how.dtype), cfg.rms_eps)
    B, T = rows["tokens"].shape
    at_once = rows_at_once(B // len(rows["filled"]), T)
    def split(a):
        a = jnp.pad(a, [(0, -len(a) % at_once)] + [(0, 0)] * (a.ndim - 1))
        return a.reshape(-1, at_once, *a.shape[1:])
    join = lambda a: a.reshape(-1, *a.shape[2:])[:B // len(rows["filled"])]
    take = lambda arrays, i: [a[i] for a in arrays]
    loop = lambda filled, body, init: jax.lax.fori_loop(0, -(-filled[0] // at_once), body, init)
    def with_kept(*args):
        """A layer's output and what is kept of it, but for the arguments, which are at hand."""
        nonlocal tree
        y, pull = jax.vjp(some, *args)
        pull.args_res[:] = [None] * len(pull.args_res)
        kept, tree = jax.tree.flatten(pull)
        return y, kept
    def up(mine, filled, tokens, *where):
        where = tuple(map(split, where))
        def one_layer(x, w):
            w = gather(w, how.dtype)
            def body(i, carry):
                y, new = with_kept(carry[0][i], w, *take(where, i))
                return carry[0].at[i].set(y), [a.at[i].set(b) for a, b in zip(carry[1], new)]
            kept = jax.eval_shape(lambda: with_kept(x[0], w, *take(where, 0))[1])
            kept = [jax.lax.empty((len(x), *a.shape), a.dtype) for a in kept]
            new, kept = loop(filled, body, (x, kept))
            return new, [x, *kept]
        with jax.named_scope("embed"):
            x = split(look_up(mine["embed_VD"], tokens, how.dtype))
        with jax.named_scope("layers"):
            x, kept = jax.lax.scan(one_layer, x, mine["layers"])
        return norm(join(x), mine["norm_D"]), [x, kept]
    def down(grads, mine, kept, dx, filled, tokens, *where):
        where, (last, kept) = tuple(map(split, where)), kept
        def one_layer(carry, layer):
            (dx, grads), (number, (x, *kept), w) = carry, layer
            w = gather(w, how.dtype)
            def body(i, carry):
                pull = jax.tree.unflatten(tree, take(kept, i))
                pull.args_res[:] = [x[i], *jax.tree.leaves(w), *take(where, i)]
                d, dw, *_ = pull(carry[0][i])
                return carry[0].at[i].set(d), jax.tree.map(jnp.add, carry[1], dw)
            dx, dw = loop(filled, body, (dx, jax.tree.map(jnp.zeros_like, w)))
            return (dx, {k: grads[k].at[number].add(g) for k, g in scatter(dw).items()}), None
        dx, d_norm = jax.vjp(norm, last, mine["norm_D"])[1](split(dx))
        with jax.named_scope("layers_back"):
            layers = jnp.arange(cfg.L), kept, mine["layers"]
            (dx, d_layers), _ = jax.lax.scan(one_layer, (dx, grads["layers"]), layers, reverse=True)
        with jax.named_scope("embed_back"):
            d_embed = look_up_back(grads["embed_VD"], tokens, join(dx))
        d_norm = grads["norm_D"] + jax.lax.psum(d_norm, ROWS)
        return {"embed_VD": d_embed, "norm_D": d_norm, "layers": d_layers}
    on = partial(jax.shard_map, mesh=mesh, check_vma=False)
    hidden, kept = on(up, in_specs=(places, *[of_rows] * 4), out_specs=(of_rows, P(AXES)))(mine, *packed)
    def back(grads, d_hidden):
        run = on(down, in_specs=(places, places, P(AXES), *[of_rows] * 5), out_specs=places)
        return grads | run({name: grads[name] for name in names}, mine, kept, d_hidden, *packed)
    return hidden, back

# ---------------------------------------------------------------- the layout of a rollout
# mesh: the training mesh's devices, regrouped; rows: the axes that share out the rows; order: of a cache
Layout = namedtuple("Layout", "kind mesh rows order")
LAYOUTS = "replicated", "tp", "fsdp", "maxtext"
Chip = namedtuple("Chip", "gib bandwidth flops")  # memory, its bytes a second, bfloat16 operations a second
CHIPS = {"TPU v4": Chip(30.75, 1.2e12, 275e12), "TPU v5 lite": Chip(15.7, 8.2e11, 197e12),
         "TPU v5": Chip(95, 2.77e12, 459e12), "TPU v6 lite": Chip(31.24, 1.64e12, 918e12),
         "NVIDIA A100": Chip(math.inf, 2.0e12, 312e12), "NVIDIA H100": Chip(math.inf, 3.35e12, 990e12),
         "NVIDIA H200": Chip(math.inf, 4.8e12, 990e12)}

def chip(device):
    """The Chip of a device, by the start of its device_kind; where that is not known: inf, 0, 0."""
    return next((c for kind, c in CHIPS.items() if device.device_kind.startswith(kind)), Chip(math.inf, 0, 0))

def device_memory(device):
    """GiB; a CPU's is shared out; inf where it is not known."""
    if device.platform == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / jax.local_device_count() / 2 ** 30
    try:
        return (device.memory_stats() or {})["bytes_limit"] / 2 ** 30
    except (KeyError, jax.errors.JaxRuntimeError):
        return chip(device).gib

def least_memory(mesh):
    """GiB of the device that has least, as far as processes see; all are told the same."""
    mine = [device_memory(d) for d in mesh.devices.flat if d.process_index == jax.process_index()]
    return float(everywhere(np.float32(min(mine))).min())

def rollout_layout(kind, cfg, mesh, dtype):
    """-> (Layout, why). replicated: whole weights on each device; tp: split by key/value heads within a host;
    fsdp: as in training, gathered layer by layer in each step; maxtext: likewise, rows over dp only; auto:
    replicated where that takes a quarter of the memory, else tp where that takes half, else fsdp."""
    device, (dp, fsdp, tp), n = mesh.devices.flat[0], mesh.devices.shape, mesh.size
    host = sum(d.process_index == device.process_index for d in mesh.devices.flat)
    t = max(t for t in range(1, host + 1) if not (host % t or cfg.K % t or cfg.F % t or cfg.V % t))
    gib, why = cfg.n_params * jnp.dtype(dtype).itemsize / 2 ** 30, "as asked"
    memory = least_memory(mesh)
    if kind == "auto":
        kind = "replicated" if gib <= memory / 4 else "tp" if t > 1 and gib / t <= memory / 2 else "fsdp"
        why = f"a device has {memory:.0f} GiB" if math.isfinite(memory) else "memory is not known"
    dims = {"replicated": (n, 1, 1), "tp": (n // t, 1, t)}.get(kind, (dp, fsdp * tp, 1))
    each = gib / math.prod(dims[1:])
    rows, order = ("dp",) if kind == "maxtext" else ROWS, "LSKBH" if device.platform == "tpu" else "LBKSH"
    return (Layout(kind, Mesh(mesh.devices.reshape(dims), mesh.axis_names), rows, order),
            f"{kind}, {dims[0]} x {n // dims[0]} devices, {each:.2g} of {gib:.2g} GiB of weights each; {why}")

def rollout_spec(name, layout):
    """PartitionSpec of a parameter in a rollout."""
    if layout.kind in ("fsdp", "maxtext"):
        return spec(name)
    return P(*("tp" if c in "NKFV" else None for c in letters(name)))

@cache
def mover(names, layout, dtype):
    """The compiled `to_rollout`, of parameters with these names."""
    def move(tree, cut):
        tree = {name: jax.device_put(a, DEVICE).astype(dtype) for name, a in tree.items()}
        if layout.kind == "tp":  # by way of the whole, as XLA knows no shorter one, and warns
            tree = {name: constrain(a, layout.mesh) for name, a in tree.items()}
        return {k: constrain(a, layout.mesh, *rollout_spec(k, layout)[cut:]) for k, a in tree.items()}
    def move_all(params):  # a layer at a time: all at once would take their memory twice
        top = {name: a for name, a in params.items() if name != "layers"}
        return move(top, 0) | {"layers": jax.lax.map(partial(move, cut=1), params["layers"])}
    places = {name: NamedSharding(layout.mesh, rollout_spec(name, layout)) for name in names}
    return jax.jit(move_all, out_shardings=nest(places))  # constraints alone may be dropped

def to_rollout(params, layout, dtype):
    """The weights of a rollout: cast where they lie, then moved to its layout."""
    return mover(tuple(flatten(params)), layout, dtype)(params)

# ---------------------------------------------------------------- generation: prefill and decode step
def cached_forward(weights, cfg, layout, tokens_BT, positions_BT, mask_BTS, cache, slot):
    """Forward for T new tokens whose keys and values go to cache slots slot.. -> (last hidden [B, D], cache).
    The cache is carried through the scan and updated in place: as a scan's xs and ys it would be copied, and
    also if XLA were free to lay it out otherwise, as it does for many rows."""
    order, rope = layout.order, rope_tables(positions_BT, cfg)
    at = lambda **start: [start.get(c, 0) for c in order]
    pin = jax.shard_map(  # in which it is local: outside, jax 0.10 gathers the whole cache for it
        lambda c: with_layout_constraint(c, DeviceLayout(tuple(range(len(order))))), mesh=layout.mesh,
        in_specs=state_specs(layout)[0], out_specs=state_specs(layout)[0])
    def body(carry, xs):
        (x, cache), (w, number) = carry, xs
        if layout.kind == "fsdp":
            w = {name: constrain(a, layout.mesh) for name, a in w.items()}
        def attend(q, *new):
            new = (jnp.einsum(f"BKSH->{order[1:]}", a)[None] for a in new)
            full = tuple(pin(jax.lax.dynamic_update_slice(c, n, at(L=number, S=slot)))
                         for c, n in zip(cache, new))
            k, v = (jax.lax.dynamic_index_in_dim(c, number, keepdims=False) for c in full)
            return attention(q, k, v, mask_BTS, order[1:]), full
        x, cache = layer(cfg, x, w, rope, attend)
        return (constrain(x, layout.mesh, layout.rows), cache), None
    x = constrain(weights["embed_VD"][tokens_BT], layout.mesh, layout.rows)
    (x, cache), _ = jax.lax.scan(body, (x, tuple(cache)), (weights["layers"], jnp.arange(cfg.L)))
    return rms_norm(x[:, -1], weights["norm_D"], cfg.rms_eps), cache

def truncate(z_BV, top_k, top_p):
    """Set logits outside the top k, then outside the smallest set of mass top_p, to -inf: all below a
    threshold, of which 32 looks find a bit each, as floats are in the order of their bits."""
    total = lambda a_BV: jax.lax.psum(a_BV.sum(-1, keepdims=True), "tp")
    def above_threshold(enough, z_BV):
        bits = jax.lax.bitcast_convert_type(z_BV, jnp.int32)
        bits ^= (bits >> 31) & 0x7fffffff
        def look(i, found):
            trial = found + (jnp.int32(1) << (31 - i))
            return jnp.where(enough(bits >= trial), trial, found)
        least = jax.lax.fori_loop(0, 32, look, jnp.full((len(z_BV), 1), -2 ** 31, jnp.int32))
        return jnp.where(bits >= least, z_BV, -jnp.inf)
    if top_k:
        z_BV = above_threshold(lambda kept: total(1.0 * kept) >= top_k, z_BV)
    if top_p < 1:
        p = jnp.exp(z_BV - jax.lax.pmax(z_BV.max(-1, keepdims=True), "tp"))
        wanted = top_p * total(p)
        z_BV = above_threshold(lambda kept: total(kept * p) >= wanted, z_BV)
    return z_BV

def invert(mass_BX, target_B):
    """First index where the CDF passes the target, and how far in. An empty one is never picked, though a
    parallel cumsum rounds without being monotone."""
    cdf_BX = jnp.where(mass_BX > 0, jnp.cumsum(mass_BX, -1), -jnp.inf)
    target_B = jnp.minimum(target_B, jnp.nextafter(cdf_BX.max(-1), 0.0))
    index = jnp.argmax(cdf_BX > target_B[:, None], -1)
    return index, target_B - jnp.take_along_axis(cdf_BX - mass_BX, index[:, None], 1)[:, 0]

def sample(z_BV, u_B, temperature, top_k, top_p):
    """-> (token_B, its log-prob under the distribution it was drawn from), by inverting the CDF at uniforms
    u_B in [0, 1): first over 128 columns X of the vocabulary, every 128th token, then in one. temperature 0:
    greedy, as at 1. Inside a shard_map: V may be split over tp, and the draws are the same."""
    z_BV = truncate(z_BV / (temperature or 1), top_k, top_p)
    (B, V), shard, before = z_BV.shape, jax.lax.axis_index("tp"), 0
    best_B = z_BV.max(-1)
    top_B = jax.lax.pmax(best_B, "tp")
    z_BYX = z_BV
    if V % 128:  # token v of all belongs into column v % 128
        before, z_BYX = shard * V % 128, jnp.full((B, (V + 254) // 128 * 128), -jnp.inf)
        z_BYX = jax.lax.dynamic_update_slice(z_BYX, z_BV, (0, before))
    z_BYX = z_BYX.reshape(B, -1, 128)
    mass_SBX = jax.lax.all_gather(jnp.exp(z_BYX - top_B[:, None, None]).sum(1), "tp")  # of S shards
    mass_BX = mass_SBX.sum(0)
    total_B = mass_BX.sum(-1)
    if temperature == 0:
        last = V * jax.lax.axis_size("tp") - 1
        token_B = jax.lax.pmin(jnp.where(best_B == top_B, shard * V + jnp.argmax(z_BV, -1), last), "tp")
    else:
        column_B, rest_B = invert(mass_BX, u_B * total_B)
        which_B, rest_B = invert(mass_SBX[:, jnp.arange(B), column_B].T, rest_B)
        z_BY = jnp.take_along_axis(z_BYX, column_B[:, None, None], 2)[:, :, 0]
        place_B, _ = invert(jnp.exp(z_BY - top_B[:, None]), rest_B)
        token_B = shard * V + place_B * 128 + column_B - before
        token_B = jax.lax.psum(jnp.where(which_B == shard, token_B, 0), "tp")
    mine_B = token_B - shard * V
    chosen_B = jnp.take_along_axis(z_BV, jnp.clip(mine_B, 0, V - 1)[:, None], 1)[:, 0]
    chosen_B = jax.lax.psum(jnp.where((0 <= mine_B) & (mine_B < V), chosen_B, 0.0), "tp")
    return token_B.astype(jnp.int32), chosen_B - top_B - jnp.log(total_B)

# The state of a rollout: (keys, values, hidden [B, D] of the last token). Beside it, of each row: pad_B, the
# slots that its prompt leaves empty; row_B, its number among all, -1 for none; live_B.
def state_specs(layout):
    cache = P(*({"B": layout.rows, "K": "tp"}.get(c) for c in layout.order))
    return cache, cache, P(layout.rows)

@partial(jax.jit, static_argnames=("B", "cfg", "layout", "slots", "dtype"))
def start(*, B, cfg, layout, slots, dtype):
    """The state with an empty cache."""
    sizes = {"L": cfg.L, "K": cfg.K, "H": cfg.H, "B": B, "S": slots}
    cache = jnp.zeros([sizes[c] for c in layout.order], dtype)
    state = cache, cache, jnp.zeros((B, cfg.D), dtype)
    return tuple(constrain(a, layout.mesh, *spec) for a, spec in zip(state, state_specs(layout)))

@partial(jax.jit, static_argnames=("cfg", "layout", "group"), donate_argnames="state")
def prefill(weights, state, prompts_BP, pad_B, first, *, cfg, layout, group):
    """Run prompts and put their keys and values, `group` times each, into rows first.. of every device."""
    B, width = prompts_BP.shape
    if jax.process_index() == 0:
        print(f"tracing prefill: {B} prompts of {width} tokens")
    *empty, _ = start(B=B, cfg=cfg, layout=layout, slots=width, dtype=state[2].dtype)
    positions = jnp.arange(width) - pad_B[:, None]
    mask = (positions >= 0)[:, None] & jnp.tri(width, dtype=bool)
    hidden_BD, cache = cached_forward(
        weights, cfg, layout, prompts_BP, jnp.maximum(positions, 0), mask, empty, 0)
    def place(old, new, first):
        def put(a, n):
            axis = layout.order.index("B") if a.ndim > 2 else 0
            return jax.lax.dynamic_update_slice(
                a, jnp.repeat(n, group, axis), [first * (i == axis) for i in range(a.ndim)])
        return tuple(map(put, old, new))
    specs = state_specs(layout)
    return jax.shard_map(place, mesh=layout.mesh, in_specs=(specs, specs, P()), out_specs=specs)(
        state, (*cache, hidden_BD), first)

@partial(jax.jit, static_argnames=("layout", "slots"))
def regrow(a, index_B, *, layout, slots):
    """Some rows of one array of a state, if of the cache with so many slots; index_B counts within each
    device's rows. A layer at a time: else a copy of all would come between."""
    def take(a, index_B):
        if a.ndim == 2:
            return jnp.take(a, index_B, 0)
        sizes = {"B": len(index_B), "S": slots}
        new = jnp.zeros([sizes.get(c, n) for c, n in zip(layout.order, a.shape)], a.dtype)
        def move(i, new):
            rows = jax.lax.dynamic_slice_in_dim(a, i, 1)
            rows = jnp.take(rows, index_B, layout.order.index("B"), mode="clip")
            return jax.lax.dynamic_update_slice(new, rows, [i, 0, 0, 0, 0])
        return jax.lax.fori_loop(0, len(a), move, new)
    spec = state_specs(layout)[0 if a.ndim > 2 else 2]
    return jax.shard_map(take, mesh=layout.mesh, in_specs=(spec, P(layout.rows)), out_specs=spec,
                         check_vma=False)(a, index_B)

@partial(jax.jit, donate_argnames="state",
         static_argnames=("cfg", "layout", "steps", "temperature", "top_k", "top_p"))
def decode(weights, state, pad_B, row_B, live_B, key, width, t, until, *, cfg, layout, steps, temperature,
           top_k, top_p):
    """Answer tokens t .. until - 1, at most `steps`, after prompts `width` wide -> (state, {tokens_BT,
    logp_BT, n_B: how many, live_B})."""
    mesh, rows, B = layout.mesh, layout.rows, len(row_B)
    slots = jnp.arange(state[0].shape[layout.order.index("S")])
    if jax.process_index() == 0:
        print(f"tracing decode: {B} rows, {len(slots)} slots, temperature {temperature}")
    draw = jax.shard_map(
        partial(sample, temperature=temperature, top_k=top_k, top_p=top_p), mesh=mesh, check_vma=False,
        in_specs=(P(rows, "tp"), P(rows)), out_specs=P(rows))
    def step(carry):
        i, (*cache, hidden_BD), out = carry
        z_BV = constrain(matmul("BD,VD->BV", hidden_BD, head(weights)), mesh, rows, "tp")
        uniform = lambda row: jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, t + i), row))
        token_B, logp_B = draw(z_BV, jax.vmap(uniform)(row_B))
        live_B, slot = out["live_B"], width + t + i
        token_B = jnp.where(live_B, token_B, 0)
        out = {"tokens_BT": out["tokens_BT"].at[:, i].set(token_B), "n_B": out["n_B"] + live_B,
               "logp_BT": out["logp_BT"].at[:, i].set(jnp.where(live_B, logp_B, 0.0)),
               "live_B": live_B & ~jnp.isin(token_B, jnp.array(cfg.stop_ids, jnp.int32))}
        mask_BS = (slots >= pad_B[:, None]) & (slots <= slot)
        hidden_BD, cache = cached_forward(
            weights, cfg, layout, token_B[:, None], (slot - pad_B)[:, None], mask_BS[:, None], cache, slot)
        return i + 1, (*cache, hidden_BD), out
    out = {"tokens_BT": jnp.zeros((B, steps), jnp.int32), "logp_BT": jnp.zeros((B, steps)),
           "n_B": jnp.zeros(B, jnp.int32), "live_B": live_B}
    out = {name: constrain(a, mesh, rows) for name, a in out.items()}
    _, state, out = jax.lax.while_loop(
        lambda carry: (t + carry[0] < until) & carry[2]["live_B"].any(), step, (0, state, out))
    return state, {name: constrain(a, mesh) for name, a in out.items()}

# ---------------------------------------------------------------- generate
def bucket(n):
    """The least 2^k or 3 * 2^k that holds n: few enough to compile for each."""
    power = 1 << (n - 1).bit_length()
    return power * 3 // 4 if n * 4 <= power * 3 else power

def bytes_read(cfg, layout, dtype):
    """Bytes that a device cannot but read in a decode step -> (of weights, of the cache a row and slot)."""
    tp, each = layout.mesh.shape["tp"], jnp.dtype(dtype).itemsize
    return cfg.n_multiplied // tp * each, 2 * cfg.L * cfg.K // tp * cfg.H * each

def row_shards(layout):
    return math.prod(layout.mesh.shape[axis] for axis in layout.rows)

def rows_that_fit(cfg, layout, dtype, slots, resting):
    """Rows that a device decodes at once beside the weights and `resting` bytes: their cache takes half of
    what is free; the rest is for prompts, logits, and the one from which the last cache grew, of up to 3/4
    its size. Of sizes alone, so that a run that resumes decodes the same rows together."""
    weights = cfg.n_params * jnp.dtype(dtype).itemsize / (layout.mesh.shape["fsdp"] * layout.mesh.shape["tp"])
    free = least_memory(layout.mesh) * 2 ** 30 - resting - weights
    return max(1, int(min(2 ** 30, 0.5 * free / (bytes_read(cfg, layout, dtype)[1] * slots))))

def plan_waves(B, shards, group, at_once):
    """-> (numbers of each wave's rows, [shards, rows of a device], -1: none; how many alike stand together).
    A device takes whole groups, or equal parts of one."""
    R = B // shards
    group = max(g for g in range(1, min(at_once, R) + 1) if math.gcd(group, R) % g == 0)
    n = -(-R // (min(at_once, R) // group * group))
    width = -(-R // n // group) * group
    ids = np.pad(np.arange(B).reshape(shards, R), ((0, 0), (0, n * width - R)), constant_values=-1)
    return np.split(ids, n, 1), group

def fewer_rows(live, now, weights, row):
    """The least half, quarter, ... of `now` rows a device that holds the live ones, where that saves a tenth
    of a step's bytes, else `now`."""
    fewer = now
    while fewer % 2 == 0 and fewer // 2 >= live:
        fewer //= 2
    return fewer if (now - fewer) * row >= 0.1 * (weights + now * row) else now

def prefilled(weights, tokens, pads, ids, group, put, *, cfg, layout, slots):
    """The state of a wave after its prompts, of which a device runs some at a time: about 4,096 tokens."""
    width, n = tokens.shape[1] * max(1, group // 8), ids.shape[1] // group  # copies take memory, too
    state = start(B=ids.size, slots=slots, dtype=weights["norm_D"].dtype, cfg=cfg, layout=layout)
    some = max(i for i in range(1, n + 1) if n % i == 0 and (i == 1 or i * width <= 4096))
    for i in range(0, n, some):
        asked = ids[:, ::group][:, i:i + some].ravel()
        state = prefill(weights, state, put(tokens[asked]), put(pads[asked]), i * group, group=group, cfg=cfg,
                        layout=layout)
    return jax.block_until_ready(state)

def lower_decode(cfg, layout, dtype, B, slots):
    """Decoding of B rows with so many slots, to be compiled; the devices need not be here."""
    fixed = dict(cfg=cfg, layout=layout)
    place = lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(layout.mesh, s))
    weights = nest({name: place(jax.ShapeDtypeStruct(shape, dtype), rollout_spec(name, layout))
                    for name, shape in shapes(cfg).items()})
    state = jax.eval_shape(partial(start, B=B, slots=slots, dtype=dtype, **fixed))
    rows = [place(jax.ShapeDtypeStruct((B,), kind), P(layout.rows)) for kind in ("i4", "i4", "?")]
    return decode.lower(
        weights, tuple(map(place, state, state_specs(layout))), *rows, jax.eval_shape(jax.random.key, 0),
        slots - 1, 0, 1, steps=128, temperature=1.0, top_k=0, top_p=1.0, **fixed)

def generate(weights, cfg, layout, prompts, key, *, max_answer, group=1, temperature=1.0, top_k=0, top_p=1.0,
             stage=128, at_once=0, progress=lambda done, tokens: None):
    """Answers to prompts, until each has produced one of cfg.stop_ids or max_answer tokens. weights: of
    `to_rollout`; prompts: lists of token ids, this process's, as many in each, `group` after another alike;
    key: a PRNG key. A row's tokens depend on its place among those of all processes, not on the layout.
    Returns a dict of NumPy arrays: tokens_BT int32 [B, max_answer], the stop token last, then 0; lengths_B,
    stop token included; cut_B, no stop token came; logp_BT float32, each token's log-prob under what it was
    drawn from, temperature, truncation included. After a prefill and every `stage` tokens `progress` hears
    how many rows are done and of how many tokens; these may go. at_once: rows a device; 0 = all."""
    width = bucket(int(everywhere(max(map(len, prompts))).max()))
    tokens = np.array([[0] * (width - len(p)) + p for p in prompts], np.int32)
    pads = np.array([width - len(p) for p in prompts], np.int32)
    tokens, pads = everywhere(tokens).reshape(-1, width), everywhere(pads).ravel()
    B, dtype, fixed = len(pads), weights["norm_D"].dtype, dict(cfg=cfg, layout=layout)
    (read, row), rows = bytes_read(cfg, layout, dtype), NamedSharding(layout.mesh, P(layout.rows))
    put = lambda a: jax.make_array_from_callback(a.shape, rows, a.__getitem__)
    out = {"tokens_BT": np.zeros((B, max_answer), np.int32), "logp_BT": np.zeros((B, max_answer), np.float32),
           "lengths_B": np.zeros(B, np.int32), "cut_B": np.ones(B, bool)}
    tell = lambda: progress(int((~out["cut_B"]).sum()), int(out["lengths_B"].sum()))
    waves, group = plan_waves(B, row_shards(layout), group, at_once or B)
    for ids in waves:
        state, live = None, ids >= 0  # the last wave's cache goes first
        for t in range(0, max_answer, stage):
            until, now = min(t + stage, max_answer), ids.shape[1]
            slots = min(bucket(width + until), width + max_answer)
            fewer = fewer_rows(live.sum(1).max(), now, read, row * slots)
            if t == 0:
                state = prefilled(weights, tokens, pads, ids, group, put, slots=slots, **fixed)
                tell()
            elif (slots, fewer) != (before, now):
                index = np.argsort(~live, 1, kind="stable")[:, :fewer]
                ids, live = (np.take_along_axis(a, index, 1) for a in (ids, live))
                state, place = list(state), put(index.ravel())
                for i in range(3):  # one after the other, so that less is held twice
                    state[i] = regrow(state[i], place, layout=layout, slots=slots)
            before, who = slots, ids.ravel()
            state, got = decode(
                weights, tuple(state), put(pads[who]), put(who), put(live.ravel()), key, width, t, until,
                steps=min(stage, max_answer), temperature=temperature, top_k=top_k, top_p=top_p, **fixed)
            got, real = jax.device_get(got), who >= 0
            for name in ("tokens_BT", "logp_BT"):
                out[name][who[real], t:until] = got[name][real, :until - t]
            out["lengths_B"][who[real]] += got["n_B"][real]
            out["cut_B"][who[real]] = got["live_B"][real]
            live = got["live_B"].reshape(ids.shape)
            tell()
            if not live.any():
                break
    mine = slice(jax.process_index() * len(prompts), (jax.process_index() + 1) * len(prompts))
    return {name: a[mine] for name, a in out.items()}

# ---------------------------------------------------------------- benchmark
SIZES = {  # V D F N K H L tied: of the embedded default, one that suits a CPU, Qwen2.5
    "tiny": (320, 128, 256, 4, 2, 32, 2, 1), "45M": (151936, 256, 1024, 4, 2, 64, 6, 1),
    "0.5B": (151936, 896, 4864, 14, 2, 64, 24, 1), "1.5B": (151936, 1536, 8960, 12, 2, 128, 28, 1),
    "3B": (151936, 2048, 11008, 16, 2, 128, 36, 1), "7B": (152064, 3584, 18944, 28, 4, 128, 28, 0),
    "14B": (152064, 5120, 13824, 40, 8, 128, 48, 0), "32B": (152064, 5120, 27648, 40, 8, 128, 64, 0)}
FLAGS = dict(  # model: of SIZES, or a directory; batch: rows in all; prompt, answer: tokens; several: a,b,c
    model="3B", layout="auto", aot="", batch=128, npq=8, prompt=256, answer=1024, dtype="bfloat16",
    transformers=0)

def computations(hlo):
    """A compiled program's text -> {computation: {instruction: (type, op, operands, what it calls, a
    parameter's number)}}, the entry and each root last."""
    comps = {}
    for name, body in re.findall(r"^(?:ENTRY )?%(\S+) \(.*\{$\n((?:  .*\n)+)", hlo, re.M):
        lines = re.findall(r"^  (?:ROOT )?%(\S+) = (.*?) ([a-z][\w-]*)\((.*)$", body, re.M)
        comps[name] = {name: (kind, op, re.findall(r"%([\w.-]+)", rest.split("), ")[0]),
                              (re.findall(r"(?:calls|body)=%([\w.-]+)", rest) or [0])[0], rest.split(")")[0])
                       for name, kind, op, rest in lines}
    return comps

def loop_traffic(hlo, layers):
    """Of the decode loop in a compiled program's text -> bytes a step: [what instructions read and write in
    device memory, what collectives move, the largest copy or relayout]. Counted are operands and results of
    each top-level instruction of the loop's body, the inner loop's `layers` times; what is sliced or updated
    in place, as the slice; what lies in a TPU's VMEM, S(1), not at all, but for collectives."""
    comps = computations(hlo)
    def arrays(kind):
        """[(bytes, in device memory?)] of a type."""
        found = re.findall(r"(?:pred|[a-z]+(\d+)\w*)\[([\d,]*)\]((?:\{[^}]*\})?)", kind)
        return [(math.prod(map(int, filter(None, dims.split(",")))) * int(bits or 8) // 8, "S(" not in layout)
                for bits, dims, layout in found]
    def size(comp, name):
        return arrays(comps[comp][name][0])[0][0]
    def read(comp, user, value):
        """Bytes that an instruction reads of one of its operands."""
        _, op, operands, calls, _ = comps[comp][user]
        if op == "fusion":
            return sum(used(calls, name) for name, (_, inner, *_, number) in comps[calls].items()
                       if inner == "parameter" and operands[int(number)] == value)
        if op == "bitcast":
            return used(comp, user)
        if op in ("dynamic-slice", "slice", "gather") and value == operands[0]:
            return size(comp, user)
        return 0 if op == "dynamic-update-slice" and value == operands[0] else size(comp, value)
    def used(comp, value):
        """Bytes of a value inside a fusion that are read: all if it is the result."""
        reads = [read(comp, user, value) for user, i in comps[comp].items() if value in i[2]]
        return min(sum(reads), size(comp, value)) if reads else size(comp, value)
    def written(comp, name):
        """Bytes of each result that are written."""
        kind, op, operands, calls, _ = comps[comp][name]
        if op == "tuple":
            return [n for operand in operands for n in written(comp, operand)]
        if op == "fusion":
            return written(calls, list(comps[calls])[-1])
        if op == "bitcast":
            return written(comp, operands[0])
        return [size(comp, operands[1])] if op == "dynamic-update-slice" else [arrays(kind)[0][0]]
    def walk(comp):
        total = np.zeros(3)
        moves = {"copy", "copy-start", "transpose", "reshape", "slice", "dynamic-slice", "convert"}
        free = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast"}
        for name, (kind, op, operands, calls, _) in comps[comp].items():
            types = [arrays(comps[comp][o][0]) for o in operands]
            inside = {inner[1] for inner in comps[calls].values()} if op == "fusion" else {op}
            if op == "while":
                more = walk(calls)
                total = np.append(total[:2] + layers * more[:2], max(total[2], more[2]))
            elif op.startswith(("all-", "reduce-scatter", "collective-")) and not op.endswith("-done"):
                total[:2] += sum(n for array in (arrays(kind), *types) for n, _ in array)
            elif op.endswith("-start"):
                total[0] += sum(n * here for n, here in arrays(kind))
            elif op not in free and not op.endswith("-done"):
                total[0] += sum(read(comp, name, o) for o, array in zip(operands, types) if array[0][1])
                total[0] += sum(n * here for n, (_, here) in zip(written(comp, name), arrays(kind)))
            if inside & moves and inside <= moves | free:
                total[2] = max(total[2], max(n * here for n, here in arrays(kind)))
        return total
    loops = [calls for _, op, _, calls, _ in comps[list(comps)[-1]].values() if op == "while"]
    return max(map(walk, loops), key=lambda total: total[0])

def check_loop(name, cfg, layout, args):
    """Compile the last stage of decoding for devices that are not here -> what a step moves, in words."""
    slots, dtype = args.prompt + args.answer, jnp.dtype(args.dtype)
    program = lower_decode(cfg, layout, dtype, args.batch, slots).compile()
    read, row = bytes_read(cfg, layout, dtype)
    cache = row * slots * args.batch // row_shards(layout)
    least, (n, moved, copied) = read + cache, loop_traffic(program.as_text(), cfg.L)
    speed = chip(layout.mesh.devices.flat[0]).bandwidth
    return (f"a step reads at least {least / 1e9:.3f} GB in {least / speed * 1e3:.2f} ms; as compiled "
            f"{n / 1e9:.3f} GB in {n / speed * 1e3:.2f} ms, {n / least:.3f} of that; collectives move "
            f"{moved / 1e9:.3f} GB; the largest copy is {copied * cfg.L / cache:.3f} of a layer's cache; "
            f"peak {program.memory_analysis().peak_memory_in_bytes / 1e9:.2f} GB")

def time_transformers(cfg, weights, mesh, prompts, answer, dtype):
    """Seconds of transformers' generate with the same weights, prompts and lengths."""
    import torch, transformers
    where = "cuda" if torch.cuda.is_available() else "cpu"
    config = transformers.Qwen2Config(
        vocab_size=cfg.V, hidden_size=cfg.D, intermediate_size=cfg.F, num_hidden_layers=cfg.L, head_dim=cfg.H,
        num_attention_heads=cfg.N, num_key_value_heads=cfg.K, tie_word_embeddings=cfg.tied, dtype=dtype,
        rope_parameters={"rope_type": "default", "rope_theta": cfg.rope_theta}, rms_norm_eps=cfg.rms_eps)
    with tempfile.TemporaryDirectory() as directory:
        save(directory, weights, cfg, mesh, dtype)
        config.save_pretrained(directory)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).to(where)
    tokens, times = torch.tensor(prompts, device=where), []
    for n in (2, answer, answer):
        began = time.perf_counter()
        theirs.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=True, top_k=0, top_p=1.0,
                        temperature=1.0, min_new_tokens=n, max_new_tokens=n, pad_token_id=0).sum().item()
        times.append(time.perf_counter() - began)
    return min(times[1:])

def measure(name, cfg, layout, args):
    """Time a rollout here, the faster of two once all is compiled -> what to print."""
    dtype, key = jnp.dtype(args.dtype), jax.random.key(0)
    if name in SIZES:
        random = lambda n, shape: (0.02 * jax.random.normal(key, shape) + ("norm" in n)).astype(dtype)
        weights = nest({n: jax.jit(partial(random, n, shape), out_shardings=NamedSharding(
            layout.mesh, rollout_spec(n, layout)))() for n, shape in shapes(cfg).items()})
    else:
        weights = to_rollout(load(Checkpoint(name, cfg), layout.mesh), layout, dtype)
    groups = np.random.default_rng(0).integers(0, cfg.V, (args.batch // args.npq, args.prompt))
    prompts = [row.tolist() for row in groups for _ in range(args.npq)]
    runs = [[] for _ in range(3)]
    for clock in runs:
        clock.append(time.perf_counter())
        generate(weights, cfg, layout, prompts, key, max_answer=args.answer, group=args.npq,
                 progress=lambda *_: clock.append(time.perf_counter()))
    clock = min(runs[1:], key=lambda clock: clock[-1] - clock[0])
    whole, first, step = clock[-1] - clock[0], clock[1] - clock[0], (clock[-1] - clock[1]) / args.answer
    read, row = bytes_read(cfg, layout, dtype)
    mean = read + row * args.batch / row_shards(layout) * (args.prompt + args.answer / 2)
    x, total = jnp.ones(2 ** 28), jax.jit(jnp.sum)
    speed = x.nbytes / min(timeit.repeat(lambda: total(x).block_until_ready(), number=1, repeat=6)[1:])
    text = (f"prefill {groups.size / first:.0f} tok/s; decode {args.batch / step:.0f} tok/s, "
            f"{step * 1e3:.2f} ms a step that reads at least {mean / 1e9:.3f} GB, {mean / step / speed:.1%} "
            f"of the {speed / 1e9:.0f} GB/s at which a device here sums 1 GiB")
    if args.transformers:
        theirs = time_transformers(cfg, weights, layout.mesh, prompts, args.answer, args.dtype)
        text += f"; in all {whole:.3f} s, transformers {theirs:.3f} s: {theirs / whole:.2f}x"
    return text

def benchmark(argv=None):
    parser = argparse.ArgumentParser(description="The speed of rollouts, against that of the memory.")
    for name, default in FLAGS.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"default {default!r}")
    args = parser.parse_args(argv)
    for name, absent, kind in itertools.product(*(x.split(",") for x in (args.model, args.aot, args.layout))):
        *sizes, tied = SIZES.get(name, [0])
        cfg = ModelConfig(*sizes, 1e6, 1e-6, bool(tied), 32768, ()) if sizes else read_config(name)
        if absent:
            from kernel import tpu_devices
        devices = np.array(tpu_devices(absent) if absent else jax.devices()).reshape(1, -1, 1)
        if kind not in ("auto", *LAYOUTS) or args.batch % args.npq or args.batch % devices.size:
            parser.error(f"--layout is one of auto, {', '.join(LAYOUTS)}; --npq {args.npq} and {devices.size}"
                         f" devices must divide --batch {args.batch}")
        layout, why = rollout_layout(kind, cfg, Mesh(devices, ("dp", "fsdp", "tp")), args.dtype)
        print(f"{name} on {absent or devices[0, 0, 0].device_kind}: {why}", flush=True)
        text = (check_loop if absent else measure)(name, dataclasses.replace(cfg, stop_ids=()), layout, args)
        print(f"  {args.batch} rows, {args.prompt} + {args.answer} tokens: {text}", flush=True)

if __name__ == "__main__":
    benchmark()
