"""Qwen2 and Qwen2.5 (dense): config, parameters, training forward, cached forward.

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
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
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
        """Parameters in matrix products: all but an untied embedding, which is looked up."""
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
    """Raise NotImplementedError for what a config.json asks for and this file does not compute."""
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
    tied = config.get("tie_word_embeddings")
    activation = config.get("hidden_act", "silu")
    layer_types = {*(config.get("layer_types") or [])}

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
    layers = {name.removeprefix("layers/"): a for name, a in flat.items() if "/" in name}
    others = {name: a for name, a in flat.items() if "/" not in name}
    return others | {"layers": layers}


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


# ---------------------------------------------------------------- the transformer
def constrain(x, mesh: Mesh, *axes) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*axes)))


class Quantised(NamedTuple):
    """A matrix as int8 times scale: one for each output channel of its product."""

    int8: jax.Array
    scale: jax.Array  # float32; of size 1 in the dimensions that the product sums over


def dequantise(w, dtype) -> jax.Array:
    """A matrix, quantised or not, in dtype."""
    if isinstance(w, Quantised):
        w = w.int8 * w.scale
    return w.astype(dtype)


def matmul(equation: str, x, w) -> jax.Array:
    """einsum in x's dtype, accumulated and returned in float32."""
    if isinstance(w, Quantised):
        # Every int8 is exact in x's dtype. With ones for x, scales fall into the product's order.
        scale = jnp.einsum(equation, jnp.ones([1] * x.ndim), w.scale, precision="highest")
        return scale * matmul(equation, x, w.int8)
    return jnp.einsum(equation, x, w.astype(x.dtype), preferred_element_type=jnp.float32)


def rms_norm(x, scale, eps: float) -> jax.Array:
    x32 = x.astype(jnp.float32)
    mean_square = jnp.mean(x32 * x32, -1, keepdims=True)
    return (x32 * jax.lax.rsqrt(mean_square + eps) * scale).astype(x.dtype)


def rope_tables(positions_BT, cfg: ModelConfig) -> tuple:
    """cos and sin of the rotary angles, [B, 1, T, H/2] float32 (arXiv 2104.09864)."""
    inverse = cfg.rope_theta ** (-jnp.arange(0, cfg.H, 2, dtype=jnp.float32) / cfg.H)
    angle = positions_BT[:, None, :, None].astype(jnp.float32) * inverse
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([cos, cos], -1), jnp.concatenate([-sin, sin], -1)


def rotate(x, rope: tuple) -> jax.Array:
    """Rotate the pairs (i, i + H/2) of float32 [B, heads, T, H]."""
    cos, sin = rope
    # Not (2i, 2i + 1) as in the paper: weights on the hub are in this order.
    return x * cos + jnp.roll(x, x.shape[-1] // 2, -1) * sin


def attention(q_BNTH, k_BKSH, v_BKSH, mask_BTS) -> jax.Array:
    """Grouped-query attention without repeating keys -> [B, N, T, H] float32.

    Queries come scaled by H ** -0.5. mask: whether a query attends to a key.
    """
    B, N, T, H = q_BNTH.shape
    K = k_BKSH.shape[1]
    # Each G query heads in succession share one of the K heads.
    q_BKGTH = q_BNTH.reshape(B, K, -1, T, H)
    scores = matmul("BKGTH,BKSH->BKGTS", q_BKGTH, k_BKSH)
    scores = jnp.where(mask_BTS[:, None, None], scores, -1e30)
    probs = jax.nn.softmax(scores, -1)
    out = matmul("BKGTS,BKSH->BKGTH", probs.astype(v_BKSH.dtype), v_BKSH)
    return out.reshape(B, N, T, H)


def layer(cfg, x_BTD, w: dict, rope, attend: Callable, sum_parts=lambda y: y):
    """One transformer layer -> (x_BTD, extra).

    attend(q, k, v) -> ([B, N, T, H], extra): attention to the caller's keys and values, and what
    else it returns: the new cache, or None. sum_parts(y): the sum over devices that have a part of
    the heads or of F each.
    """
    dtype = x_BTD.dtype

    # Names for the policies of REMAT; matrix products are rounded here, as they may be kept.
    def save(a):
        return checkpoint_name(a.astype(dtype), "dot")

    def save_elementwise(a):
        return checkpoint_name(a, "elementwise")

    # Attention.
    h = save_elementwise(rms_norm(x_BTD, w["attn_norm_LD"], cfg.rms_eps))
    q = matmul("BTD,DNH->BNTH", h, w["wq_LDNH"]) + w["bq_LNH"][:, None]
    k = matmul("BTD,DKH->BKTH", h, w["wk_LDKH"]) + w["bk_LKH"][:, None]
    v = matmul("BTD,DKH->BKTH", h, w["wv_LDKH"]) + w["bv_LKH"][:, None]
    q = q * cfg.H**-0.5
    out, extra = attend(save(rotate(q, rope)), save(rotate(k, rope)), save(v))
    out = matmul("BNTH,NHD->BTD", save(out), w["wo_LNHD"])
    x_BTD = save(x_BTD + sum_parts(out).astype(dtype))

    # Feed-forward.
    h = save_elementwise(rms_norm(x_BTD, w["mlp_norm_LD"], cfg.rms_eps))
    gate = save(matmul("BTD,DF->BTF", h, w["w_gate_LDF"]))
    up = save(matmul("BTD,DF->BTF", h, w["w_up_LDF"]))
    h = save_elementwise(jax.nn.silu(gate) * up)
    if x_BTD.shape[1] == 1:
        # In decoding XLA would compute `up` inside the next product, where it takes longer.
        h = jax.lax.optimization_barrier(h)
    out = matmul("BTF,FD->BTD", h, w["w_down_LFD"])
    return x_BTD + sum_parts(out).astype(dtype), extra


# ---------------------------------------------------------------- the training forward
# What of a layer is kept for the backward pass, beside its input; the rest is computed again. Kept
# is what has one of these names; gathered weights have none, and so are gathered again.
REMAT = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.save_only_these_names("dot"),
    "none": jax.checkpoint_policies.save_only_these_names("dot", "elementwise"),
}
# Tokens that a device runs through a layer at once: enough for wide matrix products, and few, as
# the activations inside the layer are in memory for so many.
TOKENS_AT_ONCE = 2048


