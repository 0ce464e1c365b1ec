"""Every test: of kernel.py and model.py first, of the trainer after them.

    python test_kernel.py               kernel and model
    python test_kernel.py all           the trainer (test_train_...) and compiling for TPUs (test_aot_...) too
    python test_kernel.py NAME [NAME]   those whose name contains a NAME
    pytest test_kernel.py               all, under pytest

On stdout: `ok NAME figure`, `skip NAME reason` or `FAIL NAME reason` a test, then the count; on stderr what
the tested code prints, and tracebacks. Exits with 1 after a failure, 2 when no name matches. Tests that need
torch, transformers or ../shared skip where that is not. A CPU shows as eight devices, for real meshes.
"""

import os

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")  # float32 is float32 on a GPU and a TPU too

import ast
import contextlib
import dataclasses
import fractions
import functools
import importlib
import io
import json
import math
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import traceback
import tracemalloc
from collections import Counter
from types import SimpleNamespace
from unittest import SkipTest, mock  # pytest knows SkipTest too

import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.special
import scipy.stats
import tokenizers
from jax.experimental.layout import Format, Layout
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding
from numpy.testing import assert_allclose, assert_array_equal
from safetensors.numpy import load_file, save_file

import kernel
import model
import train

# ---------------------------------------------------------------- what tests share

def figure(text):
    """What the running test measured, for its line."""
    figure.text = text

def shared(path):
    """A file of ../shared: what is too large for the repository."""
    full = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "shared", path)
    if not os.path.exists(full):
        raise SkipTest(f"../shared/{path} is not here")
    return full

def need(*names):
    """Modules that may not be installed."""
    try:
        return [importlib.import_module(name) for name in names]
    except ImportError as e:
        raise SkipTest(f"{e.name} is not installed")

@functools.cache
def scratch():
    return tempfile.TemporaryDirectory(prefix="podgrpo-test-")  # removed when Python ends

def new_directory(like=None):
    directory = tempfile.mkdtemp(dir=scratch().name)
    return shutil.copytree(like, directory, dirs_exist_ok=True) if like else directory

def mesh(dp=1, fsdp=1, tp=1):
    n = dp * fsdp * tp
    if len(jax.devices()) < n:
        raise SkipTest(f"needs {n} devices, there are {len(jax.devices())}")
    return Mesh(np.array(jax.devices()[:n]).reshape(dp, fsdp, tp), ("dp", "fsdp", "tp"))

def edit_json(directory, file, **changes):
    """Set keys of a JSON file; None removes one."""
    path = os.path.join(directory, file)
    with open(path) as f:
        content = json.load(f) | changes
    with open(path, "w") as f:
        json.dump({k: v for k, v in content.items() if v is not None}, f)

def load(directory, on=None):
    cfg = model.read_config(directory)
    return cfg, model.load(model.Checkpoint(directory, cfg), on or mesh())

def assert_same(a, b):
    jax.tree.map(assert_array_equal, a, b)

def relative(a, b):
    """|a - b| / |b|, over a whole array."""
    return np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b)

def softmax(z):
    return scipy.special.softmax(np.asarray(z, np.float64), -1)

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
    rng, where = np.random.default_rng(0), model.flatten(model.shardings(cfg, on))
    return model.nest({name: jax.device_put(random_weight(rng, name, shape, cfg.D), where[name])
                       for name, shape in model.shapes(cfg).items()})

def random_prompts(cfg, lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, cfg.V, n).tolist() for n in lengths]

def hidden_states(params, cfg, rows, positions=None, segments=None, width=None):
    """model.forward of lists of ids, padded on the right; each is one sequence where nothing else is said."""
    width = width or max(map(len, rows))
    arrays = [np.array([[*row] + [0] * (width - len(row)) for row in lists], np.int32) for lists in (
        rows, positions or [range(len(row)) for row in rows], segments or [[1] * len(row) for row in rows])]
    run = jax.jit(model.forward, static_argnames=("cfg", "mesh", "dtype"))
    return run(params, cfg, mesh(), *arrays, dtype=jnp.float32)

def logits(params, cfg, tokens):
    return np.asarray(hidden_states(params, cfg, tokens) @ model.head(params).T)

def generate(params, cfg, prompts, max_answer, on=None, width=None, seed=0, **options):
    """model.generate of lists of ids, in NumPy; padded on the left with random ids, to be ignored."""
    lengths = np.array([len(p) for p in prompts], np.int32)
    padding = random_prompts(cfg, (width or max(lengths)) - lengths, seed=len(prompts[0]))
    tokens = np.array([left + p for left, p in zip(padding, prompts)], np.int32)
    out = model.generate(params, cfg, on or mesh(), tokens, lengths, jax.random.key(seed),
                         max_answer=max_answer, **options)
    return jax.tree.map(np.asarray, out)

# ---------------------------------------------------------------- model.py against transformers

