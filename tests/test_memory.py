"""What fits in a device's memory: the search for the micro-batch, and plans. Runs that end early:
out of memory, or after too many updates that are not finite."""

import contextlib
import dataclasses
import io
import itertools
import json
import math
import os
import re
import signal
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import SMALL, arguments, read_jsonl
from numpy.testing import assert_allclose

import model
import train
from infra.host import chips, memory
from infra.rollout import layouts
from infra.rollout.engine import Engine
from infra.run import checkpoint
from infra.update import fit
from infra.update.packing import RowShape
from test_kernel import mesh
from tools import absent_devices, plan


# ---------------------------------------------------------------- the largest micro-batch that fits
def linear(n):
    return 7.2 + 0.3 * n


def bent(n):
    return 7.2 + 0.28 * n + 0.0002 * n * n + 0.1 * (n % 3)


def search(gib, most, limit=30.1, first=82, estimated=True):
    """Returns (the micro-batch found, the micro-batches compiled on the way).

    estimated: the compiler says how much a program that does not fit would take, as compilers for
    TPUs do.
    """
    # Lower than the slopes of linear and bent, because it is computed from sizes alone.
    row_gib = 0.27
    asked = []

    def need(n):
        asked.append(n)
        fits = gib(n) <= limit
        return (gib(n) if fits or estimated else 99.0), fits

    guess = fit.MemoryEstimate(first, 7.0, row_gib)
    return fit.largest_that_fits(need, limit, most, guess)[0], asked


def test_micro_batch_is_found_by_few_compilations():
    for most, wanted, compilations in (1024, 76, 3), (300, 76, 3), (64, 64, 1):
        found, asked = search(linear, most)
        assert (found, len(asked)) == (wanted, compilations), (most, asked)
    assert search(linear, 300, estimated=False)[0] == 76
    assert search(linear, 1024, first=76) == (76, [76]), "a good guess is all that is compiled"
    # A first guess that is far off costs at most four compilations.
    for first in 1, 2, 40, 76, 77, 300, 2000:
        found, asked = search(linear, 1024, first=first)
        assert found == 76 and len(asked) <= 4, (first, asked)
    # If memory is not linear, the search takes more compilations and may miss the largest.
    for limit in 8.0, 9.9, 17.3, 44.0:
        best = max(n for n in range(1, 999) if bent(n) <= limit)
        for most in 1000, 500, best, best + 1:
            found, asked = search(bent, most, limit, first=int(limit / 0.27))
            assert bent(found) <= limit and found >= best - 2, (limit, found, best, asked)
            assert len(asked) <= 12, (limit, most, asked)
    assert search(lambda n: 40.0 + n, 64)[0] == 0, "none fits"
    assert search(lambda n: 40.0, 64, first=1) == (0, [1]), "a single try is enough"


@pytest.fixture
def fresh_answers(tmp_path, monkeypatch):
    """Forget earlier compilations, of this process and of earlier runs."""
    monkeypatch.setenv("HOME", str(tmp_path))
    update_gib = fit.update_gib
    update_gib.cache_clear()

    # --micro_batch changes no program. Leave it out of the cache's key, so that each program is
    # traced once.
    def update_gib_without_flag(micro_batch, shape, cfg, model_cfg, mesh, programs, **use):
        cfg = dataclasses.replace(cfg, micro_batch=0)
        return update_gib(micro_batch, shape, cfg, model_cfg, mesh, programs, **use)

    update_gib_without_flag.cache_clear = update_gib.cache_clear
    monkeypatch.setattr(fit, "update_gib", update_gib_without_flag)
    yield
    update_gib.cache_clear()


