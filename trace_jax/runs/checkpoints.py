"""Orbax checkpoints of a run: atomic, the last few kept, checked when they are read.

Orbax writes to a temporary folder and renames it, so a run killed while it saves still has its checkpoints of
before. What Orbax does not notice is a file that changed afterwards: a flipped bit in array data is read as data.
So every checkpoint holds checksums of its files, compared before anything is restored.
"""

import dataclasses
import json
import logging
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from orbax.checkpoint import v1 as ocp

from trace_jax.runs.files import write_atomically

CHECKSUMS = "checksums.json"
_STATE, _EXTRA = "state", "extra"
_SHOWN = 8
_log = logging.getLogger(__name__)


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or restored; the message names the path, the cause and what is left."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored:
    """A restored checkpoint: `state` in the template's structure and shardings, `extra` as it was saved."""

    step: int
    state: Any
    extra: dict[str, Any]


class Checkpoints:
    """The checkpoints in one folder, `<folder>/<step>/`.

    Any number of readers may look at the folder while its one writer saves. In a run of several processes all of
    them call `save` and `restore`.

    Args:
      folder: of the checkpoints; created at the first save.
      keep: how many of the latest to keep.
    """

    def __init__(self, folder: str | Path, *, keep: int = 3):
        if keep < 1:
            raise ValueError(f"keep is {keep}; expected at least 1 checkpoint")
        self.folder = Path(folder).absolute()
        self.keep = keep
        self._writer: ocp.training.Checkpointer | None = None

    def all_steps(self) -> list[int]:
        """Steps with a complete checkpoint, ascending. Folders of unfinished saves have other names."""
        if not self.folder.is_dir():
            return []
        return sorted(int(entry.name) for entry in self.folder.iterdir() if entry.name.isdigit())

    def latest_step(self) -> int | None:
        return max(self.all_steps(), default=None)

    def save(self, step: int, state: Any, extra: Mapping[str, Any]) -> None:
        """Writes a checkpoint and returns when it is complete; an existing one of this step is replaced.

        Args:
          step: of the run, at least 0.
          state: a pytree of JAX arrays (typed PRNG keys included) and numpy arrays.
          extra: a JSON-able dict for everything else.

        Raises:
          CheckpointError: a leaf that is not an array, or an `extra` that JSON cannot hold.
        """
        state = jax.tree_util.tree_map_with_path(_check_leaf, state)
        try:
            extra = json.loads(json.dumps(dict(extra)))
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"the extra data of step {step} cannot be stored as JSON: {error}"
            ) from error
        if self._writer is None:
            self._writer = ocp.training.Checkpointer(
                self.folder,
                context=_context(),
                preservation_policy=ocp.training.preservation_policies.LatestN(self.keep),
                # Unfinished saves of a run that was killed. Only the writer may remove them.
                cleanup_tmp_directories=True,
            )
        self._writer.save_checkpointables(step, {_STATE: state, _EXTRA: extra}, force=True, overwrite=True)
        if jax.process_index() == 0:
            _write_checksums(self.folder / str(step))

    def restore(self, template: Any, step: int | None = None, *, partial: bool = False) -> Restored | None:
        """Restores a checkpoint, or returns None if the folder has none.

        Args:
          template: a pytree of the saved structure: arrays, or jax.ShapeDtypeStruct with the sharding to restore
            to. Numpy leaves come back as numpy.
          step: which one; the latest by default.
          partial: the template may leave out parts of the saved state, which are then not read.

        Raises:
          CheckpointError: no such step, files that are missing or changed, or a template that does not fit. It
            never falls back to an older checkpoint by itself, since that would silently undo part of the run.
        """
        steps = self.all_steps()
        if step is None:
            if not steps:
                return None
            step = steps[-1]
        if step not in steps:
            raise CheckpointError(f"{self.folder} has no checkpoint of step {step}; it has {_list(steps)}")
        path = self.folder / str(step)
        if damage := _find_damage(path):
            raise CheckpointError(self._unusable(step, damage))
        template = jax.tree_util.tree_map_with_path(_abstract_leaf, template)
        with _context(partial):
            try:
                saved = ocp.checkpointables_metadata(path).metadata[_STATE]
            except Exception as error:  # Orbax raises many kinds for unreadable files
                raise CheckpointError(
                    self._unusable(step, f"its metadata cannot be read ({error})")
                ) from error
            if saved is None:  # Orbax logs the reason
                raise CheckpointError(self._unusable(step, "Orbax cannot read the metadata of its arrays"))
            if misfit := _compare(template, saved, partial):
                raise CheckpointError(
                    f"checkpoint {path} does not fit the state to restore (is it of another model or optimiser?): "
                    f"{misfit}"
                )
            try:
                loaded = ocp.load_checkpointables(path, {_STATE: template, _EXTRA: None})
            except Exception as error:
                raise CheckpointError(
                    self._unusable(step, f"Orbax cannot read it ({_root(error)})")
                ) from error
        return Restored(step=step, state=loaded[_STATE], extra=loaded[_EXTRA])

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _unusable(self, step: int, cause: str) -> str:
        others = [other for other in self.all_steps() if other != step]
        good = [other for other in others if not _find_damage(self.folder / str(other))]
        path = self.folder / str(step)
        message = f"checkpoint {path} cannot be restored: {cause}. Intact checkpoints: {_list(good)}."
        if good:
            message += f" To go on from step {good[-1]}, delete the folders of later steps."
        return message


