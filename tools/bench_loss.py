"""Time and memory of the GRPO loss and its gradients with respect to hidden states and LM head.

python tools/bench_loss.py --impl jax,full
python tools/bench_loss.py --aot v6e-8 --impl jax,pallas    # compiled for absent TPUs, not run
"""

import itertools
import math
import sys
import timeit
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import kernel
from infra.host.console import check, exit_on
from tools import absent_devices
from tools.arguments import check_at_least, parser_of

# A device gets batch * time tokens. If a block size is 0, kernel.py chooses it for the device.
FLAGS = dict(
    impl="jax,full",  # one implementation, or several: a,b,c
    mode="on_policy",  # or off_policy, which takes old logprobs as a further input
    batch=1,
    time=4096,
    vocab=151936,
    hidden=2048,
    dtype="bfloat16",
    compute_dtype="bfloat16",
    iters=10,
    warmup=2,
    epsilon_low=0.2,
    epsilon_high=0.2,
    temperature=1.0,
    block_tokens=0,
    block_vocab=0,
    block_hidden=0,
    aot="",  # a slice of absent TPUs, such as v6e-8, or several: a,b,c
)
CHOICES = {
    "impl": ("jax", "pallas", "full"),
    "mode": ("on_policy", "off_policy"),
    "dtype": ("float32", "bfloat16"),
    "compute_dtype": ("float32", "bfloat16"),
}


# ---------------------------------------------------------------- one measurement
@dataclass(frozen=True)
class Case:
    """One implementation of the loss, compiled for one mesh."""

    settings: kernel.Settings
    program: Callable  # compiled: hidden states, head, targets, vectors -> loss_and_gradients
    make_inputs: Callable  # () -> inputs of the program

    @property
    def impl(self):
        return self.settings.impl


def make_inputs(args, N):
    """Returns (hidden states [N, D], head [V, D], targets [N], {vector: [N]}), all drawn at random
    from one key."""
    V, D = args.vocab, args.hidden
    keys = iter(jax.random.split(jax.random.key(0), 5))
    # The random inputs depend on the order in which the keys are taken.
    vectors = {"weight": jnp.full(N, 1 / N)}
    vectors["advantage"] = jax.random.normal(next(keys), (N,))
    if args.mode != "on_policy":
        vectors["old_logprobs"] = jax.random.normal(next(keys), (N,)) - math.log(V) - 2
    hidden_ND = jax.random.normal(next(keys), (N, D))
    head_VD = 2 * D**-0.5 * jax.random.normal(next(keys), (V, D))
    targets_N = jax.random.randint(next(keys), N, 0, V)
    return hidden_ND.astype(args.dtype), head_VD.astype(args.dtype), targets_N, vectors


def compile_case(args, impl, mesh):
    """Compile the loss and both gradients for the devices of the mesh."""
    N = args.batch * args.time * mesh.size
    kind = mesh.devices.flat[0].device_kind
    blocks = kernel.block_sizes(kind, args.hidden, impl, args.block_tokens)
    if args.block_vocab:
        blocks = replace(blocks, tile_vocab=args.block_vocab)
    if args.block_hidden:
        blocks = replace(blocks, tile_hidden=args.block_hidden)
    terms = partial(kernel.grpo_terms, clip_low=args.epsilon_low, clip_high=args.epsilon_high)
    settings = kernel.Settings(
        mesh, terms, uses_entropy=False, temperature=args.temperature, impl=impl, blocks=blocks
    )

    def loss_and_gradients(hidden_ND, head_VD, targets_N, vectors):
        hidden_ND = hidden_ND.astype(args.compute_dtype)
        return kernel.loss_and_gradients(settings, hidden_ND, head_VD, targets_N, vectors)

    tokens = NamedSharding(mesh, P(kernel.TOKEN_AXES))
    columns = NamedSharding(mesh, P(None, kernel.HEAD_AXES))
    program = jax.jit(loss_and_gradients, in_shardings=(tokens, columns, tokens, tokens))
    inputs = partial(make_inputs, args, N)
    compiled = program.lower(*jax.eval_shape(inputs)).compile()
    return Case(settings, compiled, inputs)


# ---------------------------------------------------------------- memory, time and errors
def memory_text(case):
    """Describe the memory that the compiled program takes on a device."""
    sizes = case.program.memory_analysis()
    peak = sizes.peak_memory_in_bytes
    temp = sizes.temp_size_in_bytes
    if case.settings.mesh.devices.flat[0].platform == "tpu":
        # On TPUs the compiler counts VMEM among the temporaries, but not in the peak.
        temp = peak - sizes.argument_size_in_bytes - sizes.output_size_in_bytes
    return f"{case.impl:6} temp {temp / 1e9:.3f} GB, peak {peak / 1e9:.3f} GB"


