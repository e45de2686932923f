"""Rescoring is the rollout's own arithmetic: under the weights that sampled the tokens it returns their log-probs."""

import jax
import numpy as np

from trace_jax.guidance import GuidanceSpec
from trace_jax.models import ModelConfig, create
from trace_jax.quant import QuantPlan, rollout_weights
from trace_jax.rollout import RolloutConfig, Sampler, SamplingConfig


def test_rescoring_with_the_same_weights_returns_the_sampled_log_probs():
    config = ModelConfig(
        vocab_size=17,
        num_layers=2,
        hidden_size=32,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        num_experts=4,
        expert_hidden_size=32,
    )
    graphdef, masters = create(config, jax.random.key(0))
    weights = rollout_weights(masters, QuantPlan(), config.dtype)
    rollout = RolloutConfig(num_prompts=2, group_size=2, prompt_length=6, chunk=4)
    sampling = SamplingConfig(max_new_tokens=4)
    sampler = Sampler(
        graphdef, config, rollout, sampling, plan=QuantPlan(), record=GuidanceSpec(layers=(0, 1))
    )
    keys = jax.random.split(jax.random.key(1), 4)
    trajectories = sampler.generate(weights, [[3, 4, 5], [6, 7, 8, 9]], keys, weight_version=0)
    np.testing.assert_array_equal(sampler.rescore(weights, trajectories), trajectories.logprobs)
    assert np.abs(trajectories.logprobs).max() > 0.1