def _context(partial: bool = False) -> ocp.Context:
    # Orbax would store a dict of numbers as arrays; by this name it stays a JSON file.
    registry = ocp.handlers.local_registry().add(ocp.handlers.JsonHandler, checkpointable_name=_EXTRA)
    context = ocp.Context()
    context.checkpointables.registry = registry
    context.pytree.loading.partial_load = partial
    return context


def _check_leaf(path: tuple, leaf: Any) -> Any:
    if isinstance(leaf, np.generic):
        return np.asarray(leaf)
    if isinstance(leaf, jax.Array | np.ndarray):
        return leaf
    raise CheckpointError(
        f"state{jax.tree_util.keystr(path)} is {leaf!r} ({type(leaf).__name__}); expected an array: other values "
        "belong to the extra data"
    )


def _abstract_leaf(path: tuple, leaf: Any) -> Any:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        if isinstance(getattr(leaf.sharding, "mesh", None), jax.sharding.AbstractMesh):
            raise CheckpointError(
                f"the template's state{jax.tree_util.keystr(path)} is sharded over a mesh without devices: give it "
                "a sharding on the devices to restore to"
            )
        return leaf
    leaf = _check_leaf(path, leaf)
    if isinstance(leaf, np.ndarray):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


# --- does the template fit? Orbax would cast another dtype silently, and report a shape with the whole state ------


def _compare(template: Any, saved: Any, partial: bool) -> str:
    wanted = {_name(path): _array_type(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(template)}
    found = {_name(path): _saved_type(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(saved)}
    problems = [
        f"{name} is {found.get(name, 'absent')} in the checkpoint, {wanted.get(name, 'absent')} in the state"
        for name in sorted(wanted if partial else wanted.keys() | found.keys())
        if wanted.get(name) != found.get(name)
    ]
    more = f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
    return "; ".join(problems[:_SHOWN]) + more


def _name(path: tuple) -> str:
    """A path without the difference between attributes and keys: the checkpoint's tree has only dicts and lists."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _array_type(leaf: Any) -> str:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.eval_shape(jax.random.key_data, leaf)
    return f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"


def _saved_type(leaf: Any) -> str:
    return f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}" if hasattr(leaf, "shape") else type(leaf).__name__


# --- checksums ---------------------------------------------------------------------------------------------------


def _write_checksums(path: Path) -> None:
    entries = {str(file.relative_to(path)): [file.stat().st_size, _crc32(file)] for file in _files(path)}
    write_atomically(path / CHECKSUMS, json.dumps(entries, indent=1, sort_keys=True).encode())


def _find_damage(path: Path) -> str | None:
    """The first file of a checkpoint that is not as it was written, or None."""
    try:
        entries = json.loads((path / CHECKSUMS).read_text())
        entries = {name: (int(size), int(crc)) for name, (size, crc) in entries.items()}
    except FileNotFoundError:
        # Killed between Orbax's rename, which makes the checkpoint complete, and the checksums.
        _log.warning("checkpoint %s has no %s: its files are not verified", path, CHECKSUMS)
        return None
    except (ValueError, TypeError, AttributeError) as error:
        return f"{CHECKSUMS} cannot be read ({error})"
    for name, (size, crc) in entries.items():
        file = path / name
        if not file.is_file():
            return f"file {name} is missing"
        if file.stat().st_size != size:
            return f"file {name} has {file.stat().st_size} bytes, {size} were written"
        if _crc32(file) != crc:
            return f"file {name} has changed since it was written (checksum)"
    return None


def _files(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file() and file.name != CHECKSUMS)


def _crc32(file: Path) -> int:
    crc = 0
    with open(file, "rb") as stream:
        while chunk := stream.read(1 << 22):
            crc = zlib.crc32(chunk, crc)
    return crc


def _root(error: BaseException) -> str:
    """Orbax's own message repeats the whole state; the cause underneath says what happened."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return f"{type(error).__name__}: {str(error)[:300]}"


def _list(steps: list[int]) -> str:
    return ", ".join(map(str, steps)) if steps else "none"