def test_micro_batch_is_the_largest_that_the_compiler_says_fits(fresh_answers, monkeypatch, capsys):
    cfg = train.resolve(train.Config(batch=1, npq=3, max_answer=12), mesh())

    def choose(micro_batch=0):
        asked = dataclasses.replace(cfg, micro_batch=micro_batch)
        return fit.choose_micro_batch(asked, SMALL, mesh(), RowShape(32, 3), train.UPDATE)

    def needed(micro_batch):
        return fit.update_gib(micro_batch, RowShape(32, 3), cfg, SMALL, mesh(), train.UPDATE)

    def with_memory(gib):
        fit.update_gib.cache_clear()
        monkeypatch.setattr(chips, "device_memory", lambda device: gib)

    one = needed(1)[0]
    three = needed(3)[0]
    assert one < three
    assert choose() == 3

    # Memory for two rows, if memory is about linear.
    with_memory(0.4 * one + 0.6 * three)
    found = choose()
    fitting = [n for n in (1, 2, 3) if needed(n)[1]]
    assert found == max(fitting) < 3
    # The result is in the user's cache, so the next run need not search.
    with mock.patch.object(fit, "update_gib", side_effect=AssertionError("compiled again")):
        assert choose() == found
    assert choose(found) == found
    with pytest.raises(SystemExit):
        choose(3)
    text = capsys.readouterr().err
    assert re.search("micro_batch = 3 does not fit: [23] rows take", text), text
    assert "the largest that fits is --micro_batch " in text, text

    with_memory(one / 100)
    with pytest.raises(SystemExit):
        choose()
    text = capsys.readouterr().err
    assert "not one row of 32 tokens per device fits" in text
    assert "; try more --minibatches, --offload params, --lora 16, a smaller" in text


def test_a_refusal_names_a_number_that_was_tried(tmp_path, monkeypatch):
    """The search may find the largest number that fits without trying the number that was asked
    for."""
    monkeypatch.setenv("HOME", str(tmp_path))
    tried = {9: (15.0, True), 10: (16.25, False), 11: (16.5, False)}
    found = fit.search_or_remember(lambda: (9, tried), 16.0, 64, ("a",))
    assert found == [9, 15.0, 10, 16.25]
    assert fit.search_or_remember(lambda: (0, {1: (17.0, False)}), 16.0, 64, ("b",)) == [
        0,
        0,
        1,
        17,
    ]


def test_a_refusal_without_a_try_names_none(monkeypatch, capsys):
    monkeypatch.setattr(fit, "search_or_remember", lambda *_: [76, 30.0, 0, 0])
    cfg = train.Config(micro_batch=128, dtype="float32")
    with pytest.raises(SystemExit):
        fit.choose_micro_batch(cfg, SMALL, mesh(), RowShape(32, 3), train.UPDATE)
    text = capsys.readouterr().err
    wanted = "micro_batch = 128 does not fit; the largest that fits is --micro_batch 76: 30.00 GiB"
    assert wanted in text, text


def test_all_processes_take_what_fits_least(tmp_path, monkeypatch):
    """Processes may find different numbers of rows. All of them take the smallest."""
    monkeypatch.setenv("HOME", str(tmp_path))
    others = [60.0, 15.0, 61.0, 16.5]
    gathered = lambda own: np.array([own, others if np.ndim(own) else True])  # noqa: E731
    monkeypatch.setattr(fit, "all_gather_processes", gathered)
    found = fit.search_or_remember(lambda: (64, {64: (15.5, True)}), math.inf, 64, ("a",))
    assert found == others


def test_all_processes_search_if_one_has_not_searched(tmp_path, monkeypatch):
    """XLA for GPUs would wait for the processes that do not compile."""
    monkeypatch.setenv("HOME", str(tmp_path))
    search = mock.Mock(return_value=(9, {9: (15.0, True), 10: (16.5, False)}))
    for _ in range(2):
        found = fit.search_or_remember(search, 16.0, 64, ("a",))
    assert search.call_count == 1
    # Another process gathers that it lacks the key.
    gathered = lambda own: np.stack([own, own if np.ndim(own) else True])  # noqa: E731
    monkeypatch.setattr(fit, "all_gather_processes", gathered)
    assert fit.search_or_remember(search, 16.0, 64, ("a",)) == found
    assert search.call_count == 2


