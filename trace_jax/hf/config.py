"""`config.json`, read strictly: a key that means something this model does not do is an error, not ignored."""

import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

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


class Kind(NamedTuple):
    """What the value of a key has to be, in words and as a test."""

    says: str
    accepts: Callable[[Any], bool]


SIZE = Kind("a whole number of at least 1", lambda x: type(x) is int and x >= 1)
COUNT = Kind("a whole number of at least 0", lambda x: type(x) is int and x >= 0)
NUMBER = Kind("a finite number", lambda x: type(x) in (int, float) and abs(x) <= sys.float_info.max)
FLAG = Kind("true or false", lambda x: type(x) is bool)
NAME = Kind("a string", lambda x: type(x) is str)
NAMES = Kind("a list of strings", lambda x: type(x) is list and all(type(name) is str for name in x))
MAPPING = Kind("a mapping", lambda x: isinstance(x, Mapping))


class HfConfig:
    """The keys of a `config.json`, each of which a family takes, requires to have a value, or knows to be unused.

    Args:
        mapping: the file, or a mapping in it.
        within: key of that mapping; empty for the file.
    """

    def __init__(self, mapping: Mapping[str, Any], within: str = ""):
        self._mapping, self._prefix = mapping, f"{within}." if within else ""
        self._seen: set[str] = set() if within else set(HARMLESS)

    def take(self, *names: str, kind: Kind = SIZE) -> Any:
        """The value that has to be under one of the names; keys have been renamed over the years.

        Raises:
            CheckpointFormatError: there is none, or see `get`.
        """
        value = self.get(*names, kind=kind)
        if value is None:
            raise CheckpointFormatError(
                f"config.json has no {' or '.join(self._prefix + name for name in names)}; expected {kind.says}."
            )
        return value

    def get(self, *names: str, kind: Kind = SIZE, default: Any = None) -> Any:
        """The value under one of the names, or the default; null is as good as absent.

        Raises:
            CheckpointFormatError: the value is of another kind, or two names have different ones.
        """
        self._seen |= set(names)
        stated = {name: self._mapping[name] for name in names if self._mapping.get(name) is not None}
        for name, value in stated.items():
            self._check(name, value, kind)
        value = agreed({self._prefix + name: value for name, value in stated.items()})
        return default if value is None else value

    def flag(self, name: str, default: bool) -> bool:
        """A switch; null is none, as readers do not agree on which side that is.

        Raises:
            CheckpointFormatError: it is neither true nor false.
        """
        self._seen.add(name)
        value = self._mapping.get(name, default)
        self._check(name, value, FLAG)
        return value

    def require(self, name: str, *allowed: Any) -> None:
        """Raises CheckpointFormatError unless the key is absent or has one of the values that the model honours."""
        self._seen.add(name)
        value = self._mapping.get(name, allowed[0])
        if value not in allowed:
            raise CheckpointFormatError(
                f"config.json has {self._prefix}{name}={value!r}, which this model does not implement; expected "
                f"{' or '.join(map(repr, allowed))}."
            )

    def unused(self, *names: str) -> None:
        """Keys that have no effect beside the values that are required."""
        self._seen |= set(names)

    def check_all_seen(self) -> None:
        """Raises CheckpointFormatError for a key that nobody knows: it could change what the model computes."""
        unknown = sorted(set(self._mapping) - self._seen)
        if unknown:
            shown = ", ".join(f"{self._prefix}{name}={self._mapping[name]!r}" for name in unknown)
            raise CheckpointFormatError(
                f"config.json has {shown}, which this family's importer does not know. If it changes nothing that the "
                "model computes, add it to the family's unused keys."
            )

    def _check(self, name: str, value: Any, kind: Kind) -> None:
        if not kind.accepts(value):
            raise CheckpointFormatError(
                f"config.json has {self._prefix}{name}={value!r}; expected {kind.says}."
            )


def agreed(stated: Mapping[str, Any]) -> Any:
    """The one value of keys that say the same thing; None if there are none.

    Raises:
        CheckpointFormatError: they differ, and readers do not agree on which counts.
    """
    values = list(stated.values())
    if any(value != values[0] for value in values):
        shown = " and ".join(f"{name}={value!r}" for name, value in stated.items())
        raise CheckpointFormatError(
            f"config.json has {shown}, which are different statements of one thing; delete all but the right one."
        )
    return values[0] if values else None


def rope_config(
    hf: HfConfig, head_dim: int, *, interleaved: bool = False, share: float | None = None
) -> RopeConfig:
    """Rotary embeddings, from where transformers 5 keeps them or 4 did.

    Args:
        head_dim: of the dimensions that `partial_rotary_factor` is a share of.
        interleaved: the family rotates neighbouring dimensions.
        share: of a head that the family rotates where `partial_rotary_factor` does not say. None: all of it, and the
            family has no such key.

    Raises:
        CheckpointFormatError: a kind or a key that the model does not honour, two places that differ, or a share
            outside (0, 1].
    """
    outer = {name: hf.get(name, kind=NUMBER) for name in ("rope_theta", "partial_rotary_factor")}
    outer = {name: value for name, value in outer.items() if value is not None}
    stated = {}
    for key in ("rope_parameters", "rope_scaling"):
        given = hf.get(key, kind=MAPPING, default={})
        for name in outer.keys() & given.keys():
            agreed({name: outer[name], f"{key}.{name}": given[name]})
        if given:
            stated[key] = {**outer, **given}
    rope = HfConfig(agreed(stated) or outer, next(iter(stated), "rope_parameters"))
    # Images have positions in three dimensions; those of text are the same in each.
    rope.unused("mrope_section", "mrope_interleaved")
    if share is None:
        rope.require("partial_rotary_factor", 1.0, None)
    else:
        share = rope.get("partial_rotary_factor", kind=NUMBER, default=share)
        if not 0 < share <= 1:
            raise CheckpointFormatError(
                f"config.json has partial_rotary_factor={share!r}; expected the share of a head that is rotated, above "
                "0 and at most 1."
            )
    rope_type = rope.get("rope_type", "type", kind=NAME, default="default")
    if rope_type not in ("default", "yarn"):
        raise CheckpointFormatError(
            f"config.json has rope_type={rope_type!r}, which this model does not implement; expected 'default' or "
            "'yarn'."
        )
    theta = rope.take("rope_theta", kind=NUMBER)
    scaling = _yarn_config(rope) if rope_type == "yarn" else None
    rope.check_all_seen()
    return RopeConfig(
        theta=float(theta),
        dim=None if share in (None, 1) else int(head_dim * share),
        interleaved=interleaved,
        scaling=scaling,
    )


def _yarn_config(rope: HfConfig) -> YarnConfig:
    known = {field.name: field.default for field in dataclasses.fields(YarnConfig)}
    numbers = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
    return YarnConfig(
        factor=rope.take("factor", kind=NUMBER),
        original_length=rope.take("original_max_position_embeddings"),
        truncate=rope.flag("truncate", known["truncate"]),
        **{name: rope.get(name, kind=NUMBER, default=known[name]) for name in numbers},
    )


def rope_parameters(rope: RopeConfig) -> dict[str, Any]:
    """The inverse of `rope_config`, without `partial_rotary_factor`."""
    found: dict[str, Any] = {"rope_theta": rope.theta, "rope_type": "yarn" if rope.scaling else "default"}
    if rope.scaling is not None:
        values = dataclasses.asdict(rope.scaling)
        found["original_max_position_embeddings"] = values.pop("original_length")
        # Zeros are how this project says that a key is not there.
        found |= {name: value for name, value in values.items() if value not in (None, 0.0) or value is False}
    return found
