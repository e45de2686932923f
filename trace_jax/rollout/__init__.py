"""FP4 rollout: an engine of continuous batching over a paged cache, sampling, records."""

from trace_jax.rollout.collate import collate
from trace_jax.rollout.engine import Engine
from trace_jax.rollout.engine_config import EngineConfig
from trace_jax.rollout.environment import Environment, Episode, Step, run_episodes
from trace_jax.rollout.programs import Programs
from trace_jax.rollout.random_weights import random_rollout_weights
from trace_jax.rollout.requests import Request, RequestError, Result
from trace_jax.rollout.sampler import Prompt, RolloutConfig, Sampler
from trace_jax.rollout.sampling import SamplingConfig, scale_logits, token_logprobs
from trace_jax.rollout.store import load_trajectories, save_trajectories
from trace_jax.rollout.trajectories import Trajectories

__all__ = [
    "Engine",
    "EngineConfig",
    "Environment",
    "Episode",
    "Programs",
    "Prompt",
    "Request",
    "RequestError",
    "Result",
    "RolloutConfig",
    "Sampler",
    "SamplingConfig",
    "Step",
    "Trajectories",
    "collate",
    "load_trajectories",
    "random_rollout_weights",
    "run_episodes",
    "save_trajectories",
    "scale_logits",
    "token_logprobs",
]
