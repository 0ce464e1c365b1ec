"""Answers without a gradient are left out of the rows, and the update stays the same."""

import dataclasses
import itertools
from functools import partial

import jax
import numpy as np
import pytest
from conftest import arguments, check_errors, read_jsonl, run_to_end, taught
from numpy.testing import assert_allclose, assert_array_equal
from safetensors.numpy import load_file
from test_update import PLAIN, SMALL, setup_of, state_of, update_case

import model
import train
from infra.update import packing
from test_kernel import mesh, relative

AGGREGATIONS = ("token", "sequence", "constant")
# fmt: off
REWARDS = [  # of four groups; in the middle two, all answers score the same
    [0.0, 1.1, 0.1, 0.1],
    [1.1, 1.1, 1.1, 1.1],
    [0.1, 0.1, 0.1, 0.1],
    [1.0, 0.0, 0.0, 1.1],
]
# fmt: on
HAVE_ADVANTAGES = (0, 1, 2, 3, 12, 13, 14, 15)
# Minibatches take every other answer. With these rewards, no answer of the second minibatch has an
# advantage.
ONLY_FIRST = [[1.1, 0.5, -0.1, 0.5]] * 4


def compute_all(advantages, sampler_logprobs, cfg):
    return np.ones(len(advantages), bool)


def batches_of(cfg, rewards=REWARDS, on=None, sampler_logprobs=None, truncated=False):
    """Returns (batches, counts, Setup): train.make_batches of the test case, in rows with few
    sequences."""
    case = update_case()
    advantages = train.group_advantages(rewards, 4, "drgrpo")
    setup = setup_of(on or mesh(), 24, 2)
    if sampler_logprobs is None:
        sampler_logprobs = case.sampler_logprobs
    batches, counts = train.make_batches(
        case.prompts, case.answers, advantages, cfg, setup, sampler_logprobs, truncated
    )
    return batches, counts, setup


def with_old(batches, cfg, on):
    """Returns the minibatches with `old_logprobs`, the logprobs before the first update."""
    params = state_of(cfg, SMALL, on)["params"]
    score = partial(train.target_logprobs, cfg=cfg, model_cfg=SMALL, mesh=on)
    return [[rows | {"old_logprobs": score(params, rows)} for rows in batch] for batch in batches]


def with_ref(batches, cfg, on):
    """Returns the minibatches with `ref_logprobs`, those of other weights."""
    params = jax.tree.map(lambda a: 1.01 * a, state_of(cfg, SMALL, on)["params"])
    score = partial(train.target_logprobs, cfg=cfg, model_cfg=SMALL, mesh=on)
    return [[rows | {"ref_logprobs": score(params, rows)} for rows in batch] for batch in batches]


def computed_sequences(batch):
    """Returns the tokens of each sequence in the rows of a minibatch, sorted."""
    found = []
    for rows in jax.device_get(batch):
        for tokens, segments in zip(rows["tokens"], rows["segments"], strict=True):
            found += [tokens[segments == n].tolist() for n in range(1, segments.max() + 1)]
    return sorted(found)


def gradients_of(batches, cfg, on):
    """Returns (the gradient of each minibatch as one vector, the metrics of each micro-batch)."""
    params = state_of(cfg, SMALL, on)["params"]
    run = partial(train.gradients, params, cfg=cfg, model_cfg=SMALL, mesh=on)
    totals = []
    parts = []
    for batch in batches:
        total = 0
        for rows in batch:
            grads, metrics = jax.device_get(run(rows))
            total += np.concatenate([grad.ravel() for grad in jax.tree.leaves(grads)])
            parts.append(metrics)
        totals.append(total)
    return totals, parts


