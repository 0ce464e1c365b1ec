"""The memory, collectives and kernels of programs that are compiled for absent GPUs.

Nothing runs: all figures come from XLA's compiler for GPUs. The compiler needs JAX's CUDA plugin
and cuDNN, which `bash launch.sh test -m aot` installs, but no driver.
"""

import json
import random
import re

import pytest
from absent import compile_elsewhere, write_config
from conftest import ROOT

from tools.sizes import SIZES

pytestmark = pytest.mark.aot


def compile_for_gpus(*command, **options):
    return compile_elsewhere(*command, compiler="jax_plugins.xla_cuda13", **options)


# ---------------------------------------------------------------- the update
def update_facts(*words):
    text = compile_for_gpus("-m tests.aot_update", *words)
    return json.loads(text.splitlines()[-1])


# fmt: off
@pytest.mark.parametrize("size, attention, device_type", [
    # One GPU has the kernels and masks of each of eight. Only this case shows that it needs no
    # collectives.
    pytest.param("0.5B", "cudnn", "h100-1", marks=pytest.mark.soak),
    ("0.5B",       "cudnn",     "h100-8"),
    pytest.param("0.5B", "cudnn", "h100-16", marks=pytest.mark.soak),
    pytest.param("0.5B", "blockwise", "h100-8", marks=pytest.mark.soak),
    ("Qwen3-0.6B", "cudnn",     "h100-8"),
])
# fmt: on
def test_update_for_gpus(size, attention, device_type, record_property):
    """The update holds the logits of one chunk at most, reduce-scatters gradients, and separates
    segments without a float32 mask."""
    facts = update_facts(size, device_type, attention, "16")
    # The largest matrix of a layer is [D, F].
    _, D, F, *_ = SIZES[size]
    matrix_bytes = D * F * 4
    # A device has 40,960 tokens, but logits exist for at most one chunk of them.
    assert 0 < facts["beside_vocab"] <= 2048, facts
    largest = facts["largest"]
    if device_type == "h100-1":
        assert not largest, facts
    else:
        # Only the small gradients, of norms and biases, are all-reduced.
        assert largest["reduce-scatter"] >= matrix_bytes, facts
        assert largest["all-reduce"] < matrix_bytes / 4, facts
    if attention == "cudnn":
        # cuDNN runs in the forward, again in the recomputed forward, and in the backward.
        calls = facts["cudnn"]
        assert calls["__cudnn$fmhaScaleBiasSoftmaxBackward"] >= 1, facts
        assert calls["__cudnn$fmhaScaleBiasSoftmax"] >= 2, facts
        # cuDNN skips later keys by itself, and reads no mask for them.
        assert facts["masks"] == {"CAUSAL": sum(calls.values())}, facts
        assert facts["float32_masks"] == 0, facts
    else:
        assert not facts["cudnn"], facts
    record_property("GiB of micro-batch 16", facts["gib"])


# ---------------------------------------------------------------- plans
def plan(tmp_path, size, flags):
    """Run tools/plan.py with rows of 2,048 tokens, and return its output."""
    command = ROOT / "tools/plan.py", flags, "--max_prompt 1024 --max_answer 1024 --model"
    config = write_config(tmp_path, size)
    # A second plan of a test remembers what did not change.
    return compile_for_gpus(*command, config, cwd=tmp_path, home=tmp_path)


def gib_of(printed, micro_batch):
    """Returns the GiB of a micro-batch that was compiled and fits."""
    (gib,) = re.findall(rf"^ +{micro_batch} +([\d.]+)  fits$", printed, re.M)
    return float(gib)


def test_a_plan_of_gpus_is_what_the_compiler_says(tmp_path, record_property):
    """An estimate in a plan is within 10% of what compiling the same micro-batch finds."""
    printed = plan(tmp_path, "0.5B", "h100-8")
    estimates = dict(re.findall(r"^    ~ +(\d+) +([\d.]+)  fits$", printed, re.M))
    assert {"64", "256"} <= estimates.keys(), printed
    micro_batch = random.SystemRandom().choice(["64", "256"])
    alone = plan(tmp_path, "0.5B", f"h100-8 --micro_batch {micro_batch}")
    gib = gib_of(alone, micro_batch)
    assert gib == pytest.approx(float(estimates[micro_batch]), rel=0.1)
    record_property("largest", printed.splitlines()[-1])


def table_cell(device_type, size):
    """Returns (micro-batch, GiB, mark of the offload) from a cell of assets/what_fits.md."""
    text = (ROOT / "assets/what_fits.md").read_text(encoding="utf-8")
    # A second table is for --lora.
    table, _, _ = text.partition("--lora")
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")]
    columns = rows[0]
    (row,) = [row for row in rows if row[0] == f"| {device_type}"]
    cell = row[columns.index(size)]
    mark, micro_batch, gib = re.fullmatch(r"(?:([op]) )?(\d+): ([\d.]+), .*", cell).groups()
    return micro_batch, float(gib), mark


