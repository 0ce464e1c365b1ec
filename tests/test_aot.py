"""The memory, traffic and cycles of programs that are compiled for absent TPUs.

Nothing runs: all figures come from the TPU compiler. Each test compiles programs of its own, so two
pytest processes can share the tests. The slowest tests come first.
"""

import re

import pytest
from absent import compile_elsewhere, write_config
from conftest import ROOT

import kernel
from infra.data import hf
from tools import step_time
from tools.sizes import SIZES

pytestmark = pytest.mark.aot


# ---------------------------------------------------------------- the update
ROW_TOKENS = 1024
# A narrow model with a real vocabulary, since the compiler takes minutes for a 0.5B.
NARROW = dict(
    hidden_size=512,
    intermediate_size=1024,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=128,
)


def update_gib(tmp_path, loss_impl, micro_batch, size="0.5B"):
    """Returns the GiB per device of the update of a narrow model, with float32 weights and AdamW,
    by a plan for eight chips."""
    write_config(tmp_path, size, **NARROW)
    half = ROW_TOKENS // 2
    printed = compile_elsewhere(
        ROOT / "tools/plan.py",
        # With 64 questions, a step's update takes long enough to show in tenths of a second.
        f"v6e-8 --max_prompt {half} --max_answer {half} --batch 64 --loss_impl {loss_impl}",
        f"--sweep micro_batch={micro_batch}",
        "--model",
        tmp_path,
        cwd=tmp_path,
    )
    row = rf"^ +{micro_batch} +([\d.]+)  (?:fits|[\d.]+ GiB too much)$"
    (gib,) = re.findall(row, printed, re.M)
    check_time(printed)
    return float(gib)


def check_time(printed):
    """Check that a plan's estimate by the compiler adds up, that its rollout takes at least as long
    as the plan's estimate by bytes, and that its update is no faster than the chip's peak."""
    by_bytes, by_clock = re.findall(r"^  rollout ([\d.]+) s = ", printed, re.M)
    by_flops, update = re.findall(r"^  update ([\d.]+) s = ", printed, re.M)
    (total,) = re.findall(r"compiler's clock, not measured: ([\d.]+) s$", printed, re.M)
    assert 0 < float(by_bytes) <= float(by_clock), printed
    assert abs(float(by_clock) + float(update) - float(total)) < 0.16, printed
    assert float(update) > 0, printed
    # Both numbers are rounded to tenths of a second.
    assert float(update) + 0.05 > step_time.ASSUMED_MFU * (float(by_flops) - 0.05), printed


def logits_gib(rows):
    return rows * ROW_TOKENS * 151936 * 4 / 2**30


# Qwen3's layers have everything that Qwen2's have, except biases.
@pytest.mark.parametrize("size", [pytest.param("0.5B", marks=pytest.mark.soak), "Qwen3-0.6B"])
def test_update_keeps_the_input_of_each_layer_and_no_logits(size, tmp_path, record_property):
    rows = 32
    gib = update_gib(tmp_path, "pallas", rows, size)
    # Each row keeps its inputs of all layers, bfloat16 [layers, tokens, model].
    *_, L, _ = SIZES[size]
    layer_inputs = L * ROW_TOKENS * NARROW["hidden_size"] * 2 / 2**30
    # Eight chips share the float32 weights, their gradients and two moments.
    state = 16 * hf.read_config(str(tmp_path)).n_params / 8 / 2**30
    per_row = (gib - state) / rows
    assert layer_inputs < per_row < 1.6 * layer_inputs, gib
    assert gib < logits_gib(rows) / 2
    record_property("GiB a device", gib)
    record_property("GiB a row", f"{per_row:.3f}, {layer_inputs:.3f} for its layers' inputs")