# ---------------------------------------------------------------- the gradient and the metrics
def test_masked_answers_have_no_loss(record_property):
    """With `truncated` = mask, the gradient is that of a batch which never had the truncated
    answers, except that these count in the means of their groups."""
    on = mesh()
    case = update_case()
    rng = np.random.default_rng(3)
    truncated_B = rng.random(16) < 0.4
    advantages = train.group_advantages(rng.standard_normal(16), 4, "drgrpo")
    kept = np.flatnonzero(~truncated_B)
    assert 4 < len(kept) < 14

    def batches(cfg, which, truncated_B):
        lists = [[a[i] for i in which] for a in (case.prompts, case.answers)]
        logprobs = [case.sampler_logprobs[i] for i in which]
        made, counts = train.make_batches(
            *lists, advantages[which], cfg, setup_of(on, 24, 2), logprobs, truncated_B
        )
        return with_old(made, cfg, on), counts

    errors = {}
    for loss_agg in AGGREGATIONS:
        # The KL would give every answer a gradient.
        cfg = train.Config(**PLAIN | {"loss_agg": loss_agg, "minibatches": 1, "beta": 0.1})
        masking = dataclasses.replace(cfg, truncated="mask")
        got, counts = batches(masking, range(16), truncated_B)
        wanted, of_kept = batches(cfg, kept, truncated_B[kept])
        both = [with_ref(made, cfg, on) for made in (got, wanted)]
        (gradient,), (reference,) = (gradients_of(made, cfg, on)[0] for made in both)
        errors[loss_agg] = relative(gradient, reference)
        assert np.linalg.norm(reference) > 1e-2
        assert counts["trained"] == of_kept["trained"] < counts["valid"]
        # All answers of a minibatch may be truncated.
        (nothing,), _ = batches(masking, range(16), np.ones(16, bool))
        assert not any(np.asarray(rows["weight"]).any() for rows in nothing)
    check_errors(errors, 1e-6, record_property)


@pytest.mark.parametrize("dims", [(1, 1, 1), (1, 4, 2)], ids=["1", "1x4x2"])
def test_gradient_is_that_of_all_answers(dims, monkeypatch, record_property):
    """Each minibatch keeps only its answers with an advantage, and its gradient is that of all its
    answers."""
    on = mesh(*dims)
    case = update_case()
    whole = [case.prompts[i] + case.answers[i] for i in range(16)]
    errors = {}
    for loss_agg in AGGREGATIONS:
        cfg = train.Config(**PLAIN | {"loss_agg": loss_agg, "minibatches": 2})
        batches, _, _ = batches_of(cfg, on=on)
        batches = with_old(batches, cfg, on)
        got, _ = gradients_of(batches, cfg, on)
        with monkeypatch.context() as patch:
            patch.setattr(train, "has_gradient", compute_all)
            all_batches, _, _ = batches_of(cfg, on=on)
        all_batches = with_old(all_batches, cfg, on)
        wanted, _ = gradients_of(all_batches, cfg, on)
        for m in range(2):
            kept = [whole[i] for i in HAVE_ADVANTAGES if i % 2 == m]
            assert computed_sequences(batches[m]) == sorted(kept)
            assert computed_sequences(all_batches[m]) == sorted(whole[m::2])
            assert np.linalg.norm(wanted[m]) > 1e-2
            errors[loss_agg, m] = relative(got[m], wanted[m])
    check_errors(errors, 1e-6, record_property)