def test_an_update_must_fit_on_the_smallest_device_of_all_processes(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(tmp_path))
    cfg = train.resolve(train.Config(batch=1, npq=3, max_answer=12), mesh())
    # Another process has a device without room for the state.
    monkeypatch.setattr(chips, "all_gather_processes", lambda own: np.stack([own, own * 0]))
    monkeypatch.setattr(fit, "compiled_gib", mock.Mock(side_effect=AssertionError("compiled")))
    with pytest.raises(SystemExit):
        fit.choose_micro_batch(cfg, SMALL, mesh(), RowShape(32, 3), train.UPDATE)
    assert "of a device's 0.00" in capsys.readouterr().err


def test_a_device_of_unknown_memory_takes_what_is_asked():
    guess = fit.MemoryEstimate(2**20, 1.0, 0.1)
    found, tried = fit.largest_that_fits(lambda n: (1.0, True), math.inf, 8, guess)
    assert found == 8 and [*tried] == [8]


def test_micro_batches_that_do_not_fill_a_minibatch_hold_their_sum_too(monkeypatch):
    """With several micro-batches per minibatch, a device holds the sum of their gradients beside
    the gradients of the one that runs."""
    programs = fit.UpdatePrograms(mock.Mock(), mock.Mock(), train.optimizer, train.token_fields)
    programs.gradients.lower.return_value = "gradients"
    programs.optimizer_step.lower.return_value = "apply"
    gib_of = {"gradients": 1.0, "apply": 0.0}
    monkeypatch.setattr(fit, "compiled_gib", lambda lowered, *_: (gib_of[lowered], True))
    cfg = train.resolve(train.Config(batch=2, npq=4, minibatches=2), mesh())
    of_gradients = 4 * SMALL.n_params / 2**30

    two, three, four, eight = (
        fit.update_gib(n, RowShape(32, 4), cfg, SMALL, mesh(), programs)[0] for n in (2, 3, 4, 8)
    )
    assert two == three and four == eight
    assert_allclose(three - four, of_gradients, rtol=1e-6)

    def guess(most):
        shape = RowShape(32, most)
        return fit.estimate_by_sizes(cfg, SMALL, mesh(), shape, train.UPDATE, limit=1.0)

    # The guess also counts this sum if a minibatch does not fit in one micro-batch.
    filling, several = guess(4), guess(2**19)
    assert 4 < several.rows < filling.rows < 2**19
    assert_allclose(several.rest_gib - filling.rest_gib, of_gradients, rtol=1e-6)


def test_arrays_beside_a_program_count(monkeypatch):
    """The compiler counts the arrays of a program alone. While gradients are computed, a device
    also holds the moments and the reference. While the largest parameter steps, it also holds
    everything else."""
    cfg = train.resolve(train.Config(batch=2, npq=4, beta=0.1), mesh())

    def bytes_beside(program):
        # The result for the same programs would be remembered.
        programs = fit.UpdatePrograms(mock.Mock(), mock.Mock(), train.optimizer, train.token_fields)
        programs.gradients.lower.return_value = "gradients"
        programs.optimizer_step.lower.return_value = "apply"
        gib_of = {"gradients": 0.0, "apply": 0.0, program: 1.0}
        monkeypatch.setattr(fit, "compiled_gib", lambda lowered, *_: (gib_of[lowered], True))
        gib, _ = fit.update_gib(8, RowShape(32, 8), cfg, SMALL, mesh(), programs)
        return (gib - 1) * 2**30

    moments = 8 * SMALL.n_params
    reference = jnp.dtype(cfg.dtype).itemsize * SMALL.n_params
    # Each parameter also has a step count, which is small.
    assert_allclose(bytes_beside("gradients"), moments + reference, rtol=0.01)
    # Masters and gradients are float32.
    held = moments + reference + 8 * SMALL.n_params
    largest = max(map(math.prod, model.shapes(SMALL).values()))
    assert_allclose(bytes_beside("apply"), held - 16 * largest, rtol=0.01)


