"""Rollout speed relative to memory bandwidth: `python tools/bench_rollout.py --model 0.5B`.

With --aot TYPE nothing runs: the decode loop is compiled for absent devices, the bytes that a step
reads and moves are counted in the compiled program, and on TPUs the time of a step is estimated
from the compiler's notes.
"""

import importlib.util
import itertools
import sys
import tempfile
import time
import timeit
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

import model
from infra.data import hf
from infra.host import chips
from infra.host.console import check, exit_on
from infra.host.files import CheckpointError
from infra.rollout import layouts
from infra.rollout.engine import Engine
from infra.rollout.layouts import Layout, RolloutSize
from infra.rollout.sampling import Sampling
from model import FAMILIES, ModelConfig
from tools import absent_devices, abstract_rollout, clock, hlo, rollout_time
from tools.arguments import check_at_least, parser_of
from tools.sizes import SIZES, model_of_size

# model, layout and aot each take a list: a,b,c
FLAGS = dict(
    model="3B",  # a name in SIZES, or a Hugging Face directory
    layout="auto",
    aot="",  # a type of absent devices to compile for, such as v6e-8 or h100-8
    batch=128,  # rows over all devices
    npq=8,  # rows per prompt
    prompt=256,  # tokens
    answer=1024,  # tokens
    dtype="bfloat16",  # or float32, or int8: matrices in int8, the rest in train.py's default
    lora=0,  # rank of adapters; only with aot
    lengths="",  # gsm8k = answers as long as GSM8K's, at most `answer`; only with aot, on TPUs
    transformers=0,  # 1 = also time transformers' generate
)


# ---------------------------------------------------------------- compiled for absent devices
def check_loop(cfg: ModelConfig, layout: Layout, dtype, size: RolloutSize, lora_rank: int) -> str:
    """Compile the last stage of decoding, and describe the traffic, memory and time of a step."""
    chip = chips.chip(layout.mesh.devices.flat[0])
    program = abstract_rollout.lower_decode(cfg, layout, dtype, size, lora_rank).compile()
    text = program.as_text()
    traffic = hlo.loop_traffic(text, cfg.L)

    # Every step must read the weights and the KV cache.
    weight_bytes, cache_bytes = layouts.bytes_of_step(cfg, layout, dtype, size)
    least = weight_bytes + cache_bytes
    least_ms = least / chip.bandwidth * 1e3
    compiled_ms = traffic.device_memory / chip.bandwidth * 1e3
    copied = traffic.copied / cache_bytes
    peak = program.memory_analysis().peak_memory_in_bytes
    # On TPUs, an inner loop over the layers reads the weights and the cache.
    alone = ""
    if layout.by_layer:
        alone = f"without activations {hlo.bytes_without_activations(text) / least:.3f} of that; "
    words = (
        f"a step reads at least {least / 1e9:.3f} GB in {least_ms:.2f} ms; as compiled "
        f"{traffic.device_memory / 1e9:.3f} GB in {compiled_ms:.2f} ms, "
        f"{traffic.device_memory / least:.3f} of that; {alone}collectives move "
        f"{traffic.moved / 1e9:.3f} GB; copies write {copied:.3f} of the KV cache's bytes; "
        f"peak {peak / 1e9:.2f} GB"
    )
    if chip.clock:
        step = clock.step_clock(text, cfg.L, chip)
        words += f"\n  by the compiler's clock, not measured, a step takes {step}"
    return words


# ---------------------------------------------------------------- timed on the devices here
def random_weights(cfg: ModelConfig, layout: Layout, dtype, quantised: bool) -> dict:
    mesh = Mesh(layout.mesh.devices.reshape(1, -1, 1), model.AXES)
    key = jax.random.key(0)

    def values(name, shape):
        # Weights of norms are close to 1, all other weights close to 0.
        center = 1 if "norm" in name else 0
        return center + 0.02 * jax.random.normal(key, shape)

    params = {}
    for name, shape in model.shapes(cfg).items():
        place = NamedSharding(mesh, model.spec(name))
        params[name] = jax.jit(partial(values, name, shape), out_shardings=place)()
    return layouts.to_rollout(model.nest(params), layout, dtype, quantised)


