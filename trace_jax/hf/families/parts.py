"""What the tables and configurations of several families have in common."""

import dataclasses
from typing import Any

from trace_jax.hf.config import NUMBER, HfConfig, rope_parameters
from trace_jax.hf.table import Link, gated, linear
from trace_jax.models import ModelConfig

LAYER = "model.layers.{layer}"
ATTENTION = f"{LAYER}.self_attn"
MLP = f"{LAYER}.mlp"


def sizes(hf: HfConfig) -> dict[str, Any]:
    """Fields of `ModelConfig` that all families name alike."""
    heads = hf.take("num_attention_heads")
    hidden = hf.take("hidden_size")
    return {
        "vocab_size": hf.take("vocab_size"),
        "hidden_size": hidden,
        "num_layers": hf.take("num_hidden_layers"),
        "num_heads": heads,
        "num_kv_heads": hf.get("num_key_value_heads", default=heads),
        "head_dim": hf.get("head_dim", default=hidden // heads),
        "norm_eps": hf.take("rms_norm_eps", kind=NUMBER),
        "tied_embedding": hf.flag("tie_word_embeddings", False),
    }


def hf_sizes(config: ModelConfig) -> dict[str, Any]:
    """The inverse of `sizes`, and the rotary embedding."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied_embedding,
        "rope_parameters": rope_parameters(config.rope),
        "hidden_act": "silu",
    }


def ends(config: ModelConfig) -> list[Link]:
    """Embedding, final norm, and a head where it is not the embedding."""
    links = [
        Link(param="embedding", tensor="model.embed_tokens.weight"),
        Link(param="final_norm", tensor="model.norm.weight"),
    ]
    return links if config.tied_embedding else [*links, linear("head", "lm_head.weight")]


def attention(config: ModelConfig) -> list[Link]:
    """Norm, projections, and the biases, q/k norms and sinks that the model has."""
    links = [Link(param="attention.norm", tensor=f"{LAYER}.input_layernorm.weight")]
    for name, tensor in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj"), ("output", "o_proj")):
        if name != "query" or not config.output_gate:
            links.append(linear(f"attention.{name}", f"{ATTENTION}.{tensor}.weight"))
        if config.attention_bias:
            links.append(Link(param=f"attention.{name}_bias", tensor=f"{ATTENTION}.{tensor}.bias"))
    if config.output_gate:
        # A head's rows are those of its query, then those of its gate.
        dim = config.head_dim
        for half, name in enumerate(("query", "gate")):
            rows = (
                range((2 * head + half) * dim, (2 * head + half + 1) * dim)
                for head in range(config.num_heads)
            )
            theirs = tuple(row for of_head in rows for row in of_head)
            links.append(linear(f"attention.{name}", f"{ATTENTION}.q_proj.weight", theirs=theirs))
    if config.qk_norm != "none":
        links.append(Link(param="attention.query_norm", tensor=f"{ATTENTION}.q_norm.weight"))
        links.append(Link(param="attention.key_norm", tensor=f"{ATTENTION}.k_norm.weight"))
    if config.sinks:
        links.append(Link(param="attention.sinks", tensor=f"{ATTENTION}.sinks"))
    return links


def experts(
    config: ModelConfig, block: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> list[Link]:
    """Norm, router, and one `[out, in]` matrix for each projection of each expert."""
    expert = f"{block}.experts.{{expert}}"
    return [
        Link(param="moe.norm", tensor=f"{LAYER}.post_attention_layernorm.weight"),
        linear("moe.router", f"{block}.gate.weight"),
        *gated("moe.gate_up", f"{expert}.{gate}.weight", f"{expert}.{up}.weight", config.expert_hidden_size),
        linear("moe.down", f"{expert}.{down}.weight"),
    ]


def shared_expert(config: ModelConfig, block: str) -> list[Link]:
    """The expert that all tokens share."""
    return [
        *gated(
            "moe.shared_gate_up",
            f"{block}.gate_proj.weight",
            f"{block}.up_proj.weight",
            config.shared_expert_size,
        ),
        linear("moe.shared_down", f"{block}.down_proj.weight"),
    ]


def dense(config: ModelConfig) -> list[Link]:
    """The MLP of layers without experts."""
    return [
        Link(param="dense.norm", tensor=f"{LAYER}.post_attention_layernorm.weight"),
        *gated(
            "dense.gate_up",
            f"{MLP}.gate_proj.weight",
            f"{MLP}.up_proj.weight",
            config.dense_hidden_size,
        ),
        linear("dense.down", f"{MLP}.down_proj.weight"),
    ]


def fused(links: list[Link]) -> list[Link]:
    """The same table where a folder holds the experts of a layer in one array: gate and up rows together.

    `[E, 2F, D]` and `[E, D, F]`, under names that do not depend on the family: how transformers 5 holds them.
    """
    found: list[Link] = []
    for link in links:
        block, expert, _ = link.tensor.partition(".experts.{expert}.")
        if not expert:
            found.append(link)
        elif link.param not in [other.param for other in found]:
            name = f"{block}.experts.{link.param.removeprefix('moe.')}_proj"
            found.append(Link(param=link.param, tensor=name, transpose=(0, 2, 1)))
    return found


def renamed(links: list[Link], old: str, new: str) -> list[Link]:
    """The same table with `new` for `old` in the names of tensors."""
    return [dataclasses.replace(link, tensor=link.tensor.replace(old, new)) for link in links]