@pytest.mark.parametrize(
    "offload, largest",
    [("none", "layers/w_down_LFD"), ("optimizer", "embed_VD"), ("params", "embed_VD")],
)
def test_the_optimizer_step_that_takes_most_is_compiled(offload, largest, monkeypatch):
    """For an offloaded parameter with layers, the step has one layer at a time on the device, so
    the step of the embedding takes the most memory."""
    programs = fit.UpdatePrograms(mock.Mock(), mock.Mock(), train.optimizer, train.token_fields)
    monkeypatch.setattr(fit, "compiled_gib", lambda *_: (0.0, True))
    model_cfg = dataclasses.replace(SMALL, F=4 * SMALL.D, V=5 * SMALL.D)
    cfg = train.resolve(train.Config(batch=2, npq=4, offload=offload), mesh())
    fit.update_gib(8, RowShape(32, 8), cfg, model_cfg, mesh(), programs)
    assert programs.optimizer_step.lower.call_args.kwargs["name"] == largest


@pytest.mark.parametrize("peak, gib", [(5, 5), (11, 7)])
def test_memory_of_a_program_for_tpus_has_no_arrays_of_the_host(peak, gib):
    """Where arrays are offloaded, the compiler's peak counts them. Where they are not, the peak is
    less than the sum of the arrays."""
    memory = SimpleNamespace(
        argument_size_in_bytes=3 * 2**30,
        output_size_in_bytes=3 * 2**30,
        alias_size_in_bytes=2 * 2**30,
        temp_size_in_bytes=3 * 2**30,
        peak_memory_in_bytes=peak * 2**30,
    )
    lowered = mock.Mock()
    lowered.compile().memory_analysis.return_value = memory
    tpu = SimpleNamespace(devices=np.array([SimpleNamespace(platform="tpu")]))
    assert fit.compiled_gib(lowered, tpu) == (gib, lowered.compile())


@pytest.mark.parametrize(
    "said, gib",
    [
        ("RESOURCE_EXHAUSTED: Used 20.1G of 15.7G hbm. Exceeded hbm capacity by 4.4G.", 20.1),
        ("The total size of arguments (1.5T) exceeds the memory", 1536),
        ("Used 512.0M of 128.0M vmem", 0.5),
    ],
)
def test_a_program_that_is_refused_takes_what_the_compiler_says(said, gib):
    lowered = mock.Mock()
    lowered.compile.side_effect = jax.errors.JaxRuntimeError(said)
    assert fit.compiled_gib(lowered, None) == (gib, None)


# ---------------------------------------------------------------- devices
def test_a_gpu_has_what_jax_takes_less_a_margin(monkeypatch):
    """The memory of a GPU is what it reports. For an absent GPU it is three quarters of the chip's
    memory, or the share in the user's environment. A margin is left free in both cases."""

    def gpu(stats):
        return SimpleNamespace(
            platform="gpu", device_kind="NVIDIA H100 80GB HBM3", memory_stats=lambda: stats
        )

    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    assert_allclose(chips.device_memory(gpu({"bytes_limit": 40 * 2**30})), 0.95 * 40)
    for absent in ({}, None):
        assert_allclose(chips.device_memory(gpu(absent)), 0.95 * 0.75 * 79.11)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    assert_allclose(chips.device_memory(gpu(None)), 0.95 * 0.9 * 79.11)
    assert_allclose(chips.device_memory(gpu({"bytes_limit": 40 * 2**30})), 0.95 * 40)


def test_devices_of_a_cpu_share_its_memory(monkeypatch):
    monkeypatch.setattr(chips, "total_memory", lambda: 64 * 2**30)
    monkeypatch.setattr(jax, "local_device_count", lambda: 4)
    assert chips.device_memory(SimpleNamespace(platform="cpu")) == 16


def test_known_memory_of_gpus_is_that_of_their_specification():
    for gpu in absent_devices.GPUS.values():
        kind = SimpleNamespace(device_kind=gpu.name)
        assert_allclose(chips.chip(kind).gib, gpu.memory_bytes / 2**30, rtol=1e-3)
        assert_allclose(chips.chip(kind).bandwidth, gpu.bandwidth, rtol=0.03)


@pytest.mark.parametrize("kind", ["h100-3", "h100-12", "h100-0", "h100", "b200-8", "v6e-3", "v9-8"])
def test_unknown_types_are_refused(kind):
    with pytest.raises(ValueError, match=f"^{kind} is not one of"):
        absent_devices.of_kind(kind)


