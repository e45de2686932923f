"""`config.json`, read strictly: a key that means something this model does not do is an error, not ignored."""

from collections.abc import Mapping
from typing import Any

from trace_jax.hf.folder import CheckpointFormatError

HARMLESS = frozenset(
    {
        "architectures",
        "attention_dropout",
        "auto_map",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "id2label",
        "initializer_range",
        "label2id",
        "max_position_embeddings",
        "model_type",
        "output_router_logits",
        "pad_token_id",
        "quantization_config",
        "router_aux_loss_coef",
        "torch_dtype",
        "transformers_version",
        "use_cache",
        "_name_or_path",
    }
)
"""Keys that do not change what the forward pass computes of a text that the model's context holds."""


class HfConfig:
    """The keys of a `config.json`, each of which a family takes, requires to have a value, or knows to be unused."""

    def __init__(self, mapping: Mapping[str, Any]):
        self._mapping = mapping
        self._seen: set[str] = set()

    def take(self, *names: str) -> Any:
        """The value of the one key that is there; keys have been renamed over the years.

        Raises:
            CheckpointFormatError: there is none.
        """
        found = [name for name in names if self._mapping.get(name) is not None]
        self._seen |= set(names)
        if not found:
            raise CheckpointFormatError(f"config.json has no {' or '.join(names)}.")
        return self._mapping[found[0]]

    def get(self, name: str, default: Any = None) -> Any:
        self._seen.add(name)
        return self._mapping.get(name, default)

    def require(self, name: str, *allowed: Any) -> None:
        """Raises CheckpointFormatError unless the key is absent or has one of the values that the model honours."""
        value = self.get(name, allowed[0])
        if value not in allowed:
            raise CheckpointFormatError(
                f"config.json has {name}={value!r}, which this model does not implement; expected {allowed[0]!r}."
            )

    def unused(self, *names: str) -> None:
        """Keys that have no effect beside the values that are required."""
        self._seen |= set(names)

    def check_all_seen(self) -> None:
        """Raises CheckpointFormatError for a key that nobody knows: it could change what the model computes."""
        unknown = sorted(set(self._mapping) - self._seen - HARMLESS)
        if unknown:
            shown = ", ".join(f"{name}={self._mapping[name]!r}" for name in unknown)
            raise CheckpointFormatError(
                f"config.json has {shown}, which this family's importer does not know. If it changes nothing that the "
                "model computes, add it to the family's unused keys."
            )


def rope_theta(hf: HfConfig) -> float:
    """Base of plain rotary embeddings, in the place of transformers 5 or of 4.

    Raises:
        CheckpointFormatError: any other kind of rotary embedding.
    """
    parameters = dict(hf.get("rope_parameters") or {})
    scaling = hf.get("rope_scaling")
    kind = parameters.pop("rope_type", "default")
    theta = parameters.pop("rope_theta", None) or hf.get("rope_theta")
    hf.unused("rope_theta")
    if scaling is not None or kind != "default" or parameters:
        raise CheckpointFormatError(
            f"config.json has rope_parameters={hf.get('rope_parameters')!r} and rope_scaling={scaling!r}, which this "
            "model does not implement; expected rope_type 'default' with nothing but rope_theta."
        )
    if theta is None:
        raise CheckpointFormatError("config.json has no rope_theta.")
    return float(theta)
