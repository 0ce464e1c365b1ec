"""model.py without the rollout: config, loading and saving, the training forward against
transformers, and its gradients against JAX's own."""

import dataclasses
import json
import math
import shutil
import tempfile
import tracemalloc
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tokenizers
from absent import write_config
from conftest import (
    LLAMA,
    QWEN3,
    TIED,
    UNTIED,
    cached_logits,
    check_errors,
    compiled_forward,
    edit,
    hidden_states,
    load,
    logits,
    place,
    random_params,
    random_prompts,
    random_weight,
    random_weights,
    shared,
    spoiled_copy,
    textbook_hidden,
)
from jax.extend.core import jaxprs_in_params
from numpy.testing import assert_allclose, assert_array_equal
from safetensors.numpy import load_file, save_file

import model
from infra.data import hf
from infra.data.tiny import TINY_MODEL
from infra.host import files
from infra.update import attention
from test_kernel import mesh, relative
from tools.sizes import SIZES, model_of_size


def by_tier(default, slow):
    """Returns pytest's parameters for {name: case} of the default tier and of the slow tier."""
    marked = [pytest.param(case, id=name, marks=pytest.mark.slow) for name, case in slow.items()]
    return [pytest.param(case, id=name) for name, case in default.items()] + marked


# ---------------------------------------------------------------- against transformers
def plain_rope(theta):
    return {"rope_type": "default", "rope_theta": theta}


# With this scaling, the models have low and high frequencies, and some in between.
SCALING = dict(
    rope_type="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
LLAMA3_ROPE = SCALING | {"rope_theta": 5e5}
# Heads of 8, 64, 80 and 128, with 1 to 7 query heads per key/value head. In many, the query
# heads together are wider than the model, as in Qwen3.
# fmt: off
HF_MODELS = {
    "tied": dict(
        model_type="qwen2",
        vocab_size=331, hidden_size=112, intermediate_size=160, num_hidden_layers=3,
        head_dim=64, num_attention_heads=14, num_key_value_heads=2, tie_word_embeddings=True,
        rms_norm_eps=1e-5, rope_parameters=plain_rope(1e6)),
    "untied": dict(
        model_type="qwen2",
        vocab_size=263, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=8, num_key_value_heads=4, tie_word_embeddings=False,
        rope_parameters=plain_rope(5e3) | {"partial_rotary_factor": 1.0}),
    "qwen3": dict(
        model_type="qwen3",
        vocab_size=334, hidden_size=96, intermediate_size=160, num_hidden_layers=3,
        head_dim=128, num_attention_heads=6, num_key_value_heads=2, tie_word_embeddings=True,
        rms_norm_eps=1e-6, rope_parameters=plain_rope(1e6)),
    "llama": dict(
        model_type="llama",
        vocab_size=262, hidden_size=160, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=False,
        rms_norm_eps=1e-5, rope_parameters=plain_rope(1e4)),
    "llama3": dict(
        model_type="llama",
        vocab_size=301, hidden_size=128, intermediate_size=96, num_hidden_layers=2,
        head_dim=64, num_attention_heads=4, num_key_value_heads=1, tie_word_embeddings=True,
        rms_norm_eps=1e-5, rope_parameters=LLAMA3_ROPE),
}
SLOW_HF_MODELS = {
    "qwen2, heads of 80": dict(
        model_type="qwen2",
        vocab_size=230, hidden_size=240, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=3, num_key_value_heads=1, tie_word_embeddings=False,
        rms_norm_eps=1e-6, rope_parameters=plain_rope(1e6)),
    "qwen2, heads of 128": dict(
        model_type="qwen2",
        vocab_size=230, hidden_size=256, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True,
        rms_norm_eps=1e-6, rope_parameters=plain_rope(1e6)),
    "qwen3, heads of 64": dict(
        model_type="qwen3",
        vocab_size=231, hidden_size=80, intermediate_size=96, num_hidden_layers=2,
        head_dim=64, num_attention_heads=5, num_key_value_heads=1, tie_word_embeddings=False,
        rms_norm_eps=1e-5, rope_parameters=plain_rope(5e3)),
    "qwen3, heads of 80": dict(
        model_type="qwen3",
        vocab_size=230, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        head_dim=80, num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=False,
        rms_norm_eps=1e-6, rope_parameters=plain_rope(1e6)),
    "llama, heads of 64": dict(
        model_type="llama",
        vocab_size=230, hidden_size=192, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=3, num_key_value_heads=1, tie_word_embeddings=True,
        rms_norm_eps=1e-5, rope_parameters=plain_rope(1e5)),
    "llama, heads of 128": dict(
        model_type="llama",
        vocab_size=230, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        head_dim=128, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False,
        rms_norm_eps=1e-6, rope_parameters=LLAMA3_ROPE),
}
# fmt: on


class HFModel(NamedTuple):
    theirs: object  # the model of transformers
    directory: Path  # where transformers saved it; must not change
    params: dict  # as our code loads it
    cfg: model.ModelConfig
    owner: tempfile.TemporaryDirectory  # removes the directory when Python ends


@cache
def hf_model(name, initial=False):
    """Make a model of transformers with random weights, save it, and load it with our code.

    initial: keep the weights that transformers gives to a new model, with which logits are about 1.
    By default, weights are larger, biases and norms are random, too, and logits are about 10.
    """
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    # In one process with JAX, several threads of PyTorch wait for each other, and are a hundred
    # times slower than one.
    torch.set_num_threads(1)
    fields = (HF_MODELS | SLOW_HF_MODELS)[name]
    config = transformers.AutoConfig.for_model(**fields, eos_token_id=None, bos_token_id=None)
    torch.manual_seed(1)
    theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    rng = np.random.default_rng(1)
    for key, p in () if initial else theirs.named_parameters():
        weight = random_weight(rng, key, tuple(p.shape), config.hidden_size)
        p.data = torch.from_numpy(weight)
    owner = tempfile.TemporaryDirectory(prefix="podgrpo-test-")
    directory = Path(owner.name)
    theirs.save_pretrained(directory)
    # A model for the trainer has a tokenizer, though no test here tokenizes.
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(directory / "tokenizer.json"))
    if name == "untied":
        # Write the config as transformers 4 did, and as Qwen published it.
        old = dict(rope_parameters=None, rope_theta=5e3, head_dim=None, tie_word_embeddings=None)
        edit(directory / "config.json", old)
    if name == "llama3":
        # As Meta published it.
        old = dict(rope_parameters=None, rope_scaling=SCALING, rope_theta=5e5)
        edit(directory / "config.json", old)
    return HFModel(theirs, directory, *load(directory), owner)


