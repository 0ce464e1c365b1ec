"""Memory and time of a run, compiled for devices that are not here."""

import dataclasses
import json
import tempfile

import jax
import jax.numpy as jnp

import model
import train
from infra import data, files, hf, layouts, memory, rollout
from infra.log import check, exit_on, say

ASSUMED_MFU = 0.4  # of the update; MaxText reaches 0.45 with an 8B on v6e

SWEPT = "micro_batch", "max_prompt", "max_answer", "loss_impl", "remat", "offload"

def plan_memory(cfg, shape, mesh, width):
    """Print what micro-batches take of a device -> of the largest that fits, or of the one that cfg says."""
    limit, tried = memory.device_memory(mesh.devices.flat[0]), {}
    say(f"rows of {width} tokens, {limit:.2f} GiB a device; {cfg.optimizer}, remat {cfg.remat}, offload "
        f"{cfg.offload}, attention {cfg.attention}, loss {cfg.loss_impl}")
    def need(n):
        say(f"compiling the update with micro_batch {n} ...")
        return train.needed(n, width, cfg, shape, mesh)
    if cfg.micro_batch:
        tried[cfg.micro_batch] = need(cfg.micro_batch)
        low = cfg.micro_batch * tried[cfg.micro_batch][1]
    else:
        kept = shape.L * width * shape.D * jnp.dtype(cfg.dtype).itemsize / 2 ** 30  # at least, of a row
        low, tried = memory.largest(need, limit, int(min(1024, 1 + limit // kept)))
    a, b = sorted(tried)[0], sorted(tried)[min(1, len(tried) - 1)]
    slope = (tried[b][0] - tried[a][0]) / max(1, b - a)
    say(f"{'micro_batch':>12} {'peak GiB':>10}")
    for n in sorted({2 ** i for i in range(11) if len(tried) > 1 and 2 ** i <= 2 * low} | set(tried)):
        gib = tried[n][0] if n in tried else tried[a][0] + (n - a) * slope
        fits = tried[n][1] if n in tried else gib <= limit
        say(f"{'' if n in tried else '~':>5}{n:7} {gib:10.2f}  "
            + ("fits" if fits else f"{max(0, gib - limit):.2f} GiB too much"))
    return {"micro_batch": low, "gib": tried[low or a][0], "limit_gib": limit}

def plan_time(cfg, shape, layout, mesh):
    """Print what a step takes where all prompts and answers have their full length, with the arithmetic."""
    length, sequences, n = cfg.max_prompt + cfg.max_answer, cfg.batch * cfg.npq * train.hosts(mesh), mesh.size
    (weights, slot), device = layouts.bytes_read(shape, layout, cfg.dtype), mesh.devices.flat[0]
    resident, shards = memory.on_device(train.abstract_state(cfg, shape, mesh)), layouts.row_shards(layout)
    most, chip = layouts.rows_that_fit(shape, layout, cfg.dtype, length, resident), memory.chip(device)
    waves, _ = rollout.plan_waves(sequences, shards, cfg.npq, most)
    rows, at_once, held = sequences // shards, waves[0].shape[1], resident / 2 ** 30
    decode = rollout.lower_decode(shape, layout, jnp.dtype(cfg.dtype), at_once * shards, length)
    gib, fits = memory.compiled_gib(decode, mesh)
    fits &= gib + held <= memory.device_memory(device)
    say(f"rollout, {layout.kind}: {rows} rows per device, {at_once} at once: {gib + held:.2f} GiB, "
        f"{held:.2f} of it parameters and optimizer" + "; too much" * (not fits))
    if not chip.flops:
        return say(f"no estimate of the time: the peak of a {device.device_kind} is not known")
    cached = slot * (cfg.max_prompt + cfg.max_answer / 2)
    t_rollout = cfg.max_answer * (len(waves) * weights + rows * cached) / chip.bandwidth
    passes = cfg.ppo_epochs + (cfg.ppo_epochs * cfg.minibatches > 1) / 3  # a third: the forward that scores
    flops = model.flops(shape, [length]) * sequences * passes
    took = flops / (ASSUMED_MFU * chip.flops * n)
    say(f"a step, estimated, of prompts and answers of full length: {t_rollout + took:.1f} s\n"
        f"  rollout {t_rollout:.1f} s = {cfg.max_answer} tokens x ({len(waves)} x {weights / 1e9:.2f} GB of "
        f"weights + {rows} rows x {cached / 1e9:.3f} GB of cache) / {chip.bandwidth / 1e12:.2f} TB/s\n"
        f"  update {took:.1f} s = {flops / 1e15:.2f} PFLOP of {sequences} x {length} tokens / "
        f"({ASSUMED_MFU} x {chip.flops / 1e12:.0f} TFLOP/s x {n} devices)")

def plan(cfg):
    """What fits devices that need not be here, and how long a step takes: compiled, not run."""
    with exit_on(Exception, f"--plan {cfg.plan} cannot be compiled for here: that takes a type such as v6e-8 "
                 "and libtpu, which is for x86-64 Linux"):
        devices = jax.devices() if cfg.plan == "here" else memory.tpu_devices(cfg.plan)
    name, _, values = cfg.sweep.partition("=")
    check(not cfg.sweep or values and name in SWEPT, f"sweep = {cfg.sweep} is not a list such as "
          f"micro_batch=8,16, of {', '.join(SWEPT)}")
    with tempfile.TemporaryDirectory() as directory:  # of the tiny model, which is nowhere yet
        files.write_json(f"{directory}/config.json", data.TINY_MODEL)
        shape = hf.read_config(directory if cfg.model == "tiny" else data.model_directory(cfg, "*.json"))
    mesh, table = train.make_mesh(cfg.mesh, devices), []
    say(f"{cfg.plan}: {train.hosts(mesh)} x {mesh.size // train.hosts(mesh)} {devices[0].device_kind}, mesh "
        f"{dict(mesh.shape)}; {shape.n_params / 1e6:.2f}M parameters\n{cfg.batch} questions x {cfg.npq} "
        f"answers = {cfg.batch * cfg.npq} sequences per host, in {cfg.minibatches} minibatches of at most "
        f"{train.rows_to_fill(cfg, mesh)} rows per device")
    with exit_on(ValueError, f"sweep = {cfg.sweep}"):
        swept = [{name: type(getattr(cfg, name))(v)} for v in values.split(",")] if values else [{}]
    for one in swept:  # all, before the first is compiled
        train.check_flags(dataclasses.replace(cfg, **one))
    for values in swept:
        one = train.resolve(dataclasses.replace(cfg, **values), mesh)
        train.check_sizes(dataclasses.replace(one, micro_batch=0), shape, mesh, 0)  # any may be asked about
        table.append(values | plan_memory(one, shape, mesh, train.row_width(one.max_prompt + one.max_answer, mesh)))
    plan_time(one, shape, layouts.rollout_layout(one.rollout_sharding, shape, mesh, one.dtype)[0], mesh)
    if values:
        columns = dict.fromkeys((name, "micro_batch", "gib"))
        for row in [dict(zip(columns, columns)), *table]:
            say("".join(f"{row[k]!s:>14.14}" for k in columns))
        with open(f"plan-{cfg.plan}.jsonl", "a", encoding="utf-8") as f:
            f.writelines(json.dumps(row) + "\n" for row in table)
    say(f"largest that fits: micro_batch {max(row['micro_batch'] for row in table)}")
