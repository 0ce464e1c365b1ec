"""One GRPO step: what the loop passes on, and several updates against a plain implementation."""

from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import SMALL, place, random_weights, textbook_hidden
from numpy.testing import assert_allclose, assert_array_equal

import model
import train
from infra.update import state as states
from test_kernel import mesh

N, NPQ = 16, 4  # answers of a step, and of a group
MAX_ANSWER = 9


# ---------------------------------------------------------------- the loop
def outs_of_two_steps():
    """What `Engine.generate` may return in two steps with four answers each."""
    return [
        {
            "tokens_BT": np.arange(4)[:, None] + 10 * n,
            "lengths_B": np.ones(4, int),
            "logprobs_BT": -np.arange(4)[:, None] - n,
            "truncated_B": np.arange(4) == n,
        }
        for n in range(2)
    ]


def two_steps(cfg, outs, scores, monkeypatch):
    """Run `train` with stand-ins for what takes time. Returns the stand-ins by name."""
    pool = mock.Mock()
    pool.score_answers.side_effect = [(score, {}) for score in scores]
    pool.report.return_value = 0
    pool.by_name.return_value = {}

    def update(state, _, step, *__):
        # A function that fails on all answers must end the run before the update.
        assert pool.report.call_count == step
        return state, [], []

    doubles = {
        "first_state": dict(return_value={"params": {}}),
        "sample_answers": dict(side_effect=[(out, ["text"] * 4) for out in outs]),
        "make_batches": dict(return_value=([], {"valid": 1, "flops": 1})),
        "update_policy": dict(side_effect=update),
        "rollout_metrics": dict(return_value={"len/answer": 1.0}),
        "update_metrics": dict(return_value={}),
        "step_metrics": dict(return_value={}),
        "end_step": {},
    }
    for name, results in doubles.items():
        # A stand-in takes the arguments of the real function, and no others.
        doubles[name] = mock.create_autospec(getattr(train, name), **results)
        monkeypatch.setattr(train, name, doubles[name])
    questions = [{"question": str(i), "prompt_ids": [i]} for i in range(8)]
    setup = SimpleNamespace(questions=questions, engine=mock.Mock(), reward_pool=pool)
    train.train(cfg, setup, mock.Mock(step=0, total_steps=2))
    return doubles


def test_the_loop_passes_on_what_a_step_sampled(monkeypatch):
    """Each step has its own key and its own questions. Advantages, sampled logprobs and truncation
    belong to the answers that they are packed with."""
    cfg = train.Config(steps=2, sft_steps=0, batch=2, npq=2, seed=3, advantage="drgrpo")
    outs = outs_of_two_steps()
    # Column 0 is SOLVED's, and does not count.
    scores = np.zeros((2, 4, 3))
    scores[..., 1] = 0.25 * np.arange(8).reshape(2, 4)
    scores[..., 0] = [9, 0, 0, 9]
    scores[..., 2] = [0, 1, 1, 0]
    doubles = two_steps(cfg, outs, scores, monkeypatch)
    asked = []
    for n, out in enumerate(outs):
        rows, group, key, sampling = doubles["sample_answers"].call_args_list[n].args[:4]
        assert key == jax.random.fold_in(jax.random.key(3), n + 1)
        assert group == 2
        assert sampling.temperature == cfg.temperature
        assert rows[0] == rows[1] != rows[2] == rows[3]
        asked += [row["question"] for row in rows[::2]]
        packed = doubles["make_batches"].call_args_list[n].args
        prompts, answers, advantages, _, _, logprobs, truncated = packed
        assert prompts == [row["prompt_ids"] for row in rows]
        assert_array_equal(answers, out["tokens_BT"])
        # The weights of REWARDS are 1 and 0.1.
        reward = scores[n] @ [0, 1, 0.1]
        mean = reward.reshape(2, 2).mean(1).repeat(2)
        assert_allclose(advantages, reward - mean, atol=1e-12)
        assert_array_equal(logprobs, out["logprobs_BT"])
        assert_array_equal(truncated, out["truncated_B"])
    assert len(set(asked)) == 4


# ---------------------------------------------------------------- several updates
def random_step():
    """Returns the prompts, answers, advantages, sampler logprobs and truncation of N answers."""
    rng = np.random.default_rng(3)

    def sequences(shortest, longest):
        lengths = rng.integers(shortest, longest + 1, N)
        return [rng.integers(0, SMALL.V, n).tolist() for n in lengths]

    prompts = sequences(2, 6)
    answers = sequences(1, 8)
    rewards = rng.choice([0, 0.1, 1.1], N)
    advantages = train.group_advantages(rewards, NPQ, "grpo")
    sampled = -3 * rng.random((N, MAX_ANSWER))
    truncated = rng.random(N) < 0.25
    return prompts, answers, advantages, sampled, truncated


