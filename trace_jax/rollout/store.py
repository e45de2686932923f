"""Trajectories on disk: one self-describing file that a notebook or another process can open."""

import dataclasses
import io
import json
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from kernels_pallas.arrays import Fp4Array
from kernels_pallas.formats import get_format
from trace_jax.config import from_mapping
from trace_jax.guidance import (
    RECORD_VERSION,
    GuidanceRecord,
    GuidanceSpec,
    RecordError,
    SiteRecord,
    check_record,
    check_routes,
    check_site,
    resolve_layers,
)
from trace_jax.rollout.trajectories import Trajectories

_ARRAYS = ("tokens", "prompt_length", "length", "logprobs")
_RECORD = ("routes", "row_hash", "weight_version")
_SITE = ("row_exponent", "scales", "mantissa", "words")
_FP4 = ("words", "scales", "row_exponent")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Static:
    """What a file says about its arrays, as JSON; `audit` is the format by site."""

    format_version: int
    route_layers: tuple[int, ...] | None = None
    audit_rows: tuple[int, ...]
    audit_layers: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    sites: dict[str, Any]
    audit: dict[str, str] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _StaticSite:
    """One entry of `sites`."""

    site: str
    spec: GuidanceSpec


def save_trajectories(path: str | Path, trajectories: Trajectories) -> None:
    """Writes all arrays of a rollout and what is static about them; the file appears only when it is complete."""
    t, path = trajectories, Path(path)
    arrays = {name: getattr(t, name) for name in _ARRAYS}
    if t.observed is not None:
        arrays["observed"] = t.observed
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
        "route_layers": t.record.route_layers,
        "audit_rows": t.audit_rows,
        "audit_layers": dict(t.audit_layers),
        "sites": sites,
        "audit": audit if t.audit is not None else None,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "wb") as file:
        np.savez_compressed(file, static=np.asarray(json.dumps(static)), **arrays)
    temporary.replace(path)


def load_trajectories(path: str | Path) -> Trajectories:
    """Reads what `save_trajectories` wrote, and checks that its parts belong together.

    Raises:
        OSError: the file cannot be opened.
        RecordError: the file is damaged, was changed, is not of this kind, or has another format version.
    """
    with open(path, "rb") as file:
        try:
            return _rebuild(*_read(file))
        except ValueError as error:  # of which RecordError and ConfigError are kinds
            raise RecordError(
                f"{path} is damaged or was not written by this version of the code; sample it again, or open another "
                f"step. {error}"
            ) from error


def _read(file: BinaryIO) -> tuple[dict[str, np.ndarray], Any]:
    """All arrays of the file, and what its `static` says."""
    try:
        with zipfile.ZipFile(file) as members:
            # Whole members, not `np.load`: a damaged header that asks for fewer bytes would escape their checksum.
            arrays = {
                name.removesuffix(".npy"): np.lib.format.read_array(
                    io.BytesIO(members.read(name)), allow_pickle=False
                )
                for name in members.namelist()
            }
        return arrays, json.loads(str(arrays.pop("static")))
    # Three parsers (zip, npy, JSON) of bytes that may be anything: whatever they raise, the file is the reason.
    except Exception as error:
        raise RecordError(f"{type(error).__name__}: {error}") from error


def _rebuild(arrays: dict[str, np.ndarray], static: Any) -> Trajectories:
    """The trajectories of these arrays, after checks against each other. Takes the arrays out of the dictionary.

    Raises:
        ValueError: names what is missing, unknown, or does not fit the rest.
    """
    # Before anything else of it is read: another version may have other keys.
    version = static.get("format_version") if isinstance(static, dict) else None
    if version != RECORD_VERSION:
        raise RecordError(f"record format version {version}, this code reads {RECORD_VERSION}.")
    static = from_mapping(_Static, static, prefix="static")
    entries = {
        name: from_mapping(_StaticSite, entry, prefix=f"static.sites.{name}")
        for name, entry in static.sites.items()
    }
    specs = {entry.spec for entry in entries.values()}
    if len(specs) > 1 or any(set(spec.sites) != set(entries) for spec in specs):
        raise RecordError(
            f"sites {sorted(entries)} were recorded under {specs}; expected one spec of these sites."
        )

    def part(prefix, fields):
        return {f: arrays.pop(f"{prefix}/{f}", None) for f in fields}

    sites = {
        name: SiteRecord(**part(f"sites/{name}", _SITE), site=entry.site, spec=entry.spec)
        for name, entry in entries.items()
    }
    audit = None
    if static.audit is not None:
        audit = {
            name: Fp4Array(**part(f"audit/{name}", _FP4), format=get_format(format))
            for name, format in static.audit.items()
        }
    trajectories = Trajectories(
        **{name: arrays.pop(name, None) for name in (*_ARRAYS, "observed")},
        record=GuidanceRecord(sites=sites, route_layers=static.route_layers, **part("record", _RECORD)),
        audit=audit,
        audit_rows=static.audit_rows,
        audit_layers=tuple((site, tuple(layers)) for site, layers in static.audit_layers.items()),
    )
    if arrays:
        raise RecordError(f"unknown arrays {sorted(arrays)}.")
    _check(trajectories)
    return trajectories


