"""Qwen2 and Qwen2.5 (dense): config, parameters, training forward, cached forward, sampling.

Shapes are suffixes: B rows, T query positions, S key positions, D model, F feed-forward, N query
heads, K key/value heads, G = N/K, H head dim, V vocab, L layers. `wq_LDNH` has shape [L, D, N, H];
inside the scan over layers a weight keeps its name and has lost its L.

Parameters are a nested dict of arrays, layers stacked on L. Master weights are float32, sharded
over the mesh axes `dp, fsdp, tp`; a forward casts what it uses to the compute dtype, accumulates
in float32, and takes norms and softmax in float32.
Architecture: Qwen2 technical report, arXiv 2407.10671.
"""

import dataclasses
import math
from collections import namedtuple
from collections.abc import Callable, Iterable
from functools import partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout as DeviceLayout
from jax.experimental.layout import with_layout_constraint
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXES = ("dp", "fsdp", "tp")  # of a mesh
ROWS = ("dp", "fsdp")  # the axes that share out the rows of a batch
# Memory that parameters rest in; with --offload, some of them in the host's.
DEVICE = jax.memory.Space.Device
HOST = jax.memory.Space.Host


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
    tied: bool  # the LM head is the embedding
    max_positions: int
    stop_ids: tuple  # token ids that end an answer

    @property
    def n_params(self) -> int:
        return sum(math.prod(shape) for shape in shapes(self).values())

    @property
    def n_multiplied(self) -> int:
        """Parameters that a token is multiplied by: not an embedding that is no LM head."""
        return self.n_params - (0 if self.tied else self.V * self.D)


def config_from_hf(config: dict, generation: dict) -> ModelConfig:
    """The ModelConfig of a Hugging Face config.json.

    generation: its generation_config.json, which overrules the stop ids, or {}. Raises
    NotImplementedError for all but a dense Qwen2, and ValueError, TypeError and others for values
    that nothing can be made of.
    """
    refuse_unsupported(config)
    N = number(config, "num_attention_heads")
    D = number(config, "hidden_size")
    V = number(config, "vocab_size")
    stop_ids = (config | generation).get("eos_token_id")
    if not isinstance(stop_ids, list):
        stop_ids = [] if stop_ids is None else [stop_ids]
    if not all(type(i) is int and 0 <= i < V for i in stop_ids):
        raise ValueError(f"eos_token_id = {stop_ids} is not of vocab_size = {V}")
    rope = {"rope_theta": [*rope_thetas(config), 1e4][0]}
    cfg = ModelConfig(
        V=V,
        D=D,
        F=number(config, "intermediate_size"),
        L=number(config, "num_hidden_layers", end=10**4),
        N=N,
        K=number(config, "num_key_value_heads", default=N),
        H=number(config, "head_dim", default=D // N),
        rope_theta=float(number(rope, "rope_theta", kind=float, end=1e38)),
        rms_eps=float(number(config, "rms_norm_eps", default=1e-6, kind=float, end=1)),
        tied=bool(config.get("tie_word_embeddings")),
        max_positions=number(config, "max_position_embeddings", default=32768),
        stop_ids=tuple(stop_ids),
    )
    if cfg.N % cfg.K or cfg.H % 2:
        raise ValueError(
            f"{cfg.N} query heads, {cfg.K} key/value heads of size {cfg.H}: the first must "
            "be a multiple of the second, the head size even"
        )
    return cfg


def number(config: dict, name: str, default=None, kind: type = int, end: float = 2**31):
    """A positive number of a config.json, where null stands for the default."""
    value = default if config.get(name) is None else config[name]
    if type(value) not in (int, kind) or not 0 < value < end:
        raise ValueError(f"{name} = {value!r} is not a positive {kind.__name__} below {end}")
    return value


def rope_thetas(config: dict) -> list:
    """The base of the rotary angles, from each place where versions of transformers write it."""
    places = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}, config
    return [place["rope_theta"] for place in places if place.get("rope_theta") is not None]


