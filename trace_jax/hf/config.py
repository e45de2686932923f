"""`config.json`, read strictly: a key that means something this model does not do is an error, not ignored."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from trace_jax.hf.folder import CheckpointFormatError
from trace_jax.models.rope import RopeConfig, YarnConfig

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


def rope_config(hf: HfConfig, head_dim: int, *, interleaved: bool = False, share: float = 1.0) -> RopeConfig:
    """Rotary embeddings, from where transformers 5 keeps them or 4 did.

    Args:
        head_dim: of the dimensions that `partial_rotary_factor` is a share of.
        interleaved: the family rotates neighbouring dimensions.
        share: of a head that the family rotates where `partial_rotary_factor` does not say.

    Raises:
        CheckpointFormatError: a kind or a key that the model does not honour.
    """
    given = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    hf.unused("rope_parameters", "rope_scaling")
    theta, stated = hf.get("rope_theta"), hf.get("partial_rotary_factor")
    theta, stated = given.pop("rope_theta", theta), given.pop("partial_rotary_factor", stated)
    kind = given.pop("rope_type", given.pop("type", "default"))
    given.pop("type", None)
    # Images have positions in three dimensions; those of text are the same in each.
    for name in ("mrope_section", "mrope_interleaved"):
        given.pop(name, None)
    share = share if stated is None else stated
    if theta is None:
        raise CheckpointFormatError("config.json has no rope_theta.")
    scaling = None
    if kind == "yarn":
        names = {"original_max_position_embeddings": "original_length"}
        known = {field.name for field in dataclasses.fields(YarnConfig)}
        values = {names.get(name, name): value for name, value in given.items() if value is not None}
        given = {name: value for name, value in values.items() if name not in known}
        if not given:
            scaling = YarnConfig(**values)
    if given or kind not in ("default", "yarn"):
        raise CheckpointFormatError(
            f"config.json has rope_type={kind!r} with {given}, which this model does not implement; expected 'default' "
            "or 'yarn' with the keys of its paper."
        )
    return RopeConfig(
        theta=float(theta),
        dim=None if share == 1 else int(head_dim * share),
        interleaved=interleaved,
        scaling=scaling,
    )


def rope_parameters(rope: RopeConfig, head_dim: int) -> dict[str, Any]:
    """The inverse of `rope_config`."""
    found: dict[str, Any] = {"rope_theta": rope.theta, "rope_type": "yarn" if rope.scaling else "default"}
    if rope.dim is not None:
        found["partial_rotary_factor"] = rope.dim / head_dim
    if rope.scaling is not None:
        values = dataclasses.asdict(rope.scaling)
        found["original_max_position_embeddings"] = values.pop("original_length")
        # Zeros are how this project says that a key is not there.
        found |= {name: value for name, value in values.items() if value not in (None, 0.0) or value is False}
    return found
