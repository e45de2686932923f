"""OLMoE (`model_type` olmoe): q/k norms over all heads together, gates that do not sum to one (arXiv 2409.02060)."""

from typing import Any

from trace_jax.hf.config import HfConfig, rope_config
from trace_jax.hf.families.parts import MLP, attention, ends, experts, hf_sizes, sizes
from trace_jax.hf.table import Link
from trace_jax.models import ModelConfig
from trace_jax.models.router import RouterConfig

MODEL_TYPE = "olmoe"
ARCHITECTURE = "OlmoeForCausalLM"


def model_config(hf: HfConfig) -> ModelConfig:
    hf.require("attention_bias", False)
    hf.require("clip_qkv", None)
    hf.require("hidden_act", "silu")
    common = sizes(hf)
    return ModelConfig(
        **common,
        family="olmoe",
        num_experts=hf.take("num_experts"),
        experts_per_token=hf.take("num_experts_per_tok"),
        expert_hidden_size=hf.take("intermediate_size"),
        qk_norm="full",
        router=RouterConfig(normalize=hf.flag("norm_topk_prob", False)),
        rope=rope_config(hf, common["head_dim"]),
    )


def ignored(config: ModelConfig) -> tuple[str, ...]:
    return ()


def hf_config(config: ModelConfig) -> dict[str, Any]:
    return {
        **hf_sizes(config),
        "attention_bias": False,
        "clip_qkv": None,
        "intermediate_size": config.expert_hidden_size,
        "norm_topk_prob": config.router.normalize,
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
    }


def table(config: ModelConfig) -> list[Link]:
    return [*ends(config), *attention(config), *experts(config, MLP)]