HF_MODELS = {  # 7 and 2 queries per key/value head
    "tied": dict(vocab_size=331, hidden_size=112, intermediate_size=160, num_hidden_layers=3, head_dim=64,
                 num_attention_heads=14, num_key_value_heads=2, tie_word_embeddings=True, rms_norm_eps=1e-5,
                 rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "untied": dict(vocab_size=263, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                   num_attention_heads=8, num_key_value_heads=4, tie_word_embeddings=False,
                   rope_parameters={"rope_type": "default", "rope_theta": 5e3})}

@functools.cache
def hf_model(name):
    """-> (transformers' Qwen2 with random weights, the directory it was saved to)."""
    torch, transformers = need("torch", "transformers")
    torch.set_num_threads(1)  # more only wait for each other: a hundred times slower beside JAX
    config = transformers.Qwen2Config(eos_token_id=None, **HF_MODELS[name])
    theirs, rng, directory = transformers.Qwen2ForCausalLM(config), np.random.default_rng(1), new_directory()
    for key, p in theirs.named_parameters():
        p.data = torch.from_numpy(random_weight(rng, key, tuple(p.shape), config.hidden_size))
    theirs.save_pretrained(directory)
    if name == "untied":  # as transformers 4 wrote it, and as Qwen published it
        edit_json(directory, "config.json", rope_parameters=None, rope_theta=5e3, head_dim=None,
                  tie_word_embeddings=None)
    return theirs, directory

def hf_logits(theirs, tokens):
    torch, = need("torch")
    with torch.no_grad():
        return theirs(torch.tensor(tokens)).logits.numpy()

def test_logits_equal_transformers():
    worst = 0
    for name in HF_MODELS:
        theirs, directory = hf_model(name)
        cfg, params = load(directory)
        tokens = random_prompts(cfg, (24, 24, 24))
        want, got = hf_logits(theirs, tokens), logits(params, cfg, tokens)
        assert 1 < want.std() < 5, f"degenerate logits, deviation {want.std()}"
        worst = np.maximum(worst, abs(got - want).max())
        assert worst < 1e-4, (name, worst)
    figure(f"max error {worst:.1e}")

def test_greedy_answers_equal_transformers():
    """64 tokens for left-padded prompts of unequal length; then with two stop ids, which end rows early."""
    torch, = need("torch")
    ended = []
    for name in HF_MODELS:
        theirs, directory = hf_model(name)
        cfg, params = load(directory)
        prompts = random_prompts(cfg, (9, 1, 14, 5))
        ids = torch.tensor([[0] * (14 - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (14 - len(p)) + [1] * len(p) for p in prompts])
        greedy = functools.partial(theirs.generate, ids, attention_mask=mask, do_sample=False,
                                   max_new_tokens=64, pad_token_id=0)
        whole = greedy()[:, 14:].numpy()
        assert min(len(set(row)) for row in whole.tolist()) > 10, "an answer is a few tokens repeated"
        out = generate(params, cfg, prompts, 64, temperature=0.0)
        assert_array_equal(out["tokens_BT"], whole)
        assert out["cut_B"].all() and (out["lengths_B"] == 64).all()

        stops, copy = [int(whole[0, 20]), int(whole[2, 33])], new_directory(like=directory)
        edit_json(copy, "config.json", eos_token_id=int(whole[3, 0]))  # generation_config.json overrules it
        edit_json(copy, "generation_config.json", eos_token_id=stops)
        out = generate(params, model.read_config(copy), prompts, 64, temperature=0.0)
        want = greedy(eos_token_id=stops)[:, 14:].numpy()
        assert_array_equal(out["tokens_BT"][:, :want.shape[1]], want)
        lengths = [min([row.index(s) + 1 for s in stops if s in row], default=64) for row in whole.tolist()]
        assert_array_equal(out["lengths_B"], lengths)
        assert_array_equal(out["cut_B"], [not np.isin(row, stops).any() for row in whole])
        after = np.arange(64) >= out["lengths_B"][:, None]
        assert not out["tokens_BT"][after].any() and not out["logp_BT"][after].any()
        ended += lengths
    assert len(set(ended)) > 2
    figure(f"512 tokens equal; with stops, rows end after {', '.join(map(str, ended))}")

def test_saved_checkpoint_loads_in_transformers():
    transformers, = need("transformers")
    on = mesh(2, 2, 2) if len(jax.devices()) >= 8 else mesh()
    for name, file_bytes in (("tied", 4 << 30), ("tied", 150_000), ("untied", 60_000)):
        theirs, directory = hf_model(name)
        cfg, params = load(directory, on)
        copy = new_directory()
        shutil.copy(os.path.join(directory, "config.json"), copy)
        model.save(copy, params, cfg, on, "float32", file_bytes)
        files = [f for f in os.listdir(copy) if f.endswith(".safetensors")]
        assert (files == ["model.safetensors"]) == (file_bytes == 4 << 30)
        for tensors in (load_file(os.path.join(copy, f)) for f in files):
            assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= file_bytes
        tokens, again = random_prompts(cfg, (11, 11)), transformers.Qwen2ForCausalLM.from_pretrained(copy)
        assert_array_equal(hf_logits(again, tokens), hf_logits(theirs, tokens))
        assert_same(load(copy)[1], params)
    figure(f"1 and {len(files)} files")

def test_loads_bfloat16_and_several_files():
    torch, transformers = need("torch", "transformers")
    theirs, directory = hf_model("untied")
    copy, ours = new_directory(), new_directory()
    half = transformers.Qwen2ForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    half.save_pretrained(copy, max_shard_size="40KB")
    assert os.path.exists(os.path.join(copy, "model.safetensors.index.json"))
    cfg, params = load(copy)
    tokens = random_prompts(cfg, (11, 11))
    assert_allclose(logits(params, cfg, tokens), hf_logits(half.float(), tokens), rtol=0, atol=1e-4)
    shutil.copy(os.path.join(copy, "config.json"), ours)
    model.save(ours, load(directory)[1], cfg, mesh(), "bfloat16")  # our rounding is theirs
    assert_same(load(ours)[1], params)

def test_published_sizes():
    published = {"0.5B": 494_032_768, "1.5B": 1_543_714_304, "3B": 3_085_938_688, "7B": 7_615_616_512,
                 "14B": 14_770_033_664, "32B": 32_763_876_352}
    for size, n_params in published.items():
        directory = new_directory()
        shutil.copy(shared(f"qwen2.5/config-{size}.json"), os.path.join(directory, "config.json"))
        cfg = model.read_config(directory)
        assert cfg.n_params == n_params and cfg.H == cfg.D // cfg.N, cfg
        assert cfg.rope_theta == 1e6 and cfg.stop_ids == (151645,), cfg
    figure(f"{len(published)} parameter counts equal")

# ---------------------------------------------------------------- model.py: sampling

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
    return scipy.stats.chisquare(count[expected > 0], expected[expected > 0]).pvalue

def test_sampled_logps_equal_training_forward():
    """What `generate` reports is what the trainer computes; what it draws follows that, each time anew."""
    rng, prompts, worst = np.random.default_rng(3), random_prompts(TIED, (9, 4, 1, 6) * 4), 0
    for cfg, T, top_k, top_p in ((TIED, 0.7, 0, 1.0), (UNTIED, 1.0, 0, 1.0), (TIED, 1.2, 20, 0.8)):
        params, u = random_params(cfg, mesh()), np.full((2, 16, 32), np.nan)
        for seed in (0, 1):
            out = generate(params, cfg, prompts, 32, temperature=T, top_k=top_k, top_p=top_p, seed=seed)
            live = np.arange(32) < out["lengths_B"][:, None]
            tokens = out["tokens_BT"][live]
            answers = [row[:n].tolist() for row, n in zip(out["tokens_BT"], out["lengths_B"])]
            hidden = hidden_states(params, cfg, [p + a for p, a in zip(prompts, answers)], width=41)
            hidden = jnp.concatenate([h[len(p) - 1:][:len(a)] for h, p, a in zip(hidden, prompts, answers)])
            q = softmax(np.asarray(hidden @ model.head(params).T) / T)
            q = np.stack([truncated(row, top_k, top_p) for row in q])
            chosen, upto = (a[np.arange(len(q)), tokens] for a in (q, q.cumsum(-1)))
            right = np.log(chosen)
            if not top_k:
                right, _ = kernel.score(hidden, model.head(params), tokens, mesh(), temperature=T)
            worst = np.maximum(worst, abs(out["logp_BT"][live] - right).max())  # unlike max, it keeps a NaN
            assert worst < 1e-4, (cfg, T, worst)
            u[seed][live] = upto - rng.random(len(q)) * chosen  # if tokens follow q, these are uniform
        assert scipy.stats.kstest(u[~np.isnan(u)], "uniform").pvalue > 1e-3
        for a, b in ((u[..., 1:], u[..., :-1]), (u[:, 1:], u[:, :-1]), (u[0], u[1])):  # steps, rows, keys
            both = ~np.isnan(a + b)
            assert scipy.stats.pearsonr(a[both], b[both]).pvalue > 1e-3, "draws are related"
    figure(f"max error {worst:.1e}")

def test_draw_inverts_the_cdf():
    """At evenly spread uniforms each token comes as often as softmax says, to within two draws of 20,000."""
    rng, n = np.random.default_rng(4), 20_000
    for V in (11, 700):
        z = 2 * rng.standard_normal((2, V)).astype(np.float32)
        z[1, rng.random(V) < 0.3] = -np.inf
        tokens = jax.jit(model.draw)(jnp.tile(z, (n, 1)), jnp.repeat((jnp.arange(n) + 0.5) / n, 2))
        for row in (0, 1):
            off = np.bincount(tokens[row::2], minlength=V) - n * softmax(z[row])
            assert abs(off).max() < 2.1, off

def test_draw_never_takes_what_has_no_probability():
    """Also at u = 0, at the largest u below 1, and where rounding bites: around the steps of the CDF."""
    rng, drawn, last = np.random.default_rng(5), 0, np.nextafter(np.float32(1), 0)
    draw = jax.jit(lambda z, u_N: jax.lax.map(lambda u: model.draw(z[None], u[None])[0], u_N))
    for V, kept in ((5, 2), (256, 60), (700, 1), (700, 9), (3000, 400), *[(77_000, 150)] * 6):
        for nothing in (-np.inf, -1e30):
            z, where = np.full(V, nothing, np.float32), rng.choice(V, kept, replace=False)
            z[where] = 3 * rng.standard_normal(kept)
            steps = softmax(z).cumsum()[where]
            u = np.concatenate([[0, last], rng.random(200), *(steps + k * 2.0 ** -24 for k in range(-4, 5))])
            tokens = np.asarray(draw(z, np.clip(u, 0, last).astype(np.float32)))
            assert ((0 <= tokens) & (tokens < V)).all(), f"drew {tokens.max()} of {V} tokens"
            assert (z[tokens] > nothing).all(), f"{(z[tokens] == nothing).sum()} of probability 0 at V {V}"
            drawn += len(u)
    figure(f"{drawn} draws")

def test_sample_draws_from_the_truncated_softmax():
    """By chi-square, from two distributions in alternate rows; the log-probs are those after truncation."""
    rng, n, lowest = np.random.default_rng(6), 5_000, 1
    for V, *how in ((11, 0.7, 0, 1.0), (600, 1.3, 0, 1.0), (600, 0.8, 7, 1.0), (600, 0.7, 0, 0.6),
                    (600, 1.5, 60, 0.8)):
        z = 2 * rng.standard_normal((2, V)).astype(np.float32)
        sample = jax.jit(model.sample, static_argnums=(2, 3, 4))
        tokens, logp = map(np.asarray, sample(jnp.tile(z, (n, 1)), jax.random.key(V), *how))
        for row in (0, 1):
            p, mine = truncated(softmax(z[row] / how[0]), *how[1:]), tokens[row::2]
            assert (p[mine] > 0).all(), "drew a token outside the kept set"
            assert_allclose(logp[row::2], np.log(p[mine]), rtol=0, atol=1e-5)
            lowest = min(lowest, chi_square(mine, p))
    assert lowest > 1e-3, f"chi-square p {lowest}"
    greedy, logp = model.sample(z, None, 0.0, 0, 1.0)
    assert_array_equal(greedy, z.argmax(-1))
    assert_allclose(logp, np.log(softmax(z).max(-1)), rtol=0, atol=1e-5)
    figure(f"lowest p of 10 {lowest:.2f}")

# ---------------------------------------------------------------- model.py: rows, segments, meshes

def test_rows_do_not_depend_on_others():
    """Nor on how wide their padding is, or on what is in it."""
    params = random_params(UNTIED, mesh())
    ours, others = random_prompts(UNTIED, (6, 2, 7, 4)), random_prompts(UNTIED, (3, 9, 1, 4), seed=1)
    for T in (0.0, 1.0):
        a = generate(params, UNTIED, ours, 16, temperature=T)
        b = generate(params, UNTIED, [ours[0], others[1], ours[2], others[3]], 16, temperature=T, width=13)
        assert_array_equal(a["tokens_BT"][::2], b["tokens_BT"][::2])
        assert_allclose(a["logp_BT"][::2], b["logp_BT"][::2], rtol=0, atol=1e-5)
        assert (a["tokens_BT"][1::2] != b["tokens_BT"][1::2]).any(-1).all()

def test_packed_sequences_do_not_see_each_other():
    params, (a, b) = random_params(TIED, mesh()), random_prompts(TIED, (7, 9))
    hidden = functools.partial(hidden_states, params, TIED, width=20)
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
    exact, rounded = (model.forward(params, TIED, mesh(), tokens, positions, segments, dtype)
                      for dtype in (jnp.float32, jnp.bfloat16))
    assert rounded.dtype == jnp.bfloat16
    error = relative(rounded, exact)
    assert error < 0.06, error
    x = exact.astype(jnp.bfloat16)
    want = model.rms_norm(x.astype(jnp.float32), params["norm_D"], 1e-6).astype(jnp.bfloat16)
    assert_array_equal(model.rms_norm(x, params["norm_D"], 1e-6), want)
    figure(f"relative error {error:.3f}")

def test_gradients_equal_on_meshes():
    """Of random multiples of log-prob and entropy, in the weights and in the hidden states."""
    rng, worst = np.random.default_rng(7), 0
    for cfg, B, T, meshes in ((TIED, 8, 7, [(1, 8, 1), (2, 4, 1), (2, 2, 2)]), (UNTIED, 4, 6, [(2, 2, 2)])):
        tokens, targets = rng.integers(0, cfg.V, (2, B, T)).astype(np.int32)
        positions, segments = np.repeat([[[0, 1, 2, 0, 1, 2, 0]], [[1, 1, 1, 2, 2, 2, 0]]], B, 1)[:, :, :T]
        g, e = rng.standard_normal((2, B * T)).astype(np.float32)

        def value(params, shift, on):
            h = model.forward(params, cfg, on, tokens, positions, segments, jnp.float32).reshape(B * T, -1)
            vectors = {"weight": jnp.ones(B * T), "advantage": jnp.zeros(B * T)}
            _, out = kernel.grpo_loss(h + shift, model.head(params), targets.ravel(), vectors, on,
                                      temperature=0.8)
            return jnp.sum(g * out["logp"] + e * out["entropy"])

        results = []
        for on in (mesh(), *(mesh(*shape) for shape in meshes)):
            f = jax.jit(jax.value_and_grad(value, argnums=(0, 1)), static_argnums=2)
            out, (params, hidden) = f(random_params(cfg, on), np.zeros((B * T, cfg.D), np.float32), on)
            results.append(jax.tree.map(np.asarray, {"value": out, "hidden": hidden} | model.flatten(params)))
            errors = {name: relative(a, results[0][name]) for name, a in results[-1].items()}
            worst = np.max([worst, *errors.values()])
            assert worst < 1e-5, errors
    figure(f"max relative error {worst:.1e}")

def test_greedy_answers_equal_on_meshes():
    prompts = random_prompts(TIED, (5, 3, 8, 8, 1, 2, 4, 7))
    one, many = (generate(random_params(TIED, on), TIED, prompts, 24, on, temperature=0.0)
                 for on in (mesh(), mesh(2, 2, 2)))
    assert_allclose(one.pop("logp_BT"), many.pop("logp_BT"), rtol=0, atol=1e-4)
    assert_same(one, many)

# ---------------------------------------------------------------- model.py: loading

TINY = dict(model_type="qwen2", vocab_size=37, hidden_size=16, intermediate_size=24, num_attention_heads=4,
            num_key_value_heads=2, num_hidden_layers=2, tie_word_embeddings=False, initializer_range=0.02)

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
    model.write_random(directory, TINY | dict(vocab_size=1000, hidden_size=256, intermediate_size=512,
                                              num_hidden_layers=8), 0)
    cfg, whole = load(directory)
    where, shapes = model.flatten(model.shardings(cfg, on)), model.shapes(cfg)
    tracemalloc.start()
    params = model.load(Watched(directory, cfg), on)
    tracemalloc.stop()
    assert_same(params, whole)
    for name, a in model.flatten(params).items():
        assert a.sharding == where[name] and a.dtype == jnp.float32, (name, a.sharding, a.dtype)
    assert Counter(name for name, *_ in asked) == dict.fromkeys(shapes, 8)
    shard = 4 * max(math.prod(shape) for _, shape, *_ in asked)
    for name, shape, before, used in asked:
        parts = 1 if "norm" in name or "/b" in name else 8
        assert math.prod(shape) * parts == math.prod(shapes[name]), (name, shape)
        assert used < 1.3 * 4 * math.prod(shape) + 10_000, f"{used} bytes to read {shape} of {name}"
        assert before < 3 * shard, f"{before} bytes of host memory held when {name} is read"
    held, used = max(before for *_, before, _ in asked), max(used for *_, used in asked)
    figure(f"a read takes {used / shard:.2f} of the largest shard, {held / shard:.2f} is held from before")

def test_saved_shards_load_on_other_meshes():
    params = random_params(UNTIED, mesh(1, 8, 1))
    tree, directory = {"params": params, "step": jnp.int32(7), "more": (params["norm_D"],)}, new_directory()
    model.save_shards(tree, directory)
    for on in (mesh(), mesh(1, 8, 1), mesh(2, 2, 2)):
        like = {"params": random_params(UNTIED, on), "step": jnp.int32(0), "more": (jnp.zeros(UNTIED.D),)}
        got = model.load_shards(directory, like)
        assert_same(got, tree)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(like)):
            assert (a.sharding, a.dtype) == (b.sharding, b.dtype)
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])  # and as a TPU may lay them out: columns first
    columns = jax.device_put(np.arange(6.0, dtype=np.float32).reshape(2, 3), Format(Layout((1, 0)), one))
    assert np.asarray(columns).strides == (4, 8)
    model.save_shards({"a": columns}, directory_of_columns := new_directory())
    assert_array_equal(model.load_shards(directory_of_columns, {"a": jnp.zeros((2, 3))})["a"], columns)
    file = os.path.join(directory, "shards-00000.safetensors")
    shards = load_file(file)
    del shards[[k for k in shards if k.startswith("params/embed_VD")][3]]
    save_file(shards, file)
    try:
        model.load_shards(directory, like)
    except model.CheckpointError as e:
        assert "params/embed_VD" in str(e)
    else:
        raise AssertionError("a shard is missing and nothing was said")

