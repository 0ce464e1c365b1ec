"""Qwen2 and Qwen2.5 (dense) by hand: config, sharding, load and save, training forward, generation.

Shapes are suffixes: B rows, T query positions, S key positions, P prompt positions, D model, F feed-forward,
N query heads, K key/value heads, G = N/K, H head dim, V vocab, L layers. `wq_LDNH` has shape [L, D, N, H];
inside the scan over layers a weight keeps its name and has lost its L.

Parameters are a nested dict of arrays, layers stacked on L. Master weights are float32, sharded over the mesh
axes `dp, fsdp, tp`; a forward casts what it uses to the compute dtype, accumulates in float32, and takes
norms and softmax in float32. Architecture: Qwen2 technical report, arXiv 2407.10671.
"""

import dataclasses, glob, json, math, os, re
from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

ROWS = ("dp", "fsdp")  # the mesh axes that share out the rows of a batch

class CheckpointError(Exception):
    """A model directory that cannot be used: the message names the file, what it has and what it should."""

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

def read_json(path):
    """The object in a JSON file."""
    try:
        with open(path, encoding="utf-8") as f:
            value = json.load(f)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; a model is config.json, tokenizer.json and *.safetensors")
    except (OSError, ValueError) as e:
        raise CheckpointError(f"{path} is not readable JSON: {e}")
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, not an object")
    return value

def write_json(path, value):
    """Write a JSON file, which is there whole or not at all."""
    with open(aside := f"{path}.{os.getpid()}.tmp", "w", encoding="utf-8") as f:
        json.dump(value, f, indent=1)
    os.replace(aside, path)

def read_config(directory):
    """ModelConfig of a Hugging Face directory. Raises CheckpointError, by name, for all but a dense Qwen2."""
    path = os.path.join(directory, "config.json")
    c = read_json(path)
    generation = os.path.join(directory, "generation_config.json")
    try:
        rope = c.get("rope_parameters") or {}  # where transformers 5 has theta, and what was rope_scaling
        ropes = [r.get("rope_type", r.get("type", "default")) for r in (rope, c.get("rope_scaling") or {})]
        for refused, what in (
                (c.get("model_type") != "qwen2", f"model_type {c.get('model_type')!r}; only 'qwen2' is"),
                (ropes != ["default"] * 2, f"rope scaling {' '.join(ropes)}; only plain rotary embedding is"),
                (c.get("use_sliding_window"), "use_sliding_window = true; only full attention is"),
                ("sliding_attention" in (c.get("layer_types") or []), "sliding layers; only full ones is"),
                ("quantization_config" in c, "quantised weights; only float32, bfloat16 and float16 are"),
                (c.get("hidden_act", "silu") != "silu", f"hidden_act {c.get('hidden_act')!r}; only silu is")):
            if refused:
                raise CheckpointError(f"{path} has {what} supported")
        N, D = int(c["num_attention_heads"]), int(c["hidden_size"])
        stop = (c | (read_json(generation) if os.path.exists(generation) else {})).get("eos_token_id")
        cfg = ModelConfig(
            V=int(c["vocab_size"]), D=D, F=int(c["intermediate_size"]), L=int(c["num_hidden_layers"]), N=N,
            K=int(c.get("num_key_value_heads") or N), H=int(c.get("head_dim") or D // N),
            rope_theta=float(rope.get("rope_theta") or c.get("rope_theta") or 10000.0),
            rms_eps=float(c.get("rms_norm_eps", 1e-6)), tied=bool(c.get("tie_word_embeddings", False)),
            max_positions=int(c.get("max_position_embeddings", 32768)),
            stop_ids=tuple(int(i) for i in (stop if isinstance(stop, list) else [stop]) if i is not None))
        if min(cfg.V, cfg.D, cfg.F, cfg.N, cfg.K, cfg.H, cfg.L) < 1 or cfg.N % cfg.K or cfg.H % 2:
            raise ValueError(f"{cfg.N} query heads, {cfg.K} key/value heads of size {cfg.H}: all sizes must "
                             "be positive, the first a multiple of the second, the head size even")
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

def shardings(cfg, mesh, fsdp=True):
    """NamedSharding of every parameter, as a nested dict."""
    return nest({name: NamedSharding(mesh, spec(name, fsdp)) for name in shapes(cfg)})

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
        shards.append(jax.device_put(read(index), device).block_until_ready())
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, shards)

