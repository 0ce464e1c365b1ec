"""Load and save Hugging Face directories, streamed shard by shard.

Host memory holds only parts of a large model: loading holds one device's shard of one parameter;
saving holds one file of a few gigabytes.
"""

import glob
import math
import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

import model
from infra.data import chat
from infra.host import files
from infra.host.files import CheckpointError


# ---------------------------------------------------------------- config
def read_config(directory: str) -> model.ModelConfig:
    """Returns the ModelConfig of a Hugging Face directory. Raises CheckpointError for a model that
    model.py does not support; the message names the file, what it has and what is supported."""
    path = os.path.join(directory, "config.json")
    config = files.read_json(path)
    # The config.json of a run has the run's flags.
    if "model_type" not in config and "commit" in config:
        raise CheckpointError(f"{directory} is a run, not a model; try {directory}/final")
    # This optional file may name more token ids that end an answer.
    generation = files.read_optional_json(os.path.join(directory, "generation_config.json"))
    try:
        return model.config_from_hf(config, generation)
    except NotImplementedError as e:
        raise CheckpointError(f"{path} has {e}") from e
    # A wrong type somewhere in the JSON must not become a traceback.
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as e:
        raise CheckpointError(f"{path} lacks a usable value: {type(e).__name__} {e}") from e


# ---------------------------------------------------------------- names
class Tensor(NamedTuple):
    """A tensor of a Hugging Face model, and where its values are in our parameters."""

    hf_name: str
    hf_shape: tuple[int, ...]
    parameter: str  # our flat name, such as "layers/wq_LDNH"
    layer: int | None  # index in the parameter's dimension L, if it has one


def hf_tensors(cfg: model.ModelConfig) -> Iterator[Tensor]:
    """Yields every tensor of a Hugging Face model of this shape, in the order of our parameters."""
    for parameter in model.shapes(cfg):
        hf_name, dimensions, _ = model.TENSORS[parameter]
        # "NH D" is a matrix [N * H, D].
        hf_shape = tuple(
            math.prod(getattr(cfg, letter) for letter in dimension)
            for dimension in dimensions.split()
        )
        layers = range(cfg.L) if parameter.startswith("layers/") else [None]
        for layer in layers:
            yield Tensor(hf_name.format(layer), hf_shape, parameter, layer)


def write_random(directory: str, config: dict, seed: int) -> None:
    """Write config.json, and random float32 weights from a normal distribution with standard
    deviation `initializer_range`."""
    # Write the config first: the names and shapes of the tensors follow from it.
    files.write_json(os.path.join(directory, "config.json"), config)
    rng = np.random.default_rng(seed)
    weights = {}
    for tensor in hf_tensors(read_config(directory)):
        # Norms start at 1 and biases at 0, as in a model that transformers initialises.
        if "norm" in tensor.hf_name:
            weight = np.ones(tensor.hf_shape)
        elif "bias" in tensor.hf_name:
            weight = np.zeros(tensor.hf_shape)
        else:
            weight = rng.standard_normal(tensor.hf_shape) * config["initializer_range"]
        weights[tensor.hf_name] = weight.astype(np.float32)
    save_safetensors(os.path.join(directory, "model.safetensors"), weights)


def read_safetensors(path: str) -> dict[str, np.ndarray]:
    """Returns all tensors of a small file. Raises CheckpointError."""
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError) as e:
        raise CheckpointError(f"{path} is not a safetensors file: {e}") from e


def save_safetensors(path: str, weights: dict[str, np.ndarray]) -> None:
    try:
        # transformers refuses a file that does not name the library it was written for.
        save_file(weights, path, metadata={"format": "pt"})
    # A full disk, for example, raises a SafetensorError, not an OSError.
    except SafetensorError as e:
        raise OSError(f"{path} cannot be written: {e}") from None