def test_refusals_name_the_cause():
    norm, query = "model.norm.weight", "model.layers.1.self_attn.q_proj.weight"
    index, yarn = "model.safetensors.index.json", {"rope_type": "yarn", "factor": 4.0}

    def config(**changes):
        return lambda d: edit_json(d, "config.json", **changes)

    def gone(name):
        return lambda d: os.remove(os.path.join(d, name))

    def file(name, content):
        return lambda d: open(os.path.join(d, name), "w").write(content)

    def mapped(name):
        return file(index, json.dumps({"weight_map": {norm: name}}))

    def tensors(change):
        def edit(d, path="model.safetensors"):
            t = load_file(os.path.join(d, path))
            change(t)
            save_file(t, os.path.join(d, path))
        return edit

    cases = [
        (config(model_type="llama"), "llama"), (config(model_type=None), "model_type"),
        (config(rope_scaling=yarn), "yarn"), (config(rope_scaling={"type": "linear", "factor": 2}), "linear"),
        (config(rope_parameters=yarn | {"rope_theta": 1e4}), "yarn"), (config(rope_scaling="yarn"), "usable"),
        (config(rope_parameters={"rope_type": "default", "rope_theta": 1e4}, rope_scaling=yarn), "yarn"),
        (config(use_sliding_window=True), "sliding"), (config(hidden_act="gelu"), "gelu"),
        (config(layer_types=["full_attention", "sliding_attention"]), "sliding"),
        (config(quantization_config={"bits": 4}), "quantised"), (config(hidden_size=None), "hidden_size"),
        (gone("config.json"), "config.json is missing"), (file("config.json", "{"), "not readable JSON"),
        (file("config.json", "[]"), "config.json holds a list"), (config(vocab_size="many"), "many"),
        (file("generation_config.json", "[]"), "generation_config.json"), (config(vocab_size=-1), "positive"),
        (config(num_key_value_heads=3), "4 query heads"), (config(head_dim=5), "of size 5"),
        (gone("model.safetensors"), "model.safetensors"),
        (file("model.safetensors", "not safetensors at all"), "is not a safetensors file"),
        (lambda d: os.truncate(os.path.join(d, "model.safetensors"), 9000), "is not a safetensors file"),
        (tensors(lambda t: t.pop(query)), f"lacks the tensor {query}"),
        (tensors(lambda t: t.update({norm: np.ones(17)})), f"{norm} has shape (17,)"),
        (tensors(lambda t: t.update({query: t[query].astype(np.int8)})), f"{query} has type I8"),
        (tensors(lambda t: t.update(more=np.ones(2))), "tensor more"),
        (config(num_hidden_layers=1), "tensor model.layers.1."), (mapped("../x.safetensors"), "../x.safeten"),
        (config(num_hidden_layers=3), "tensor model.layers.2."), (mapped("gone.safetensors"), "gone.safe"),
        (file(index, "{}"), "index.json"), (file(index, "[]"), "index.json")]
    whole = new_directory()
    model.write_random(whole, TINY, 0)
    load(whole)  # good as it is, and good at the path that the index must not name
    shutil.copy(os.path.join(whole, "model.safetensors"), os.path.join(scratch().name, "x.safetensors"))
    for i, (spoil, words) in enumerate(cases):
        directory = new_directory(like=whole)
        spoil(directory)
        try:
            load(directory)
        except model.CheckpointError as e:
            assert words in str(e), f"case {i}: {words!r} is not in {str(e)!r}"
        else:
            raise AssertionError(f"case {i}, {words!r}, was accepted")
    figure(f"{len(cases)} refusals")

# ---------------------------------------------------------------- kernel.py

IMPLS, VECTORS = ("jax", "pallas", "full"), ("weight", "advantage", "old", "sampler", "ref")
KNOBS = {"clip_low": 0.2, "clip_high": 0.3, "beta": 0.3, "is_cap": 1.5, "entropy_bonus": 0.05}
TOKENS = ("logp", "entropy", "clip_fraction", "ratio", "logprob_gap", "kl")
EVERYTHING = "loss logp entropy"  # what a gradient can be of

@functools.cache
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

def how(impl):
    return impl + (" interpreted" if tiles(impl).interpret else " compiled") * (impl == "pallas")

def finite(tree):
    return all(np.isfinite(np.asarray(a, np.float32)).all() for a in jax.tree.leaves(tree))

def loss_inputs(N, V, T, seed, have=VECTORS, masked=0.4, top=20.0, dtype=np.float32):
    """Random hidden states, head, targets, token vectors, and cotangents of log-prob and entropy.

    The largest logit of every third token is +-top. Ratios keep away from the bounds of the clip, so that
    rounding does not decide. All that masked tokens hold is NaN or infinite, but for their targets.
    """
    rng = np.random.default_rng(seed)
    h, W = rng.standard_normal((N, 24)), 0.3 * rng.standard_normal((V, 24)).astype(np.float32)
    h[::3] *= top * T / abs(h[::3] @ W.T).max(-1, keepdims=True)
    h, head = (np.asarray(jnp.asarray(a, dtype), np.float64) for a in (h, W))
    z = h @ head.T / T
    y = np.where(rng.random(N) < 0.3, z.argmax(-1), rng.integers(0, V, N))
    logp = scipy.special.log_softmax(z, -1)[np.arange(N), y]
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
    live, seen, knobs = v["weight"] > 0, Counter(), SimpleNamespace(**KNOBS | knobs)
    low, high = 1 - knobs.clip_low, 1 + knobs.clip_high
    W = np.asarray(jnp.asarray(W, h.dtype), np.float64)
    h = np.where(live[:, None], np.asarray(h, np.float64), 0)
    log_p, loss = scipy.special.log_softmax(h @ W.T / T, -1), np.zeros(len(y))
    p, (g, e) = np.exp(log_p), (live * (k in of) * c for k, c in zip(("logp", "entropy"), cotangents))
    absent = {k for k, needs in (("logprob_gap", "sampler"), ("kl", "ref")) if needs not in v}
    tokens = {k: np.zeros(len(y)) for k in TOKENS if k not in absent}
    for i in np.flatnonzero(live):
        w, A, logp = float(v["weight"][i]), float(v["advantage"][i]), log_p[i, y[i]]
        old = float(v["old"][i]) if "old" in v else logp
        ratio, entropy, cap, kl, dkl = np.exp(logp - old), -p[i] @ log_p[i], 1.0, 0.0, 0.0
        side = "above" if ratio > high else "below" if ratio < low else "within"
        bound = {("above", True): high, ("below", False): low}.get((side, A > 0))
        if "sampler" in v:
            gap = old - float(v["sampler"][i])
            cap, tokens["logprob_gap"][i] = min(np.exp(gap), knobs.is_cap) if knobs.is_cap else 1.0, abs(gap)
        if "ref" in v:
            d = float(v["ref"][i]) - logp
            kl, dkl = np.exp(d) - d - 1, 1 - np.exp(d)
            tokens["kl"][i] = kl
        loss[i] = w * (knobs.beta * kl - cap * A * (bound or ratio) - knobs.entropy_bonus * entropy)
        if "loss" in of:
            g[i] += w * (knobs.beta * dkl - (0 if bound else cap * A * ratio))
            e[i] -= w * knobs.entropy_bonus
        for k, x in zip(TOKENS, (logp, entropy, bound is not None, ratio)):
            tokens[k][i] = x
        seen.update([(side, A > 0), "capped" if cap == knobs.is_cap else "not capped"])
    # d/dz_v of -sum p log p, where dp_u/dz_v = p_u (1[u=v] - p_v)
    de = -p * (log_p + 1) + p * (p * (log_p + 1)).sum(-1, keepdims=True)
    dz = (g[:, None] * (np.eye(len(W))[y] - p) + e[:, None] * de) / T
    return loss, tokens, dz @ W, dz.T @ h, seen

def objective(h, W, y, v, cotangents, impl, T, of, on, cores, **knobs):
    loss, tokens = kernel.grpo_loss(h, W, y, v, on, temperature=T, impl=impl, blocks=tiles(impl, cores),
                                    **knobs)
    parts = {"loss": loss} | {k: jnp.sum(c * tokens[k]) for k, c in zip(("logp", "entropy"), cotangents)}
    return sum(parts[k] for k in of.split()) / 2, (loss, tokens)

