"""The training state, {params, opt, and with --beta also ref}, and the memory that holds it.

Master weights and optimizer state are float32 and sharded over the mesh; --offload keeps some of
them in the host's memory. With --lora, params, opt and ref cover the adapters alone, and the state
also has `base`, the frozen weights. The trainer passes in its optimizer: optimizer(cfg, name) ->
the optax transformation for the parameter `name`.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import model
from infra.data import hf
from infra.host import chips
from infra.host.console import progress
from infra.update import lora
from model import DEVICE, HOST


def is_vector(name: str) -> bool:
    """Whether a parameter is a bias or the scale of a norm, not a matrix."""
    return model.letters(name) in ("D", "LD", "LH", "LNH", "LKH")


def memory_of(name: str, offload: str) -> tuple:
    """Returns (the memory that holds a parameter, the memory that holds its optimizer state)."""
    # Norms and biases take little memory, and XLA for TPUs does not slice small arrays on the host.
    if offload == "none" or is_vector(name):
        return DEVICE, DEVICE
    return (HOST if offload == "params" else DEVICE), HOST


def is_stepped_by_layer(name: str, offload: str) -> bool:
    """Whether an optimizer step brings one layer of a parameter at a time to the device."""
    _, opt_memory = memory_of(name, offload)
    return name.startswith("layers/") and opt_memory == HOST


def step_in_place(step, param, opt_state, grad, name: str, offload: str) -> tuple:
    """Returns the (param, opt_state) that step(param, opt_state, grad) returns, each in the memory
    that holds it. The step runs on the device. If the optimizer state of a parameter is offloaded
    and the parameter stacks layers, the step runs for one layer at a time.
    """
    param_memory, opt_memory = memory_of(name, offload)
    # Scalars, such as Adam's step count, stay on the device.
    opt_memories = jax.tree.map(lambda a: opt_memory if a.ndim else DEVICE, opt_state)

    def step_on_device(stored, grad):
        param, opt_state = jax.device_put(stored, DEVICE)
        new = step(param, opt_state, grad)
        return jax.device_put(new, (param_memory, opt_memories))

    stored = param, opt_state
    if not is_stepped_by_layer(name, offload):
        return step_on_device(stored, grad)

    def step_of_layer(i, stored):
        def layer(a):
            return jax.lax.dynamic_index_in_dim(a, i, keepdims=False)

        def with_layer(a, new):
            return jax.lax.dynamic_update_index_in_dim(a, new, i, 0)

        old, grad_of_layer = jax.tree.map(layer, (stored, grad))
        new = step_on_device(old, grad_of_layer)
        # As the carry of the loop, the arrays are updated in place, in the host's memory too.
        return jax.tree.map(with_layer, stored, new)

    L = param.shape[0]

    # Scalars are the same for all layers.
    def repeated(a):
        return a if a.ndim else jnp.full(L, a)

    def once(a):
        return a if a.ndim > 1 else a[0]

    stored = jax.tree.map(repeated, stored)
    stored = jax.lax.fori_loop(0, L, step_of_layer, stored)
    return jax.tree.map(once, stored)


def abstract_state(cfg, model_cfg, mesh, optimizer) -> dict:
    """Shapes, dtypes and shardings of the state. This machine need not have the mesh's devices."""
    params = {}
    opt = {}
    ref = {}
    for name, shape in lora.trained_shapes(cfg, model_cfg).items():
        on_device = NamedSharding(mesh, model.spec(name))
        places = {DEVICE: on_device, HOST: chips.in_host_memory(on_device)}
        param_memory, opt_memory = memory_of(name, cfg.offload)
        param = jax.ShapeDtypeStruct(shape, jnp.float32)
        # The optimizer's arrays have the parameter's shape, and so its sharding.
        opt_state = jax.eval_shape(optimizer(cfg, name).init, param)
        params[name] = with_sharding(param, places[param_memory])
        opt[name] = with_sharding(opt_state, places[opt_memory])
        # The reference is never updated, so it is kept in the compute dtype.
        compute = jax.ShapeDtypeStruct(shape, jnp.dtype(cfg.dtype))
        ref[name] = with_sharding(compute, on_device)
    state = {"params": model.nest(params), "opt": opt}
    if cfg.beta:
        state["ref"] = model.nest(ref)
    if cfg.lora:
        state["base"] = abstract_base(cfg, model_cfg, mesh)
    return state