# ---------------------------------------------------------------- load
def weight_files(directory: str) -> list[str]:
    """Returns the paths of a model's safetensors: all files of its index, or the only file."""
    refuse_other_weights(directory)
    # Models of more than a few gigabytes have several files and an index.
    index = os.path.join(directory, "model.safetensors.index.json")
    if not os.path.exists(index):
        only = os.path.join(directory, "model.safetensors")
        if not os.path.exists(only):
            if parts := glob.glob(f"{glob.escape(directory)}/model-*-of-*.safetensors"):
                raise CheckpointError(
                    f"{directory} has {len(parts)} parts of a model, but lacks their list, "
                    "model.safetensors.index.json"
                )
            # A download from the hub leaves out all other formats.
            convert = conversion('"HUB/ID"', "DIR")
            raise CheckpointError(
                f"{directory} has no model.safetensors; if the hub has the model in another "
                f"format, run {convert} and give --model DIR"
            )
        return [only]
    weight_map = files.read_json(index).get("weight_map")
    names = weight_map.values() if isinstance(weight_map, dict) else [weight_map]
    for name in names:
        # A name that contains folders could lead to any file on the machine.
        if not isinstance(name, str) or os.path.basename(name) != name:
            raise CheckpointError(f"{index} names {name!r}, which is not a file of this directory")
    return [os.path.join(directory, name) for name in sorted(set(names))]


def refuse_other_weights(directory: str) -> None:
    """Raise CheckpointError if the weights are in other formats only. The message has the command
    that converts them."""
    others = [
        name
        for name in sorted(os.listdir(directory))
        if name.endswith((".bin", ".gguf", ".pt", ".pth"))
    ]
    if not others or glob.glob(f"{glob.escape(directory)}/*.safetensors"):
        return
    # transformers finds other formats by their usual names, but must be told a GGUF file's name.
    gguf = f', gguf_file="{others[0]}"' if others[0].endswith("gguf") else ""
    convert = conversion(f'"{directory}"{gguf}', directory)
    raise CheckpointError(
        f"{directory} has weights as {others[0]}, and no *.safetensors; convert them: {convert}"
    )


def conversion(source: str, directory: str) -> str:
    """Returns a command that writes a model as safetensors. source: the arguments of
    from_pretrained."""
    return chat.conversion("AutoModelForCausalLM", source, directory)