@functools.partial(jax.jit, static_argnames=("impl", "T", "of", "on", "cores", *KNOBS))
def gradients(h, W, *args, **settings):
    (_, out), (dh, dW) = jax.value_and_grad(objective, argnums=(0, 1), has_aux=True)(h, W, *args, **settings)
    return *out, 2 * dh, 2 * dW  # of a half, so that the loss does not come with a cotangent of 1

score = jax.jit(kernel.score, static_argnames=("mesh", "temperature", "impl", "blocks"))

def interpreted(f, *args, **settings):
    """f's result. An interpreter that found a race says so, and one that failed must be told to forget it.
    Nor may anything come of what `empty` holds: here NaN."""
    def empty(shape, dtype):
        return jnp.full(shape, jnp.nan, dtype)
    try:
        with contextlib.redirect_stdout(io.StringIO()) as said, mock.patch.object(jax.lax, "empty", empty):
            out = jax.block_until_ready(f(*args, **settings))
    finally:
        pltpu.reset_tpu_interpret_mode_state()
    assert "RACE DETECTED" not in said.getvalue(), said.getvalue()
    return out

def run_loss(impl, inputs, T, of="loss", on=None, cores=1, **knobs):
    """-> (loss, tokens, dh, dW)"""
    knobs = KNOBS | knobs
    return interpreted(gradients, *inputs, impl=impl, T=T, of=of, on=on or mesh(), cores=cores, **knobs)

def run_score(impl, inputs, T, on=None):
    return interpreted(score, *inputs[:3], mesh=on or mesh(), temperature=T, impl=impl, blocks=tiles(impl))

def test_grpo_loss_equals_numpy():
    """Chunks and tiles end in the middle of tokens, vocabulary and hidden states."""
    single, half = np.float32, jnp.bfloat16
    cases = [(296, 203, 0.6, single, 0.0, "loss"), (296, 203, 1.3, single, 0.05, EVERYTHING),
             (1, 203, 1.3, single, 0.05, EVERYTHING), (77, 37, 0.6, single, 0.0, "logp"),
             (296, 203, 1.3, half, 0.05, EVERYTHING), (77, 65, 0.6, half, 0.05, "loss")]
    seen, said = Counter(), []
    for impl in IMPLS:
        worst = {single: [0.0] * 3, half: [0.0] * 3}
        for i, (N, V, T, dtype, bonus, of) in enumerate(cases):
            eps, top = (1e-5, 20) if dtype == single else (1e-2, 35)
            inputs = loss_inputs(N, V, T, i, VECTORS, 0.4 * (N > 1), top, dtype)
            loss, tokens, dh, dW = run_loss(impl, inputs, T, of, entropy_bonus=bonus)
            want, right, *d, counted = numpy_loss(*inputs, T, of, entropy_bonus=bonus)
            seen += counted
            assert (dh.dtype, dW.dtype) == (dtype, np.float32) and set(tokens) == set(right), (impl, i)
            loss_N, _ = kernel.grpo_terms(tokens["logp"], tokens["entropy"], inputs[3],
                                          **KNOBS | {"entropy_bonus": bonus})
            for k, a, b in (("loss", loss_N, want), *((k, tokens[k], right[k]) for k in right)):
                assert_allclose(a, b, rtol=eps, atol=eps, err_msg=f"{how(impl)}, case {i}: {k}")
            errors = abs(tokens["logp"] - right["logp"]).max(), relative(dh, d[0]), relative(dW, d[1])
            assert np.max([*errors, abs(loss - want.sum()) / abs(want).sum()]) <= eps, (how(impl), i, errors)
            worst[dtype] = np.maximum(worst[dtype], errors)
        said.append(f"{how(impl)} " + ", ".join(f"{max(e):.0e}" for e in worst.values()))
    assert len(seen) == 8 and min(seen.values()) > 5, seen
    figure("max error in float32, bfloat16: " + "; ".join(said))

def test_grpo_loss_of_absent_vectors():
    """Each of old, sampler, ref absent or present, with and without KL and cap: algebra, the same for all."""
    worst = 0
    for i, have in enumerate(["old sampler", "old ref", "old", "sampler ref", "sampler", "ref", ""]):
        knobs = {"clip_low": 0.1, "beta": 0.0 if i == 1 else 0.2, "is_cap": 0.0 if i == 3 else 1.2}
        inputs = loss_inputs(45, 37, 1.3, i, ("weight", "advantage", *have.split()))
        loss, tokens, *grads = run_loss("jax", inputs, 1.3, entropy_bonus=0.0, **knobs)
        want, right, *d, _ = numpy_loss(*inputs, 1.3, entropy_bonus=0.0, **knobs)
        errors = abs(loss - want.sum()) / abs(want).sum(), relative(grads[0], d[0]), relative(grads[1], d[1])
        worst = np.max([worst, *errors])
        assert worst < 1e-5 and set(tokens) == set(right), (have, errors, set(tokens))
        for k, a in tokens.items():
            assert_allclose(a, right[k], rtol=1e-5, atol=1e-5, err_msg=f"{have}: {k}")
    figure(f"max error {worst:.1e}")

def test_grpo_loss_of_masked_tokens():
    """They are as if they were not there, whatever they hold; all masked, everything is 0."""
    for impl in IMPLS:
        run = functools.partial(run_loss, impl, T=1.3, of=EVERYTHING)
        h, W, y, v, cotangents = inputs = loss_inputs(296, 203, 1.3, 9)
        live = v["weight"] > 0
        zeros = {k: np.where(live, a, 0) for k, a in v.items()}
        dirty, clean = run(inputs), run((jnp.where(live[:, None], h, 0), W, y * live, zeros, cotangents))
        assert finite(dirty), how(impl)
        assert_same(dirty, clean)
        for a in (dirty[2], *dirty[1].values()):
            assert not np.asarray(a)[~live].any() and np.asarray(a)[live].any()
        nothing = run(loss_inputs(296, 203, 1.3, 10, masked=1))
        assert not any(np.asarray(a).any() for a in jax.tree.leaves(nothing)), how(impl)

def test_grpo_loss_of_a_ratio_that_overflows():
    """A clipped token carries no gradient however far its ratio is out; another's stays finite."""
    h, W, y, v, cotangents = loss_inputs(45, 37, 1.0, 10, VECTORS[:3], masked=0)
    v["advantage"] = np.abs(v["advantage"])
    v["old"] = np.full(45, -300, np.float32)
    loss, _, *grads = run_loss("jax", (h, W, y, v, cotangents), 1.0, entropy_bonus=0.0)
    assert_allclose(loss, -1.3 * (v["weight"] * v["advantage"]).sum(), rtol=1e-5)
    for a in grads:
        assert_array_equal(a, np.zeros(a.shape))
    v["advantage"] = -v["advantage"]
    assert finite(run_loss("jax", (h, W, y, v, cotangents), 1.0, entropy_bonus=0.0))

def test_grpo_loss_of_large_logits():
    """Of 1e4: what exp makes of them must neither overflow nor cancel."""
    said = []
    for impl in IMPLS:
        worst = 0
        for dtype in (np.float32, jnp.bfloat16):
            inputs = loss_inputs(296, 203, 1.3, 11, top=1e4, dtype=dtype)
            out = run_loss(impl, inputs, 1.3, EVERYTHING)
            assert finite(out), how(impl)
            right = numpy_loss(*inputs, 1.3)[1]
            worst = np.max([worst, *(abs(out[1][k] - right[k]).max() / 1e4 for k in ("logp", "entropy"))])
        assert worst <= 2e-6, (how(impl), worst)
        said.append(f"{how(impl)} {worst:.0e}")
    figure("max error, a part of the largest: " + ", ".join(said))

def test_score_equals_grpo_loss():
    for impl in IMPLS:
        for dtype in (np.float32, jnp.bfloat16):
            inputs = loss_inputs(296, 203, 1.3, 12, masked=0, dtype=dtype)
            tokens = run_loss(impl, inputs, 1.3, EVERYTHING)[1]
            for k, a in zip(("logp", "entropy"), run_score(impl, inputs, 1.3)):
                assert_allclose(a, tokens[k], rtol=1e-6, atol=1e-6, err_msg=f"{how(impl)}: {k}")

def test_logits_never_exist():
    """Not those of more than 128 tokens, as asked for. A score takes one GEMM, loss and gradients three."""
    inputs = loss_inputs(1200, 1003, 1.3, 13)
    for impl in IMPLS:
        gradient = functools.partial(gradients, impl=impl, T=1.3, on=mesh(), cores=1, **KNOBS)
        for gemms, f, args in (
                (1, functools.partial(score, mesh=mesh(), impl=impl, blocks=tiles(impl)), inputs[:3]),
                (3, functools.partial(gradient, of="loss"), inputs),
                (6, functools.partial(gradient, of=EVERYTHING), inputs)):  # for other cotangents all again
            text = str(jax.make_jaxpr(f)(*args))
            sizes = [math.prod(map(int, dims.split(","))) for dims in re.findall(r"\w\[([\d,]+)\]", text)]
            assert (max(sizes) > 128 * 1003) == (impl == "full"), (impl, gemms, max(sizes))
            assert impl == "pallas" or text.count("dot_general[") == gemms, (impl, gemms)

def test_grpo_loss_is_the_same_on_any_mesh():
    """Scores too, and where the vocabulary does not divide over the devices, or gives some nothing."""
    cases = [("jax", 203, (1, 8, 1)), ("jax", 203, (2, 4, 1)), ("jax", 203, (2, 2, 2)), ("jax", 5, (1, 8, 1)),
             ("jax", 5003, (2, 2, 1)), ("full", 203, (2, 2, 2)), ("pallas", 203, (2, 2, 2)),
             ("pallas", 300, (1, 8, 1))]
    worst, close = 0, functools.partial(assert_allclose, rtol=1e-5, atol=1e-5)
    for impl, V, dims in cases:
        inputs, of = loss_inputs(296, V, 1.3, V), "loss" if impl == "pallas" else EVERYTHING
        one, many = run_loss("jax", inputs, 1.3, of), run_loss(impl, inputs, 1.3, of, mesh(*dims))
        jax.tree.map(close, many[:2], one[:2])
        if dims == (2, 2, 2):
            for k, a in zip(("logp", "entropy"), run_score(impl, inputs, 1.3, mesh(*dims))):
                close(np.where(inputs[3]["weight"] > 0, a, 0), one[1][k])
        errors = [relative(a, np.asarray(b, np.float64)) for a, b in zip(many[2:], one[2:])]
        worst = np.max([worst, *errors])
        assert worst <= 1e-5, (how(impl), V, dims, errors)
    figure(f"{len(cases)} meshes: max relative error {worst:.1e}")