def test_metrics_say_what_they_are_over(monkeypatch):
    case = update_case()
    cfg = train.Config(**PLAIN | {"minibatches": 2})
    answer_tokens = [len(answer) for answer in case.answers]
    trained = sum(answer_tokens[i] for i in HAVE_ADVANTAGES)
    prompts = sum(len(case.prompts[i]) for i in HAVE_ADVANTAGES)

    def metrics_and_batches():
        batches, counts, setup = batches_of(cfg)
        batches = with_old(batches, cfg, mesh())
        _, parts = gradients_of(batches, cfg, mesh())
        metrics = train.update_metrics(parts, [1.0, 1.0], counts, cfg, setup)
        return metrics, batches, counts

    metrics, _, counts = metrics_and_batches()
    with monkeypatch.context() as patch:
        patch.setattr(train, "has_gradient", compute_all)
        of_all, all_batches, all_counts = metrics_and_batches()
    assert metrics["trained_tokens"] == trained
    assert metrics["valid_tokens"] == of_all["valid_tokens"] == sum(answer_tokens)
    assert of_all["trained_tokens"] == sum(answer_tokens)
    # Operations and padding count only the answers that are computed.
    assert counts["tokens"] == trained + prompts
    assert counts["slots"] < all_counts["slots"]
    assert counts["flops"] < all_counts["flops"]
    padding = 1 - counts["tokens"] / counts["slots"]
    assert_allclose(metrics["padding_fraction"], padding)
    assert_allclose(metrics["loss"], of_all["loss"], rtol=1e-5)
    # Compute the mean by hand, from rows with all answers.
    rows = jax.device_get(list(itertools.chain(*all_batches)))
    nll = np.concatenate([-part["old_logprobs"][part["advantage"] != 0] for part in rows])
    assert len(nll) == trained
    assert_allclose(metrics["nll"], nll.mean(), rtol=1e-5)
    assert abs(of_all["nll"] - nll.mean()) > 1e-3


def check_all_computed(cfg, spoilt=(), truncated=False):
    """Check that every answer is in the rows, and return the batch.

    spoilt: sequences that get a NaN among their logprobs.
    """
    case = update_case()
    sampler_logprobs = case.sampler_logprobs.copy()
    sampler_logprobs[list(spoilt), 0] = np.nan
    (batch,), counts, _ = batches_of(cfg, sampler_logprobs=sampler_logprobs, truncated=truncated)
    pairs = zip(case.prompts, case.answers, strict=True)
    assert computed_sequences(batch) == sorted(prompt + answer for prompt, answer in pairs)
    assert counts["trained"] == counts["valid"] > 0
    return batch


@pytest.mark.parametrize("flags", [{"beta": 0.1}, {"entropy_bonus": 0.1}], ids=["kl", "entropy"])
def test_a_kl_or_an_entropy_leaves_nothing_out(flags):
    check_all_computed(train.Config(max_answer=12, **flags))


@pytest.mark.parametrize("truncated", ["zero", "mask"])
def test_weights_that_are_not_finite_are_found(truncated):
    """If a sampled logprob is NaN, no answer is left out, so that the update finds the NaN. Weights
    that are not finite sample answers that are all truncated, and all score the same."""
    cfg = train.Config(**PLAIN, truncated=truncated)
    batch = check_all_computed(cfg, spoilt=[5], truncated=True)
    state = state_of(cfg, SMALL, mesh())
    _, _, norm = train.update(state, batch, 0.1, cfg=cfg, model_cfg=SMALL, mesh=mesh())
    assert np.isnan(norm)


# ---------------------------------------------------------------- minibatches without any answer
def test_an_update_without_answers_has_gradient_0(monkeypatch):
    """Without answers, an update equals one with gradient 0, bit for bit: the moments decay, and
    still move the weights."""
    adamw = dict(optimizer="adamw", b2=0.9, weight_decay=0.1, minibatches=2)
    cfg = train.Config(**PLAIN | adamw)
    batches, _, _ = batches_of(cfg, ONLY_FIRST)
    with monkeypatch.context() as patch:
        patch.setattr(train, "has_gradient", compute_all)
        all_batches, _, _ = batches_of(cfg, ONLY_FIRST)
    first, none = with_old(batches, cfg, mesh())
    _, all_of_second = with_old(all_batches, cfg, mesh())
    assert computed_sequences(first) and not computed_sequences(none)
    assert len(none) == 1 and len(computed_sequences(all_of_second)) == 8

    def flat(state):
        return jax.device_get((model.flatten(state["params"]), state["opt"]))

    run = partial(train.update, cfg=cfg, model_cfg=SMALL, mesh=mesh())
    ends = []
    for second in (none, all_of_second):
        state, _, norm = run(state_of(cfg, SMALL, mesh()), first, 0.1)
        assert norm > 1e-3
        before = flat(state)
        state, _, norm = run(state, second, 0.1)
        assert norm == 0
        ends.append(flat(state))
        for name, param in ends[-1][0].items():
            assert np.abs(param - before[0][name]).max() > 1e-3, name
    jax.tree.map(assert_array_equal, *ends)


