"""What fits the devices of a TPU slice, or of this machine, and how long a step takes there:
`python tools/plan.py v6e-8 --model DIR`; without a type, of this machine.

Programs are compiled and not run: the devices need not be here, and of the model a config.json is
enough. The other flags are train.py's. The last line names the largest micro-batch that fits.
"""

import argparse
import dataclasses
import json
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp

import model
import train
from infra import cluster, data, flags, hf, layouts, log, memory, packing, quantise, rollout
from infra.files import CheckpointError
from infra.log import check, exit_on, say
from infra.state import abstract_state

# Of the update. MaxText reaches 0.45 with an 8B model on v6e.
ASSUMED_MFU = 0.4
# What --sweep can try several values of.
SWEPT = "micro_batch", "max_prompt", "max_answer", "loss_impl", "remat", "offload"


# ---------------------------------------------------------------- the command line
def split_arguments(argv: list[str]) -> tuple[str, str, list[str]]:
    """Command line -> (type of devices, --sweep, the words that are for train.py)."""
    device_type = "here"
    if argv and not argv[0].startswith("-"):
        device_type, *argv = argv
    usage = "python tools/plan.py [v6e-8 or such | here] [--sweep name=a,b] [--flag value ...]"
    parser = argparse.ArgumentParser(usage=usage, description=__doc__, allow_abbrev=False)
    # One line and exit code 2, as for every mistake.
    parser.error = lambda message: check(False, f"{message}; see --help")
    parser.add_argument("--sweep", default="", help=f"values of one of {', '.join(SWEPT)}")
    args, train_flags = parser.parse_known_args(argv)
    return device_type, args.sweep, train_flags


def swept_settings(sweep: str, cfg: train.Config) -> list[dict]:
    """`name=a,b` -> [{name: a}, {name: b}]; of no sweep [{}]. Exits 2 for wrong values."""
    if not sweep:
        return [{}]
    name, _, values = sweep.partition("=")
    check(
        values and name in SWEPT,
        f"sweep = {sweep} is not a list such as micro_batch=8,16, of {', '.join(SWEPT)}",
    )
    # A flag's values have the type of its default.
    with exit_on(ValueError, f"sweep = {sweep}"):
        settings = [{name: type(getattr(cfg, name))(value)} for value in values.split(",")]
    # A flag with choices has the type Literal of them.
    choices = get_args(train.Config.__annotations__[name])
    for setting in settings:
        flags.check_numbers(dataclasses.replace(cfg, **setting))
        value = setting[name]
        check(not choices or value in choices, f"{name} = {value} is none of {choices}")
    return settings