def test_pallas_kernels_on_two_cores():
    """Of a chip whose cores share out the parallel dimension of a grid: nothing races, nothing is lost."""
    if not tiles("pallas").interpret:
        raise SkipTest("races are looked for where the kernels are interpreted")
    inputs = loss_inputs(150, 100, 1.3, 14)
    two, one = run_loss("pallas", inputs, 1.3, cores=2), run_loss("jax", inputs, 1.3)
    errors = [relative(a, np.asarray(b, np.float64)) for a, b in zip(two[2:], one[2:])]
    assert np.max(errors) <= 1e-5, errors
    figure(f"max relative error {np.max(errors):.1e}")

def test_grpo_loss_equals_liger():
    """Three ways of another's to weigh answers, with KL and importance weights, off-policy."""
    torch, liger = need("torch", "liger_kernel.chunked_loss")
    B, T, rng, worst = 6, 20, np.random.default_rng(15), 0
    h, W, y, v, cotangents = loss_inputs(B * T, 203, 0.7, 15, masked=0)
    v["advantage"], lengths = np.repeat(v["advantage"][:B], T), rng.integers(1, T + 1, B)
    mask = (np.arange(T) < lengths[:, None]).astype(np.float32)
    rows = {k: torch.tensor(a.reshape(B, T)) for k, a in v.items()}
    taken = torch.tensor(y.reshape(B, T).astype(np.int64))
    for kind, each in (("grpo", 1 / lengths / B), ("bnpo", 1 / mask.sum()), ("dr_grpo", 1 / (B * T))):
        theirs = liger.LigerFusedLinearGRPOLoss(beta=0.3, compiled=False, epsilon_low=0.2, epsilon_high=0.3,
                                                loss_type=kind, max_completion_length=T, temperature=0.7)
        primals = [torch.tensor(np.asarray(a), requires_grad=True) for a in (h, W)]
        want, _ = theirs(primals[0].reshape(B, T, -1), primals[1], taken, torch.tensor(mask),
                         rows["advantage"][:, 0], ref_per_token_logps=rows["ref"],
                         old_per_token_logps=rows["old"],
                         vllm_is_ratio=torch.exp(rows["old"] - rows["sampler"]).clamp(max=1.5))
        want.backward()
        v["weight"] = (mask * np.reshape(each, (-1, 1))).ravel().astype(np.float32)
        for impl in IMPLS:
            loss, _, *grads = run_loss(impl, (h, W, y, v, cotangents), 0.7, entropy_bonus=0.0)
            errors = [relative(a, b.detach().numpy()) for a, b in zip(
                (loss, *grads), (want, *(p.grad for p in primals)))]
            worst = np.max([worst, *errors])
            assert worst < 1e-4, (how(impl), kind, errors)
    figure(f"grpo, bnpo, dr_grpo: max relative error {worst:.1e}")

# ---------------------------------------------------------------- train.py

HERE = os.path.dirname(os.path.abspath(__file__))
TINY_FLAGS = "--batch 4 --npq 4 --steps 2 --sft_steps 1 --minibatches 2 --eval_n 8 --eval_every 1".split()

def run_train(*flags, devices=1, code=0):
    """python train.py FLAGS in a process of its own -> its output."""
    env = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices), "JAX_PLATFORMS": "cpu",
                        "HF_HOME": os.path.join(scratch().name, "hf")}
    done = subprocess.run([sys.executable, os.path.join(HERE, "train.py"), *map(str, flags)], env=env,
                          text=True, capture_output=True, timeout=1500)
    text = done.stdout + done.stderr
    assert done.returncode == code, f"exit code {done.returncode}, wanted {code}:\n{text}"
    return text

def metrics_of(out):
    with open(os.path.join(out, "metrics.jsonl")) as f:
        return [json.loads(line) for line in f]

def without_times(rows):
    timed = ("time/", "throughput/", "rollout/", "memory/")
    return [{k: v for k, v in row.items() if not k.startswith(timed)} for row in rows]

@functools.cache
def update_case():
    """A small model and 16 random rows, with every vector that a rollout gives."""
    shape = model.ModelConfig(V=40, D=16, F=16, N=4, K=2, H=4, L=2, rope_theta=1e4, rms_eps=1e-6, tied=True,
                              max_positions=64, stop_ids=(1,))
    rng = np.random.default_rng(5)
    weights = {k: random_weight(rng, k, s, shape.D) for k, s in model.shapes(shape).items()}
    prompts = [rng.integers(0, 40, rng.integers(2, 8)).tolist() for _ in range(16)]
    answers = [rng.integers(0, 40, rng.integers(1, 9)).tolist() for _ in range(16)]
    sampler = [-rng.random(9) * 3 for _ in range(16)]
    return shape, weights, prompts, answers, rng.standard_normal(16), sampler

def placed(weights, on):
    return model.nest({k: jax.device_put(w, NamedSharding(on, model.spec(k))) for k, w in weights.items()})

def gradient_of_update(where, rows=None, case=None, **flags):
    """The gradient that train.update applies, flat, and its metrics: sgd at a large rate, no clipping."""
    shape, weights, prompts, answers, advantages, sampler = case or update_case()
    cfg = train.Config(optimizer="sgd", grad_clip=0, dtype="float32", max_answer=12, is_cap=1.5, **flags)
    params = placed(weights, where)
    if rows is None:
        rows = train.make_rows(prompts, answers, advantages, 16, cfg, sampler=sampler)
        rows["old"] = rows["sampler"] - np.float32(0.1) * (rows["weight"] > 0)
        rows["ref"] = rows["sampler"] * np.float32(0.9)
    total, metrics = None, []
    for batch in train.to_minibatches(rows, cfg, where):
        fresh = jax.tree.map(jnp.copy, params)
        state = train.optimizer(cfg).init(params)
        new, _, m = train.update(fresh, state, batch, 1e4, cfg=cfg, shape=shape, mesh=where)
        change = {k: (weights[k] - np.asarray(a)) / 1e4 for k, a in model.flatten(new).items()}
        total = change if total is None else {k: total[k] + change[k] for k in change}
        metrics.append({k: float(v) for k, v in m.items()})
    return total, metrics

def worst(a, b):
    """Largest relative error over the tensors of two gradients."""
    return max(relative(a[k], b[k]) for k in b)

def test_train_gradient_is_the_same_for_any_split():
    errors = []
    for agg in ("token", "sequence", "constant"):
        base, (m,) = gradient_of_update(mesh(), loss_agg=agg, beta=0.1)
        for micro in (1, 2, 4, 5) if agg == "token" else (3,):
            split, (n,) = gradient_of_update(mesh(), loss_agg=agg, beta=0.1, micro_batch=micro)
            errors.append(worst(split, base))
            for k in m:
                assert_allclose(n[k], m[k], rtol=1e-5, atol=1e-6, err_msg=k)
    assert max(errors) < 1e-5, errors
    figure(f"micro_batch 1, 2, 3, 4, 5 and all: relative error {max(errors):.1e}")

def test_train_gradient_is_the_same_on_any_mesh():
    base, (m,) = gradient_of_update(mesh(), beta=0.1)
    errors = []
    for dims, micro in (((1, 8, 1), 0), ((2, 4, 1), 1), ((2, 2, 2), 3), ((8, 1, 1), 2)):
        split, (n,) = gradient_of_update(mesh(*dims), beta=0.1, micro_batch=micro)
        errors.append(worst(split, base))
        assert_allclose(n["loss"], m["loss"], rtol=1e-5)
        assert n["valid_tokens"] == m["valid_tokens"]
    assert max(errors) < 1e-5, errors
    figure(f"1 device against 1,8,1 2,4,1 2,2,2 8,1,1: relative error {max(errors):.1e}")

def test_train_update_equals_numpy_for_every_aggregation():
    """Loss and gradient of an untied head, in float64 from the hidden states, weights written down here."""
    shape, weights, prompts, answers, _, sampler = update_case()
    rng = np.random.default_rng(6)
    shape = dataclasses.replace(shape, tied=False)
    weights = weights | {"head_VD": random_weight(rng, "head_VD", (shape.V, shape.D), shape.D)}
    rewards = np.array([[1.1] * 4, [0, 0.1, 1.1, 0.1], [1, 0, 0, 0], [0.1, 0.1, 1.1, 1.1]])
    advantages = train.group_advantages(rewards, 4, "grpo")
    assert (advantages[:4] == 0).all() and (advantages[4:] != 0).all()
    lengths, n, errors, seen = [len(a) for a in answers], 16, [], Counter()
    for agg, each in (("token", [1 / sum(lengths)] * n), ("sequence", [1 / (n * k) for k in lengths]),
                      ("constant", [1 / (n * 12)] * n)):
        cfg = train.Config(max_answer=12, loss_agg=agg)
        rows = train.make_rows(prompts, answers, advantages, 16, cfg, sampler)
        params = placed(weights, mesh())
        hidden = jax.jit(model.forward, static_argnums=(1, 2, 6))(
            params, shape, mesh(), rows["tokens"], rows["positions"], rows["segments"], jnp.float32)
        h, W = np.asarray(hidden).reshape(-1, shape.D), weights["head_VD"]
        y, mask = rows["targets"].reshape(-1), rows["weight"].reshape(-1) > 0
        logp = scipy.special.log_softmax(h.astype(np.float64) @ W.T / 0.7, -1)[np.arange(len(y)), y]
        for k, spread in (("old", 0.5), ("ref", 1.0)):  # close enough that some ratios are within the clip
            noisy = np.where(mask, logp + rng.uniform(-spread, spread, len(y)), 0)
            rows[k] = noisy.astype(np.float32).reshape(rows["tokens"].shape)
        got, (m,) = gradient_of_update(mesh(), rows, (shape, weights, *[None] * 4), loss_agg=agg, beta=0.1,
                                       temperature=0.7, micro_batch=5)
        v = {k: rows[k].reshape(-1) for k in ("advantage", "old", "ref", "sampler")}
        v["weight"] = mask * np.repeat(each, 16)
        knobs = dict(clip_low=0.2, clip_high=0.28, beta=0.1, is_cap=1.5, entropy_bonus=0.0)
        loss_N, _, _, dW, cases = numpy_loss(h, W, y, v, np.zeros((2, len(y))), 0.7, **knobs)
        assert_allclose(m["loss"], loss_N.sum(), rtol=1e-5, atol=1e-6)  # a sum of terms of either sign
        errors.append(relative(got["head_VD"], dW))
        seen += cases
    assert max(errors) < 1e-5, errors
    assert seen["above", True] > 3 and seen["below", False] > 3 and seen["within", True] > 3, seen
    figure(f"relative error {max(errors):.1e}")

