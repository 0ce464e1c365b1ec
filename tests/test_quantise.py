"""int8 weights of a rollout: compared with NumPy, in every layout, in memory, and in a run."""

import dataclasses
import re
from functools import cache
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import (
    TIED,
    TINY_FLAGS,
    UNTIED,
    check_errors,
    evaluations,
    logits,
    place,
    random_prompts,
    random_weights,
)
from jax.sharding import NamedSharding
from numpy.testing import assert_array_equal
from scipy import special

import model
import train
from infra.rollout import engine, layouts, quantise
from infra.rollout.sampling import Sampling
from infra.run.log import read_jsonl
from test_kernel import mesh
from tools import abstract_rollout

# The axes of each matrix, as stacked over layers, that its product sums over.
SUMMED = {
    "layers/wq_LDNH": (1,),
    "layers/wk_LDKH": (1,),
    "layers/wv_LDKH": (1,),
    "layers/wo_LNHD": (1, 2),
    "layers/w_gate_LDF": (1,),
    "layers/w_up_LDF": (1,),
    "layers/w_down_LFD": (1,),
    "head_VD": (1,),
    "embed_VD": (1,),
}
# The vocabularies divide over the devices.
CONFIGS = {"tied": dataclasses.replace(TIED, V=208), "untied": dataclasses.replace(UNTIED, V=336)}
WAYS = {  # (model, training mesh, layout)
    "one device": ("untied", (1, 1, 1), "replicated"),
    "replicated": ("tied", (1, 8, 1), "replicated"),
    "tp": ("tied", (2, 2, 2), "tp"),
    "tp, untied": ("untied", (1, 8, 1), "tp"),
    "fsdp": ("tied", (2, 2, 2), "fsdp"),
    "maxtext": ("untied", (2, 4, 1), "maxtext"),
}
INT8 = layouts.RolloutSize(answers=8, group=1, prompt_slots=8, answer_slots=12, quantised=True)
each_way = pytest.mark.parametrize("way", WAYS)


def seed_of(way):
    return list(WAYS).index(way)


@cache
def quantised(way):
    """Returns (float32 weights in NumPy, their int8 rollout weights, the layout, the model)."""
    name, dims, kind = WAYS[way]
    cfg = CONFIGS[name]
    on = mesh(*dims)
    masters = random_weights(cfg, seed_of(way))
    # Some output channels are all zeros.
    masters["layers/wq_LDNH"][0, :, 1, 2] = 0
    masters["layers/wo_LNHD"][1, ..., 3] = 0
    layout, why = layouts.rollout_layout(kind, cfg, on, "float32", INT8)
    assert "int8 weights" in why
    weights = layouts.to_rollout(place(masters, on), layout, "float32", True)
    return masters, weights, layout, cfg


def is_quantised(a):
    return isinstance(a, model.Quantised)


def pairs(weights):
    """Returns {flat name: array or Quantised}."""
    (stack,) = weights["layers"]
    layers = {f"layers/{name}": a for name, a in stack.items()}
    return {name: a for name, a in weights.items() if name != "layers"} | layers


# ---------------------------------------------------------------- the weights
@each_way
def test_weights_are_within_half_a_step_of_the_masters(way, record_property):
    """Quantised weights are within half a step of the masters, in float64. A step is 1/127 of the
    channel's largest weight, over all devices."""
    masters, weights, layout, cfg = quantised(way)
    found = pairs(weights)
    assert {name for name, a in found.items() if is_quantised(a)} == SUMMED.keys() & found.keys()
    errors = {}
    for name, a in found.items():
        w = masters[name].astype(np.float64)
        if not is_quantised(a):
            assert_array_equal(a, masters[name])
            continue
        int8 = np.asarray(a.int8)
        scale = np.asarray(a.scale, np.float64)
        assert int8.dtype == np.int8 and a.scale.dtype == np.float32
        largest = abs(w).max(SUMMED[name], keepdims=True)
        step = np.where(largest > 0, largest / 127, 1)
        assert scale.shape == step.shape
        errors[f"{name} scale"] = abs(scale / step - 1)
        # The largest weight of each channel is 127 steps.
        is_full = abs(int8.astype(int)).max(SUMMED[name], keepdims=True) == 127
        assert_array_equal(is_full, largest > 0)
        half_steps = abs(int8 * scale - w) / (step / 2)
        assert half_steps.max() < 1 + 1e-4, name
        # The errors come close to the bound, so the weights really were rounded.
        assert half_steps.max() > 0.9, name
    check_errors(errors, 1e-6, record_property)


