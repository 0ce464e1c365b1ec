"""Rollouts: answers compared with transformers and with an uncached forward, in all layouts, in
waves and in stages."""

import dataclasses
import math
import re
import shutil
from functools import cache
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import (
    TIED,
    UNTIED,
    chatml,
    check_errors,
    edit,
    generate,
    greedy_answers,
    random_params,
    random_prompts,
    spoiled_copy,
)
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_allclose, assert_array_equal
from test_model import by_tier, eight_devices, hf_model, load
from test_sampling import GREEDY, PLAIN, compiled_sample

import model
import train
from infra.data import hf
from infra.host import chips
from infra.rollout import engine, layouts, waves
from infra.rollout.engine import Engine
from infra.update import attention
from test_kernel import mesh
from tools import abstract_rollout, bench_rollout


# ---------------------------------------------------------------- against transformers
@pytest.mark.parametrize(
    "name, has_stops, devices",
    [
        ("tied", False, 1),
        ("untied", True, 1),
        ("qwen3", False, 1),
        ("qwen3", False, 8),
        ("llama", True, 8),
        ("llama3", False, 1),
    ],
)
def test_greedy_answers_equal_transformers(name, has_stops, devices, tmp_path, record_property):
    """Greedy answers to prompts of different lengths equal those of transformers, even if two stop
    ids end rows early."""
    n = 64
    saved = hf_model(name)
    prompts = random_prompts(saved.cfg, (9, 1, 14, 5, 3, 8, 2, 11))
    untruncated = greedy_answers(saved.theirs, prompts, n)
    assert min(len(set(row)) for row in untruncated) > 10, "an answer is a few tokens repeated"
    # If a Llama's config.json names no stop id, hf.read_config adds 2, the default of transformers.
    cfg = dataclasses.replace(saved.cfg, stop_ids=())
    stops = []
    wanted = untruncated
    if has_stops:
        stops = [untruncated[0][20], untruncated[2][33]]
        wanted = greedy_answers(saved.theirs, prompts, n, eos_token_id=stops)
        copy = spoiled_copy(saved.directory, tmp_path, "config.json", {"eos_token_id": stops[0]})
        # Both files may name stop tokens.
        edit(copy / "generation_config.json", {"eos_token_id": stops[1:]})
        cfg = hf.read_config(copy)

    if devices == 1:
        out = generate(saved.params, cfg, prompts, n, sampling=GREEDY)
    else:
        on = eight_devices(cfg)
        params, _ = load(saved.directory, on)
        out = generate(params, cfg, prompts, n, on, "tp", sampling=GREEDY)
    is_stop = np.isin(untruncated, stops)
    has_ended = is_stop.any(1)
    lengths = np.where(has_ended, is_stop.argmax(1) + 1, n)
    assert_array_equal(out["tokens_BT"][:, : len(wanted[0])], wanted)
    assert_array_equal(out["lengths_B"], lengths)
    assert_array_equal(out["truncated_B"], ~has_ended)
    after = np.arange(n) >= out["lengths_B"][:, None]
    assert not out["tokens_BT"][after].any()
    assert not out["logprobs_BT"][after].any()
    assert not has_stops or len(set(lengths)) > 2
    record_property("equal tokens a row", ", ".join(map(str, lengths)))


def test_an_engine_answers_questions_in_texts(tiny_directory):
    """On eight devices, the greedy answers to three questions are those of transformers."""
    transformers = pytest.importorskip("transformers")
    questions = ["What is 2 + 3?", "What is 159 + 855?", "Why?"]
    engine = Engine.from_directory(tiny_directory, max_answer=24)
    prompts = engine.tokenizer.encode([chatml("Be brief.", question) for question in questions])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tiny_directory, dtype="float32")
    stop_ids = list(engine.model_cfg.stop_ids)
    answers = greedy_answers(theirs, prompts, 24, eos_token_id=stop_ids)
    wanted = [engine.tokenizer.decode(tokens) for tokens in answers]
    assert engine.answer(questions, "Be brief.") == wanted
    assert len(set(wanted)) == 3 and all(wanted)
    assert engine.answer(questions, "Be brief.", temperature=1) != wanted
    with pytest.raises(TypeError, match="a list of texts"):
        engine.answer(questions[0])


