"""gpt-oss (`model_type` gpt_oss): sinks, alternating windows, biases, clamped SwiGLU (arXiv 2508.10925)."""

from typing import Any

from trace_jax.hf.config import NAMES, NUMBER, HfConfig, rope_config
from trace_jax.hf.families.parts import LAYER, MLP, attention, ends, hf_sizes, sizes
from trace_jax.hf.folder import CheckpointFormatError
from trace_jax.hf.table import Link, gated, linear
from trace_jax.models import ModelConfig
from trace_jax.models.router import RouterConfig

MODEL_TYPE = "gpt_oss"
ARCHITECTURE = "GptOssForCausalLM"
PERIOD = {"sliding": "sliding_attention", "full": "full_attention"}


def model_config(hf: HfConfig) -> ModelConfig:
    hf.require("attention_bias", True)
    hf.require("hidden_act", "silu")
    hf.unused("initial_context_length")
    common = sizes(hf)
    experts_per_token = hf.take("num_experts_per_tok")
    hf.require("experts_per_token", experts_per_token)
    kinds = list(PERIOD)
    layers = [PERIOD[kinds[i % 2]] for i in range(common["num_layers"])]
    stated = hf.get("layer_types", kind=NAMES, default=layers)
    if stated != layers:
        raise CheckpointFormatError(
            f"config.json has layer_types={stated}; expected sliding and full attention in turn."
        )
    return ModelConfig(
        **common,
        family="gpt_oss",
        num_experts=hf.take("num_local_experts"),
        experts_per_token=experts_per_token,
        expert_hidden_size=hf.take("intermediate_size"),
        layer_types=tuple(kinds),
        window=hf.take("sliding_window"),
        qk_norm="none",
        attention_bias=True,
        sinks=True,
        router=RouterConfig(bias=True),
        activation="clamped_swiglu",
        activation_alpha=hf.get("swiglu_alpha", kind=NUMBER, default=1.702),
        activation_limit=hf.get("swiglu_limit", kind=NUMBER, default=7.0),
        expert_bias=True,
        rope=rope_config(hf, common["head_dim"]),
    )


def ignored(config: ModelConfig) -> tuple[str, ...]:
    return ()


def hf_config(config: ModelConfig) -> dict[str, Any]:
    period = config.layer_types
    return {
        **hf_sizes(config),
        "attention_bias": True,
        "intermediate_size": config.expert_hidden_size,
        "layer_types": [PERIOD[period[i % len(period)]] for i in range(config.num_layers)],
        "num_experts_per_tok": config.experts_per_token,
        "num_local_experts": config.num_experts,
        "sliding_window": config.window,
        "swiglu_alpha": config.activation_alpha,
        "swiglu_limit": config.activation_limit,
    }


def table(config: ModelConfig) -> list[Link]:
    links = [
        *ends(config),
        *attention(config),
        Link(param="moe.norm", tensor=f"{LAYER}.post_attention_layernorm.weight"),
        linear("moe.router", f"{MLP}.router.weight"),
        Link(param="moe.router_bias", tensor=f"{MLP}.router.bias"),
        Link(param="moe.down", tensor=f"{MLP}.experts.down_proj"),
        Link(param="moe.down_bias", tensor=f"{MLP}.experts.down_proj_bias"),
    ]
    # The checkpoint's columns are a gate's and an up projection's in turn.
    width = config.expert_hidden_size
    for param, tensor in (
        ("moe.gate_up", f"{MLP}.experts.gate_up_proj"),
        ("moe.gate_up_bias", f"{MLP}.experts.gate_up_proj_bias"),
    ):
        for half in range(2):
            ours, theirs = range(half * width, (half + 1) * width), range(half, 2 * width, 2)
            links.append(Link(param=param, tensor=tensor, ours=ours, theirs=theirs))
    return links


def tables(config: ModelConfig) -> list[list[Link]]:
    return [table(config)]


def engine_table(config: ModelConfig) -> list[Link]:
    """Experts as modules of their own: quantized, engines take them so, and not as arrays of all experts."""
    module, width = f"{MLP}.experts.{{expert}}", config.expert_hidden_size
    return [
        *(link for link in table(config) if ".experts." not in link.tensor),
        *gated("moe.gate_up", f"{module}.gate_proj.weight", f"{module}.up_proj.weight", width),
        Link(param="moe.gate_up_bias", tensor=f"{module}.gate_proj.bias", ours=range(width)),
        Link(param="moe.gate_up_bias", tensor=f"{module}.up_proj.bias", ours=range(width, 2 * width)),
        linear("moe.down", f"{module}.down_proj.weight"),
        Link(param="moe.down_bias", tensor=f"{module}.down_proj.bias"),
    ]
