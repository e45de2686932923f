"""Functional Flax (NNX) MoE transformers; one layer definition serves rollout and training."""

from trace_jax.models.cache import init_cache, lay_out
from trace_jax.models.config import ModelConfig
from trace_jax.models.transformer import (
    ForwardOutput,
    Transformer,
    abstract,
    create,
    logical_axes,
    parameter_count,
)

__all__ = [
    "ForwardOutput",
    "ModelConfig",
    "Transformer",
    "abstract",
    "create",
    "init_cache",
    "lay_out",
    "logical_axes",
    "parameter_count",
]
