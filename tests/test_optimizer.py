"""The optimizer of one parameter, and the learning rate. test_update tests complete updates."""

import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose

import train

THEIRS = {"adamw": optax.adamw, "lion": optax.lion}


@pytest.mark.parametrize("name", THEIRS)
def test_steps_equal_those_of_optax(name):
    """Three steps equal those of optax. One would not be enough: Adam's first step, without
    moments, is the same for any b2."""
    rng = np.random.default_rng(0)
    cfg = train.Config(optimizer=name, b2=0.9, weight_decay=0.1)
    ours = train.optimizer(cfg, "layers/wq_LDNH")
    theirs = THEIRS[name](1.0, b2=0.9, weight_decay=0.1)
    param = rng.standard_normal(8).astype(np.float32)
    our_state = ours.init(param)
    their_state = theirs.init(param)
    for _ in range(3):
        gradient = rng.standard_normal(8).astype(np.float32)
        direction, our_state = ours.update(gradient, our_state, param)
        step, their_state = theirs.update(gradient, their_state, param)
        # optax's step has a learning rate of 1, and the opposite sign.
        assert_allclose(-direction, step, rtol=1e-6)


def test_vectors_do_not_decay():
    cfg = train.Config(optimizer="sgd", weight_decay=0.1)
    param = np.float32([1.0, -2.0])
    no_gradient = np.zeros_like(param)
    decays = {"layers/wq_LDNH": 0.1, "layers/bq_LNH": 0.0, "norm_D": 0.0}
    decays |= {"layers/q_norm_LH": 0.0, "layers/k_norm_LH": 0.0}
    for name, decay in decays.items():
        optimizer = train.optimizer(cfg, name)
        direction, _ = optimizer.update(no_gradient, optimizer.init(param), param)
        assert_allclose(direction, decay * param, err_msg=name)


COSINE = 1 + np.cos(np.arange(1, 7) * np.pi / 7)
# fmt: off
SCHEDULES = [  # (flags, learning rates of steps 1 to 6)
    (dict(lr=4.0, steps=6, warmup=2),
     [2, 4, 4, 4, 4, 4]),
    (dict(lr=5.0, steps=6, warmup=2, decay="linear"),
     [2.5, 5, 4, 3, 2, 1]),
    (dict(lr=8.0, sft_lr=2.0, sft_steps=3, steps=3, warmup=2),
     [1, 2, 2, 4, 8, 8]),
    # Each phase has its own decay.
    (dict(lr=8.0, sft_lr=2.0, decay="linear",
          sft_steps=3, steps=3, warmup=0),
     [1.5, 1, 0.5, 6, 4, 2]),
    (dict(lr=2.0, steps=6, warmup=0, decay="cosine"),
     COSINE),
]
# fmt: on


def test_learning_rate_warms_up_and_decays_in_each_phase():
    for flags, wanted in SCHEDULES:
        rates = [train.learning_rate(train.Config(**flags), step) for step in range(1, 7)]
        assert_allclose(rates, wanted, err_msg=str(flags))
