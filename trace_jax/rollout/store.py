"""Trajectories on disk: one self-describing file that a notebook or another process can open."""

import dataclasses
import json
import zipfile
from pathlib import Path

import numpy as np

from kernels_pallas.arrays import Fp4Array
from kernels_pallas.formats import get_format
from trace_jax.guidance import RECORD_VERSION, GuidanceRecord, GuidanceSpec, RecordError, SiteRecord
from trace_jax.rollout.trajectories import Trajectories

_ARRAYS = ("tokens", "prompt_length", "length", "logprobs")
_RECORD = ("routes", "row_hash", "weight_version")
_SITE = ("row_exponent", "scales", "mantissa", "words")
_FP4 = ("words", "scales", "row_exponent")


def save_trajectories(path: str | Path, trajectories: Trajectories) -> None:
    """Writes all arrays of a rollout and what is static about them; the file appears only when it is complete."""
    t, path = trajectories, Path(path)
    arrays = {name: getattr(t, name) for name in _ARRAYS}
    arrays |= {f"record/{name}": getattr(t.record, name) for name in _RECORD}
    sites, audit = {}, {}
    for name, site in t.record.sites.items():
        sites[name] = {"site": site.site, "spec": dataclasses.asdict(site.spec)}
        arrays |= {f"sites/{name}/{f}": getattr(site, f) for f in _SITE if getattr(site, f) is not None}
    for name, codes in (t.audit or {}).items():
        audit[name] = codes.format.name
        arrays |= {f"audit/{name}/{f}": getattr(codes, f) for f in _FP4}
    static = {
        "format_version": t.record.format_version,
        "audit_rows": t.audit_rows,
        "sites": sites,
        "audit": audit if t.audit is not None else None,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "wb") as file:
        np.savez_compressed(file, static=np.asarray(json.dumps(static)), **arrays)
    temporary.replace(path)


def load_trajectories(path: str | Path) -> Trajectories:
    """Reads what `save_trajectories` wrote.

    Raises:
        RecordError: the file is truncated, is not of this kind, or has another format version.
    """
    try:
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files}
        static = json.loads(str(arrays.pop("static")))
    except (zipfile.BadZipFile, EOFError, KeyError, ValueError, OSError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise RecordError(
            f"{path} is damaged or holds no trajectories ({type(error).__name__}: {error}); record it again."
        ) from error
    if static["format_version"] != RECORD_VERSION:
        raise RecordError(
            f"{path} has record format version {static['format_version']}, this code reads {RECORD_VERSION}."
        )

    def part(prefix, fields):
        return {f: arrays.get(f"{prefix}/{f}") for f in fields}

    sites = {}
    for name, entry in static["sites"].items():
        spec = entry["spec"] | {k: tuple(entry["spec"][k]) for k in ("layers", "sites")}
        sites[name] = SiteRecord(
            **part(f"sites/{name}", _SITE), site=entry["site"], spec=GuidanceSpec(**spec)
        )
    audit = static["audit"]
    if audit is not None:
        audit = {
            name: Fp4Array(**part(f"audit/{name}", _FP4), format=get_format(f)) for name, f in audit.items()
        }
    return Trajectories(
        **{name: arrays[name] for name in _ARRAYS},
        record=GuidanceRecord(sites=sites, **part("record", _RECORD)),
        audit=audit,
        audit_rows=tuple(static["audit_rows"]),
    )