class ModelFiles:
    """The safetensors files of a model, held open.

    The names, shapes and dtypes of all tensors are checked before any weight is read, so that a
    mistake ends the run at once. Raises CheckpointError.
    """

    def __init__(self, directory: str, cfg: model.ModelConfig):
        self.cfg = cfg
        # {tensor's name: (safetensors' object that reads parts of it, the path of its file)}
        self.tensors = open_tensors(directory)
        self.check_tensors(directory)
        if cfg.tied and "lm_head.weight" in self.tensors:
            self.check_head()

    def check_tensors(self, directory):
        wanted = {tensor.hf_name: tensor.hf_shape for tensor in hf_tensors(self.cfg)}
        for name, shape in wanted.items():
            if name not in self.tensors:
                raise CheckpointError(
                    f"{directory} lacks the tensor {name}, which TENSORS (model.py) and its "
                    "config.json call for"
                )
            # Shape and dtype come from the file's header.
            tensor, path = self.tensors[name]
            found = tuple(tensor.get_shape())
            if found != shape:
                raise CheckpointError(
                    f"{path}: {name} has shape {found}, config.json calls for {shape}"
                )
            dtype = tensor.get_dtype()
            if dtype not in ("F32", "BF16", "F16"):
                raise CheckpointError(
                    f"{path}: {name} has type {dtype}; quantised weights are not supported"
                )
        # Some libraries also save buffers that follow from the config, or save the tied embedding a
        # second time as the head.
        derived = ["rotary_emb.inv_freq"]
        if self.cfg.tied:
            derived.append("lm_head.weight")
        extra = [
            name
            for name in self.tensors
            if name not in wanted and not name.endswith(tuple(derived))
        ]
        if extra:
            raise CheckpointError(
                f"{directory}: its config.json does not call for {len(extra)} of its tensors, such "
                f"as {extra[0]}"
            )

    def check_head(self):
        """Raise CheckpointError unless a tied model's saved head equals its embedding."""
        head, path = self.tensors["lm_head.weight"]
        embedding, _ = self.tensors["model.embed_tokens.weight"]
        same = head.get_shape() == embedding.get_shape()
        # Compare piece by piece, because the matrices are large.
        for start in range(0, self.cfg.V, 8192):
            rows = slice(start, min(start + 8192, self.cfg.V))
            same = same and np.array_equal(head[rows], embedding[rows])
        if not same:
            raise CheckpointError(
                f"{path}: lm_head.weight differs from the embedding, but config.json says "
                "tie_word_embeddings = true; set it to false, or remove the tensor"
            )

    def read(self, parameter: str, index: tuple[slice, ...]) -> np.ndarray:
        """Returns our parameter at `index`, one slice per dimension, in float32. Reads only this
        part of the files."""
        if not parameter.startswith("layers/"):
            return self.read_tensor(parameter, None, index)
        # Our parameter stacks the layers; the files have one tensor per layer.
        layers, *rest = index
        value = np.empty([part.stop - part.start for part in index], np.float32)
        for i, layer in enumerate(range(layers.start, layers.stop)):
            value[i] = self.read_tensor(parameter, layer, rest)
        return value

    def read_tensor(self, parameter, layer, index):
        """Returns part of one layer of a parameter (layer None: a parameter without layers) in
        float32, with its dimensions in our order."""
        hf_name, dimensions, _ = model.TENSORS[parameter]
        hf_name = hf_name.format(layer)
        letters = model.letters(parameter).lstrip("L")
        # Translate the slices of our dimensions into slices of the tensor's dimensions.
        parts = dict(zip(letters, index, strict=True))
        hf_index = []
        for dimension in dimensions.split():
            part = parts[dimension[0]]
            # "NH" or "KH" is one dimension of the tensor: heads times H. H is never sharded.
            if len(dimension) == 2:
                part = slice(part.start * self.cfg.H, part.stop * self.cfg.H)
            hf_index.append(part)
        tensor, path = self.tensors[hf_name]
        value = tensor[tuple(hf_index)].astype(np.float32, copy=False)
        # This also finds NaN, for which every comparison is false.
        is_finite = -np.inf < value.min() and value.max() < np.inf
        if not is_finite:
            raise CheckpointError(f"{path}: {hf_name} holds NaN or infinity; download it again")
        # For example, [N * H, D] becomes [N, H, D], then [D, N, H].
        hf_letters = dimensions.replace(" ", "")
        value = value.reshape([parts[letter].stop - parts[letter].start for letter in hf_letters])
        return np.einsum(f"{hf_letters}->{letters}", value)


def open_tensors(directory):
    """Returns {tensor's name: (object that reads parts of it, path of its file)} for a model."""
    tensors = {}
    for path in weight_files(directory):
        try:
            f = safe_open(path, "np")
            names = f.keys()
            found = {name: (f.get_slice(name), path) for name in names}
        except (SafetensorError, OSError, ValueError) as e:
            raise CheckpointError(f"{path} is not a safetensors file: {e}") from e
        twice = found.keys() & tensors.keys()
        if twice:
            name = min(twice)
            raise CheckpointError(f"{path} holds {name}, as does {tensors[name][1]}; keep one")
        tensors |= found
    return tensors