def test_an_engine_asks_as_in_the_training(tiny_directory, tmp_path):
    directory = tmp_path / "final"
    shutil.copytree(tiny_directory, directory)
    (directory / "podgrpo.json").write_text('{"system": "Be brief."}')
    engine = Engine.from_directory(str(directory), max_answer=8)
    asked = []
    engine.generate = lambda prompts, *_: asked.append(prompts) or {}
    engine.texts = lambda out: []
    for how in ({}, {"system": "Be brief."}, {"system": ""}):
        engine.answer(["Why?"] * 8, **how)
    assert asked[0] == asked[1] != asked[2]


def test_prompts_that_do_not_divide_over_the_devices_are_refused():
    on = mesh(1, 8, 1)
    params = random_params(TIED, on)
    prompts = random_prompts(TIED, (4, 4, 4))
    with pytest.raises(ValueError, match="3 prompts do not divide into 8 parts"):
        generate(params, TIED, prompts, 8, on)


def test_an_engine_takes_as_many_devices_as_divide_the_model(tiny_directory, monkeypatch):
    six = jax.local_devices()[:6]
    monkeypatch.setattr(jax, "local_devices", lambda: six)
    engine = Engine.from_directory(tiny_directory, max_answer=8)
    assert engine.model_cfg.D == 128
    assert engine.layout.mesh.size == 4


# ---------------------------------------------------------------- layouts, waves, stages
def test_rows_do_not_depend_on_others(record_property):
    """The answer to a prompt does not depend on the other rows, nor on the width of the padding."""
    params = random_params(UNTIED, mesh())
    ours = random_prompts(UNTIED, (6, 2, 7, 4))
    others = random_prompts(UNTIED, (3, 13, 1, 4), seed=1)
    mixed = [ours[0], others[1], ours[2], others[3]]
    a = generate(params, UNTIED, ours, 16)
    b = generate(params, UNTIED, mixed, 16)
    assert_array_equal(a["tokens_BT"][::2], b["tokens_BT"][::2])
    errors = abs(a["logprobs_BT"] - b["logprobs_BT"])[::2]
    check_errors({"logprobs": errors}, 1e-5, record_property)
    differ = a["tokens_BT"] != b["tokens_BT"]
    assert differ[1::2].any(-1).all()


# With this seed, every uniform is at least 5e-6 from a step of its CDF, so that rounding cannot
# change a token.
SEED = 11
MAX_ANSWER = 24
CFG = dataclasses.replace(TIED, V=208, stop_ids=tuple(range(0, 60, 3)))
PROMPTS = [p for p in random_prompts(CFG, (5, 3, 8, 1, 2, 6, 4, 7)) for _ in range(4)]


@jax.jit
def uncached_step(params, tokens_BT, lengths_B, key, t):
    """Run the training forward on all tokens so far. Returns (next tokens, their logprobs)."""
    B, T = tokens_BT.shape
    rows = dict(
        tokens=tokens_BT,
        positions=jnp.tile(jnp.arange(T), (B, 1)),
        segments=jnp.ones((B, T), jnp.int32),
    )
    options = model.ForwardOptions("float32", attention.blockwise)
    hidden_BTD = model.forward(params, CFG, mesh(), rows, options)
    last_BD = hidden_BTD[jnp.arange(B), lengths_B - 1]

    def uniform(row):
        step = jax.random.fold_in(key, t)
        return jax.random.uniform(jax.random.fold_in(step, row))

    u_B = jax.vmap(uniform)(jnp.arange(B))
    return compiled_sample(last_BD @ model.head(params).T, u_B, PLAIN, 1)


