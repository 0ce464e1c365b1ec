"""Plan what fits on a TPU slice, on GPUs or on this machine, and how long a step takes.

    python tools/plan.py v6e-8 --model DIR    # or h100-8; without a type, for this machine

Programs are compiled but not run, so the devices may be absent, and the model needs only its
config.json. The other flags are train.py's. The last line names the largest micro-batch that fits.
`--table` plans Qwen2.5 and Qwen3 from 0.5B to 32B on ten types of devices, and prints a table.
"""

import argparse
import contextlib
import dataclasses
import json
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax

import model
import train
from infra.data import hf
from infra.data.hub import model_directory
from infra.data.tiny import TINY_MODEL
from infra.host import chips, nvidia
from infra.host.console import check, exit_on, open_streams, say
from infra.host.files import CheckpointError
from infra.host.processes import host_count
from infra.rollout import layouts
from infra.rollout.engine import make_engine, size_of_step
from infra.run import flags
from infra.update import fit, lora, packing
from infra.update.state import abstract_state
from tools import absent_devices, remembered, step_time, what_fits
from tools.arguments import parser_of

# The flags that --sweep can vary.
SWEPT = "micro_batch", "max_prompt", "max_answer", "loss_impl", "remat", "offload"


# ---------------------------------------------------------------- the command line
def split_arguments(argv: list[str]) -> tuple[str, argparse.Namespace, list[str]]:
    """Split the command line into (type of devices, this command's flags, words for train.py)."""
    device_type = "here"
    if argv and not argv[0].startswith("-"):
        device_type, *argv = argv
    usage = "python tools/plan.py [v6e-8, h100-8 or such | here] [--sweep name=a,b] [--flag ...]"
    parser = parser_of(__doc__)
    parser.usage = usage
    parser.add_argument("--sweep", default="", help=f"values of one of {', '.join(SWEPT)}")
    parser.add_argument("--table", action="store_true", help="all models on all types of devices")
    args, train_flags = parser.parse_known_args(argv)
    return device_type, args, train_flags


def swept_settings(sweep: str, cfg: train.Config) -> list[dict]:
    """Parse `name=a,b` to [{name: a}, {name: b}], and "" to [{}]. Exits with code 2 on mistakes."""
    if not sweep:
        return [{}]
    name, _, values = sweep.partition("=")
    check(
        values and name in SWEPT,
        f"sweep = {sweep} is not a list such as micro_batch=8,16, for one of {', '.join(SWEPT)}",
    )
    # A value has the type of the flag's default.
    with exit_on(ValueError, f"sweep = {sweep}"):
        settings = [{name: type(getattr(cfg, name))(value)} for value in values.split(",")]
    (field,) = [field for field in dataclasses.fields(cfg) if field.name == name]
    choices = flags.choices_of(field)
    for setting in settings:
        flags.check_numbers(dataclasses.replace(cfg, **setting))
        flags.check_lora(dataclasses.replace(cfg, **setting))
        value = setting[name]
        check(not choices or value in choices, f"{name} = {value} is not one of {choices}")
    return settings


# ---------------------------------------------------------------- the memory of the update
def plan_update(
    cfg, model_cfg, mesh, shape: packing.RowShape, guess: fit.MemoryEstimate, limit: float
) -> tuple[int, dict, dict]:
    """Compile the update with --micro_batch, or search for the largest micro-batch that fits.

    limit: GiB per device.
    Returns (the micro-batch, or 0 if it does not fit; {compiled micro-batch: (GiB per device,
    whether it fits)}; {compiled micro-batch: the compiler's time estimates of its programs}).
    """
    clocks = {}

    def gib_and_fit(micro_batch):
        say(f"compiling the update with micro_batch {micro_batch} ...")
        chunks = step_time.chunks_of_loss(micro_batch, shape, cfg, model_cfg, mesh)
        clock_of = step_time.clock_of_program(chunks, mesh)
        clocks[micro_batch] = []

        def compile(lowered, mesh):
            found = remembered.compile_or_recall(lowered, mesh, clock_of, chunks)
            clocks[micro_batch].append(found.clock)
            return found.gib, found.fits

        update = micro_batch, shape, cfg, model_cfg, mesh, train.UPDATE
        return fit.update_gib(*update, compile=compile)

    if cfg.micro_batch:
        gib, fits = gib_and_fit(cfg.micro_batch)
        return (cfg.micro_batch if fits else 0), {cfg.micro_batch: (gib, fits)}, clocks
    return *fit.largest_that_fits(gib_and_fit, limit, 1024, guess), clocks