def plain_updates(cfg, weights, reference, step, lr):
    """The weights after the updates of a step, computed one sequence per row, with autodiff and
    optax. Every second answer belongs to the first minibatch."""
    prompts, answers, advantages, sampled, truncated = step
    T = 16
    tokens, targets, segments = np.zeros((3, N, T), int)
    mask, sampler = np.zeros((2, N, T))
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(answer)
        own = slice(len(prompt) - 1, end - 1)
        tokens[i, :end] = prompt + answer
        segments[i, :end] = 1
        targets[i, own] = answer
        mask[i, own] = 1
        sampler[i, own] = sampled[i, : len(answer)]
    positions = np.tile(np.arange(T), (N, 1))

    def logprobs_and_entropy(flat):
        params = model.nest(flat)
        hidden = textbook_hidden(params, SMALL, tokens, positions, segments)
        logp = jax.nn.log_softmax(hidden @ model.head(params).T / cfg.temperature)
        own = jnp.take_along_axis(logp, targets[..., None], -1)
        entropy = -(jnp.exp(logp) * logp).sum(-1)
        return own[..., 0], entropy

    old = logprobs_and_entropy(weights)[0]
    ref = logprobs_and_entropy(reference)[0]
    importance = jnp.minimum(jnp.exp(old - sampler), cfg.is_cap)

    def loss(flat, minibatch):
        logp, entropy = logprobs_and_entropy(flat)
        ratio = jnp.exp(logp - old)
        clipped = jnp.clip(ratio, 1 - cfg.clip_low, 1 + cfg.clip_high)
        a = advantages[:, None]
        policy = importance * jnp.minimum(ratio * a, clipped * a)
        kl = jnp.exp(ref - logp) - (ref - logp) - 1
        of_token = cfg.beta * kl - policy - cfg.entropy_bonus * entropy
        is_in = (jnp.arange(N) % 2 == minibatch) & ~truncated
        counts = mask * is_in[:, None]
        return (of_token * counts).sum() / counts.sum()

    decayed = {name: not states.is_vector(name) for name in weights}
    adamw = optax.adamw(lr, b2=cfg.b2, weight_decay=cfg.weight_decay, mask=decayed)
    chain = optax.chain(optax.clip_by_global_norm(cfg.grad_clip), adamw)
    opt = chain.init(weights)
    gradient = jax.jit(jax.grad(loss))
    for _ in range(cfg.ppo_epochs):
        for minibatch in range(2):
            updates, opt = chain.update(gradient(weights, minibatch), opt, weights)
            weights = optax.apply_updates(weights, updates)
    return weights


@pytest.mark.slow
def test_several_updates_equal_a_plain_implementation(record_property):
    """Two epochs of two minibatches of several micro-batches: old_logprobs stay those from before
    the first update, the summed gradient is clipped, and the step's learning rate counts."""
    cfg = train.Config(
        dtype="float32",
        attention="blockwise",
        loss_impl="jax",
        max_answer=MAX_ANSWER,
        batch=4,
        npq=NPQ,
        minibatches=2,
        ppo_epochs=2,
        beta=0.1,
        entropy_bonus=0.02,
        is_cap=1.5,
        lr=0.02,
        temperature=0.7,
        grad_clip=0.05,
        weight_decay=0.1,
        b2=0.9,
        steps=10,
        sft_steps=0,
        warmup=3,
        decay="linear",
        truncated="mask",
    )
    on = mesh()
    step = prompts, answers, advantages, sampled, truncated = random_step()
    assert 0 < truncated.sum() < N
    weights = random_weights(SMALL)
    reference = {name: 1.02 * w for name, w in weights.items()}
    setup = SimpleNamespace(mesh=on, model_cfg=SMALL, row_width=16, micro_batch=1)
    batches, _ = train.make_batches(prompts, answers, advantages, cfg, setup, sampled, truncated)
    assert all(len(batch) > 1 for batch in batches)
    state = {
        "params": place(weights, on),
        "opt": {name: train.optimizer(cfg, name).init(w) for name, w in weights.items()},
        "ref": place(reference, on),
    }
    shapes = states.abstract_state(cfg, SMALL, on, train.optimizer)
    state = jax.tree.map(lambda a, shape: jax.device_put(a, shape.sharding), state, shapes)
    state, _, norms = train.update_policy(state, batches, 2, cfg, setup)
    assert min(norms) > cfg.grad_clip

    found = jax.device_get(model.flatten(state["params"]))
    # Step 2 of 3 warm-up steps.
    wanted = plain_updates(cfg, weights, reference, step, lr=cfg.lr * 2 / 3)
    moved = max(abs(wanted[name] - weights[name]).max() for name in weights)
    error = max(abs(found[name] - wanted[name]).max() for name in weights)
    record_property("largest error of a weight", f"{error:.1e} of {moved:.1e} moved")
    assert error <= 2e-5 < 1e-2 < moved