# ---------------------------------------------------------------- the memory of the update
def plan_update(cfg, model_cfg, mesh, limit: float) -> tuple[int, dict]:
    """Compile the update with --micro_batch, or with several to find the largest that fits.

    limit: GiB of a device. -> (that micro-batch, 0 if it is too much; {each that was compiled: (GiB
    that it takes of a device, does it fit)})
    """
    width = packing.row_width(cfg.max_prompt + cfg.max_answer, mesh)
    say(
        f"rows of {width} tokens, {limit:.2f} GiB a device; {cfg.optimizer}, remat {cfg.remat}, "
        f"offload {cfg.offload}, attention {cfg.attention}, loss {cfg.loss_impl}"
    )

    def need(micro_batch):
        say(f"compiling the update with micro_batch {micro_batch} ...")
        return memory.update_gib(micro_batch, width, cfg, model_cfg, mesh, train.UPDATE)

    if cfg.micro_batch:
        gib, fits = need(cfg.micro_batch)
        return (cfg.micro_batch if fits else 0), {cfg.micro_batch: (gib, fits)}
    # Of each row at least the inputs of all layers are kept.
    row_gib = model_cfg.L * width * model_cfg.D * jnp.dtype(cfg.dtype).itemsize / memory.GIB
    most = int(min(1024, 1 + limit // row_gib))
    return memory.largest_that_fits(need, limit, most)


def print_update(largest: int, compiled: dict, limit: float, filled: int) -> None:
    """A line for each micro-batch that was compiled, and with ~ for powers of two."""
    estimated = {}
    # From `filled` rows on a minibatch is one micro-batch, and gradients are held once.
    alike = [n for n in sorted(compiled) if (n < filled) == (largest < filled)]
    if len(alike) > 1:
        # There memory grows about linearly: these lie on the line through the smallest two.
        n0, n1 = alike[:2]
        slope = (compiled[n1][0] - compiled[n0][0]) / (n1 - n0)
        for n in [2**i for i in range(11) if 2**i <= 2 * largest]:
            gib = compiled[n0][0] + (n - n0) * slope
            if (n < filled) == (largest < filled):
                estimated[n] = gib, gib <= limit
    say(f"{'micro_batch':>12} {'peak GiB':>10}")
    for n, (gib, fits) in sorted((estimated | compiled).items()):
        mark = "" if n in compiled else "~"
        # What the compiler refuses may seem to fit.
        verdict = "fits" if fits else f"{max(0, gib - limit):.2f} GiB too much"
        say(f"{mark:>5}{n:7} {gib:10.2f}  {verdict}")


# ---------------------------------------------------------------- the rollout, and the time
@dataclass(frozen=True)
class RolloutPlan:
    """How a step's answers are decoded, where all have their full length."""

    sequences: int  # answers of a step
    rows: int  # of a device
    at_once: int  # of these, decoded together: a wave
    waves: int
    gib: float  # of a device while it decodes, parameters and optimizer included
    resting_gib: float  # parameters and optimizer
    fits: bool


def plan_rollout(cfg, model_cfg, layout, mesh) -> RolloutPlan:
    """Compile the decode loop for prompts and answers of full length."""
    slots = cfg.max_prompt + cfg.max_answer
    sequences = cfg.batch * cfg.npq * cluster.host_count(mesh)
    shards = layouts.row_shards(layout)
    resting = memory.device_bytes(abstract_state(cfg, model_cfg, mesh, train.optimizer))
    most = layouts.rows_that_fit(model_cfg, layout, cfg.dtype, slots, resting)
    waves, _ = rollout.plan_waves(sequences, shards, cfg.npq, most)
    at_once = waves[0].shape[1]
    dtype, quantised = quantise.dtypes(cfg)
    decode = rollout.lower_decode(model_cfg, layout, dtype, at_once * shards, slots, quantised)
    gib, fits = memory.compiled_gib(decode, mesh)
    resting_gib = resting / memory.GIB
    # The compiler does not know of what rests on the device.
    gib += resting_gib
    fits = fits and gib <= memory.device_memory(mesh.devices.flat[0])
    return RolloutPlan(sequences, sequences // shards, at_once, len(waves), gib, resting_gib, fits)


def print_time(cfg, model_cfg, layout, mesh, planned: RolloutPlan) -> None:
    """How long a step takes where prompts and answers have their full length, with the arithmetic:
    memory traffic bounds the rollout, and matrix products the update."""
    device = mesh.devices.flat[0]
    chip = memory.chip(device)
    if not chip.flops:
        say(f"no estimate of the time: the peak of a {device.device_kind} is not known")
        return
    # Each token reads the weights once a wave, and of each row the cache, which grows.
    weights, slot = layouts.bytes_read(model_cfg, layout, *quantise.dtypes(cfg))
    cached = slot * (cfg.max_prompt + cfg.max_answer / 2)
    bytes_per_token = planned.waves * weights + planned.rows * cached
    rollout_s = cfg.max_answer * bytes_per_token / chip.bandwidth
    length = cfg.max_prompt + cfg.max_answer
    # Before several updates, a forward scores the answers: a third of a forward and backward.
    passes = cfg.ppo_epochs
    if cfg.ppo_epochs * cfg.minibatches > 1:
        passes += 1 / 3
    flops = memory.flops(model_cfg, [length]) * planned.sequences * passes
    update_s = flops / (ASSUMED_MFU * chip.flops * mesh.size)
    say(
        f"a step, estimated, of prompts and answers of full length: {rollout_s + update_s:.1f} s\n"
        f"  rollout {rollout_s:.1f} s = {cfg.max_answer} tokens x ({planned.waves} x "
        f"{weights / 1e9:.2f} GB of weights + {planned.rows} rows x {cached / 1e9:.3f} GB of "
        f"cache) / {chip.bandwidth / 1e12:.2f} TB/s\n"
        f"  update {update_s:.1f} s = {flops / 1e15:.2f} PFLOP of {planned.sequences} x {length} "
        f"tokens / ({ASSUMED_MFU} x {chip.flops / 1e12:.0f} TFLOP/s x {mesh.size} devices)"
    )


# ---------------------------------------------------------------- the plan
def print_setup(device_type, cfg, model_cfg, mesh) -> None:
    hosts = cluster.host_count(mesh)
    kind = mesh.devices.flat[0].device_kind
    say(
        f"{device_type}: {hosts} x {mesh.size // hosts} {kind}, mesh {dict(mesh.shape)}; "
        f"{model_cfg.n_params / 1e6:.2f}M parameters\n{cfg.batch} questions x {cfg.npq} answers = "
        f"{cfg.batch * cfg.npq} sequences per host, in {cfg.minibatches} minibatches of at most "
        f"{memory.rows_to_fill(cfg, mesh)} rows per device"
    )


@exit_on(CheckpointError, "these files cannot be used")
def main(argv: list[str]) -> None:
    device_type, sweep, train_flags = split_arguments(argv)
    cfg = train.parse(train_flags)
    takes = "that takes a type such as v6e-8 and libtpu, which is for x86-64 Linux"
    with exit_on(Exception, f"{device_type} cannot be compiled for here: {takes}"):
        devices = jax.devices() if device_type == "here" else memory.tpu_devices(device_type)
    settings = swept_settings(sweep, cfg)
    if cfg.model == "tiny":
        model_cfg = model.config_from_hf(data.TINY_MODEL, {})
    else:
        model_cfg = hf.read_config(data.model_directory(cfg, "*.json"))
    mesh = train.make_mesh(cfg.mesh, devices)
    print_setup(device_type, cfg, model_cfg, mesh)
    table = []
    limit = memory.device_memory(mesh.devices.flat[0])
    for setting in settings:
        cfg = train.resolve(dataclasses.replace(cfg, **setting), mesh)
        # Of any micro-batch it can be asked what it takes, also of more than a step has rows for.
        train.check_sizes(dataclasses.replace(cfg, micro_batch=0), model_cfg, mesh, 0)
        largest, compiled = plan_update(cfg, model_cfg, mesh, limit)
        print_update(largest, compiled, limit, memory.rows_to_fill(cfg, mesh))
        gib, _ = compiled[largest or min(compiled)]
        table.append(setting | {"micro_batch": largest, "gib": gib, "limit_gib": limit})

    # Of the last setting.
    layout, _ = layouts.rollout_layout(cfg.rollout_sharding, model_cfg, mesh, cfg.dtype)
    planned = plan_rollout(cfg, model_cfg, layout, mesh)
    verdict = "" if planned.fits else "; too much"
    say(
        f"rollout, {layout.kind}: {planned.rows} rows per device, {planned.at_once} at once: "
        f"{planned.gib:.2f} GiB, {planned.resting_gib:.2f} in parameters and optimizer{verdict}"
    )
    print_time(cfg, model_cfg, layout, mesh, planned)
    if sweep:
        # The flag may be micro_batch itself.
        columns = list(dict.fromkeys([*settings[0], "micro_batch", "gib"]))
        for cells in [columns, *[[row[column] for column in columns] for row in table]]:
            say("".join(f"{cell!s:>14.14}" for cell in cells))
        with open(f"plan-{device_type}.jsonl", "a", encoding="utf-8") as f:
            f.writelines(json.dumps(row) + "\n" for row in table)
    say(f"largest that fits: micro_batch {max(row['micro_batch'] for row in table)}")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
    log.open_streams()
    main(sys.argv[1:])