def test_train_supervised_update_is_maximum_likelihood():
    shape, weights, prompts, answers, _, _ = update_case()
    prompts, answers = prompts[:4], answers[:4]
    params = model.nest({k: jnp.asarray(w) for k, w in weights.items()})
    rows = train.make_rows(prompts, answers, np.ones(4), 16, train.Config(loss_agg="token", max_answer=12))
    got, (m,) = gradient_of_update(mesh(), rows=rows)

    def nll(params):  # by the textbook: full logits, log-softmax, mean over answer tokens
        total = count = 0
        for prompt, answer in zip(prompts, answers):
            tokens = jnp.array([prompt + answer])
            hidden = model.forward(params, shape, mesh(), tokens, jnp.arange(tokens.shape[1])[None],
                                   jnp.ones_like(tokens), jnp.float32)
            logp = jax.nn.log_softmax(hidden[0] @ model.head(params).T)
            total -= sum(logp[len(prompt) - 1 + i, t] for i, t in enumerate(answer))
            count += len(answer)
        return total / count

    value, wanted = jax.jit(jax.value_and_grad(nll))(params)
    error = worst(got, model.flatten(wanted))
    assert error < 1e-5, error
    assert_allclose(m["nll"] / m["valid_tokens"], value, rtol=1e-5)
    figure(f"relative error {error:.1e}")

def test_train_optimizer_and_schedule():
    shape, weights, prompts, answers, _, _ = update_case()
    where = mesh()
    matrices = lambda params: {k: not ("norm" in k or "/b" in k) for k in params}
    for name, wanted in (("adamw", optax.adamw(0.01, b2=0.9, weight_decay=0.1, mask=matrices)),
                         ("lion", optax.lion(0.01, b2=0.9, weight_decay=0.0))):
        cfg = train.Config(optimizer=name, b2=0.9, weight_decay=0.1 * (name == "adamw"), grad_clip=1e-3,
                           dtype="float32", max_answer=12)
        rows = train.make_rows(prompts, answers, np.ones(16), 16, cfg)
        grads, _ = gradient_of_update(where, rows=rows)
        params = placed(weights, where)
        (batch,) = train.to_minibatches(rows, cfg, where)
        state = train.optimizer(cfg).init(params)
        new, _, m = train.update(params, state, batch, 0.01, cfg=cfg, shape=shape, mesh=where)
        norm = math.sqrt(sum((g.astype(np.float64) ** 2).sum() for g in grads.values()))
        assert_allclose(m["grad_norm"], norm, rtol=1e-5)
        clipped = {k: g * 1e-3 / norm for k, g in grads.items()}
        steps, _ = wanted.update(clipped, wanted.init(weights), weights)
        for k, a in model.flatten(new).items():
            assert_allclose(a, weights[k] + np.asarray(steps[k]), atol=2e-4, err_msg=k)
    rate = lambda **flags: [train.learning_rate(train.Config(**flags), s) for s in range(1, 7)]
    assert_allclose(rate(lr=4.0, steps=6, warmup=2), [2, 4, 4, 4, 4, 4])
    assert_allclose(rate(lr=5.0, steps=6, warmup=2, decay="linear"), [2.5, 5, 4, 3, 2, 1])
    assert_allclose(rate(lr=8.0, sft_lr=2.0, sft_steps=3, steps=3, warmup=2), [1, 2, 2, 4, 8, 8])
    cosine = rate(lr=1.0, steps=6, warmup=0, decay="cosine")
    assert_allclose(cosine, [(1 + math.cos(math.pi * k / 7)) / 2 for k in range(1, 7)])

def test_train_advantages():
    r = np.array([[1.1, 0.1, 0.1, 0.0], [1.1, 1.1, 1.1, 1.1], [0.3, 0.3, 0.3, 0.3]])
    for kind in ("grpo", "drgrpo", "rloo"):
        a = train.group_advantages(r.reshape(-1), 4, kind).reshape(3, 4)
        for i in range(4):
            others = np.delete(r[0], i).mean()
            wanted = {"grpo": (r[0, i] - r[0].mean()) / math.sqrt(np.mean((r[0] - r[0].mean()) ** 2)),
                      "drgrpo": r[0, i] - r[0].mean(), "rloo": r[0, i] - others}[kind]
            assert_allclose(a[0, i], wanted, rtol=1e-12)
        assert (a[1:] == 0).all(), "equal rewards, which round, must give exactly nothing"

EXTRACTION = [  # text, its final number
    ("<answer>42</answer>", 42), ("\\boxed{42}", 42), ("so\n#### 42", 42), ("it is 7, no, 42", 42),
    ("$1,450", 1450), ("It costs $1,450.", 1450), ("-5", -5), ("x = -5.", -5), ("-$5", -5), ("$-5", -5),
    ("\u22125", -5), ("1/2", "1/2"), ("\\boxed{\\frac{1}{2}}", "1/2"), ("3.50", "7/2"), ("$3.50", "7/2"),
    (".5", "1/2"), ("50%", 50), ("\\boxed{50\\%}", 50), ("The answer is 18.", 18), ("10-5", 5),
    ("10 - 5 = 5", 5), ("(3)-2", 2), ("12,345,678 people", 12345678), ("1,2,3", 3),
    ("<answer><answer>5</answer></answer>", 5), ("<answer>3 <answer>5</answer> 9</answer>", 5),
    ("<answer>5", 5), ("first 9 <answer> 5 apples </answer> then 8", 5),
    ("<answer>4</answer> <answer>5</answer>", 5), ("<answer>5</answer> <answer></answer>", 5),
    ("<answer>\\boxed{5}</answer>", 5), ("\\boxed{1} \\boxed{5}", 5), ("\\boxed{\\text{5 apples}}", 5),
    ("\\boxed{x^{2} + {3}} 9", 3), ("\\boxed{5", 5), ("\\boxed{1{,}450}", 1450), ("\\$1,450", 1450),
    ("#### 1\n#### 5\nyes 7", 5), ("#### $5.00", 5), ("5/0", None), ("no number", None), ("", None),
    ("<answer>none</answer> 5", None), ("<answer></answer>", None), ("9" * 5000, None), ("1450.0", 1450),
    ("007", 7),
    ("1.5/2.5", "3/5"), ("1,000/2,000", "1/2"), ("-\u20ac5", -5), ("-\u00a35", -5),
    ("<answer>25 m^2</answer>", 25),
    ("\\boxed{25\\text{ cm}^2}", 25), ("12\\,345", 12345), ("\\frac{1.5}{2}", "3/4"), ("10%-20%", 20)]

def test_train_extraction():
    for text, number in EXTRACTION:
        wanted = None if number is None else fractions.Fraction(number)
        assert train.final_number(text) == wanted, (text[:60], train.final_number(text), wanted)
    assert train.correct("", "#### 1,450", "so it is <answer>$1450.00</answer>") == 1
    assert train.correct("", "#### 1450", "<answer>1451</answer> 1450") == 0
    assert train.correct("", "no number", "no number") == 0
    assert train.formatted("", "", "1+1 <answer>2</answer>\n") == 1
    for bad in ("2", "<answer>2", "<answer>2</answer> so", "<answer>x</answer>",
                "<answer>1</answer><answer>2</answer>"):
        assert train.formatted("", "", bad) == 0, bad

def test_train_extraction_of_all_gsm8k_solutions():
    n = 0
    for part in ("train", "test"):
        with open(shared(f"gsm8k/{part}.jsonl"), encoding="utf-8") as f:
            for line in f:
                answer = json.loads(line)["answer"]
                marked = answer.split("####")[1].strip().replace(",", "")
                assert train.final_number(answer) == fractions.Fraction(marked), answer
                n += 1
    assert n == 8792, n
    figure(f"{n} solutions")

