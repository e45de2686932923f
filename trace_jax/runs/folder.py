"""A run's folder: where everything of the run is, and the promise that it belongs to one configuration."""

import dataclasses
import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from trace_jax.runs.environment import describe_environment
from trace_jax.runs.files import write_atomically

_SHOWN = 8
_ABSENT = object()


class RunFolderError(ValueError):
    """A folder that cannot be this run's; the message names it, and what differs."""


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """Paths of one run. `open` starts or resumes a run, the constructor is for reading one.

    Attributes:
      path: the folder.
    """

    path: Path

    @classmethod
    def open(
        cls,
        root: str | Path,
        name: str,
        config: Mapping[str, Any],
        *,
        may_change: Collection[str] = (),
        primary: bool = True,
    ) -> "RunFolder":
        """Creates the folder of a new run, or returns to that of an earlier start of the same run.

        Args:
          root: folder of all runs.
          name: of this run; names, not dates, so that every host finds the same folder.
          config: the resolved configuration, plain values only.
          may_change: dotted keys (or sections) in which a resume may differ, such as "train.steps". The stored
            config then takes the new values.
          primary: False on all but one host: these write nothing.

        Raises:
          RunFolderError: a bad name, a folder that holds something else, or a resume whose config differs.
        """
        if not re.fullmatch(r"\w[\w.=,+-]*", name):
            raise RunFolderError(
                f"run name {name!r}: expected letters, digits and _ . = , + -, and not one of the signs first"
            )
        run = cls(Path(root) / name)
        if not primary:
            return run
        new = yaml.safe_load(yaml.safe_dump(dict(config)))
        if run.config_path.exists():
            _refuse_differences(run, run.config(), new, may_change)
        elif run.path.exists() and any(_not_left_by_a_kill(entry) for entry in run.path.iterdir()):
            raise RunFolderError(
                f"{run.path} holds files but no config.yaml, so it is not a run's folder: choose another run name"
            )
        for folder in (run.path, run.checkpoints_path):
            folder.mkdir(parents=True, exist_ok=True)
        write_atomically(run.config_path, yaml.safe_dump(new, sort_keys=False).encode())
        starts = [*run.environments(), describe_environment()]
        write_atomically(run.environment_path, (json.dumps(starts, indent=2) + "\n").encode())
        return run

    @property
    def config_path(self) -> Path:
        return self.path / "config.yaml"

    @property
    def environment_path(self) -> Path:
        return self.path / "environment.json"

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def tensorboard_path(self) -> Path:
        return self.path / "tensorboard"

    @property
    def checkpoints_path(self) -> Path:
        return self.path / "checkpoints"

    @property
    def has_results(self) -> bool:
        """Whether anything was trained here yet."""
        metrics = self.metrics_path.exists() and self.metrics_path.stat().st_size > 0
        return metrics or (self.checkpoints_path.exists() and any(self.checkpoints_path.iterdir()))

    def config(self) -> dict[str, Any]:
        """The run's resolved configuration.

        Raises:
          RunFolderError: there is no run here, or its config.yaml cannot be read.
        """
        try:
            config = yaml.safe_load(self.config_path.read_text())
        except FileNotFoundError:
            raise RunFolderError(f"{self.path} is not a run's folder: it has no config.yaml") from None
        except yaml.YAMLError as error:
            raise RunFolderError(f"{self.config_path} is not valid YAML: {error}") from error
        if not isinstance(config, dict):
            raise RunFolderError(f"{self.config_path} does not hold a mapping")
        return config

    def environments(self) -> list[dict[str, Any]]:
        """What each start of the run ran on, oldest first."""
        return json.loads(self.environment_path.read_text()) if self.environment_path.exists() else []


def _not_left_by_a_kill(entry: Path) -> bool:
    """A start that was killed before it wrote config.yaml leaves only empty folders and a temporary file."""
    return any(entry.iterdir()) if entry.is_dir() else not entry.name.endswith(".tmp")


def _refuse_differences(run: RunFolder, old: dict, new: dict, may_change: Collection[str]) -> None:
    before, now = dict(_flatten(old)), dict(_flatten(new))
    differences = [
        f"{key}: {_show(before.get(key, _ABSENT))} in the run, {_show(now.get(key, _ABSENT))} now"
        for key in sorted(before.keys() | now.keys())
        if before.get(key, _ABSENT) != now.get(key, _ABSENT)
        and not any(key == allowed or key.startswith(f"{allowed}.") for allowed in may_change)
    ]
    if differences:
        more = f"; and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
        way_out = "or the values of the run to resume it"
        if not run.has_results:
            way_out = "or delete the folder: nothing was trained there yet, unless it has just been started"
        raise RunFolderError(
            f"run {run.path} was started with another configuration ({'; '.join(differences[:_SHOWN])}{more}). "
            f"Use another run name, {way_out}"
        )


def _flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _show(value: Any) -> str:
    return "absent" if value is _ABSENT else repr(value)