@cache
def uncached_answers():
    """Returns (answers, whether no stop token came, logprobs) that `generate` must give for
    PROMPTS."""
    params = random_params(CFG, mesh())
    B = len(PROMPTS)
    lengths = np.array([len(prompt) for prompt in PROMPTS])
    tokens = np.zeros((B, lengths.max() + MAX_ANSWER), np.int32)
    for row, prompt in zip(tokens, PROMPTS, strict=True):
        row[: len(prompt)] = prompt
    live = np.ones(B, bool)
    answer_logprobs = [[] for _ in PROMPTS]
    for t in range(MAX_ANSWER):
        step = uncached_step(params, tokens, lengths, jax.random.key(SEED), t)
        drawn, logprobs = map(np.asarray, step)
        for i in np.flatnonzero(live):
            tokens[i, lengths[i]] = drawn[i]
            lengths[i] += 1
            answer_logprobs[i].append(logprobs[i])
            live[i] = drawn[i] not in CFG.stop_ids
    ended = zip(tokens, PROMPTS, lengths, strict=True)
    answers = [row[len(prompt) : length].tolist() for row, prompt, length in ended]
    return answers, live, answer_logprobs


class Way(NamedTuple):
    """How a rollout is laid out, and what the test expects of it."""

    dims: tuple
    kind: str
    options: dict
    heard: int  # calls of `progress`
    dropped: int = 0  # how often finished rows left the batch
    slots: tuple = ()  # sizes of the KV cache as it grows


GROWING = (32,)
# fmt: off
WAYS = {
    "one device": Way((1, 1, 1), "replicated", dict(stage=8), 4, 1, GROWING),
    "fsdp": Way((2, 2, 2), "fsdp", {}, 2),
    "tp, waves": Way((2, 2, 2), "tp", dict(at_once=4), 4),
    "by layer, stages": Way((2, 2, 2), "tp", dict(stage=8, by_layer=True), 4, 0, GROWING),
    "maxtext, stages, waves": Way((2, 4, 1), "maxtext", dict(stage=8, at_once=9), 8, 1, GROWING),
}
SLOW_WAYS = {
    "one device, waves": Way((1, 1, 1), "replicated", dict(stage=6, at_once=12), 15, 6, (16, 32)),
    "replicated": Way((1, 8, 1), "replicated", {}, 2),
    "tp, stages": Way((2, 4, 1), "tp", dict(stage=8), 4, 0, GROWING),
    "fsdp, stages, waves": Way((1, 8, 1), "fsdp", dict(stage=8, at_once=2), 8, 1, GROWING),
    "auto, no groups": Way((1, 8, 1), "auto", dict(group=1, at_once=3), 4),
}
# fmt: on


@pytest.mark.parametrize("way", by_tier(WAYS, SLOW_WAYS))
def test_rollouts_equal_uncached_forward(way, monkeypatch, record_property):
    """Rollouts equal an uncached forward, for prompts of different lengths, in groups, with growing
    KV caches, in waves, and while finished rows leave the batch."""
    answers, live, logprobs = uncached_answers()
    resize = mock.Mock(wraps=layouts.resize_array)
    monkeypatch.setattr(layouts, "resize_array", resize)
    # Prefill two prompts at a time.
    monkeypatch.setattr(engine, "PREFILL_TOKENS", 16)
    heard = []

    def progress(done, tokens):
        heard.append((done, tokens))

    on = mesh(*way.dims)
    params = random_params(CFG, on)
    options = {"group": 4, "progress": progress} | way.options
    out = generate(params, CFG, PROMPTS, MAX_ANSWER, on, way.kind, SEED, **options)
    errors = {}
    for i, answer in enumerate(answers):
        n = len(answer)
        assert out["tokens_BT"][i].tolist() == answer + [0] * (MAX_ANSWER - n), i
        assert out["lengths_B"][i] == n
        assert out["truncated_B"][i] == live[i]
        assert not out["logprobs_BT"][i, n:].any()
        errors[i] = abs(out["logprobs_BT"][i, :n] - logprobs[i]).max()
    check_errors(errors, 1e-4, record_property)
    tokens = sum(map(len, answers))
    assert heard[-1] == (len(live), tokens), heard
    assert len(heard) == way.heard
    dropped = 0
    slots = set()
    for (a, index), how in resize.call_args_list:
        # Look only at the hidden states: other arrays of the state are resized with them.
        if a.ndim == 2:
            slots.add(how["slots"])
            dropped += len(a) > len(index)
    assert dropped == way.dropped
    assert slots == set(way.slots)