@dataclasses.dataclass(frozen=True)
class How:
    """How the training forward computes."""

    dtype: str  # of compute
    attend: Callable  # (q_BNTH, k_BKTH, v_BKTH, segments_BT) -> [B, N, T, H]: infra/attention.py
    remat: str = "full"  # a key of REMAT


# From here to `forward` all runs in a shard_map: on a device's rows, with its shards of weights.
def fsdp_axis(name):
    """The dimension of a layer's weight that fsdp splits, or None."""
    axes = spec(f"layers/{name}")[1:]
    return axes.index("fsdp") if "fsdp" in axes else None


def gather_layer(shards):
    """A layer's weights, all-gathered over fsdp; gradients are reduce-scattered."""

    def gather(name, shard):
        axis = fsdp_axis(name)
        if axis is None:
            return shard
        return jax.lax.all_gather(shard, "fsdp", axis=axis, tiled=True)

    return {name: gather(name, shard) for name, shard in shards.items()}


@jax.custom_vjp
def with_gradients_to(w, masters):
    """-> (w, masters), unchanged. w: masters rounded to the compute dtype, which the forward uses.
    Its gradients are added, in float32, to those of masters, of which no value is read."""
    return w, masters


def with_gradients_to_backward(_, grads):
    d_w, d_masters = grads
    return None, {name: d + d_w[name].astype(d.dtype) for name, d in d_masters.items()}


with_gradients_to.defvjp(lambda *args: (args, None), with_gradients_to_backward)


def look_up(embed_Vd, tokens_BT, dtype):
    """Embeddings [B, T, D]. No table is gathered: each device looks up its columns for all rows
    over fsdp, and then rows are exchanged for columns."""
    tokens = jax.lax.all_gather(tokens_BT, "fsdp", tiled=True)
    x = embed_Vd[tokens].astype(dtype)
    x = jax.lax.all_gather(x, "tp", axis=2, tiled=True)
    return jax.lax.all_to_all(x, "fsdp", split_axis=0, concat_axis=2, tiled=True)