def weight_files(directory):
    """The safetensors of a model: those that its index names, or the only one."""
    index = os.path.join(directory, "model.safetensors.index.json")
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
                self.where |= {name: (f.get_slice(name), path) for name in f.keys()}
            except (SafetensorError, OSError) as e:
                raise CheckpointError(f"{path} is not a safetensors file: {e}")
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
        value = self.where[hf_name.format(layer)][0][slices].astype(np.float32, copy=False)
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
        return jnp.einsum(f"{ours}->{theirs}", a if i is None else a[i]).reshape(shape).astype(dtype)
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

def save_shards(tree, directory):
    """Write this process's shards of a tree of arrays, each once, as 'name|start,start': all that it holds,
    for its disk may be its own. The file is there whole or not at all."""
    shards = {f"{name}|{','.join(str(s.start or 0) for s in shard.index)}": shard.data
              for name, array in flatten(tree).items() for shard in array.addressable_shards}
    os.makedirs(directory, exist_ok=True)
    path = f"{directory}/shards-{jax.process_index():05}-of-{jax.process_count():05}.safetensors"
    save_file({key: np.asarray(data, order="C") for key, data in shards.items()}, path + ".tmp")
    os.replace(path + ".tmp", path)

def saved_steps(out):
    """Steps of the checkpoints `out`/step_NNNNNN that this process can load, oldest first: with its own part,
    all that it needs on a disk of its own, or with all parts, that as many other processes wrote."""
    found, own = [], f"{jax.process_index():05}-of-{jax.process_count():05}"
    for name in sorted(name for name in os.listdir(out) if re.fullmatch(r"step_\d{6}", name)):
        files = " ".join(glob.glob("*", root_dir=f"{out}/{name}"))  # another process may be removing it
        parts = re.findall(r"shards-(\d+-of-(\d+))\.safetensors(?!\S)", files)
        if own in dict(parts) or parts and len(parts) == int(parts[0][1]):
            found.append(int(name[5:]))
    return found

def load_shards(directory, tree):
    """The saved arrays in place of those of `tree`, which go; they may have been saved on any mesh."""
    pieces = {}  # array name -> {its key: (where the piece starts, its file, its key)}
    for file in sorted(name for name in os.listdir(directory) if name.endswith(".safetensors")):
        f = safe_open(os.path.join(directory, file), "np")
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
            raise CheckpointError(f"{directory} has {filled} of the {out.size} numbers wanted of {name}")
        return out
    placed = []
    for name, a in flatten(tree).items():
        a.delete()  # or its place would be taken twice
        placed.append(place(a.shape, a.sharding, partial(read, name, a.dtype)))
    return jax.tree.unflatten(jax.tree.structure(tree), placed)

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

def rotate(x, rope, dtype):
    """Rotate the pairs (i, i + H/2) of float32 [B, heads, T, H]."""
    (cos, sin), (a, b) = rope, jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(dtype)

def attention(q_BNTH, k_BKSH, v_BKSH, mask_BTS):
    """Grouped-query attention without repeating keys -> [B, N, T, H] float32; mask: what a query sees."""
    B, N, T, H = q_BNTH.shape
    q_BKGTH = q_BNTH.reshape(B, k_BKSH.shape[1], -1, T, H)
    scores = jnp.einsum("BKGTH,BKSH->BKGTS", q_BKGTH, k_BKSH, preferred_element_type=jnp.float32) * H ** -0.5
    probs = jax.nn.softmax(jnp.where(mask_BTS[:, None, None], scores, -1e30), -1).astype(v_BKSH.dtype)
    out = jnp.einsum("BKGTS,BKSH->BKGTH", probs, v_BKSH, preferred_element_type=jnp.float32)
    return out.reshape(B, N, T, H)

def layer(cfg, x_BTD, w, rope, attend):
    """One transformer layer -> (x_BTD, extra); attend(q, k, v) -> ([B,N,T,H], extra) is what queries see."""
    dtype = x_BTD.dtype
    h = rms_norm(x_BTD, w["attn_norm_LD"], cfg.rms_eps)
    q = matmul("BTD,DNH->BNTH", h, w["wq_LDNH"]) + w["bq_LNH"][:, None]
    k = matmul("BTD,DKH->BKTH", h, w["wk_LDKH"]) + w["bk_LKH"][:, None]
    v = matmul("BTD,DKH->BKTH", h, w["wv_LDKH"]) + w["bv_LKH"][:, None]
    out, extra = attend(rotate(q, rope, dtype), rotate(k, rope, dtype), v.astype(dtype))
    x_BTD = x_BTD + matmul("BNTH,NHD->BTD", out.astype(dtype), w["wo_LNHD"]).astype(dtype)
    h = rms_norm(x_BTD, w["mlp_norm_LD"], cfg.rms_eps)
    gated = jax.nn.silu(matmul("BTD,DF->BTF", h, w["w_gate_LDF"])) * matmul("BTD,DF->BTF", h, w["w_up_LDF"])
    return x_BTD + matmul("BTF,FD->BTD", gated.astype(dtype), w["w_down_LFD"]).astype(dtype), extra