def _check(t: Trajectories) -> None:
    """RecordError unless all parts are there and fit together.

    Against itself only: the model and the weights are unknown here, `rl.make_batch` compares those.
    """
    record = t.record
    if np.ndim(t.tokens) != 2 or np.ndim(record.routes) != 4:
        raise RecordError(
            f"tokens are {_found(t.tokens)} and routes {_found(record.routes)}; expected [N, S] and [L, N, S, k]."
        )
    (n, s), (layers, *_, k) = t.tokens.shape, record.routes.shape
    for name, value, dtype, shape in (
        ("tokens", t.tokens, np.int32, (n, s)),
        ("prompt_length", t.prompt_length, np.int32, (n,)),
        ("length", t.length, np.int32, (n,)),
        ("logprobs", t.logprobs, np.float32, (n, s)),
        ("record/row_hash", record.row_hash, np.uint32, (n, s)),
        ("record/weight_version", record.weight_version, np.int32, (n, s)),
    ):
        if value is None or value.dtype != dtype or value.shape != shape:
            raise RecordError(f"{name} is {_found(value)}, expected {np.dtype(dtype)}{list(shape)}.")
    if not ((t.prompt_length >= 0) & (t.prompt_length <= t.length) & (t.length <= s)).all():
        raise RecordError(f"prompt_length and length are not ordered within the {s} positions.")
    if t.observed is not None and (t.observed.dtype != bool or t.observed.shape != (n, s)):
        raise RecordError(f"observed is {_found(t.observed)}, expected bool{[n, s]}.")
    if not set(t.audit_rows) <= set(range(n)):
        raise RecordError(f"audit_rows {list(t.audit_rows)} lie outside the {n} sequences.")

    routed = record.route_layers
    if routed is not None:
        if len(routed) != layers or list(routed) != sorted(set(routed)):
            raise RecordError(
                f"routes are those of {layers} layers, but said to be of layers {list(routed)}."
            )
        # The depth of the model, which layers without experts do not show: as far as anything here is of a layer.
        audited = (layer for _, of_site in t.audit_layers for layer in of_site)
        lengths = (codes.words.shape[0] - 1 for codes in (t.audit or {}).values())
        recorded = (layer for site in record.sites.values() for layer in site.spec.layers if not routed)
        layers = max((*routed, *audited, *lengths, *recorded, -1)) + 1
    check_routes(
        record.routes, num_layers=record.routes.shape[0], num_experts=np.iinfo(np.int64).max, k=k, fed=t.fed
    )
    for name, of_site in t.audit_layers:
        if name not in (t.audit or {}) or list(of_site) != sorted(set(of_site)):
            raise RecordError(
                f"audit_layers of {name!r} are {list(of_site)}; expected increasing layers of an audited site."
            )
    row_shapes = {name: site.row_shape for name, site in record.sites.items()}
    for name, codes in (t.audit or {}).items():
        # An audit sample is a full record of all layers that have the site.
        audited = dict(t.audit_layers).get(name, tuple(range(layers)))
        spec = GuidanceSpec(format=codes.format.name, mode="full", layers=audited, sites=(f"audit/{name}",))
        full = SiteRecord(**{f: getattr(codes, f) for f in _FP4}, site=f"audit/{name}", spec=spec)
        row_shapes[name] = full.row_shape
        check_site(full.site, full, spec, full.row_shape, (len(t.audit_rows), s))
    spec = next((site.spec for site in record.sites.values()), None)
    if spec is not None:
        resolve_layers(spec.layers, layers)
    check_record(
        record,
        spec=spec,
        row_shapes=row_shapes,
        tokens=t.tokens,
        fed=t.fed,
        weight_version=record.weight_version,
    )


def _found(value: np.ndarray | None) -> str:
    return "missing" if value is None else f"{value.dtype}{list(value.shape)}"
