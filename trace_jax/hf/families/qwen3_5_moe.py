"""Qwen3.5-MoE, text (`model_type` qwen3_5_moe_text): gated DeltaNet, gated attention every 4th layer, shared expert."""

from typing import Any

from trace_jax.hf.config import NAMES, HfConfig, agreed, rope_config, rope_parameters
from trace_jax.hf.families.parts import (
    LAYER,
    MLP,
    attention,
    ends,
    experts,
    fused,
    hf_sizes,
    renamed,
    shared_expert,
    sizes,
)
from trace_jax.hf.folder import CheckpointFormatError
from trace_jax.hf.table import Link, linear
from trace_jax.models import ModelConfig
from trace_jax.models.config import DeltaConfig

MODEL_TYPE = "qwen3_5_moe_text"
ARCHITECTURE = "Qwen3_5MoeForCausalLM"
KINDS = {"linear_attention": "delta", "full_attention": "full"}


def model_config(hf: HfConfig) -> ModelConfig:
    hf.require("attention_bias", False)
    hf.require("attn_output_gate", True)
    hf.require("hidden_act", "silu")
    hf.require("mlp_only_layers", [], None)
    hf.unused("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype")
    common = sizes(hf)
    layers, interval = common["num_layers"], hf.get("full_attention_interval")
    by_interval = _repeated(["linear_attention"] * ((interval or 4) - 1) + ["full_attention"], layers)
    names = hf.get("layer_types", kind=NAMES, default=by_interval)
    if interval is not None:
        agreed({"layer_types": names, f"full_attention_interval={interval}, hence layer_types": by_interval})
    if set(names) != set(KINDS) or names != _repeated(names[: names.index("full_attention") + 1], layers):
        raise CheckpointFormatError(
            f"config.json has layer_types={names}; expected for each of {layers} layers a type, in a period of linear "
            "attention that full attention ends."
        )
    return ModelConfig(
        **common,
        family="qwen3_5_moe",
        layer_types=tuple(KINDS[name] for name in names[: names.index("full_attention") + 1]),
        num_experts=hf.take("num_experts"),
        experts_per_token=hf.take("num_experts_per_tok"),
        expert_hidden_size=hf.take("moe_intermediate_size"),
        shared_expert_size=hf.take("shared_expert_intermediate_size"),
        shared_expert_gate=True,
        output_gate=True,
        centred_norms=True,
        delta=DeltaConfig(
            key_heads=hf.take("linear_num_key_heads"),
            value_heads=hf.take("linear_num_value_heads"),
            key_dim=hf.take("linear_key_head_dim"),
            value_dim=hf.take("linear_value_head_dim"),
            conv_width=hf.take("linear_conv_kernel_dim"),
        ),
        rope=rope_config(hf, common["head_dim"], share=0.25),
    )


def _repeated(period: list[str], length: int) -> list[str]:
    return [period[i % len(period)] for i in range(length)]


def ignored(config: ModelConfig) -> tuple[str, ...]:
    return ("mtp.", "model.visual.")  # predicts the token after the next; sees images


def hf_config(config: ModelConfig) -> dict[str, Any]:
    c = config.delta
    names = {kind: name for name, kind in KINDS.items()}
    share = 1.0 if config.rope.dim is None else config.rope.dim / config.head_dim
    return {
        **hf_sizes(config),
        "rope_parameters": {"partial_rotary_factor": share, **rope_parameters(config.rope)},
        "attention_bias": False,
        "layer_types": _repeated([names[kind] for kind in config.layer_types], config.num_layers),
        "linear_conv_kernel_dim": c.conv_width,
        "linear_key_head_dim": c.key_dim,
        "linear_num_key_heads": c.key_heads,
        "linear_num_value_heads": c.value_heads,
        "linear_value_head_dim": c.value_dim,
        "moe_intermediate_size": config.expert_hidden_size,
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "shared_expert_intermediate_size": config.shared_expert_size,
    }


def table(config: ModelConfig) -> list[Link]:
    delta = f"{LAYER}.linear_attn"
    return [
        *ends(config),
        *attention(config),
        Link(param="delta.norm", tensor=f"{LAYER}.input_layernorm.weight"),
        linear("delta.qkv", f"{delta}.in_proj_qkv.weight"),
        linear("delta.gate", f"{delta}.in_proj_z.weight"),
        linear("delta.decay", f"{delta}.in_proj_a.weight"),
        linear("delta.beta", f"{delta}.in_proj_b.weight"),
        linear("delta.conv", f"{delta}.conv1d.weight", squeeze=1),
        Link(param="delta.log_rate", tensor=f"{delta}.A_log"),
        Link(param="delta.step_bias", tensor=f"{delta}.dt_bias"),
        Link(param="delta.output_norm", tensor=f"{delta}.norm.weight"),
        linear("delta.output", f"{delta}.out_proj.weight"),
        *experts(config, MLP),
        *shared_expert(config, f"{MLP}.shared_expert"),
        linear("moe.shared_gate", f"{MLP}.shared_expert_gate.weight"),
    ]


def tables(config: ModelConfig) -> list[list[Link]]:
    """Experts apart or fused, and the names of the model alone or of the text part of one that sees images."""
    apart = table(config)
    both = [apart, fused(apart)]
    return both + [renamed(links, "model.", "model.language_model.") for links in both]