def test_greedy_answers_equal_on_meshes():
    cfg = dataclasses.replace(TIED, V=208)
    prompts = random_prompts(TIED, (5, 3, 8, 8, 1, 2, 4, 7))
    params = random_params(cfg, mesh())
    one = generate(params, cfg, prompts, 24, kind="auto", sampling=GREEDY)
    on = mesh(2, 2, 2)
    params = random_params(cfg, on)
    for kind in ("replicated", "tp"):
        other = generate(params, cfg, prompts, 24, on, kind, sampling=GREEDY)
        assert_allclose(one["logprobs_BT"], other["logprobs_BT"], rtol=0, atol=1e-4)
        for name in ("tokens_BT", "lengths_B", "truncated_B"):
            assert_array_equal(one[name], other[name])


def test_decode_works_in_place_and_ends(monkeypatch):
    """decode donates its input state, and writes no more slots once all rows have ended."""
    cfg = dataclasses.replace(TIED, stop_ids=tuple(range(TIED.V)))
    decode = engine.jitted_decode("cpu")
    taken, left = [], []

    def watched(weights, state, *args, **options):
        new_state, out = decode(weights, state, *args, **options)
        taken.extend(jax.tree.leaves(state))
        left.append(new_state)
        return new_state, out

    monkeypatch.setattr(engine, "jitted_decode", lambda platform: watched)
    params = random_params(cfg, mesh())
    out = generate(params, cfg, random_prompts(cfg, (4, 4)), 24, at_once=1, stage=9)
    assert len(taken) == 10
    assert all(a.is_deleted() for a in taken), "a copy is made"
    assert (out["lengths_B"] == 1).all()
    assert not out["truncated_B"].any()
    keys_LBKSH = np.asarray(left[-1].answer_caches[0].keys)
    is_written = abs(keys_LBKSH).max((0, 1, 2, 4)) > 0
    assert_array_equal(is_written, np.arange(16) < 1)


def test_the_cache_of_a_wave_goes_before_the_next_one_is_made(monkeypatch):
    params = random_params(TIED, mesh())
    empty_state = layouts.empty_state
    held = []

    def watched(**sizes):
        held.append(sum(a.ndim == 5 for a in jax.live_arrays()))
        return empty_state(**sizes)

    monkeypatch.setattr(layouts, "empty_state", watched)
    generate(params, TIED, random_prompts(TIED, (4, 4, 4)), 8, at_once=1)
    assert len(held) == 3
    assert held[1:] == held[:1] * 2, held