def gib_of_others(largest: int, gib: float, rest_gib: float, filled: int) -> dict:
    """Returns {micro-batch: estimated GiB} for the powers of two up to twice the largest.

    The estimates lie on the straight line from rest_gib, the estimated memory of 0 rows, to gib,
    the compiled memory of the largest micro-batch.
    """
    others = [2**i for i in range(11) if 2**i <= 2 * largest]
    # A micro-batch of at least `filled` rows is a complete minibatch, and needs one copy of the
    # gradients instead of two. Estimate only micro-batches that need as many copies as the largest.
    alike = [n for n in others if (n < filled) == (largest < filled)]
    return {n: rest_gib + n * (gib - rest_gib) / largest for n in alike}


def table_of_update(compiled: dict, others: dict, limit: float) -> str:
    """Format a line per micro-batch. A ~ marks an estimate for one that was not compiled."""
    estimated = {n: (gib, gib <= limit) for n, gib in others.items()}
    lines = [f"{'micro_batch':>12} {'peak GiB':>10}"]
    for n, (gib, fits) in sorted((estimated | compiled).items()):
        mark = "" if n in compiled else "~"
        # The compiler may refuse a program whose estimate is below the limit.
        verdict = "fits" if fits else f"{max(0, gib - limit):.2f} GiB too much"
        lines.append(f"{mark:>5}{n:7} {gib:10.2f}  {verdict}")
    return "\n".join(lines)


# ---------------------------------------------------------------- the plan
def setup_in_words(device_type, cfg, model_cfg, mesh) -> str:
    hosts = host_count(mesh)
    kind = mesh.devices.flat[0].device_kind
    shape = packing.row_shape(cfg.max_prompt + cfg.max_answer, cfg, model_cfg, mesh)
    return (
        f"{device_type}: {hosts} x {mesh.size // hosts} {kind}, mesh {dict(mesh.shape)}; "
        f"{model_cfg.n_params / 1e6:.2f}M parameters\n{cfg.batch} questions x {cfg.npq} answers = "
        f"{cfg.batch * cfg.npq} sequences per host, in {cfg.minibatches} minibatches of at most "
        f"{shape.most} rows per device"
    )


def kept_small(cfg) -> str:
    """What keeps the memory of the training state small, in words."""
    return f"lora {cfg.lora}" if cfg.lora else f"offload {cfg.offload}"


def devices_of(device_type: str) -> list:
    """Returns the devices of a type, or of this machine. Exits with code 2 if it cannot compile for
    them."""
    needs = "give a type such as v6e-8 or h100-8; `bash launch.sh plan` installs the compiler"
    if device_type == "here":
        nvidia.find_devices()
        return jax.devices()
    with exit_on(Exception, f"cannot compile for {device_type} here: {needs}"):
        return absent_devices.of_kind(device_type)