def time_rollout(weights, cfg: ModelConfig, layout: Layout, prompts, args) -> tuple:
    """Returns (seconds of prefill, seconds of decode): the faster of two runs, after a first run
    that compiles."""
    engine = Engine(cfg, None, layout, args.dtype, args.dtype, args.answer, weights=weights)
    key = jax.random.key(0)
    runs = []
    for _ in range(3):
        # `generate` reports progress after the prefill and after each stage.
        times = [time.perf_counter()]

        def note(*_, times=times):
            times.append(time.perf_counter())

        engine.generate(prompts, key, Sampling(), args.npq, note)
        began, prefilled, *_, ended = times
        runs.append((prefilled - began, ended - prefilled))
    return min(runs[1:], key=sum)


def memory_speed() -> float:
    """Measure the bytes per second at which one device sums 1 GiB."""
    x = jnp.ones(2**28)
    total = jax.jit(jnp.sum)
    seconds = timeit.repeat(lambda: total(x).block_until_ready(), number=1, repeat=6)
    return x.nbytes / min(seconds[1:])


def time_transformers(cfg: ModelConfig, weights, mesh: Mesh, prompts, args) -> float:
    """Measure the seconds that transformers takes with the same weights, prompts and lengths."""
    import torch
    import transformers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    rope = {"rope_type": "default", "rope_theta": cfg.rope_theta}
    if cfg.rope_scaling:
        rope |= cfg.rope_scaling._asdict() | {"rope_type": "llama3"}
    switches = cfg.qkv_bias, cfg.qk_norm
    families = FAMILIES.items()
    (model_type,) = [name for name, f in families if (f.qkv_bias, f.qk_norm) == switches]
    config = transformers.AutoConfig.for_model(
        model_type,
        vocab_size=cfg.V,
        hidden_size=cfg.D,
        intermediate_size=cfg.F,
        num_hidden_layers=cfg.L,
        head_dim=cfg.H,
        num_attention_heads=cfg.N,
        num_key_value_heads=cfg.K,
        tie_word_embeddings=cfg.tied,
        dtype=args.dtype,
        rope_parameters=rope,
        rms_norm_eps=cfg.rms_eps,
    )
    with tempfile.TemporaryDirectory() as directory:
        # On GPUs, each layer is its own stack.
        layers = jax.tree.map(lambda *parts: jnp.concatenate(parts), *weights["layers"])
        hf.save(directory, weights | {"layers": layers}, cfg, mesh, args.dtype)
        config.save_pretrained(directory)
        load = transformers.AutoModelForCausalLM.from_pretrained
        theirs = load(directory, dtype=args.dtype).to(device)
    tokens = torch.tensor(prompts, device=device)
    options = dict(do_sample=True, top_k=0, top_p=1.0, temperature=1.0, pad_token_id=0)
    seconds = []
    # The first run warms up.
    for n in (2, args.answer, args.answer):
        began = time.perf_counter()
        mask = torch.ones_like(tokens)
        out = theirs.generate(
            tokens, attention_mask=mask, min_new_tokens=n, max_new_tokens=n, **options
        )
        # Reading a value waits until the device has finished.
        out.sum().item()
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])