def place(
    shape: tuple[int, ...], sharding: Sharding, read: Callable[[tuple[slice, ...]], np.ndarray]
) -> jax.Array:
    """Returns a global array. read(index) returns one shard as a NumPy array. Each process reads
    only its own shards, one at a time."""
    shards = []
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        # JAX may leave start and stop None: fill in the numbers.
        index = tuple(slice(*part.indices(n)) for part, n in zip(index, shape, strict=True))
        target = SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
        # Wait for the copy, so that host memory never holds a second shard.
        shard = jax.device_put(read(index), target).block_until_ready()
        shards.append(shard)
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def load(
    weights: ModelFiles,
    mesh: Mesh,
    progress: Callable[[int, int], Any] = lambda done, total: None,
    dtype: str = "float32",
) -> dict:
    """Returns a model's parameters in `dtype`, nested, and sharded over the mesh by model.spec.

    Host memory holds one device's shard of one parameter. progress(done, total) counts parameters.
    """

    def read(name, index):
        return weights.read(name, index).astype(jnp.dtype(dtype), copy=False)

    shapes = model.shapes(weights.cfg)
    flat = {}
    for name, shape in shapes.items():
        sharding = NamedSharding(mesh, model.spec(name))
        flat[name] = place(shape, sharding, partial(read, name))
        progress(len(flat), len(shapes))
    return model.nest(flat)


# ---------------------------------------------------------------- save
def save(
    directory: str,
    params: dict,
    cfg: model.ModelConfig,
    mesh: Mesh,
    dtype: str,
    file_bytes: int = 4 << 30,
    lora_scale: float = 0.0,
) -> None:
    """Write parameters as safetensors that transformers loads. Every process must call this.

    `dtype` is "float32", "bfloat16" or "float16". Tensors are all-gathered one by one, and process
    0 writes them to files of up to `file_bytes` each. If there are several files, it also writes
    an index. The caller adds config.json and the tokenizer. Adapters are merged into the matrices
    that they adapt; lora_scale is the adapters' scale.
    """
    layers = model.adapted(params["layers"], lora_scale)
    flat = params | {f"layers/{name}": w for name, w in layers.items()}
    gather = compiled_gather(mesh, dtype)
    is_writer = jax.process_index() == 0
    # File names contain the number of files, so tensors are divided into files first.
    groups = split_into_files(hf_tensors(cfg), jnp.dtype(dtype).itemsize, file_bytes)
    weight_map = {}
    for number, tensors in enumerate(groups, 1):
        file_name = "model.safetensors"
        if len(groups) > 1:
            file_name = f"model-{number:05}-of-{len(groups):05}.safetensors"
        weights = {}
        for tensor in tensors:
            weight_map[tensor.hf_name] = file_name
            # All processes take part in the all-gather, but only process 0 needs the result.
            value = gather(flat[tensor.parameter], tensor.layer, tensor.parameter, tensor.hf_shape)
            if is_writer:
                # safetensors writes bytes in their order in memory, which must be row-major.
                weights[tensor.hf_name] = np.asarray(value, order="C")
        if is_writer:
            save_safetensors(os.path.join(directory, file_name), weights)
    if is_writer and len(groups) > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        files.write_json(f"{directory}/model.safetensors.index.json", index)


def split_into_files(tensors, itemsize, file_bytes):
    """Returns a list of tensors for each file. A file holds at most `file_bytes`, or one larger
    tensor. The tensors keep their order."""
    groups = [[]]
    filled = 0
    for tensor in tensors:
        size = math.prod(tensor.hf_shape) * itemsize
        if filled and filled + size > file_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += size
    return groups


def compiled_gather(mesh, dtype):
    """Returns a jitted gather(our parameter, layer or None, the parameter's name, Hugging Face
    shape) -> the Hugging Face tensor, replicated."""

    @partial(jax.jit, static_argnames=("name", "shape"), out_shardings=NamedSharding(mesh, P()))
    def gather(a, i, name, shape):
        letters = model.letters(name).lstrip("L")
        _, dimensions, _ = model.TENSORS[name]
        hf_letters = dimensions.replace(" ", "")
        if i is not None:
            a = jax.tree.map(lambda stack: stack[i], a)
        # With --offload params, the parameter is in the host's memory.
        a = jax.device_put(model.merge(a), model.DEVICE)
        return jnp.einsum(f"{letters}->{hf_letters}", a).reshape(shape).astype(dtype)

    return gather