def head(params):
    """The LM head [V, D]: its own, or the tied embedding."""
    return params.get("head_VD", params["embed_VD"])

def forward(params, cfg, mesh, tokens_BT, positions_BT, segments_BT, dtype):
    """The training forward: hidden states after the last norm, [B, T, D] in `dtype`; times `head`: logits.
    A token sees the tokens at or before it in its row that have its segment id. Each layer is recomputed in
    the backward (remat): what stays in memory is [L, B, T, D]."""
    with jax.named_scope("embed"):  # each device looks up its slice of D for all rows: no table is gathered
        tokens = constrain(tokens_BT, mesh, "dp", None)
        x = constrain(params["embed_VD"][tokens], mesh, "dp", None, ("fsdp", "tp"))
        x = constrain(x.astype(dtype), mesh, ROWS)
    rope = rope_tables(positions_BT, cfg)
    mask = (segments_BT[:, :, None] == segments_BT[:, None]) & jnp.tri(tokens_BT.shape[1], dtype=bool)
    @jax.checkpoint
    def body(x, w):  # FSDP: a layer's weights are cast, then gathered over fsdp, as it runs
        w = {name: constrain(a.astype(dtype), mesh, *spec(name, fsdp=False)[1:]) for name, a in w.items()}
        x, _ = layer(cfg, x, w, rope, lambda q, k, v: (attention(q, k, v, mask), None))
        return constrain(x, mesh, ROWS), None
    with jax.named_scope("layers"):
        x, _ = jax.lax.scan(body, x, params["layers"])
    return constrain(rms_norm(x, params["norm_D"].astype(dtype), cfg.rms_eps), mesh, ROWS)

# ---------------------------------------------------------------- generation
def cached_forward(params, cfg, tokens_BT, positions_BT, mask_BTS, cache, slot, dtype):
    """Forward for T new tokens whose keys and values go to cache slots slot.. -> (last hidden [B, D], cache).
    The cache is a pair [L, B, K, S, H], carried through the scan and updated in place: as a scan's xs and ys
    it would be copied whole."""
    rope = rope_tables(positions_BT, cfg)
    def body(carry, xs):
        x, cache = carry
        w, number = xs
        def attend(q, *new):
            full = tuple(jax.lax.dynamic_update_slice(c, n[None], (number, 0, 0, slot, 0))
                         for c, n in zip(cache, new))
            k, v = (jax.lax.dynamic_index_in_dim(c, number, keepdims=False) for c in full)
            return attention(q, k, v, mask_BTS), full
        return layer(cfg, x, w, rope, attend), None
    x = params["embed_VD"][tokens_BT].astype(dtype)
    (x, cache), _ = jax.lax.scan(body, (x, cache), (params["layers"], jnp.arange(cfg.L)))
    return rms_norm(x[:, -1], params["norm_D"], cfg.rms_eps), cache

def truncate(z_BV, top_k, top_p):
    """Set logits outside the top k, then outside the smallest set of mass top_p, to -inf."""
    if top_k or top_p < 1:
        sorted_BV = jnp.sort(z_BV, -1, descending=True)
        if top_k:
            sorted_BV = jnp.where(jnp.arange(z_BV.shape[-1]) < top_k, sorted_BV, -jnp.inf)
        before = jnp.cumsum(jax.nn.softmax(sorted_BV, -1), -1) - jax.nn.softmax(sorted_BV, -1)
        kept = jnp.isfinite(sorted_BV) & (before < top_p)
        threshold = jnp.min(jnp.where(kept, sorted_BV, jnp.inf), -1, keepdims=True)
        z_BV = jnp.where(z_BV >= threshold, z_BV, -jnp.inf)
    return z_BV

def draw(z_BV, u_B, block=256):
    """Sample softmax(z) by inverting its CDF at uniforms u_B in [0, 1), in blocks: one pass over V."""
    B, V = z_BV.shape
    mass = jnp.exp(z_BV - jnp.max(z_BV, -1, keepdims=True))
    mass = jnp.pad(mass, ((0, 0), (0, -V % block))).reshape(B, -1, block)
    def invert(mass_BX, target_B):
        """First index where the CDF passes the target, and how far in. An empty one is never picked, though a
        parallel cumsum rounds without being monotone."""
        cdf_BX = jnp.where(mass_BX > 0, jnp.cumsum(mass_BX, -1), -jnp.inf)
        target_B = jnp.minimum(target_B, jnp.nextafter(cdf_BX.max(-1), 0.0))
        index = jnp.argmax(cdf_BX > target_B[:, None], -1)
        return index, target_B - jnp.take_along_axis(cdf_BX - mass_BX, index[:, None], 1)[:, 0]
    blocks = mass.sum(-1)
    which, rest = invert(blocks, u_B * blocks.sum(-1))
    inside, _ = invert(mass[jnp.arange(B), which], rest)
    return (which * block + inside).astype(jnp.int32)

