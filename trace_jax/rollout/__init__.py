"""Jitted FP4 rollout: prefill, chunked decode, sampling, records."""

from trace_jax.rollout.random_weights import random_rollout_weights
from trace_jax.rollout.sampler import Prompt, RolloutConfig, Sampler
from trace_jax.rollout.sampling import SamplingConfig, sample, scale_logits, token_logprobs
from trace_jax.rollout.store import load_trajectories, save_trajectories
from trace_jax.rollout.trajectories import Trajectories, concatenate

__all__ = [
    "Prompt",
    "RolloutConfig",
    "Sampler",
    "SamplingConfig",
    "Trajectories",
    "concatenate",
    "load_trajectories",
    "random_rollout_weights",
    "sample",
    "save_trajectories",
    "scale_logits",
    "token_logprobs",
]