@pytest.mark.parametrize(
    "flags, step, rate, fields",
    [
        # Step 1 of two warm-up steps of GRPO.
        (dict(ppo_epochs=2), 3, 2.0, {"old_logprobs": "policy", "ref_logprobs": "start"}),
        (dict(minibatches=2), 4, 4.0, {"old_logprobs": "policy", "ref_logprobs": "start"}),
        ({}, 3, 2.0, {"ref_logprobs": "start"}),
        (dict(beta=0.0), 3, 2.0, {}),
        (dict(minibatches=2), 1, 0.5, {}),
    ],
)
def test_updates_take_the_rate_of_their_step_and_score_each_policy(
    flags, step, rate, fields, monkeypatch
):
    """All updates of a step have its learning rate, and logprobs under the policy before the first
    update and under the reference, if the loss needs them."""
    monkeypatch.setattr(train, "target_logprobs", lambda weights, rows, **_: weights)
    updates = []

    def update(state, minibatch, lr, **_):
        updates.append((*minibatch, lr))
        return state | {"params": "new"}, [{}], 1.0

    monkeypatch.setattr(train, "update", update)
    common = dict(sft_steps=2, steps=9, warmup=2, lr=4.0, sft_lr=1.0, beta=0.1)
    cfg = train.Config(**common | flags)
    batches = [[{}] for _ in range(cfg.minibatches)]
    state = {"params": "policy", "ref": "start"}
    setup = SimpleNamespace(model_cfg=None, mesh=None)
    train.update_policy(state, batches, step, cfg, setup)
    assert updates == [(fields, rate)] * cfg.minibatches * cfg.ppo_epochs


@pytest.mark.parametrize("done, beta, wanted", [(0, 0.1, 3), (2, 0.1, 3), (0, 0.0, None)])
def test_the_reference_is_the_policy_after_all_supervised_steps(done, beta, wanted, monkeypatch):
    doubles = dict(rows_of_step=[], make_batches=([], {}), update_metrics={}, step_metrics={})
    for name, result in doubles.items():
        double = mock.create_autospec(getattr(train, name), return_value=result)
        monkeypatch.setattr(train, name, double)
    monkeypatch.setattr(train, "end_step", mock.create_autospec(train.end_step))
    monkeypatch.setattr(train, "reference", lambda params, dtype: params)
    monkeypatch.setattr(
        train, "update_policy", lambda state, _, step, *__: (state | {"params": step}, [], [])
    )
    cfg = train.Config(sft_steps=3, beta=beta)
    run = mock.Mock(step=done)
    state = train.imitate({"params": done}, cfg, SimpleNamespace(examples=[]), run)
    assert state["params"] == 3 and state.get("ref") == wanted


def test_the_flops_of_all_epochs_count():
    run = mock.Mock()
    run.device_metrics.return_value = {}
    cfg = train.Config(ppo_epochs=3)
    train.step_metrics(1, {"valid": 1, "flops": 5}, 0.0, 1.0, 4.0, cfg, run)
    run.device_metrics.assert_called_once_with(15, 3.0)


def test_metrics_of_a_rollout():
    """Groups: rewards that are equal up to rounding, and rewards that differ."""
    reward_B = np.array([0.1 + 0.2, 0.3, 1.0, 0.0])
    scores = np.array([[0, 0.3, 0], [0, 0.3, 0], [1, 1, 0], [0, 0, 0]], float)
    out = {"lengths_B": np.array([3, 4, 5, 8]), "truncated_B": np.array([0, 0, 0, 1], bool)}
    texts = ["it is 7", "no idea", "<answer>2</answer>", "no"]
    pool = mock.Mock()
    pool.by_name.side_effect = lambda s: {"solved": s[:, 0], "reward/correct": s[:, 1]}
    found = train.rollout_metrics(
        reward_B,
        [[1, 2], [1, 2], [1], [1]],
        out,
        texts,
        scores,
        2,
        train.Config(npq=2),
        SimpleNamespace(reward_pool=pool),
    )
    wanted = {"reward/mean": 0.4, "len/prompt": 1.5, "len/answer": 5, "truncated": 0.25}
    wanted |= {"solved": 0.25, "reward/correct": 0.4, "len/answer_max": 8, "reward/faults": 2}
    # A truncated answer, and a solved one, do not count as answers without a number.
    wanted |= {"no_number": 0.25, "group/zero_variance": 0.5, "reward/std": np.std(reward_B)}
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert_allclose(found[name], value, err_msg=name)


@pytest.mark.parametrize("save_every, saved", [(2, [2, 4, 5]), (5, [5]), (0, [5]), (9, [5])])
def test_when_a_run_saves(save_every, saved):
    """Every save_every steps, and at the end."""
    run = mock.Mock(skipped=0, total_steps=5)
    cfg = train.Config(steps=5, save_every=save_every)
    setup = SimpleNamespace(held_out={})
    found = []
    for step in range(1, 6):
        run.save.side_effect = lambda step=step: found.append(step)
        train.end_step(step, {}, [1.0], {}, cfg, setup, run)
    assert found == saved