@each_way
def test_no_matrix_is_held_in_more_than_a_byte(way):
    """Every matrix takes one byte per value, plus its scales, and lies where the layout says."""
    _, weights, layout, cfg = quantised(way)
    wanted = 0
    for name, shape in model.shapes(cfg).items():
        size = np.prod(shape)
        if name in SUMMED:
            channels = size // np.prod([shape[axis] for axis in SUMMED[name]])
            wanted += size + 4 * channels
        else:
            wanted += 4 * size
    assert sum(a.nbytes for a in jax.tree.leaves(weights)) == wanted
    for name, a in pairs(weights).items():
        matrix = a.int8 if is_quantised(a) else a
        place = NamedSharding(layout.mesh, layouts.rollout_spec(name, layout))
        assert matrix.sharding.is_equivalent_to(place, matrix.ndim), (name, matrix.sharding)
    # The abstract weights, which are compiled for absent devices, have the same shapes and
    # shardings.
    abstract = abstract_rollout.abstract_weights(cfg, layout, jnp.dtype("float32"), True)
    for a, b in zip(jax.tree.leaves(weights), jax.tree.leaves(abstract), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim), (a.sharding, b.sharding)


@pytest.mark.parametrize("way", ["replicated", "tp"])
def test_matrices_move_between_devices_as_int8(way):
    name, dims, kind = WAYS[way]
    cfg = CONFIGS[name]
    on = mesh(*dims)
    layout, _ = layouts.rollout_layout(kind, cfg, on, "float32", INT8)
    params = place(random_weights(cfg), on)
    names = tuple(model.flatten(params))
    move_top, move_stack = layouts.compiled_moves(names, on, layout, "float32", True, 0.0)
    top = move_top.lower({name: a for name, a in params.items() if name != "layers"})
    layers = move_stack.lower(params["layers"], 0, size=cfg.L)
    text = top.compile().as_text() + layers.compile().as_text()
    gathered = re.findall(r" = (\w+)\[([\d,]*)\]\S* all-gather", text)
    sizes = [(dtype, np.prod([int(n) for n in dims.split(",")])) for dtype, dims in gathered]
    assert max(size for dtype, size in sizes if dtype == "s8") == cfg.V * cfg.D
    # Other all-gathers move at most scales, one for each output channel.
    most = max(cfg.N * cfg.H, cfg.F, cfg.V)
    assert max(size for dtype, size in sizes if dtype != "s8") <= most, sizes


def test_weights_that_are_not_finite_stay_so():
    """NaN stays NaN in int8 weights: otherwise a run that has diverged would go on."""
    w = np.ones((2, 4, 3, 2), np.float32)
    w[1, 2, 0, 1] = np.nan
    cast = quantise.cast("layers/wq_LDNH", jnp.array(w), "float32", True)
    is_nan = np.isnan(model.dequantise(cast, "float32"))
    assert is_nan[1, :, 0, 1].all()
    assert is_nan.sum() == w.shape[1]


def test_bytes_that_a_step_reads_count_a_matrix_as_a_byte():
    cfg = CONFIGS["untied"]
    layout, text = layouts.rollout_layout("tp", cfg, mesh(1, 8, 1), "bfloat16", INT8)
    assert "GiB of int8 weights" in text
    weights, slot = layouts.bytes_read(cfg, layout, "bfloat16")
    quantised_weights, same_slot = layouts.bytes_read(cfg, layout, "bfloat16", True)
    assert weights == 2 * quantised_weights
    assert slot == same_slot == 2 * cfg.L * cfg.K // 4 * cfg.H * 2


# ---------------------------------------------------------------- rollouts
def sampled(weights, cfg, layout, prompts, seed):
    sampler = engine.Engine(cfg, None, layout, "float32", "int8", 12, weights=weights)
    return sampler.generate(prompts, jax.random.key(seed), Sampling())