# The published chat template of Qwen2.5-Instruct, without its branches for tools.
QWEN_TEMPLATE = """{%- if messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.' }}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role != "system" or not loop.first %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""

def test_train_chat_template():
    (transformers,) = need("transformers")
    path = shared("qwen2.5/tokenizer.json")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=path, chat_template=QWEN_TEMPLATE)
    ours = tokenizers.Tokenizer.from_file(path)
    for system, question in (("Be brief.", "What is 2 + 2?"), ("", "  spaces \n and\nlines \u00e9\U0001f600"),
                             (train.Config.system, "How much is $1,450 - 5%?")):
        messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        wanted = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert train.chat(system, question) == wanted
        ids = tokenizer(wanted, add_special_tokens=False).input_ids
        assert ours.encode(wanted, add_special_tokens=False).ids == ids
    assert ours.encode("hello").ids == [14990]

def test_train_arithmetic_questions():
    seen, held_out = train.arith(False), train.arith(True)
    pair = lambda row: tuple(sorted(map(int, re.findall(r"\d+", row["question"]))))
    assert len(seen) == 20000 and len(held_out) == 2000
    assert not {pair(r) for r in seen} & {pair(r) for r in held_out}
    for row in seen + held_out:
        assert train.final_number(row["answer"]) == sum(pair(row)), row
    wrong = np.mean([train.final_number(r["demonstration"]) != sum(pair(r)) for r in seen])
    assert 0.5 < wrong < 0.75, wrong
    assert train.worked_sum(159, 855) == "9+5+0=14 5+5+1=11 1+8+1=10 <answer>1014</answer>"
    figure(f"{wrong:.1%} of the demonstrations are wrong")

def test_train_reads_a_data_set_with_splits():
    directory = new_directory()
    for split, number in (("train", 3), ("test", 2)):
        with open(os.path.join(directory, f"{split}.jsonl"), "w") as f:
            f.writelines(json.dumps({"question": f"{split} {i}?", "answer": i}) + "\n" for i in range(number))
    wanted = [{"question": f"train {i}?", "answer": str(i)} for i in range(3)]
    assert train.load_rows(directory, False) == wanted
    assert [row["question"] for row in train.load_rows(directory, True)] == ["test 0?", "test 1?"]

def test_train_wandb():
    """A login that fails is one line; metrics of every step arrive."""
    def fails(**_):
        raise ValueError("api_key not configured (no-tty)\nmore about it")

    logged, out, before = {}, os.path.join(new_directory(), "run"), sys.modules.get("wandb")
    try:
        sys.modules["wandb"] = SimpleNamespace(init=fails)
        assert "api_key not configured" in refused("--wandb", "project", "--out", out)
        log = lambda metrics, step: logged.update({step: metrics})
        sys.modules["wandb"] = SimpleNamespace(init=lambda **_: SimpleNamespace(log=log))
        train.main([*TINY_FLAGS, "--batch", "8", "--out", out, "--wandb", "project"])
    finally:
        sys.modules.pop("wandb") if before is None else sys.modules.update(wandb=before)
    assert list(logged) == [1, 2, 3] and "reward/mean" in logged[3] and "nll" in logged[1]

def test_train_question_order():
    epochs = [train.question_order(3, e * 10, 10, 10) for e in range(3)]
    assert all(sorted(e) == list(range(10)) for e in epochs) and epochs[0] != epochs[1]
    assert train.question_order(3, 0, 30, 10) == sum(epochs, [])  # one walk, however hosts and steps cut it
    assert train.question_order(4, 0, 10, 10) != epochs[0]

def test_train_rewards_that_fail_score_zero():
    def raises(question, reference, answer):
        return 1 / (answer != "bad")

    def silly(question, reference, answer):
        return float("nan") if answer == "nan" else "much" if answer == "text" else 0.5

    rows, answers = [{"question": "q", "answer": "5"}] * 5, ["5", "bad", "nan", "text", "5"]
    scores, faults = train.score_answers([raises, raises, silly], rows, answers, [False] * 4 + [True])
    assert_array_equal(scores, [[1, 1, 0.5], [0, 0, 0.5], [1, 1, 0], [1, 1, 0], [0, 0, 0]])
    assert {k: len(v) for k, v in faults.items()} == {"raises": 1, "silly": 2}, faults
    assert "ZeroDivisionError" in faults["raises"][1]

def test_train_rows():
    cfg = train.Config(loss_agg="sequence", max_answer=4)
    rows = train.make_rows([[5, 6, 7]], [[8, 9]], [0.5], 8, cfg, sampler=[[-1, -2, 99, 99]])
    for key, wanted in dict(tokens=[5, 6, 7, 8, 9, 0, 0, 0], positions=[0, 1, 2, 3, 4, 0, 0, 0],
                            segments=[1, 1, 1, 1, 1, 0, 0, 0], targets=[0, 0, 8, 9, 0, 0, 0, 0],
                            weight=[0, 0, .5, .5, 0, 0, 0, 0], advantage=[0, 0, .5, .5, 0, 0, 0, 0],
                            sampler=[0, 0, -1, -2, 0, 0, 0, 0]).items():
        assert_array_equal(rows[key], [wanted], err_msg=key)

def test_train_end_to_end_and_resume():
    out = os.path.join(new_directory(), "run")
    flags = [*TINY_FLAGS, "--out", out, "--save_every", 1, "--keep", 9, "--beta", 0.1]
    text = run_train(*flags, "--mesh", "2,2,2", devices=8)
    for wanted in ("sft 1/3 | nll", "step 3/3 | reward", "held-out questions solved", f"{out}/final"):
        assert wanted in text, text
    assert [text.count(f"tracing {what}") for what in ("update", "score", "generate")] == [2, 1, 2], text
    whole = metrics_of(out)
    assert [m["step"] for m in whole] == [1, 2, 3] and all("eval/solved" in m for m in whole)
    names = """step reward/mean reward/std reward/correct reward/formatted solved len/prompt len/answer
        len/answer_max truncated group/zero_variance loss kl entropy clip_fraction ratio/max
        logprob_gap/mean logprob_gap/max grad_norm lr valid_tokens padding_fraction micro_batch
        time/rollout_s time/reward_s time/update_s time/step_s time/train/step_avg_last10_s
        throughput/train/valid_tokens_per_s rollout/tokens_per_s eval/solved
        memory/train/bytes_in_use_max_gib memory/train/peak_bytes_in_use_max_gib""".split()
    assert set(names) <= whole[-1].keys(), set(names) - whole[-1].keys()
    assert whole[-1]["logprob_gap/max"] < 1e-4, "sampler and trainer disagree"
    assert "is finished" in run_train(*flags, devices=8)
    tensors = load_file(os.path.join(out, "final", "model.safetensors"))
    final = lambda: load_file(os.path.join(out, "final", "model.safetensors"))
    for kept, on, devices, exact in ((1, "2,2,2", 8, True), (2, "auto", 4, False), (0, "2,2,2", 8, True)):
        for name in ["final"] + [f"step_00000{n}" for n in (1, 2, 3) if n > kept]:  # killed after so many
            shutil.rmtree(os.path.join(out, name))
        with open(os.path.join(out, "samples.jsonl"), "ab") as f:
            f.write(b'{"step": 1, "answer": "\xe4\xb8')  # half a line, half a character
        text = run_train(*flags, "--mesh", on, devices=devices)
        assert (f"resuming {out} after step {kept}" in text) == (kept > 0), text
        again = metrics_of(out)
        if exact:
            assert without_times(again) == without_times(whole)
            assert all((final()[k] == tensors[k]).all() for k in tensors)
        assert_allclose([m["loss"] for m in again], [m["loss"] for m in whole], atol=1e-5)
    figure("resumed run bit for bit the undisturbed one; on another mesh loss within 1e-5")

def test_train_gsm8k_with_the_real_tokenizer():
    source, out = new_directory(), os.path.join(new_directory(), "run")
    config = train.TINY_MODEL | dict(vocab_size=151936, hidden_size=64, eos_token_id=151645)
    shutil.copy(shared("qwen2.5/tokenizer.json"), source)
    model.write_random(source, config, seed=3)
    text = run_train(
        "--model", source, "--data", shared("gsm8k/train.jsonl"), "--eval_data", shared("gsm8k/test.jsonl"),
        "--steps", 2, "--sft_steps", 1, "--batch", 2, "--npq", 4, "--max_answer", 48, "--max_prompt", 96,
        "--eval_n", 16, "--lr", 1e-3, "--out", out, "--micro_batch", 1, devices=2)
    assert re.search(r"train.jsonl: \d+ questions; \d+ skipped, longer than max_prompt = 96", text), text
    rows = metrics_of(out)
    assert [m["step"] for m in rows] == [1, 2, 3] and "eval/solved" in rows[2]
    assert rows[1]["logprob_gap/max"] < 1e-4, rows[1]
    assert all(np.isfinite(m["loss"]) for m in rows)
    torch, transformers = need("torch", "transformers")
    final = os.path.join(out, "final")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(final, dtype=torch.float32)
    ids = transformers.AutoTokenizer.from_pretrained(final)("Natalia sold 48 clips").input_ids
    cfg, params = load(final)
    with torch.no_grad():
        wanted = theirs(torch.tensor([ids])).logits.numpy()
    assert_allclose(logits(params, cfg, [ids]), wanted, atol=1e-4)
    start = load_file(os.path.join(source, "model.safetensors"))
    moved = max(np.abs(v.numpy() - start[k]).max() for k, v in theirs.state_dict().items() if k in start)
    assert moved > 1e-4, "training changed nothing"

def refused(*flags):
    """The message with which train.py refuses its flags in this process; weights must not be read."""
    err, load_weights = io.StringIO(), model.load
    model.load = lambda *a, **k: (_ for _ in ()).throw(AssertionError("weights were loaded"))
    try:
        with contextlib.redirect_stderr(err), contextlib.redirect_stdout(io.StringIO()):
            train.main([str(f) for f in flags])
    except SystemExit as e:
        assert e.code == 2, (flags, e.code)
        text = err.getvalue().strip()
        assert 1 <= text.count("\n") + 1 <= 2 and "Traceback" not in text, (flags, text)
        return text
    finally:
        model.load = load_weights
    raise AssertionError(f"{flags} was accepted")

@functools.cache
def tiny_directory():
    """The tiny model as a directory; tests that break it copy it first."""
    return train.make_tiny(os.path.join(new_directory(), "model"), 1)

def broken_model(change):
    directory = os.path.join(new_directory(), "model")
    shutil.copytree(tiny_directory(), directory)
    change(directory)
    return directory

def test_train_refuses_bad_input():
    where = new_directory()

    def write(directory, name, text):
        with open(os.path.join(directory, name), "w") as f:
            f.write(text)
        return os.path.join(directory, name)

    file = functools.partial(write, where)

    def drop_tensor(directory):
        path = os.path.join(directory, "model.safetensors")
        save_file({k: v for k, v in load_file(path).items() if "layers.1.mlp.up" not in k}, path)

    def big_tokenizer(directory):
        edit_json(directory, "config.json", vocab_size=64)

    good = '{"question": "What is 1 + 1?", "answer": "2"}\n'
    model_of = lambda change: ("--data", "arith", "--model", broken_model(change))
    data_of = lambda name, text: ("--data", file(name, text), "--eval_data", "none")
    os.makedirs(os.path.join(where, "other"))
    os.makedirs(os.path.join(where, "model"))
    file("other/notes.txt", "not a run")
    table = [  # flags, what the message must say
        (("--bacth", 4), "did you mean --batch"), (("--batch", "four"), "invalid int value: 'four'"),
        (("--lr", "fast"), "invalid float value"), (("--advantage", "best"), "invalid choice: 'best'"),
        (("--batch", -4), "batch = -4"), (("--steps", -1), "steps = -1"), (("--lr", "nan"), "lr = nan"),
        (("--lr", "inf"), "lr = inf"), (("--temperature", 0), "temperature = 0"), (("--npq", 1), "npq = 1"),
        (("--top_k", 20), "top_k = 20"), (("--top_p", 0.9), "top_p = 0.9"),
        (("--top_p", 1.5, "--eval_temperature", 1), "1.5"), (("--b2", 1), "b2 = 1"),
        (("--clip_low", 1.5), "clip_low = 1.5"), (("--keep", 0), "keep = 0"),
        (("--batch", 1, "--npq", 6), "batch*npq = 1*6 = 6 sequences per host do not divide over 8"),
        (("--batch", 3, "--npq", 8, "--minibatches", 2), "do not divide into minibatches = 2"),
        (("--batch", 8, "--npq", 8, "--minibatches", 1, "--micro_batch", 9), "micro_batch = 9 is more"),
        (("--loss_impl", "pallas"), "not cpu, float32; try --loss_impl jax"),
        (("--mesh", "3,-1,1"), "a multiple of 3 devices; there are 8"),
        (("--mesh", "1,4,1"), "needs 4 devices; there are 8"), (("--mesh", "fast"), "mesh fast"),
        (("--mesh", "-1,-1,1"), "mesh -1,-1,1"), (("--mesh", "0,8,1"), "mesh 0,8,1"),
        (("--mesh", "1,2,4"), "key/value heads = 2 do not divide over tp = 4"),
        (("--require_processes", 4), "1 JAX processes"),
        (("--max_answer", 1000), "exceed the model's 1024 positions"),
        (("--max_prompt", 9), "raise --max_prompt"),
        (("--model", "no/such/dir"), "no/such/dir is not a directory"),
        (("--model", where), "config.json is missing"),
        (model_of(lambda d: os.remove(os.path.join(d, "tokenizer.json"))), "tokenizer.json"),
        (model_of(lambda d: os.remove(os.path.join(d, "model.safetensors"))), "model.safetensors"),
        (model_of(lambda d: write(d, "model.safetensors", "junk" * 9)), "not a safetensors file"),
        (model_of(lambda d: write(d, "tokenizer.json", "{}")), "not a readable tokenizer"),
        (model_of(drop_tensor), "lacks the tensor model.layers.1.mlp.up_proj.weight"),
        (model_of(lambda d: edit_json(d, "config.json", intermediate_size=96)), "calls for (96, 128)"),
        (model_of(lambda d: edit_json(d, "config.json", model_type="llama")), "model_type 'llama'"),
        (model_of(big_tokenizer), "more than the model's vocabulary of 64"),
        (("--data", os.path.join(where, "none.jsonl")), "none.jsonl does not exist"),
        (data_of("empty.jsonl", ""), "empty.jsonl is empty"),
        (data_of("blank.jsonl", "\n\n"), "blank.jsonl is empty"),
        (data_of("cut.jsonl", good + '{"question": "What'), "cut.jsonl line 2"),
        (data_of("list.jsonl", good + good + "[1]\n"), "list.jsonl line 3"),
        (data_of("lacks.jsonl", '{"question": "What?"}\n'), "lacks.jsonl line 1"),
        (data_of("null.jsonl", good + '{"question": "What?", "answer": null}\n'), "null.jsonl line 2"),
        (data_of("long.jsonl", good.replace("What", "What " * 99)), "longer than max_prompt = 32"),
        (("--max_answer", 1, "--eval_data", "none"), "max_answer = 1"),
        (("--steps", 0, "--sft_steps", 0, "--eval_data", "none"), "nothing to do"),
        (("--out", os.path.join(where, "other")), "is not a run of podgrpo"),
        (("--out", file("plain", "")), "cannot be made a directory"),
        (("--out", file("plain", "") + "/run"), "cannot be made a directory"),
        (("--out", os.path.dirname(file("model/config.json", '{"model_type": "qwen2"}'))), "not a run"),
        (("--seed", 10 ** 20), "seed = 100000000000000000000"), (("--wandb", "project"), "--wandb project")]
    for number, (flags, wanted) in enumerate(table):
        out = () if "--out" in flags else ("--out", os.path.join(where, f"run{number}"))
        message = refused(*flags, *out)
        assert wanted in message, f"{flags}: {message!r} does not say {wanted!r}"
    figure(f"{len(table)} mistakes")

def test_train_ignores_truncation_of_a_tokenizer():
    def truncate(directory):
        path = os.path.join(directory, "tokenizer.json")
        tokenizer = tokenizers.Tokenizer.from_file(path)
        tokenizer.enable_truncation(20)
        tokenizer.enable_padding(length=24)
        tokenizer.save(path)

    def prompts(directory):
        flags = ["--model", directory, "--data", "arith", "--out", new_directory()]
        return [row["prompt"] for row in train.set_up(flags)[1].held_out]
    assert prompts(broken_model(truncate)) == prompts(tiny_directory())

def test_train_refuses_with_exit_code_2():
    out = os.path.join(new_directory(), "run")
    text = run_train("--batch", 1, "--npq", 6, "--out", out, devices=4, code=2)
    assert text == ("train.py: batch*npq = 1*6 = 6 sequences per host do not divide over 4 local devices; "
                    "try --npq 4 or --npq 8\n"), text
    run_train(*TINY_FLAGS, "--steps", 0, "--out", out)  # the mistake left nothing that is in the way
    assert "seed was 1, is 2" in run_train(*TINY_FLAGS, "--steps", 0, "--out", out, "--seed", 2, code=2)

def test_train_uses_every_flag():
    with open(os.path.join(HERE, "train.py"), encoding="utf-8") as f:
        tree = ast.parse(f.read())
    read = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)
            and isinstance(n.value, ast.Name) and n.value.id == "cfg"}
    fields = {f.name for f in dataclasses.fields(train.Config)}
    assert fields == read & fields, f"read nowhere: {fields - read}"
    assert read <= fields | {"parse"}, f"not a flag: {read - fields}"
    assert set(train.TINY) <= fields and train.FREE <= fields and len(fields) <= 55
    figure(f"{len(fields)} flags")

def test_train_readme_names_what_exists():
    with open(os.path.join(HERE, "README.md"), encoding="utf-8") as f:
        text = f.read()
    fields = {f.name for f in dataclasses.fields(train.Config)} | {*kernel.FLAGS}
    flags = set(re.findall(r"(?<![\w-])--([a-z]\w*)", text)) - {"dry", "help"}  # launch.sh's and argparse's
    assert flags and flags <= fields, f"no such flags: {flags - fields}"
    files = set(re.findall(r"(?<![\w/.-])((?:assets/|\.ci/)?[\w.]+\.(?:py|sh|md|txt|svg|png))\b", text))
    missing = [f for f in files if not os.path.exists(os.path.join(HERE, f))]
    assert files and not missing, f"no such files: {missing}"
    for name in ("train.py", "model.py", "kernel.py", "launch.sh"):
        with open(os.path.join(HERE, name), encoding="utf-8") as f:
            lines = sum(1 for _ in f)
        said = re.search(rf"`?{re.escape(name)}`?\s+(\d+) lines", text)
        assert said and int(said[1]) == lines, f"README says {said and said[0]!r}, {name} has {lines} lines"

def test_train_launcher():
    def launch(*args):
        command = ["bash", os.path.join(HERE, "launch.sh"), *args]
        done = subprocess.run(command, text=True, capture_output=True)
        return done.returncode, done.stdout + done.stderr
    assert launch()[0] == 2 and "launch.sh cpu" in launch()[1]
    code, text = launch("tpu-v99")
    assert code == 2 and text.count("\n") == 1 and "tpu-v99" in text
    code, text = launch("--dry-run", "cpu", "--system", "it's $HOME")
    wanted = [f"{HERE}/.venv/bin/python", "-u", f"{HERE}/train.py", "--system", "it's $HOME"]
    assert code == 0 and shlex.split(text.splitlines()[-1])[-5:] == wanted, text

def test_train_learns():
    """The embedded default, as committed: at most 45% after the supervised phase, at least 90% at the end."""
    out = os.path.join(new_directory(), "run")
    text = run_train("--out", out)
    scores = [m["eval/solved"] for m in metrics_of(out) if "eval/solved" in m]
    assert scores[0] <= 0.45 and scores[-1] >= 0.90, scores
    figure(re.search(r"held-out questions solved.*", text)[0])

# ---------------------------------------------------------------- kernel.py, compiled for absent TPUs

def compiled_elsewhere(code, **env):
    """What Python code that compiles for TPUs prints. libtpu wants a process of its own."""
    need("libtpu")
    env = os.environ | {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
                        "TPU_WORKER_HOSTNAMES": "localhost"} | env
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=HERE, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout

def aot(*runs):
    """`python kernel.py --aot` with each of some flags -> [(slice, impl, GB of temp)]"""
    out = compiled_elsewhere(f"import kernel\nfor flags in {runs!r}: kernel.benchmark(flags.split())")
    lines = re.findall(r"^(\S+) (\w+) +temp ([\d.]+) GB", out, re.M)
    return [(name, impl, float(gb)) for name, impl, gb in lines]

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
    sizes = (151643, 151936, 152064)
    runs = [f"--aot {name} --impl pallas --time 1024 --hidden {D} --vocab {sizes[(i + j) % 3]}"
            for i, name in enumerate(("v4-8", "v5litepod-8", "v5p-8", "v6e-8"))
            for j, D in enumerate((896, 1536, 2048, 3584))]
    found = aot(*runs)
    assert len(found) == 16
    figure(f"16 programs; at most {max(gb for *_, gb in found)} GB of temp")

STATIC = """
import os, re, jax, jax.numpy as jnp, kernel
from jax.sharding import SingleDeviceSharding
V, D, N, clock, bandwidth = 151936, 2048, 4096, 1.75e6, 1.64e9  # of a v6e, a ms
device, dump = kernel.tpu_devices("v6e-1")[0], os.environ["DUMP"]
b, cycles = kernel.block_sizes(device.device_kind, D), []
shape = lambda dtype, *size: jax.ShapeDtypeStruct(size, dtype, sharding=SingleDeviceSharding(device))
f32, bf16, i32, C = jnp.float32, jnp.bfloat16, jnp.int32, b.tokens
for n in (16, 32):
    h, W, z = shape(bf16, C, D), shape(bf16, n * b.vocab, D), shape(bf16, n * b.vocab, C)
    jax.jit(lambda h, W: kernel.forward_tiles(b, n, True, h, W, 1.0)).lower(h, W).compile()
    jax.jit(lambda *a: kernel.backward_tiles(b, False, bf16, *a), donate_argnums=7).lower(
        shape(i32, 1), shape(i32, 1, C), shape(f32, 4, C), h, W, z, shape(f32, n, b.vocab // b.step, 1, C),
        shape(f32, *W.shape)).compile()
    cycles.append([int(re.search(r"estimated_cycles: (\d+)", open(f"{dump}/{file}").read())[1])
                   for name in ("grpo_forward", "grpo_backward") for file in os.listdir(dump)
                   if file.startswith(name)])
moved = 2 * V * (D + C)
for a, c, bytes in zip(*cycles, (moved, moved + 8 * V * D)):
    print(N / C * (a + (c - a) * (V / b.vocab / 16 - 1)) / clock, N / C * bytes / bandwidth)
"""

def test_aot_static_estimate():
    """Both kernels on a v6e, 4,096 tokens: the time of the cycles that the compiler counts, or of the bytes
    moved if that is more. The count takes memory, so it is scaled up from 16 and 32 tiles of the head."""
    d = new_directory()
    out = compiled_elsewhere(STATIC, DUMP=d, LIBTPU_INIT_ARGS=f"--xla_jf_dump_static_llo_profile_to={d}")
    times = [max(map(float, line.split())) for line in out.splitlines()]
    assert 8.3 < sum(times) <= 9.5, out
    figure(f"forward {times[0]:.2f} ms, backward {times[1]:.2f}, sum {sum(times):.2f}; three GEMMs: 8.33")

# ---------------------------------------------------------------- run

def main(words):
    tests = {name: f for name, f in globals().items() if name.startswith("test_")}
    long = ("test_train_", "test_aot_")
    if words != ["all"]:
        tests = {name: f for name, f in tests.items()
                 if (any(w in name for w in words) if words else not name.startswith(long))}
    print(f"jax {jax.__version__} on {jax.device_count()} {jax.default_backend()} devices", flush=True)
    count = Counter(passed=0, failed=0, skipped=0)
    for name, test in tests.items():
        figure("")
        try:
            with contextlib.redirect_stdout(sys.stderr):
                test()
            result, word, text = "passed", "ok  ", figure.text
        except SkipTest as e:
            result, word, text = "skipped", "skip", e
        except (Exception, SystemExit) as e:
            traceback.print_exc()
            result, word, text = "failed", "FAIL", " ".join(f"{type(e).__name__} {e}".split())[:200]
        count[result] += 1
        print(word, name, text, flush=True)
    print(", ".join(f"{n} {result}" for result, n in count.items()))
    return 1 if count["failed"] else 0 if tests else 2

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