def refuse_unsupported(config: dict) -> None:
    # transformers 5 writes rope_parameters, transformers 4 wrote rope_scaling.
    ropes = [config.get(name) or {} for name in ("rope_parameters", "rope_scaling")]
    rope_types = [rope.get("rope_type", rope.get("type", "default")) for rope in ropes]
    scaled = [kind for kind in rope_types if kind != "default"]
    rope = {**ropes[0], **ropes[1]}
    scaling = ", ".join(scaled) or rope
    is_scaled = scaled or rope.keys() - {"rope_type", "type", "rope_theta"}
    thetas = rope_thetas(config)
    model_type = config.get("model_type")
    architectures = config.get("architectures")
    activation = config.get("hidden_act", "silu")
    layer_types = {*(config.get("layer_types") or [])}
    tied = config.get("tie_word_embeddings")

    # is it refused, what the file has, what is supported
    # fmt: off
    table = [
        (model_type != "qwen2", f"model_type {model_type!r}", "'qwen2' is"),
        (architectures not in (None, ["Qwen2ForCausalLM"]),
         f"architectures {architectures}", "Qwen2ForCausalLM is"),
        (is_scaled, f"rope scaling {scaling}", "plain rotary embedding is"),
        (any(theta != thetas[0] for theta in thetas), f"rope_theta {thetas}", "one is"),
        (config.get("use_sliding_window"), "use_sliding_window = true", "full attention is"),
        (layer_types - {"full_attention"}, "sliding layers", "full ones are"),
        ("quantization_config" in config, "quantised weights", "float32, bfloat16 and float16 are"),
        (activation != "silu", f"hidden_act {activation!r}", "silu is"),
        (not isinstance(tied, bool | None),
         "no true or false for tie_word_embeddings", "these are"),
    ]
    # fmt: on
    for is_refused, found, supported in table:
        if is_refused:
            raise NotImplementedError(f"{found}; only {supported} supported")


# ---------------------------------------------------------------- parameters
# ours: (the Hugging Face tensor, its dimensions in our letters; "NH" is one dimension of N * H)
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
    "head_VD": ("lm_head.weight", "V D"),
}


def letters(name: str) -> str:
    """The dimensions of a parameter: "LDNH" of "layers/wq_LDNH"."""
    return name.rsplit("_", 1)[1]


def shapes(cfg: ModelConfig) -> dict:
    """{flat name: shape} of all parameters."""
    names = [name for name in TENSORS if not (cfg.tied and name == "head_VD")]
    return {name: tuple(getattr(cfg, letter) for letter in letters(name)) for name in names}


def spec(name: str) -> P:
    """PartitionSpec of a parameter in training."""
    dims = letters(name)
    # Matrices split D over fsdp; heads and F are split over tp.
    axes = {"N": "tp", "K": "tp", "F": "tp", "D": "fsdp"}
    if "V" in dims:
        # V may be any number, so that embedding and head split D over both.
        axes = {"D": ("fsdp", "tp")}
    elif dims in ("D", "LD"):
        # Scales of norms are complete on every device.
        axes = {}
    return P(*(axes.get(letter) for letter in dims))


def nest(flat: dict) -> dict:
    """{"layers/wq_LDNH": a} -> {"layers": {"wq_LDNH": a}}"""
    nested = {name: a for name, a in flat.items() if "/" not in name}
    layers = {name.removeprefix("layers/"): a for name, a in flat.items() if "/" in name}
    return nested | {"layers": layers}


def flatten(tree) -> dict:
    """{"layers/wq_LDNH": a} of any tree of dicts and tuples."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): a for path, a in leaves}


def shardings(cfg: ModelConfig, mesh: Mesh) -> dict:
    """NamedSharding of every parameter, as a nested dict."""
    return nest({name: NamedSharding(mesh, spec(name)) for name in shapes(cfg)})


def head(params: dict) -> jax.Array:
    """The LM head [V, D]: its own, or the tied embedding."""
    return params.get("head_VD", params["embed_VD"])


def flops(cfg: ModelConfig, lengths: Iterable[int]) -> float:
    """Operations of a forward and backward over sequences, recomputation not counted.

    6 a parameter and token, and 12 a layer, head dimension and pair of tokens of which one attends
    to the other (arXiv 2204.02311, appendix B).
    """
    of_parameters = 6 * cfg.n_multiplied
    of_attention = 6 * cfg.L * cfg.N * cfg.H
    return float(sum(of_parameters * n + of_attention * n * (n + 1) for n in lengths))


# ---------------------------------------------------------------- the transformer
def constrain(x, mesh: Mesh, *axes) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*axes)))


def matmul(equation: str, x, w) -> jax.Array:
    """einsum in x's dtype, accumulated and returned in float32."""
    return jnp.einsum(equation, x, w.astype(x.dtype), preferred_element_type=jnp.float32)


