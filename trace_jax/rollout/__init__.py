"""Jitted FP4 rollout: prefill, chunked decode, sampling, records."""

from trace_jax.rollout.sampler import RolloutConfig, Sampler
from trace_jax.rollout.sampling import SamplingConfig, sample, scale_logits, token_logprobs
from trace_jax.rollout.trajectories import Trajectories, concatenate

__all__ = [
    "RolloutConfig",
    "Sampler",
    "SamplingConfig",
    "Trajectories",
    "concatenate",
    "sample",
    "scale_logits",
    "token_logprobs",
]
