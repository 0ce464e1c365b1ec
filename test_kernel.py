"""Every test: of kernel.py and model.py first, of the trainer after them.

    python test_kernel.py               kernel and model
    python test_kernel.py all           the trainer, launch.sh, compiling for TPUs too: train_, launch_, aot_
    python test_kernel.py NAME [NAME]   those whose name contains a NAME; soak: long runs, only so
    pytest test_kernel.py               all, under pytest

On stdout: `ok NAME figure`, `skip NAME reason` or `FAIL NAME reason` a test and its seconds, then the
count; on stderr what the tested code prints, and tracebacks. Exits with 1 after a failure, 2 when no name
matches. Tests that need torch, transformers or ../shared skip where that is not. A CPU shows as eight
devices, for real meshes; there `all` runs in two processes: most of a test is compiling, on one core.
"""

import os
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("NPROC", "32")  # XLA's threads: with one a core, collectives of eight may deadlock
os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")  # float32 is float32 on a GPU and a TPU too

import ast, atexit, contextlib, dataclasses, fractions, glob, http.server, importlib, io, itertools, json
import math, multiprocessing, random, re, traceback, tracemalloc
import shlex, shutil, signal, subprocess, sys, tempfile, threading, time  # files and processes
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from unittest import SkipTest, mock  # pytest knows SkipTest too

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tokenizers
from jax.experimental.layout import Format, Layout
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding
from numpy.testing import assert_allclose, assert_array_equal, assert_raises, assert_raises_regex
from safetensors.numpy import load_file, save_file
from scipy import special, stats
import kernel, model, train

# ---------------------------------------------------------------- what tests share
HERE = Path(os.path.abspath(__file__)).parent

def figure(text):
    """What the running test measured, for its line."""
    figure.text = text

def check_errors(errors, bound, what="max error"):
    """Of {case: its error, or several}: all are below the bound, and the largest is the test's figure."""
    worst = np.max([*errors.values()])  # NaN if one is
    assert worst < bound, errors
    figure(f"{what} {worst:.1e}")

def shared(path):
    if not (HERE / "../shared" / path).exists():
        raise SkipTest(f"../shared/{path} is not here")
    return HERE / "../shared" / path

def need(*names):
    try:
        return [importlib.import_module(name) for name in names]
    except ImportError as e:
        raise SkipTest(f"{e.name} is not installed")

scratch = cache(partial(tempfile.TemporaryDirectory, prefix="podgrpo-test-"))  # removed when Python ends

def new_directory(like=None):
    directory = Path(tempfile.mkdtemp(dir=scratch().name))
    return shutil.copytree(like, directory, dirs_exist_ok=True) if like else directory

@cache
def tiny_directory():
    return train.make_tiny(new_directory() / "model", 1)

def mesh(dp=1, fsdp=1, tp=1):
    n = dp * fsdp * tp
    if len(jax.devices()) < n:
        raise SkipTest(f"needs {n} devices, there are {len(jax.devices())}")
    return Mesh(np.array(jax.devices()[:n]).reshape(dp, fsdp, tp), ("dp", "fsdp", "tp"))

def read_jsonl(path):
    with open(path, encoding="utf-8") as f:
        return [json.loads(line) for line in f]

def compiled():
    """The environment of a process that finds what others compiled, and leaves what it compiles."""
    return dict(JAX_COMPILATION_CACHE_DIR=f"{scratch().name}/c",
                JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0")

def run(*command, code=0, cwd=HERE, **env):
    """The output of a process on the CPU, which must end with this exit code."""
    done = subprocess.run(command, env=os.environ | {"JAX_PLATFORMS": "cpu"} | env, cwd=cwd, timeout=1800,
                          text=True, capture_output=True, stdin=subprocess.DEVNULL)
    text = done.stdout + done.stderr
    assert done.returncode == code, f"exit code {done.returncode}, wanted {code}:\n{text}"
    return text

def edit(path, change):
    """Give a file other keys or tensors (a dict; None removes one) or other bytes; None removes the file."""
    if change is None:
        path.unlink()
    elif isinstance(change, bytes):
        path.write_bytes(change)
    else:
        tensors = path.suffix == ".safetensors"
        content = (load_file(path) if tensors else json.loads(path.read_text())) | change
        content = {k: v for k, v in content.items() if v is not None}
        save_file(content, path) if tensors else path.write_text(json.dumps(content))

def spoiled(directory, name, change):
    copy = new_directory(like=directory)
    edit(copy / name, change)
    return copy

def load(directory, on=None):
    cfg = model.read_config(directory)
    return model.load(model.Checkpoint(directory, cfg), on or mesh()), cfg

def relative(a, b):
    b = np.asarray(b, np.float64)
    return np.linalg.norm(np.asarray(a) - b) / np.linalg.norm(b)

def softmax(z):
    return special.softmax(np.asarray(z, np.float64), -1)

TIED = model.ModelConfig(V=203, D=32, F=48, N=8, K=2, H=6, L=3, rope_theta=1e4, rms_eps=1e-6, tied=True,
                         max_positions=512, stop_ids=(3, 50, 77))
UNTIED = model.ModelConfig(V=331, D=48, F=32, N=4, K=4, H=8, L=2, rope_theta=5e3, rms_eps=1e-5, tied=False,
                           max_positions=512, stop_ids=())

def random_weight(rng, name, shape, D):
    """Biases are not 0 and norms not 1, so that one left out shows. The logits' deviation is about 2."""
    noise = rng.standard_normal(shape).astype(np.float32)
    if "norm" in name:
        return 1 + 0.3 * noise
    return noise * (0.5 if "bias" in name or "/b" in name else 2 * D ** -0.5)

def random_params(cfg, on):
    rng = np.random.default_rng(0)
    return placed({name: random_weight(rng, name, s, cfg.D) for name, s in model.shapes(cfg).items()}, on)

def placed(weights, on):
    return model.nest({k: jax.device_put(w, NamedSharding(on, model.spec(k))) for k, w in weights.items()})

def random_prompts(cfg, lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, cfg.V, n).tolist() for n in lengths]

def hidden_states(params, cfg, rows, positions=None, segments=None, width=None):
    """model.forward of lists of ids, padded on the right; each is one sequence where nothing else is said."""
    width = width or max(map(len, rows))
    arrays = [np.array([[*row] + [0] * (width - len(row)) for row in lists], np.int32) for lists in (
        rows, positions or [range(len(row)) for row in rows], segments or [[1] * len(row) for row in rows])]
    arrays = dict(zip(("tokens", "positions", "segments"), arrays), filled=np.array([len(rows)], np.int32))
    return forward(params, cfg, mesh(), arrays, model.How("float32"))

@partial(jax.jit, static_argnums=(1, 2, 4))
def forward(params, cfg, on, rows, how):
    return model.forward(params, cfg, on, rows, how)[0]

def textbook_hidden(params, cfg, tokens, positions, segments):
    """What model.forward gives, of whole weights, one layer after another, by what JAX can differentiate."""
    x, rope = params["embed_VD"][tokens], model.rope_tables(jnp.asarray(positions), cfg)
    mask = (segments[:, :, None] == segments[:, None]) & np.tri(tokens.shape[1], dtype=bool)
    for i in range(cfg.L):
        w = {name: a[i] for name, a in params["layers"].items()}
        x, _ = model.layer(cfg, x, w, rope, lambda q, k, v: (model.attention(q, k, v, mask), None))
    return model.rms_norm(x, params["norm_D"], cfg.rms_eps)

def logits(params, cfg, tokens):
    return np.asarray(hidden_states(params, cfg, tokens) @ model.head(params).T)

def generate(params, cfg, prompts, max_answer, on=None, kind="replicated", seed=0, **options):
    """model.generate in float32, with the weights in the layout that it wants."""
    layout, _ = model.rollout_layout(kind, cfg, on or mesh(), "float32")
    weights = model.to_rollout(params, layout, "float32")
    for name, a in model.flatten(weights).items():
        wanted = NamedSharding(layout.mesh, model.rollout_spec(name, layout))
        assert a.sharding.is_equivalent_to(wanted, a.ndim), (kind, name, a.sharding)
    return model.generate(
        weights, cfg, layout, prompts, jax.random.key(seed), max_answer=max_answer, **options)

@partial(jax.jit, static_argnames=("how", "tp"))
def compiled_sample(z_BV, u_B, how, tp):
    return jax.shard_map(lambda z, u: model.sample(z, u, *how), mesh=mesh(tp=tp), check_vma=False,
                         in_specs=(P(None, "tp"), P()), out_specs=P())(z_BV, u_B)

def sample(z_BV, u_B, *how, tp=1):
    """model.sample, with the vocabulary on so many devices."""
    return compiled_sample(z_BV, u_B, how, tp)

# ---------------------------------------------------------------- model.py against transformers
HF_MODELS = {  # 7 and 2 queries per key/value head
    "tied": dict(vocab_size=331, hidden_size=112, intermediate_size=160, num_hidden_layers=3, head_dim=64,
                 num_attention_heads=14, num_key_value_heads=2, tie_word_embeddings=True, rms_norm_eps=1e-5,
                 rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "untied": dict(vocab_size=263, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                   num_attention_heads=8, num_key_value_heads=4, tie_word_embeddings=False,
                   rope_parameters={"rope_type": "default", "rope_theta": 5e3})}

@cache
def hf_model(name):
    """-> (transformers' Qwen2 with random weights, the directory it was saved to, as we load that: *load)"""
    torch, transformers = need("torch", "transformers")
    torch.set_num_threads(1)  # more only wait for each other: a hundred times slower beside JAX
    config = transformers.Qwen2Config(eos_token_id=None, **HF_MODELS[name])
    theirs, rng, directory = transformers.Qwen2ForCausalLM(config), np.random.default_rng(1), new_directory()
    for key, p in theirs.named_parameters():
        p.data = torch.from_numpy(random_weight(rng, key, tuple(p.shape), config.hidden_size))
    theirs.save_pretrained(directory)
    if name == "untied":  # as transformers 4 wrote it, and as Qwen published it
        edit(directory / "config.json", dict(rope_parameters=None, rope_theta=5e3, head_dim=None,
                                             tie_word_embeddings=None))
    return theirs, directory, *load(directory)

def hf_logits(theirs, tokens):
    return theirs(need("torch")[0].tensor(tokens)).logits.detach().numpy()

def test_logits_equal_transformers():
    errors = {}
    for name in HF_MODELS:
        theirs, _, params, cfg = hf_model(name)
        tokens = random_prompts(cfg, (24, 24, 24))
        want = hf_logits(theirs, tokens)
        assert 1 < want.std() < 5, f"degenerate logits, deviation {want.std()}"
        errors[name] = abs(logits(params, cfg, tokens) - want).max()
    check_errors(errors, 1e-4)

def test_greedy_answers_equal_transformers():
    """64 tokens for left-padded prompts of unequal length; then with two stop ids, which end rows early."""
    (torch,), ended = need("torch"), []
    for name in HF_MODELS:
        theirs, directory, params, cfg = hf_model(name)
        prompts, copy = random_prompts(cfg, (9, 1, 14, 5)), new_directory(like=directory)
        ids, mask = (torch.tensor([[0] * (14 - len(row)) + row for row in rows])
                     for rows in (prompts, [[1] * len(p) for p in prompts]))
        greedy = lambda **stop: theirs.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=64,
                                                pad_token_id=0, **stop)[:, 14:].tolist()
        whole = greedy()
        assert min(len(set(row)) for row in whole) > 10, "an answer is a few tokens repeated"
        stops = [whole[0][20], whole[2][33]]
        edit(copy / "config.json", {"eos_token_id": whole[3][0]})  # generation_config.json overrules it
        edit(copy / "generation_config.json", {"eos_token_id": stops})
        for end, c, want in (([], cfg, whole), (stops, model.read_config(copy), greedy(eos_token_id=stops))):
            out = generate(params, c, prompts, 64, temperature=0.0)
            lengths = [min([row.index(s) + 1 for s in end if s in row], default=64) for row in whole]
            assert_array_equal(out["tokens_BT"][:, :len(want[0])], want)
            assert_array_equal(out["lengths_B"], lengths)
            assert_array_equal(out["cut_B"], [not {*end} & {*row} for row in whole])
            after = np.arange(64) >= out["lengths_B"][:, None]
            assert not out["tokens_BT"][after].any() and not out["logp_BT"][after].any()
        ended += lengths
    assert len(set(ended)) > 2
    figure(f"512 tokens equal; with stops, rows end after {', '.join(map(str, ended))}")

def test_saved_checkpoint_loads_in_transformers():
    transformers, = need("transformers")
    on = mesh(2, 2, 2) if len(jax.devices()) >= 8 else mesh()
    for name, file_bytes in (("tied", 4 << 30), ("tied", 150_000), ("untied", 60_000)):
        (theirs, directory, _, cfg), copy = hf_model(name), new_directory()
        params, _ = load(directory, on)
        shutil.copy(directory / "config.json", copy)
        model.save(copy, params, cfg, on, "float32", file_bytes)
        files = [*copy.glob("*.safetensors")]
        assert (files == [copy / "model.safetensors"]) == (file_bytes == 4 << 30)
        for tensors in map(load_file, files):
            assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= file_bytes
        tokens, again = random_prompts(cfg, (11, 11)), transformers.Qwen2ForCausalLM.from_pretrained(copy)
        assert_array_equal(hf_logits(again, tokens), hf_logits(theirs, tokens))
        jax.tree.map(assert_array_equal, load(copy)[0], params)
    figure(f"1 and {len(files)} files")

def test_loads_bfloat16_and_several_files():
    torch, transformers = need("torch", "transformers")
    (_, directory, exact, _), copy, ours = hf_model("untied"), new_directory(), new_directory()
    half = transformers.Qwen2ForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    half.save_pretrained(copy, max_shard_size="40KB")
    assert (copy / "model.safetensors.index.json").exists()
    params, cfg = load(copy)
    tokens = random_prompts(cfg, (11, 11))
    assert_allclose(logits(params, cfg, tokens), hf_logits(half.float(), tokens), rtol=0, atol=1e-4)
    shutil.copy(copy / "config.json", ours)
    model.save(ours, exact, cfg, mesh(), "bfloat16")  # our rounding is theirs
    jax.tree.map(assert_array_equal, load(ours)[0], params)

