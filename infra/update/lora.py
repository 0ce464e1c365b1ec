"""LoRA (arXiv 2106.09685): adapters for the matrices of all layers, and their files for PEFT.

With --lora R, x W becomes x W + scale (x A) B, with scale = lora_alpha / R. Only A and B
are trained: they are the `params` of the state, in float32. The model that the run starts from is
the state's `base`, in the compute dtype. The names of A and B end in their shapes, as all names of
parameters do, so the code that shards, gathers and updates parameters also serves adapters.
"""

import math
import os
import zlib
from functools import partial

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import model
from infra.data import hf
from infra.host import files
from infra.host.console import check, progress, warn
from infra.host.files import CheckpointError

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
# Which model the adapters were trained on: the result of `base_of`. PEFT does not read this file.
BASE = "base.json"
# Settings of PEFT that change what an adapter computes, and the value that this file supports.
PLAIN_LORA = {
    "peft_type": "LORA",
    "bias": "none",
    "use_rslora": False,
    "use_dora": False,
    "fan_in_fan_out": False,
    "modules_to_save": [],
    "rank_pattern": {},
    "alpha_pattern": {},
    "layers_to_transform": [],
    "alora_invocation_tokens": [],
}
# PEFT changes the base when it loads adapters with these values of init_lora_weights.
BASE_CHANGING = "pissa", "olora", "corda", "lora_ga"


# ---------------------------------------------------------------- names and shapes
def adapted_matrices(model_cfg: model.ModelConfig) -> dict:
    """{flat name: shape} of the matrices that get adapters: all matrices of the layers."""
    return {
        name: shape
        for name, shape in model.shapes(model_cfg).items()
        if name.startswith("layers/") and "D" in model.letters(name) and len(shape) > 2
    }


def adapter_shapes(model_cfg: model.ModelConfig, rank: int) -> dict:
    """{flat name: shape} of all adapters."""
    shapes = {}
    for matrix in adapted_matrices(model_cfg):
        for name in model.adapter_names(matrix):
            # The rank is the only size that the model's config does not have.
            sizes = [
                rank if letter == "R" else getattr(model_cfg, letter)
                for letter in model.letters(name)
            ]
            shapes[name] = tuple(sizes)
    return shapes


def trained_shapes(cfg, model_cfg: model.ModelConfig) -> dict:
    """{flat name: shape} of the parameters that are trained: the adapters, or all."""
    if cfg.lora:
        return adapter_shapes(model_cfg, cfg.lora)
    return model.shapes(model_cfg)


def check_rank(cfg, model_cfg: model.ModelConfig) -> None:
    """Exit with code 2 if the rank exceeds the hidden size, the largest rank of these matrices."""
    check(
        cfg.lora <= model_cfg.D,
        f"lora = {cfg.lora} is more than the hidden size {model_cfg.D}, the largest rank that "
        "an adapted matrix can have; try --lora 16",
    )


def flops_of_a_token(cfg, model_cfg: model.ModelConfig) -> int:
    """FLOPs that --lora adds per token of a packed sequence; negative if it saves FLOPs.

    Training takes six FLOPs per parameter and token. A frozen parameter takes four, since its
    gradient is not computed.
    """
    if not cfg.lora:
        return 0
    in_adapters = sum(math.prod(shape) for shape in adapter_shapes(model_cfg, cfg.lora).values())
    return 6 * in_adapters - 2 * model_cfg.n_multiplied


# ---------------------------------------------------------------- the state's arrays
def load_base(weights: hf.ModelFiles, cfg, mesh) -> dict:
    """The frozen weights, nested, in the compute dtype, sharded as in training."""
    return hf.load(weights, mesh, partial(progress, "loading weights"), cfg.dtype)


def random_adapters(model_cfg: model.ModelConfig, rank: int, seed: int) -> dict:
    """{flat name: float32 NumPy array} of new adapters: B is 0, and A is normal with variance
    1 / (its number of inputs). The values do not depend on the mesh."""
    adapters = {}
    for number, (name, shape) in enumerate(adapter_shapes(model_cfg, rank).items()):
        # B begins with L and R, and A ends with R.
        if model.letters(name).startswith("LR"):
            adapters[name] = np.zeros(shape, np.float32)
        else:
            # Each array has its own generator, so other arrays' sizes do not change its values.
            rng = np.random.default_rng([seed, number])
            inputs = math.prod(shape[1:-1])
            adapters[name] = rng.standard_normal(shape, np.float32) * np.float32(inputs**-0.5)
    return adapters


