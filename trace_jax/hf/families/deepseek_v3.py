"""DeepSeek-V3 (`model_type` deepseek_v3): latent attention, grouped sigmoid routing (arXiv 2412.19437)."""

from typing import Any

from trace_jax.hf.config import COUNT, NUMBER, HfConfig, rope_config, rope_parameters
from trace_jax.hf.families.parts import (
    ATTENTION,
    LAYER,
    MLP,
    dense,
    ends,
    experts,
    hf_sizes,
    shared_expert,
    sizes,
)
from trace_jax.hf.table import Link, linear
from trace_jax.models import ModelConfig
from trace_jax.models.config import LatentConfig
from trace_jax.models.router import RouterConfig

MODEL_TYPE = "deepseek_v3"
ARCHITECTURE = "DeepseekV3ForCausalLM"


def model_config(hf: HfConfig) -> ModelConfig:
    hf.require("attention_bias", False)
    hf.require("hidden_act", "silu")
    hf.require("moe_layer_freq", 1)
    hf.require("scoring_func", "sigmoid")
    hf.require("topk_method", "noaux_tc")
    hf.unused(
        "aux_loss_alpha",
        "ep_size",
        "intermediate_size",  # of dense layers, if there are any
        "num_nextn_predict_layers",
        "pretraining_tp",
        "qk_head_dim",
        "seq_aux",
    )
    common = sizes(hf)
    rope_dim = hf.take("qk_rope_head_dim")
    dense_layers = hf.take("first_k_dense_replace", kind=COUNT)
    shared = hf.get("n_shared_experts", kind=COUNT, default=0)
    hidden = hf.take("moe_intermediate_size")
    return ModelConfig(
        **common | {"head_dim": rope_dim},
        family="deepseek_v3",
        layer_types=("latent",),
        latent=LatentConfig(
            query_rank=hf.get("q_lora_rank"),
            latent_rank=hf.take("kv_lora_rank"),
            nope_dim=hf.take("qk_nope_head_dim"),
            rope_dim=rope_dim,
            value_dim=hf.take("v_head_dim"),
        ),
        dense_layers=dense_layers,
        dense_hidden_size=hf.take("intermediate_size") if dense_layers else 0,
        num_experts=hf.take("n_routed_experts"),
        experts_per_token=hf.take("num_experts_per_tok"),
        expert_hidden_size=hidden,
        shared_expert_size=shared * hidden,
        qk_norm="none",
        router=RouterConfig(
            scores="sigmoid",
            normalize=hf.flag("norm_topk_prob", True),
            groups=hf.take("n_group"),
            top_groups=hf.take("topk_group"),
            scale=hf.take("routed_scaling_factor", kind=NUMBER),
            correction=True,
        ),
        rope=rope_config(hf, rope_dim, interleaved=hf.flag("rope_interleave", True)),
    )


def ignored(config: ModelConfig) -> tuple[str, ...]:
    return (f"model.layers.{config.num_layers}.",)  # predicts the token after the next


def hf_config(config: ModelConfig) -> dict[str, Any]:
    c, router = config.latent, config.router
    return {
        **hf_sizes(config),
        "attention_bias": False,
        "first_k_dense_replace": config.dense_layers,
        "intermediate_size": config.dense_hidden_size,
        "kv_lora_rank": c.latent_rank,
        "moe_intermediate_size": config.expert_hidden_size,
        "n_group": router.groups,
        "n_routed_experts": config.num_experts,
        "n_shared_experts": config.shared_expert_size // config.expert_hidden_size,
        "norm_topk_prob": router.normalize,
        "num_experts_per_tok": config.experts_per_token,
        "num_nextn_predict_layers": 0,
        "q_lora_rank": c.query_rank,
        "qk_nope_head_dim": c.nope_dim,
        "qk_rope_head_dim": c.rope_dim,
        "rope_interleave": config.rope.interleaved,
        "rope_parameters": rope_parameters(config.rope),
        "routed_scaling_factor": router.scale,
        "topk_group": router.top_groups,
        "v_head_dim": c.value_dim,
    }


def table(config: ModelConfig) -> list[Link]:
    links = [
        *ends(config),
        Link(param="latent.norm", tensor=f"{LAYER}.input_layernorm.weight"),
        linear("latent.kv_down", f"{ATTENTION}.kv_a_proj_with_mqa.weight"),
        Link(param="latent.kv_norm", tensor=f"{ATTENTION}.kv_a_layernorm.weight"),
        linear("latent.kv_up", f"{ATTENTION}.kv_b_proj.weight"),
        linear("latent.output", f"{ATTENTION}.o_proj.weight"),
    ]
    if config.latent.query_rank is None:
        links.append(linear("latent.query", f"{ATTENTION}.q_proj.weight"))
    else:
        links += [
            linear("latent.query_down", f"{ATTENTION}.q_a_proj.weight"),
            Link(param="latent.query_norm", tensor=f"{ATTENTION}.q_a_layernorm.weight"),
            linear("latent.query_up", f"{ATTENTION}.q_b_proj.weight"),
        ]
    if config.layers_of("dense"):
        links += dense(config)
    if config.layers_of("moe"):
        links += experts(config, MLP)
        links.append(Link(param="moe.router_correction", tensor=f"{MLP}.gate.e_score_correction_bias"))
        if config.shared_expert_size:
            links += shared_expert(config, f"{MLP}.shared_experts")
    return links
