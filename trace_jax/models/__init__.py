"""Functional Flax (NNX) MoE transformers; one layer definition serves rollout and training."""

from trace_jax.models.config import ModelConfig
from trace_jax.models.transformer import (
    ForwardOutput,
    Transformer,
    abstract,
    create,
    layer_runs,
    logical_axes,
    parameter_count,
)

__all__ = [
    "ForwardOutput",
    "ModelConfig",
    "Transformer",
    "abstract",
    "create",
    "layer_runs",
    "logical_axes",
    "parameter_count",
]