# test_full_loss_holds_all_logits, below, says the same of the loss alone, in less time.
@pytest.mark.soak
def test_update_with_the_full_loss_holds_all_logits(tmp_path, record_property):
    """The full loss takes more memory than all logits of its rows. The Pallas kernels, by the test
    above, take less than half of theirs."""
    gib = update_gib(tmp_path, "full", 8)
    assert gib > logits_gib(8)
    record_property("GiB a device", gib)


# ---------------------------------------------------------------- the loss
def loss_temp(flags):
    """Run `bench_loss.py FLAGS` for absent TPUs. Returns {implementation: GB of temporaries per
    device}."""
    printed = compile_elsewhere(ROOT / "tools/bench_loss.py", flags)
    found = re.findall(r"^\S+ (\w+) +temp ([\d.]+) GB", printed, re.M)
    return {impl: float(gb) for impl, gb in found}


# These cases cover each chip and the widths that fill its VMEM most, though not all combinations.
# Width 2,048 on a v6e comes below. The vocabulary does not change the VMEM, but on a v4 the
# compiler takes five times as long for a real one.
# fmt: off
@pytest.mark.parametrize("chip, hidden, vocab", [
    ("v4-8",        3584,   8011),
    ("v4-8",        4096,   8011),
    ("v5p-8",       3584,   8064),
    ("v5p-8",       5120,   8064),
    ("v4-8",         896,   8011),
    ("v5p-8",       2048, 151936),
    ("v5litepod-8", 1536, 152064),
    ("v6e-8",        896, 151643),
])
# fmt: on
def test_pallas_kernels_compile(chip, hidden, vocab, record_property):
    flags = f"--impl pallas --time 1024 --hidden {hidden} --vocab {vocab}"
    temp = loss_temp(f"--aot {chip} {flags}")
    assert list(temp) == ["pallas"]
    record_property("GB of temp", temp["pallas"])


# fmt: off
@pytest.mark.parametrize("flags, most", [
    ("--aot v6e-8 --time 8192 --impl jax,pallas", {"jax": 0.35, "pallas": 0.35}),
    ("--aot v6e-1 --time 4096 --impl jax", {"jax": 0.65}),
    ("--aot v6e-1 --time 4096 --impl pallas --block_tokens 1024", {"pallas": 0.35}),
], ids=["eight-devices", "one-device", "small-chunks"])
# fmt: on
def test_loss_and_gradients_hold_the_logits_of_a_chunk(flags, most, record_property):
    temp = loss_temp(flags)
    assert temp.keys() == most.keys()
    for impl in temp:
        assert temp[impl] <= most[impl], temp
    record_property("GB of temp", temp)


def test_full_loss_holds_all_logits(record_property):
    temp = loss_temp("--aot v6e-8 --time 1024 --impl full")
    assert temp["full"] > 1, "the logits of all tokens take less than they are"
    record_property("GB of temp", temp["full"])


# ---------------------------------------------------------------- the kernels' time
# The clock and the memory bandwidth of a v6e, per millisecond.
CYCLES_PER_MS = 1.75e6
BYTES_PER_MS = 1.64e9


def kernel_cycles(dump, tiles):
    """Returns {kernel: cycles counted by the compiler} for one chunk of tokens and this many tiles
    of the LM head."""
    dump.mkdir()
    init_args = f"--xla_jf_dump_static_llo_profile_to={dump}"
    compile_elsewhere("-m tests.aot_kernels", str(tiles), LIBTPU_INIT_ARGS=init_args)
    cycles = {}
    for name in ("forward", "backward"):
        (profile,) = dump.glob(f"grpo_{name}*")
        cycles[name] = int(re.search(r"estimated_cycles: (\d+)", profile.read_text())[1])
    return cycles


