"""Functional Flax (NNX) MoE transformers; one layer definition serves rollout and training."""

from trace_jax.models.cache import init_cache, lay_out
from trace_jax.models.config import ModelConfig, check_same_model, run_like
from trace_jax.models.gguf import GgufError
from trace_jax.models.llama import load_llama
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
    "GgufError",
    "ModelConfig",
    "Transformer",
    "abstract",
    "check_same_model",
    "create",
    "init_cache",
    "lay_out",
    "load_llama",
    "logical_axes",
    "parameter_count",
    "run_like",
]