def test_published_sizes():
    published = {"0.5B": 494_032_768, "1.5B": 1_543_714_304, "3B": 3_085_938_688, "7B": 7_615_616_512,
                 "14B": 14_770_033_664, "32B": 32_763_876_352}
    for size, n_params in published.items():
        directory = new_directory()
        shutil.copy(shared(f"qwen2.5/config-{size}.json"), directory / "config.json")
        cfg = model.read_config(directory)
        found = cfg.n_params, cfg.H, cfg.rope_theta, cfg.stop_ids
        assert found == (n_params, cfg.D // cfg.N, 1e6, (151645,)), cfg
    figure(f"{len(published)} parameter counts equal")

# ---------------------------------------------------------------- model.py: sampling, meshes, loading
def truncated(p, top_k, top_p):
    """What top-k and then top-p sampling draws from, for one row."""
    order = np.argsort(-p)[:top_k or None]
    mass = p[order].cumsum()
    kept = order[:np.searchsorted(mass, top_p * mass[-1]) + 1]
    return np.where(np.isin(np.arange(len(p)), kept), p / p[kept].sum(), 0.0)

def chi_square(tokens, p):
    """p-value of the drawn tokens' counts; tokens expected fewer than 10 times are counted together."""
    count, expected = np.bincount(tokens, minlength=len(p)), p * len(tokens)
    count, expected = (np.append(a[expected >= 10], a[expected < 10].sum()) for a in (count, expected))
    return stats.chisquare(count[expected > 0], expected[expected > 0]).pvalue

def test_sampled_logps_equal_training_forward():
    """What `generate` reports is what the trainer computes; what it draws follows that, each time anew."""
    rng, prompts, errors = np.random.default_rng(3), random_prompts(TIED, (9, 4, 1, 6) * 4), {}
    for cfg, T, top_k, top_p in ((TIED, 0.7, 0, 1.0), (UNTIED, 1.0, 0, 1.0), (TIED, 1.2, 20, 0.8)):
        params, u = random_params(cfg, mesh()), np.full((2, 16, 32), np.nan)
        for seed in (0, 1):
            out = generate(params, cfg, prompts, 32, temperature=T, top_k=top_k, top_p=top_p, seed=seed)
            live = np.arange(32) < out["lengths_B"][:, None]
            tokens = out["tokens_BT"][live]
            rows = [p + a[:n].tolist() for p, a, n in zip(prompts, out["tokens_BT"], out["lengths_B"])]
            hidden = hidden_states(params, cfg, rows, width=41)
            hidden = jnp.concatenate([h[len(p) - 1:len(r) - 1] for h, p, r in zip(hidden, prompts, rows)])
            z = np.asarray(hidden @ model.head(params).T) / T
            q = np.stack([truncated(row, top_k, top_p) for row in softmax(z)])
            chosen, upto = (a[np.arange(len(q)), tokens] for a in (q, q.cumsum(-1)))
            right = np.log(chosen)
            if not top_k:
                right, _ = kernel.score(hidden, model.head(params), tokens, np.ones(len(tokens), "f"), mesh(),
                                        temperature=T)
            errors[T, seed] = abs(out["logp_BT"][live] - right).max()
            u[seed][live] = upto - rng.random(len(q)) * chosen  # if tokens follow q, these are uniform
        assert stats.kstest(u[~np.isnan(u)], "uniform").pvalue > 1e-3
        for a, b in ((u[..., 1:], u[..., :-1]), (u[:, 1:], u[:, :-1]), (u[0], u[1])):  # steps, rows, keys
            both = ~np.isnan(a + b)
            assert stats.pearsonr(a[both], b[both]).pvalue > 1e-3, "draws are related"
    check_errors(errors, 1e-4)

def test_draw_inverts_the_cdf():
    """At evenly spread uniforms each token comes as often as softmax says, to within two draws of 20,000."""
    rng, n = np.random.default_rng(4), 20_000
    for V, tp in (11, 1), (700, 1), (700, 4):
        z = 2 * rng.standard_normal((2, V)).astype(np.float32)
        z[1, rng.random(V) < 0.3] = -np.inf
        u = jnp.repeat((jnp.arange(n) + 0.5) / n, 2)
        tokens, _ = sample(jnp.tile(z, (n, 1)), u, 1.0, 0, 1.0, tp=tp)
        for row in (0, 1):
            off = np.bincount(tokens[row::2], minlength=V) - n * softmax(z[row])
            assert abs(off).max() < 2.1, off

def test_draw_never_takes_what_has_no_probability():
    """Also at u = 0, at the largest u below 1, and where rounding bites: around the steps of the CDF."""
    rng, drawn, last = np.random.default_rng(5), 0, np.nextafter(np.float32(1), 0)
    for V, kept in ((5, 2), (256, 60), (700, 1), (700, 9), (3000, 400), *[(77_000, 150)] * 6):
        for nothing in (-np.inf, -1e30):
            z, where = np.full(V, nothing, np.float32), rng.choice(V, kept, replace=False)
            z[where] = 3 * rng.standard_normal(kept)
            steps = softmax(z).cumsum()[where]
            u = np.concatenate([[0, last], rng.random(200), *(steps + k * 2.0 ** -24 for k in range(-4, 5))])
            u, parts = np.clip(u, 0, last).astype(np.float32), max(1, V * len(u) // 10 ** 7)
            tokens = np.concatenate([sample(np.tile(z, (len(some), 1)), some, 1.0, 0, 1.0)[0]
                                     for some in np.array_split(u, parts)])
            assert ((0 <= tokens) & (tokens < V)).all(), f"drew {tokens.max()} of {V} tokens"
            assert (z[tokens] > nothing).all(), f"{(z[tokens] == nothing).sum()} of probability 0 at V {V}"
            drawn += len(u)
    figure(f"{drawn} draws")

def test_sample_draws_from_the_truncated_softmax():
    """By chi-square, from two distributions in alternate rows; the log-probs are those after truncation."""
    rng, n, lowest = np.random.default_rng(6), 5_000, 1
    for V, tp, T, *how in ((11, 1, .7, 0, 1), (600, 1, 1.3, 0, 1), (600, 1, .8, 7, 1), (600, 4, .7, 0, .6),
                           (600, 1, .7, 0, .6), (600, 4, 1.5, 60, .8)):
        z = 2 * rng.standard_normal((2, V)).astype(np.float32)
        u = jax.random.uniform(jax.random.key(V), 2 * n)
        tokens, logp = map(np.asarray, sample(jnp.tile(z, (n, 1)), u, T, *how, tp=tp))
        for row in (0, 1):
            p, mine = truncated(softmax(z[row] / T), *how), tokens[row::2]
            assert (p[mine] > 0).all(), "drew a token outside the kept set"
            assert_allclose(logp[row::2], np.log(p[mine]), rtol=0, atol=1e-5)
            lowest = min(lowest, chi_square(mine, p))
        greedy, logp = sample(z, np.zeros(2, np.float32), 0.0, 0, 1.0, tp=tp)
        assert_array_equal(greedy, z.argmax(-1))
        assert_allclose(logp, np.log(softmax(z).max(-1)), rtol=0, atol=1e-5)
    assert lowest > 1e-3, f"chi-square p {lowest}"
    figure(f"lowest p of 12 {lowest:.2f}")

def test_rows_do_not_depend_on_others():
    """Nor on how wide their padding is."""
    params = random_params(UNTIED, mesh())
    ours, others = random_prompts(UNTIED, (6, 2, 7, 4)), random_prompts(UNTIED, (3, 13, 1, 4), seed=1)
    for T in (0.0, 1.0):
        a = generate(params, UNTIED, ours, 16, temperature=T)
        b = generate(params, UNTIED, [ours[0], others[1], ours[2], others[3]], 16, temperature=T)
        assert_array_equal(a["tokens_BT"][::2], b["tokens_BT"][::2])
        assert_allclose(a["logp_BT"][::2], b["logp_BT"][::2], rtol=0, atol=1e-5)
        assert (a["tokens_BT"][1::2] != b["tokens_BT"][1::2]).any(-1).all()

def test_packed_sequences_do_not_see_each_other():
    params, (a, b) = random_params(TIED, mesh()), random_prompts(TIED, (7, 9))
    hidden = partial(hidden_states, params, TIED, width=20)
    packed = hidden([a + b], [[*range(7), *range(9)]], [[1] * 7 + [2] * 9])[0, :16]
    alone = jnp.concatenate([hidden([s])[0, :len(s)] for s in (a, b)])
    assert_allclose(packed, alone, rtol=0, atol=1e-5)
    joined = hidden([a + b])[0, :16]
    assert_allclose(joined[:7], alone[:7], rtol=0, atol=1e-5)
    assert abs(joined[7:] - alone[7:]).max(-1).min() > 1e-2, "in a segment, tokens must see those before them"

def test_bfloat16_forward_is_close():
    """Far along in a row, where a rotary angle in bfloat16 would be off by a radian; norms are float32."""
    params, rows = random_params(TIED, mesh()), random_prompts(TIED, (24,))
    tokens, positions, segments = np.array([rows[0], range(400, 424), [1] * 24], np.int32)[:, None]
    rows = dict(tokens=tokens, positions=positions, segments=segments, filled=np.ones(1, np.int32))
    exact, rounded = (forward(params, TIED, mesh(), rows, model.How(t)) for t in ("float32", "bfloat16"))
    assert rounded.dtype == jnp.bfloat16
    x = exact.astype(jnp.bfloat16)
    want = model.rms_norm(x.astype(jnp.float32), params["norm_D"], 1e-6).astype(jnp.bfloat16)
    assert_array_equal(model.rms_norm(x, params["norm_D"], 1e-6), want)
    check_errors({"hidden states": relative(rounded, exact)}, 0.06, "relative error")

def test_gradients_equal_autodiff():
    """The way back by hand, against JAX's own of the textbook forward: on meshes, for what is kept and how is
    attended, with rows that are empty, in passes that add up."""
    rng, errors = np.random.default_rng(7), {}
    one, long = (1, 1, 1), dataclasses.replace(TIED, H=64, N=2, K=1)  # 64: what splash can
    cases = [(TIED, 9, 8, dims, "blockwise", remat) for remat in model.REMAT for dims in (one, (2, 2, 2))]
    cases += [(UNTIED, 6, 8, dims, "blockwise", "full") for dims in ((1, 8, 1), (2, 4, 1), (1, 4, 2))]
    cases += [(long, 600, 2, one, "blockwise", "full"), (long, 130, 2, (2, 1, 1), "splash", "full")]
    for cfg, T, B, dims, attention, remat in cases:
        on, shards = mesh(*dims), dims[0] * dims[1]
        tokens, positions = rng.integers(0, cfg.V, (2, B, T)).astype(np.int32)
        segments = np.sort(rng.integers(1, 4, (B, T)).astype(np.int32), 1)
        filled = rng.integers(B > 2, B // shards + 1, shards) if B == 8 else np.full(shards, B // shards)
        real = np.concatenate([np.arange(B // shards) < n for n in filled])
        d_hidden = rng.standard_normal((B, T, cfg.D)).astype(np.float32) * real[:, None, None]
        rows = dict(tokens=tokens, positions=positions, segments=segments, filled=filled.astype(np.int32))
        @jax.jit
        def ours(params, grads):
            hidden, back = model.forward(params, cfg, on, rows, model.How("float32", attention, remat))
            return hidden, back(grads, d_hidden)
        with mock.patch.object(model, "TOKENS_AT_ONCE", 3 * T):
            params = random_params(cfg, on)
            hidden, grads = ours(params, ours(params, jax.tree.map(jnp.zeros_like, params))[1])
        textbook = lambda p: textbook_hidden(p, cfg, tokens, positions, segments)
        wanted, pull = jax.vjp(textbook, random_params(cfg, mesh()))
        pairs = zip(*(jax.tree.leaves(g | {"head_VD": None}) for g in (grads, pull(d_hidden)[0])))
        errors[cfg.V, T, dims, attention, remat] = np.max(
            [relative(hidden[real], wanted[real])] + [relative(a / 2, b) for a, b in pairs])
    check_errors(errors, 3e-5, f"{len(cases)} ways: relative error")

def uncached_answers(params, cfg, prompts, max_answer, key):
    """What `generate` is to give: the training forward on all that is there, for each token anew."""
    rows, live, logps = [list(p) for p in prompts], [True] * len(prompts), [[] for _ in prompts]
    for t in range(max_answer):
        hidden = hidden_states(params, cfg, rows, width=max(map(len, prompts)) + max_answer)
        last = jnp.stack([h[len(row) - 1] for h, row in zip(hidden, rows)])
        step = jax.random.fold_in(key, t)
        u = np.array([jax.random.uniform(jax.random.fold_in(step, i)) for i in range(len(rows))])
        tokens, logp = map(np.asarray, sample(last @ model.head(params).T, u, 1.0, 0, 1.0))
        for i in np.flatnonzero(live):
            rows[i].append(int(tokens[i]))
            logps[i].append(logp[i])
            live[i] = tokens[i] not in cfg.stop_ids
    return [row[len(p):] for row, p in zip(rows, prompts)], live, logps

def test_rollouts_equal_uncached_forward():
    """On every layout: ragged prompts, groups, growing windows, waves, rows that are done and go. With this
    seed no uniform is within 5e-6 of a step of its CDF, where rounding would decide."""
    cfg, seed = dataclasses.replace(TIED, V=208, stop_ids=tuple(range(0, 60, 3))), 11
    prompts = [p for p in random_prompts(cfg, (5, 3, 8, 1, 2, 6, 4, 7)) for _ in range(4)]
    want, live, logps = uncached_answers(random_params(cfg, mesh()), cfg, prompts, 24, jax.random.key(seed))
    errors, looks, slots, dropped = {}, set(), set(), 0
    for dims, kind, options in (
            ((1, 1, 1), "replicated", dict(stage=8)), ((1, 1, 1), "replicated", dict(stage=6, at_once=12)),
            ((1, 8, 1), "replicated", {}), ((2, 2, 2), "fsdp", {}), ((2, 4, 1), "tp", dict(stage=8)),
            ((2, 2, 2), "tp", dict(at_once=4)), ((1, 8, 1), "fsdp", dict(stage=8, at_once=2)),
            ((2, 4, 1), "maxtext", dict(stage=8, at_once=9)), ((1, 8, 1), "auto", dict(group=1, at_once=3))):
        on, heard = mesh(*dims), []
        with mock.patch.object(model, "regrow", wraps=model.regrow) as regrow:
            out = generate(random_params(cfg, on), cfg, prompts, 24, on, kind, seed,
                           progress=lambda *a: heard.append(a), **{"group": 4} | options)
        for (a, index), how in regrow.call_args_list:
            slots.add(how["slots"])
            dropped += a.ndim == 2 and len(a) > len(index)
        looks.add(len(heard))
        for i, row in enumerate(want):
            n = out["lengths_B"][i]
            assert out["tokens_BT"][i].tolist() == row + [0] * (24 - len(row)), (dims, kind, options, i)
            assert n == len(row) and out["cut_B"][i] == live[i] and not out["logp_BT"][i, n:].any()
            errors[dims, kind, i] = abs(out["logp_BT"][i, :n] - logps[i]).max()
        assert heard[-1] == (len(live) - sum(live), sum(map(len, want))), heard
    assert dropped > 3 and len(looks) > 3 and {24, 32} <= slots, (dropped, looks, slots)
    check_errors(errors, 1e-4, f"{sum(map(len, want))} tokens equal 9 times, rows went {dropped} times, logp")

def test_greedy_answers_equal_on_meshes():
    cfg, prompts = dataclasses.replace(TIED, V=208), random_prompts(TIED, (5, 3, 8, 8, 1, 2, 4, 7))
    one, *many = (generate(random_params(cfg, on), cfg, prompts, 24, on, kind, temperature=0.0)
                  for on, kind in ((mesh(), "auto"), (mesh(2, 2, 2), "replicated"), (mesh(2, 2, 2), "tp")))
    for other in many:
        assert_allclose(one["logp_BT"], other.pop("logp_BT"), rtol=0, atol=1e-4)
        assert all((one[k] == a).all() for k, a in other.items())

def test_decode_works_in_place_and_ends():
    """A cache that goes in is gone; after the token that ends all rows, no more slots are written."""
    cfg, olds, states = dataclasses.replace(TIED, stop_ids=tuple(range(TIED.V))), [], []
    def watched(weights, state, *args, decode=model.decode, **options):
        states[:], got = decode(weights, state, *args, **options)
        olds.extend(state)
        return tuple(states), got
    with mock.patch.object(model, "decode", watched):
        out = generate(random_params(cfg, mesh()), cfg, random_prompts(cfg, (4, 4)), 24, at_once=1, stage=9)
    assert len(olds) == 6 and all(a.is_deleted() for a in olds), "a copy is made"
    assert (out["lengths_B"] == 1).all() and not out["cut_B"].any()
    assert_array_equal(jnp.abs(states[0]).max((0, 1, 2, 4)) > 0, np.arange(16) < 5)  # [L, B, K, S, H]

def test_rollout_plans():
    """Layouts by size and memory; rows at once by free memory; when a smaller batch pays."""
    sizes = lambda name: model.ModelConfig(*model.SIZES[name][:7], 1e6, 1e-6, True, 9999, ())
    on, gib = mesh(1, 8, 1), 2 ** 30
    for name, memory, want, tp in (
            ("3B", 32, "replicated", 1), ("3B", math.inf, "replicated", 1), ("7B", 32, "tp", 4),
            ("7B", 80, "replicated", 1), ("32B", 32, "tp", 8), ("14B", 4, "fsdp", 1)):
        with mock.patch.object(model, "device_memory", return_value=memory):
            layout, why = model.rollout_layout("auto", sizes(name), on, "bfloat16")
        assert layout.kind == want and why.startswith(want), (name, memory, why)
        assert list(layout.mesh.devices.flat) == list(on.devices.flat) and layout.mesh.shape["tp"] == tp
    for kind, parts, heads in (("replicated", 1, 2), ("fsdp", 8, 2), ("tp", 2, 1)):
        layout, _ = model.rollout_layout(kind, sizes("3B"), on, "bfloat16")
        half = (20 * gib - 2 * sizes("3B").n_params / parts) / 2  # of what 12 of 32 GiB and the weights leave
        for memory, want in (32, half // (36 * 2 * heads * 128 * 2 * 1280)), (12, 1), (math.inf, 2 ** 30):
            with mock.patch.object(model, "device_memory", return_value=memory):
                assert model.rows_that_fit(sizes("3B"), layout, "bfloat16", 1280, 12 * gib) == want, kind
    table = {(9, 16, 100, 10): 16, (8, 16, 100, 10): 8, (3, 16, 100, 10): 4, (1, 16, 100, 10): 1,
             (0, 16, 100, 10): 1, (8, 16, 1000, 10): 16, (5, 12, 1, 10): 6, (5, 7, 1, 10): 7}
    assert {k: model.fewer_rows(*k) for k in table} == table
    assert [model.bucket(n) for n in (1, 2, 3, 5, 24, 25, 100, 513)] == [1, 2, 3, 6, 24, 32, 128, 768]

def test_load_streams():
    """On eight devices, host memory holds a shard at a time, and reads no more of the files than that."""
    class Watched(model.Checkpoint):
        def read(self, name, index):
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            value = super().read(name, index)
            asked.append((name, value.shape, before, tracemalloc.get_traced_memory()[1] - before))
            odd = np.empty(value.size + 16, np.float32)  # to an odd address: an array at an even one would
            odd = odd[(-odd.ctypes.data // 4) % 16 + 1:][:value.size]  # be kept, as a CPU device's own memory
            odd[:] = value.ravel()
            return odd.reshape(value.shape)
    on, asked, directory = mesh(1, 8, 1), [], new_directory()
    larger = dict(vocab_size=1000, hidden_size=256, intermediate_size=512, num_hidden_layers=8)
    model.write_random(directory, train.TINY_MODEL | larger | {"tie_word_embeddings": False}, seed=0)
    whole, cfg = load(directory)
    shapes = model.shapes(cfg)
    tracemalloc.start()
    params = model.load(Watched(directory, cfg), on)
    tracemalloc.stop()
    jax.tree.map(assert_array_equal, params, whole)
    assert jax.tree.map(lambda a: (a.sharding, a.dtype), params) == jax.tree.map(
        lambda sharding: (sharding, jnp.float32), model.shardings(cfg, on))
    assert Counter(name for name, *_ in asked) == dict.fromkeys(shapes, 8)
    shard = 4 * max(math.prod(shape) for _, shape, *_ in asked)
    for name, shape, before, used in asked:
        parts = 1 if "norm" in name or "/b" in name else 8
        assert math.prod(shape) * parts == math.prod(shapes[name]), (name, shape)
        assert used < 1.3 * 4 * math.prod(shape) + 10_000, f"{used} bytes to read {shape} of {name}"
        assert before < 3 * shard, f"{before} bytes of host memory held when {name} is read"
    _, _, held, used = map(max, zip(*asked))
    figure(f"a read takes {used / shard:.2f} of the largest shard, {held / shard:.2f} is held from before")

def test_saved_shards_load_on_other_meshes():
    params, directory = random_params(UNTIED, mesh(1, 8, 1)), new_directory()
    tree = {"params": params, "step": jnp.int32(7), "more": (params["norm_D"],)}
    model.save_shards(model.shards_of(tree), directory, {"run": "1"})
    file = directory / "shards-00000-of-00001.safetensors"
    for on in (mesh(), mesh(1, 8, 1), mesh(2, 2, 2)):
        like = {"params": random_params(UNTIED, on), "step": jnp.int32(0), "more": (jnp.zeros(UNTIED.D),)}
        got = model.load_shards([file], like)
        jax.tree.map(assert_array_equal, got, tree)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(like)):
            assert (a.sharding, a.dtype) == (b.sharding, b.dtype)
    edit(file, {[k for k in load_file(file) if k.startswith("params/embed_VD")][3]: None})
    assert_raises_regex(model.CheckpointError, "params/embed_VD", model.load_shards, [file], like)
    by_columns = Format(Layout((1, 0)), SingleDeviceSharding(jax.devices()[0]))  # as a TPU may lay them out
    columns = jax.device_put(np.arange(6.0, dtype=np.float32).reshape(2, 3), by_columns)
    assert np.asarray(columns).strides == (4, 8)
    model.save_shards(model.shards_of({"a": columns}), directory, {"run": "1"})
    assert_array_equal(model.load_shards([file], {"a": jnp.zeros((2, 3))})["a"], columns)

def test_refusals_name_the_cause():
    config, weights, index = "config.json", "model.safetensors", "model.safetensors.index.json"
    norm, query = "model.norm.weight", "model.layers.1.self_attn.q_proj.weight"
    whole, yarn, plain = tiny_directory(), {"rope_type": "yarn", "factor": 4.0}, {"rope_type": "default"}
    mapped = lambda name: json.dumps({"weight_map": {norm: name}}).encode()
    cases = [
        (config, dict(model_type="llama"), "llama"), (config, dict(model_type=None), "model_type"),
        (config, dict(rope_scaling=yarn), "yarn"), (config, dict(rope_scaling="yarn"), "usable"),
        (config, dict(rope_scaling={"type": "linear", "factor": 2}), "linear"), (index, b"{}", "index.json"),
        (config, dict(rope_parameters=yarn | {"rope_theta": 1e4}), "yarn"), (index, b"[]", "index.json"),
        (config, dict(rope_parameters=plain | {"rope_theta": 1e4}, rope_scaling=yarn), "yarn"),
        (config, dict(use_sliding_window=True), "sliding"), (config, dict(hidden_act="gelu"), "gelu"),
        (config, dict(layer_types=["full_attention", "sliding_attention"]), "sliding"),
        (config, dict(quantization_config={"bits": 4}), "quantised"), (config, dict(head_dim=5), "of size 5"),
        (config, dict(hidden_size=None), "hidden_size"), (config, b"[]", "config.json holds a list"),
        (config, dict(vocab_size=-1), "positive"), (config, dict(num_key_value_heads=3), "4 query heads"),
        (config, dict(num_hidden_layers=1), "tensor model.layers.1."), (config, b"{", "not readable JSON"),
        (config, dict(num_hidden_layers=3), "tensor model.layers.2."), (weights, None, weights),
        (config, dict(vocab_size="many"), "many"), (config, None, "config.json is missing"),
        (config, dict(hidden_size=128.0), "hidden_size = 128.0 is not"),
        (config, b"[" * 99999, "not readable"),
        (config, dict(num_attention_heads=True), "= True is not"),
        (config, dict(vocab_size=2**80), "below 2147"),
        (config, dict(num_hidden_layers=10**9), "below 10000"),
        (config, dict(rope_theta=-1e4), "rope_theta = -"),
        (config, dict(rope_theta=math.inf), "Infinity"), (config, dict(rope_theta=0),
        "rope_theta = 0 is not"),
        (config, dict(rms_norm_eps=math.nan), "NaN"), (config, dict(eos_token_id=320),
        "eos_token_id = [320]"),
        (config, dict(eos_token_id=["2"]), "of vocab_size"), (config, dict(rope_theta="1e4"), "'1e4'"),
        (config, dict(tie_word_embeddings="false"), "tie_word_embeddings"),
        (config, b"\xff{}", "not readable"),
        (config, dict(rope_parameters=plain | {"rope_theta": 1e6}), "rope_theta [1000000.0, 10000.0]"),
        (config, dict(rope_parameters=plain | {"factor": 4}), "factor"), (config, b"\xef\xbb\xbf{}", "BOM"),
        (config, dict(architectures=["Qwen2ForRewardModel"]), "Qwen2ForRewardModel"),
        (config, b'{"model_type": "llama", "model_type": "qwen2"}', "a name comes twice"),
        (weights, b"not safetensors at all", "is not a safetensors file"),
        (weights, (whole / weights).read_bytes()[:9000], "is not a safetensors file"),
        (weights, {query: None}, f"lacks the tensor {query}"), (weights, {"more": np.ones(2)}, "tensor more"),
        (weights, {query: np.ones((128, 128), np.int8)}, f"{query} has type I8"),
        (weights, {norm: np.ones(17)}, f"{norm} has shape (17,)"),
        (index, mapped("../x.safetensors"), "../x.safeten"), (index, mapped("gone.safetensors"), "gone.safe"),
        (index, mapped("/etc/passwd"), "/etc/passwd"), (index, mapped(".."), "is not a safetensors file"),
        (index, mapped("a\0b"), "is not a safetensors file"), (index, mapped(7), "names 7"),
        (index, json.dumps({"weight_map": {"a": "model.safetensors", "b": "more.safetensors"}}).encode(),
         f"more.safetensors holds {norm}, as does"),
        (weights, {query: np.full((128, 128), np.nan, np.float32)}, f"{query} holds NaN"),
        (weights, {norm: np.float32([1] * 127 + [np.inf])}, f"{norm} holds NaN or infinity"),
        ("generation_config.json", b"[]", "generation_config.json")]
    load(whole)  # good as it is, and good at the path that the index must not name
    whole = new_directory(like=whole)
    save_file({norm: np.ones(128, np.float32)}, whole / "more.safetensors")
    shutil.copy(whole / weights, os.path.join(scratch().name, "x.safetensors"))
    for name, change, words in cases:
        with assert_raises_regex(model.CheckpointError, re.escape(words), msg=f"{name}: {change}"):
            load(spoiled(whole, name, change))
    figure(f"{len(cases)} refusals")

# ---------------------------------------------------------------- kernel.py
IMPLS, VECTORS = ("jax", "pallas", "full"), ("weight", "advantage", "old", "sampler", "ref")
KNOBS = {"clip_low": 0.2, "clip_high": 0.3, "beta": 0.3, "is_cap": 1.5, "entropy_bonus": 0.05}
EVERYTHING = "loss logp entropy"  # what a gradient can be of

@cache
def tiles(impl, cores=1):
    """So small that every edge is met, as far as a TPU, which runs the kernels compiled, has such. To the
    interpreter what nobody wrote is NaN; two cores can race, but are slow."""
    if impl != "pallas":
        return kernel.Blocks(128)
    if jax.default_backend() == "tpu":
        return kernel.Blocks(128, rows=128, vocab=32, hidden=128, vmem=8 << 20, step=16)
    interpret = pltpu.InterpretParams(num_cores_or_threads=cores, detect_races=cores > 1,
                                      uninitialized_memory="nan", out_of_bounds_reads="raise")
    return kernel.Blocks(128, rows=64, vocab=32, hidden=16, vmem=8 << 20, step=8, interpret=interpret)

def finite(tree):
    return all(np.isfinite(np.asarray(a, np.float32)).all() for a in jax.tree.leaves(tree))

def loss_inputs(N, V, T, seed, have=VECTORS, masked=0.4, top=20.0, dtype=np.float32):
    """Random hidden states, head, targets, token vectors, and cotangents of log-prob and entropy. The largest
    logit of every third token is +-top. Ratios keep away from the bounds of the clip, so that rounding does
    not decide. All that masked tokens hold is NaN or infinite, but for their targets."""
    rng = np.random.default_rng(seed)
    h, W = rng.standard_normal((N, 24)), 0.3 * rng.standard_normal((V, 24)).astype(np.float32)
    h[::3] *= top * T / abs(h[::3] @ W.T).max(-1, keepdims=True)
    h, head = (np.asarray(jnp.asarray(a, dtype), np.float64) for a in (h, W))
    z = h @ head.T / T
    y = np.where(rng.random(N) < 0.3, z.argmax(-1), rng.integers(0, V, N))
    logp = special.log_softmax(z, -1)[np.arange(N), y]
    v = {"weight": rng.uniform(0.2, 2, N), "advantage": rng.standard_normal(N)}
    v["old"] = logp + rng.choice([-3, -0.5, -0.1, 0.1, 0.5, 3], N) + rng.uniform(-0.05, 0.05, N)
    v["ref"], v["sampler"] = logp + rng.uniform(-1, 1, N), v["old"] + rng.uniform(-1, 1, N)
    out, cotangents = rng.random(N) < masked, rng.standard_normal((2, N)).astype(np.float32)
    for k, a in (v | {"hidden": h}).items():
        a[out] = 0 if k == "weight" else rng.choice([np.nan, np.inf, -np.inf], a[out].shape)
    v = {k: v[k].astype(np.float32) for k in VECTORS if k in have}
    return jnp.asarray(h, dtype), W, y.astype(np.int32), v, cotangents

def numpy_loss(h, W, y, v, cotangents, T, of="loss", **knobs):
    """The formulas in float64, token by token -> (loss_N, tokens, dh, dW, cases of clip and cap, counted)."""
    clip_low, clip_high, beta, is_cap, entropy_bonus = (KNOBS | knobs).values()
    live, seen, low, high = v["weight"] > 0, Counter(), 1 - clip_low, 1 + clip_high
    h, W = (np.asarray(jnp.asarray(a, h.dtype), np.float64) for a in (jnp.where(live[:, None], h, 0), W))
    log_p, loss = special.log_softmax(h @ W.T / T, -1), np.zeros(len(y))
    p, (g, e) = np.exp(log_p), (live * (k in of) * c for k, c in zip(("logp", "entropy"), cotangents))
    tokens = defaultdict(lambda: np.zeros(len(y)))
    for i in np.flatnonzero(live):
        w, A, logp = float(v["weight"][i]), float(v["advantage"][i]), log_p[i, y[i]]
        old = float(v["old"][i]) if "old" in v else logp
        ratio, entropy, cap, kl, dkl = np.exp(logp - old), -p[i] @ log_p[i], 1.0, 0.0, 0.0
        side = "above" if ratio > high else "below" if ratio < low else "within"
        bound = {("above", True): high, ("below", False): low}.get((side, A > 0))
        if "sampler" in v:
            gap = old - float(v["sampler"][i])
            cap, tokens["logprob_gap"][i] = min(np.exp(gap), is_cap) if is_cap else 1.0, abs(gap)
        if "ref" in v:
            d = float(v["ref"][i]) - logp
            kl, dkl = np.exp(d) - d - 1, 1 - np.exp(d)
            tokens["kl"][i] = kl
        loss[i] = w * (beta * kl - cap * A * (bound or ratio) - entropy_bonus * entropy)
        if "loss" in of:
            g[i] += w * (beta * dkl - (0 if bound else cap * A * ratio))
            e[i] -= w * entropy_bonus
        for k, x in dict(logp=logp, entropy=entropy, clip_fraction=bound is not None, ratio=ratio).items():
            tokens[k][i] = x
        seen.update([(side, A > 0), "capped" if cap == is_cap else "not capped"])
    # d/dz_v of -sum p log p, where dp_u/dz_v = p_u (1[u=v] - p_v)
    de = -p * (log_p + 1) + p * (p * (log_p + 1)).sum(-1, keepdims=True)
    dz = (g[:, None] * (np.eye(len(W))[y] - p) + e[:, None] * de) / T
    return loss, tokens, dz @ W, dz.T @ h, seen

@partial(jax.jit, static_argnames=("impl", "T", "of", "on", "cores", *KNOBS))
def gradients(h, W, y, v, cotangents, impl, T, of, on, cores, **knobs):
    def objective(h, W):
        loss, tokens = kernel.grpo_loss(h, W, y, v, on, temperature=T, impl=impl, blocks=tiles(impl, cores),
                                        **knobs)
        parts = {"loss": loss} | {k: jnp.sum(c * tokens[k]) for k, c in zip(("logp", "entropy"), cotangents)}
        return sum(parts[k] for k in of.split()) / 2, (loss, tokens)
    (_, out), (dh, dW) = jax.value_and_grad(objective, argnums=(0, 1), has_aux=True)(h, W)
    return *out, 2 * dh, 2 * dW  # of a half, so that the loss does not come with a cotangent of 1

def watched(f, *args, **settings):
    """f's result. An interpreter that found a race says so, and one that failed must be told to forget it.
    Nor may anything come of what `empty` holds: here NaN."""
    empty = mock.patch.object(jax.lax, "empty", lambda shape, dtype: jnp.full(shape, jnp.nan, dtype))
    try:
        with contextlib.redirect_stdout(io.StringIO()) as said, empty:
            out = jax.block_until_ready(f(*args, **settings))
    finally:
        pltpu.reset_tpu_interpret_mode_state()
    assert "RACE DETECTED" not in said.getvalue(), said.getvalue()
    return out

def run_loss(impl, inputs, T, of="loss", on=None, cores=1, **knobs):
    return watched(gradients, *inputs, impl=impl, T=T, of=of, on=on or mesh(), cores=cores, **KNOBS | knobs)

def run_score(impl, inputs, T, on=None):
    score = jax.jit(kernel.score, static_argnames=("mesh", "temperature", "impl", "blocks"))
    return watched(score, *inputs[:3], np.ones(len(inputs[2]), "f"), mesh=on or mesh(), temperature=T,
                   impl=impl, blocks=tiles(impl))

def check_loss(impl, inputs, T, of="loss", eps=1e-5, **knobs):
    """It is NumPy's and `score`'s -> (errors of log-prob, loss, dh, dW; cases of clip and cap, counted)."""
    loss, tokens, *grads = run_loss(impl, inputs, T, of, **knobs)
    want, right, *d, seen = numpy_loss(*inputs, T, of, **knobs)
    assert [a.dtype for a in grads] == [inputs[0].dtype, np.float32] and set(tokens) == set(right)
    loss_N, _ = kernel.grpo_terms(tokens["logp"], tokens["entropy"], inputs[3], **KNOBS | knobs)
    for k, a in (tokens | {"loss": loss_N}).items():
        assert_allclose(a, (right | {"loss": want})[k], eps, eps, err_msg=f"{impl}, {of}, {knobs}: {k}")
    for k, a in zip(("logp", "entropy"), run_score(impl, inputs, T)):
        assert_allclose(np.where(inputs[3]["weight"] > 0, a, 0), tokens[k], 1e-6, 1e-6, err_msg=k)
    errors = [abs(tokens["logp"] - right["logp"]).max(), abs(loss - want.sum()) / abs(want).sum(),
              *map(relative, grads, d)]
    assert np.max(errors) < eps, (impl, of, knobs, errors)
    return errors, seen

def test_grpo_loss_equals_numpy():
    """Chunks and tiles end in the middle of tokens, vocabulary and hidden states."""
    single, half = np.float32, jnp.bfloat16
    cases = [(296, 203, 0.6, single, 0.0, "loss"), (296, 203, 1.3, single, 0.05, EVERYTHING),
             (1, 203, 1.3, single, 0.05, EVERYTHING), (77, 37, 0.6, single, 0.0, "logp"),
             (296, 203, 1.3, half, 0.05, EVERYTHING), (77, 65, 0.6, half, 0.05, "loss")]
    seen, worst = Counter(), defaultdict(list)
    for impl in IMPLS:
        for i, (N, V, T, dtype, bonus, of) in enumerate(cases):
            eps, top = (1e-5, 20) if dtype == single else (1e-2, 35)
            inputs = loss_inputs(N, V, T, i, VECTORS, 0.4 * (N > 1), top, dtype)
            errors, counted = check_loss(impl, inputs, T, of, eps, entropy_bonus=bonus)
            worst[f"{impl}, {inputs[0].dtype}"] += errors
            seen += counted
    assert len(seen) == 8 and min(seen.values()) > 5, seen
    figure("max error: " + "; ".join(f"{k} {max(errors):.0e}" for k, errors in worst.items()))

def test_grpo_loss_of_absent_vectors():
    """Each of old, sampler, ref absent or present, with and without KL and cap: algebra, the same for all.
    Without old the ratio is at the bound of the clip, here 1, and the gradient whole."""
    errors = {}
    for i, have in enumerate(["old sampler", "old ref", "old", "sampler ref", "sampler", "ref", ""]):
        knobs = {"clip_low": 0.0, "beta": 0.0 if i == 1 else 0.2, "is_cap": 0.0 if i == 3 else 1.2}
        inputs = loss_inputs(45, 37, 1.3, i, ("weight", "advantage", *have.split()))
        errors[have], _ = check_loss("jax", inputs, 1.3, entropy_bonus=0.0, **knobs)
    check_errors(errors, 1e-5)

def test_grpo_loss_of_masked_tokens():
    """They are as if they were not there, whatever they hold; all masked, everything is 0."""
    for impl in IMPLS:
        run = partial(run_loss, impl, T=1.3, of=EVERYTHING)
        h, W, y, v, cotangents = inputs = loss_inputs(296, 203, 1.3, 9)
        live = v["weight"] > 0
        zeros = {k: np.where(live, a, 0) for k, a in v.items()}
        dirty, clean = run(inputs), run((jnp.where(live[:, None], h, 0), W, y * live, zeros, cotangents))
        assert finite(dirty), impl
        jax.tree.map(assert_array_equal, dirty, clean)
        for a in map(np.asarray, (dirty[2], *dirty[1].values())):
            assert not a[~live].any() and a[live].any()
        nothing = run(loss_inputs(296, 203, 1.3, 10, masked=1))
        assert not any(np.asarray(a).any() for a in jax.tree.leaves(nothing)), impl

def test_grpo_loss_of_a_ratio_that_overflows():
    """A clipped token carries no gradient however far its ratio is out; another's stays finite."""
    h, W, y, v, cotangents = loss_inputs(45, 37, 1.0, 10, VECTORS[:3], masked=0)
    v |= {"advantage": abs(v["advantage"]), "old": np.full(45, -300, np.float32)}
    loss, _, *grads = run_loss("jax", (h, W, y, v, cotangents), 1.0, entropy_bonus=0.0)
    assert_allclose(loss, -1.3 * (v["weight"] * v["advantage"]).sum(), rtol=1e-5)
    assert not any(np.asarray(a).any() for a in grads)
    v["advantage"] = -v["advantage"]
    assert finite(run_loss("jax", (h, W, y, v, cotangents), 1.0, entropy_bonus=0.0))

def test_grpo_loss_of_large_logits():
    """Of 1e4: what exp makes of them must neither overflow nor cancel."""
    errors = {}
    for impl in IMPLS:
        for dtype in (np.float32, jnp.bfloat16):
            inputs = loss_inputs(296, 203, 1.3, 11, top=1e4, dtype=dtype)
            out, right = run_loss(impl, inputs, 1.3, EVERYTHING), numpy_loss(*inputs, 1.3)[1]
            assert finite(out), impl
            errors[impl, dtype] = [abs(out[1][k] - right[k]).max() / 1e4 for k in ("logp", "entropy")]
    check_errors(errors, 2e-6, "max error, a part of the largest:")

def test_logits_never_exist():
    """Not those of more than 128 tokens, as asked for. A score takes one GEMM, loss and gradients three."""
    inputs = loss_inputs(1200, 1003, 1.3, 13)
    for impl in IMPLS:
        gradient = partial(gradients, impl=impl, T=1.3, on=mesh(), cores=1, **KNOBS)
        score = partial(kernel.score, weight_N=np.ones(1200, "f"), mesh=mesh(), impl=impl, blocks=tiles(impl))
        for gemms, f, args in ((1, score, inputs[:3]), (3, partial(gradient, of="loss"), inputs),
                               (6, partial(gradient, of=EVERYTHING), inputs)):  # 6: for its cotangents again
            text = str(jax.make_jaxpr(f)(*args))
            sizes = [math.prod(map(int, dims.split(","))) for dims in re.findall(r"\w\[([\d,]+)\]", text)]
            assert (max(sizes) > 128 * 1003) == (impl == "full"), (impl, gemms, max(sizes))
            assert impl == "pallas" or text.count("dot_general[") == gemms, (impl, gemms)

def test_grpo_loss_is_the_same_on_any_mesh():
    """Scores too; some devices have less or nothing of the vocabulary; a chip's two cores do not race."""
    errors, close = {}, partial(assert_allclose, rtol=1e-5, atol=1e-5)
    for impl, V, dims, *cores in (
            ("pallas", 100, (1, 1, 1), 2), ("jax", 203, (1, 8, 1)), ("jax", 203, (2, 4, 1)),
            ("jax", 203, (2, 2, 2)), ("jax", 5, (1, 8, 1)), ("jax", 5003, (2, 2, 1)),
            ("full", 203, (2, 2, 2)), ("pallas", 203, (2, 2, 2)), ("pallas", 300, (1, 8, 1))):
        inputs, of = loss_inputs(296, V, 1.3, V), "loss" if impl == "pallas" else EVERYTHING
        one, many = run_loss("jax", inputs, 1.3, of), run_loss(impl, inputs, 1.3, of, mesh(*dims), *cores)
        jax.tree.map(close, many[:2], one[:2])
        for k, a in zip(("logp", "entropy"), run_score(impl, inputs, 1.3, mesh(*dims))):
            close(np.where(inputs[3]["weight"] > 0, a, 0), one[1][k])
        errors[impl, V, dims] = [*map(relative, many[2:], one[2:])]
        check_errors(errors, 1e-5, f"{len(errors)} meshes: max relative error")

def test_grpo_loss_equals_liger():
    """Three ways of another's to weigh answers, with KL and importance weights, off-policy."""
    torch, liger = need("torch", "liger_kernel.chunked_loss")
    B, T, rng, errors = 6, 20, np.random.default_rng(15), {}
    h, W, y, v, cotangents = loss_inputs(B * T, 203, 0.7, 15, masked=0)
    v["advantage"], lengths = np.repeat(v["advantage"][:B], T), rng.integers(1, T + 1, B)
    mask = (np.arange(T) < lengths[:, None]).astype(np.float32)
    rows = {k: torch.tensor(a.reshape(B, T)) for k, a in v.items()}
    rows |= {"taken": torch.tensor(y.reshape(B, T).astype(np.int64)), "mask": torch.tensor(mask)}
    for kind, each in (("grpo", 1 / lengths / B), ("bnpo", 1 / mask.sum()), ("dr_grpo", 1 / (B * T))):
        theirs = liger.LigerFusedLinearGRPOLoss(beta=0.3, compiled=False, epsilon_low=0.2, epsilon_high=0.3,
                                                loss_type=kind, max_completion_length=T, temperature=0.7)
        primals = [torch.tensor(np.asarray(a), requires_grad=True) for a in (h, W)]
        want, _ = theirs(
            primals[0].reshape(B, T, -1), primals[1], rows["taken"], rows["mask"], rows["advantage"][:, 0],
            ref_per_token_logps=rows["ref"], old_per_token_logps=rows["old"],
            vllm_is_ratio=torch.exp(rows["old"] - rows["sampler"]).clamp(max=1.5))
        want.backward()
        wanted = want.detach(), *(p.grad for p in primals)
        v["weight"] = (mask * np.reshape(each, (-1, 1))).ravel().astype(np.float32)
        for impl in IMPLS:
            loss, _, *grads = run_loss(impl, (h, W, y, v, cotangents), 0.7, entropy_bonus=0.0)
            errors[kind, impl] = [*map(relative, (loss, *grads), wanted)]
    check_errors(errors, 1e-4, "grpo, bnpo, dr_grpo: max relative error")

# ---------------------------------------------------------------- train.py
TINY_FLAGS = "--batch 4 --npq 4 --steps 2 --sft_steps 1 --minibatches 2 --eval_n 8 --eval_every 1"
SMALL = dataclasses.replace(TIED, V=40, D=16, F=16, N=4, H=4, L=2)

def arguments(flags):
    """The command line of strings, which are split at blanks, and of lists and paths, which are not."""
    return [str(word) for f in flags
            for word in (f.split() if isinstance(f, str) else f if isinstance(f, list) else [f])]

def run_train(*flags, devices=1, code=0):
    return run(sys.executable, HERE / "train.py", *arguments(flags), code=code,
               JAX_NUM_CPU_DEVICES=str(devices), HF_HOME=os.path.join(scratch().name, "hf"), **compiled())

@cache
def update_case(shape):
    """Weights, and of 16 random rows prompts, answers, advantages and log-probs of the sampler."""
    rng = np.random.default_rng(5)
    weights = {k: random_weight(rng, k, s, shape.D) for k, s in model.shapes(shape).items()}
    prompts, answers = ([rng.integers(0, shape.V, rng.integers(low, high)).tolist() for _ in range(16)]
                        for low, high in ((2, 8), (1, 9)))
    return weights, prompts, answers, rng.standard_normal(16), -3 * rng.random((16, 9))

def batches_of_update(cfg, shape=SMALL, on=None, micro=3, width=16, change=lambda answers: answers):
    """The case's sequences, packed."""
    _, prompts, answers, advantages, sampler = update_case(shape)
    run = SimpleNamespace(mesh=on or mesh(), shape=shape, row_width=width, micro_batch=micro)
    return train.make_batches(prompts, change(answers), advantages, cfg, run, sampler)

def gradient_of_update(batch=None, shape=SMALL, on=None, rate=1e4, micro=3, width=16, **flags):
    """What train.update subtracts, over the rate: with sgd, no clipping, the gradient. Also the metrics."""
    plain = dict(optimizer="sgd", grad_clip=0, dtype="float32", attention="blockwise", max_answer=12,
                 is_cap=1.5)
    cfg, on = train.Config(**plain | flags), on or mesh()
    if batch is None:
        (batch,), _ = batches_of_update(cfg, shape, on, micro, width)
        batch = [rows | {"old": rows["sampler"] - np.float32(0.1) * (rows["weight"] > 0),
                         "ref": rows["sampler"] * np.float32(0.9)} for rows in batch]
    weights = update_case(shape)[0]
    abstract = train.abstract_state(dataclasses.replace(cfg, beta=0.0), shape, on)
    opt = {k: train.optimizer(cfg, k).init(a) for k, a in weights.items()}
    state = {"params": placed(weights, on), "opt": opt}
    state = jax.tree.map(lambda a, like: jax.device_put(a, like.sharding), state, abstract)
    state, parts, norm = train.update(state, batch, rate, cfg=cfg, shape=shape, mesh=on)
    kinds = {a.sharding.memory_kind for a in jax.tree.leaves(state["params"])}
    assert kinds == {"pinned_host" if cfg.offload == "params" else jax.devices()[0].default_memory().kind}
    new, parts = jax.device_get((model.flatten(state["params"]), parts))
    metrics = {k: (max if k.endswith("/max") else sum)(part[k] for part in parts) for k in parts[0]}
    return {k: (weights[k] - a) / rate for k, a in new.items()}, metrics | {"grad_norm": float(norm)}

def padded(rows, total=None):
    """NumPy rows of one sequence each, as a pass that holds them all."""
    return [rows | {"weight": rows["weight"] / np.float32(total or rows["weight"].sum()),
                    "filled": np.array([len(rows["weight"])], np.int32)}]

def test_train_gradient_is_the_same_for_any_split():
    """Of its sequences into rows and passes, over any mesh, whatever is kept, wherever it rests; so are the
    metrics. The base: one sequence a row, all in one pass."""
    one, errors, base = (1, 1, 1), {}, {}
    _, prompts, answers, advantages, sampler = update_case(SMALL)
    for agg, total in ("token", None), ("sequence", 16), ("constant", 16):
        rows = train.make_rows({i: [i] for i in range(16)}, prompts, answers, advantages, (16, 16),
                               train.Config(max_answer=12, loss_agg=agg), sampler)
        rows |= {"old": rows["sampler"] - np.float32(0.1) * (rows["weight"] > 0),
                 "ref": rows["sampler"] * np.float32(0.9)}
        base[agg] = gradient_of_update(padded(rows, total), loss_agg=agg, beta=0.1)
    for agg, dims, micro, width, flags in (
            ("token", one, 1, 16, {}), ("token", one, 4, 32, {"remat": "dots"}),
            ("token", one, 20, 48, {"remat": "none"}),
            ("sequence", one, 3, 24, {}), ("constant", one, 3, 40, {"offload": "optimizer"}),
            ("token", (1, 8, 1), 2, 16, {"offload": "params"}), ("token", (2, 4, 1), 1, 24, {}),
            ("token", (2, 2, 2), 3, 16, {"offload": "params", "remat": "none"}),
            ("token", (8, 1, 1), 2, 32, {}), ("token", one, 1, 208, {"attention": "splash"})):
        flags |= {"loss_agg": agg, "beta": 0.1}
        split, n = gradient_of_update(on=mesh(*dims), micro=micro, width=width, **flags)
        wanted, m = base[agg]
        errors[agg, dims, micro, width, str(flags)] = [relative(split[k], wanted[k]) for k in wanted]
        for k in m:
            assert_allclose(n[k], m[k], rtol=1e-5, atol=0 if k == "loss" and dims != one else 1e-6, err_msg=k)
    check_errors(errors, 1e-5, f"{len(errors)} splits: relative error")

def test_train_answers_do_not_see_each_other():
    """Bit for bit: another answer in one's row, of the same length, changes none of its log-probs."""
    weights, prompts, answers, *_ = update_case(SMALL)
    cfg, changed = train.Config(dtype="float32", max_answer=12, attention="blockwise"), 0
    for i in range(0, 16, 5):
        other = [[(t + 7 * (j == i)) % SMALL.V for t in a] for j, a in enumerate(answers)]
        logps = []
        for which in answers, other:
            (batch,), _ = batches_of_update(cfg, width=64, change=lambda _: which)
            params = placed(weights, mesh())
            logps.append([train.score(params, rows, cfg=cfg, shape=SMALL, mesh=mesh()) for rows in batch])
        before, after = map(np.concatenate, logps)
        rows = {k: np.concatenate([np.asarray(b[k]) for b in batch]) for k in batch[0]}
        mine = np.zeros_like(rows["weight"], bool)
        for r, s in itertools.product(range(len(mine)), range(1, 9)):
            place = rows["segments"][r] == s
            if rows["tokens"][r][place].tolist() == prompts[i] + other[i]:
                mine[r] = place
        valid = rows["weight"] > 0
        assert mine.sum() == len(prompts[i] + answers[i])
        assert_array_equal(before[valid & ~mine], after[valid & ~mine])
        changed += (before[valid & mine] != after[valid & mine]).sum()
        assert len({*rows["segments"][mine.any(1)].ravel()}) > 2, "alone in its row"
    assert changed > 8
    figure(f"{changed} log-probs changed")

def test_train_packing():
    """Of lengths like GSM8K's: each sequence is there once, rows are full, devices have as many."""
    rng, fractions = np.random.default_rng(0), []
    for shards, per_device in (1, 8), (1, 8.4), (1, 8.8), (1, 16), (4, 8), (8, 8), (4, 30):
        cfg = train.Config(dtype="float32", max_answer=1024)
        lengths = np.clip(rng.lognormal(5.6, 0.4, 2000).astype(int), 60, 1400)
        lengths = lengths[:np.searchsorted(lengths.cumsum(), shards * per_device * 2048)]
        shape = dataclasses.replace(SMALL, L=1)
        run = SimpleNamespace(mesh=mesh(1, shards, 1), shape=shape, row_width=2048, micro_batch=16)
        prompts, answers = ([[1] * int(n) for n in part] for part in (lengths // 3, lengths - lengths // 3))
        sampler = [np.zeros(len(a)) for a in answers]
        (batch,), counts = train.make_batches(prompts, answers, np.ones(len(lengths)), cfg, run, sampler)
        filled, width = sum(np.asarray(rows["filled"]) for rows in batch), batch[0]["tokens"].shape[1]
        packed = train.pack(lengths.tolist(), width)
        assert sorted(itertools.chain(*packed)) == list(range(len(lengths)))
        assert all(sum(lengths[i] for i in row) <= width for row in packed) and width in (1920, 2048)
        assert filled.sum() == len(packed) and np.ptp(filled) <= 1, filled
        assert_allclose(sum(float(rows["weight"].sum()) for rows in batch), 1, rtol=1e-5)
        fractions.append(1 - counts["tokens"] / counts["slots"])
        assert counts["tokens"] == lengths.sum() and counts["slots"] >= filled.sum() * width
    assert max(fractions) < 0.1, fractions
    figure("padding " + ", ".join(f"{f:.1%}" for f in fractions))

def test_train_micro_batch_is_found():
    """By few compilations where memory is linear, by more where it is not; none where none fits."""
    asked = []
    def find(gib, most, limit=30.1, told=True):
        asked.clear()
        def need(n):  # a failing TPU compilation tells an estimate
            asked.append(n)
            return (gib(n) if gib(n) <= limit or told else 99.0), gib(n) <= limit
        return train.largest(need, limit, most)[0], len(asked)
    line, bent = lambda n: 7.2 + 0.3 * n, lambda n: 7.2 + 0.28 * n + 0.0002 * n * n + 0.1 * (n % 3)
    assert find(line, 1024) == find(line, 300) == (76, 3) and find(line, 64) == (64, 1)
    assert find(line, 300, told=False)[0] == 76
    for limit in 8.0, 9.9, 17.3, 44.0:
        best = max(n for n in range(1, 999) if bent(n) <= limit)
        for most in 1000, 500, best, best + 1:
            found, count = find(bent, most, limit)
            assert bent(found) <= limit and found >= best - 2 and count <= 12, (limit, found, best, asked)
    assert find(lambda n: 40.0 + n, 64)[0] == 0

def test_train_chooses_what_fits():
    """By the compiler's word for what is here; the search is spared the next time, and mistakes are told."""
    cfg = train.resolve(train.Config(batch=8, npq=8, max_answer=12), mesh())
    choose = lambda micro_batch=0: train.choose_micro_batch(
        dataclasses.replace(cfg, micro_batch=micro_batch), SMALL, mesh(), 32)
    home = mock.patch.dict(os.environ, HOME=str(new_directory()))
    with home, contextlib.redirect_stderr(io.StringIO()) as err:
        train.needed.cache_clear()
        half, whole = (train.needed(n, 32, cfg, SMALL, mesh())[0] for n in (32, 64))
        assert half < whole and choose() == 64
        train.needed.cache_clear()
        with mock.patch.object(model, "device_memory", return_value=(half + whole) / 2):
            found = choose()
            assert 32 <= found < 64 and train.needed(found, 32, cfg, SMALL, mesh())[1]
            with mock.patch.object(train, "needed", side_effect=AssertionError("compiled again")):
                assert choose() == found
            assert choose(found) == found
            assert_raises(SystemExit, choose, 64)
            assert "micro_batch = 64 takes" in err.getvalue(), err.getvalue()
            assert "the largest that fits is --micro_batch " in err.getvalue(), err.getvalue()
        train.needed.cache_clear()
        with mock.patch.object(model, "device_memory", return_value=half / 100):
            assert_raises(SystemExit, choose)
        assert "not one row of 32 tokens per device fits" in err.getvalue(), err.getvalue()
    train.needed.cache_clear()

def test_train_plan():
    """Of eight devices that are here: what is compiled, what lies between; a sweep is a table, and a file."""
    def plan(*flags):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            train.main(arguments(["--plan", *flags]))
        return out.getvalue()
    with contextlib.chdir(new_directory()):
        text = plan("--sweep", "micro_batch=4,8")
        rows = [json.loads(line) for line in Path("plan-here.jsonl").read_text().splitlines()]
        assert [row["micro_batch"] for row in rows] == [4, 8] and 0 < rows[0]["gib"] < rows[1]["gib"]
        assert text.splitlines()[-1] == "largest that fits: micro_batch 8", text
        assert "= 256 sequences per host, in 4 minibatches of at most 8 rows per device" in text, text
        assert "no estimate of the time" in text and os.listdir() == ["plan-here.jsonl"]
        with mock.patch.object(model, "rows_that_fit", return_value=24):  # two waves, of as many rows
            assert "32 rows per device, 16 at once" in plan("--micro_batch 8")
        most = rows[1]["gib"] + (rows[1]["gib"] - rows[0]["gib"]) / 4 * 2.5  # 10 rows, and not 11
        with mock.patch.object(model, "device_memory", return_value=most):
            text = plan("--max_answer 40 --sweep loss_impl=jax".split())
        assert re.search(r"^ +~ +4 .* fits$", text, re.M) and re.search(r"^ +8 .* fits$", text, re.M), text
        assert re.search(r"^ +\d+ .* GiB too much$", text, re.M), text
        assert re.fullmatch(r"largest that fits: micro_batch (9|10|11)", text.splitlines()[-1]), text

def test_train_ends_when_memory_does():
    """With what to do, and what the last whole step left; from there it goes on."""
    whole, count = train.accumulate, []
    def full(*args, **kw):
        count.append(1)
        if len(count) > 2:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate.")
        return whole(*args, **kw)
    flags = arguments(["--sft_steps 0 --steps 3 --batch 4 --npq 4 --eval_data none --save_every 0 --out run"])
    full.lower = whole.lower
    with contextlib.chdir(new_directory()), contextlib.redirect_stdout(io.StringIO()):
        with mock.patch.object(train, "accumulate", full), contextlib.redirect_stderr(io.StringIO()) as err:
            with assert_raises(SystemExit) as end:
                train.main([*flags, "--minibatches", "1"])
        said = err.getvalue()
        assert end.exception.code == 1 and "in step 3: " in said and "step 2 is saved" in said, said
        assert "--micro_batch 1 or --remat full" in said and "Traceback" not in said, said
        assert os.listdir("run/step_000002")
        train.main([*flags, "--minibatches", "1"])
        assert [m["step"] for m in read_jsonl("run/metrics.jsonl")] == [1, 2, 3]

def test_train_update_equals_numpy_for_every_aggregation():
    """Loss and gradient of an untied head, in float64 from the hidden states, weights written down here."""
    shape = dataclasses.replace(SMALL, tied=False)
    weights, prompts, answers, _, sampler = update_case(shape)
    rng, errors, seen = np.random.default_rng(6), {}, Counter()
    rewards = np.array([[1.1] * 4, [0, 0.1, 1.1, 0.1], [1, 0, 0, 0], [0.1, 0.1, 1.1, 1.1]])
    advantages = train.group_advantages(rewards, 4, "grpo")
    assert (advantages[:4] == 0).all() and (advantages[4:] != 0).all()
    lengths = np.array([[len(a)] for a in answers])
    for agg, each in ("token", 1 / lengths.sum()), ("sequence", 1 / lengths / 16), ("constant", 1 / 16 / 12):
        cfg = train.Config(max_answer=12, loss_agg=agg)
        alone = {i: [i] for i in range(16)}
        rows = train.make_rows(alone, prompts, answers, advantages, (16, 16), cfg, sampler)
        hidden = hidden_states(placed(weights, mesh()), shape, *(
            rows[k].tolist() for k in ("tokens", "positions", "segments")))
        h, W = np.asarray(hidden).reshape(-1, shape.D), weights["head_VD"]
        y, mask = rows["targets"].reshape(-1), rows["weight"].reshape(-1) > 0
        logp = special.log_softmax(h.astype(np.float64) @ W.T / 0.7, -1)[np.arange(len(y)), y]
        for k, spread in (("old", 0.5), ("ref", 1.0)):  # close enough that some ratios are within the clip
            noisy = np.where(mask, logp + rng.uniform(-spread, spread, len(y)), 0)
            rows[k] = noisy.astype(np.float32).reshape(rows["tokens"].shape)
        total = {"token": None}.get(agg, 16)
        got, m = gradient_of_update(padded(rows, total), shape, loss_agg=agg, beta=0.1, temperature=0.7)
        v = {k: a.reshape(-1) for k, a in (rows | {"weight": (rows["weight"] > 0) * each}).items()}
        knobs = dict(clip_low=0.2, clip_high=0.28, beta=0.1, is_cap=1.5, entropy_bonus=0.0)
        loss_N, _, _, dW, cases = numpy_loss(h, W, y, v, np.zeros((2, len(y))), 0.7, **knobs)
        assert_allclose(m["loss"], loss_N.sum(), rtol=1e-5, atol=1e-6)  # a sum of terms of either sign
        errors[agg] = relative(got["head_VD"], dW)
        seen += cases
    assert min(seen["above", True], seen["below", False], seen["within", True]) > 3, seen
    check_errors(errors, 1e-5, "relative error")

def test_train_supervised_update_is_maximum_likelihood():
    """By the textbook: full logits, log-softmax, mean over answer tokens."""
    weights, prompts, answers, *_ = update_case(SMALL)
    rows = train.make_rows({i: [i] for i in range(4)}, prompts, answers, np.ones(4), (4, 16), train.Config())
    got, m = gradient_of_update(padded(rows))
    def nll(params):
        logp = []
        for prompt, answer in zip(prompts[:4], answers[:4]):
            tokens = np.array([prompt + answer])
            positions = np.arange(tokens.size)[None]
            hidden = textbook_hidden(params, SMALL, tokens, positions, np.ones_like(tokens))
            z = hidden[0, len(prompt) - 1:-1] @ model.head(params).T
            logp.append(jax.nn.log_softmax(z)[np.arange(len(answer)), np.array(answer)])
        return -jnp.concatenate(logp).mean()
    value, wanted = jax.jit(jax.value_and_grad(nll))(placed(weights, mesh()))
    assert_allclose(m["nll"] / sum(map(len, answers[:4])), value, rtol=1e-5)
    check_errors({k: relative(got[k], a) for k, a in model.flatten(wanted).items()}, 1e-5, "relative error")

def test_train_optimizer_and_schedule():
    weights, prompts, answers, *_ = update_case(SMALL)
    matrices = lambda params: {k: not ("norm" in k or "/b" in k) for k in params}
    alone = {i: [i] for i in range(16)}
    rows = padded(train.make_rows(alone, prompts, answers, np.ones(16), (16, 16), train.Config()))
    grads, _ = gradient_of_update(rows)
    norm = math.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in grads.values()))
    for name, decay, wanted in (("adamw", 0.1, optax.adamw(0.01, b2=0.9, weight_decay=0.1, mask=matrices)),
                                ("lion", 0.0, optax.lion(0.01, b2=0.9, weight_decay=0.0))):
        flags = dict(optimizer=name, b2=0.9, weight_decay=decay, grad_clip=1e-3)
        got, m = gradient_of_update(rows, rate=0.01, **flags)
        assert_allclose(m["grad_norm"], norm, rtol=1e-5)
        clipped = {k: g * 1e-3 / norm for k, g in grads.items()}
        step, _ = wanted.update(clipped, wanted.init(weights), weights)
        for k in step:
            assert_allclose(weights[k] - 0.01 * got[k], weights[k] + step[k], atol=2e-4, err_msg=k)
    rate = lambda **flags: [train.learning_rate(train.Config(**flags), s) for s in range(1, 7)]
    assert_allclose(rate(lr=4.0, steps=6, warmup=2), [2, 4, 4, 4, 4, 4])
    assert_allclose(rate(lr=5.0, steps=6, warmup=2, decay="linear"), [2.5, 5, 4, 3, 2, 1])
    assert_allclose(rate(lr=8.0, sft_lr=2.0, sft_steps=3, steps=3, warmup=2), [1, 2, 2, 4, 8, 8])
    assert_allclose(rate(lr=2.0, steps=6, warmup=0, decay="cosine"), 1 + np.cos(np.arange(1, 7) * np.pi / 7))

def test_train_advantages():
    r = np.array([[1.1, 0.1, 0.1, 0.0], [1.1, 1.1, 1.1, 1.1], [0.3, 0.3, 0.3, 0.3]])
    off, others = r[0] - r[0].mean(), [np.delete(r[0], i).mean() for i in range(4)]
    for kind, wanted in dict(grpo=off / math.sqrt(np.mean(off ** 2)), drgrpo=off, rloo=r[0] - others).items():
        a = train.group_advantages(r.reshape(-1), 4, kind).reshape(3, 4)
        assert_allclose(a[0], wanted, rtol=1e-12)
        assert (a[1:] == 0).all(), "equal rewards, which round, must give exactly nothing"

EXTRACTION = {  # a number: the texts whose final number it is
    2: ["(3)-2"], 3: ["1,2,3", r"\boxed{x^{2} + {3}} 9"], 7: ["007"], 50: ["50%", r"\boxed{50\%}"],
    5: ["10-5", "10 - 5 = 5", "<answer>5", "<answer>3 <answer>5</answer> 9</answer>", r"\boxed{1} \boxed{5}",
        "<answer><answer>5</answer></answer>", "<answer>4</answer> <answer>5</answer>", r"\boxed{5",
        "first 9 <answer> 5 apples </answer> then 8", "<answer>5</answer> <answer></answer>", "#### $5.00",
        r"<answer>\boxed{5}</answer>", r"\boxed{\text{5 apples}}", "#### 1\n#### 5\nyes 7"],
    -5: ["-5", "x = -5.", "-$5", "$-5", "\u22125", "-\u20ac5", "-\u00a35"], 18: ["The answer is 18."],
    42: ["<answer>42</answer>", r"\boxed{42}", "so\n#### 42", "it is 7, no, 42"], 12345: [r"12\,345"],
    1450: ["$1,450", "It costs $1,450.", r"\boxed{1{,}450}", r"\$1,450", "1450.0"], 20: ["10%-20%"],
    "1/2": ["1/2", r"\boxed{\frac{1}{2}}", ".5", "1,000/2,000"], 12345678: ["12,345,678 people"],
    25: ["<answer>25 m^2</answer>", r"\boxed{25\text{ cm}^2}"], "7/2": ["3.50", "$3.50"], "3/5": ["1.5/2.5"],
    None: ["5/0", "no number", "", "<answer>none</answer> 5", "<answer></answer>", "9" * 5000],
    "3/4": [r"\frac{1.5}{2}"]}

def test_train_extraction():
    for number, texts in EXTRACTION.items():
        wanted = None if number is None else fractions.Fraction(number)
        for text in texts:
            assert train.final_number(text) == wanted, (text[:60], train.final_number(text), wanted)
    assert train.correct("", "#### 1,450", "so it is <answer>$1450.00</answer>") == 1
    assert train.correct("", "#### 1450", "<answer>1451</answer> 1450") == 0
    assert train.correct("", "no number", "no number") == 0
    for text, right in {"1+1 <answer>2</answer>\n": 1, "2": 0, "<answer>2": 0, "<answer>2</answer> so": 0,
                        "<answer>x</answer>": 0, "<answer>1</answer><answer>2</answer>": 0}.items():
        assert train.formatted("", "", text) == right, text

def test_train_extraction_of_all_gsm8k_solutions():
    rows = [row for part in ("train", "test") for row in read_jsonl(shared(f"gsm8k/{part}.jsonl"))]
    for answer in (row["answer"] for row in rows):
        marked = answer.split("####")[1].strip().replace(",", "")
        assert train.final_number(answer) == fractions.Fraction(marked), answer
    assert len(rows) == 8792, len(rows)
    figure(f"{len(rows)} solutions")

# The published chat template of Qwen2.5-Instruct, without its branches for tools.
QWEN_TEMPLATE = """{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.' }}
    {{- '<|im_end|>\\n' }}
{%- endif %}{%- for message in messages %}{%- if message.role != "system" or not loop.first %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

def test_train_chat_template():
    transformers, = need("transformers")
    path = str(shared("qwen2.5/tokenizer.json"))
    hf = transformers.PreTrainedTokenizerFast(tokenizer_file=path, chat_template=QWEN_TEMPLATE)
    ours = tokenizers.Tokenizer.from_file(path)
    for system, question in (("Be brief.", "What is 2 + 2?"), ("", "  spaces \n and\nlines \u00e9\U0001f600"),
                             (train.Config.system, "How much is $1,450 - 5%?")):
        messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        text = hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert train.chat(system, question) == text
        assert ours.encode(text, add_special_tokens=False).ids == hf.encode(text, add_special_tokens=False)
    assert ours.encode("hello").ids == [14990]

def test_train_arithmetic_questions():
    seen, held_out = train.arith(False), train.arith(True)
    pair = lambda row: tuple(sorted(map(int, re.findall(r"\d+", row["question"]))))
    assert (len(seen), len(held_out)) == (20000, 2000) and not {*map(pair, seen)} & {*map(pair, held_out)}
    for row in seen + held_out:
        assert train.final_number(row["answer"]) == sum(pair(row)), row
    wrong = np.mean([train.final_number(r["demonstration"]) != sum(pair(r)) for r in seen])
    assert 0.5 < wrong < 0.75, wrong
    assert train.worked_sum(159, 855) == "9+5+0=14 5+5+1=11 1+8+1=10 <answer>1014</answer>"
    figure(f"{wrong:.1%} of the demonstrations are wrong")

def test_train_reads_a_data_set_with_splits():
    directory = new_directory()
    for split, n in (("train", 3), ("test", 2)):
        rows = [json.dumps({"question": f"{split} {i}?", "answer": i}) for i in range(n)]
        (directory / f"{split}.jsonl").write_text("\n".join(rows))
    for split, n in (("train", 3), ("test", 2)):
        wanted = [{"question": f"{split} {i}?", "answer": str(i)} for i in range(n)]
        assert train.load_rows(str(directory), split == "test") == wanted

def test_train_wandb():
    """A login that fails is one line; metrics of every step arrive."""
    out, wandb, before = new_directory() / "run", mock.Mock(), sys.modules.get("wandb")
    flags = TINY_FLAGS, "--batch 8 --wandb project --out", out
    wandb.init.side_effect = [ValueError("api_key not configured (no-tty)\nmore about it"), wandb.run]
    sys.modules["wandb"] = wandb
    try:
        assert "api_key not configured" in refused(*flags)
        train.main(arguments(flags))
    finally:
        sys.modules.pop("wandb") if before is None else sys.modules.update(wandb=before)
    logged = {call.kwargs["step"]: call.args[0] for call in wandb.run.log.call_args_list}
    assert list(logged) == [1, 2, 3] and "reward/mean" in logged[3] and "nll" in logged[1]

def test_train_question_order():
    epochs = [train.question_order(3, e * 10, 10, 10) for e in range(3)]
    assert all(sorted(e) == list(range(10)) for e in epochs) and epochs[0] != epochs[1]
    assert train.question_order(3, 0, 30, 10) == sum(epochs, [])  # one walk, however hosts and steps cut it
    assert train.question_order(4, 0, 10, 10) != epochs[0]

def test_train_rewards_that_hang_score_zero():
    """In a loop, in one that catches all, in a regular expression and asleep, in which order ever."""
    def loops(question, reference, answer):
        while answer == "loop":
            pass
        return 1
    def catches(question, reference, answer):
        while answer == "loop":
            try:
                sum(range(999))
            except Exception:
                pass
        return 1
    def backtracks(question, reference, answer):
        return not re.match("(a+)+$", "a" * 40 + "b" * (answer == "loop")) or answer == "loop"
    def sleeps(question, reference, answer):
        try:
            time.sleep(99 * (answer == "loop"))
        except BaseException:
            time.sleep(99)
        return 1
    functions, rows = [loops, catches, backtracks, sleeps], [{"question": "q", "answer": "5"}] * 3
    before, began = signal.getsignal(signal.SIGALRM), time.monotonic()
    with mock.patch.object(train, "REWARD_SECONDS", 0.2):
        scores, faults = train.score_answers(functions, rows, ["5", "loop", "6"], [False] * 3)
    assert_array_equal(scores[1], [0, 0, 0, 0])
    assert_array_equal(scores[[0, 2]][:, [0, 1, 3]], np.ones((2, 3)))
    assert {k: v[1] for k, v in faults.items()} == dict.fromkeys(
        [f.__name__ for f in functions], "TooSlow: no score within 0.2 s"), faults
    assert signal.getsignal(signal.SIGALRM) == before and signal.getitimer(signal.ITIMER_REAL)[0] == 0
    figure(f"4 hang, of 0.2 s each, {time.monotonic() - began:.1f} s in all")

def test_train_asks_the_hub_again():
    """Where it does not answer, not where it says no."""
    hub, errors = need("huggingface_hub", "huggingface_hub.errors")
    absent, refusal = errors.LocalEntryNotFoundError("no answer"), errors.HFValidationError("no such name")
    for replies, asked in ([absent, absent, "here"], 3), ([absent] * 9, 3), ([refusal] * 9, 1):
        ask = mock.Mock(side_effect=replies)
        with mock.patch.object(hub, "snapshot_download", ask), mock.patch("time.sleep") as slept:
            if "here" in replies:
                assert train.model_directory(train.Config(model="a/b"), "*.json") == "here"
            else:
                assert str(replies[0]) in refused("--model a/b --out", new_directory() / "run")
        assert ask.call_count == asked and sum(call.args[0] for call in slept.call_args_list) <= 10
    for reply in ConnectionError("Couldn't reach it"), ValueError("no such data"):
        with mock.patch("datasets.load_dataset", side_effect=reply):
            text = refused("--data a/b --out", new_directory())
            assert f"a/b cannot be loaded: {train.first_line(reply)}" in text, text

def test_train_refuses_a_bad_environment():
    """What only a process of its own can meet: other devices, no home, no UTF-8."""
    flags = sys.executable, HERE / "train.py", "--steps", "0", "--sft_steps", "0", "--eval_n", "1", "--out"
    for env, words in [({"JAX_PLATFORMS": "nonsense"}, "JAX_PLATFORMS = 'nonsense'"),
                       ({"JAX_PLATFORMS": "cuda"}, "try JAX_PLATFORMS=cpu")]:
        text = run(*flags, new_directory() / "run", code=2, **env)
        assert words in text and "Traceback" not in text, text
    data = new_directory() / "rows.jsonl"
    data.write_text('{"question": "What is \u00fc?", "answer": 5}', encoding="utf-8")
    bare = {"HOME": "/nowhere", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    for env in bare, {"HOME": ""}:
        text = run(*flags, new_directory(), "--data", data, "--eval_data", data, **env)
        assert "held-out questions solved" in text and "What is" in text, text

def test_train_rewards_that_fail_score_zero():
    def raises(question, reference, answer):
        return 1 / (answer != "bad")
    def silly(question, reference, answer):
        return {"nan": float("nan"), "text": "much"}.get(answer, 0.5)
    rows, answers = [{"question": "q", "answer": "5"}] * 5, ["5", "bad", "nan", "text", "5"]
    scores, faults = train.score_answers([raises, raises, silly], rows, answers, [False] * 4 + [True])
    assert_array_equal(scores, [[1, 1, 0.5], [0, 0, 0.5], [1, 1, 0], [1, 1, 0], [0, 0, 0]])
    assert {k: len(v) for k, v in faults.items()} == {"raises": 1, "silly": 2}, faults
    assert "ZeroDivisionError" in faults["raises"][1]

def test_train_rows():
    cfg = train.Config(loss_agg="sequence", max_answer=4)
    rows = train.make_rows({0: [1, 0]}, [[4], [5, 6, 7]], [[3], [8, 9]], [2, 0.5], (1, 8), cfg,
                           sampler=[[-3, 99], [-1, -2, 99, 99]])
    assert {k: a.tolist() for k, a in rows.items()} == dict(
        tokens=[[5, 6, 7, 8, 9, 4, 3, 0]], positions=[[0, 1, 2, 3, 4, 0, 1, 0]],
        segments=[[1, 1, 1, 1, 1, 2, 2, 0]], targets=[[0, 0, 8, 9, 0, 3, 0, 0]],
        weight=[[0, 0, .5, .5, 0, 1, 0, 0]], advantage=[[0, 0, .5, .5, 0, 2, 0, 0]],
        sampler=[[0, 0, -1, -2, 0, -3, 0, 0]])

def without_times(rows):
    timed = ("time/", "throughput/", "rollout/", "memory/", "mfu")
    return [{k: v for k, v in m.items() if not k.startswith(timed)} for m in rows]

def test_train_end_to_end_and_resume():
    out = new_directory() / "run"
    flags = TINY_FLAGS, "--save_every 1 --keep 9 --beta 0.1 --out", out
    text = run_train(*flags, "--mesh 2,2,2", devices=8)
    for wanted in ("sft 1/3 | nll", "step 3/3 | reward", "held-out questions solved", f"{out}/final"):
        assert wanted in text, text
    assert [text.count(f"tracing {what}") for what in ("accumulate", "score", "decode")] == [2, 1, 2], text
    whole, final = read_jsonl(out / "metrics.jsonl"), load_file(out / "final/model.safetensors")
    assert [m["step"] for m in whole] == [1, 2, 3] and all("eval/solved" in m for m in whole)
    names = """step reward/mean reward/std reward/correct reward/formatted solved len/prompt len/answer
        len/answer_max truncated group/zero_variance loss kl entropy clip_fraction ratio/max logprob_gap/mean
        logprob_gap/max grad_norm lr valid_tokens padding_fraction micro_batch mfu time/rollout_s
        time/reward_s time/update_s time/step_s time/train/step_avg_last10_s
        throughput/train/valid_tokens_per_s
        rollout/tokens_per_s eval/solved memory/train/bytes_in_use_max_gib
        memory/train/peak_bytes_in_use_max_gib""".split()
    assert set(names) <= whole[-1].keys(), set(names) - whole[-1].keys()
    assert whole[-1]["logprob_gap/max"] < 1e-4, "sampler and trainer disagree"
    assert "is finished" in run_train(*flags, devices=8)
    for kept in 1, 0:
        for name in ("final", *(f"step_00000{n}" for n in range(kept + 1, 4))):  # killed after so many
            shutil.rmtree(out / name)
        with open(out / "samples.jsonl", "ab") as f:
            f.write(b'{"step": 1, "answer": "\xe4\xb8')  # half a line, half a character
        text = run_train(*flags, "--mesh 2,2,2", devices=8)
        assert (f"resuming {out} after step {kept}" in text) == (kept > 0), text
        again = read_jsonl(out / "metrics.jsonl")
        assert without_times(again) == without_times(whole)
        jax.tree.map(assert_array_equal, load_file(out / "final/model.safetensors"), final)
    figure("resumed run bit for bit the undisturbed one")

@cache
def taught():
    """A model that writes answers, some of them right, so that what is trained from it earns rewards."""
    run_train("--steps 0 --sft_steps 60 --batch 8 --eval_data none --out", out := new_directory())
    return out / "final"

def lives(steps):
    """The flags of a run to disturb: supervised steps, then so many with advantages and clipping."""
    return (f"--model {taught()} --data arith --system= --max_prompt 32 --max_answer 40 --lr 3e-4 "
            "--sft_lr 1e-3 --batch 4 --npq 4 --sft_steps 3 --minibatches 2 --eval_n 8 --eval_every 3 "
            f"--beta 0.1 --entropy_bonus 0.01 --save_every 2 --steps {steps}")

def start_run(out, processes=1, flags="", log=None):
    """The processes of a run, their lines in a file beside `out` or another."""
    port, env = 20000 + os.getpid() * 8 % 9000, os.environ | compiled() | dict(
        JAX_PLATFORMS="cpu", JAX_NUM_CPU_DEVICES=str(4 // processes), PYTHONUNBUFFERED="1")
    flags = arguments([flags or lives(9), "--batch", 4 // processes, "--out", out])
    def start(i, log):
        together = f"--coordinator=127.0.0.1:{port}", f"--processes={processes}", f"--process_id={i}"
        return subprocess.Popen([sys.executable, HERE / "train.py", *flags, *together * (processes > 1)],
                                env=env, stdout=log, stderr=subprocess.STDOUT)
    with open(log or f"{out}.log", "w") as f:
        return [start(i, f) for i in range(processes)]

def until(moment, runs):
    """Wait until moment() or the end of a process -> are they still there?"""
    while not moment() and all(process.poll() is None for process in runs):
        time.sleep(0.002)
    return all(process.poll() is None for process in runs)

def disturbed(out, kills, processes, flags, seed=0):
    """Run to the end, as often as that takes: first ended by SIGTERM, then killed `kills` times, after some
    steps at a time, or as the next checkpoint is being written -> how often each was. One that is killed
    brings the others down."""
    rng, struck, log = np.random.default_rng(seed), Counter(), Path(f"{out}.log")
    said = lambda text: re.findall(text, log.read_text(errors="replace") if log.exists() else "")
    while True:
        runs, last, steps = start_run(out, processes, flags), sum(struck.values()) > kills, rng.integers(1, 6)
        alive = until(lambda: not last and len(said(r"\| gnorm")) >= steps, runs)
        if alive and not struck:
            began = time.time()
            for process in runs:
                process.terminate()
            codes = [process.wait(60) for process in runs]
            took = time.time() - began
            assert codes == [143] * processes and took < 30, (codes, took)  # as long as a spot VM has
            assert said("ended by SIGTERM: step ") and not said("Traceback"), log.read_text()
            struck[f"SIGTERM ({took:.1f} s)"] += 1
        elif alive:
            kind = "in a save" if struck["in a save"] < sum(struck.values()) / 3 else "at a time"
            end = time.time() + rng.uniform(0, processes / 2)
            alive = until(lambda: glob.glob(f"{out}/step_*/*.tmp") if kind == "in a save" else
                          time.time() > end, runs)
            victim = runs[rng.integers(processes)]
            victim.kill()
            began = time.time()
            codes = [process.wait(120) for process in runs]
            assert all(codes) and time.time() - began < 60, (codes, time.time() - began, log.read_text())
            print(f"killed {kind}, after {said('(?:sft|step) .*/.*gnorm')[-1]}", flush=True)
            struck[kind] += 1
        else:
            codes = [process.wait(120) for process in runs]
            assert not any(codes), (codes, log.read_text())
            assert last, f"it ended after {struck}"
            return struck

def same_run(out, calm):
    """Metrics and final weights, bit for bit; metrics of every step, once."""
    rows, wanted = (read_jsonl(run / "metrics.jsonl") for run in (out, calm))
    assert [m["step"] for m in rows] == [*range(1, len(wanted) + 1)], [m["step"] for m in rows]
    assert without_times(rows) == without_times(wanted)
    jax.tree.map(assert_array_equal, *(load_file(run / "final/model.safetensors") for run in (out, calm)))
    count = lambda run: len((run / "samples.jsonl").read_text().splitlines())
    assert count(out) == count(calm), "samples lost or repeated"

@cache
def calm_run(processes, flags=""):
    out = new_directory() / "calm"
    ends = [process.wait(900) for process in start_run(out, processes, flags)]
    assert not any(ends), Path(f"{out}.log").read_text()
    return out

def check_kills(kills, processes, others=""):
    flags = f"{lives(8 * (kills + 1))} {others}"  # enough for as many lives
    calm = calm_run(processes, flags)
    learning = [m for m in read_jsonl(calm / "metrics.jsonl") if m.get("group/zero_variance", 1) < 1]
    assert len(learning) > 2 * kills, "no group's answers differ in reward: advantages are 0"
    struck = disturbed(calm.parent / "killed", kills, processes, flags)
    same_run(out := calm.parent / "killed", calm)
    figure(f"{processes} processes, ended: " + ", ".join(f"{n} {k}" for k, n in struck.items()))
    return out

def test_train_killed_runs_are_the_undisturbed_one():
    """And the last checkpoint loads in transformers, with the same greedy answers."""
    out = check_kills(3, 1)
    torch, transformers = need("torch", "transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out / "final", dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out / "final")
    prompts = [tokenizer(train.chat("", row["question"])).input_ids for row in train.arith(True)[:8]]
    params, cfg = load(out / "final")
    ours = generate(params, cfg, prompts, 24, temperature=0)
    for i, prompt in enumerate(prompts):
        ids = theirs.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0, len(prompt):]
        assert ids.tolist() == ours["tokens_BT"][i, :ours["lengths_B"][i]].tolist()

def test_train_killed_processes_bring_all_down_and_resume():
    check_kills(1, 2, "--sft_steps 0 --eval_data none")  # all but process 0 compile in each life anew

def test_train_ends_when_a_host_falls_silent():
    """Process 0 stops, its connections stay open, as when a host loses its power."""
    log = (out := new_directory() / "run").with_suffix(".log")
    runs = start_run(out, 2, lives(99))
    try:
        assert until(lambda: "| gnorm" in log.read_text(errors="replace"), runs), log.read_text()
        runs[0].send_signal(signal.SIGSTOP)
        began = time.time()
        assert runs[1].wait(60)  # its exit code
        figure(f"the other ended with {runs[1].returncode} after {time.time() - began:.0f} s")
    finally:
        for process in runs:
            process.kill()
            process.wait()

def soak_kills():
    check_kills(20, 1)
    check_kills(20, 4)

def test_train_heeds_the_notice_of_a_preemption():
    """As Google's metadata server gives it: at first no answer, then FALSE, then TRUE."""
    class Metadata(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append((self.path, self.headers["Metadata-Flavor"]))
            self.send_response(503 if len(asked) == 1 else 200)
            self.end_headers()
            self.wfile.write(b"TRUE" if len(asked) > 2 else b"FALSE")
        def log_message(self, *_):
            pass
    asked, run = [], SimpleNamespace(signal=0)
    server = http.server.HTTPServer(("127.0.0.1", 0), Metadata)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    address = mock.patch.dict(os.environ, GCE_METADATA_HOST=f"127.0.0.1:{server.server_port}")
    try:
        with address, mock.patch.object(train, "PATIENCE", 0.1):
            train.watch_signals(run)
            assert until(lambda: run.signal, []) and run.signal == signal.SIGTERM
            with assert_raises(train.Stop):
                train.pause(run)
    finally:
        server.shutdown()
        for number, handler in before.items():
            signal.signal(number, handler)
    assert {*asked} == {("/computeMetadata/v1/instance/preempted?wait_for_change=true", "Google")}

def test_train_passes_over_damaged_checkpoints():
    """Any flipped bit, a file cut, lost or of another run, an empty directory: named; nothing is deleted."""
    out, rng, tree = new_directory(), np.random.default_rng(0), {"a": jnp.arange(999.0), "n": jnp.int32(3)}
    def write(step, parts=range(4), **about):
        for i in parts:
            ours = mock.patch.multiple(jax, process_index=lambda: i, process_count=lambda: 4)
            shards, directory = model.shards_of(tree), out / f"step_{step:06}"
            with ours:
                model.save_shards(shards, directory, {"run": "7"} | about)
    def newest():
        before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
        with contextlib.redirect_stderr(io.StringIO()) as err:
            step, files, _ = train.newest_checkpoint(train.Config(out=str(out)))
        assert before == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
        assert all(f"step_{step:06}" in path for path in files)
        return step, err.getvalue()
    write(1), write(2)
    assert newest() == (2, "")
    victim = out / "step_000002/shards-00002-of-00004.safetensors"
    good, cases = victim.read_bytes(), {}
    for i in [*range(16), *rng.integers(0, len(good), 60).tolist()]:
        cases[f"byte {i}"] = good[:i] + bytes([good[i] ^ 1 << int(rng.integers(8))]) + good[i + 1:]
    cases |= {f"cut at {n}": good[:n] for n in (0, 5, 100, len(good) - 1)}
    cases |= {"more": good + b"x", "none": None}
    for what, data in cases.items():
        edit(victim, data)
        step, said = newest()
        assert step == 1 and said.count("step 2 is passed over") == 1 and "step_000002" in said, (what, said)
        assert (victim.name if data is not None else "has 3 of the files of 4") in said, (what, said)
        victim.write_bytes(good)
    write(2, [2], run="8")
    assert newest()[0] == 1
    write(2, run="9")
    assert newest() == (2, "")
    for path in (out / "step_000002").iterdir():
        path.unlink()
    assert "step_000002 has no shards" in newest()[1]
    (out / "step_000001" / victim.name).unlink()
    with assert_raises(SystemExit), contextlib.redirect_stderr(io.StringIO()) as err:
        train.newest_checkpoint(train.Config(out=str(out)))
    assert "another number of processes than 1" in err.getvalue(), err.getvalue()
    figure(f"{len(cases) + 3} damages")

def test_train_resumes_on_other_meshes():
    """Saved on 8 devices, one process; the next step's loss on 4, on 1, on 2,2,2, on two processes."""
    out, flags = new_directory() / "run", [
        TINY_FLAGS, "--sft_steps 3 --beta 0.1 --entropy_bonus 0.1 --save_every 1 --keep 9 --eval_data none",
        "--out"]
    run_train(*flags, out, devices=8)
    losses, errors = [m["loss"] for m in read_jsonl(out / "metrics.jsonl")], {}
    assert min(map(abs, losses)) > 0.1, losses
    for name in "final", "step_000003", "step_000004", "step_000005":
        shutil.rmtree(out / name)
    for n, devices, on in (1, 4, "auto"), (1, 1, "auto"), (1, 8, "2,2,2"), (2, 4, "auto"):
        copy = new_directory(like=out)
        text = launch("cpu --processes", n, *flags, copy, "--mesh", on, "--batch", 4 // n,
                      JAX_NUM_CPU_DEVICES=str(devices))
        assert f"resuming {copy} after step 2" in text, text
        again = read_jsonl(copy / "metrics.jsonl")
        errors[n, devices, on] = [abs(m["loss"] - loss) for m, loss in zip(again, losses, strict=True)]
    text = launch("cpu --processes 2", *flags, out, JAX_NUM_CPU_DEVICES="4", code=2)
    assert "batch * processes was 4, is 8" in text, text
    check_errors(errors, 1e-5, "loss within")

def test_train_goes_on_when_the_disk_is_full():
    """A disk of 50 MB, filled after the first checkpoint, with room again later: all metrics, once."""
    disk = new_directory()
    mount = ["mount", "-t", "tmpfs", "-o", "size=50m", "tmpfs", disk]
    if subprocess.run(mount, capture_output=True).returncode:
        raise SkipTest("needs the right to mount a disk")
    out, filler, log = disk / "run", disk / "filler", new_directory() / "log"
    said = lambda text: log.exists() and log.read_text(errors="replace").count(text)
    try:
        process = start_run(out, log=log)[0]
        assert until(lambda: (out / "step_000002").exists() and not any(out.glob("step*/*.tmp")), [process])
        with contextlib.suppress(OSError), open(filler, "wb", buffering=0) as f:
            while f.write(bytes(10_000)):
                pass
        alive = until(lambda: said("cannot be saved") and said("lines wait"), [process])
        kept, _, _ = train.newest_checkpoint(train.Config(out=str(out)))
        assert alive and kept and said("No space left"), log.read_text()
        filler.unlink()
        assert process.wait(300) == 0, log.read_text()
        same_run(out, calm_run(1))
        figure(f"step {kept} stayed whole; {said('cannot be saved')} were not saved")
    finally:
        subprocess.run(["umount", "--lazy", disk])

def test_train_lines_that_wait_for_room_outlive_a_kill():
    """The disk takes no lines of some steps; the run ends after step 3, in two ways, before or after it takes
    them; what waits is in the checkpoint, and found once in the resumed run's files."""
    flags, real_finish, real_open = arguments([lives(3), "--out run"]), train.finish, open
    def finish(step, state, metrics, cfg, run):
        now["full"] = step in now["steps"]
        real_finish(step, state, metrics, cfg, run)
        if step == 3 and now["end"] == "kill":
            train.settle(cfg, run)
            raise KeyboardInterrupt
        if step == 3 and now["end"] == "signal":
            signal.raise_signal(signal.SIGTERM)
    def open_or_fail(path, mode="r", *args, **options):
        if now["full"] and mode == "ab":
            raise OSError(28, "No space left on device")
        return real_open(path, mode, *args, **options)
    top = new_directory()
    for i, (steps, end) in enumerate([((), ""), ((2,), "kill"), ((2, 3), "signal")]):
        (top / str(i)).mkdir()
        with (contextlib.chdir(top / str(i)), mock.patch.object(train, "finish", finish),
              mock.patch.object(train, "open", open_or_fail, create=True)):
            now = dict(steps=steps, end=end, full=False)
            if end:
                with assert_raises((KeyboardInterrupt, SystemExit)):
                    train.main(flags)
                now = dict(steps=(), end="", full=False)
                missing = [m["step"] for m in read_jsonl("run/metrics.jsonl")] == [1]
                assert missing == (steps == (2, 3)), (steps, end)
            train.main(flags)
        same_run(top / str(i) / "run", top / "0/run")

def test_train_skips_what_is_not_finite():
    """Such an update changes nothing, bit for bit; it is counted; ten in a row end the run."""
    cfg = train.Config(dtype="float32", attention="blockwise", loss_impl="jax", max_answer=12)
    ((batch,), _), (weights, *_) = batches_of_update(cfg), update_case(SMALL)
    for name, value in ("advantage", np.nan), ("weight", np.inf), ("weight", 0.1):
        opt = {k: train.optimizer(cfg, k).init(jnp.asarray(a)) for k, a in weights.items()}
        state = {"params": placed(weights, mesh()), "opt": opt}
        bad = [batch[0] | {name: batch[0][name].at[0].set(value)}, *batch[1:]]
        before = jax.device_get((model.flatten(state["params"]), opt))
        new, _, norm = train.update(state, bad, 0.1, cfg=cfg, shape=SMALL, mesh=mesh())
        after = jax.device_get((model.flatten(new["params"]), new["opt"]))
        if np.isfinite(value):
            assert np.isfinite(norm) and (after[0]["norm_D"] != before[0]["norm_D"]).any()
        else:
            assert np.isnan(norm), (name, value)
            jax.tree.map(assert_array_equal, before, after)
    flags = arguments(["--batch 4 --npq 4 --sft_steps 2 --steps 9 --minibatches 2 --save_every 1",
                       "--eval_data none --out"])
    real, count = train.group_advantages, Counter()
    def spoilt(*args):
        count["calls"] += 1
        if count["calls"] == ended:
            signal.raise_signal(signal.SIGTERM)
        return real(*args) * (np.nan if count["calls"] in bad_steps else 1) + (
            np.nan if count["calls"] in bad_steps else 0)
    with contextlib.chdir(new_directory()), mock.patch.object(train, "group_advantages", spoilt):
        with contextlib.redirect_stdout(io.StringIO()):
            bad_steps, ended = {2}, 13
            train.main([*flags, "once"])
            rows = read_jsonl("once/metrics.jsonl")
            assert [m["skipped"] for m in rows] == [0] * 3 + [2] + [0] * 7 and rows[3]["loss"] is None, rows
            bad_steps = range(99)
            for _ in range(2):  # the run and, after a signal in step 6, the rest of it
                with assert_raises(SystemExit) as end, contextlib.redirect_stderr(io.StringIO()) as err:
                    train.main([*flags, "always"])
    text = err.getvalue()
    assert end.exception.code == 1 and "10 updates in a row, up to step 7" in text, text
    assert "always/step_000006; " in text and "Traceback" not in text, text

def check_soak(steps, growth):
    """So many steps of the tiny model: memory from the second quarter to the last; traces after 100 steps."""
    out, used, trace = new_directory() / "run", {}, {}
    flags = f"--sft_steps 0 --steps {steps} --minibatches 1 --npq 4 --eval_data none --save_every 50"
    process, log = start_run(out, flags=flags)[0], Path(f"{out}.log")
    while process.poll() is None:
        text = log.read_text()
        step = text.count(" | reward ")
        trace.update({n: step for n in range(len(trace), text.count("tracing"))})
        with contextlib.suppress(OSError, IndexError):
            used[step] = int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * 4096 / 2 ** 20
        time.sleep(0.05)
    assert process.returncode == 0, log.read_text()
    quarter = lambda n: np.mean([mib for step, mib in used.items() if n <= step * 4 / steps < n + 1])
    second, last = quarter(1), quarter(3)
    assert abs(last / second - 1) < growth, (second, last)
    assert max(trace.values()) < 100, trace
    figure(f"{steps} steps: {second:.0f} MiB in the second quarter, {last:.0f} in the last; {len(trace)} "
           f"traces, the last in step {max(trace.values()) + 1}")

def test_train_memory_stays_flat():
    check_soak(200, 0.05)  # malloc still warms up: 758 MiB in the first 100 steps, 781, 785, 788 after them

def soak_steps():
    check_soak(2000, 0.02)

def test_train_gsm8k_with_the_real_tokenizer():
    source, out = new_directory(), new_directory() / "run"
    shutil.copy(shared("qwen2.5/tokenizer.json"), source)
    config = train.TINY_MODEL | dict(vocab_size=151936, hidden_size=64, eos_token_id=151645)
    model.write_random(source, config, seed=3)
    text = run_train("--model", source, "--data", shared("gsm8k/train.jsonl"), "--eval_data",
                     shared("gsm8k/test.jsonl"), "--steps 2 --sft_steps 1 --batch 2 --npq 4 --max_answer 48",
                     "--max_prompt 96 --eval_n 16 --lr 1e-3 --micro_batch 1 --out", out, devices=2)
    assert re.search(r"train.jsonl: \d+ questions; \d+ skipped, longer than max_prompt = 96", text), text
    rows = read_jsonl(out / "metrics.jsonl")
    assert [m["step"] for m in rows] == [1, 2, 3] and "eval/solved" in rows[2]
    assert rows[1]["logprob_gap/max"] < 1e-4 and all(np.isfinite(m["loss"]) for m in rows), rows
    torch, transformers = need("torch", "transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out / "final", dtype=torch.float32)
    ids = transformers.AutoTokenizer.from_pretrained(out / "final")("Natalia sold 48 clips").input_ids
    assert_allclose(logits(*load(out / "final"), [ids]), hf_logits(theirs, [ids]), atol=1e-4)
    start, end = load_file(source / "model.safetensors"), theirs.state_dict()
    moved = max(abs(end[k].numpy() - start[k]).max() for k in end.keys() & start.keys())
    assert moved > 1e-4, "training changed nothing"

def refused(*flags):
    """The message with which train.py refuses its flags in this process; weights must not be read."""
    unread, held = mock.patch.object(model, "load", side_effect=AssertionError("loaded")), jax.live_arrays()
    with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.redirect_stdout(io.StringIO()), unread:
        with assert_raises(SystemExit, msg=f"{flags} was accepted") as refusal:
            train.main(arguments(flags))
    text = err.getvalue().strip()
    assert refusal.exception.code == 2 and text.count("\n") <= 1 and "Traceback" not in text, (flags, text)
    assert text and len(jax.live_arrays()) <= len(held), f"{flags}: device memory was taken"
    return text

MISTAKES = {  # flags: what the message must say
    "--bacth 4": "did you mean --batch", "--batch four": "invalid int value: 'four'", "--keep 0": "keep = 0",
    "--lr fast": "invalid float value", "--advantage best": "invalid choice: 'best'", "--lr nan": "lr = nan",
    "--batch -4": "batch = -4", "--steps -1": "steps = -1", "--lr inf": "lr = inf", "--npq 1": "npq = 1",
    "--temperature 0": "temperature = 0", "--top_k 20": "top_k = 20", "--top_p 0.9": "top_p = 0.9",
    "--top_p 1.5 --eval_temperature 1": "1.5", "--b2 1": "b2 = 1", "--clip_low 1.5": "clip_low = 1.5",
    "--mesh 3,-1,1": "a multiple of 3 devices; there are 8", "--mesh 1,4,1": "needs 4 devices; there are 8",
    "--mesh 1,2,4": "key/value heads = 2 do not divide over tp = 4", "--mesh -1,-1,1": "mesh -1,-1,1",
    "--mesh 0,8,1": "mesh 0,8,1", "--mesh fast": "mesh fast", "--require_processes 4": "expected 4 with",
    "--batch 1 --npq 6": "batch*npq = 1*6 = 6 sequences per host do not divide over 8",
    "--batch 3 --npq 8 --minibatches 2": "do not divide into minibatches = 2",
    "--batch 8 --npq 8 --minibatches 1 --micro_batch 9": "micro_batch = 9 is more",
    "--loss_impl pallas": "not cpu, float32; try --loss_impl jax", "--max_prompt 9": "raise --max_prompt",
    "--max_answer 1000": "exceed the model's 1024 positions", "--model .": "config.json is missing",
    "--model no/such/dir": "no/such/dir is not a directory", "--data none.jsonl": "none.jsonl does not exist",
    "--steps 0 --sft_steps 0 --eval_data none": "nothing to do", "--out other": "is not a run of podgrpo",
    "--max_answer 1 --eval_data none": "max_answer = 1", "--out plain": "cannot be made a directory",
    "--out plain/run": "cannot be made a directory", "--out model": "not a run",
    "--plan v9-8": "cannot be compiled for here", "--plan --sweep lr=1,2": "is not a list such as",
    "--plan --sweep micro_batch=x": "sweep = micro_batch=x", "--attention cudnn": "try --attention auto",
    "--seed 100000000000000000000": "seed = 100000000000000000000", "--wandb project": "--wandb project",
    "--seed 1.5": "invalid int value", "--steps 1000000": "steps = 1000000",
    "--batch 9999999999": "batch = 9",
    "--temperature 1e-300": "temperature = 1e-300", "--lr 1e38": "lr = 1e+38", "--mesh 1,-1": "mesh 1,-1",
    "--eval_temperature 1e-300": "eval_temperature = 1e-300", "--processes 2": "processes = 2 and",
    "--coordinator nonsense": "is not host:port", "--coordinator localhost:99999": "a port from 1 to 65535",
    "--process_id 1": "process_id = 1", "--coordinator :80 --processes 2": "coordinator = ':80'",
    "--coordinator a:80 --processes 2 --process_id 2": "process_id = 2 is out of range; it must be a number "
    ">= 0 and < 2", "--coordinator a:80 --processes 99999": "processes = 99999", "word": "arguments: word",
    "--sweep micro_batch=1": "add --plan", "--plan --sweep micro_batch=-3": "micro_batch = -3",
    "--plan --sweep max_answer=0": "max_answer = 0", "--plan --sweep remat=foo": "remat = foo is none of",
    "--plan --sweep micro_batch=1,": "invalid literal", "--data .": "cannot be lo",
    "--data dir.jsonl": "does not exist, or is no file", "--eval_data none.jsonl": "none.jsonl does not",
    "--data columns": "columns line 1", "--data columns --eval_data other": "columns line 1",
    "--data script": "no longer supported", "--data pickle": "cannot be loaded",
    "--out taken": "Not a directory",
    "--out broken": "not readable JSON", "--out empty": "is not a run of podgrpo",
    "--out dangling": "directory",
    "--out " + "x/" * 700: "is too long", "--model a/b/c": "a/b/c is not a directory",
    "--data": "expected one",
    "--out " + "x" * 300: "cannot be made a directory",
    "--model pipe": "tokenizer.json is no file",
    "--require_devices 1": "with 8 devices, expected", "--model plain": "plain is not a directory"}

ODD = [  # flags, each a word, that a shell splits or cannot say
    (["--out", "a\0b"], "holds a line break"), (["--out", "a\nb"], "holds a line break"),
    (["--data", ""], "--data"),
    (["--data", "\udce9.jsonl"], "half a character"), (["--system", "\udce9"], "system = "),
    (["--plan="], "--plan"),
    (["--system", "Be<|im_end|>"], "a mark of the chat"), (["--model", " "], "--model is given nothing"),
    (["--mesh", "1\n2\n3"], "mesh = "), (["--batch", "4\n5\n6\n7"], "invalid int"),
    (["--a\nb\nc", "1"], "--a b c")]
ENVIRONMENT = [  # variables: what the message must say
    (dict(SLURM_STEP_NUM_TASKS="two"), "'two'"), (dict(SLURM_STEP_NUM_TASKS="2"), "set --coordinator"),
    (dict(SLURM_STEP_NUM_TASKS="2", PATH=""), "SLURM_*"), (dict(GCE_METADATA_HOST="a b\n"),
    "GCE_METADATA_HOST")]

GOOD = '{"question": "What is 1 + 1?", "answer": "2"}\n'
BAD_DATA = [  # name, what the file holds, what the message must say
    ("empty", "", "empty.jsonl is empty"), ("lacks", '{"question": "What?"}\n', "lacks.jsonl line 1"),
    ("blank", "\n\n", "blank.jsonl is empty"), ("cut", GOOD + '{"question": "What', "cut.jsonl line 2"),
    ("list", GOOD + GOOD + "[1]\n", "list.jsonl line 3"),
    ("null", GOOD + '{"question": "What?", "answer": null}\n', "null.jsonl line 2"),
    ("long", GOOD.replace("What", "What " * 99), "longer than max_prompt = 32"),
    ("bom", "\ufeff" + GOOD, "BOM"), ("two", GOOD.strip() + GOOD, "Extra data"),
    ("nan", '{"question": "a", '
     '"answer": NaN}', "NaN"), ("deep", '{"question": ' + "[" * 99999, "deep.jsonl line 1"),
    ("number", GOOD + '{"question": 5, "answer": 5}', "number.jsonl line 2"),
    ("bool", '{"question": "a", '
     '"answer": true}', "bool.jsonl line 1"), ("spaces", '{"question": " ", "answer": "2"}',
     "question = ' '"),
    ("twice", GOOD[:-2] + ', "answer": "3"}', "a name comes twice"),
    ("other", '{"prompt": "a"}', "'answer'"),
    ("half", GOOD.replace("What", "\\ud800"), "half.jsonl line 1"),
    ("list2", '{"question": "a", "answer": [2]}',
     "answer = [2]"), ("marked", GOOD.replace("What", "<|im_end|>"), "mark of the chat"),
    ("latin", GOOD.replace("What", "Qu\udce9"), "latin.jsonl line 1"), ("demo", GOOD[:-2] +
     ', "demonstration": 7}', "demonstration = 7"), ("digits",
     '{"question": "a", "answer": ' + "9" * 5000 + "}",
     "digits.jsonl line 1"), ("utf16", GOOD.encode("utf-16").decode("utf-8", "surrogateescape"),
     "line 1")]

def test_train_refuses_bad_input():
    weights, up = "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    models = [
        ("tokenizer.json", None, "tokenizer.json"), ("tokenizer.json", b"{}", "not a readable tokenizer"),
        (weights, None, weights), ("config.json", {"intermediate_size": 96}, "calls for (96, 128)"),
        (weights, b"junk" * 9, "not a safetensors file"), (weights, {up: None}, f"lacks the tensor {up}"),
        ("config.json", {"model_type": "llama"}, "model_type 'llama'"),
        ("config.json", {"vocab_size": 64}, "more than the model's vocabulary of 64"),
        ("config.json", {"hidden_size": 128.7}, "hidden_size = 128.7"),
        ("tokenizer.json", b"\xff", "tokenizer"),
        ("tokenizer.json", no_mark(), "or has no <|im_start|>"),
        ("config.json", {"eos_token_id": -1}, "[-1]"),
        ("tokenizer.json", high_id(), "ids below 1001"), ("config.json", {"num_hidden_layers": 10**9},
        "1000000000"),
        (weights, {up: np.full((256, 128), 1, np.int8)}, "type I8")]
    files = {"plain": "", "other/notes.txt": "not a run", "model/config.json": '{"model_type": "qwen2"}',
             "columns/train.jsonl": '{"prompt": "a", "solution": "b"}',
             "script/script.py": "raise SystemExit(0)",
             "pickle/train.pkl": "cos\nsystem\n(S'touch owned'\ntR.", "taken/tiny-seed1.0": "",
             "dir.jsonl/x": "",
             "pipe/config.json": "{}",
             "broken/config.json": "{", "empty/config.json": '{"config": []}'}
    table = MISTAKES | {f"--data {name}.jsonl --eval_data none": words for name, _, words in BAD_DATA}
    table |= {f"--data arith --model {i}": words for i, (*_, words) in enumerate(models)}
    with contextlib.chdir(new_directory()):
        for i, (name, change, _) in enumerate(models):
            spoiled(tiny_directory(), name, change).rename(str(i))
        for name, text in (files | {f"{name}.jsonl": text for name, text, _ in BAD_DATA}).items():
            Path(name).parent.mkdir(exist_ok=True)
            Path(name).write_bytes(text.encode("utf-8", "surrogateescape"))
        os.symlink("gone", "dangling")
        os.mkfifo("pipe/tokenizer.json")
        table = [(flags, words, {}) for flags, words in [*table.items(), *ODD]]
        table += [([], words, env) for env, words in ENVIRONMENT]
        for number, (flags, words, env) in enumerate(table):
            began = time.monotonic()
            with mock.patch.dict(os.environ, env), mock.patch("time.sleep"):
                message = refused(f"--out run{number}", flags)
            assert words in message, f"{flags} {env}: {message!r} does not say {words!r}"
            assert time.monotonic() - began < 10, f"{flags} {env}: {time.monotonic() - began:.1f} s"
        assert not os.path.exists("owned")
    figure(f"{len(table)} mistakes")

ODD_VALUES = [None, True, False, 0, -1, 1, 7, 2**31, 2**64, 10**99, 1.5, -0.0, math.nan, math.inf, "", "x",
"128", "1",
              "\ud800", [], {}, [1], [None], {"a": 1}, "<|im_end|>", "default", "F16", [0, 8], "a" * 9999]

def fuzzed(rng, data, records=False):
    """Bytes, some of them cut, doubled or others; or, of JSON, a value odd, another's, or gone."""
    lines = data.split(b"\n") if records else [data]
    at = rng.randrange(len(lines))
    if rng.random() < 0.5:
        value, places = json.loads(lines[at]), []
        def walk(holder):
            for key in holder if isinstance(holder, dict) else range(len(holder)):
                places.append((holder, key))
                if isinstance(holder[key], (dict, list)):
                    walk(holder[key])
        walk(value)
        (holder, key), (other, its) = rng.choice(places), rng.choice(places)
        holder[key] = rng.choice([*ODD_VALUES, other[its]])
        if rng.random() < 0.2:
            del holder[key]
        lines[at] = json.dumps(value).encode()
        return b"\n".join(lines)
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 9])):
        a = rng.randrange(len(data) + 1)
        b = min(len(data), a + rng.choice([1, 1, 1, 4, 99]))
        data[a:b] = rng.choice([b"", rng.randbytes(b - a), data[a:b] * 2,
        rng.choice([b"[", b'"', b"1", b"\xff"])])
    return bytes(data)

def strict_config(c):
    """A ModelConfig by nothing but the names in config.json, where null is what is absent."""
    c = {k: v for k, v in c.items() if v is not None}
    N, D, stop = c["num_attention_heads"], c["hidden_size"], c.get("eos_token_id", [])
    rope = c.get("rope_parameters") or {}
    return model.ModelConfig(
        V=c["vocab_size"], D=D, F=c["intermediate_size"], N=N, K=c.get("num_key_value_heads", N),
        H=c.get("head_dim", D // N), L=c["num_hidden_layers"], tied=c.get("tie_word_embeddings", False),
        rope_theta=float(rope.get("rope_theta", c.get("rope_theta", 1e4))),
        rms_eps=c.get("rms_norm_eps", 1e-6),
        max_positions=c.get("max_position_embeddings", 32768),
        stop_ids=tuple(stop) if isinstance(stop, list) else (stop,))

def test_train_fuzzed_files():
    """Of 500 spoiled files of each kind each is refused in a line or two, or read as what it says."""
    directory, tally, cfg = new_directory(), Counter(), train.Config(system="")
    small = train.TINY_MODEL | dict(vocab_size=24, hidden_size=16, intermediate_size=8)
    model.write_random(directory, small, 0)
    shutil.copy(tiny_directory() / "tokenizer.json", directory)
    rows = [{"question": f"What is {i} + 1?", "answer": i + 1,
    "demonstration": "so \u00e9"} for i in range(3)]
    (directory / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    whole, shape = load(directory)
    whole, weights = model.flatten(whole), (directory / "model.safetensors").read_bytes()
    end = 8 + int.from_bytes(weights[:8], "little")
    def config():
        got, text = model.read_config(directory), (directory / "config.json").read_text()
        wanted = strict_config(json.loads(text))
        assert repr(got) == repr(wanted), (got, wanted)  # 16 is not 16.0, nor 1 True
    def tokenizer():
        encode, _ = train.load_tokenizer(directory)
        for row in train.with_prompts(str(directory / "rows.jsonl"), False, encode, cfg):
            assert max(row["prompt"] + row["told"]) <= max(encode.get_vocab().values())
    def header():
        checkpoint = model.Checkpoint(directory, shape)
        for name, size in model.shapes(shape).items():
            assert_array_equal(checkpoint.read(name, [slice(0, n) for n in size]), whole[name], name)
    def data():
        got, text = train.load_rows(str(directory / "rows.jsonl"),
        False), (directory / "rows.jsonl").read_text()
        lines = [json.loads(line) for line in text.split("\n") if line.strip()]
        assert got == [{k: str(line[k]) for k in rows[0] if line.get(k) is not None} for line in lines]
    def hang(*_):
        raise RuntimeError("hangs")
    before = signal.signal(signal.SIGALRM, hang)
    for name, read in ("config.json", config), ("tokenizer.json", tokenizer), ("model.safetensors", header), (
            "rows.jsonl", data):
        rng, path = random.Random(0), directory / name
        good = path.read_bytes()
        for i in range(500):
            spoilt = fuzzed(rng, good[8:end] if read is header else good, records=read is data)
            if read is header:  # and some lengths lie
                length = end - 8 if rng.random() < 0.2 else len(spoilt)
                length += (rng.random() < 0.1) * rng.randrange(2**60)
                spoilt = length.to_bytes(8, "little") + spoilt + good[end:]
            path.write_bytes(spoilt)
            signal.setitimer(signal.ITIMER_REAL, 9)
            with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.redirect_stdout(io.StringIO()):
                try:
                    read()
                    tally[name] += 1
                except model.CheckpointError as e:
                    assert str(directory) in str(e), e
                except SystemExit as e:
                    assert e.code == 2 and err.getvalue().count("\n") == 1, err.getvalue()
                except Exception:
                    shutil.copy(path, f"{scratch().name}/fuzzed-{name}")
                    raise
            signal.setitimer(signal.ITIMER_REAL, 0)
        path.write_bytes(good)
        read()
    signal.signal(signal.SIGALRM, before)
    figure("of 500 each read as they are: " + ", ".join(f"{n} {name}" for name, n in tally.items()))

def no_mark():
    tokenizer = json.loads((tiny_directory() / "tokenizer.json").read_text())
    return {"added_tokens": [t for t in tokenizer["added_tokens"] if t["content"] != "<|im_start|>"]}

def high_id():
    tokenizer = json.loads((tiny_directory() / "tokenizer.json").read_text())
    return {"model": tokenizer["model"] | {"vocab": tokenizer["model"]["vocab"] | {"zzz": 1000}}}

def test_train_ignores_truncation_of_a_tokenizer():
    def prompts(directory):
        flags = arguments(["--data arith --model", directory, "--out", new_directory()])
        return [row["prompt"] for row in train.set_up(train.parse(flags))[1].held_out]
    cut = tokenizers.Tokenizer.from_file(str(tiny_directory() / "tokenizer.json"))
    cut.enable_truncation(20)
    cut.enable_padding(length=24)
    same = spoiled(tiny_directory(), "tokenizer.json", cut.to_str().encode())
    assert prompts(same) == prompts(tiny_directory())

def test_train_refuses_with_exit_code_2():
    out = new_directory() / "run"
    text = run_train("--batch 1 --npq 6 --out", out, devices=4, code=2)
    assert text == ("train.py: batch*npq = 1*6 = 6 sequences per host do not divide over 4 local devices; "
                    "try --npq 4 or --npq 8\n"), text
    flags = TINY_FLAGS, "--steps 0 --out", out
    run_train(*flags)  # the mistake left nothing that is in the way
    assert "seed was 1, is 2" in run_train(*flags, "--seed 2", code=2)

def test_train_uses_every_flag():
    tree = ast.parse((HERE / "train.py").read_text(encoding="utf-8"))
    read = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)
            and isinstance(n.value, ast.Name) and n.value.id == "cfg"}
    fields = {f.name for f in dataclasses.fields(train.Config)}
    assert fields == read & fields, f"read nowhere: {fields - read}"
    assert read <= fields, f"not a flag: {read - fields}"
    assert set(train.TINY) <= fields and train.FREE <= fields and len(fields) <= 55
    for flags, wanted in (
            ("--sft_lr 1 --sft_steps 0 --b2 0.9", ["sft_steps = 0, so nothing reads --sft_lr"]),
            ("--steps 0 --is_cap 1 --lr 1e-3 --decay linear", ["steps = 0, so nothing reads --lr, --is_cap"]),
            ("--steps 0 --sft_steps 0 --lr 1 --keep 3", ["steps = 0, so nothing reads --lr",
                                                         "there are no steps, so nothing reads --keep"]),
            ("--optimizer sgd --b2 0.9", ["optimizer = sgd, so nothing reads --b2"]),
            ("--data x.jsonl --eval_n 9", ["there is no --eval_data, so nothing reads --eval_n"]),
            ("--data x.jsonl --eval_data y.jsonl --eval_n 9", [])):
        with contextlib.redirect_stderr(io.StringIO()) as err:
            train.parse(flags.split())
        assert err.getvalue().splitlines() == [f"train.py: {text}" for text in wanted], err.getvalue()
    figure(f"{len(fields)} flags")

def test_train_readme_names_what_exists():
    text = (HERE / "README.md").read_text(encoding="utf-8")
    fields = {f.name for f in dataclasses.fields(train.Config)} | {*kernel.FLAGS, *model.FLAGS}
    named = partial(re.findall, r"(?<![\w-])--([a-z][\w-]*)")
    flags = {*named(text)} - {*named((HERE / "launch.sh").read_text()), "help", "location", "recursive"}
    assert flags and flags <= fields, f"no such flags: {flags - fields}"
    files = set(re.findall(r"(?<![\w/.-])((?:assets/|\.ci/)?[\w.]+\.(?:py|sh|md|txt|svg|png))\b", text))
    missing = [f for f in files if not (HERE / f).exists()]
    assert files and not missing, f"no such files: {missing}"
    for name in ("train.py", "model.py", "kernel.py", "launch.sh"):
        lines = (HERE / name).read_text(encoding="utf-8").count("\n")
        said = re.search(rf"`?{re.escape(name)}`?\s+(\d+) lines", text)
        assert said and int(said[1]) == lines, f"README says {said and said[0]!r}, {name} has {lines} lines"

def test_train_learns():
    """The embedded default, as committed: at most 45% after the supervised phase, at least 90% at the end."""
    out = new_directory() / "run"
    text = run_train("--out", out)
    scores = [m["eval/solved"] for m in read_jsonl(out / "metrics.jsonl") if "eval/solved" in m]
    assert scores[0] <= 0.45 and scores[-1] >= 0.90, scores
    figure(re.search(r"held-out questions solved.*", text)[0])

# ---------------------------------------------------------------- several processes, pods, clusters
WORKER_PYTHON = """#!/bin/bash
# a worker's Python: .venv is made of it; it notes what pip is asked for, that a secret came; fails if told to
case "$*" in
  "-m venv --clear "*) mkdir -p "${@: -1}/bin" && cp "$0" "${@: -1}/bin/python" ;;
  "-m pip --version") ;;
  "-m pip "*) echo "$*" >>~/pip.log ;;
  *train.py*) [ ! -e ~/broken ] || { echo no such luck && exit 7; }
    echo -n "${HF_TOKEN:-}" | wc -c >~/token && exec PYTHON "$@" ;;
  *) exec PYTHON "$@" ;;
esac
"""
POD_FLAGS = ("--model tiny --data arith --eval_data none --max_prompt 80 --max_answer 24 --batch 1 --npq 4 "
             "--minibatches 1 --sft_steps 0 --save_every 1")

def write(path, text, mode=0o644):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)

@cache
def cloud():
    """(a clone of this tree with a .env in it, the folder of .ci/gcloud, which stands for Google Cloud)"""
    clone, stub = new_directory(), new_directory()
    try:
        files = run("git", "ls-files", "-co", "--exclude-standard").split("\n")
    except (OSError, AssertionError):
        raise SkipTest("needs git, and a checkout")
    for name in filter(None, files):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(HERE / name, clone / name)
    for command in ("init -q", "add -A", "-c user.name=a -c user.email=a@b.c commit -qm all"):
        run("git", "-C", clone, *command.split())
    secrets = os.urandom(8).hex(), os.urandom(8).hex()
    write(clone / ".env", 'WANDB_API_KEY="key {}"\nHF_TOKEN=tok${}\n'.format(*secrets))
    write(stub / "bin/python3.12", WORKER_PYTHON.replace("PYTHON", sys.executable), 0o755)
    write(stub / "bin/sleep", '#!/bin/sh\nexec /bin/sleep "$(awk "BEGIN { print $1 / 5 }")"\n', 0o755)
    write(stub / "worker.env", "JAX_PLATFORMS=cpu\nJAX_NUM_CPU_DEVICES=4\n")
    atexit.register(lambda: [gcloud("preempt", path.parent.name) for path in stub.glob("*/vm.json")])
    return clone, stub

def launch(*args, code=0, clone=None, **env):
    """bash launch.sh ARGS in the clone; the homes of workers are folders of the stub."""
    stub, clone = cloud()[1], clone or cloud()[0]
    env = {"PATH": f"{stub}/bin:{HERE}/.ci:{os.environ['PATH']}", "PYTHON": f"{stub}/bin/python3.12"} | env
    env |= compiled() | {"GCLOUD_STUB": str(stub)}
    return run("bash", clone / "launch.sh", *arguments(args), code=code, cwd=clone, **env)

def gcloud(*args):
    run(HERE / ".ci/gcloud", *args, GCLOUD_STUB=str(cloud()[1]))

def when(text, path, act):
    """A thread that calls act() once the file has the text; the thread's `result` is what act returned."""
    def wait():
        while not (path.exists() and text in path.read_text(errors="replace")):
            time.sleep(0.1)
        thread.result = act()
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread

def test_launch_a_pod_from_nothing_to_a_checkpoint():
    """Four workers in homes of their own, sixteen devices; a second start is refused while they train."""
    clone, stub = cloud()
    homes = [stub / f"podgrpo-v6e-16/w{i}" for i in range(4)]
    odd = """a "b" 'c' $HOME `d` \\e"""
    meanwhile = when("step 1/20", homes[0] / "podgrpo/run.log", lambda: launch(
        "v6e-16 run", POD_FLAGS, code=1) + launch("v6e-16 setup", code=2) + launch("v6e-16 status"))
    text = launch("v6e-16", POD_FLAGS, "--steps 20 --system", [odd])
    meanwhile.join()
    assert "4 processes x 4 cpu devices, mesh {'dp': 1, 'fsdp': 16" in text and "spans 4 hosts" in text, text
    for said, count in (("a run is going on here", 4), ("a run is going on there", 1), ("] running", 4)):
        assert meanwhile.result.count(said) == count, meanwhile.result
    text += meanwhile.result + launch("v6e-16", POD_FLAGS, "--steps 20 --system", [odd])
    assert "is finished" in text
    for i, home in enumerate(homes):
        out = home / "podgrpo/out/arith-tiny"
        config = json.loads((out / "config.json").read_text())
        assert config["config"]["system"] == odd and config["commit"] == run(
            "git", "-C", clone, "rev-parse", "HEAD").strip(), config
        assert len((home / "pip.log").read_text().splitlines()) == 1, "installed twice"
        assert (home / "podgrpo/.env").stat().st_mode & 0o777 == 0o600
        assert (home / "token").read_text().strip() == "20", "the secret did not reach the run"
        assert os.listdir(out / "step_000020") == [f"shards-0000{i}-of-00004.safetensors"]
        assert (out / "metrics.jsonl").exists() == (out / "final/model.safetensors").exists() == (i == 0)
    rows = read_jsonl(homes[0] / "podgrpo/out/arith-tiny/metrics.jsonl")
    assert [m["step"] for m in rows] == [*range(1, 21)]
    files = [path for path in stub.rglob("*") if path.is_file() and path.name != ".env"]
    seen = text + "".join(path.read_text(errors="replace") for path in files)
    secrets = re.findall("[0-9a-f]{16}", (clone / ".env").read_text())
    assert len(secrets) == 2 and not any(s in seen for s in secrets), "a secret in a log, an argv or a file"
    assert "nothing is deleted" in launch("v6e-16 down", code=2)
    launch("v6e-16 down --yes")
    assert not homes[0].exists()
    (clone / ".env").rename(clone / "env")
    assert "no .env is here" in launch("v6e-1 setup --name plain")
    assert not (stub / "plain/w0/podgrpo/.env").exists()
    (clone / "env").rename(clone / ".env")
    assert "no run" in launch("v6e-1 status --name plain")
    assert "ok   test_draw_inverts" in launch("v6e-1 test --name plain draw_inverts")

def test_launch_brings_all_down_when_one_fails():
    """One that cannot start, while the others wait for it; one that is killed at work."""
    home, other = (cloud()[1] / f"fails/w{i}" for i in (1, 0))
    launch("v4-16 setup --name fails")
    write(home / "broken", "")
    text = launch("v4-16 run --name fails", POD_FLAGS, code=7)
    assert "[w1] failed first, with exit code 7; its last lines:\nno such luck" in text, text
    (home / "broken").unlink()
    kill = lambda: gcloud("kill", "fails", "1", "train.py") or time.time()
    killer = when("step 1/", other / "podgrpo/run.log", kill)
    text = launch("v4-16 run --name fails --steps 500", POD_FLAGS, code=137)
    took = time.time() - killer.result
    assert "[w1] failed first, with exit code 137" in text and took < 60, (took, text)
    assert "running" not in launch("v4-16 status --name fails")
    figure(f"{took:.0f} s from the kill to the end of all")

def test_launch_resumes_after_a_preemption():
    """On a new VM, from the bucket: metrics and weights of the undisturbed run, of two processes here."""
    stub, calm = cloud()[1], new_directory() / "calm"
    (stub / "gs/bucket").mkdir(parents=True)
    flags = POD_FLAGS, "--steps 8 --entropy_bonus 0.1 --out"
    launch("cpu --processes 2", *flags, calm, JAX_NUM_CPU_DEVICES="4")
    when('"step": 2', stub / "gs/bucket/run/metrics.jsonl", lambda: gcloud("preempt", "spot"))
    text = launch("v4-16 --name=spot --spot", *flags, "gs://bucket/run")
    assert "spot is PREEMPTED" in text and "resuming out/gs/bucket/run after step" in text, text
    same = lambda out: without_times(read_jsonl(out / "metrics.jsonl"))
    for place in (stub / "spot/w0/podgrpo/out/gs/bucket/run", stub / "gs/bucket/run"):
        assert same(place) == same(calm)
        found, wanted = (load_file(run / "final/model.safetensors") for run in (place, calm))
        assert all((found[k] == wanted[k]).all() for k in wanted)
    for step in ("step_000007", "step_000008"):
        assert {p.name for p in (stub / "gs/bucket/run" / step).iterdir()} == {
            f"shards-0000{i}-of-00002.safetensors" for i in range(2)}, step

def test_launch_a_bucket_loses_nothing():
    """An evaluation alone is sent too; what is newer here, as nothing could be sent, is not replaced."""
    stub, here = cloud()[1], new_directory()
    (stub / "gs/other").mkdir(parents=True)
    ours, sent = here / "out/gs/other/run", stub / "gs/other/run"
    google = dict(PATH=f"{HERE}/.ci:{os.environ['PATH']}", GCLOUD_STUB=str(stub))
    flags = arguments(["--steps 0 --sft_steps 0 --eval_n 8 --out gs://other/run"])
    run(sys.executable, HERE / "train.py", *flags, cwd=here, **google)
    assert "eval/solved" in read_jsonl(sent / "metrics.jsonl")[0]
    (ours / "metrics.jsonl").write_text("newer")
    (ours / "samples.jsonl").unlink()
    with contextlib.chdir(here), mock.patch.dict(os.environ, google):
        assert train.mirror(train.Config(out="out/gs/other/run"), back=True)
    assert (ours / "metrics.jsonl").read_text() == "newer"
    assert (ours / "samples.jsonl").read_bytes() == (sent / "samples.jsonl").read_bytes() != b""

def test_launch_explains_what_gcloud_refuses():
    stub = cloud()[1]
    table = {  # what gcloud prints when asked to create -> what the launcher says to do
        "PERMISSION_DENIED: Cloud TPU API has not been used in project p": "gcloud services enable tpu",
        "PERMISSION_DENIED: Permission denied on 'locations/a'": "the role TPU Admin, or try another --zone",
        "RESOURCE_EXHAUSTED: Quota limit 'TPUV6EPerProject' has been exceeded": "or try --spot",
        "{ code: 9, Insufficient reserved capacity. [EID: 0x1]": "the reservation is elsewhere, or full",
        "{ code: 8, There is no more capacity in the zone a": "a has no v6e-8 left",
        "INVALID_ARGUMENT: the accelerator v6e-8 was not found in zone a": "a offers no v6e-8",
        "SSH Key is not present in the SSH agent.": "ssh-add"}
    for number, (said, wanted) in enumerate(table.items()):
        fail = {"match": "create", "stderr": f"ERROR: (gcloud.compute.tpus.tpu-vm.create) {said}"}
        write(stub / "fail", json.dumps(fail) + "\n")  # once: the second zone has room
        text = launch(f"v6e-8 up --zone a,us-east5-b --name vm{number}")
        assert said in text and wanted in text, text
    write(stub / "fail", json.dumps(fail | {"times": 9}) + "\n")
    assert launch("v6e-8 up --name none --zone a,b", code=1).count("ssh-add") == 2
    (stub / "fail").unlink()
    for file, wanted in (("account", "log in: gcloud auth login"), ("project", "gcloud config set project")):
        write(stub / file, "")
        assert wanted in launch("v6e-8 up --name none", code=1)
        (stub / file).unlink()
    bare = new_directory()
    for tool in "bash dirname mktemp rm cat sed tr cut grep".split():
        (bare / tool).symlink_to(shutil.which(tool))
    assert "cloud.google.com/sdk/docs" in launch("v6e-8 status", code=2, PATH=str(bare))
    assert "there is no none in us-east5-b" in launch("v6e-8 stop --name none", code=2)
    launch("v6e-8 up --queued --name qr")
    assert (stub / "qr/w0").exists()
    launch("v6e-8 down --queued --name qr --yes")
    assert not (stub / "queued/qr.json").exists() and not (stub / "qr").exists()
    figure(f"{len(table) + 5} refusals")

def test_launch_clears_only_a_stale_lock():
    lock = Path("/tmp/libtpu_lockfile")
    if lock.exists():
        raise SkipTest(f"{lock} is in use here")
    launch("v6e-1 setup --name lock")
    with lock.open("w"):
        launch("v6e-1 run --name lock --lr none", code=2)
        assert lock.exists(), "it was held"
    assert "invalid float value" in launch("v6e-1 run --name lock --lr none", code=2)
    assert not lock.exists()

def test_launch_without_running():
    """--dry-run runs nothing; every TYPE knows its hosts; no bash 4; calls that are mistakes."""
    clone, stub = cloud()
    source = (HERE / "launch.sh").read_text()
    newer = [w for w in "mapfile readarray declare+-A ,,} ^^} wait+-n &>> |& coproc".split()
             if w.replace("+", " ") in source]
    assert not newer, f"bash 3.2 has no {newer}"
    if shutil.which("shellcheck"):
        run("shellcheck", HERE / "launch.sh", HERE / ".ci/run", HERE / ".ci/slurm", HERE / ".ci/slurm_job")
    calls = lambda: (stub / "calls.log").exists() and (stub / "calls.log").read_text()
    before = calls()
    types = {"v4-8": (1, 4), "v4-16": (2, 8), "v4-64": (8, 32), "v5p-8": (1, 4), "v5p-16": (2, 8),
             "v6e-1": (1, 1), "v6e-8": (1, 8), "v6e-16": (4, 16), "v6e-256": (64, 256),
             "v5litepod-8": (1, 8), "v5litepod-16": (4, 16)}
    for name, (hosts, devices) in types.items():
        text = launch("--dry-run", name, "--batch 1").replace("\\ ", " ")
        flags = f"--require_processes {hosts} --require_devices {devices} --start_timeout 900 --model Qwen/"
        assert flags in text and text.rindex("--batch 1") > text.rindex("--max_answer 1024"), text
        order = [text.index(f"gcloud compute tpus tpu-vm {word}") for word in ("create", "ssh", "scp")]
        assert order == sorted(order)
    assert "train.py --plan v6e-8 --model Qwen/" in launch("--dry-run plan v6e-8 --lr 1")
    assert "train.py --plan here --lr 1" in launch("--dry-run plan --lr 1")
    assert "--ntasks-per-node=2" in launch("--dry-run slurm --ntasks-per-node 2 --lr 1")
    assert calls() == before, "gcloud was called"
    assert "launch.sh cpu" in launch(code=2)
    mistakes = {"v9-8": "unknown command v9-8", "v6e-8 --zone": "needs a value",
                "v6e-8 --dry-run": "goes first", "v6e-8 --spot down": "down is no flag",
                "v6e-8 down now": "down does not take now",
                "cpu --processes 0": "not a number of 1 or more", "cpu --batch 1 --npq 1": "npq = 1"}
    for call, wanted in mistakes.items():
        text = launch(call, code=2)
        assert text.count("\n") == 1 and wanted in text, text
    wanted = [f"{clone}/.venv/bin/python", "-u", f"{clone}/train.py", "--system", "it's $HOME"]
    assert shlex.split(launch("--dry-run cpu", wanted[-2:]).splitlines()[-1])[-5:] == wanted
    old = new_directory()
    for name in ("launch.sh", "requirements.txt"):
        shutil.copy(clone / name, old)
    for name in ("python3", "python3.11", "python3.12"):
        write(old / name, "#!/bin/sh\nexit 1\n", 0o755)
    text = launch("--dry-run setup", clone=old, PYTHON="", PATH=f"{old}:{os.environ['PATH']}")
    assert "pip install -q --user uv" in text and "uv venv" in text, text

def test_train_is_the_same_on_1_2_and_4_processes():
    """Eight devices on one, two and four processes: the same questions and keys, so the same three steps."""
    flags = ("--data arith --eval_data none --npq 4 --steps 3 --sft_steps 0 --max_prompt 32 --max_answer 40 "
             "--lr 1e-4 --entropy_bonus 0.01 --save_every 0 --model", taught(), "--system", [""])
    names = "loss reward/mean reward/std solved grad_norm len/answer truncated entropy".split()
    errors = {}
    for on in ("auto", "host_local"):
        runs = []
        for n in (1, 2, 4):
            out = new_directory() / "run"
            launch("cpu --processes", n, *flags, "--batch", 8 // n, "--mesh", on, "--out", out,
                   JAX_NUM_CPU_DEVICES=str(8 // n))
            runs.append(([[m[k] for k in names] for m in read_jsonl(out / "metrics.jsonl")],
                         load_file(out / "final/model.safetensors")))
        (metrics, weights), *others = runs
        assert max(m[2] for m in metrics) > 0.05 and min(m[4] for m in metrics) > 1e-3, metrics  # they learn
        for n, (m, w) in zip((2, 4), others):
            apart = max(relative(w[k], weights[k]) for k in weights)
            errors[on, n] = np.abs(np.subtract(m, metrics)).max(), apart
    check_errors(errors, 1e-5, "metrics and weights within")

def test_train_refuses_processes_that_do_not_belong_together():
    """Only worker 0 started; another number of devices; another flag, another commit on one of two."""
    port, out = 20000 + os.getpid() * 8 % 9000, new_directory() / "never"
    def start(i, n, job, *flags, **env):
        flags = [f"--coordinator=127.0.0.1:{port + job}", f"--processes={n}", f"--process_id={i}", *flags]
        return subprocess.Popen(
            [sys.executable, HERE / "train.py", "--out", out, *flags], text=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu"} | env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    two = lambda job, f: [f(i, 2, job) for i in range(2)]
    lonely = start(0, 4, 0)
    lonely.wait(30)
    table = [
        ([lonely], "4 processes are expected, 1 started within 20 s; absent: process 1, process 2,"),
        ([start(1, 4, 1)], "process 1 of 4 heard nothing from process 0"),
        ([start(0, 1, 2, "--require_processes=4", "--require_devices=16")], "expected 4 with 16"),
        (two(3, lambda i, *a: start(i, *a, f"--lr={i}")), "process 1 has lr = 1.0, process 0 has 0.0"),
        (two(4, lambda i, *a: start(i, *a, PODGRPO_COMMIT=f"c{i}")), "has commit = 'c1', process 0 has 'c0'")]
    for processes, wanted in table:
        for process in processes:
            text = process.communicate(timeout=60)[0]
            assert process.returncode == 2 and wanted in text and "Traceback" not in text, text

# ---------------------------------------------------------------- kernel.py, compiled for absent TPUs
def compiled_elsewhere(code, argv=(), **env):
    """What Python code that compiles for TPUs prints. libtpu wants a process of its own."""
    need("libtpu")
    return run(sys.executable, "-c", code, *argv, **env)

def aot(*runs):
    """`python kernel.py --aot` with each of some flags -> [(slice, impl, GB of temp)]"""
    out = compiled_elsewhere(f"import kernel\nfor flags in {runs!r}: kernel.benchmark(flags.split())")
    return [(*found, float(gb)) for *found, gb in re.findall(r"^(\S+) (\w+) +temp ([\d.]+) GB", out, re.M)]

def test_aot_memory():
    """Loss and both gradients: 8,192 tokens a device on eight, 4,096 on one; of all logits for contrast."""
    found = aot("--aot v6e-8 --time 8192 --impl jax,pallas", "--aot v6e-1 --impl jax,pallas",
                "--aot v6e-1 --impl pallas --block_tokens 1024", "--aot v6e-8 --time 1024 --impl full")
    for (name, impl, gb), most in zip(found, (0.35, 0.35, 0.65, 0.65, 0.35, math.inf), strict=True):
        assert gb <= most, (name, impl, gb, most)
    assert found[-1][2] > 1, "the logits of all tokens take less than they are"
    figure("GB of temp: " + ", ".join(f"{name} {impl} {gb}" for name, impl, gb in found))

def test_aot_every_chip_and_width():
    """The Pallas kernels compile for each; each chip sees three sizes of the vocabulary."""
    chips, sizes = ("v4-8", "v5litepod-8", "v5p-8", "v6e-8"), (151643, 151936, 152064)
    found = aot(*(f"--aot {name} --impl pallas --time 1024 --hidden {D} --vocab {sizes[(i + j) % 3]}"
                  for i, name in enumerate(chips) for j, D in enumerate((896, 1536, 2048, 3584))))
    assert len(found) == 16
    figure(f"16 programs; at most {max(gb for *_, gb in found)} GB of temp")

def test_aot_rollout():
    """The decode loop as compiled, 128 rows, 1,024 + 256 tokens: no weights move, no copy is large, the bytes
    that a device reads and writes are those of weights and cache. What does otherwise is found out."""
    flags = "--prompt 1024 --answer 256"
    out = compiled_elsewhere(
        f"import model\nmodel.SIZES['repeated'] = *model.SIZES['3B'][:4], 16, *model.SIZES['3B'][5:]\n"
        f"for a in ('3B --aot v6e-8,v6e-16', '7B --aot v4-16', '3B --aot v6e-8 --layout fsdp',\n"
        f"          'repeated --aot v6e-8'): model.benchmark(('{flags} --model ' + a).split())")
    found = [[float(x) for x in row] for row in re.findall(
        r"least ([\d.]+) GB .* compiled ([\d.]+) GB .* move ([\d.]+) GB; .* copy is ([\d.]+) of", out)]
    layouts = re.findall(r"^\S+ on \S+: (\w+)", out, re.M)
    assert layouts == ["replicated", "replicated", "tp", "fsdp", "replicated"], out
    *good, fsdp, repeated = found
    for least, compiled, moved, copied in good:
        assert compiled <= 1.15 * least and moved <= 0.02 * least and copied <= 0.1, out
    least = good[0][0]
    assert fsdp[0] == least and fsdp[1] > 1.15 * least and fsdp[2] > 0.8 * least, out
    assert repeated[1] > 1.15 * least, out  # of what keys and values of 2 heads take
    figure("bytes / those of weights and cache: " + ", ".join(f"{row[1] / row[0]:.3f}" for row in found[:-1])
           + f" (fsdp), {repeated[1] / least:.3f} (repeated heads)")

def test_aot_update():
    """The update of Qwen2.5-0.5B, float32 master weights, gradients and AdamW, rows of 2,048 tokens, as
    compiled: what is kept of a row is [L, T, D], and logits never are there."""
    directory = new_directory()
    shutil.copy(shared("qwen2.5/config-0.5B.json"), directory / "config.json")
    flags = ["--plan", "v6e-8", "--model", directory, "--max_prompt", "1024", "--max_answer", "1024"]
    rows = {}
    for impl, micro in ("pallas", 8), ("pallas", 64), ("full", 8):
        command = arguments([*flags, "--loss_impl", impl, "--micro_batch", str(micro)])
        out = compiled_elsewhere("import sys, train; train.main(sys.argv[1:])", command,
                                 JAX_DEFAULT_MATMUL_PRECISION="default")  # splash refuses more, in bfloat16
        rows[impl, micro] = float(re.search(rf"^ +{micro} +([\d.]+)  ", out, re.M)[1])
    row = (rows["pallas", 64] - rows["pallas", 8]) / 56
    kept = 24 * 2048 * 896 * 2 / 2 ** 30
    assert kept < row < 1.6 * kept and rows["full", 8] > 2 * rows["pallas", 8], rows
    figure(f"GiB a device: {rows}; of a row {row:.3f}, {kept:.3f} of it its layers' inputs")

def static_estimate(dump):
    """Print for both kernels the ms of the cycles that the compiler counts, and of the bytes moved; the count
    takes memory, so it is scaled up from 16 and 32 tiles of the head."""
    V, D, N, clock, bandwidth = 151936, 2048, 4096, 1.75e6, 1.64e9  # of a v6e, a ms
    b, cycles = kernel.block_sizes("TPU v6 lite", D), []
    C, f32, bf16, i32 = b.tokens, jnp.float32, jnp.bfloat16, jnp.int32
    shape = partial(jax.ShapeDtypeStruct, sharding=SingleDeviceSharding(kernel.tpu_devices("v6e-1")[0]))
    for n in (16, 32):
        h, W, z = (shape(dims, bf16) for dims in ((C, D), (n * b.vocab, D), (n * b.vocab, C)))
        jax.jit(lambda h, W: kernel.forward_tiles(b, n, True, h, W, 1.0)).lower(h, W).compile()
        jax.jit(lambda *a: kernel.backward_tiles(b, False, bf16, *a), donate_argnums=7).lower(
            shape((1,), i32), shape((1, C), i32), shape((4, C), f32), h, W, z,
            shape((n, b.vocab // b.step, 1, C), f32), shape(W.shape, f32)).compile()
        cycles.append([int(re.search(r"estimated_cycles: (\d+)", file.read_text())[1])
                       for name in ("forward", "backward") for file in Path(dump).glob(f"grpo_{name}*")])
    for a, c, nbytes in zip(*cycles, (2 * V * (D + C), 2 * V * (D + C) + 8 * V * D)):
        print("ms:", N / C * (a + (c - a) * (V / b.vocab / 16 - 1)) / clock, N / C * nbytes / bandwidth)

def test_aot_static_estimate():
    """Of both kernels on a v6e, 4,096 tokens: the larger of the two estimates."""
    d = str(new_directory())
    out = compiled_elsewhere(f"import test_kernel; test_kernel.static_estimate({d!r})",
                             LIBTPU_INIT_ARGS=f"--xla_jf_dump_static_llo_profile_to={d}")
    times = [max(map(float, pair)) for pair in re.findall(r"^ms: (\S+) (\S+)$", out, re.M)]
    assert len(times) == 2 and 8.3 < sum(times) <= 9.5, out
    figure(f"forward {times[0]:.2f} ms, backward {times[1]:.2f}, sum {sum(times):.2f}; three GEMMs: 8.33")

# ---------------------------------------------------------------- run
def teardown_function(_):
    """After each test, pytest's too: Linux gives a process 65,530 mappings, and all that the tests compile
    takes more. Only when half are gone, as tests share what they compile."""
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_text().count("\n") > 65530 // 2:
        jax.clear_caches()

def run_tests(names, niceness=0):
    """Those whose name matches -> how many passed, failed, were skipped"""
    os.nice(niceness)
    count = Counter()
    for name, test in [(name, f) for name, f in globals().items() if re.match(names, name)]:
        figure("")
        began = time.time()
        try:
            with contextlib.redirect_stdout(sys.stderr):
                test()
            result, word, text = "passed", "ok  ", figure.text
        except SkipTest as e:
            result, word, text = "skipped", "skip", e
        except (Exception, SystemExit) as e:
            sys.stderr.write(traceback.format_exc())
            result, word, text = "failed", "FAIL", " ".join(f"{type(e).__name__} {e}".split())[:200]
        count[result] += 1
        print(f"{word} {name} {text} ({time.time() - began:.0f} s)\n", end="", flush=True)
        teardown_function(test)
    return count

def main(words):
    names = {(): "test_(?!train_|launch_|aot_)", ("all",): "test_"}.get(
        tuple(words), f"(?=test_|soak_).*({'|'.join(map(re.escape, words))})")
    print(f"jax {jax.__version__} on {jax.device_count()} {jax.default_backend()} devices, Pallas kernels",
          "interpreted" if tiles("pallas").interpret else "compiled", flush=True)
    if names == "test_" and jax.default_backend() == "cpu":
        spawned = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(2, spawned) as two:  # one starts more, one yields
            count = sum(two.map(run_tests, ("test_(train|launch)_", "test_(?!train_|launch_)"), (0, 10)),
                        Counter())
    else:
        count = run_tests(names)
    print(", ".join(f"{count[result]} {result}" for result in ("passed", "failed", "skipped")))
    return 1 if count["failed"] else 0 if count else 2

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
