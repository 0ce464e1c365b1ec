"""Hugging Face directories in and out, streamed shard by shard."""

import glob
import math
import os
import shutil
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

import model
from infra import files
from infra.files import CheckpointError


def read_config(directory):
    """ModelConfig of a Hugging Face directory. Raises CheckpointError, by name, for all but a dense Qwen2."""
    path = os.path.join(directory, "config.json")
    c = files.read_json(path)
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
        stop = (c | (files.read_json(generation) if os.path.exists(generation) else {})).get("eos_token_id")
        stop = [] if stop is None else stop if isinstance(stop, list) else [stop]
        if not all(type(i) is int and 0 <= i < V for i in stop):
            raise ValueError(f"eos_token_id = {stop} is not of vocab_size = {V}")
        cfg = model.ModelConfig(
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

def hf_tensors(cfg):
    """(Hugging Face name, its shape, our name, layer or None) of every tensor, in our order."""
    for name in model.shapes(cfg):
        hf_name, groups = model.TENSORS[name]
        shape = tuple(math.prod(getattr(cfg, c) for c in group) for group in groups.split())
        for i in range(cfg.L) if name.startswith("layers/") else [None]:
            yield hf_name.format(i), shape, name, i

def write_random(directory, config, seed):
    """Write config.json and random weights (normal, of `initializer_range`) as a Hugging Face directory."""
    files.write_json(os.path.join(directory, "config.json"), config)
    rng = np.random.default_rng(seed)
    save_file({name: (np.ones(shape) if "norm" in name else np.zeros(shape) if "bias" in name
                      else rng.standard_normal(shape) * config["initializer_range"]).astype(np.float32)
               for name, shape, *_ in hf_tensors(read_config(directory))},
              os.path.join(directory, "model.safetensors"), metadata={"format": "pt"})

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
    names = files.read_json(index).get("weight_map") if os.path.exists(index) else {"": "model.safetensors"}
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
        (hf_name, groups), H = model.TENSORS[name], self.cfg.H  # H is never split
        part = dict(zip(model.letters(name).lstrip("L"), index))
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
    flat, todo = {}, model.shapes(checkpoint.cfg)
    for name, shape in todo.items():
        flat[name] = place(shape, NamedSharding(mesh, model.spec(name)), partial(checkpoint.read, name))
        progress(len(flat), len(todo))
    return model.nest(flat)

def save(directory, params, cfg, mesh, dtype, file_bytes=4 << 30):
    """Write `params` as safetensors that transformers loads; process 0 writes, every process must call.
    `dtype` is a NumPy type name ("float32", "bfloat16"). Tensors are gathered one layer at a time; a file
    holds at most `file_bytes`, and an index names several. The caller adds config.json and the tokenizer."""
    dtype, flat = np.dtype(getattr(ml_dtypes, dtype, dtype)), model.flatten(params)
    @partial(jax.jit, static_argnames=("name", "shape"), out_shardings=NamedSharding(mesh, P()))
    def gather(a, i, name, shape):
        ours, theirs = model.letters(name).lstrip("L"), model.TENSORS[name][1].replace(" ", "")
        a = jax.device_put(a if i is None else a[i], model.DEVICE)
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
        files.write_json(f"{directory}/model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})

def write_final(cfg, run, params):
    """`out`/final: the weights in the type they came in, with the other files of the model they came from."""
    config, final = files.read_json(f"{run.directory}/config.json"), f"{cfg.out}/final"
    kind = config.get("torch_dtype") or config.get("dtype")
    kind = kind if kind in ("bfloat16", "float16") else "float32"
    if jax.process_index() == 0:
        shutil.rmtree(final + ".tmp", ignore_errors=True)
        os.makedirs(final + ".tmp")
    save(final + ".tmp", params, run.shape, run.mesh, kind)
    if jax.process_index() == 0:
        for name in os.listdir(run.directory):
            if name.endswith((".json", ".txt", ".jinja")) and not name.endswith(".index.json"):
                shutil.copy(f"{run.directory}/{name}", final + ".tmp")
        for name in os.listdir(final + ".tmp"):
            files.flush_to_disk(f"{final}.tmp/{name}")
        shutil.rmtree(final, ignore_errors=True)
        os.rename(final + ".tmp", final)
