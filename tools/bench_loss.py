"""Time and memory of the GRPO loss with both its gradients."""

import argparse
import math
import timeit
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import kernel
from infra import memory

FLAGS = dict(  # sizes are a device's, 0 = what suits it; impl, aot (slices such as v6e-8): one, or a,b,c
    impl="jax,full", mode="on_policy", batch=1, time=4096, vocab=151936, hidden=2048, dtype="bfloat16",
    compute_dtype="bfloat16", iters=10, warmup=2, epsilon_low=0.2, epsilon_high=0.2, temperature=1.0,
    block_tokens=0, block_vocab=0, block_hidden=0, aot="")

def float64_error(settings, head_VD, *of_tokens):
    """Of h, targets, vectors, logp, dh: the largest error of logp, relative error of dh, on 16 tokens."""
    some = np.linspace(0, len(of_tokens[0]) - 1, 16, dtype=int)
    h, y, vectors, logp, dh = jax.tree.map(lambda a: np.float64(a[some]), of_tokens)
    W, T = np.float64(head_VD), settings.temperature
    log_p = h @ W.T / T
    log_p -= np.logaddexp.reduce(log_p, 1, keepdims=True)
    hit = np.arange(len(W)) == y[:, None]
    g = jax.grad(lambda logp: settings.terms(logp, logp, vectors)[0].sum())(log_p[hit])
    right = np.float64(g)[:, None] / T * (hit - np.exp(log_p)) @ W
    off = abs(logp - log_p[hit]).max(), np.linalg.norm(dh - right) / np.linalg.norm(right)
    return "errors: logp {:.1e}, dh {:.1e}".format(*off)

def measure(args, impl, mesh):
    """Compile the loss and both gradients -> (what to print, seconds); with --aot nothing is run."""
    N, V, D = args.batch * args.time * mesh.size, args.vocab, args.hidden
    terms = partial(kernel.grpo_terms, clip_low=args.epsilon_low, clip_high=args.epsilon_high)
    own = {name[6:]: n for name, n in vars(args).items() if name.startswith("block_") and n}
    blocks = kernel.block_sizes(mesh.devices.flat[0].device_kind, D, impl, args.block_tokens)._replace(**own)
    settings = kernel.Settings(mesh, terms, False, args.temperature, impl, blocks)
    def make_inputs():
        keys = iter(jax.random.split(jax.random.key(0), 5))
        normal = lambda *size: jax.random.normal(next(keys), size)
        vectors = {"weight": jnp.full(N, 1 / N), "advantage": normal(N)}
        if args.mode != "on_policy":
            vectors["old"] = normal(N) - math.log(V) - 2
        h, W, y = normal(N, D), 2 * D ** -0.5 * normal(V, D), jax.random.randint(next(keys), N, 0, V)
        return h.astype(args.dtype), W.astype(args.dtype), y, vectors
    tokens, columns = NamedSharding(mesh, P(kernel.TOKENS)), NamedSharding(mesh, P(None, kernel.SHARDS))
    program = jax.jit(lambda h, *rest: kernel.loss_and_gradients(settings, h.astype(args.compute_dtype), *rest),
                      in_shardings=(tokens, columns, tokens, tokens))
    program = program.lower(*jax.eval_shape(make_inputs)).compile()
    m, temp = program.memory_analysis(), program.memory_analysis().temp_size_in_bytes
    if mesh.devices.flat[0].platform == "tpu":  # whose compiler counts VMEM in; the peak is without
        temp = m.peak_memory_in_bytes - m.argument_size_in_bytes - m.output_size_in_bytes
    text = f"{impl:6} temp {temp / 1e9:.3f} GB, peak {m.peak_memory_in_bytes / 1e9:.3f} GB"
    if args.aot:
        return text, None
    h, W, y, vectors = inputs = make_inputs()
    seconds = lambda f, *inputs: np.median(timeit.repeat(
        lambda: jax.block_until_ready(f(*inputs)), number=1, repeat=args.warmup + args.iters)[args.warmup:])
    part = h[:2048].astype(args.compute_dtype), W.astype(args.compute_dtype)
    floor = 3 * seconds(jax.jit(lambda h, W: kernel.dot(h, W, (1, 1))), *part) * N / len(part[0])
    took, (logp_N, _, _, dh_ND, _) = seconds(program, *inputs), program(*inputs)
    return (f"{text}, {took * 1e3:.2f} ms, {6e-12 * N * D * V / took:.2f} TFLOP/s, {floor / took:.0%} of the "
            f"floor of three GEMMs, {float64_error(settings, W, h, y, vectors, logp_N, dh_ND)}"), took

def benchmark(argv=None):
    parser = argparse.ArgumentParser(description="Time and memory of the GRPO loss with both its gradients.")
    for name, default in FLAGS.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=f"default {default!r}")
    args = parser.parse_args(argv)
    for name in args.aot.split(","):
        try:
            devices = memory.tpu_devices(name) if name else jax.devices()[:1]
        except Exception as e:  # of re for the name, of jax for what libtpu lacks, or that it lacks libtpu
            parser.error(f"--aot {name} cannot be compiled for here ({e}); try v6e-8, pip install libtpu")
        mesh, took = Mesh(np.array(devices).reshape(1, -1, 1), kernel.TOKENS), {}
        for impl in args.impl.split(","):
            text, took[impl] = measure(args, impl, mesh)
            print(name or devices[0].device_kind, text, flush=True)
    print(*(f"{a} / {b} {took[a] / took[b]:.2f}" for a in took for b in took if a < b and took[a]), sep=", ")