# ---------------------------------------------------------------- plans for devices that are here
def printed_plan(*words):
    """Run tools/plan.py in this process with an empty user's cache, and return its output."""
    with tempfile.TemporaryDirectory() as home, mock.patch.dict(os.environ, HOME=home):
        return printed_plan_of_home(*words)


def printed_plan_of_home(*words):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        plan.main(arguments(words))
    return out.getvalue()


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """Plan two micro-batches. Returns what is printed, the files that are left, and the rows of the
    plan's own file."""
    directory = tmp_path_factory.mktemp("plan")
    with contextlib.chdir(directory):
        text = printed_plan("--sweep micro_batch=8,16")
    lines = (directory / "plan-here.jsonl").read_text().splitlines()
    return SimpleNamespace(
        text=text, left=os.listdir(directory), rows=[json.loads(line) for line in lines]
    )


def test_plan_of_a_sweep_is_a_table_and_a_file(swept):
    assert [row["micro_batch"] for row in swept.rows] == [8, 16]
    assert 0 < swept.rows[0]["gib"] < swept.rows[1]["gib"]
    assert all(row["fits"] for row in swept.rows)
    text = swept.text
    assert text.splitlines()[-1] == "largest that fits: micro_batch 16", text
    sizes = "= 256 sequences per host, in 4 minibatches of at most 8 rows per device"
    assert sizes in text and "no estimate of the time" in text, text
    assert text.count("this batch fills 8 rows per device, so a run uses no more") == 1, text
    assert swept.left == ["plan-here.jsonl"]