def test_a_mean_over_no_tokens_is_nan():
    cfg = train.Config(**PLAIN | {"minibatches": 2})
    batches, counts, setup = batches_of(cfg, [[1.0] * 4] * 4)
    # Each optimizer step still has one micro-batch, without rows.
    assert [len(batch) for batch in batches] == [1, 1]
    _, parts = gradients_of(with_old(batches, cfg, mesh()), cfg, mesh())
    metrics = train.update_metrics(parts, [0.0, 0.0], counts, cfg, setup)
    for name in ("entropy", "nll", "clip_fraction", "ratio/mean", "ratio/max", "padding_fraction"):
        assert np.isnan(metrics[name]), name
    assert metrics["loss"] == metrics["grad_norm"] == metrics["trained_tokens"] == 0
    assert metrics["valid_tokens"] == sum(len(answer) for answer in update_case().answers)
    assert counts["flops"] == counts["slots"] == 0


# ---------------------------------------------------------------- several hosts
def test_a_host_without_answers_runs_empty_micro_batches(monkeypatch):
    """A host without answers runs as many micro-batches as the other host. Here it sees the other
    host's numbers beside its own."""
    case = update_case()
    setup = setup_of(mesh(), 24, 1)
    every = np.ones(16, bool)
    pack = partial(
        packing.pack_minibatches,
        case.prompts,
        case.answers,
        has_loss=every,
        cfg=train.Config(minibatches=2),
        setup=setup,
    )
    told = []

    def tell(value):
        told.append(value)
        return np.asarray(value)[None]

    monkeypatch.setattr(packing, "all_gather_processes", tell)
    others = pack(np.arange(16) % 2 == 0)
    monkeypatch.setattr(packing, "all_gather_processes", lambda own: np.array([told.pop(0), own]))
    none = pack(np.zeros(16, bool))
    assert len(others.micro_batches[0]) > 2
    assert none.micro_batches == [[{} for _ in batch] for batch in others.micro_batches]
    assert none.micro_batches[1] == [{}]
    # The normaliser still counts the answers of this host.
    assert_array_equal(none.answers_M, 2 * others.answers_M)
    assert_array_equal(none.answer_tokens_M, 2 * others.answer_tokens_M)
    assert none.counts == others.counts | {"valid": 2 * others.counts["valid"]}


@pytest.mark.slow
def test_two_processes_of_which_one_has_none(tmp_path, tmp_path_factory, record_property):
    """Two processes train as one does. Each asks a single question, so often all answers of one
    process, or of both, score the same and are left out."""
    flags = "--system= --npq 2 --steps 8 --max_prompt 32 --max_answer 16 --optimizer sgd --lr 0.1"
    flags = [*taught(tmp_path_factory), *arguments([flags, "--save_every 0 --eval_data none"])]
    names = "loss grad_norm entropy ratio/max valid_tokens trained_tokens group/zero_variance"
    names = names.split()

    def metrics_and_weights(processes):
        out = tmp_path / f"{processes}"
        run_to_end(out, flags, processes, batch=2)
        rows = read_jsonl(out / "metrics.jsonl")
        metrics = np.array([[row[name] for name in names] for row in rows], float)
        return metrics, load_file(out / "final/model.safetensors")

    metrics, weights = metrics_and_weights(2)
    *_, trained, same = metrics.T
    assert (trained[same == 0.5] > 0).any(), "never one process alone"
    assert 1 in same and (trained[same == 1] == 0).all(), "never both"
    record_property("groups of equal rewards", ", ".join(str(part) for part in same))
    wanted, wanted_weights = metrics_and_weights(1)
    assert_allclose(metrics, wanted, rtol=1e-5, atol=1e-5)
    apart = {name: relative(weights[name], wanted_weights[name]) for name in weights}
    check_errors(apart, 1e-5, record_property)
