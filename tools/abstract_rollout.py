"""Abstract weights and state of a rollout: only shapes, to compile `decode` for absent devices."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import model
from infra.rollout import engine, layouts, quantise
from infra.rollout.layouts import Layout, RolloutSize
from infra.rollout.sampling import Sampling
from infra.rollout.waves import Rows
from infra.update import lora
from model import ModelConfig


def abstract(a, spec: P, layout: Layout) -> jax.ShapeDtypeStruct:
    """The shape and dtype of an array, with a sharding."""
    sharding = NamedSharding(layout.mesh, spec)
    return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)


def abstract_weights(
    cfg: ModelConfig, layout: Layout, dtype, quantised: bool, lora_rank: int = 0
) -> dict:
    """Shapes and formats of a rollout's weights."""
    shapes = model.shapes(cfg)
    # As in `layouts.to_rollout`, adapters stay beside matrices that are not quantised.
    if lora_rank and not quantised:
        shapes |= lora.adapter_shapes(cfg, lora_rank)

    def place(name, a, spec):
        format_of_weight = layouts.rollout_format(name, spec, layout)
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=format_of_weight)

    weights = {}
    for name, shape in shapes.items():
        master = jax.ShapeDtypeStruct(shape, jnp.float32)
        cast = partial(quantise.cast, name, dtype=dtype, quantised=quantised)
        # A quantised matrix becomes two arrays, with a spec for each.
        a = jax.eval_shape(cast, master)
        specs = layouts.rollout_spec(name, layout, quantised)
        weights[name] = jax.tree.map(partial(place, name), a, specs)
    weights = model.nest(weights)
    layers = weights["layers"]
    # The scale of adapters does not change what is compiled.
    if layout.joins_adapters:
        join = jax.vmap(partial(model.joined_matrices, scale=1.0))
        joined = jax.eval_shape(join, layers)
        for name, matrix in joined.items():
            layers[name] = place(name, matrix, layers[name].sharding.spec)
    layers = model.adapted(layers, 1.0, are_joined=layout.joins_adapters)

    # Split the layers into stacks, as `layouts.to_rollout` does.
    stacks = []
    for n in layout.stack_sizes(cfg.L):

        def cut(a, n=n):
            shape = (n, *a.shape[1:])
            return jax.ShapeDtypeStruct(shape, a.dtype, sharding=a.format)

        stack = jax.tree.map(cut, layers)
        stacks.append(stack)
    return weights | {"layers": tuple(stacks)}


def abstract_state(cfg: ModelConfig, layout: Layout, dtype, size: RolloutSize):
    """Shapes and shardings of a rollout's DecodeState, with room for complete answers."""
    _, group = size.of_device(layout)
    empty_state = partial(
        layouts.empty_state,
        B=size.answers,
        n_prompts=size.answers // group,
        width=size.prompt_slots,
        slots=engine.slots_for(size.answer_slots, size.answer_slots),
        dtype=dtype,
        cfg=cfg,
        layout=layout,
    )

    def place(a):
        return abstract(a, layouts.spec_in_state(a, layout), layout)

    return jax.tree.map(place, jax.eval_shape(empty_state))


def lower_decode(
    model_cfg: ModelConfig, layout: Layout, dtype, size: RolloutSize, lora_rank: int = 0
):
    """Lower `decode` for the last stage of a rollout, with all of its rows."""
    weights = abstract_weights(model_cfg, layout, dtype, size.quantised, lora_rank)
    state = abstract_state(model_cfg, layout, dtype, size)
    B = size.answers
    # Every field of `Rows` has one entry per row.
    by_rows = P(layout.rows)
    integers = abstract(jax.ShapeDtypeStruct((B,), jnp.int32), by_rows, layout)
    booleans = abstract(jax.ShapeDtypeStruct((B,), bool), by_rows, layout)
    rows = Rows(prompt_length_B=integers, id_B=integers, live_B=booleans)
    key = jax.eval_shape(jax.random.key, 0)
    # Sample at temperature 1, as training does by default.
    return engine.jitted_decode(layout.platform).lower(
        weights,
        state,
        rows,
        key,
        t=0,
        until=1,
        model_cfg=model_cfg,
        layout=layout,
        steps=engine.STAGE,
        sampling=Sampling(),
    )