def first_adapters(found: dict | None, cfg, model_cfg, shardings: dict) -> dict:
    """The adapters that a run starts from, nested, on the devices.

    found: the result of `read` for --adapter, or None for new adapters.
    """
    values = found or random_adapters(model_cfg, cfg.lora, cfg.seed)
    placed = {}
    for name, sharding in model.flatten(shardings).items():
        # Every process has the complete array, and takes its own shards of it.
        a = values[name]
        placed[name] = hf.place(a.shape, sharding, a.__getitem__)
    return model.nest(placed)


# ---------------------------------------------------------------- which model is the base
def base_of(cfg, weights: hf.ModelFiles) -> dict:
    """The base's name, and the CRC-32 of each of its files, to keep in checkpoints."""
    paths = sorted({path for _, path in weights.tensors.values()})
    checksums = {}
    for number, path in enumerate(paths, 1):
        checksums[os.path.basename(path)] = f"{checksum(path):08x}"
        progress("checksums of the base", number, len(paths))
    return {"model": cfg.model, "files": checksums}


def checksum(path: str) -> int:
    crc = 0
    # Read piece by piece: a file may be larger than the free memory of the host.
    with open(path, "rb") as f:
        while data := f.read(1 << 24):
            crc = zlib.crc32(data, crc)
    return crc


def difference(was: dict, now: dict) -> str:
    """How two results of `base_of` differ, and what to do; "" if the weights are the same."""
    if not was:
        return "its checkpoint comes from a run without --lora; drop --lora"
    # The name does not matter: a directory may have been moved.
    found = was["files"]
    if found == now["files"]:
        return ""
    # Report the first file that differs.
    names = found | now["files"]
    name = min(name for name in names if found.get(name) != now["files"].get(name))
    before = found.get(name, "missing")
    after = now["files"].get(name, "missing")
    return (
        f"the adapters belong to {was['model']}, whose {name} had the checksum {before}; in "
        f"{now['model']} it is {after}; use the files that the adapters were trained on"
    )


# ---------------------------------------------------------------- PEFT's files
def module_of(matrix: str, layer: int) -> str:
    """The name that PEFT gives to an adapted module, without lora_A or lora_B."""
    hf_name, _, _ = model.TENSORS[matrix]
    return "base_model.model." + hf_name.format(layer).removesuffix(".weight")


def write(
    directory: str, params: dict, cfg, model_cfg: model.ModelConfig, mesh, base: dict
) -> None:
    """Write the adapters of the policy's weights to a new directory, in float32, as PEFT does.

    Every process must call this; process 0 writes. base: the result of `base_of`. Its `model` is
    where PEFT finds the base.
    """
    # Adapters are small, so copy one whole adapter at a time to every device.
    to_all = jax.jit(lambda a: a, out_shardings=NamedSharding(mesh, P()))
    tensors = {}
    for matrix in adapted_matrices(model_cfg):
        name_a, name_b = (name.removeprefix("layers/") for name in model.adapter_names(matrix))
        a = np.asarray(to_all(params["layers"][name_a]))
        b = np.asarray(to_all(params["layers"][name_b]))
        for i in range(model_cfg.L):
            # PEFT's A is [R, inputs], and its B is [outputs, R].
            module = module_of(matrix, i)
            tensors[f"{module}.lora_A.weight"] = transposed(a[i].reshape(-1, cfg.lora))
            tensors[f"{module}.lora_B.weight"] = transposed(b[i].reshape(cfg.lora, -1))
    if jax.process_index() != 0:
        return
    os.makedirs(directory)
    # PEFT finds the modules by the last part of their names, such as q_proj.
    modules = {module_of(matrix, 0).rpartition(".")[2] for matrix in adapted_matrices(model_cfg)}
    # PEFT takes its own defaults for settings that are left out.
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base["model"],
        "r": cfg.lora,
        "lora_alpha": cfg.lora_alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(modules),
        "inference_mode": True,
    }
    files.write_json(f"{directory}/{CONFIG}", about)
    files.write_json(f"{directory}/{BASE}", base)
    hf.save_safetensors(f"{directory}/{WEIGHTS}", tensors)


