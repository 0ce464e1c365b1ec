"""The bytes and the estimated time of a program, counted in example texts of compiled programs
(tools/hlo.py, tools/clock.py)."""

import numpy as np
import pytest
from numpy.testing import assert_allclose

import train
from infra.host import chips
from infra.host.chips import Chip
from infra.rollout import layouts
from infra.update import lora, packing
from test_kernel import mesh
from tools import clock, hlo, rollout_time, step_time
from tools.sizes import model_of_size

# Rates per second that are no multiples of each other, so that they cannot be confused.
CHIP = Chip(bandwidth=7e9, flops=3e12, clock=1.1e9, link=5e9)
MIB = 2**20

# A decode loop over nine layers; the body of the outer loop is a step. The weights are int8
# [layers, 1024, 1024], so 1 MiB per layer, and x has 1 MiB. S(1) is VMEM. `step_text` fills in the
# words in capitals.
STEP = """HloModule jit_decode, is_scheduled=true

%tiling (input: s8[9,1024,1024]) -> s8[9,1024,1024] {
  %input = s8[9,1024,1024]{2,1,0:T(32,128)(4,1)} parameter(0)
  ROOT %copy.1 = s8[9,1024,1024]{2,1,0:T(8,128)(4,1)} copy(%input)
}

%product (w: s8[9,1024,1024], x: bf16[512,1024], i: s32[]) -> bf16[512,1024] {
  %w = s8[9,1024,1024]{2,1,0:T(32,128)(4,1)} parameter(0)
  %x = bf16[512,1024]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %tiled = s8[9,1024,1024]{2,1,0:T(8,128)(4,1)} fusion(%w), kind=kLoop, ALIASING, calls=%tiling
  %layer = s8[1,1024,1024]{2,1,0} dynamic-slice(%tiled, %i), dynamic_slice_sizes={1,1024,1024}
  ROOT %dot.1 = bf16[512,1024]{1,0} convolution(%x, %layer), dim_labels=bf_io->bf
}

%layer_body (carry: (s32[], bf16[512,1024], s8[9,1024,1024])) -> (s32[], bf16[512,1024]) {
  %carry = (s32[], bf16[512,1024]{1,0}, s8[9,1024,1024]{2,1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%carry), index=0
  %x.1 = bf16[512,1024]{1,0} get-tuple-element(%carry), index=1
  %w.1 = s8[9,1024,1024]{2,1,0:T(32,128)(4,1)} get-tuple-element(%carry), index=2
  %fusion.1 = bf16[512,1024]{1,0} fusion(%w.1, %x.1, %i.1), kind=kOutput, calls=%product, \
metadata={op_name="jit(decode)/while/body/while/body/closed_call/BD,DF->BF/dot_general"}, \
backend_config={"window_config":{"estimated_cycles":"CYCLES"}}
  ROOT %tuple.1 = (s32[], bf16[512,1024]{1,0}) tuple(%i.1, %fusion.1)
}

%layer_condition (carry.1: (s32[], bf16[512,1024])) -> pred[] {
  %carry.1 = (s32[], bf16[512,1024]{1,0}) parameter(0)
  %layers = s32[]{:T(128)} constant(LAYERS)
  %i.2 = s32[] get-tuple-element(%carry.1), index=0
  ROOT %compare.1 = pred[] compare(%i.2, %layers), direction=LT
}

%step (state: (bf16[512,1024], s8[9,1024,1024])) -> (bf16[512,1024]) {
  %state = (bf16[512,1024]{1,0}, s8[9,1024,1024]{2,1,0}) parameter(0)
  %x.2 = bf16[512,1024]{1,0} get-tuple-element(%state), index=0
  %while.1 = (s32[], bf16[512,1024]{1,0}) while(%state), condition=%layer_condition, \
body=%layer_body
  %slice-start.1 = ((bf16[4096,1024]{1,0}), bf16[512,1024]{1,0:S(1)}, s32[]{:S(2)}) \
slice-start(%x.2), slice={[0:512]}
  %slice-done.1 = bf16[512,1024]{1,0:S(1)} slice-done(%slice-start.1)
  %attend.1 = bf16[512,1024]{1,0} custom-call(%x.2, %x.2), custom_call_target="tpu_custom_call", \
metadata={op_name="jit(decode)/while/body/shard_map/attend/pallas_call"}, \
backend_config={"custom_call_config":{"body":"T", COSTS "needs_layout_passes":true}}
  ROOT %all-reduce.1 = bf16[512,1024]{1,0} all-reduce(%x.2), replica_groups=GROUPS, \
to_apply=%add, metadata={op_name="jit(decode)/while/body/shard_map/psum"}
}

%step_condition (state.1: (bf16[512,1024])) -> pred[] {
  %state.1 = (bf16[512,1024]{1,0}) parameter(0)
  ROOT %any = pred[] constant(true)
}

ENTRY %main (p.0: bf16[512,1024], p.1: s8[9,1024,1024]) -> (bf16[512,1024]) {
  %p.0 = bf16[512,1024]{1,0} parameter(0)
  %p.1 = s8[9,1024,1024]{2,1,0} parameter(1)
  %tuple.2 = (bf16[512,1024]{1,0}, s8[9,1024,1024]{2,1,0}) tuple(%p.0, %p.1)
  ROOT %while.2 = (bf16[512,1024]{1,0}) while(%tuple.2), condition=%step_condition, body=%step
}
"""
# A conditional with two branches of one operation each. JAX puts the branch of a true condition
# last.
BRANCHES = """HloModule jit_f, is_scheduled=true

%absent (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  ROOT %zeros.1 = f32[8]{0} broadcast(%a), metadata={op_name="jit(f)/cond/branch_0_fun/zeros"}, \
backend_config={"estimated_cycles":"ABSENT"}
}

%present (b: f32[8]) -> f32[8] {
  %b = f32[8]{0} parameter(0)
  ROOT %run.1 = f32[8]{0} negate(%b), metadata={op_name="jit(f)/cond/branch_1_fun/run"}, \
backend_config={"estimated_cycles":"PRESENT"}
}

%loop (c: f32[8]) -> f32[8] {
  %c = f32[8]{0} parameter(0)
  %pick = s32[] constant(1)
  %branch.1 = f32[8]{0} conditional(%pick, %c, %c), branch_computations={%absent, %present}
  ROOT %call.1 = f32[8]{0} call(%branch.1), to_apply=%present
}

%unsaid (c.1: f32[8]) -> pred[] {
  %c.1 = f32[8]{0} parameter(0)
  ROOT %any.1 = pred[] constant(true)
}

ENTRY %main (d: f32[8]) -> f32[8] {
  %d = f32[8]{0} parameter(0)
  ROOT %while.3 = f32[8]{0} while(%d), condition=%unsaid, body=%loop NOTED
}
"""
# A decode step for a GPU, where no inner loop runs over the layers. It reads a weight of 4 MiB in
# bytes, updates and reads a cache of 2 MiB, and makes an activation of 1 MiB that it reads twice.
GPU_STEP = """HloModule jit_decode, is_scheduled=true

%update (cache: s8[2,1048576], new: s8[1,1024], slot: s32[]) -> s8[2,1048576] {
  %cache = s8[2,1048576]{1,0} parameter(0)
  %new = s8[1,1024]{1,0} parameter(1)
  %slot = s32[] parameter(2)
  ROOT %dus.1 = s8[2,1048576]{1,0} dynamic-update-slice(%cache, %new, %slot, %slot)
}

%step (state: (s32[], s8[4,1048576], s8[2,1048576], s8[1,1024])) -> (s8[1048576]) {
  %state = (s32[], s8[4,1048576]{1,0}, s8[2,1048576]{1,0}, s8[1,1024]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %w = s8[4,1048576]{1,0} get-tuple-element(%state), index=1
  %cache.1 = s8[2,1048576]{1,0} get-tuple-element(%state), index=2
  %new.1 = s8[1,1024]{1,0} get-tuple-element(%state), index=3
  %copied = s8[4,1048576]{1,0} WEIGHT(%w)
  %x = s8[1048576]{0} custom-call(%copied, %i), custom_call_target="gemm"
  %cache.2 = s8[2,1048576]{1,0} fusion(%cache.1, %new.1, %i), kind=kLoop, calls=%update
  %flat = s8[2097152]{0} bitcast(%cache.2)
  %y = s8[1048576]{0} custom-call(%flat, %x), custom_call_target="gemm"
  ROOT %z = s8[1048576]{0} add(%x, %y)
}

%step_condition (state.1: (s32[])) -> pred[] {
  %state.1 = (s32[]) parameter(0)
  ROOT %any = pred[] constant(true)
}

ENTRY %main (p.0: (s32[], s8[4,1048576], s8[2,1048576], s8[1,1024])) -> (s8[1048576]) {
  %p.0 = (s32[], s8[4,1048576]{1,0}, s8[2,1048576]{1,0}, s8[1,1024]{1,0}) parameter(0)
  ROOT %while.1 = (s8[1048576]{0}) while(%p.0), condition=%step_condition, body=%step
}
"""