def hf_logits(theirs, tokens):
    torch = pytest.importorskip("torch")
    with torch.no_grad():
        return theirs(torch.tensor(tokens)).logits.numpy()


def assert_trees_equal(found, wanted):
    jax.tree.map(assert_array_equal, found, wanted)


def eight_devices(cfg):
    """Returns a mesh over eight devices, with all axes if the key/value heads can be split."""
    return mesh(2, 2, 2) if cfg.K % 2 == 0 and cfg.N % 2 == 0 else mesh(2, 4, 1)


def logit_error(found, wanted, initial=False):
    """The largest difference of two logits. Unless the weights are initial, divide it by the
    largest logit, which is about 10: in float32, transformers' logits then differ from its own in
    float64 by up to 7e-5, and ours by up to 3e-5 (the largest over these models).
    """
    return abs(found - wanted).max() / (1 if initial else abs(wanted).max())


def tier_of_models(*default):
    """Returns pytest's parameters: these models in the default tier, and all others in slow."""
    others = [name for name in HF_MODELS | SLOW_HF_MODELS if name not in default]
    return by_tier({name: name for name in default}, {name: name for name in others})


@pytest.mark.parametrize("initial", [False, True], ids=["random", "initial"])
@pytest.mark.parametrize("name", tier_of_models(*HF_MODELS))
def test_logits_equal_transformers(name, initial, record_property):
    """Logits of the training forward, on one device and on eight."""
    saved = hf_model(name, initial)
    tokens = random_prompts(saved.cfg, [33] * 8)
    wanted = hf_logits(saved.theirs, tokens)
    low, high = (0.1, 1) if initial else (1, 5)
    assert low < wanted.std() < high, f"degenerate logits, deviation {wanted.std()}"
    on = eight_devices(saved.cfg)
    sharded, _ = load(saved.directory, on)
    errors = {
        "one device": logit_error(logits(saved.params, saved.cfg, tokens), wanted, initial),
        "eight devices": logit_error(logits(sharded, saved.cfg, tokens, on), wanted, initial),
    }
    check_errors(errors, 2e-5, record_property)


@pytest.mark.parametrize("initial", [False, True], ids=["random", "initial"])
@pytest.mark.parametrize("name", tier_of_models("qwen3", "llama3"))
def test_cached_logits_equal_transformers(name, initial, record_property):
    """Logits of a prefill and of tokens decoded one by one, on eight devices."""
    saved = hf_model(name, initial)
    tokens = random_prompts(saved.cfg, [33] * 8)
    on = eight_devices(saved.cfg)
    params, _ = load(saved.directory, on)
    kind = "tp" if on.shape["tp"] > 1 else "fsdp"
    found = cached_logits(params, saved.cfg, tokens, on, kind)
    # The prefill gives the logits after the last token of the prompt.
    wanted = hf_logits(saved.theirs, tokens)[:, -found.shape[1] :]
    check_errors({"logits": logit_error(found, wanted, initial)}, 2e-5, record_property)