def transposed(a: np.ndarray) -> np.ndarray:
    # safetensors writes the bytes in the order they have in memory.
    return np.ascontiguousarray(a.T)


def read(cfg, model_cfg: model.ModelConfig) -> dict | None:
    """The adapters in the directory --adapter, {flat name: float32 NumPy array}, or None without
    the flag.

    Exits with code 2 if rank or alpha differ from the flags. Raises CheckpointError if the files
    are not adapters for all matrices of this model.
    """
    if not cfg.adapter:
        return None
    directory = cfg.adapter
    about = files.read_json(f"{directory}/{CONFIG}")
    for flag, name in ("lora", "r"), ("lora_alpha", "lora_alpha"):
        found = about.get(name)
        if found is None:
            raise CheckpointError(f"{directory}/{CONFIG} has no {name}")
        if type(found) is not int:
            raise CheckpointError(
                f"{directory}/{CONFIG} has {name} = {found!r}; only integers are supported"
            )
        check(
            found == getattr(cfg, flag),
            f"{flag} = {getattr(cfg, flag)}, but {directory}/{CONFIG} has {name} = {found}; try "
            f"--{flag} {found}",
        )
    init = str(about.get("init_lora_weights"))
    if init.startswith(BASE_CHANGING):
        raise CheckpointError(
            f"{directory}/{CONFIG} has init_lora_weights = {init!r}, which changes the base; "
            "save the adapters with PEFT's path_initial_model_for_weight_conversion"
        )
    for name, supported in PLAIN_LORA.items():
        # A setting that is null or missing has its default.
        found = about.get(name) or supported
        if found != supported:
            raise CheckpointError(
                f"{directory}/{CONFIG} has {name} = {found!r}; only {supported!r} is supported"
            )
    return read_tensors(f"{directory}/{WEIGHTS}", cfg, model_cfg)


def check_base(cfg, base: dict) -> None:
    """Exit with code 2 if base.json in --adapter records other weights than `base`, the result of
    `base_of`. Without base.json, warn if PEFT's config names another base."""
    path = f"{cfg.adapter}/{BASE}"
    if os.path.exists(path):
        fault = difference(files.read_json(path), base)
        check(not fault, f"adapter = {cfg.adapter} cannot be used: {fault}")
        return
    # PEFT writes only the name of the base.
    name = files.read_json(f"{cfg.adapter}/{CONFIG}").get("base_model_name_or_path")
    if name != cfg.model and jax.process_index() == 0:
        warn(
            f"the adapters in {cfg.adapter} were trained on {name}; they are useful only if "
            f"{cfg.model} has the same weights"
        )


def read_tensors(path: str, cfg, model_cfg: model.ModelConfig) -> dict:
    """The adapters in adapter_model.safetensors, as `read` returns them. Raises CheckpointError."""
    tensors = hf.read_safetensors(path)
    shapes = adapter_shapes(model_cfg, cfg.lora)
    adapters = {}
    for matrix in adapted_matrices(model_cfg):
        for name, side in zip(model.adapter_names(matrix), "AB", strict=True):
            shape = shapes[name]
            # PEFT's A is [R, inputs], and its B is [outputs, R].
            layer_shape = (-1, cfg.lora) if side == "A" else (cfg.lora, -1)
            wanted = np.empty(shape[1:]).reshape(layer_shape).T.shape
            # A missing tensor counts as one of size 0.
            layers = []
            for i in range(model_cfg.L):
                # Remove each tensor that is read: any tensor left at the end does not belong here.
                key = f"{module_of(matrix, i)}.lora_{side}.weight"
                found = tensors.pop(key, np.empty(0))
                if found.shape != wanted or not np.isfinite(found).all():
                    raise CheckpointError(
                        f"{path}: {key} must have shape {wanted}, and no NaN or infinity; its "
                        f"shape is {found.shape}, where (0,) means missing; only adapters for all "
                        "matrices are supported"
                    )
                layers.append(found.T.reshape(shape[1:]))
            adapters[name] = np.stack(layers).astype(np.float32)
    if tensors:
        raise CheckpointError(
            f"{path} has a tensor {min(tensors)}, which is not an adapter of a layer"
        )
    return adapters
