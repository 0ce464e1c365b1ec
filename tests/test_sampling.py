"""infra/rollout/sampling.py: draws compared with softmax, truncation, and the logprobs that
rollouts report."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import (
    TIED,
    UNTIED,
    check_errors,
    generate,
    hidden_states,
    random_params,
    random_prompts,
)
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_allclose, assert_array_equal
from scipy import special, stats

import kernel
import model
from infra.rollout import engine
from infra.rollout.sampling import Sampling, keep_most_likely, sample_token
from test_kernel import mesh


def softmax(z):
    return special.softmax(np.asarray(z, np.float64), -1)


# ---------------------------------------------------------------- what is drawn
@partial(jax.jit, static_argnames=("sampling", "tp"))
def compiled_sample(z_RV, u_B, sampling, tp):
    draw = jax.shard_map(
        lambda z_BV, u_B: sample_token(z_BV, u_B, sampling, ("tp",)),
        mesh=mesh(tp=tp),
        check_vma=False,
        in_specs=(P(None, "tp"), P()),
        out_specs=P(),
    )
    return draw(jnp.tile(z_RV, (len(u_B) // len(z_RV), 1)), u_B)


PLAIN = Sampling()
GREEDY = Sampling(temperature=0.0)


def sample(z_RV, u_B, sampling=PLAIN, tp=1):
    """Call sample_token with the rows of z in turn, and the vocabulary split over tp devices."""
    tokens, logprobs = compiled_sample(z_RV, u_B, sampling, tp)
    return np.asarray(tokens), np.asarray(logprobs)


def truncated(p, top_k, top_p):
    """Returns the distribution of one row after top-k and then top-p truncation."""
    order = np.argsort(-p)[: top_k or None]
    mass = p[order].cumsum()
    kept = order[: np.searchsorted(mass, top_p * mass[-1]) + 1]
    is_kept = np.isin(np.arange(len(p)), kept)
    return np.where(is_kept, p / p[kept].sum(), 0.0)


def chi_square(tokens, p):
    """Returns the p-value of a chi-square test of the drawn tokens. Tokens that are expected fewer
    than 10 times count as one token."""
    count = np.bincount(tokens, minlength=len(p))
    expected = p * len(tokens)
    rare = expected < 10
    count = np.append(count[~rare], count[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    possible = expected > 0
    return stats.chisquare(count[possible], expected[possible]).pvalue


@partial(jax.jit, static_argnames="temperature")
def training_logprobs(hidden_ND, head_VD, targets_N, weight_N, temperature):
    logprobs, _ = kernel.score(
        hidden_ND, head_VD, targets_N, weight_N, mesh(), temperature=temperature
    )
    return logprobs


@pytest.mark.parametrize(
    "cfg, sampling",
    [
        pytest.param(TIED, Sampling(temperature=0.7), id="stops"),
        pytest.param(UNTIED, Sampling(), id="untied"),
        pytest.param(TIED, Sampling(temperature=1.2, top_k=20, top_p=0.8), id="truncated"),
    ],
)
def test_sampled_logprobs_equal_training_forward(cfg, sampling, record_property):
    """The logprobs that `generate` reports equal those of the training forward. Tokens are drawn
    from that distribution, independently in each step, row and key."""
    n = 32
    temperature = sampling.temperature
    rng = np.random.default_rng(3)
    prompts = random_prompts(TIED, (9, 4, 1, 6) * 4)
    params = random_params(cfg, mesh())
    head = model.head(params)
    # An answer token is drawn from the hidden state of the token before it.
    first = np.array([len(prompt) - 1 for prompt in prompts])
    before = first[:, None] + np.arange(n)
    errors = {}
    u = np.full((2, len(prompts), n), np.nan)
    for seed in (0, 1):
        out = generate(params, cfg, prompts, n, seed=seed, sampling=sampling)
        answers = zip(prompts, out["tokens_BT"].tolist(), out["lengths_B"], strict=True)
        rows = [prompt + answer[:length] for prompt, answer, length in answers]
        hidden = np.asarray(hidden_states(params, cfg, rows, width=9 + n))
        hidden = np.take_along_axis(hidden, before[..., None], 1)
        live = np.arange(n) < out["lengths_B"][:, None]

        tokens = out["tokens_BT"][live]
        each = np.arange(len(tokens))
        z = hidden[live] @ np.asarray(head).T
        q = softmax(z / temperature)
        if sampling.top_k:
            q = np.stack([truncated(row, sampling.top_k, sampling.top_p) for row in q])
            wanted = np.log(q[each, tokens])
        else:
            h_ND = hidden.reshape(-1, cfg.D)
            weight = live.ravel().astype(np.float32)
            targets = out["tokens_BT"].ravel()
            logprobs = training_logprobs(h_ND, head, targets, weight, temperature)
            wanted = np.asarray(logprobs).reshape(live.shape)[live]
        errors[seed] = abs(out["logprobs_BT"][live] - wanted)
        # If tokens are drawn from q, these values are uniform.
        upper = q.cumsum(-1)[each, tokens]
        u[seed][live] = upper - rng.random(len(tokens)) * q[each, tokens]
    # If all weights change by a rounding error, one of these logprobs changes by 6e-5, and most of
    # them by 3e-6.
    most = {seed: np.quantile(error, 0.99) for seed, error in errors.items()}
    check_errors(most, 3e-5, record_property, "error of 99 in 100")
    check_errors(errors, 3e-4, record_property)

    assert stats.kstest(u[~np.isnan(u)], "uniform").pvalue > 1e-3
    neighbours = {
        "steps": (u[..., 1:], u[..., :-1]),
        "rows": (u[:, 1:], u[:, :-1]),
        "keys": (u[0], u[1]),
    }
    for of, (a, b) in neighbours.items():
        both = ~np.isnan(a + b)
        p = stats.pearsonr(a[both], b[both]).pvalue
        # With other seeds this would fail once in a thousand times.
        assert p > 1e-3, f"draws of neighbouring {of} are related"


@pytest.mark.parametrize("V, tp", [(11, 1), (700, 1), (700, 4)])
def test_draw_inverts_the_cdf(V, tp, record_property):
    """With evenly spaced uniforms, each token is drawn as often as softmax says, within two
    draws."""
    rng = np.random.default_rng(4)
    n = 20_000
    z = 2 * rng.standard_normal((2, V)).astype(np.float32)
    z[1, rng.random(V) < 0.3] = -np.inf
    spread = (np.arange(n, dtype=np.float32) + 0.5) / n
    # Both rows get each uniform, in turn.
    u = np.repeat(spread, 2)
    tokens, _ = sample(z, u, tp=tp)
    off = {}
    for row in (0, 1):
        count = np.bincount(tokens[row::2], minlength=V)
        expected = n * softmax(z[row])
        off[row] = abs(count - expected).max()
    check_errors(off, 2.1, record_property, "draws off")


LARGEST = np.nextafter(np.float32(1), np.float32(0))  # uniform below 1


def random_logits(rng, rows, V, kept, nothing):
    """Returns logits [rows, V]. All but `kept` tokens per row have no probability, and the logit
    `nothing`."""
    z = np.full((rows, V), nothing, np.float32)
    for row in z:
        row[rng.choice(V, kept, replace=False)] = 3 * rng.standard_normal(kept)
    return z


def check_have_probability(tokens, z, nothing):
    """Check that the tokens, drawn from the rows of z in turn, have a probability."""
    V = z.shape[1]
    assert ((tokens >= 0) & (tokens < V)).all(), f"drew {tokens.max()} of {V} tokens"
    taken = z[np.arange(len(tokens)) % len(z), tokens] == nothing
    assert not taken.any(), f"{taken.sum()} of {len(tokens)} have no probability"


@pytest.mark.parametrize(
    "V, kept", [(5, 2), (256, 60), (700, 1), (700, 9), (3000, 400), (77_000, 150)]
)
def test_draw_never_takes_what_has_no_probability(V, kept, record_property):
    """No token without probability is drawn, neither at u = 0 and at the largest u, nor around the
    steps of the CDF, where rounding matters."""
    rng = np.random.default_rng(5)
    drawn = 0
    for nothing in (-np.inf, -1e30):
        z = random_logits(rng, 1, V, kept, nothing)
        # The CDF goes through the vocabulary column by column: tokens of equal token % 128
        # together.
        token = np.arange(V)
        order = np.lexsort((token, token % 128))
        steps = softmax(z[0])[order].cumsum()[z[0, order] > nothing]
        around = [steps + k * 2.0**-24 for k in range(-4, 5)]
        u = np.concatenate([[0, LARGEST], *around])
        u = np.append(u, rng.random(-len(u) % 512))
        u = np.clip(u, 0, LARGEST).astype(np.float32)
        # Drawing with all uniforms at once would take gigabytes.
        for some in u.reshape(-1, 512):
            tokens, _ = sample(z, some)
            check_have_probability(tokens, z, nothing)
        drawn += len(u)
    record_property("draws", drawn)


def test_no_draw_is_0(monkeypatch):
    """The CDF is above 0 at the first token, whatever its probability."""
    monkeypatch.setattr(jax.random, "uniform", lambda key: jnp.float32(0))
    assert 0 < engine.uniform(jax.random.key(0), 5, 3) < 2.0**-23


def test_largest_uniform_draws_what_has_probability(record_property):
    """The largest uniform draws a token with probability, although the sum of all masses may be
    above the end of the CDF: they are rounded in different orders."""
    rows = 100
    for V, kept in ((256, 60), (3000, 400)):
        for nothing in (-np.inf, -1e30):
            z = random_logits(np.random.default_rng(5), rows, V, kept, nothing)
            tokens, _ = sample(z, np.full(rows, LARGEST))
            check_have_probability(tokens, z, nothing)
    record_property("draws", 4 * rows)


@pytest.mark.parametrize(
    "V, tp, temperature, top_k, top_p",
    [
        (11, 1, 0.7, 0, 1.0),
        (600, 1, 1.3, 0, 1.0),
        (600, 1, 0.8, 7, 1.0),
        (600, 4, 0.7, 0, 0.6),
        (600, 4, 1.5, 60, 0.8),
    ],
)
def test_sample_draws_from_the_truncated_softmax(V, tp, temperature, top_k, top_p, record_property):
    """Tokens are drawn from the truncated softmax, by a chi-square test of two distributions.
    Logprobs are those after truncation."""
    n = 5_000
    rng = np.random.default_rng(6)
    z = 2 * rng.standard_normal((2, V)).astype(np.float32)
    u = np.asarray(jax.random.uniform(jax.random.key(V), 2 * n))
    tokens, logprobs = sample(z, u, Sampling(temperature, top_k, top_p), tp)
    p_values = []
    for row in (0, 1):
        p = truncated(softmax(z[row] / temperature), top_k, top_p)
        drawn = tokens[row::2]
        assert (p[drawn] > 0).all(), "drew a token outside the kept set"
        assert_allclose(logprobs[row::2], np.log(p[drawn]), rtol=0, atol=1e-5)
        p_values.append(chi_square(drawn, p))
    assert min(p_values) > 1e-3, p_values
    record_property("lowest p of 2", f"{min(p_values):.2f}")

    greedy, logprobs = sample(z, np.zeros(2, np.float32), GREEDY, tp)
    assert_array_equal(greedy, z.argmax(-1))
    assert_allclose(logprobs, np.log(softmax(z).max(-1)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("tp", [1, 4])
def test_greedy_takes_the_first_of_the_likeliest_tokens(tp):
    """So the answer is the same on every mesh. In bfloat16, logits are often equal."""
    rng = np.random.default_rng(7)
    z = rng.integers(0, 3, (50, 24)).astype(np.float32)
    tokens, _ = sample(z, np.zeros(50, np.float32), GREEDY, tp)
    assert_array_equal(tokens, z.argmax(-1))


@pytest.mark.parametrize("tp", [1, 4])
def test_truncation_keeps_equals_of_the_last_token(tp):
    """Truncation keeps all tokens that are as likely as the last one kept. top_k keeps a token even
    if it has hardly any mass."""
    z = np.log(np.array([[8, 1, 4, 2, 4, 4, 1e-30, 1]], np.float32))
    # (options, x for each token that is kept)
    cases = [
        (dict(top_k=2), "x.x.xx.."),
        (dict(top_k=7), "xxxxxx.x"),
        (dict(top_k=8), "xxxxxxxx"),
        (dict(top_k=99), "xxxxxxxx"),
        (dict(top_p=0.1), "x......."),
        (dict(top_p=0.5), "x.x.xx.."),
        (dict(top_p=0.9), "x.xxxx.."),
        (dict(top_k=2, top_p=0.35), "x......."),
    ]
    for options, kept in cases:
        truncated_z = jax.shard_map(
            partial(keep_most_likely, sampling=Sampling(**options), axes=("tp",)),
            mesh=mesh(tp=tp),
            check_vma=False,
            in_specs=P(None, "tp"),
            out_specs=P(None, "tp"),
        )
        found = np.asarray(jax.jit(truncated_z)(z))[0]
        is_kept = np.array([letter == "x" for letter in kept])
        assert_array_equal(found, np.where(is_kept, z[0], -np.inf), str(options))