def rms_norm(x, scale, eps: float) -> jax.Array:
    x32 = x.astype(jnp.float32)
    mean_square = jnp.mean(x32 * x32, -1, keepdims=True)
    return (x32 * jax.lax.rsqrt(mean_square + eps) * scale).astype(x.dtype)


def rope_tables(positions_BT, cfg: ModelConfig) -> tuple:
    """cos and sin of the rotary angles, [B, 1, T, H/2] float32 (arXiv 2104.09864)."""
    inverse = cfg.rope_theta ** (-jnp.arange(0, cfg.H, 2, dtype=jnp.float32) / cfg.H)
    angle = positions_BT[:, None, :, None].astype(jnp.float32) * inverse
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x, rope: tuple) -> jax.Array:
    """Rotate the pairs (i, i + H/2) of float32 [B, heads, T, H]."""
    cos, sin = rope
    # Not (2i, 2i + 1) as in the paper: weights on the hub are in this order.
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def attention(q_BNTH, k_BKSH, v_BKSH, mask_BTS, order: str = "BKSH") -> jax.Array:
    """Grouped-query attention without repeating keys -> [B, N, T, H] float32.

    Queries come scaled by H ** -0.5. mask: whether a query attends to a key. order: of the
    dimensions of keys and values.
    """
    B, N, T, H = q_BNTH.shape
    K = k_BKSH.shape[order.index("K")]
    # Each G query heads in succession share one of the K heads.
    q_BKGTH = q_BNTH.reshape(B, K, -1, T, H)
    scores = matmul(f"BKGTH,{order}->BKGTS", q_BKGTH, k_BKSH)
    scores = jnp.where(mask_BTS[:, None, None], scores, -1e30)
    probs = jax.nn.softmax(scores, -1)
    out = matmul(f"BKGTS,{order}->BKGTH", probs.astype(v_BKSH.dtype), v_BKSH)
    return out.reshape(B, N, T, H)


def layer(cfg, x_BTD, w: dict, rope, attend: Callable, enter=lambda h: h, leave=lambda y: y):
    """One transformer layer -> (x_BTD, extra).

    attend(q, k, v) -> ([B, N, T, H], extra) attends to what the caller has of keys and values.
    enter and leave stand around the products of which a device may have a part of the heads or F.
    """
    dtype = x_BTD.dtype

    def save(a):
        # Named for the remat policies: products are rounded where they may be kept.
        return checkpoint_name(a.astype(dtype), "dot")

    # Attention.
    h = enter(rms_norm(x_BTD, w["attn_norm_LD"], cfg.rms_eps))
    q = matmul("BTD,DNH->BNTH", h, w["wq_LDNH"]) + w["bq_LNH"][:, None]
    k = matmul("BTD,DKH->BKTH", h, w["wk_LDKH"]) + w["bk_LKH"][:, None]
    v = matmul("BTD,DKH->BKTH", h, w["wv_LDKH"]) + w["bv_LKH"][:, None]
    q = q * cfg.H**-0.5
    out, extra = attend(save(rotate(q, rope)), save(rotate(k, rope)), save(v))
    out = matmul("BNTH,NHD->BTD", save(out), w["wo_LNHD"])
    x_BTD = save(x_BTD + leave(out).astype(dtype))

    # Feed-forward.
    h = enter(rms_norm(x_BTD, w["mlp_norm_LD"], cfg.rms_eps))
    gate = save(matmul("BTD,DF->BTF", h, w["w_gate_LDF"]))
    up = save(matmul("BTD,DF->BTF", h, w["w_up_LDF"]))
    out = matmul("BTF,FD->BTD", jax.nn.silu(gate) * up, w["w_down_LFD"])
    return x_BTD + leave(out).astype(dtype), extra


# ---------------------------------------------------------------- the training forward
# fmt: off
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
            splash_attention_kernel as splash,
        )
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
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
# fmt: on


