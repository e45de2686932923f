"""Rescoring is the rollout's own arithmetic: under the weights that sampled the tokens it returns their log-probs."""

import numpy as np

from tests.trace_jax import small


def test_rescoring_with_the_same_weights_returns_the_sampled_log_probs():
    sampler, trajectories = small.fp4_sampler(), small.rollout("trace_all_sites")
    weights = small.sync(small.masters()[1], sampler.plan, small.MODEL.dtype)
    np.testing.assert_array_equal(sampler.rescore(weights, trajectories), trajectories.logprobs)
    assert np.abs(trajectories.logprobs).max() > 0.1


def test_rescoring_with_other_weights_returns_others():
    sampler, trajectories = small.fp4_sampler(), small.rollout("trace_all_sites")
    moved = small.sync(small.perturbed(small.masters()[1], 0.1, 1), sampler.plan, small.MODEL.dtype)
    rescored = sampler.rescore(moved, trajectories)
    assert np.abs(rescored - trajectories.logprobs).max() > 0.01
    assert not rescored[~trajectories.sampled].any()
