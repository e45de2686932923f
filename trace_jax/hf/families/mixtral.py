"""Mixtral (`model_type` mixtral): arXiv 2401.04088."""

from typing import Any

from trace_jax.hf.config import HfConfig, rope_config
from trace_jax.hf.families.parts import LAYER, attention, ends, experts, fused, hf_sizes, renamed, sizes
from trace_jax.hf.table import Link
from trace_jax.models import ModelConfig

MODEL_TYPE = "mixtral"
ARCHITECTURE = "MixtralForCausalLM"


def model_config(hf: HfConfig) -> ModelConfig:
    hf.require("hidden_act", "silu")
    hf.require("sliding_window", None)
    hf.unused("router_jitter_noise")  # of training with dropped tokens
    common = sizes(hf)
    return ModelConfig(
        **common,
        family="mixtral",
        num_experts=hf.take("num_local_experts"),
        experts_per_token=hf.take("num_experts_per_tok"),
        expert_hidden_size=hf.take("intermediate_size"),
        qk_norm="none",
        rope=rope_config(hf, common["head_dim"]),
    )


def ignored(config: ModelConfig) -> tuple[str, ...]:
    return ()


def hf_config(config: ModelConfig) -> dict[str, Any]:
    return {
        **hf_sizes(config),
        "intermediate_size": config.expert_hidden_size,
        "num_experts_per_tok": config.experts_per_token,
        "num_local_experts": config.num_experts,
        "sliding_window": None,
    }


def table(config: ModelConfig) -> list[Link]:
    block = f"{LAYER}.block_sparse_moe"
    return [*ends(config), *attention(config), *experts(config, block, gate="w1", up="w3", down="w2")]


def tables(config: ModelConfig) -> list[list[Link]]:
    return [table(config), renamed(fused(table(config)), ".block_sparse_moe.", ".mlp.")]