def rows_at_once(B, T):
    """Rows of a chunk, of B: at most an eighth, as a chunk with any token is computed complete."""
    return max(1, min(TOKENS_AT_ONCE // T, B // 8))


def split_rows(a, chunk):
    """[B, ...] -> [chunks, chunk, ...], the last one padded with zeros."""
    padding = [(0, -len(a) % chunk)]
    padding += [(0, 0)] * (a.ndim - 1)
    return jnp.pad(a, padding).reshape(-1, chunk, *a.shape[1:])


def layer_of_chunk(x_BTD, w, masters, positions_BT, segments_BT, cfg, how):
    """-> (`layer` of a chunk of rows, masters unchanged); a chunk without tokens is left out."""

    def attend(q, k, v):
        return how.attend(q, k, v, segments_BT), None

    def run(x_BTD, masters):
        own_w, masters = with_gradients_to(w, masters)
        rope = rope_tables(positions_BT, cfg)
        # Heads and F are split over tp.
        sum_parts = partial(jax.lax.psum, axis_name="tp")
        x_BTD, _ = layer(cfg, x_BTD, own_w, rope, attend, sum_parts)
        return x_BTD, masters

    def leave_out(x_BTD, masters):
        return x_BTD, masters

    # The devices along tp have the same rows, so that all of them meet in the sum, or none.
    has_tokens = jnp.any(segments_BT > 0)
    return jax.lax.cond(has_tokens, run, leave_out, x_BTD, masters)


def forward_on_device(params, at_rest, tokens_BT, positions_BT, segments_BT, cfg, how):
    """`forward` of a device's rows, with its shards of the parameters."""
    B, T = tokens_BT.shape
    chunk = rows_at_once(B, T)
    positions = split_rows(positions_BT, chunk)
    segments = split_rows(segments_BT, chunk)
    remat = partial(jax.checkpoint, policy=REMAT[how.remat], prevent_cse=False)
    run_chunk = remat(partial(layer_of_chunk, cfg=cfg, how=how))

    # Remat here too, beside that of each chunk: gathered weights are not kept.
    @remat
    def run_layer(x, one_layer):
        masters, layer_at_rest = one_layer
        # Rounded before they are gathered, they take half the time.
        w = jax.device_put(layer_at_rest, DEVICE)
        w = gather_layer({name: a.astype(how.dtype) for name, a in w.items()})
        # No value of these is read, so they are not gathered; but their gradients, in float32, go
        # from chunk to chunk, and are added to where a chunk is computed.
        masters = gather_layer(masters)

        def next_chunk(masters, rows):
            x_BTD, positions_BT, segments_BT = rows
            x_BTD, masters = run_chunk(x_BTD, w, masters, positions_BT, segments_BT)
            return masters, x_BTD

        _, x = jax.lax.scan(next_chunk, masters, (x, positions, segments))
        return x, None

    with jax.named_scope("embed"):
        x_BTD = look_up(params["embed_VD"], tokens_BT, how.dtype)
    with jax.named_scope("layers"):
        layers = params["layers"], at_rest
        x, _ = jax.lax.scan(run_layer, split_rows(x_BTD, chunk), layers)
    x_BTD = x.reshape(-1, T, cfg.D)[:B]
    # Under remat, as its backward pass would keep hidden states in float32.
    norm = jax.checkpoint(rms_norm, static_argnums=2)
    return norm(x_BTD, params["norm_D"].astype(how.dtype), cfg.rms_eps)


def forward(params, cfg, mesh, rows, how, at_rest=None):
    """Hidden states after the last norm, [B, T, D] in how.dtype; times `head`, logits.
    To be differentiated in `params`, whose gradients come reduce-scattered, in float32.

    rows: `tokens`, `positions`, `segments` int32 [B, T]: a token sees those at or before it in its
    row that have its segment; segment 0 is padding, and chunks of nothing else are left out.
    For the backward pass stay [L, B, T, D], the inputs of layers, and what how.remat keeps.

    at_rest: params["layers"] where they rest in the host's memory, to be brought layer by layer.
    Those of `params` then serve for gradients only: none of their values is read, nor copied.
    """
    specs = jax.tree.map(lambda sharding: sharding.spec, shardings(cfg, mesh))
    specs.pop("head_VD", None)
    # A device's gradients of what others hold too are parts of a sum. shard_map's transpose adds
    # them over the axes that a spec leaves out: dp for matrices, for norms all of them. (Without
    # check_vma, which Pallas kernels do not pass, each psum's transpose is a psum of such parts.)
    by_row = P(ROWS)
    run = jax.shard_map(
        partial(forward_on_device, cfg=cfg, how=how),
        mesh=mesh,
        in_specs=(specs, specs["layers"], by_row, by_row, by_row),
        out_specs=by_row,
        check_vma=False,
    )
    used = {name: params[name] for name in specs}
    at_rest = at_rest or jax.lax.stop_gradient(params["layers"])
    return run(used, at_rest, rows["tokens"], rows["positions"], rows["segments"])


# ---------------------------------------------------------------- the cached forward
def cached_forward(
    weights, cfg: ModelConfig, layout, tokens_BT, positions_BT, last_B, attend: Callable, caches
) -> tuple:
    """Forward of T new tokens, with attention to a KV cache.

    -> (hidden state of each row's token number last_B after the last norm [B, D], caches).
    attend(q, k, v, layer number, cache) -> ([B, N, T, H], cache): of infra/kv_cache.py; it also
    writes keys and values of the new tokens. caches: one for each stack of layers in
    weights["layers"]. layout: of infra/layouts.py.
    """
    rope = rope_tables(positions_BT, cfg)

    def one_layer(carry, w):
        x_BTD, cache, layer_number = carry
        if layout.kind == "fsdp":
            # All-gather this layer's weights.
            w = {name: constrain(a, layout.mesh) for name, a in w.items()}
        attend_here = partial(attend, layer=layer_number, cache=cache)
        x_BTD, cache = layer(cfg, x_BTD, w, rope, attend_here)
        return (constrain(x_BTD, layout.mesh, layout.rows), cache, layer_number + 1), None

    x = jax.tree.map(lambda table: table[tokens_BT], weights["embed_VD"])
    x_BTD = constrain(dequantise(x, weights["norm_D"].dtype), layout.mesh, layout.rows)
    # The cache is carried through the scan and updated in place: as xs and ys it would be copied.
    new_caches = []
    for stack, cache in zip(weights["layers"], caches, strict=True):
        carry = x_BTD, cache, 0
        (x_BTD, cache, _), _ = jax.lax.scan(one_layer, carry, stack)
        new_caches.append(cache)
    x_BD = jnp.take_along_axis(x_BTD, last_B[:, None, None], 1)[:, 0]
    return rms_norm(x_BD, weights["norm_D"], cfg.rms_eps), tuple(new_caches)
