"""The speed of rollouts, against that of the memory."""

import argparse
import dataclasses
import itertools
import tempfile
import time
import timeit
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

import model
from infra import hf, layouts, memory, rollout
from tools import hlo

SIZES = {  # V D F N K H L tied: of the embedded default, one that suits a CPU, Qwen2.5
    "tiny": (320, 128, 256, 4, 2, 32, 2, 1), "45M": (151936, 256, 1024, 4, 2, 64, 6, 1),
    "0.5B": (151936, 896, 4864, 14, 2, 64, 24, 1), "1.5B": (151936, 1536, 8960, 12, 2, 128, 28, 1),
    "3B": (151936, 2048, 11008, 16, 2, 128, 36, 1), "7B": (152064, 3584, 18944, 28, 4, 128, 28, 0),
    "14B": (152064, 5120, 13824, 40, 8, 128, 48, 0), "32B": (152064, 5120, 27648, 40, 8, 128, 64, 0)}

FLAGS = dict(  # model: of SIZES, or a directory; batch: rows in all; prompt, answer: tokens; several: a,b,c
    model="3B", layout="auto", aot="", batch=128, npq=8, prompt=256, answer=1024, dtype="bfloat16",
    transformers=0)

def check_loop(name, cfg, layout, args):
    """Compile the last stage of decoding for devices that are not here -> what a step moves, in words."""
    slots, dtype = args.prompt + args.answer, jnp.dtype(args.dtype)
    program = rollout.lower_decode(cfg, layout, dtype, args.batch, slots).compile()
    read, row = layouts.bytes_read(cfg, layout, dtype)
    cache = row * slots * args.batch // layouts.row_shards(layout)
    least, (n, moved, copied) = read + cache, hlo.loop_traffic(program.as_text(), cfg.L)
    speed = memory.chip(layout.mesh.devices.flat[0]).bandwidth
    return (f"a step reads at least {least / 1e9:.3f} GB in {least / speed * 1e3:.2f} ms; as compiled "
            f"{n / 1e9:.3f} GB in {n / speed * 1e3:.2f} ms, {n / least:.3f} of that; collectives move "
            f"{moved / 1e9:.3f} GB; the largest copy is {copied * cfg.L / cache:.3f} of a layer's cache; "
            f"peak {program.memory_analysis().peak_memory_in_bytes / 1e9:.2f} GB")

def time_transformers(cfg, weights, mesh, prompts, answer, dtype):
    """Seconds of transformers' generate with the same weights, prompts and lengths."""
    import torch
    import transformers
    where = "cuda" if torch.cuda.is_available() else "cpu"
    config = transformers.Qwen2Config(
        vocab_size=cfg.V, hidden_size=cfg.D, intermediate_size=cfg.F, num_hidden_layers=cfg.L, head_dim=cfg.H,
        num_attention_heads=cfg.N, num_key_value_heads=cfg.K, tie_word_embeddings=cfg.tied, dtype=dtype,
        rope_parameters={"rope_type": "default", "rope_theta": cfg.rope_theta}, rms_norm_eps=cfg.rms_eps)
    with tempfile.TemporaryDirectory() as directory:
        hf.save(directory, weights, cfg, mesh, dtype)
        config.save_pretrained(directory)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).to(where)
    tokens, times = torch.tensor(prompts, device=where), []
    for n in (2, answer, answer):
        began = time.perf_counter()
        theirs.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=True, top_k=0, top_p=1.0,
                        temperature=1.0, min_new_tokens=n, max_new_tokens=n, pad_token_id=0).sum().item()
        times.append(time.perf_counter() - began)
    return min(times[1:])

def measure(name, cfg, layout, args):
    """Time a rollout here, the faster of two once all is compiled -> what to print."""
    dtype, key = jnp.dtype(args.dtype), jax.random.key(0)
    if name in SIZES:
        random = lambda n, shape: (0.02 * jax.random.normal(key, shape) + ("norm" in n)).astype(dtype)
        weights = model.nest({n: jax.jit(partial(random, n, shape), out_shardings=NamedSharding(
            layout.mesh, layouts.rollout_spec(n, layout)))() for n, shape in model.shapes(cfg).items()})
    else:
        weights = layouts.to_rollout(hf.load(hf.Checkpoint(name, cfg), layout.mesh), layout, dtype)
    groups = np.random.default_rng(0).integers(0, cfg.V, (args.batch // args.npq, args.prompt))
    prompts = [row.tolist() for row in groups for _ in range(args.npq)]
    runs = [[] for _ in range(3)]
    for clock in runs:
        clock.append(time.perf_counter())
        rollout.generate(weights, cfg, layout, prompts, key, max_answer=args.answer, group=args.npq,
                 progress=lambda *_: clock.append(time.perf_counter()))
    clock = min(runs[1:], key=lambda clock: clock[-1] - clock[0])
    whole, first, step = clock[-1] - clock[0], clock[1] - clock[0], (clock[-1] - clock[1]) / args.answer
    read, row = layouts.bytes_read(cfg, layout, dtype)
    mean = read + row * args.batch / layouts.row_shards(layout) * (args.prompt + args.answer / 2)
    x, total = jnp.ones(2 ** 28), jax.jit(jnp.sum)
    speed = x.nbytes / min(timeit.repeat(lambda: total(x).block_until_ready(), number=1, repeat=6)[1:])
    text = (f"prefill {groups.size / first:.0f} tok/s; decode {args.batch / step:.0f} tok/s, "
            f"{step * 1e3:.2f} ms a step that reads at least {mean / 1e9:.3f} GB, {mean / step / speed:.1%} "
            f"of the {speed / 1e9:.0f} GB/s at which a device here sums 1 GiB")
    if args.transformers:
        theirs = time_transformers(cfg, weights, layout.mesh, prompts, args.answer, args.dtype)
        text += f"; in all {whole:.3f} s, transformers {theirs:.3f} s: {theirs / whole:.2f}x"
    return text

def benchmark(argv=None):
    parser = argparse.ArgumentParser(description="The speed of rollouts, against that of the memory.")
    for name, default in FLAGS.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"default {default!r}")
    args = parser.parse_args(argv)
    for name, absent, kind in itertools.product(*(x.split(",") for x in (args.model, args.aot, args.layout))):
        *sizes, tied = SIZES.get(name, [0])
        cfg = model.ModelConfig(*sizes, 1e6, 1e-6, bool(tied), 32768, ()) if sizes else hf.read_config(name)
        if absent:
            from kernel import tpu_devices
        devices = np.array(tpu_devices(absent) if absent else jax.devices()).reshape(1, -1, 1)
        if kind not in ("auto", *layouts.LAYOUTS) or args.batch % args.npq or args.batch % devices.size:
            parser.error(f"--layout is one of auto, {', '.join(layouts.LAYOUTS)}; --npq {args.npq} and {devices.size}"
                         f" devices must divide --batch {args.batch}")
        layout, why = layouts.rollout_layout(kind, cfg, Mesh(devices, ("dp", "fsdp", "tp")), args.dtype)
        print(f"{name} on {absent or devices[0, 0, 0].device_kind}: {why}", flush=True)
        text = (check_loop if absent else measure)(name, dataclasses.replace(cfg, stop_ids=()), layout, args)
        print(f"  {args.batch} rows, {args.prompt} + {args.answer} tokens: {text}", flush=True)