def measure(name: str, cfg: ModelConfig, layout: Layout, dtype, size: RolloutSize, args) -> str:
    """Time a rollout on the devices of this machine, and describe its speed."""
    if name in SIZES:
        weights = random_weights(cfg, layout, dtype, size.quantised)
    else:
        mesh = Mesh(layout.mesh.devices.reshape(1, -1, 1), model.AXES)
        params = hf.load(hf.ModelFiles(name, cfg), mesh)
        weights = layouts.to_rollout(params, layout, dtype, size.quantised)
        del params
    rng = np.random.default_rng(0)
    groups = rng.integers(0, cfg.V, (args.batch // args.npq, args.prompt))
    prompts = [row.tolist() for row in groups for _ in range(args.npq)]
    prefill_s, decode_s = time_rollout(weights, cfg, layout, prompts, args)
    step_s = decode_s / args.answer

    # On average over the steps, half of the answer is in the KV cache.
    half = replace(size, answer_slots=args.answer // 2)
    least = sum(layouts.bytes_of_step(cfg, layout, dtype, half))
    bandwidth = memory_speed()
    text = (
        f"prefill {groups.size / prefill_s:.0f} tok/s; decode {args.batch / step_s:.0f} tok/s, "
        f"{step_s * 1e3:.2f} ms a step, reading at least {least / 1e9:.3f} GB: "
        f"{least / step_s / bandwidth:.1%} of the {bandwidth / 1e9:.0f} GB/s at which a device "
        "here sums 1 GiB"
    )
    if args.transformers:
        ours = prefill_s + decode_s
        theirs = time_transformers(cfg, weights, layout.mesh, prompts, args)
        text += f"; in all {ours:.3f} s, transformers {theirs:.3f} s: {theirs / ours:.2f}x"
    return text


# ---------------------------------------------------------------- the command
def main(argv: list[str]) -> None:
    args = parser_of(__doc__, FLAGS).parse_args(argv)
    check_at_least(args, 1, "batch", "npq", "prompt", "answer")
    check_at_least(args, 0, "lora")
    dtypes = "float32", "bfloat16", "int8"
    check(args.dtype in dtypes, f"dtype = {args.dtype} is not one of {', '.join(dtypes)}")
    is_int8 = args.dtype == "int8"
    check(not (args.transformers and is_int8), "--transformers does not support --dtype int8")
    is_there = all(map(importlib.util.find_spec, ("torch", "transformers")))
    check(
        is_there or not args.transformers, "transformers is missing: pip install torch transformers"
    )
    check(args.aot or not args.lora, "--lora needs --aot")
    check(args.lengths in ("", "gsm8k"), f"--lengths is gsm8k or nothing, not {args.lengths}")
    check(args.aot or not args.lengths, "--lengths needs --aot with a type of TPUs")
    check(not (args.lengths and args.lora), "--lengths cannot be combined with --lora")
    models = args.model.split(",")
    absent_types = args.aot.split(",")
    kinds = args.layout.split(",")
    for name, absent, kind in itertools.product(models, absent_types, kinds):
        sizes = ", ".join(SIZES)
        with exit_on(CheckpointError, f"--model {name} is neither a directory nor one of {sizes}"):
            cfg = model_of_size(name) if name in SIZES else hf.read_config(name)
        # Without stop tokens, every row decodes its full length.
        cfg = replace(cfg, stop_ids=())
        with exit_on(
            Exception, f"cannot compile for {absent or 'devices'} here; try v6e-8 or h100-8"
        ):
            devices = np.array(absent_devices.of_kind(absent) if absent else jax.devices())
        is_kind = kind in ("auto", *layouts.LAYOUTS)
        check(is_kind, f"--layout {kind} is not one of auto, {', '.join(layouts.LAYOUTS)}")
        check(
            args.batch % args.npq == 0 and args.batch % devices.size == 0,
            f"--npq {args.npq} and {devices.size} devices must divide --batch {args.batch}",
        )
        check(
            not args.lengths or chips.chip(devices[0]).clock,
            f"--lengths needs the clock of a TPU compiler, and {absent} has none; try v6e-8",
        )
        mesh = Mesh(devices.reshape(1, -1, 1), model.AXES)
        default = "float32" if devices[0].platform == "cpu" else "bfloat16"
        dtype = args.dtype.replace("int8", default)
        size = RolloutSize(args.batch, args.npq, args.prompt, args.answer, args.dtype == "int8")
        layout, why = layouts.rollout_layout(kind, cfg, mesh, dtype, size)
        print(f"{name} on {absent or devices[0].device_kind}: {why}", flush=True)
        setting = cfg, layout, dtype, size
        if args.lengths:
            text = rollout_time.time_rollout(*setting)
        elif absent:
            text = check_loop(*setting, args.lora)
        else:
            with exit_on(CheckpointError, f"--model {name} cannot be loaded"):
                text = measure(name, *setting, args)
        print(f"  {args.batch} rows, {args.prompt} + {args.answer} tokens: {text}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