def median_seconds(args, function, *inputs):
    def call():
        jax.block_until_ready(function(*inputs))

    times = timeit.repeat(call, number=1, repeat=args.warmup + args.iters)
    return np.median(times[args.warmup :])


def seconds_of_three_gemms(args, hidden_ND, head_VD):
    """Estimate the time of three matrix products over all tokens, a lower bound for any loss.

    The estimate scales up one product over at most 2,048 tokens.
    """
    part = hidden_ND[:2048].astype(args.compute_dtype)
    gemm = jax.jit(lambda h, W: kernel.dot(h, W, 1, 1))
    seconds = median_seconds(args, gemm, part, head_VD.astype(args.compute_dtype))
    return 3 * seconds * len(hidden_ND) / len(part)


def float64_errors(settings, head_VD, *per_token):
    """Returns (largest error of logp, relative error of dh) against float64 NumPy on 16 tokens.

    per_token: hidden states, targets, vectors, and the logp and dh to check.
    """
    some = np.linspace(0, len(per_token[0]) - 1, 16, dtype=int)
    h, targets, vectors, logp, dh = jax.tree.map(lambda a: np.float64(a[some]), per_token)
    W = np.float64(head_VD)
    log_p = h @ W.T / settings.temperature
    log_p -= np.logaddexp.reduce(log_p, 1, keepdims=True)
    hit = np.arange(len(W)) == targets[:, None]

    def loss(logp):
        # The terms of this benchmark ignore the entropy, so any value can stand for it.
        return settings.terms(logp, logp, vectors)[0].sum()

    g = np.float64(jax.grad(loss)(log_p[hit]))
    expected_dh = g[:, None] / settings.temperature * (hit - np.exp(log_p)) @ W
    logp_error = abs(logp - log_p[hit]).max()
    dh_error = np.linalg.norm(dh - expected_dh) / np.linalg.norm(expected_dh)
    return logp_error, dh_error


def run_case(args, case):
    """Run a case. Returns (a description of its time and errors, seconds)."""
    inputs = case.make_inputs()
    hidden_ND, head_VD, targets_N, vectors = inputs
    floor = seconds_of_three_gemms(args, hidden_ND, head_VD)
    seconds = median_seconds(args, case.program, *inputs)
    logp_N, _, _, dh_ND, _ = case.program(*inputs)
    per_token = (hidden_ND, targets_N, vectors, logp_N, dh_ND)
    logp_error, dh_error = float64_errors(case.settings, head_VD, *per_token)
    N, D = hidden_ND.shape
    tflops = 6e-12 * N * D * args.vocab / seconds
    text = (
        f"{seconds * 1e3:.2f} ms, {tflops:.2f} TFLOP/s, "
        f"{floor / seconds:.0%} of the speed of three GEMMs, "
        f"errors: logp {logp_error:.1e}, dh {dh_error:.1e}"
    )
    return text, seconds


# ---------------------------------------------------------------- the command
def main(argv: list[str]) -> None:
    args = parser_of(__doc__, FLAGS).parse_args(argv)
    check_at_least(args, 1, "batch", "time", "vocab", "hidden", "iters")
    check_at_least(args, 0, "warmup", "block_tokens", "block_vocab", "block_hidden")
    check(args.temperature > 0, f"temperature = {args.temperature} must be above 0")
    for name, choices in CHOICES.items():
        for value in getattr(args, name).split(","):
            check(value in choices, f"{name} = {value} is not one of {', '.join(choices)}")
    for slice_type in args.aot.split(","):
        # The name may be unknown, or libtpu may not support this slice, or not be installed.
        fault = f"cannot compile for {slice_type or 'devices'} here; try --aot v6e-8, with libtpu"
        with exit_on(Exception, fault):
            devices = absent_devices.of_kind(slice_type) if slice_type else jax.devices()[:1]
        mesh = Mesh(np.array(devices).reshape(1, -1, 1), kernel.TOKEN_AXES)
        name = slice_type or devices[0].device_kind
        took = {}
        for impl in args.impl.split(","):
            with exit_on(ValueError, f"{name} cannot compute {impl}"):
                case = compile_case(args, impl, mesh)
            text = memory_text(case)
            if not args.aot:
                more, took[impl] = run_case(args, case)
                text = f"{text}, {more}"
            print(name, text, flush=True)
    # Print the ratio of times for each pair of implementations.
    for a, b in itertools.combinations(took, 2):
        print(f"{a} / {b} {took[a] / took[b]:.2f}")


if __name__ == "__main__":
    main(sys.argv[1:])