# fmt: off
@pytest.mark.parametrize("device_type, size", [
    ("h100-8", "7B"),
    ("h100-8", "Qwen3-8B"),
    # test_offloaded_7b_fits_one_gpu compiles the same update with other rows.
    pytest.param("h200-1", "7B", marks=pytest.mark.soak),
])
# fmt: on
def test_the_table_of_what_fits_is_what_the_compiler_says(device_type, size, tmp_path):
    micro_batch, gib, mark = table_cell(device_type, size)
    offload = {None: "none", "o": "optimizer", "p": "params"}[mark]
    flags = f"{device_type} --micro_batch {micro_batch} --offload {offload}"
    found = gib_of(plan(tmp_path, size, flags), micro_batch)
    assert found == pytest.approx(gib, rel=0.02)


def test_offloaded_7b_fits_one_gpu(tmp_path, record_property):
    """With --offload, a 7B fits one GPU. Its 7.6 billion parameters have 28 GiB of float32 weights,
    as much of gradients, and 57 GiB of moments."""
    gib = {}
    for offload in ("none", "optimizer", "params"):
        printed = plan(tmp_path, "7B", f"h200-1 --micro_batch 2 --offload {offload}")
        if offload == "none":
            assert "GiB too much" in printed, printed
        else:
            gib[offload] = gib_of(printed, 2)
    masters = 7.6e9 * 4 / 2**30
    assert gib["optimizer"] > 3 * masters, gib
    assert gib["params"] < gib["optimizer"] - masters / 2, gib
    # Masters and moments come to the GPU one layer at a time. All layers of one matrix would take
    # 42 GiB beside the gradients.
    flags = "h100-1 --micro_batch 32 --minibatches 2 --offload params"
    gib["h100"] = gib_of(plan(tmp_path, "7B", flags), 32)
    assert gib["h100"] < 1.6 * masters, gib
    record_property("GiB", gib)


# ---------------------------------------------------------------- the rollout's decode loop
def test_the_layout_fsdp_gathers_one_layer_at_a_time(tmp_path, record_property):
    """Each layer has arrays of its own, and XLA would gather all layers before the first."""
    write_config(tmp_path, "3B", num_hidden_layers=8)
    bench = ROOT / "tools/bench_rollout.py"
    flags = "--aot h100-8 --layout fsdp --batch 64 --prompt 128 --answer 128"
    printed = compile_for_gpus(bench, f"--model {tmp_path} {flags}")
    peak = float(re.search(r"peak ([\d.]+) GB", printed)[1])
    V, D, F, *_ = SIZES["3B"]
    # The LM head, and four of the eight layers, of which the matrices [D, F] are most.
    assert peak <= (V * D + 4 * 3 * D * F) * 2 / 1e9, printed
    record_property("peak, GB", peak)


@pytest.mark.parametrize("size", ["3B", "7B", pytest.param("Qwen3-8B", marks=pytest.mark.soak)])
def test_decoding_for_gpus_reads_weights_and_cache_once(size, tmp_path, record_property):
    """A decode step reads the weights and the KV cache once, and GPUs exchange only sums over tp.
    Before each layer had arrays of its own, every step copied all weights, so that a 3B on eight
    GPUs read 2.9 times as much."""
    bench = ROOT / "tools/bench_rollout.py"
    types = ["h100-8", "h100-16"] if size != "3B" else ["h100-1", "h100-8", "h100-16"]
    # All layers are alike, and each has arrays of its own.
    layers = 8
    write_config(tmp_path, size, num_hidden_layers=layers)
    flags = f"--model {tmp_path} --aot {','.join(types)} --prompt 1024 --answer 256"
    printed = compile_for_gpus(bench, flags)
    figures = re.findall(
        r": (\w+) (\d+) x (\d+) devices.*?([\d.]+) of that; without activations ([\d.]+) of that;"
        r" collectives move ([\d.]+) GB;.*?copies write ([\d.]+) of",
        printed,
        re.S,
    )
    assert len(figures) == len(types), printed
    _, D, *_ = SIZES[size]
    for device_type, (kind, *texts) in zip(types, figures, strict=True):
        dp, tp, share, share_alone, moved, copied = map(float, texts)
        assert (kind == "tp") == (device_type != "h100-1"), "the estimated step is shorter with tp"
        # A layer sums [rows, D] twice, in float32 at most, and each sum is sent and received.
        sums = 2 * 2 * 128 / dp * D * 4 * layers / 1e9 if tp > 1 else 0
        # Apart from the weights and the cache, the loop carries only a few numbers per row.
        assert 0.999 <= share_alone <= 1.05, printed
        # With tp or all 128 rows on one GPU, activations are a larger share; they stay in L2.
        assert share <= 1.8, printed
        assert moved <= 1.1 * sums, printed
        # The logits of a 7B are copied, 0.1 of this cache. The keys of all layers would be half.
        assert copied <= 0.15, printed
    record_property("bytes / those of weights and cache, with and without activations", figures)