def largest_collective(program):
    """Returns the bytes of the largest array that a collective of a compiled program returns."""
    kinds = "all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute"
    results = re.findall(rf" = (.+?) (?:{kinds})(?:-start)?\(", program.as_text())
    arrays = re.findall(r"[a-z]+(\d+)\w*\[([\d,]*)\]", " ".join(results))
    assert arrays, "no collective is found, though processes agree on when to end"
    sizes = []
    for bits, dims in arrays:
        # A scalar has no dimensions.
        lengths = [int(n) for n in dims.split(",") if n]
        sizes.append(int(bits) // 8 * math.prod(lengths))
    return max(sizes)


def split_over_8(kind, size):
    """Returns (a model, its layout of this kind on eight devices). With tp, they split its V and F;
    pairs of them split the key/value heads, and the four pairs the rows in attention."""
    cfg = dataclasses.replace(TIED, V=208)
    layout, _ = layouts.rollout_layout(kind, cfg, mesh(1, 8, 1), "float32", size)
    assert layout.sharing == (4 if kind == "tp" else 1)
    return cfg, layout


@pytest.mark.parametrize("kind", ["replicated", "tp", "fsdp"])
def test_decode_moves_no_cache_between_devices(kind):
    """Decode moves no KV cache between devices. jax 0.10 would gather the complete cache if its
    layout were constrained outside of a shard_map."""
    size = layouts.RolloutSize(64, group=8, prompt_slots=2048, answer_slots=2048)
    cfg, layout = split_over_8(kind, size)
    program = abstract_rollout.lower_decode(cfg, layout, jnp.dtype("float32"), size).compile()
    _, cache = layouts.bytes_of_step(cfg, layout, jnp.dtype("float32"), size)
    assert largest_collective(program) < cache / 10
    assert program.memory_analysis().temp_size_in_bytes < cache, "the cache is copied"


@pytest.mark.parametrize("kind", ["replicated", "tp", "fsdp"])
def test_decode_rounds_no_products_of_float32(kind):
    """By default, a TPU or GPU would round float32 inputs."""
    size = layouts.RolloutSize(64, group=8, prompt_slots=32, answer_slots=32)
    cfg, layout = split_over_8(kind, size)
    # test_kernel.py changes the default.
    with jax.default_matmul_precision("default"):
        lowered = abstract_rollout.lower_decode(cfg, layout, jnp.dtype("float32"), size)
    found = [line for line in lowered.as_text().splitlines() if "stablehlo.dot_general" in line]
    rounded = [line for line in found if "[HIGHEST, HIGHEST]" not in line]
    assert found and not rounded, rounded


def numbered(a, axis):
    """Add the index along an axis to all values."""
    index = jnp.arange(a.shape[axis], dtype=a.dtype)
    others = [i for i in range(a.ndim) if i != axis]
    return a + jnp.expand_dims(index, others)


def wave_of(live, group, slots):
    """A wave of 8 rows in one part, in which only the `live` ones have not ended. Each value of its
    caches is the number of the prompt or row that it belongs to."""
    layout = layouts.layout_of("replicated", 1, TIED, mesh())
    size = dict(B=8, n_prompts=8 // group, width=64, slots=slots)
    size |= dict(dtype=jnp.float32, cfg=TIED, layout=layout)
    prompts, answers, hidden_BD = layouts.empty_state(**size)
    prompts = jax.tree.map(lambda a: numbered(a, 1), prompts)
    answers = jax.tree.map(lambda a: numbered(a, 1), answers)
    state = layouts.DecodeState(prompts, answers, numbered(hidden_BD, 0))
    row_ids = np.arange(8)[None]
    return waves.Wave(row_ids, np.isin(row_ids, live), group, slots, state), layout


@pytest.mark.parametrize(
    "group, live, prompts",
    [
        # Prompts 1 and 3 of four still have live answers. They stay, in order.
        (2, [2, 3, 6, 7], [1, 3]),
        # Prompt 0 of two has three live answers, and prompt 1 has one. Each answer gets a prompt.
        (4, [0, 2, 3, 5], [0, 0, 0, 1]),
    ],
)
def test_rows_that_stay_keep_their_caches(group, live, prompts):
    wave, layout = wave_of(live, group, slots=256)
    smaller = waves.resize_wave(wave, 256, TIED, layout, quantised=False)
    assert smaller.row_ids.tolist() == [live]
    assert smaller.is_live.all()
    assert smaller.group == len(live) // len(prompts)
    for a in jax.tree.leaves(smaller.state.prompt_caches):
        assert_array_equal(a[0, :, 0, 0, 0], prompts)
    for a in jax.tree.leaves(smaller.state.answer_caches):
        assert_array_equal(a[0, :, 0, 0, 0], live)
    assert_array_equal(smaller.state.hidden_BD[:, 0], live)


def test_on_cpus_the_matmuls_of_a_row_count(monkeypatch):
    """With weights of 1 TiB, other devices keep all 8 rows, but a CPU keeps only the live one."""
    wave, layout = wave_of([5], group=2, slots=64)
    weight_bytes = 2**40
    monkeypatch.setattr(layouts, "bytes_read", lambda *_: (weight_bytes, 1000))
    is_live_RPG = wave.is_live.reshape(1, 4, 2)
    assert waves.fewer_rows(is_live_RPG, 64000, 64000, 0, weight_bytes) == (4, 2)
    smaller = waves.resize_wave(wave, 64, TIED, layout, quantised=False)
    assert smaller.row_ids.tolist() == [[5]]


# ---------------------------------------------------------------- plans
GIB = 2**30
SIZE = layouts.RolloutSize(answers=128, group=8, prompt_slots=1024, answer_slots=256)


def sizes(name):
    return model.ModelConfig(*bench_rollout.SIZES[name][:7], 1e6, 1e-6, True, 9999, ())


def layout_on_8(kind, cfg, size=SIZE):
    """The layout of this kind on eight devices."""
    layout, _ = layouts.rollout_layout(kind, cfg, mesh(1, 8, 1), "bfloat16", size)
    return layout


def set_memory(monkeypatch, gib):
    monkeypatch.setattr(chips, "device_memory", lambda device: gib)


def test_layout_is_chosen_by_size_and_memory(monkeypatch):
    on = mesh(1, 8, 1)
    # fmt: off
    cases = [
        ("3B", 32, "replicated", 1),
        ("3B", math.inf, "replicated", 1),
        ("7B", 32, "tp", 2),
        ("7B", 80, "replicated", 1),
        ("32B", 32, "tp", 4),
        ("14B", 4, "fsdp", 1),
    ]
    # fmt: on
    for name, gib, kind, tp in cases:
        set_memory(monkeypatch, gib)
        layout, why = layouts.rollout_layout("auto", sizes(name), on, "bfloat16", SIZE)
        assert layout.kind == kind, (name, gib, why)
        assert why.startswith(kind), (name, gib, why)
        assert list(layout.mesh.devices.flat) == list(on.devices.flat)
        assert layout.mesh.shape["tp"] == tp


def test_fastest_layout_is_chosen_where_the_speed_is_known(monkeypatch):
    """On chips of known speed, the layout with the fastest estimated step is chosen, or one that
    splits the weights less and takes at most 3% longer. More tp means fewer bytes of weights to
    read, but longer sums and exchanges in each layer."""
    on = mesh(1, 8, 1)
    set_memory(monkeypatch, 32)
    narrow = dataclasses.replace(sizes("0.5B"), D=128, F=512)
    # fmt: off
    cases = [
        (sizes("3B"), "TPU v6 lite", "tp", 4),
        (sizes("7B"), "TPU v6 lite", "tp", 8),
        (narrow,      "TPU v6 lite", "replicated", 1),
        (sizes("7B"), "NVIDIA H100", "tp", 4),
        (sizes("1.5B"), "NVIDIA H100", "replicated", 1),
    ]
    # fmt: on
    for cfg, chip, kind, tp in cases:
        monkeypatch.setattr(chips, "chip", lambda device, chip=chip: chips.CHIPS[chip])
        layout, why = layouts.rollout_layout("auto", cfg, on, "bfloat16", SIZE)
        parts = layout.mesh.size // layout.mesh.shape["dp"]
        assert layout.kind == kind, why
        assert parts == tp, why
        times = [float(ms) for ms in re.findall(r"([\d.]+) ms", why)]
        assert len(times) > 1, why
        chosen = re.search(rf"{kind} \d+ x {tp} ([\d.]+) ms", why)
        assert float(chosen[1]) <= 1.03 * min(times), why


def test_the_layout_is_fastest_halfway_through_a_rollout(monkeypatch):
    """Halfway, 512 answers decode fastest if four devices split the weights, and 2,048 answers if
    two do. With all 512 answers live and a full cache, two devices would be fastest."""
    set_memory(monkeypatch, 32)
    monkeypatch.setattr(chips, "chip", lambda device: chips.CHIPS["TPU v6 lite"])
    cfg = sizes("3B")
    on = mesh(1, 8, 1)
    found = {tp: layouts.layout_of("tp", tp, cfg, on) for tp in (2, 4, 8)}

    def chosen(size):
        layout, _ = layouts.rollout_layout("auto", cfg, on, "bfloat16", size)
        return layout

    size = layouts.RolloutSize(512, group=8, prompt_slots=256, answer_slots=1024)
    assert chosen(size) == found[4]
    more = dataclasses.replace(size, answers=2048)
    assert chosen(more) == found[2]
    # Here, eight devices would be faster by less than 3%.
    size = layouts.RolloutSize(64, group=8, prompt_slots=1024, answer_slots=1024)
    with_4 = layouts.seconds_halfway(cfg, found[4], "bfloat16", size)
    with_8 = layouts.seconds_halfway(cfg, found[8], "bfloat16", size)
    assert with_8 < with_4 < 1.03 * with_8
    assert chosen(size) == found[4]


@pytest.mark.parametrize("kind, split", [("replicated", ""), ("tp", "NKFV")])
def test_weights_of_a_rollout_are_split_by_heads_units_and_vocabulary(kind, split):
    """Replicated weights are complete on each device. tp splits weights by heads, feed-forward and
    vocabulary, but not by D: otherwise each decode step would gather them."""
    layout = layout_on_8(kind, sizes("3B"))
    for name in model.shapes(sizes("3B")):
        dims = model.letters(name)
        axes = layouts.rollout_spec(name, layout)
        for dim, axis in zip(dims, axes, strict=True):
            parts = layouts.num_shards(P(axis), layout.mesh)
            assert (parts > 1) == (dim in split), (name, dim)


def test_rows_that_fit_fill_half_of_the_free_memory(monkeypatch):
    """The KV cache of the rows that decode at once fills half of the free memory. In an evaluation
    each row has its own prompt; in a rollout a group shares one."""
    cfg = sizes("3B")
    state_bytes = 12 * GIB
    # Dimensions along which matrices are split, and over how many devices.
    splits = {"replicated": {}, "fsdp": {"D": 8}, "tp": {"N": 8, "F": 8, "V": 8, "K": 2}}
    for kind, heads in (("replicated", 2), ("fsdp", 2), ("tp", 1)):
        layout = layout_on_8(kind, cfg)
        weights = 0
        for name, shape in model.shapes(cfg).items():
            dims = model.letters(name)
            # Norms are not split.
            split = {} if dims in ("D", "LD") else splits[kind]
            parts = [split.get(dim, 1) for dim in dims]
            n_bytes = 2 * math.prod(shape)
            weights += n_bytes / math.prod(parts)
        half = (32 * GIB - state_bytes - weights) / 2
        for group, slots in ((1, 1024 + 256), (8, 128 + 256)):
            keys_and_values = 36 * 2 * heads * 128 * 2 * slots
            cases = [(32, half // keys_and_values), (12, 1), (math.inf, 2**30)]
            for gib, rows in cases:
                set_memory(monkeypatch, gib)
                found = layouts.rows_that_fit(cfg, layout, "bfloat16", SIZE, state_bytes, group)
                assert found == rows, (kind, group, gib)


def test_rows_that_fit_count_the_prompts_of_groups_that_are_split(monkeypatch):
    """If fewer rows fit than share a prompt, each part of the group caches the prompt."""
    cfg = sizes("3B")
    size = dataclasses.replace(SIZE, answers=17 * 8, group=17, prompt_slots=2048, answer_slots=128)
    layout = layout_on_8("replicated", cfg, size)
    bytes_of_slot = 36 * 2 * 2 * 128 * 2
    free = 2 * 16 * (2048 / 17 + 128) * bytes_of_slot
    set_memory(monkeypatch, (2 * cfg.n_params + free) / GIB)
    rows = layouts.rows_that_fit(cfg, layout, "bfloat16", size, 0, 17)
    _, group = waves.plan_waves(size.answers, 8, 17, rows)
    assert group == 1
    assert rows == free // 2 // ((2048 + 128) * bytes_of_slot) == 1


def live(*devices):
    """Returns which answers are live, bool [devices, prompts, group]. A text such as "110 000"
    gives the answers of a device."""
    prompts_of_device = [device.split() for device in devices]
    answers = [[list(prompt) for prompt in prompts] for prompts in prompts_of_device]
    return np.array(answers) == "1"


def test_batch_shrinks_where_that_saves_a_tenth():
    # fmt: off
    cases = [
        # (live answers, bytes of the weights, prompts per device and answers of each from then on)
        (live("1100 0100 0000 0000"), 100, (2, 2)),
        (live("1110 0100 0000 0000"), 100, (2, 4)),
        (live("1100 0100 0010 0000"), 100, (4, 1)),
        (live("1000 0000 0000 0000", "1000 0100 0000 0000"), 100, (2, 1)),
        (live("1110 0100 0010 0000"), 100, (4, 2)),
        (live("1110 0110 0010 0000"), 100, (4, 2)),
        (live("1111 0111 1111 0111"), 100, (4, 4)),
        (live("0000 0000 0000 0000"), 100, (1, 1)),
        (live("1100 0100 0000 0000"), 10000, (4, 4)),
        (live("110 010 000"), 1, (3, 1)),
        (live("10000 00000 00000 00000 00000"), 1, (1, 1)),
        (live("11111 11111 10000 00000 00000"), 1, (3, 5)),
        (live("10000 10000 10000 10000 00000"), 1, (4, 1)),
    ]
    # fmt: on
    for is_live_RPG, weights, size in cases:
        assert waves.fewer_rows(is_live_RPG, 20, 10, 0, weights) == size, (is_live_RPG, size)


def test_on_tpus_rows_are_dropped_for_their_time_too(monkeypatch):
    """3B on v6e-8: of eight answers to each of four prompts, two are live."""
    monkeypatch.setattr(layouts.Layout, "is_on_cpu", False)
    cfg = sizes("3B")
    layout = layouts.layout_of("tp", 4, cfg, mesh(1, 8, 1))
    is_live_RPG = live("11000000 11000000 11000000 11000000")
    sizes_of = {}
    for chip in ("TPU v6 lite", "NVIDIA H100"):
        monkeypatch.setattr(chips, "chip", lambda device, chip=chip: chips.CHIPS[chip])
        nbytes = waves.bytes_of_stage(cfg, layout, "bfloat16", False, width=256, slots=384)
        sizes_of[chip] = waves.fewer_rows(is_live_RPG, *nbytes)
    assert sizes_of == {"TPU v6 lite": (4, 2), "NVIDIA H100": (4, 8)}
    # Groups of one answer would have the fewest rows, but would hold one prompt three times.
    nbytes = 100, 1, 1000, 1000
    assert waves.fewer_rows(live("11100000 10000000"), *nbytes) == (2, 4)


def test_a_step_reads_few_rows_of_an_untied_embedding():
    for cfg, looked_up in ((TIED, 0), (UNTIED, UNTIED.V * UNTIED.D)):
        layout = layouts.layout_of("replicated", 1, cfg, mesh())
        weights, _ = layouts.bytes_read(cfg, layout, "float32")
        assert weights == 4 * (cfg.n_params - looked_up)


def test_a_step_halfway_reads_a_quarter_of_the_answers_slots(monkeypatch):
    """Halfway, half of the answers have ended, and half of the others' slots are filled."""
    monkeypatch.setattr(chips, "chip", lambda device: chips.Chip(bandwidth=1e9))
    layout = layouts.layout_of("replicated", 1, TIED, mesh())
    size = layouts.RolloutSize(64, group=8, prompt_slots=32, answer_slots=100)
    weights, slot = layouts.bytes_read(TIED, layout, "float32")
    found = layouts.seconds_halfway(TIED, layout, "float32", size)
    slots = 8 * 32 + 32 * 50
    assert_allclose(found, (weights + slot * slots) / 1e9)


def test_a_rollout_has_the_answers_of_all_hosts():
    cfg = train.Config(batch=4, npq=8, max_answer=9)
    size = engine.size_of_step(cfg, hosts=3, longest_prompt=25)
    assert (size.answers, size.group) == (96, 8)
    assert (size.prompt_slots, size.answer_slots) == (32, 9)


@pytest.mark.parametrize("process", [0, 1])
def test_each_process_gets_the_answers_to_its_own_prompts(process, monkeypatch):
    params = random_params(UNTIED, mesh())
    prompts = random_prompts(UNTIED, (6, 2, 7, 4))
    own = slice(2 * process, 2 * process + 2)
    answers = generate(params, UNTIED, prompts, 16)
    # The processes have gathered the prompts of both.
    gathered = engine.pad_prompts(prompts)
    monkeypatch.setattr(engine, "pad_prompts", lambda own_prompts: gathered)
    monkeypatch.setattr(jax, "process_index", lambda: process)
    found = generate(params, UNTIED, prompts[own], 16)
    for name, wanted in answers.items():
        assert_array_equal(found[name], wanted[own], name)


def test_padded_lengths_are_powers_of_two_and_three_quarters_of_them():
    table = {1: 1, 2: 2, 3: 3, 5: 6, 24: 24, 25: 32, 100: 128, 513: 768}
    for n, size in table.items():
        assert engine.padded_length(n) == size, n
