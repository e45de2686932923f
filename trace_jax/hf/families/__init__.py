"""One file per family: its `config.json` both ways, and its table of tensors."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from trace_jax.hf.config import MAPPING, NAME, HfConfig
from trace_jax.hf.families import deepseek_v3, gpt_oss, mixtral, olmoe, qwen3_5_moe, qwen3_moe
from trace_jax.hf.families.parts import fused
from trace_jax.hf.folder import CheckpointFormatError
from trace_jax.hf.table import Link
from trace_jax.models import ModelConfig


class Family(NamedTuple):
    """How checkpoints of one `model_type` are read and written.

    `model_config` and `hf_config` are inverses; `table` maps every parameter as exports write it, `tables` are all that
    a folder may follow, `engine_table` has a matrix of its own for each expert; `ignored` are the beginnings of the
    names of tensors that a checkpoint may hold for nothing.
    """

    model_type: str
    architecture: str
    model_config: Callable[[HfConfig], ModelConfig]
    hf_config: Callable[[ModelConfig], dict[str, Any]]
    table: Callable[[ModelConfig], list[Link]]
    tables: Callable[[ModelConfig], list[list[Link]]]
    engine_table: Callable[[ModelConfig], list[Link]]
    ignored: Callable[[ModelConfig], tuple[str, ...]]


def _family(module: Any) -> Family:
    def tables(config: ModelConfig) -> list[list[Link]]:
        return [module.table(config), fused(module.table(config))]

    return Family(
        model_type=module.MODEL_TYPE,
        architecture=module.ARCHITECTURE,
        model_config=module.model_config,
        hf_config=module.hf_config,
        table=module.table,
        tables=getattr(module, "tables", tables),
        engine_table=getattr(module, "engine_table", module.table),
        ignored=module.ignored,
    )


FAMILIES = {
    module.MODEL_TYPE: _family(module)
    for module in (deepseek_v3, gpt_oss, mixtral, olmoe, qwen3_5_moe, qwen3_moe)
}
FAMILY_OF = {"tiny_moe": "qwen3_moe", "qwen3_5_moe": "qwen3_5_moe_text", "llama_moe": "mixtral"}
"""`ModelConfig.family` -> `model_type`, where they differ."""

TEXT_OF = {"qwen3_5_moe": "qwen3_5_moe_text"}
"""`model_type` of models of text and images -> of their text model, which `text_config` describes."""


def read_config(mapping: Mapping[str, Any]) -> tuple[Family, ModelConfig]:
    """Family and model of a `config.json`.

    Raises:
        CheckpointFormatError: an unknown `model_type`, a key or value that the model does not honour, or sizes that do
            not go together.
    """
    mapping = text_part(mapping)
    hf = HfConfig(mapping)
    model_type = hf.take("model_type", kind=NAME)
    hf.get("quantization_config", kind=MAPPING)
    if model_type not in FAMILIES:
        raise CheckpointFormatError(
            f"config.json has model_type={model_type!r}; known are {', '.join(sorted({*FAMILIES, *TEXT_OF}))}."
        )
    family = FAMILIES[model_type]
    try:
        config = family.model_config(hf)
    except CheckpointFormatError:
        raise
    except (TypeError, ValueError) as error:
        raise CheckpointFormatError(
            f"config.json of a {model_type} describes no such model: {error}"
        ) from error
    hf.check_all_seen()
    return family, config


def text_part(mapping: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a `config.json` says of the text model: itself, or its `text_config`.

    Raises:
        CheckpointFormatError: a model of text and images without `text_config`.
    """
    model_type = TEXT_OF.get(HfConfig(mapping).take("model_type", kind=NAME))
    if model_type is None:
        return mapping
    text = mapping.get("text_config")
    if not isinstance(text, dict):
        raise CheckpointFormatError(
            f"config.json has model_type={mapping['model_type']!r} but no text_config."
        )
    # These two are the whole model's to say.
    outer = {
        name: mapping[name] for name in ("quantization_config", "tie_word_embeddings") if name in mapping
    }
    return {**text, **outer, "model_type": model_type}


def family_of(config: ModelConfig) -> Family:
    """The family as which a model is exported.

    Raises:
        CheckpointFormatError: there is no such layout.
    """
    model_type = FAMILY_OF.get(config.family, config.family)
    if model_type not in FAMILIES:
        raise CheckpointFormatError(
            f"model.family {config.family!r} has no Hugging Face layout; those that have are "
            f"{', '.join(sorted({*FAMILIES, *FAMILY_OF}))}."
        )
    return FAMILIES[model_type]


def write_config(config: ModelConfig, base: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The `config.json` of a model in BF16: `base`, the one that it came from, if that still describes it.

    Raises:
        CheckpointFormatError: the family has no words for something of the model.
    """
    family = family_of(config)
    ours = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **family.hf_config(config),
    }
    described = read_config(ours)[1]
    said = {field.name for field in dataclasses.fields(config)} - {"family", "dtype", "remat"}
    differ = [name for name in sorted(said) if getattr(config, name) != getattr(described, name)]
    if differ:
        raise CheckpointFormatError(
            f"{family.model_type} checkpoints cannot say "
            f"{', '.join(f'{name}={getattr(config, name)!r}' for name in differ)}; there is no export of this model."
        )
    if base is not None and read_config(base)[1] == described:
        kept = {name: value for name, value in text_part(base).items() if name != "quantization_config"}
        ours = {"architectures": ours["architectures"], **kept}
    return {**ours, "dtype": "bfloat16"}