def trained_system(directory: str) -> str | None:
    """The system prompt that a model written by `write_final` was trained with; None for others."""
    path = f"{directory}/podgrpo.json"
    return files.read_json(path).get("system") if os.path.exists(path) else None


def name_stop_ids(directory: str, stop_ids: tuple) -> None:
    """Name the tokens that end an answer in generation_config.json, where transformers and vLLM
    look for them, unless all are named there already."""
    path = f"{directory}/generation_config.json"
    generation = files.read_optional_json(path)
    # Without this file, transformers takes eos_token_id and pad_token_id from config.json.
    config = files.read_json(f"{directory}/config.json")
    ids_of_config = {name: i for name, i in config.items() if name.endswith("_token_id")}
    named = model.eos_ids(ids_of_config | generation)
    missing = [i for i in stop_ids if i not in named]
    if missing or "eos_token_id" not in generation:
        settings = generation or ids_of_config
        files.write_json(path, settings | {"eos_token_id": named + missing})


def write_final(
    out: str,
    source_directory: str,
    params: dict,
    model_cfg: model.ModelConfig,
    mesh: Mesh,
    about: dict,
    lora_scale: float = 0.0,
    write_more: Callable[[str], None] = lambda directory: None,
) -> None:
    """Write OUT/final. Every process must call this; process 0 writes. The directory appears under
    its name once it is complete.

    OUT/final has the parameters, and the model's *.json, *.txt and *.jinja files. If the model has
    no chat template, the default template is added. generation_config.json names all tokens that
    end an answer. The parameters are in bfloat16 or float16 if the model's config.json names that
    dtype, and otherwise in float32. `about` goes into podgrpo.json: the step, commit and system
    prompt of the training. lora_scale: as for `save`.
    Every process calls write_more(directory) before the directory is complete.
    """
    final = f"{out}/final"
    unfinished = f"{final}.tmp"
    # transformers 4 wrote torch_dtype, transformers 5 writes dtype.
    config = files.read_json(f"{source_directory}/config.json")
    dtype = config.get("torch_dtype") or config.get("dtype")
    if dtype not in ("bfloat16", "float16"):
        dtype = "float32"
    is_writer = jax.process_index() == 0
    if is_writer:
        # A killed run may have left this directory.
        shutil.rmtree(unfinished, ignore_errors=True)
        os.makedirs(unfinished)
    save(unfinished, params, model_cfg, mesh, dtype, lora_scale=lora_scale)
    write_more(unfinished)
    if is_writer:
        for name in os.listdir(source_directory):
            # Copy config, tokenizer and chat template, but not the index of the original weights.
            if name.endswith((".json", ".txt", ".jinja")) and not name.endswith(".index.json"):
                shutil.copy(f"{source_directory}/{name}", unfinished)
        if chat.template_of(source_directory) is None:
            with open(f"{unfinished}/chat_template.jinja", "w", encoding="utf-8") as f:
                f.write(chat.default_template(source_directory))
        name_stop_ids(unfinished, model_cfg.stop_ids)
        files.write_json(f"{unfinished}/podgrpo.json", about)
        # safetensors creates files that other users cannot read. Give them an ordinary file's mode.
        for path in glob.glob("**/*.safetensors", root_dir=unfinished, recursive=True):
            shutil.copymode(f"{unfinished}/podgrpo.json", f"{unfinished}/{path}")
        # Flush the files to disk before the rename: the name final/ says that they are complete.
        for path in ("", *glob.glob("**", root_dir=unfinished, recursive=True)):
            files.flush_to_disk(f"{unfinished}/{path}")
        # Rename an older final/ before deleting it, so that no final/ is ever incomplete.
        shutil.rmtree(f"{final}.old.tmp", ignore_errors=True)
        if os.path.isdir(final):
            os.rename(final, f"{final}.old.tmp")
        os.rename(unfinished, final)
        files.flush_to_disk(out)
        shutil.rmtree(f"{final}.old.tmp", ignore_errors=True)