@pytest.mark.parametrize("name", ["tied", "qwen3", "llama", "llama3"])
def test_final_loads_in_transformers_as_its_own_class(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    saved = hf_model(name)
    on = eight_devices(saved.cfg)
    params, _ = load(saved.directory, on)
    # Brackets in the name are no pattern.
    out = tmp_path / "run[1]"
    out.mkdir()
    hf.write_final(str(out), saved.directory, params, saved.cfg, on, about={})
    modes = {path.stat().st_mode for path in (out / "final").iterdir()}
    assert len(modes) == 1, "other users cannot read some files"
    again = transformers.AutoModelForCausalLM.from_pretrained(out / "final")
    architecture = {"tied": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
    assert type(again).__name__ == architecture.get(name, "LlamaForCausalLM")
    tokens = random_prompts(saved.cfg, (11, 11))
    assert_array_equal(hf_logits(again, tokens), hf_logits(saved.theirs, tokens))


@pytest.mark.parametrize(
    "name, file_bytes", [("tied", 4 << 30), ("tied", 150_000), ("untied", 60_000)]
)
def test_saved_checkpoint_loads_in_transformers(name, file_bytes, tmp_path, record_property):
    transformers = pytest.importorskip("transformers")
    saved = hf_model(name)
    on = mesh(2, 2, 2) if len(jax.devices()) >= 8 else mesh()
    params, _ = load(saved.directory, on)
    shutil.copy(saved.directory / "config.json", tmp_path)
    hf.save(tmp_path, params, saved.cfg, on, "float32", file_bytes)

    files = list(tmp_path.glob("*.safetensors"))
    is_one_file = files == [tmp_path / "model.safetensors"]
    assert is_one_file == (file_bytes == 4 << 30)
    for tensors in map(load_file, files):
        size = sum(tensor.nbytes for tensor in tensors.values())
        assert len(tensors) == 1 or size <= file_bytes
    record_property("files", len(files))

    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = random_prompts(saved.cfg, (11, 11))
    assert_array_equal(hf_logits(again, tokens), hf_logits(saved.theirs, tokens))
    assert_trees_equal(load(tmp_path)[0], params)


def test_final_has_no_index_of_the_original_files(tiny_directory, tmp_path):
    """transformers would look for the files that the index names."""
    source = spoiled_copy(tiny_directory, tmp_path / "source", INDEX, index_of({NORM: WEIGHTS}))
    params, cfg = load(source)
    hf.write_final(str(tmp_path), str(source), params, cfg, mesh(), about={})
    assert (tmp_path / "final/config.json").exists()
    assert not (tmp_path / "final" / INDEX).exists()


def test_loads_bfloat16_and_several_files(tmp_path, record_property):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    saved = hf_model("untied")
    half = transformers.Qwen2ForCausalLM.from_pretrained(saved.directory, dtype=torch.bfloat16)
    theirs = tmp_path / "theirs"
    half.save_pretrained(theirs, max_shard_size="40KB")
    assert (theirs / "model.safetensors.index.json").exists()
    params, cfg = load(theirs)
    tokens = random_prompts(cfg, (24, 24, 24))
    error = abs(logits(params, cfg, tokens) - hf_logits(half.float(), tokens)).max()
    check_errors({"logits": error}, 1e-4, record_property)

    # Our rounding to bfloat16 equals that of transformers.
    ours = tmp_path / "ours"
    ours.mkdir()
    shutil.copy(theirs / "config.json", ours)
    hf.save(ours, saved.params, cfg, mesh(), "bfloat16")
    assert_trees_equal(load(ours)[0], params)


# ---------------------------------------------------------------- config
PARAMETERS = {
    "0.5B": 494_032_768,
    "1.5B": 1_543_714_304,
    "3B": 3_085_938_688,
    "7B": 7_615_616_512,
    "14B": 14_770_033_664,
    "32B": 32_763_876_352,
}


def test_sizes_of_plans_are_the_published_ones():
    assert {size: model_of_size(size).n_params for size in PARAMETERS} == PARAMETERS


def test_published_sizes(tmp_path, record_property):
    for size, n_params in PARAMETERS.items():
        shutil.copy(shared(f"qwen2.5/config-{size}.json"), tmp_path / "config.json")
        cfg = hf.read_config(tmp_path)
        assert cfg.n_params == n_params, cfg
        assert cfg.H == cfg.D // cfg.N, cfg
        assert cfg.rope_theta == 1e6, cfg
        assert cfg.stop_ids == (151645,), cfg
    record_property("parameter counts equal", len(PARAMETERS))


@pytest.mark.parametrize("model_type", model.FAMILIES)
def test_values_that_a_config_lacks_are_those_of_transformers(model_type):
    transformers = pytest.importorskip("transformers")
    sizes = dict(vocab_size=320, hidden_size=128, intermediate_size=256, num_hidden_layers=2)
    sizes |= dict(num_attention_heads=32)
    theirs = transformers.AutoConfig.for_model(model_type, **sizes)
    cfg = model.config_from_hf({"model_type": model_type, **sizes}, {})
    assert theirs.num_key_value_heads == cfg.K
    # Qwen2 has no head_dim of its own.
    assert getattr(theirs, "head_dim", 128 // 32) == cfg.H
    assert cfg.rope_theta == theirs.rope_parameters["rope_theta"]
    assert cfg.rms_eps == theirs.rms_norm_eps
    assert cfg.tied == theirs.tie_word_embeddings
    assert cfg.max_positions == theirs.max_position_embeddings
    assert list(cfg.stop_ids) == ([] if theirs.eos_token_id is None else [theirs.eos_token_id])


def test_sizes_of_qwen3_equal_transformers(tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    sizes = [size for size in SIZES if size.startswith("Qwen3")]
    assert len(sizes) == 6
    for size in sizes:
        config = transformers.AutoConfig.from_pretrained(write_config(tmp_path, size))
        # On this device, parameters have sizes but no values.
        with torch.device("meta"):
            theirs = transformers.AutoModelForCausalLM.from_config(config)
        cfg = hf.read_config(tmp_path)
        assert cfg.n_params == model_of_size(size).n_params == theirs.num_parameters(), size


CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
NORM = "model.norm.weight"
QUERY = "model.layers.1.self_attn.q_proj.weight"
YARN = {"rope_type": "yarn", "factor": 4.0}
PLAIN = {"rope_type": "default"}
# The tiny Qwen2, as if it were of another family.
QWEN3_TINY = dict(model_type="qwen3", architectures=["Qwen3ForCausalLM"], head_dim=32)
LLAMA_TINY = dict(model_type="llama", architectures=["LlamaForCausalLM"])
INFINITE = np.ones(128, np.float32)
INFINITE[127] = np.inf


def index_of(weight_map):
    return json.dumps({"weight_map": weight_map}).encode()


# (how to edit the file, by conftest.edit; what the message must say)
# fmt: off
CONFIG_REFUSALS = [
    (None, "config.json is missing"),
    (b"{", "not readable JSON"),
    (b"[" * 99999, "not readable"),
    (b"\xff{}", "not readable"),
    (b"\xef\xbb\xbf{}", "BOM"),
    (b"[]", "config.json holds a list"),
    (dict(model_type="qwen3_moe"), "model_type 'qwen3_moe'; only qwen2, qwen3, llama are"),
    (dict(model_type="mistral"), "model_type 'mistral'"),
    (dict(model_type=None), "model_type"),
    (dict(model_type="llama"), "architectures ['Qwen2ForCausalLM']; only LlamaForCausalLM is"),
    (dict(architectures=["Qwen2ForRewardModel"]), "Qwen2ForRewardModel"),
    (QWEN3_TINY | dict(attention_bias=True), "attention_bias = true"),
    (QWEN3_TINY, "lacks the tensor model.layers.0.self_attn.q_norm.weight"),
    (LLAMA_TINY | dict(attention_bias=True), "attention_bias = true"),
    (LLAMA_TINY | dict(mlp_bias=True), "mlp_bias = true"),
    (LLAMA_TINY, "does not call for 6 of its tensors, such as model.layers.0"),
    (dict(rope_scaling=YARN), "rope scaling yarn; only"),
    (dict(rope_scaling=LLAMA3_ROPE), "rope_theta [500000.0, 10000.0]"),
    (dict(rope_parameters=PLAIN, rope_scaling={"type": "llama3"}), "['default', 'llama3']"),
    (dict(rope_scaling=SCALING | {"factor": None}), "factor = None"),
    (dict(rope_scaling=SCALING | {"high_freq_factor": 1}), "must be below"),
    (dict(rope_scaling=SCALING | {"beta_fast": 32}), "beta_fast"),
    (dict(partial_rotary_factor=0.5), "partial_rotary_factor"),
    (dict(rope_scaling="yarn"), "usable"),
    (dict(rope_scaling={"type": "linear", "factor": 2}), "linear"),
    (dict(rope_parameters=YARN | {"rope_theta": 1e4}), "yarn"),
    (dict(rope_parameters=PLAIN | {"rope_theta": 1e4}, rope_scaling=YARN), "yarn"),
    (dict(rope_parameters=PLAIN | {"rope_theta": 1e6}), "rope_theta [1000000.0, 10000.0]"),
    (dict(rope_parameters=PLAIN | {"factor": 4}), "factor"),
    (dict(rope_theta=-1e4), "rope_theta = -"),
    (dict(rope_theta=math.inf), "rope_theta = inf is not"),
    (dict(rope_theta=0), "rope_theta = 0 is not"),
    (dict(rope_theta="1e4"), "'1e4'"),
    (dict(use_sliding_window=True), "sliding"),
    (dict(layer_types=["full_attention", "sliding_attention"]), "sliding"),
    (dict(hidden_act="gelu"), "gelu"),
    (dict(quantization_config={"bits": 4}), "quantised"),
    (dict(head_dim=5), "of size 5"),
    (dict(hidden_size=None), "hidden_size"),
    (dict(hidden_size=128.0), "hidden_size = 128.0 is not"),
    (dict(num_attention_heads=True), "= True is not"),
    (dict(num_key_value_heads=3), "4 query heads"),
    (dict(num_hidden_layers=1), "such as model.layers.1."),
    (dict(num_hidden_layers=3), "tensor model.layers.2."),
    (dict(num_hidden_layers=10**9), "below 10000"),
    (dict(vocab_size=-1), "positive"),
    (dict(vocab_size="many"), "many"),
    (dict(vocab_size=2**80), "below 2147"),
    (dict(rms_norm_eps=math.nan), "rms_norm_eps = nan is not"),
    (dict(eos_token_id=320), "eos_token_id = [320]"),
    (dict(eos_token_id=["2"]), "of vocab_size"),
    (dict(tie_word_embeddings="false"), "tie_word_embeddings"),
]
WEIGHTS_REFUSALS = [
    (None, WEIGHTS),
    (b"not safetensors at all", "is not a safetensors file"),
    ({QUERY: None}, f"lacks the tensor {QUERY}"),
    ({"more": np.ones(2)}, "1 of its tensors, such as more"),
    ({QUERY: np.ones((128, 128), np.int8)}, f"{QUERY} has type I8"),
    ({NORM: np.ones(17)}, f"{NORM} has shape (17,)"),
    ({QUERY: np.full((128, 128), np.nan, np.float32)}, f"{QUERY} holds NaN"),
    ({NORM: INFINITE}, f"{NORM} holds NaN or infinity"),
    ({NORM: -INFINITE}, f"{NORM} holds NaN or infinity"),
]
INDEX_REFUSALS = [
    (b"{}", "index.json"),
    (b"[]", "index.json"),
    (index_of({NORM: "../x.safetensors"}), "../x.safeten"),
    (index_of({NORM: "gone.safetensors"}), "gone.safe"),
    (index_of({NORM: "/etc/passwd"}), "/etc/passwd"),
    (index_of({NORM: ".."}), "is not a safetensors file"),
    (index_of({NORM: "a\0b"}), "is not a safetensors file"),
    (index_of({NORM: 7}), "names 7"),
    (index_of({"a": WEIGHTS, "b": "more.safetensors"}), f"more.safetensors holds {NORM}, as does"),
]
# fmt: on


def test_refusals_name_the_cause(tiny_directory, tmp_path, record_property):
    load(tiny_directory)  # without changes it is good
    good = shutil.copytree(tiny_directory, tmp_path / "good")
    save_file({NORM: np.ones(128, np.float32)}, good / "more.safetensors")
    # The path outside the directory, which an index must not name, has good weights too.
    shutil.copy(good / WEIGHTS, tmp_path / "x.safetensors")
    cut_short = (good / WEIGHTS).read_bytes()[:9000]
    cases = [
        *((CONFIG, change, words) for change, words in CONFIG_REFUSALS),
        *((WEIGHTS, change, words) for change, words in WEIGHTS_REFUSALS),
        *((INDEX, change, words) for change, words in INDEX_REFUSALS),
        (WEIGHTS, cut_short, "is not a safetensors file"),
        ("generation_config.json", b"[]", "generation_config.json"),
    ]
    for i, (name, change, words) in enumerate(cases):
        bad = spoiled_copy(good, tmp_path / str(i), name, change)
        message = "none"
        try:
            load(bad)
        except files.CheckpointError as e:
            message = str(e).replace(str(tmp_path), "")
        assert words in message, f"{name}, wrong by {str(change)[:200]}: {message}"
        shutil.rmtree(bad)
    record_property("refusals", len(cases))


def test_buffers_that_follow_from_the_config_are_no_obstacle(tiny_directory, tmp_path):
    """Old versions of transformers saved such buffers."""
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    old = spoiled_copy(tiny_directory, tmp_path / "old", WEIGHTS, {name: np.ones(16, np.float32)})
    assert name in hf.ModelFiles(old, hf.read_config(old)).tensors


def test_all_rows_of_a_saved_head_are_compared_with_the_embedding(tmp_path):
    config = TINY_MODEL | dict(vocab_size=8200, hidden_size=8, intermediate_size=8)
    hf.write_random(tmp_path, config, seed=1)
    head = load_file(tmp_path / WEIGHTS)["model.embed_tokens.weight"]
    edit(tmp_path / WEIGHTS, {"lm_head.weight": head})
    hf.ModelFiles(tmp_path, hf.read_config(tmp_path))
    head[-1] += 1
    edit(tmp_path / WEIGHTS, {"lm_head.weight": head})
    with pytest.raises(files.CheckpointError, match="lm_head.weight differs from the embedding"):
        hf.ModelFiles(tmp_path, hf.read_config(tmp_path))


# ---------------------------------------------------------------- load
class WatchedCheckpoint(hf.ModelFiles):
    """Records (parameter, shape read, bytes held before, bytes that reading took) of each read."""

    def __init__(self, directory, cfg):
        super().__init__(directory, cfg)
        self.reads = []

    def read(self, name, index):
        tracemalloc.reset_peak()
        held, _ = tracemalloc.get_traced_memory()
        value = super().read(name, index)
        _, peak = tracemalloc.get_traced_memory()
        self.reads.append((name, value.shape, held, peak - held))
        # A CPU device would use an aligned array as its own memory, so return an unaligned copy.
        room = np.empty(value.size + 16, np.float32)
        start = (-room.ctypes.data // 4) % 16 + 1
        odd = room[start : start + value.size]
        odd[:] = value.ravel()
        return odd.reshape(value.shape)


def test_load_streams(tmp_path, record_property):
    """When weights load on eight devices, host memory holds about one shard at a time, and only the
    bytes of the shard are read."""
    on = mesh(1, 8, 1)
    larger = dict(vocab_size=1000, hidden_size=256, intermediate_size=512, num_hidden_layers=8)
    config = TINY_MODEL | larger | {"tie_word_embeddings": False}
    hf.write_random(tmp_path, config, seed=0)
    at_once, cfg = load(tmp_path)
    checkpoint = WatchedCheckpoint(tmp_path, cfg)
    tracemalloc.start()
    params = hf.load(checkpoint, on)
    tracemalloc.stop()

    assert_trees_equal(params, at_once)
    for name, sharding in model.flatten(model.shardings(model.shapes(cfg), on)).items():
        loaded = model.flatten(params)[name]
        assert loaded.sharding == sharding and loaded.dtype == jnp.float32, name
    shapes = model.shapes(cfg)
    assert Counter(name for name, *_ in checkpoint.reads) == dict.fromkeys(shapes, 8)
    largest = 4 * max(math.prod(shape) for _, shape, *_ in checkpoint.reads)
    for name, shape, held, used in checkpoint.reads:
        is_vector = "norm" in name or "/b" in name
        parts = 1 if is_vector else 8
        assert math.prod(shape) * parts == math.prod(shapes[name]), (name, shape)
        assert used < 1.3 * 4 * math.prod(shape) + 10_000, f"{used} bytes to read {shape} of {name}"
        assert held < 3 * largest, f"{held} bytes of host memory held when {name} is read"
    _, _, held, used = zip(*checkpoint.reads, strict=True)
    record_property("a read takes", f"{max(used) / largest:.2f} of the largest shard")
    record_property("held before it", f"{max(held) / largest:.2f} of the largest shard")


# ---------------------------------------------------------------- the training forward
def test_packed_sequences_do_not_attend_to_each_other(record_property):
    params = random_params(TIED, mesh())
    a, b = random_prompts(TIED, (7, 9))

    def hidden(tokens, positions=None, segments=None):
        positions = positions or [*range(len(tokens))]
        segments = segments or [1] * len(tokens)
        states = hidden_states(params, TIED, [tokens], [positions], [segments], width=20)
        return np.asarray(states)[0, : len(tokens)]

    alone = np.concatenate([hidden(a), hidden(b)])
    packed = hidden(a + b, [*range(7), *range(9)], [1] * 7 + [2] * 9)
    joined = hidden(a + b)
    errors = {"packed": abs(packed - alone).max(), "the first": abs(joined[:7] - alone[:7]).max()}
    check_errors(errors, 1e-5, record_property)
    attended = abs(joined[7:] - alone[7:]).max(-1)
    assert attended.min() > 1e-2, "in a segment, tokens must attend to those before them"


@pytest.mark.parametrize("factor", [None, 8.0])
def test_rotary_angles_are_those_of_float64_at_large_positions(factor):
    """The angles, of Llama 3's scaling too, are computed from exact positions: bfloat16 has no 257,
    and float16 no 4099."""
    positions = np.array([[0, 1, 257, 4099, 30_001]], np.int32)
    scaling = model.Llama3Rope(factor, 1.0, 4.0, 64.0) if factor else None
    cfg = dataclasses.replace(TIED, H=64, rope_theta=5e5, rope_scaling=scaling)
    frequency = 5e5 ** (-np.arange(32) / 32)
    if factor:
        # As in Meta's code.
        wavelength = 2 * np.pi / frequency
        smooth = (64 / wavelength - 1) / (4 - 1)
        low = frequency / factor
        between = (1 - smooth) * low + smooth * frequency
        kinds = [wavelength < 64 / 4, wavelength > 64]
        frequency = np.select(kinds, [frequency, low], between)
    angle_TH = positions[0, :, None] * np.tile(frequency, 2)
    sign = np.repeat([-1, 1], 32)
    cos, sin = model.rope_tables(positions, cfg)
    # At the largest position, an angle in float32 is off by up to 0.002.
    assert_allclose(cos[0, 0], np.cos(angle_TH), rtol=0, atol=0.005)
    assert_allclose(sin[0, 0], sign * np.sin(angle_TH), rtol=0, atol=0.005)


def test_bfloat16_forward_is_close(record_property):
    """The bfloat16 forward is close to float32, even at positions where rotary angles in bfloat16
    would be off by a radian."""
    params = random_params(TIED, mesh())
    rows = dict(
        tokens=np.array(random_prompts(TIED, (24,)), np.int32),
        positions=np.arange(400, 424, dtype=np.int32)[None],
        segments=np.ones((1, 24), np.int32),
    )
    exact, rounded = (
        np.asarray(compiled_forward(TIED, mesh(), options)(params, rows))
        for options in (
            model.ForwardOptions("float32", attention.blockwise),
            model.ForwardOptions("bfloat16", attention.blockwise),
        )
    )
    assert rounded.dtype == ml_dtypes.bfloat16
    check_errors({"hidden": relative(rounded, exact)}, 0.06, record_property, "relative error")

    # Norms are computed in float32.
    norm = jax.jit(model.rms_norm)
    x = exact.astype(ml_dtypes.bfloat16)
    wanted = np.asarray(norm(x.astype(np.float32), params["norm_D"], 1e-6))
    found = norm(x, params["norm_D"], 1e-6)
    assert_array_equal(found, wanted.astype(ml_dtypes.bfloat16))


# ---------------------------------------------------------------- gradients of the forward
def products(jaxpr):
    """The matrix products in a jaxpr, where a loop's body counts once."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from products(inner)


def gradient_program(cfg, remat):
    """The jaxpr of the gradient of the training forward."""
    rows = {name: np.ones((8, 9), np.int32) for name in ("tokens", "positions", "segments")}
    options = model.ForwardOptions("float32", attention.blockwise, remat)

    def loss(params):
        return model.forward(params, cfg, mesh(), rows, options).sum()

    return jax.make_jaxpr(jax.grad(loss))(random_params(cfg, mesh())).jaxpr


@pytest.mark.parametrize("cfg", [TIED, QWEN3], ids=["qwen2", "qwen3"])
def test_only_full_remat_recomputes_matrix_products(cfg):
    counts = {remat: len([*products(gradient_program(cfg, remat))]) for remat in model.REMAT}
    # A layer has seven weights and two products of attention. Each has two more products in its
    # backward. Blockwise attention recomputes its scores.
    assert counts["none"] == counts["dots"] == 3 * 9 + 1 < counts["full"], counts


def test_products_of_float32_are_not_rounded():
    """By default, a TPU or GPU would round float32 inputs."""
    # test_kernel.py changes the default.
    with jax.default_matmul_precision("default"):
        program = gradient_program(TIED, "full")
    highest = (jax.lax.Precision.HIGHEST,) * 2
    found = [equation.params["precision"] for equation in products(program)]
    assert found and all(precision == highest for precision in found), found


def conds(jaxpr):
    """The conds in a jaxpr."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "cond":
            yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from conds(inner)


def test_full_remat_differentiates_a_chunk_where_it_is_recomputed():
    """No cond returns weights or activations for another cond to read. The conds return the hidden
    states of the chunk and, in the backward pass, the sums of the weights' gradients."""
    weights = [name for name in model.shapes(TIED) if name.startswith("layers/")]
    most = {}
    for remat in model.REMAT:
        outputs = [len(cond.outvars) for cond in conds(gradient_program(TIED, remat))]
        assert outputs, "no cond skips a chunk of padding"
        most[remat] = max(outputs)
    assert most["full"] == 1 + len(weights) < most["dots"], most


class Way(NamedTuple):
    """How a gradient is computed: for B rows of T tokens, on a mesh of these dimensions."""

    cfg: model.ModelConfig
    T: int
    B: int
    dims: tuple
    attention: str = "blockwise"
    remat: str = "full"


TWO_LAYERS = dataclasses.replace(TIED, L=2)
TWO_LAYERS_OF_QWEN3 = dataclasses.replace(QWEN3, L=2)
LONG = dataclasses.replace(TWO_LAYERS, H=64, N=2, K=1)  # splash needs heads of 64
# With 100 or 200 rows, a device computes three rows at a time, and skips rows without tokens.
# fmt: off
WAYS = {
    "one device": Way(TWO_LAYERS, 9, 100, (1, 1, 1)),
    "all axes, dots": Way(TWO_LAYERS, 9, 100, (2, 2, 2), remat="dots"),
    "untied, fsdp and tp": Way(UNTIED, 6, 200, (1, 4, 2)),
    "qwen3, all axes": Way(TWO_LAYERS_OF_QWEN3, 9, 100, (2, 2, 2), remat="dots"),
    "two blocks of queries": Way(LONG, 600, 2, (1, 1, 1)),
    "splash": Way(LONG, 130, 2, (2, 1, 1), attention="splash"),
}
SLOW_WAYS = {
    "one device, dots": Way(TWO_LAYERS, 9, 100, (1, 1, 1), remat="dots"),
    "one device, none": Way(TWO_LAYERS, 9, 100, (1, 1, 1), remat="none"),
    "all axes": Way(TWO_LAYERS, 9, 100, (2, 2, 2)),
    "all axes, none": Way(TWO_LAYERS, 9, 100, (2, 2, 2), remat="none"),
    "untied, fsdp": Way(UNTIED, 6, 200, (1, 8, 1)),
    "qwen3, all axes, none": Way(TWO_LAYERS_OF_QWEN3, 9, 100, (2, 2, 2), remat="none"),
    "llama, all axes": Way(LLAMA, 6, 200, (2, 2, 2)),
    "untied, dp and fsdp": Way(UNTIED, 6, 200, (2, 4, 1)),
}
# fmt: on


def random_rows(way, rng):
    """Returns (rows of up to three segments, d_hidden, which rows are real). On each device, the
    rows of padding follow each other and may be anywhere."""
    shards = way.dims[0] * way.dims[1]
    each = way.B // shards
    filled = rng.integers(1, each + 1, shards)
    if shards > 1 and each > 1:
        filled[-1] = 0  # a device without work
    first = rng.integers(0, each, shards)
    real = np.concatenate(
        [np.roll(np.arange(each) < n, i) for n, i in zip(filled, first, strict=True)]
    )
    rows = dict(
        tokens=rng.integers(0, way.cfg.V, (way.B, way.T)),
        positions=rng.integers(0, way.cfg.V, (way.B, way.T)),
        segments=np.sort(rng.integers(1, 4, (way.B, way.T)), 1) * real[:, None],
    )
    rows = {name: values.astype(np.int32) for name, values in rows.items()}
    d_hidden = rng.standard_normal((way.B, way.T, way.cfg.D)).astype(np.float32)
    return rows, d_hidden * real[:, None, None], real


def forward_and_back(way):
    """Returns the jitted function (params, rows, d_hidden) -> (hidden states, gradients)."""
    on = mesh(*way.dims)
    attend = attention.segment_attention(way.attention, "cpu")
    options = model.ForwardOptions("float32", attend, way.remat)

    def run(params, rows, d_hidden):
        def forward(params):
            return model.forward(params, way.cfg, on, rows, options)

        hidden, pull = jax.vjp(forward, params)
        return hidden, pull(d_hidden)[0]

    return jax.jit(run, out_shardings=(None, model.shardings(model.shapes(way.cfg), on)))


@cache
def textbook_forward_and_back(cfg):
    """Returns the same function for the textbook forward, on one device, differentiated by JAX."""

    def run(params, rows, d_hidden):
        inputs = rows["tokens"], rows["positions"], rows["segments"]
        hidden, pull = jax.vjp(lambda params: textbook_hidden(params, cfg, *inputs), params)
        return hidden, pull(d_hidden)[0]

    return jax.jit(run)


@pytest.mark.parametrize("way", by_tier(WAYS, SLOW_WAYS))
def test_gradients_equal_the_textbooks(way, monkeypatch, record_property):
    """On any mesh, and with empty rows, gradients equal those of the textbook forward: no row
    counts twice or is left out."""
    monkeypatch.setattr(model, "TOKENS_AT_ONCE", 3 * way.T)
    rows, d_hidden, real = random_rows(way, np.random.default_rng(7))
    weights = random_weights(way.cfg)
    wanted_hidden, wanted = textbook_forward_and_back(way.cfg)(model.nest(weights), rows, d_hidden)

    run = forward_and_back(way)
    params = place(weights, mesh(*way.dims))
    hidden, grads = run(params, rows, d_hidden)

    errors = {"hidden": relative(np.asarray(hidden)[real], np.asarray(wanted_hidden)[real])}
    for name, wanted_grad in model.flatten(wanted).items():
        if name != "head_VD":  # the hidden states do not depend on it
            errors[name] = relative(np.asarray(model.flatten(grads)[name]), wanted_grad)
    check_errors(errors, 3e-5, record_property, "relative error")
