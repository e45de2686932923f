"""Qwen3-MoE (`model_type` qwen3_moe): https://huggingface.co/docs/transformers/model_doc/qwen3_moe"""

from trace_jax.hf.config import HfConfig, rope_theta
from trace_jax.hf.table import Link, gated, linear
from trace_jax.models import ModelConfig

MODEL_TYPE = "qwen3_moe"
ARCHITECTURE = "Qwen3MoeForCausalLM"
IGNORED = ()


def model_config(hf: HfConfig) -> ModelConfig:
    hf.require("attention_bias", False)
    hf.require("decoder_sparse_step", 1)
    hf.require("hidden_act", "silu")
    hf.require("mlp_only_layers", [], None)
    hf.require("norm_topk_prob", True)
    hf.require("tie_word_embeddings", False)
    hf.require("use_sliding_window", False)
    hf.unused("intermediate_size", "sliding_window", "max_window_layers")
    heads = hf.take("num_attention_heads")
    return ModelConfig(
        family="qwen3_moe",
        vocab_size=hf.take("vocab_size"),
        hidden_size=hf.take("hidden_size"),
        num_layers=hf.take("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=hf.take("num_key_value_heads"),
        head_dim=hf.take("head_dim"),
        num_experts=hf.take("num_experts", "num_local_experts"),
        experts_per_token=hf.take("num_experts_per_tok"),
        expert_hidden_size=hf.take("moe_intermediate_size"),
        rope_theta=rope_theta(hf),
        norm_eps=hf.take("rms_norm_eps"),
    )


def hf_config(config: ModelConfig) -> dict:
    return {
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.num_experts
        * config.expert_hidden_size,  # of dense layers: there are none
        "mlp_only_layers": [],
        "moe_intermediate_size": config.expert_hidden_size,
        "norm_topk_prob": True,
        "num_attention_heads": config.num_heads,
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": config.vocab_size,
    }


def table(config: ModelConfig) -> list[Link]:
    layer = "model.layers.{layer}"
    attention, expert = f"{layer}.self_attn", f"{layer}.mlp.experts.{{expert}}"
    return [
        Link(param="embedding", tensor="model.embed_tokens.weight"),
        Link(param="attention.norm", tensor=f"{layer}.input_layernorm.weight"),
        linear("attention.query", f"{attention}.q_proj.weight"),
        linear("attention.key", f"{attention}.k_proj.weight"),
        linear("attention.value", f"{attention}.v_proj.weight"),
        Link(param="attention.query_norm", tensor=f"{attention}.q_norm.weight"),
        Link(param="attention.key_norm", tensor=f"{attention}.k_norm.weight"),
        linear("attention.output", f"{attention}.o_proj.weight"),
        Link(param="moe.norm", tensor=f"{layer}.post_attention_layernorm.weight"),
        linear("moe.router", f"{layer}.mlp.gate.weight"),
        *gated(
            "moe.gate_up",
            f"{expert}.gate_proj.weight",
            f"{expert}.up_proj.weight",
            config.expert_hidden_size,
        ),
        linear("moe.down", f"{expert}.down_proj.weight"),
        Link(param="final_norm", tensor="model.norm.weight"),
        linear("head", "lm_head.weight"),
    ]