# ---------------------------------------------------------------- the cached forward
@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the rows, weights and KV cache of a rollout lie."""

    kind: str  # replicated, tp, fsdp or maxtext; infra/layouts.py chooses
    mesh: Mesh  # the training mesh's devices, regrouped
    rows: tuple  # the mesh axes that share out the rows
    order: str  # of a cache's dimensions, by letter: "LBKSH"

    @property
    def cache_spec(self) -> P:
        axes = {"B": self.rows, "K": "tp"}
        return P(*(axes.get(letter) for letter in self.order))


def write_slots(cache, new_BKTH, layer_number, slot, layout: Layout) -> jax.Array:
    """A layer's keys or values of T new tokens go to slots slot.. of a cache, in place."""
    order = layout.order
    new = jnp.einsum(f"BKSH->{order[1:]}", new_BKTH)[None]
    starts = {"L": layer_number, "S": slot}
    cache = jax.lax.dynamic_update_slice(cache, new, [starts.get(letter, 0) for letter in order])
    # For many rows XLA would change the order of dimensions in memory, and copy the cache. Inside
    # a shard_map, as outside of one jax 0.10 all-gathers an array whose layout is constrained.
    in_order = DeviceLayout(tuple(range(len(order))))
    specs = dict(in_specs=layout.cache_spec, out_specs=layout.cache_spec)
    pin = jax.shard_map(lambda c: with_layout_constraint(c, in_order), mesh=layout.mesh, **specs)
    return pin(cache)


def cached_forward(
    weights, cfg: ModelConfig, layout: Layout, tokens_BT, positions_BT, mask_BTS, cache, slot
) -> tuple:
    """Forward of T new tokens, whose keys and values go to slots slot.. of the KV cache.

    -> (hidden state of the last token after the last norm [B, D], cache). cache: (keys, values) in
    layout.order; mask: which slots a token attends to.
    """
    rope = rope_tables(positions_BT, cfg)

    def one_layer(carry, xs):
        x_BTD, (keys, values) = carry
        w, number = xs
        if layout.kind == "fsdp":
            # All-gather this layer's weights.
            w = {name: constrain(a, layout.mesh) for name, a in w.items()}

        def attend(q, k, v):
            new_keys = write_slots(keys, k, number, slot, layout)
            new_values = write_slots(values, v, number, slot, layout)
            k_BKSH = jax.lax.dynamic_index_in_dim(new_keys, number, keepdims=False)
            v_BKSH = jax.lax.dynamic_index_in_dim(new_values, number, keepdims=False)
            out = attention(q, k_BKSH, v_BKSH, mask_BTS, layout.order[1:])
            return out, (new_keys, new_values)

        x_BTD, new_cache = layer(cfg, x_BTD, w, rope, attend)
        return (constrain(x_BTD, layout.mesh, layout.rows), new_cache), None

    x_BTD = constrain(weights["embed_VD"][tokens_BT], layout.mesh, layout.rows)
    # The cache is carried through the scan and updated in place: as xs and ys it would be copied.
    layers = weights["layers"], jnp.arange(cfg.L)
    (x_BTD, cache), _ = jax.lax.scan(one_layer, (x_BTD, tuple(cache)), layers)
    return rms_norm(x_BTD[:, -1], weights["norm_D"], cfg.rms_eps), cache


# ---------------------------------------------------------------- sampling
@dataclasses.dataclass(frozen=True)
class Sampling:
    """How a token is drawn from its logits."""

    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # only the k most likely tokens; 0 = all
    top_p: float = 1.0  # only the most likely tokens that have this mass together; 1 = all


def truncate(z_BV, sampling: Sampling) -> jax.Array:
    """Set the logits of tokens outside the top k, and then outside the top p, to -inf.

    Tokens as likely as the last one that is kept are kept, too.
    """
    if sampling.top_k == 0 and sampling.top_p >= 1:
        return z_BV
    # All logits of these rows, in descending order: V may be split over tp.
    all_BV = jax.lax.all_gather(z_BV, "tp", axis=1, tiled=True)
    sorted_BV = jnp.sort(all_BV, descending=True)
    threshold_B1 = sorted_BV[:, -1:]
    if sampling.top_k:
        threshold_B1 = sorted_BV[:, : sampling.top_k][:, -1:]
        sorted_BV = jnp.where(sorted_BV >= threshold_B1, sorted_BV, -jnp.inf)
    if sampling.top_p < 1:
        mass_BV = jnp.cumsum(jax.nn.softmax(sorted_BV), -1)
        is_enough_BV = mass_BV >= sampling.top_p * mass_BV[:, -1:]
        last_B1 = jnp.argmax(is_enough_BV, -1, keepdims=True)
        threshold_B1 = jnp.take_along_axis(sorted_BV, last_B1, 1)
    return jnp.where(z_BV >= threshold_B1, z_BV, -jnp.inf)