def filled(text, **values):
    for name, value in values.items():
        text = text.replace(name, str(value))
    return text


def step_text(**values):
    defaults = {
        "ALIASING": "output_to_operand_aliasing={{}: (0, {})}",
        "CYCLES": 1,
        "LAYERS": 9,
        "COSTS": "",
        "GROUPS": "{{0,1},{2,3}}",
    }
    return filled(STEP, **defaults | values)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


def test_bytes_of_a_step_count_each_layer_of_the_weights_once():
    traffic = hlo.loop_traffic(step_text(), 1)
    # Each layer reads w and x and writes its result. Around the layers, the slice is only read (it
    # goes to VMEM), the kernel reads two operands and writes one result, and the all-reduce moves
    # one operand and one result.
    of_layers = 9 * (1 + 1 + 1)
    around = 1 + 3 + 2
    assert traffic.device_memory == (of_layers + around) * MIB + 9 * 4
    assert traffic.moved == 2 * MIB
    # A copy that is not an alias reads all nine layers, not one.
    copied = hlo.loop_traffic(step_text(ALIASING="metadata={}"), 1)
    assert copied.device_memory == traffic.device_memory + 9 * 8 * MIB


def test_bytes_without_activations_are_those_of_weights_and_cache():
    indices = 2 * 4
    of_new_token = 1024
    once = hlo.bytes_without_activations(filled(GPU_STEP, WEIGHT="bitcast"))
    assert once == (4 + 2) * MIB + of_new_token + indices
    # The copy reads the weight once more, and its result counts as the weight.
    copied = hlo.bytes_without_activations(filled(GPU_STEP, WEIGHT="copy"))
    assert copied == once + 4 * MIB


