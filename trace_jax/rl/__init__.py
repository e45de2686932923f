"""GRPO with rollout-guided QAT: methods, losses, trainer, and the loop."""

from trace_jax.rl.advantages import group_advantages
from trace_jax.rl.batch import TrainBatch, make_batch
from trace_jax.rl.config import OptimizerConfig, RLConfig
from trace_jax.rl.methods import MethodConfig
from trace_jax.rl.optimizer import make_optimizer
from trace_jax.rl.trainer import NonFiniteError, Trainer, TrainState, check_finite

__all__ = [
    "MethodConfig",
    "NonFiniteError",
    "OptimizerConfig",
    "RLConfig",
    "TrainBatch",
    "TrainState",
    "Trainer",
    "check_finite",
    "group_advantages",
    "make_batch",
    "make_optimizer",
]
