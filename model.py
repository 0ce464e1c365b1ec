"""Qwen2 and Qwen2.5 (dense) by hand: config, sharding, load and save, training forward, generation.

Shapes are suffixes: B rows, T query positions, S key positions, P prompt positions, D model, F feed-forward,
N query heads, K key/value heads, G = N/K, H head dim, V vocab, L layers. `wq_LDNH` has shape [L, D, N, H];
inside the scan over layers a weight keeps its name and has lost its L.

Parameters are a nested dict of arrays, layers stacked on L. Master weights are float32, sharded over the mesh
axes `dp, fsdp, tp`; a forward casts what it uses to the compute dtype, accumulates in float32, and takes
norms and softmax in float32. Architecture: Qwen2 technical report, arXiv 2407.10671.
"""

import dataclasses
import math
from collections import namedtuple
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout as DeviceLayout
from jax.experimental.layout import with_layout_constraint
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

AXES = ("dp", "fsdp", "tp")  # of a mesh
DEVICE, HOST = jax.memory.Space.Device, jax.memory.Space.Host  # where parameters rest: mostly the former
ROWS = ("dp", "fsdp")  # those that share out the rows of a batch

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

# ---------------------------------------------------------------- load and save

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

# ---------------------------------------------------------------- the layout of a rollout
class Layout(NamedTuple):
    """Where a rollout's rows, weights and cache lie."""
    kind: str
    mesh: Mesh     # the training mesh's devices, regrouped
    rows: tuple    # the axes that share out the rows
    order: str     # of the dimensions of a cache, by letter

    @property
    def cache_spec(self):
        return P(*({"B": self.rows, "K": "tp"}.get(c) for c in self.order))

# ---------------------------------------------------------------- generation: prefill and decode step
def cached_forward(weights, cfg, layout, tokens_BT, positions_BT, mask_BTS, cache, slot):
    """Forward for T new tokens whose keys and values go to cache slots slot.. -> (last hidden [B, D], cache).
    The cache is carried through the scan and updated in place: as a scan's xs and ys it would be copied, and
    also if XLA were free to lay it out otherwise, as it does for many rows."""
    order, rope = layout.order, rope_tables(positions_BT, cfg)
    at = lambda **start: [start.get(c, 0) for c in order]
    pin = jax.shard_map(  # in which it is local: outside, jax 0.10 gathers the whole cache for it
        lambda c: with_layout_constraint(c, DeviceLayout(tuple(range(len(order))))), mesh=layout.mesh,
        in_specs=layout.cache_spec, out_specs=layout.cache_spec)
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

# ---------------------------------------------------------------- generate

# ---------------------------------------------------------------- benchmark