def test_plan_of_a_rollout_in_waves_makes_them_equal(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(layouts, "rows_that_fit", lambda *_: 24)
    assert "32 rows per device, 16 at once" in printed_plan("here --micro_batch 8")


@pytest.mark.parametrize("batch, npq, fix", [(64, 8, "--batch 32"), (1, 512, "a smaller --npq")])
def test_a_step_that_is_too_large_for_the_host_is_refused(batch, npq, fix, monkeypatch, capsys):
    # A process may take a quarter: here, half of what the step takes.
    bytes_of_step = batch * npq * 100 * fit.HOST_BYTES_OF_A_TOKEN
    monkeypatch.setattr(fit, "total_memory", lambda: 2 * bytes_of_step)
    monkeypatch.setattr(fit, "processes_of_this_machine", lambda: 1)
    with pytest.raises(SystemExit):
        fit.check_host_memory(SimpleNamespace(batch=batch, npq=npq), 100)
    assert f"; try {fix}" in capsys.readouterr().err


def test_a_run_that_only_evaluates_keeps_no_moments():
    params = SMALL.n_params * 4
    for steps, copies in ((1, 3), (0, 1)):
        cfg = train.resolve(train.Config(steps=steps), mesh())
        state_bytes = fit.device_bytes(fit.abstract_state(cfg, SMALL, mesh(), train.optimizer))
        # Scalars take a few bytes more.
        assert copies * params <= state_bytes < copies * params + 1e3, (steps, state_bytes / params)


def test_a_rollout_that_does_not_fit_is_refused(monkeypatch, capsys):
    layout = layouts.layout_of("replicated", 1, SMALL, mesh())
    weights = SMALL.n_params * 4
    state_bytes = 3 * weights
    cfg = train.Config(dtype="float32", rollout_sharding="replicated")
    for most, fits in ((4.1 * weights, True), (3.9 * weights, False)):
        monkeypatch.setattr(chips, "device_memory", lambda device, gib=most / 2**30: gib)
        with contextlib.nullcontext() if fits else pytest.raises(SystemExit):
            fit.check_rollout_memory(layout, state_bytes, cfg, SMALL)
    message = capsys.readouterr().err
    assert "the rollout does not fit: on a device, its weights in float32 take" in message
    assert "try --rollout_sharding auto, --offload optimizer or params, a smaller" in message


def test_plan_finds_the_largest_micro_batch(swept, tmp_path, monkeypatch):
    """A plan finds the largest micro-batch that fits, and estimates what other micro-batches
    take."""
    monkeypatch.chdir(tmp_path)
    eight, sixteen = [row["gib"] for row in swept.rows]
    per_row = (sixteen - eight) / 8
    # Memory for about ten rows.
    monkeypatch.setattr(chips, "device_memory", lambda device: eight + 2.5 * per_row)
    text = printed_plan("--max_answer 40 --sweep loss_impl=jax")
    # Micro-batches below 8 do not fill a minibatch, so they lie on a different line.
    assert re.search(r"^ +~ +16 .* GiB too much$", text, re.M), text
    assert re.search(r"^ +(~ +)?8 .* fits$", text, re.M), text
    (largest,) = re.findall(r"^largest that fits: micro_batch (\d+)$", text, re.M)
    assert 9 <= int(largest) <= 12, text
    # The largest one was compiled, not estimated.
    fitting = re.findall(r"^ +(\d+) .* fits$", text, re.M)
    assert max(map(int, fitting)) == int(largest), text
    assert re.search(r"^ +\d+ .* GiB too much$", text, re.M), text


def test_others_are_estimated_between_no_rows_and_the_largest():
    """Estimates lie on the line from 10 GiB without rows to 13 GiB with 6 rows."""
    assert plan.gib_of_others(6, 13.0, 10.0, filled=1) == {1: 10.5, 2: 11.0, 4: 12.0, 8: 14.0}
    # Micro-batches that do not fill a minibatch also hold a sum of gradients, so a plan estimates
    # only the ones on the same side as the largest.
    assert plan.gib_of_others(6, 13.0, 10.0, filled=4) == {4: 12.0, 8: 14.0}
    assert plan.gib_of_others(6, 13.0, 10.0, filled=7) == {1: 10.5, 2: 11.0, 4: 12.0}
    assert plan.gib_of_others(0, 99.0, 10.0, filled=1) == {}, "where nothing fits"


def test_what_was_compiled_is_remembered_by_its_text(tmp_path, monkeypatch):
    """A second plan compiles nothing. A plan with other lengths recalls only the optimizer step. A
    damaged file in the cache is ignored."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    words = "--micro_batch 8 --max_answer 24"
    first = printed_plan_of_home(words)
    assert "remembered" not in first, first
    kept = sorted((tmp_path / ".cache/podgrpo/compiled").iterdir())
    # The three programs are the gradients, the optimizer step and the decode loop.
    assert len(kept) == 3
    fit.update_gib.cache_clear()
    second = printed_plan_of_home(words)
    assert second.count("  remembered: ") == 3, second

    def results(text):
        return [line for line in text.splitlines() if not line.startswith(("  rem", "tracing"))]

    assert results(first) == results(second)
    fit.update_gib.cache_clear()
    assert printed_plan_of_home("--micro_batch 8 --max_answer 40").count("  remembered: ") == 1
    kept[0].write_text("{")
    fit.update_gib.cache_clear()
    assert printed_plan_of_home(words).count("  remembered: ") == 2


# fmt: off
MISTAKES = {  # {arguments: what the message must say}
    "v9-8": "v9-8 is not one of v4-, v5p-, v5litepod- or v6e-",
    "v9z-8": "v9z-8 is not one of",
    "v6e-12": "v6e-12 is not one of",
    "--sweep": "--sweep",
    "--sweep lr=1,2": "is not a list such as",
    "--sweep micro_batch=": "is not a list such as",
    "--sweep micro_batch=x": "sweep = micro_batch=x",
    "--sweep micro_batch=1,": "invalid literal",
    "--sweep micro_batch=-3": "micro_batch = -3",
    "--sweep max_answer=0": "max_answer = 0",
    "--sweep remat=foo": "remat = foo is not one of",
    "here --sweep micro_batch=8,-3": "micro_batch = -3",
    "here --bacth 4": "--bacth",
    "--mesh 3,-1,1": "a multiple of 3 devices; there are 8",
    "--batch 1 --npq 6": "batch*npq = 1*6 = 6 sequences per host do not divide over 8",
}
# fmt: on


def test_mistakes_in_a_plan_are_refused_before_it_compiles(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    compiled = AssertionError("something was compiled")
    monkeypatch.setattr(fit, "compiled_gib", mock.Mock(side_effect=compiled))
    held = len(jax.live_arrays())
    no_type = ([""], "is not one of")
    for words, wanted in [*MISTAKES.items(), no_type]:
        with pytest.raises(SystemExit) as refusal:
            plan.main(arguments([words]))
        message = capsys.readouterr().err
        assert refusal.value.code == 2, (words, message)
        assert message.count("\n") == 1 and "Traceback" not in message, (words, message)
        assert wanted in message, f"{words}: {message!r} does not say {wanted!r}"
    assert len(jax.live_arrays()) <= held, "device memory was taken"
    assert not os.listdir(), "a mistake leaves a file"


# ---------------------------------------------------------------- runs that end early
# Two supervised steps and five GRPO steps, with two updates each.
RUN_FLAGS = (
    "--batch 4 --npq 4 --sft_steps 2 --steps 5 --minibatches 2 --save_every 1 --eval_data none"
)


def test_run_that_ends_when_memory_does_saves_its_last_step(train_here, monkeypatch, capsys):
    """A run that runs out of memory saves its last step and says what to do. The next run continues
    from there."""
    flags = (
        "--sft_steps 0 --steps 3 --batch 4 --npq 4 --minibatches 2 --save_every 0 --eval_data none"
    )
    original = train.gradients
    calls = []

    def full(*args, **kwargs):
        # Each step has two updates of one micro-batch, so the fifth call is the first of step 3.
        calls.append(1)
        if len(calls) > 4:
            what = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate."
            raise jax.errors.JaxRuntimeError(what)
        return original(*args, **kwargs)

    full.lower = original.lower
    with mock.patch.object(train, "gradients", full), pytest.raises(SystemExit) as end:
        train_here(flags, "--out run")
    text = capsys.readouterr().err
    assert end.value.code == 1, text
    assert "in step 3 (update): " in text and "step 2 is saved" in text, text
    assert "--micro_batch 4 or --offload optimizer" in text and "Traceback" not in text, text
    assert os.listdir("run/step_000002")
    train_here(flags, "--out run")
    assert [row["step"] for row in read_jsonl("run/metrics.jsonl")] == [1, 2, 3]
    assert Path("run/final").is_dir()


def test_run_whose_evaluation_runs_out_of_memory_is_not_told_of_micro_batches(
    train_here, monkeypatch, capsys
):
    def full(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory.")

    monkeypatch.setattr(Engine, "generate", full)
    with pytest.raises(SystemExit) as end:
        train_here("--sft_steps 0 --steps 0 --eval_n 4 --batch 4 --npq 4 --out run")
    text = capsys.readouterr().err
    assert end.value.code == 1, text
    assert "in step 0 (evaluating): " in text and "try --offload" in text, text


# ---------------------------------------------------------------- memory of the host
GROUPS_V1 = "9:name=systemd:/\n4:cpu,memory:/slurm/job_5\n0::/\n"
GROUPS_V2 = "0::/slurm/job_5\n"


@pytest.mark.parametrize(
    "listed, root, files",
    [
        (GROUPS_V2, "", ("memory.max", "memory.current", "inactive_file")),
        (
            GROUPS_V1,
            "memory",
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ),
    ],
    ids=["version 2", "version 1"],
)
def test_a_job_may_take_what_its_control_groups_allow(listed, root, files, tmp_path, monkeypatch):
    limit, used, cached = files
    job = tmp_path / root / "slurm/job_5"
    job.mkdir(parents=True)
    (tmp_path / "list").write_text(listed)
    monkeypatch.setattr(memory, "LIST", f"{tmp_path}/list")
    monkeypatch.setattr(memory, "MOUNT", str(tmp_path))
    # Without files, as in a container, only the host is a limit.
    host = memory.total_memory()
    assert host == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for group, most, taken in ((job, 9000, 5000), (job.parent, 7000, 6500)):
        (group / limit).write_text(f"{most}\n")
        (group / used).write_text(f"{taken}\n")
        # Cached files, here 1,000 bytes, are not in use.
        (group / "memory.stat").write_text(f"anon 5\n{cached} 1000\n")
    # The job above this one has the smaller limit.
    assert memory.total_memory() == 7000
    assert memory.available_memory() == 7000 - (6500 - 1000)
    (job.parent / limit).write_text("max\n")
    assert memory.total_memory() == 9000
    assert memory.available_memory() == 9000 - (5000 - 1000)


@pytest.mark.parametrize("processes, copies", [(1, True), (3, False)])
def test_a_checkpoint_is_copied_if_all_processes_of_the_host_have_room(
    processes, copies, tmp_path, monkeypatch
):
    """The copy lets training go on while the checkpoint is written."""
    state = {"a": jax.device_put(np.arange(1000, dtype=np.float32))}
    monkeypatch.setattr(checkpoint, "processes_of_this_machine", lambda: processes)
    monkeypatch.setattr(checkpoint, "available_memory", lambda: 5 * 4000)
    saver = checkpoint.Saver(str(tmp_path), keep=1, newest=0)
    saver.remember(1, state, 0)
    saver.begin()
    assert (saver.pending is not None) == copies
    saver.finish()
    assert saver.newest == 1


def test_only_updates_skipped_in_a_row_end_a_run():
    run = mock.Mock(skipped=0, step=0)
    nine = [np.nan] * 9
    for step, norms in enumerate([[*nine, 1.0], [1.0, *nine]], 1):
        run.skipped = train.count_skipped(step, norms, run.skipped)
        train.end_if_diverged(run)
    run.skipped = train.count_skipped(3, [np.nan], run.skipped)
    with pytest.raises(SystemExit):
        train.end_if_diverged(run)


def spoil_advantages(monkeypatch, bad_steps, terminated_in=None):
    """Make the advantages NaN in bad_steps, and send SIGTERM in step terminated_in. GRPO steps are
    counted over all runs."""
    original = train.group_advantages
    calls = itertools.count(1)

    def spoilt(*args):
        step = next(calls)
        if step == terminated_in:
            signal.raise_signal(signal.SIGTERM)
        advantages = original(*args)
        return np.full_like(advantages, np.nan) if step in bad_steps else advantages

    monkeypatch.setattr(train, "group_advantages", spoilt)


def test_skipped_updates_are_counted_and_the_run_goes_on(train_here, monkeypatch):
    spoil_advantages(monkeypatch, bad_steps={2})
    train_here(RUN_FLAGS, "--out run")
    rows = read_jsonl("run/metrics.jsonl")
    assert [row["skipped"] for row in rows] == [0, 0, 0, 2, 0, 0, 0]
    assert rows[3]["loss"] is None, rows


def test_ten_skipped_updates_in_a_row_end_a_run_that_resumed(train_here, monkeypatch, capsys):
    spoil_advantages(monkeypatch, bad_steps=range(99), terminated_in=4)
    # SIGTERM comes in step 6, whose end makes 8 skipped updates in a row. The checkpoint keeps this
    # number.
    with pytest.raises(SystemExit) as end:
        train_here(RUN_FLAGS, "--out run")
    assert end.value.code == 128 + signal.SIGTERM
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        train_here(RUN_FLAGS, "--out run")
    text = capsys.readouterr().err
    assert end.value.code == 1, text
    assert "10 updates in a row, up to step 7" in text, text
    assert "run/step_000006; " in text and "Traceback" not in text, text


def test_advice_names_only_what_the_flags_do_not_do_yet():
    rest = "a smaller --max_prompt or --max_answer, or more devices"
    for flags, wanted in (
        ({}, f"--offload optimizer or params, {rest}"),
        ({"offload": "optimizer"}, f"--offload params, {rest}"),
        ({"offload": "params"}, rest),
        ({"lora": 8}, rest),
    ):
        cfg = train.Config(**flags)
        assert cfg.remat == "full"
        assert fit.rollout_advice(cfg) == fit.update_advice(cfg) == wanted
        less = dataclasses.replace(cfg, remat="none")
        assert fit.update_advice(less) == f"--remat full, {wanted}"
        assert "more --minibatches" in fit.advice(cfg)
        assert ("--lora" in fit.advice(cfg)) == (not cfg.lora)