@each_way
def test_rollouts_equal_those_of_dequantised_weights(way, record_property):
    """A rollout with int8 weights has the same tokens as one with the dequantised weights, and its
    logprobs equal those of an uncached forward."""
    _, weights, layout, cfg = quantised(way)
    prompts = random_prompts(cfg, (5, 3, 8, 1, 2, 6, 4, 7), seed_of(way))
    out = sampled(weights, cfg, layout, prompts, seed_of(way))
    dense = {}
    for name, a in pairs(weights).items():
        dense[name] = np.asarray(a.int8) * np.asarray(a.scale) if is_quantised(a) else np.asarray(a)

    cached_weights = layouts.to_rollout(place(dense, mesh(*WAYS[way][1])), layout, "float32")
    cached = sampled(cached_weights, cfg, layout, prompts, seed_of(way))
    assert_array_equal(out["tokens_BT"], cached["tokens_BT"])
    gap = abs(out["logprobs_BT"] - cached["logprobs_BT"]) / (1 + abs(cached["logprobs_BT"]))
    check_errors({"cached": gap}, 1e-5, record_property, "cached, relative")

    answers = [row[:n].tolist() for row, n in zip(out["tokens_BT"], out["lengths_B"], strict=True)]
    rows = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    z_BTV = logits(place(dense, mesh()), cfg, rows).astype(np.float64)
    errors = {}
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        z_TV = z_BTV[i, len(prompt) - 1 : len(rows[i]) - 1]
        wanted = special.log_softmax(z_TV, -1)[range(len(answer)), answer]
        errors[i] = abs(out["logprobs_BT"][i, : len(answer)] - wanted)
    check_errors(errors, 1e-4, record_property, "uncached")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_activations_and_the_cache_stay_in_the_compute_dtype(dtype, monkeypatch):
    cfg = CONFIGS["tied"]
    layout, _ = layouts.rollout_layout("replicated", cfg, mesh(), dtype, INT8)
    weights = layouts.to_rollout(place(random_weights(cfg), mesh()), layout, dtype, True)
    decode = mock.Mock(wraps=engine.jitted_decode("cpu"))
    monkeypatch.setattr(engine, "jitted_decode", lambda platform: decode)
    sampled(weights, cfg, layout, random_prompts(cfg, (3, 4)), 0)
    (_, state, *_), _ = decode.call_args
    assert {a.dtype for a in jax.tree.leaves(state)} == {jnp.dtype(dtype)}
    assert weights["norm_D"].dtype == weights["layers"][0]["bq_LNH"].dtype == dtype


# ---------------------------------------------------------------- the flag
def test_flags_say_what_is_quantised():
    on = mesh()
    # fmt: off
    # (dtype, rollout_dtype, dtype of all that is not quantised, are matrices quantised)
    cases = [
        ("auto", "auto", "float32", False),
        ("bfloat16", "auto", "bfloat16", False),
        ("float32", "bfloat16", "bfloat16", False),
        ("auto", "int8", "float32", True),
        ("bfloat16", "int8", "bfloat16", True),
    ]
    # fmt: on
    for dtype, rollout_dtype, rest, is_int8 in cases:
        cfg = train.resolve(train.Config(dtype=dtype, rollout_dtype=rollout_dtype), on)
        assert quantise.dtypes(cfg) == (rest, is_int8), (dtype, rollout_dtype)


def test_a_run_samples_in_int8_and_evaluates_its_model(tmp_path, monkeypatch, train_here):
    to_rollout = mock.Mock(wraps=layouts.to_rollout)
    monkeypatch.setattr(layouts, "to_rollout", to_rollout)
    # With an entropy bonus all answers are computed, whatever their advantage.
    train_here(TINY_FLAGS, "--rollout_dtype int8 --entropy_bonus 1e-6 --out run")
    rows = read_jsonl(tmp_path / "run/metrics.jsonl")
    # There are rollouts in steps 2 and 3, and evaluations after steps 1, 2 and 3.
    used = [call.args[2:] for call in to_rollout.call_args_list]
    evaluation, in_int8 = ("float32", False), ("float32", True)
    assert used == [evaluation, in_int8, evaluation, in_int8, evaluation]
    assert [step for step, _ in evaluations(rows)] == [1, 2, 3]
    gaps = [row["logprob_gap/mean"] for row in rows if "logprob_gap/mean" in row]
    assert len(gaps) == 2
    # The gap is far larger than float32 rounding, and far smaller than for a different model.
    assert min(gaps) > 1e-4 and max(gaps) < 0.1, gaps