def plan(device_type: str, cfg, model_cfg, settings: list[dict]) -> list[dict]:
    """Find what fits, and print it.

    Returns {the swept flag, micro_batch, gib, limit_gib, fits} for each setting. The last one also
    has the layout and the GiB of the rollout, if its update fits.
    """
    mesh = train.make_mesh(cfg.mesh, devices_of(device_type))
    say(setup_in_words(device_type, cfg, model_cfg, mesh))
    rows = []
    limit = chips.local_memory(mesh)
    for setting in settings:
        cfg = train.resolve(dataclasses.replace(cfg, **setting), mesh)
        # Leave micro_batch unchecked: a plan may ask for more rows than a step has.
        train.check_sizes(dataclasses.replace(cfg, micro_batch=0), model_cfg, mesh, 0)
        train.check_loss_impl(cfg, model_cfg, mesh)
        lora.check_rank(cfg, model_cfg)
        shape = packing.row_shape(cfg.max_prompt + cfg.max_answer, cfg, model_cfg, mesh)
        say(
            f"rows of {shape.width} tokens, {limit:.2f} GiB a device; {cfg.optimizer}, remat "
            f"{cfg.remat}, {kept_small(cfg)}, attention {cfg.attention}, loss {cfg.loss_impl}"
        )
        guess = fit.estimate_by_sizes(cfg, model_cfg, mesh, shape, train.UPDATE, limit)
        largest, compiled, clocks = plan_update(cfg, model_cfg, mesh, shape, guess, limit)
        filled = shape.most
        gib, _ = compiled[largest or min(compiled)]
        # With --micro_batch, print no other micro-batches.
        others = {} if cfg.micro_batch else gib_of_others(largest, gib, guess.rest_gib, filled)
        say(table_of_update(compiled, others, limit))
        if largest > filled:
            say(f"this batch fills {filled} rows per device, so a run uses no more")
        found = {"gib": gib, "limit_gib": limit, "fits": bool(largest)}
        # A sweep of micro_batch keeps its own values.
        rows.append({"micro_batch": largest} | setting | found)

    if not largest:
        # If the update does not fit, do not plan the rollout.
        say(f"try {fit.advice(cfg)}")
        return rows
    # Plan the rollout of the last setting.
    size = size_of_step(cfg, host_count(mesh), cfg.max_prompt)
    state_bytes = fit.device_bytes(abstract_state(cfg, model_cfg, mesh, train.optimizer))
    engine = make_engine(cfg, model_cfg, mesh, None, cfg.max_prompt, state_bytes)
    planned = step_time.plan_rollout(cfg, model_cfg, engine, mesh, size, state_bytes)
    verdict = "" if planned.fits else "; too much"
    say(
        f"  {planned.rows} rows per device, {planned.at_once} at once: "
        f"{planned.gib:.2f} GiB, {planned.state_gib:.2f} in parameters and optimizer{verdict}"
    )
    update = step_time.clock_of_update(clocks, min(largest, filled))
    say(step_time.time_of_step(cfg, model_cfg, engine.layout, mesh, size, planned, update))
    rows[-1] |= {"layout": layouts.name_of(engine.layout), "rollout_gib": planned.gib}
    return rows


def print_sweep(device_type: str, settings: list[dict], rows: list[dict]) -> None:
    """Print the results of the sweep as a table, and append them to plan-TYPE.jsonl."""
    # dict.fromkeys removes the duplicate if the swept flag is micro_batch itself.
    columns = list(dict.fromkeys([*settings[0], "micro_batch", "gib", "fits"]))
    lines = [[row[column] for column in columns] for row in rows]
    for cells in [columns, *lines]:
        say("".join(f"{cell!s:>14.14}" for cell in cells))
    path = f"plan-{device_type}.jsonl"
    with exit_on(OSError, f"{path} cannot be written"), open(path, "a", encoding="utf-8") as f:
        f.writelines(json.dumps(row) + "\n" for row in rows)


@exit_on(CheckpointError, "the model cannot be used")
def main(argv: list[str]) -> None:
    device_type, args, train_flags = split_arguments(argv)
    if args.table:
        # Name any model but tiny, so that the flags do not get the defaults of the tiny model.
        train_flags = ["--model", "Qwen2.5", *train_flags]
    cfg = train.parse(train_flags)
    if args.table:
        check(device_type == "here" and not args.sweep, "--table plans all types, without --sweep")
        # If a compiler is missing, say so now, not after hours of compilation.
        for name in what_fits.TYPES:
            devices_of(name)
        # Progress goes to stderr, so that stdout can be redirected to a file.
        with contextlib.redirect_stdout(sys.stderr):
            table = what_fits.table(cfg, plan)
        say(table)
        return
    settings = swept_settings(args.sweep, cfg)
    if cfg.model == "tiny":
        model_cfg = model.config_from_hf(TINY_MODEL, {})
    else:
        model_cfg = hf.read_config(model_directory(cfg, "*.json"))
    rows = plan(device_type, cfg, model_cfg, settings)
    if args.sweep:
        print_sweep(device_type, settings, rows)
    largest = max((row["micro_batch"] for row in rows if row["fits"]), default=0)
    say(f"largest that fits: micro_batch {largest}")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
    open_streams()
    main(sys.argv[1:])