def test_an_attribute_may_span_lines():
    """The metadata of JAX's attention kernel for TPUs has line breaks. The instructions after it
    count, too."""
    metadata = 'frontend_attributes={kernel_metadata={\n"block":"{\\"q\\": 512}"\n}}, metadata='
    text = step_text(CYCLES=10**6)
    broken = text.replace("metadata=", metadata)
    assert broken.count("\n") > text.count("\n")
    assert clock.step_clock(broken, 1, CHIP) == clock.step_clock(text, 1, CHIP)
    assert hlo.loop_traffic(broken, 1) == hlo.loop_traffic(text, 1)


def test_step_takes_cycles_or_bytes_and_what_a_kernel_says(rng):
    layers, flops, accessed = rng.integers(1e5, 1e9, 3).tolist()
    layers = 2 + layers % 50
    many, few = 10**8 + rng.integers(10**8).item(), 7
    costs = f'"cost_estimate":{{"flops":"{flops}","bytes_accessed":"{accessed}"}},'

    def times(**values):
        found = clock.step_clock(step_text(LAYERS=layers, **values), 1, CHIP)
        assert_allclose(found.ms, sum(ms for _, ms in found.operations))
        assert [ms for _, ms in found.operations] == sorted((m for _, m in found.operations))[::-1]
        return dict(found.operations)

    byte_ms = 1e3 * MIB / CHIP.bandwidth
    slow = times(CYCLES=many, COSTS=costs)
    assert set(slow) == {"BD,DF->BF", "slice-start", "attend", "all-reduce of psum"}
    assert_allclose(slow["BD,DF->BF"], layers * 1e3 * many / CHIP.clock)
    assert_allclose(slow["slice-start"], byte_ms)
    seconds = max(flops / CHIP.flops, accessed / CHIP.bandwidth)
    assert_allclose(slow["attend"], 1e3 * seconds)
    fast = times(CYCLES=few)
    assert_allclose(fast["BD,DF->BF"], layers * (3 * byte_ms + 4e3 / CHIP.bandwidth))
    assert_allclose(fast["attend"], 3 * byte_ms)


