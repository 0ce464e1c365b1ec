"""generate(): prefill, decode in stages, waves of rows."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import model
from infra import layouts
from infra.cluster import all_gather_hosts


# The state of a rollout: (keys, values, hidden [B, D] of the last token). Beside it, of each row: pad_B, the
# slots that its prompt leaves empty; row_B, its number among all, -1 for none; live_B.
def state_specs(layout):
    return layout.cache_spec, layout.cache_spec, P(layout.rows)

@partial(jax.jit, static_argnames=("B", "cfg", "layout", "slots", "dtype"))
def empty_state(*, B, cfg, layout, slots, dtype):
    """The state with an empty cache."""
    sizes = {"L": cfg.L, "K": cfg.K, "H": cfg.H, "B": B, "S": slots}
    cache = jnp.zeros([sizes[c] for c in layout.order], dtype)
    state = cache, cache, jnp.zeros((B, cfg.D), dtype)
    return tuple(model.constrain(a, layout.mesh, *spec) for a, spec in zip(state, state_specs(layout)))

@partial(jax.jit, static_argnames=("cfg", "layout", "group"), donate_argnames="state")
def prefill(weights, state, prompts_BP, pad_B, first, *, cfg, layout, group):
    """Run prompts and put their keys and values, `group` times each, into rows first.. of every device."""
    B, width = prompts_BP.shape
    if jax.process_index() == 0:
        print(f"tracing prefill: {B} prompts of {width} tokens")
    *empty, _ = empty_state(B=B, cfg=cfg, layout=layout, slots=width, dtype=state[2].dtype)
    positions = jnp.arange(width) - pad_B[:, None]
    mask = (positions >= 0)[:, None] & jnp.tri(width, dtype=bool)
    hidden_BD, cache = model.cached_forward(
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
def resize_state(a, index_B, *, layout, slots):
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
        partial(model.sample, temperature=temperature, top_k=top_k, top_p=top_p), mesh=mesh, check_vma=False,
        in_specs=(P(rows, "tp"), P(rows)), out_specs=P(rows))
    def step(carry):
        i, (*cache, hidden_BD), out = carry
        z_BV = model.constrain(model.matmul("BD,VD->BV", hidden_BD, model.head(weights)), mesh, rows, "tp")
        uniform = lambda row: jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, t + i), row))
        token_B, logp_B = draw(z_BV, jax.vmap(uniform)(row_B))
        live_B, slot = out["live_B"], width + t + i
        token_B = jnp.where(live_B, token_B, 0)
        out = {"tokens_BT": out["tokens_BT"].at[:, i].set(token_B), "n_B": out["n_B"] + live_B,
               "logp_BT": out["logp_BT"].at[:, i].set(jnp.where(live_B, logp_B, 0.0)),
               "live_B": live_B & ~jnp.isin(token_B, jnp.array(cfg.stop_ids, jnp.int32))}
        mask_BS = (slots >= pad_B[:, None]) & (slots <= slot)
        hidden_BD, cache = model.cached_forward(
            weights, cfg, layout, token_B[:, None], (slot - pad_B)[:, None], mask_BS[:, None], cache, slot)
        return i + 1, (*cache, hidden_BD), out
    out = {"tokens_BT": jnp.zeros((B, steps), jnp.int32), "logp_BT": jnp.zeros((B, steps)),
           "n_B": jnp.zeros(B, jnp.int32), "live_B": live_B}
    out = {name: model.constrain(a, mesh, rows) for name, a in out.items()}
    _, state, out = jax.lax.while_loop(
        lambda carry: (t + carry[0] < until) & carry[2]["live_B"].any(), step, (0, state, out))
    return state, {name: model.constrain(a, mesh) for name, a in out.items()}

def padded_length(n):
    """The least 2^k or 3 * 2^k that holds n: few enough to compile for each."""
    power = 1 << (n - 1).bit_length()
    return power * 3 // 4 if n * 4 <= power * 3 else power

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

def prefilled_state(weights, tokens, pads, ids, group, put, *, cfg, layout, slots):
    """The state of a wave after its prompts, of which a device runs some at a time: about 4,096 tokens."""
    width, n = tokens.shape[1] * max(1, group // 8), ids.shape[1] // group  # copies take memory, too
    state = empty_state(B=ids.size, slots=slots, dtype=weights["norm_D"].dtype, cfg=cfg, layout=layout)
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
    weights = model.nest({name: place(jax.ShapeDtypeStruct(shape, dtype), layouts.rollout_spec(name, layout))
                    for name, shape in model.shapes(cfg).items()})
    state = jax.eval_shape(partial(empty_state, B=B, slots=slots, dtype=dtype, **fixed))
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
    width = padded_length(int(all_gather_hosts(max(map(len, prompts))).max()))
    tokens = np.array([[0] * (width - len(p)) + p for p in prompts], np.int32)
    pads = np.array([width - len(p) for p in prompts], np.int32)
    tokens, pads = all_gather_hosts(tokens).reshape(-1, width), all_gather_hosts(pads).ravel()
    B, dtype, fixed = len(pads), weights["norm_D"].dtype, dict(cfg=cfg, layout=layout)
    (read, row), rows = layouts.bytes_read(cfg, layout, dtype), NamedSharding(layout.mesh, P(layout.rows))
    put = lambda a: jax.make_array_from_callback(a.shape, rows, a.__getitem__)
    out = {"tokens_BT": np.zeros((B, max_answer), np.int32), "logp_BT": np.zeros((B, max_answer), np.float32),
           "lengths_B": np.zeros(B, np.int32), "cut_B": np.ones(B, bool)}
    tell = lambda: progress(int((~out["cut_B"]).sum()), int(out["lengths_B"].sum()))
    waves, group = plan_waves(B, layouts.row_shards(layout), group, at_once or B)
    for ids in waves:
        state, live = None, ids >= 0  # the last wave's cache goes first
        for t in range(0, max_answer, stage):
            until, now = min(t + stage, max_answer), ids.shape[1]
            slots = min(padded_length(width + until), width + max_answer)
            fewer = fewer_rows(live.sum(1).max(), now, read, row * slots)
            if t == 0:
                state = prefilled_state(weights, tokens, pads, ids, group, put, slots=slots, **fixed)
                tell()
            elif (slots, fewer) != (before, now):
                index = np.argsort(~live, 1, kind="stable")[:, :fewer]
                ids, live = (np.take_along_axis(a, index, 1) for a in (ids, live))
                state, place = list(state), put(index.ravel())
                for i in range(3):  # one after the other, so that less is held twice
                    state[i] = resize_state(state[i], place, layout=layout, slots=slots)
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