def test_kernels_take_little_longer_than_three_gemms(tmp_path, record_property):
    """For 4,096 tokens on a v6e, the kernels take little longer than three GEMMs. The time of a
    kernel is the larger of its compute time, by cycles, and its memory time, by bytes."""
    V, D, tokens = 151936, 2048, 4096
    blocks = kernel.block_sizes("TPU v6 lite", D)
    C = blocks.chunk_tokens
    # Counting cycles for the complete head would take much time and memory. Extrapolate from two
    # small heads instead: each additional tile takes the same number of cycles.
    few = 2
    more = 4
    cycles_of_few = kernel_cycles(tmp_path / "few", few)
    cycles_of_more = kernel_cycles(tmp_path / "more", more)
    # Both kernels move the head and the logits z in bfloat16. The backward kernel also reads and
    # writes dW in float32.
    head_and_z = 2 * V * (D + C)
    bytes_moved = {"forward": head_and_z, "backward": head_and_z + 2 * 4 * V * D}
    ms = {}
    for name in bytes_moved:
        per_tile = (cycles_of_more[name] - cycles_of_few[name]) / (more - few)
        cycles = cycles_of_few[name] + per_tile * (V / blocks.tile_vocab - few)
        slower = max(cycles / CYCLES_PER_MS, bytes_moved[name] / BYTES_PER_MS)
        ms[name] = tokens / C * slower
    assert 8.3 < sum(ms.values()) <= 9.5, ms
    figures = ", ".join(f"{name} {value:.2f}" for name, value in ms.items())
    record_property("ms", f"{figures}, sum {sum(ms.values()):.2f}; three GEMMs: 8.33")


# ---------------------------------------------------------------- the rollout's decode loop
def decode_loops(*flags):
    """Compile decode loops of 128 rows. Returns a dict for each of them, all per device and step:

    layout; least, GB of the weights and the KV cache; compiled, GB read and written; moved, GB of
    collectives; copied, the bytes written by copies as a share of the KV cache; peak, GB of memory;
    bytes_ms and clock_ms, the milliseconds by bytes and by the compiler's clock.
    """
    bench = ROOT / "tools/bench_rollout.py"
    printed = compile_elsewhere(bench, "--prompt 1024 --answer 256", *flags)
    layouts = re.findall(r"^\S+ on \S+: (\w+)", printed, re.M)
    figures = re.findall(
        r"least ([\d.]+) GB .* compiled ([\d.]+) GB in ([\d.]+) ms, .* "
        r"move ([\d.]+) GB; copies write ([\d.]+) of.* peak ([\d.]+) GB\n"
        r".* clock, not measured, a step takes ([\d.]+) ms \(slowest: (?:[^;]+ [\d.]+; ){4}",
        printed,
    )
    names = ("least", "compiled", "bytes_ms", "moved", "copied", "peak", "clock_ms")
    loops = []
    for layout, texts in zip(layouts, figures, strict=True):
        numbers = map(float, texts)
        loops.append({"layout": layout} | dict(zip(names, numbers, strict=True)))
    return loops


def check_reads_only_weights_and_cache(loop):
    least = loop["least"]
    assert loop["compiled"] <= 1.15 * least, loop
    # Collectives sum over the devices that split the weights, and exchange rows for attention. With
    # 64 rows per device and 28 layers they move 0.08 GB, however much is read.
    assert loop["moved"] <= 0.1 and loop["moved"] <= 0.04 * least, loop
    assert loop["copied"] <= 0.1, loop
    # No operation is faster than its bytes allow, and small operations take longer.
    assert loop["bytes_ms"] <= loop["clock_ms"] <= 4 * loop["bytes_ms"], loop