@pytest.mark.parametrize(
    "groups, devices",
    [
        ("{{0,1},{2,3}}", 2),
        ("[2,8]<=[16]", 8),
        ("mesh['axis_0'=2,'axis_1'=4], device_ids=([4,2]T(1,0)) {'axis_1'}", 4),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_0','axis_1'}", 8),
    ],
)
def test_sum_goes_around_its_devices_twice(groups, devices):
    found = clock.step_clock(step_text(GROUPS=groups), 1, CHIP)
    sent_ms = 1e3 * MIB * (devices - 1) / devices / CHIP.link
    hops_ms = 1e-3 * (devices // 2)
    assert_allclose(dict(found.operations)["all-reduce of psum"], 2 * (sent_ms + hops_ms))


def test_collective_on_gpus_starts_once_and_goes_around_step_by_step():
    """The figures are those that NCCL's model of its own speed gives for 2, 4 and 8 H100."""
    h100 = chips.CHIPS["NVIDIA H100"]
    for devices, latency in ((2, 7.8e-6), (4, 10.2e-6), (8, 15e-6)):
        seconds = chips.ring_seconds(MIB, devices, h100, rounds=2)
        sent = 2 * MIB * (devices - 1) / devices
        assert_allclose(seconds, latency + sent / h100.link)
    assert chips.ring_seconds(MIB, 1, h100, rounds=2) == 0


def test_branch_that_holds_counts_as_often_as_its_loop_runs(rng):
    absent, present = rng.integers(10**6, 10**9, 2).tolist()
    noted, unsaid = rng.integers(2, 99, 2).tolist()
    text = filled(BRANCHES, ABSENT=absent, PRESENT=present)
    note = f', backend_config={{"known_trip_count":{{"n":"{noted}"}}}}'
    for trips, end in [(noted, note), (unsaid, "")]:
        found = clock.program_clock(filled(text, NOTED=end), unsaid, CHIP)
        # The operation runs twice per trip: in the branch, and in the call after it.
        ((name, ms),) = found.operations
        assert name == "run"
        assert_allclose(ms, 1e3 * trips * 2 * present / CHIP.clock)


def test_update_is_timed_at_the_compiled_micro_batch_closest_to_a_steps():
    both = [clock.Clock(3.0, []), clock.Clock(1.0, [])]
    # 112 rows did not fit, so their gradients were not compiled and have no clock.
    clocks = {8: both, 77: both, 112: [None, both[1]]}
    for rows, closest in [(1, 8), (40, 8), (50, 77), (112, 77)]:
        assert step_time.clock_of_update(clocks, rows).micro_batch == closest
    assert step_time.clock_of_update({112: []}, 8) is None
    assert step_time.clock_of_update({112: [None, both[1]]}, 8) is None


def test_a_step_reads_the_weights_in_each_wave_and_half_of_the_full_cache(monkeypatch):
    """Bandwidth and FLOP/s are those of CHIP."""
    cfg = train.Config(max_prompt=10, max_answer=70, ppo_epochs=1, minibatches=1, beta=0.0)
    size = layouts.RolloutSize(64, group=8, prompt_slots=16, answer_slots=70)
    plan = step_time.RolloutPlan(64, 8, 4, waves=2, gib=0, state_gib=0, fits=True, clock=None)

    def bytes_of_step(cfg, layout, dtype, size):
        assert size.answer_slots == 35
        return int(3e9), int(1e9)

    monkeypatch.setattr(chips, "chip", lambda device: CHIP)
    monkeypatch.setattr(layouts, "bytes_of_step", bytes_of_step)
    monkeypatch.setattr(packing, "flops", lambda *_: 3e10)
    text = step_time.time_of_step(cfg, None, None, mesh(), size, plan, None)
    assert "full length: 71.6 s\n" in text, text
    wanted = "rollout 70.0 s = 70 tokens x (2 x 3.00 GB of weights + 1.00 GB of cache of 8 rows)"
    assert wanted in text, text
    assert "update 1.6 s = 0.00 PFLOP of 64 x 80 tokens / (0.4 x 3 TFLOP/s x 1 devices)" in text


def test_a_step_by_the_compilers_clock_has_all_waves_rows_and_parameters(monkeypatch):
    cfg = train.Config(max_answer=70, ppo_epochs=1, minibatches=2, beta=0.1, offload="none")
    plan = step_time.RolloutPlan(64, 8, 4, 2, 0, 0, True, clock.Clock(50.0, []))
    update = step_time.UpdateClock(3, clock.Clock(900.0, []), clock.Clock(300.0, []))
    monkeypatch.setattr(packing, "row_shape", lambda *_: packing.RowShape(80, most=12))
    # The compiled optimizer step is for 60 of the 80 values.
    shapes = {"head_VD": (6, 10), "norm_D": (20,)}
    monkeypatch.setattr(lora, "trained_shapes", lambda *_: shapes)
    text = step_time.time_by_clock(cfg, None, mesh(), plan, update)
    assert "rollout 7.0 s = 70 tokens x 2 x a step of 4 rows" in text, text
    # A KL and a second minibatch take a forward pass each: 5/3 passes over 24 rows.
    assert "update 12.8 s = 1.67 x 24 rows / 3 x a micro-batch, 900.00 ms" in text, text
    assert "and 2 x an optimizer step, 400.00 ms" in text, text


@pytest.mark.parametrize(
    "flags, passes",
    [
        (dict(), 1),
        (dict(ppo_epochs=2), 2 + 1 / 3),
        (dict(minibatches=2, beta=0.1), 1 + 2 / 3),
        (dict(lora=8, beta=0.1), 1 + 1 / 2),
        (dict(lora=8, beta=0.1, ppo_epochs=3), 3 + 2 / 2),
    ],
)
def test_a_forward_pass_is_a_third_of_a_pass_or_half_with_frozen_weights(flags, passes):
    cfg = train.Config(**dict(minibatches=1, ppo_epochs=1, beta=0.0) | flags)
    assert_allclose(step_time.passes(cfg), passes)


# fmt: off
@pytest.mark.parametrize("op_name, wanted", [
    ("jit(decode)/while/body/while/body/closed_call/BTD,DF->BTF/dot_general", "BTD,DF->BTF"),
    ("jit(decode)/while/body/shard_map/jit(take_along_axis)/gather", "take_along_axis/gather"),
    ("jit(decode)/while/body/pow", "pow"),
    ("jit(f)/jvp(grpo_loss)/shard_map/while/body/grpo_forward/pallas_call",
     "grpo_loss/grpo_forward"),
    ("jit(f)/transpose(jvp())/layers/while/body/cond/branch_1_fun/BTF,FD->BTD/dot_general",
     "BTF,FD->BTD backward"),
    ("jit(f)/transpose(jvp())/layers/checkpoint/rematted_computation/cond/branch_1_fun/mul",
     "layers/mul recomputed"),
    ("jit(f)/while/body/closed_call", "fusion"),
])
# fmt: on
def test_operations_have_names_that_a_reader_knows(op_name, wanted):
    attributes = f', metadata={{op_name="{op_name}"}}'
    fusion = hlo.Instruction("f32[8]{0}", "fusion", [], "", "", attributes)
    assert clock.readable("fusion.12.clone", fusion) == wanted


# ---------------------------------------------------------------- a rollout of answers that differ
def test_stages_decode_answers_of_gsm8k_to_their_ends(monkeypatch):
    lengths = rollout_time.answer_lengths(128, 1024)
    assert (lengths.max(), lengths.min() > 0) == (1024, True)
    assert_allclose(np.median(lengths), 210, rtol=0.01)
    assert_allclose(lengths.mean(), 270, rtol=0.02)
    cfg = model_of_size("3B")
    layout = layouts.layout_of("replicated", 1, cfg, mesh(1, 8, 1))
    size = layouts.RolloutSize(128, group=8, prompt_slots=256, answer_slots=1024, quantised=True)
    stages = rollout_time.plan_stages(lengths, cfg, layout, "bfloat16", size)
    assert sum(stage.steps for stage in stages) == 1024
    rows = [stage.prompts * stage.group for stage in stages]
    assert rows == sorted(rows, reverse=True) and rows[0] == 16
    # A device keeps the rows of its live answers, of which there is one at the end.
    assert rows[-1] < 16
    # The floor is the time to read the weights 1,024 times, and the prompts' and answers' caches.
    monkeypatch.setattr(chips, "chip", lambda device: CHIP)
    slot_bytes = 2 * 36 * 2 * 128 * 2
    slots = sum(length * (length + 1) // 2 for length in lengths.tolist())
    slots += 256 * lengths.reshape(-1, 8).max(1).sum()
    nbytes = 1024 * cfg.n_multiplied + slots * slot_bytes
    floor = rollout_time.floor_seconds(lengths, cfg, layout, "bfloat16", size)
    assert_allclose(floor, nbytes / 8 / CHIP.bandwidth)