def invert_cdf(mass_BX, target_B) -> tuple:
    """First index where the CDF exceeds the target; how far the target is beyond what is before."""
    # An entry without mass is never chosen, though a parallel cumsum rounds without being monotone.
    cdf_BX = jnp.where(mass_BX > 0, jnp.cumsum(mass_BX, -1), -jnp.inf)
    target_B = jnp.minimum(target_B, jnp.nextafter(cdf_BX.max(-1), 0.0))
    index_B = jnp.argmax(cdf_BX > target_B[:, None], -1)
    before_BX = cdf_BX - mass_BX
    return index_B, target_B - jnp.take_along_axis(before_BX, index_B[:, None], 1)[:, 0]


def in_columns(z_BV) -> tuple:
    """This device's logits as [B, Y, 128], so that token v of the complete vocabulary lies in
    column v % 128; and how many places are left empty before the first one."""
    B, V = z_BV.shape
    if V % 128 == 0:
        return z_BV.reshape(B, -1, 128), 0
    empty = jax.lax.axis_index("tp") * V % 128
    padded = jnp.full((B, (V + 254) // 128 * 128), -jnp.inf)
    padded = jax.lax.dynamic_update_slice(padded, z_BV, (0, empty))
    return padded.reshape(B, -1, 128), empty


def sample(z_BV, u_B, sampling: Sampling) -> tuple:
    """Draw a token per row -> (token_B int32, its logprob in what it was drawn from, float32).

    Inside a shard_map: V may be split over tp, and the draws are the same. z: float32 logits;
    u: uniforms in [0, 1), at which the CDF is inverted. Greedy logprobs are those at temperature 1.
    """
    z_BV = truncate(z_BV / (sampling.temperature or 1), sampling)
    B, V = z_BV.shape
    shard = jax.lax.axis_index("tp")
    best_B = z_BV.max(-1)
    top_B = jax.lax.pmax(best_B, "tp")

    # Mass per column of the vocabulary, on each of Z shards and in all.
    z_BYX, empty = in_columns(z_BV)
    mass_BX = jnp.exp(z_BYX - top_B[:, None, None]).sum(1)
    mass_ZBX = jax.lax.all_gather(mass_BX, "tp")
    mass_BX = mass_ZBX.sum(0)
    total_B = mass_BX.sum(-1)

    if sampling.temperature == 0:
        # The first of the most likely tokens.
        last = V * jax.lax.axis_size("tp") - 1
        best_token_B = shard * V + jnp.argmax(z_BV, -1)
        token_B = jax.lax.pmin(jnp.where(best_B == top_B, best_token_B, last), "tp")
    else:
        # A cumsum over 128 columns, one over the shards, and one down a column cost less than one
        # over V, and round less.
        column_B, rest_B = invert_cdf(mass_BX, u_B * total_B)
        shard_B, rest_B = invert_cdf(mass_ZBX[:, jnp.arange(B), column_B].T, rest_B)
        z_BY = jnp.take_along_axis(z_BYX, column_B[:, None, None], 2)[:, :, 0]
        y_B, _ = invert_cdf(jnp.exp(z_BY - top_B[:, None]), rest_B)
        token_B = shard * V + y_B * 128 + column_B - empty
        # Only the shard that has the token knows which it is.
        token_B = jax.lax.psum(jnp.where(shard_B == shard, token_B, 0), "tp")

    # Its logit, from the shard that has it.
    local_B = token_B - shard * V
    is_here_B = (local_B >= 0) & (local_B < V)
    z_B = jnp.take_along_axis(z_BV, jnp.clip(local_B, 0, V - 1)[:, None], 1)[:, 0]
    z_B = jax.lax.psum(jnp.where(is_here_B, z_B, 0.0), "tp")
    return token_B.astype(jnp.int32), z_B - top_B - jnp.log(total_B)
