"""Ranges of the hyperparameters: each value that would train nothing, or nonsense, is refused by name."""

import math

import pytest

from trace_jax.rl import OptimizerConfig, RLConfig


@pytest.mark.parametrize(
    "name, value",
    [
        ("clip_low", -1.0),
        ("clip_low", 1.0),
        ("clip_high", -0.1),
        ("ratio_cap", 0.5),
        ("tis_cap", math.nan),
        ("icepop_low", 1.5),
        ("kl_coefficient", -0.1),
        ("entropy_coefficient", math.inf),
        ("temperature", 0.0),
        ("steps", 0),
        ("keep_checkpoints", 0),
        ("decode_chunk", 0),
        ("control_every", -1),
        ("max_version_lag", -1),
    ],
)
def test_rl_ranges(name, value):
    with pytest.raises(ValueError, match=rf"rl\.{name} is {value}; expected a finite number"):
        RLConfig(**{name: value})


@pytest.mark.parametrize(
    "name, value",
    [
        ("learning_rate", 0.0),
        ("learning_rate", math.inf),
        ("learning_rate", math.nan),
        ("beta2", 1.0),
        ("weight_decay", -0.1),
        ("clip_norm", -1.0),
        ("warmup_steps", -1),
        ("accumulation", 0),
    ],
)
def test_optimizer_ranges(name, value):
    with pytest.raises(ValueError, match=rf"optimizer\.{name} is {value}; expected a finite number"):
        OptimizerConfig(**{name: value})


def test_negative_entropy_bonus_is_a_penalty_and_allowed():
    assert RLConfig(entropy_coefficient=-0.01).entropy_coefficient == -0.01