def abstract_base(cfg, model_cfg, mesh) -> dict:
    """Shapes of the frozen weights, which are in the compute dtype, since nothing updates them."""
    base = {}
    for name, shape in model.shapes(model_cfg).items():
        # Frozen weights are sharded like trained ones.
        sharding = NamedSharding(mesh, model.spec(name))
        base[name] = jax.ShapeDtypeStruct(shape, jnp.dtype(cfg.dtype), sharding=sharding)
    return model.nest(base)


def weights_of(state: dict, trained: str = "params") -> dict | None:
    """All weights of the policy, or of the reference if `trained` is "ref": with --lora, the frozen
    weights together with the adapters. None if the state has no reference."""
    if "base" not in state or trained not in state:
        return state.get(trained)
    # Make a new dict of the same arrays. Adapters have other names, so they replace no weight.
    base = state["base"]
    return base | {"layers": base["layers"] | state[trained]["layers"]}


def trained_part(weights: dict, cfg) -> dict:
    """The part of the policy's weights that is trained: the adapters with --lora, or else all."""
    if not cfg.lora:
        return weights
    # Only layers have adapters.
    layers = weights["layers"]
    return {"layers": {name: a for name, a in layers.items() if model.is_adapter(name)}}


def without_base(state: dict) -> dict:
    """The part of a state that goes into checkpoints."""
    # The frozen weights are in the files that the run started from.
    return {name: part for name, part in state.items() if name != "base"}


def with_sharding(tree, sharding):
    """Returns the tree's shapes with this sharding. Scalars, such as Adam's step count, are
    replicated on all devices."""
    replicated = NamedSharding(sharding.mesh, P())

    def place(a):
        is_scalar = a.ndim == 0
        own_sharding = replicated if is_scalar else sharding
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=own_sharding)

    return jax.tree.map(place, tree)


def abstract_gradients(cfg, model_cfg, mesh, optimizer) -> dict:
    """Shapes of the gradients, which are on the devices even if parameters are offloaded."""
    # Gradients have the shapes, dtypes and shardings of parameters that are not offloaded.
    nothing_offloaded = dataclasses.replace(cfg, offload="none")
    return abstract_state(nothing_offloaded, model_cfg, mesh, optimizer)["params"]


def abstract_rows(fields: dict, micro_batch: int, width: int, mesh) -> dict:
    """Shapes of a micro-batch. fields: {name: dtype}. micro_batch: rows per device."""
    shards = mesh.shape["dp"] * mesh.shape["fsdp"]
    # Each device's rows are contiguous.
    sharding = NamedSharding(mesh, P(model.ROWS))
    shape = (shards * micro_batch, width)
    rows = {}
    for name, dtype in fields.items():
        rows[name] = jax.ShapeDtypeStruct(shape, dtype)
    return with_sharding(rows, sharding)


def initial_state(
    weights: hf.ModelFiles, wanted: dict, cfg, mesh, optimizer, adapters: dict | None
) -> dict:
    """The state before the first step, without `base`, from the model's files. wanted: from
    `abstract_state`. adapters: the result of lora.read."""
    shardings = jax.tree.map(lambda a: a.sharding, wanted)
    if cfg.lora:
        params = lora.first_adapters(adapters, cfg, weights.cfg, shardings["params"])
    else:
        # Load parameters to the devices. If they are offloaded, device_put below moves them.
        params = hf.load(weights, mesh, partial(progress, "loading weights"))
    opt = {}
    for name, param in model.flatten(params).items():
        # Compile init, so that each array is created in the memory that will hold it.
        init = jax.jit(optimizer(cfg, name).init, out_shardings=shardings["opt"][name])
        opt[name] = init(param)
    state = {"params": jax.device_put(params, shardings["params"]), "opt": opt}
    if cfg.beta:
        state["ref"] = reference(params, cfg.dtype)
    return state


@partial(jax.jit, static_argnames="dtype")
def reference(params, dtype):
    """The KL's reference: a copy of `params` in `dtype`, on the devices, with the same sharding."""
    return jax.tree.map(lambda a: jax.device_put(a, model.DEVICE).astype(dtype), params)