# fmt: off
@pytest.mark.parametrize("size, chips, most_ms", [
    # test_decoding_that_reads_more_is_found_out checks nearly the same, of 3B on v6e-8.
    pytest.param("3B", "v6e-16", 4.0, marks=pytest.mark.soak),
    ("7B", "v4-16", 7.5),
    # With XLA's defaults it takes 4.3 ms: each layer copies a matrix of all layers.
    ("Qwen3-0.6B", "v6e-8", 2.6),
])
# fmt: on
def test_decoding_reads_only_weights_and_cache(size, chips, most_ms, record_property):
    """In the fastest layout, decoding reads little more than the weights and the KV cache. Before
    there was a decode kernel, a step took 7.1 ms (3B) and 13.1 ms (7B)."""
    (loop,) = decode_loops(f"--model {size} --aot {chips}")
    assert loop["layout"] == "tp"
    check_reads_only_weights_and_cache(loop)
    assert loop["clock_ms"] <= most_ms, loop
    # Peak memory is little more than weights and cache, so no weights are held twice.
    assert loop["peak"] <= 1.15 * loop["least"], loop
    record_property("bytes / those of weights and cache", f"{loop['compiled'] / loop['least']:.3f}")
    record_property("ms by the compiler's clock", loop["clock_ms"])


def test_decoding_compiles_for_every_chip_and_head_size(record_property):
    """The decode loop compiles for heads of 64, and of 128 with norms of queries and keys, on chips
    with more and with less VMEM."""
    chips = "v4-8", "v5litepod-8", "v5p-8"
    loops = decode_loops(f"--model 0.5B,Qwen3-0.6B --aot {','.join(chips)}")
    assert len(loops) == 2 * len(chips)
    for loop in loops:
        # In models this small, logits and (on a v5p) activations are a large part of the traffic.
        assert loop["compiled"] <= 1.5 * loop["least"], loop
        # On a v5p, the logits of a 0.5B are copied.
        assert loop["copied"] <= 0.35, loop
        assert loop["moved"] <= 0.1, loop
    record_property("ms by the compiler's clock", [loop["clock_ms"] for loop in loops])


def test_a_small_cache_is_not_copied_in_each_layer(record_property):
    """In the first stage of a rollout the KV cache is small enough for XLA to hold it in VMEM, but
    no layer copies it."""
    bench = ROOT / "tools/bench_rollout.py"
    flags = "--model 0.5B --aot v6e-8 --batch 64 --prompt 256 --answer 128"
    printed = compile_elsewhere(bench, flags)
    (share,) = re.findall(r" ms, ([\d.]+) of that;", printed)
    assert float(share) <= 1.1, printed
    record_property("bytes / those of weights and cache", share)


def test_decoding_that_reads_more_is_found_out(tmp_path, record_property):
    """Slower ways to decode a 3B show in the figures: complete weights on each device, all-gathered
    weights, and a KV cache with repeated heads."""
    # Repeat the 2 key/value heads for every query head.
    n_heads = SIZES["3B"][3]
    write_config(tmp_path, "3B", num_key_value_heads=n_heads)
    chosen, complete, fsdp = decode_loops("--model 3B --aot v6e-8 --layout auto,replicated,fsdp")
    (repeated,) = decode_loops("--aot v6e-8 --layout replicated --model", tmp_path)
    assert chosen["layout"] == "tp"
    check_reads_only_weights_and_cache(chosen)
    assert chosen["clock_ms"] <= 4.5, chosen
    # Peak memory is little more than weights and cache, so no weights are held twice.
    assert chosen["peak"] <= 1.15 * chosen["least"], chosen
    assert complete["clock_ms"] > 1.3 * chosen["clock_ms"], (complete, chosen)
    check_reads_only_weights_and_cache(complete)
    least = complete["least"]

    assert fsdp["layout"] == "fsdp"
    assert fsdp["least"] == least
    assert fsdp["compiled"] > 1.15 * least, fsdp
    assert fsdp["moved"] > 0.8 * least, fsdp
    assert fsdp["clock_ms"] > 2 * chosen["clock_ms"], (fsdp, chosen)

    # `least` counts a KV cache with 2 key/value heads.
    assert repeated["layout"] == "replicated"
    assert repeated["compiled"] > 1.15 * least, repeated

    loops = dict(chosen=chosen, complete=complete, fsdp=fsdp, repeated=repeated)
    shares = {name: round(loop["compiled"] / least, 3) for name, loop in loops.items()}
    record_property("bytes / those of weights and cache", shares)
