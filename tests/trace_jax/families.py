"""A tiny checkpoint of every family, with the reference logits of another implementation."""

import functools
from pathlib import Path

from trace_jax.hf import read_model_config
from trace_jax.models import ModelConfig

ROOT = Path(__file__).parent.parent / "data" / "hf_tiny"
FAMILIES = ("qwen3_moe", "qwen3_5_moe_text", "olmoe", "mixtral", "gpt_oss", "deepseek_v3")


@functools.cache
def config_of(family: str) -> ModelConfig:
    return read_model_config(ROOT / family)[2]
