"""Qwen3-MoE (`model_type` qwen3_moe): https://huggingface.co/docs/transformers/model_doc/qwen3_moe"""

from typing import Any

from trace_jax.hf.config import HfConfig, rope_config
from trace_jax.hf.families.parts import MLP, attention, ends, experts, hf_sizes, sizes
from trace_jax.hf.table import Link
from trace_jax.models import ModelConfig
from trace_jax.models.router import RouterConfig

MODEL_TYPE = "qwen3_moe"
ARCHITECTURE = "Qwen3MoeForCausalLM"


def model_config(hf: HfConfig) -> ModelConfig:
    hf.require("attention_bias", False)
    hf.require("decoder_sparse_step", 1)
    hf.require("hidden_act", "silu")
    hf.require("mlp_only_layers", [], None)
    hf.require("use_sliding_window", False)
    hf.unused("intermediate_size", "sliding_window", "max_window_layers")
    common = sizes(hf)
    return ModelConfig(
        **common,
        family="qwen3_moe",
        num_experts=hf.take("num_experts", "num_local_experts"),
        experts_per_token=hf.take("num_experts_per_tok"),
        expert_hidden_size=hf.take("moe_intermediate_size"),
        router=RouterConfig(normalize=hf.flag("norm_topk_prob", False)),
        rope=rope_config(hf, common["head_dim"]),
    )


def ignored(config: ModelConfig) -> tuple[str, ...]:
    return ()


def hf_config(config: ModelConfig) -> dict[str, Any]:
    return {
        **hf_sizes(config),
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "intermediate_size": config.num_experts
        * config.expert_hidden_size,  # of dense layers: there are none
        "mlp_only_layers": [],
        "moe_intermediate_size": config.expert_hidden_size,
        "norm_topk_prob": config.router.normalize,
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "use_sliding_window": False,
    }


def table(config: ModelConfig) -> list[Link]:
    return [*ends(config), *attention(config), *experts(config, MLP)]