def sample(z_BV, key, temperature, top_k, top_p):
    """-> (token_B, its log-prob under the distribution it was drawn from); temperature 0: greedy, as at 1."""
    if temperature == 0:
        token_B = jnp.argmax(z_BV, -1).astype(jnp.int32)
    else:
        z_BV = truncate(z_BV / temperature, top_k, top_p)
        token_B = draw(z_BV, jax.random.uniform(key, z_BV.shape[:1]))
    chosen = jnp.take_along_axis(z_BV, token_B[:, None], 1)[:, 0]
    return token_B, chosen - jax.nn.logsumexp(z_BV, -1)

@partial(jax.jit, static_argnames=("cfg", "mesh", "max_answer", "temperature", "top_k", "top_p", "dtype"))
def generate(params, cfg, mesh, prompts_BP, lengths_B, key, *, max_answer, temperature=1.0, top_k=0,
             top_p=1.0, dtype=jnp.float32):
    """Answers for left-padded prompts, until every row has produced one of cfg.stop_ids or max_answer tokens.
    prompts_BP int32, the last lengths_B[b] of each row count; key a PRNG key. Returns a dict: tokens_BT int32
    [B, max_answer], the stop token last, then 0; lengths_B, stop token included; cut_B, no stop token came;
    logp_BT float32, each token's log-prob under what it was drawn from, temperature, truncation included."""
    B, prompt = prompts_BP.shape
    if jax.process_index() == 0:
        print(f"tracing generate: {B} rows, {prompt} + {max_answer} tokens, temperature {temperature}")
    rollout = jax.tree.map(lambda a, s: jax.lax.with_sharding_constraint(a.astype(dtype), s),
                           params, shardings(cfg, mesh, fsdp=False))  # gathered once, here, not in every step
    S = prompt + max_answer
    cache = 2 * (constrain(jnp.zeros((cfg.L, B, cfg.K, S, cfg.H), dtype), mesh, None, ROWS, "tp"),)
    visible_BS = jnp.arange(S) >= (prompt - lengths_B)[:, None]
    positions = jnp.maximum(jnp.arange(prompt) - (prompt - lengths_B)[:, None], 0)
    mask = visible_BS[:, None] & (jnp.arange(S) <= jnp.arange(prompt)[:, None])
    with jax.named_scope("prefill"):
        hidden_BD, cache = cached_forward(rollout, cfg, prompts_BP, positions, mask, cache, 0, dtype)
    def step(state):
        t, hidden_BD, cache, out = state
        z_BV = constrain(matmul("BD,VD->BV", hidden_BD, head(rollout)), mesh, ROWS)
        token, logp = sample(z_BV, jax.random.fold_in(key, t), temperature, top_k, top_p)
        live = out["cut_B"]
        token = jnp.where(live, token, 0)
        out = {"tokens_BT": out["tokens_BT"].at[:, t].set(token),
               "logp_BT": out["logp_BT"].at[:, t].set(jnp.where(live, logp, 0.0)),
               "lengths_B": out["lengths_B"] + live,
               "cut_B": live & ~jnp.isin(token, jnp.array(cfg.stop_ids, jnp.int32))}
        mask = visible_BS[:, None] & (jnp.arange(S) <= prompt + t)
        hidden_BD, cache = cached_forward(rollout, cfg, token[:, None], (lengths_B + t)[:, None], mask, cache,
                                          prompt + t, dtype)
        return t + 1, hidden_BD, cache, out
    rows = {"tokens_BT": jnp.zeros((B, max_answer), jnp.int32), "logp_BT": jnp.zeros((B, max_answer)),
            "lengths_B": jnp.zeros(B, jnp.int32), "cut_B": jnp.ones(B, bool)}
    rows = jax.tree.map(lambda a: constrain(a, mesh, ROWS), rows)
    with jax.named_scope("decode"):
        *_, out = jax.lax.while_loop(lambda s: (s[0] < max_answer) & s[3]["cut_B"].any(), step,
                                     (0, hidden_BD, cache, rows))
    return out
