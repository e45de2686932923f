"""Strict conversion between plain mappings (YAML, Hydra, JSON) and the frozen config dataclasses."""

import dataclasses
import difflib
import enum
import json
import math
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import dacite
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

T = TypeVar("T")


class ConfigError(ValueError):
    """An unusable configuration; the message names the full dotted key, its value and what is allowed."""


def read_json(path: Path, error: type[Exception]) -> dict[str, Any]:
    """The mapping that a JSON file holds; `error`, which names the file, for a missing one or anything else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise error(f"{path.parent} has no {path.name}.") from None
    except IsADirectoryError:
        raise error(f"{path} is a folder; expected a file.") from None
    except ValueError as problem:
        raise error(f"{path} is not JSON: {problem}") from problem
    if not isinstance(found, dict):
        raise error(f"{path} holds {type(found).__name__}; expected a mapping.")
    return found


def check_range(
    section: str,
    config: Any,
    *names: str,
    above: int | float | None = None,
    at_least: int | float | None = None,
    below: int | float = math.inf,
) -> None:
    """Raises ConfigError that names the first of `config`'s fields outside the range, or not finite.

    `section` is the dotted path of the config, empty at the top; `below` is exclusive.
    """
    for name in names:
        value = getattr(config, name)
        low = value > above if above is not None else value >= at_least
        if not (low and value < below and math.isfinite(value)):
            bound = f"above {above}" if above is not None else f"at least {at_least}"
            bound = "" if at_least == -math.inf else f" {bound}"
            upper = "" if below == math.inf else f" and below {below}"
            raise ConfigError(f"{_join(section, name)} is {value}; expected a finite number{bound}{upper}.")


def from_mapping(dataclass_type: type[T], mapping: Any, *, prefix: str = "") -> T:
    """Builds a config dataclass, refusing everything that is not exactly right.

    Nested dataclasses (also `X | None`) are built from nested mappings. Lists become tuples where the field
    is a tuple, and an int is taken where the field is a float; nothing else is converted. A Hydra/OmegaConf
    config is resolved first.

    Args:
      dataclass_type: the dataclass to build.
      mapping: its fields by name, as a mapping or an OmegaConf node; a file may hold anything else: refused.
      prefix: dotted path of `mapping` in the whole config, for messages.

    Raises:
      ConfigError: unknown or missing key, wrong type, or a value that the dataclass's own checks refuse.
    """
    if OmegaConf.is_config(mapping):
        try:
            mapping = OmegaConf.to_container(mapping, resolve=True, throw_on_missing=True)
        except OmegaConfBaseException as error:
            raise ConfigError(str(error)) from error
    if not isinstance(mapping, Mapping):
        where = f"{prefix}: " if prefix else ""
        raise ConfigError(f"{where}expected a mapping for {dataclass_type.__name__}, got {mapping!r}")

    fields = [field.name for field in dataclasses.fields(dataclass_type) if field.init]
    for key in mapping:
        if key not in fields:
            raise ConfigError(_unknown_key(_join(prefix, key), mapping[key], key, fields))

    hints = typing.get_type_hints(dataclass_type)
    values = {}
    for key, value in mapping.items():
        values[key] = _convert(_join(prefix, key), value, hints[key])
    try:
        return dacite.from_dict(dataclass_type, values, _DACITE)
    except dacite.MissingValueError as error:
        key = _join(prefix, error.field_path)
        raise ConfigError(f"{key}: required by {dataclass_type.__name__}, but not given") from error
    except dacite.WrongTypeError as error:
        key = _join(prefix, error.field_path)
        expected = _type_name(error.field_type)
        got = f"{error.value!r} ({type(error.value).__name__})"
        raise ConfigError(f"{key}: expected {expected}, got {got}") from error
    except ConfigError:
        raise
    except ValueError as error:  # the dataclass's own __post_init__
        raise ConfigError(f"{prefix}: {error}" if prefix else str(error)) from error


def to_mapping(config: Any) -> dict[str, Any]:
    """The config as plain dicts, lists and scalars: what `from_mapping` takes back and YAML or JSON can hold.

    Raises:
      ConfigError: a field holds something that is neither a dataclass, a collection nor a plain scalar.
    """
    if not dataclasses.is_dataclass(config) or isinstance(config, type):
        raise ConfigError(f"expected a config dataclass, got {config!r}")
    return _plain(config, "")


def _plain(value: Any, path: str) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        return {key: _plain(item, _join(path, key)) for key, item in items.items()}
    if isinstance(value, Mapping):
        return {str(key): _plain(item, _join(path, key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{path}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, enum.Enum):
        return value.value
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise ConfigError(f"{path}: {value!r} ({type(value).__name__}) cannot be stored in a config file")


def _int_as_float(value: Any) -> Any:
    return float(value) if type(value) is int else value


_DACITE = dacite.Config(strict=True, cast=[enum.Enum], type_hooks={float: _int_as_float})


def _convert(key: str, value: Any, hint: Any) -> Any:
    """What dacite cannot do with a full key in its message, or does too leniently."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    options = [arg for arg in typing.get_args(hint) if arg is not type(None)] if union else [hint]
    if isinstance(value, bool) and bool not in options and (int in options or float in options):
        # Python's bool is an int; `steps: true` in a config is a mistake all the same.
        raise ConfigError(f"{key}: expected {_type_name(hint)}, got {value!r} (bool)")
    collections = {typing.get_origin(option) for option in options} & {tuple, list}
    if isinstance(value, str) and collections and str not in options:
        # dacite would take the string apart into its characters.
        raise ConfigError(f"{key}: expected {_type_name(hint)}, got {value!r} (str)")
    if isinstance(value, list) and collections == {tuple}:
        element = next(typing.get_args(o)[0] for o in options if typing.get_origin(o) is tuple)
        return tuple(_convert(f"{key}[{i}]", item, element) for i, item in enumerate(value))
    if isinstance(value, Mapping) and len(options) == 1 and dataclasses.is_dataclass(options[0]):
        return from_mapping(options[0], value, prefix=key)
    return value


def _unknown_key(path: str, value: Any, key: Any, fields: list[str]) -> str:
    close = difflib.get_close_matches(str(key), fields, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    allowed = ", ".join(sorted(fields)) or "nothing"
    return f"unknown key {path!r} (value {value!r}).{hint} Allowed here: {allowed}"


def _join(prefix: str, key: Any) -> str:
    return f"{prefix}.{key}" if prefix else str(key)


def _type_name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
