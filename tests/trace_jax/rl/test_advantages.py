"""Group-normalised advantages."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trace_jax.rl import group_advantages


def test_normalised_within_each_group():
    rewards = np.array([[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.0, 1.0]])
    found = group_advantages(rewards)
    assert found.values.dtype == np.float32 and found.degenerate_groups == 0
    np.testing.assert_allclose(found.values[0], [1, -1, -1, 1], rtol=1e-5)
    np.testing.assert_allclose(found.values[1], np.array([-1, -1, -1, 3]) / np.sqrt(3), rtol=1e-5)


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3])
def test_equal_rewards_give_exact_zeros_and_are_counted(reward):
    rewards = np.array([[reward] * 3, [0.0, 1.0, 0.0]])
    found = group_advantages(rewards)
    assert not found.values[0].any() and found.values[1].any()
    assert found.degenerate_groups == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_refuses_a_reward_that_is_not_finite(bad):
    rewards = np.zeros((3, 2))
    rewards[2, 1] = bad
    with pytest.raises(
        ValueError, match=f"reward of response 1 to prompt 2 is {bad}; the task's score must be finite"
    ):
        group_advantages(rewards)


def test_refuses_a_group_of_one():
    with pytest.raises(
        ValueError, match=r"rewards have shape \(4, 1\); expected \[prompts, responses >= 2\]"
    ):
        group_advantages(np.zeros((4, 1)))


@given(st.integers(0, 2**32 - 1), st.floats(-100, 100), st.floats(0.1, 100))
def test_shift_and_scale_do_not_matter(seed, shift, scale):
    rewards = np.random.default_rng(seed).integers(0, 3, (4, 6)).astype(float)
    base, moved = group_advantages(rewards), group_advantages(rewards * scale + shift)
    np.testing.assert_allclose(moved.values, base.values, atol=1e-3)
    np.testing.assert_allclose(base.values.sum(axis=1), 0, atol=1e-5)
