"""Guidance records: what the rollout's FP4 rounding did, row by row, and the checks that keep it aligned.

A row is one fed token (times KV head for keys and values, times route slot for down-projection inputs). Arrays lead
with [recorded layer, sequence, position].
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt32

from kernels_pallas.formats import get_format
from kernels_pallas.guided_round import Guide
from trace_jax.guidance.spec import RECORD_VERSION, GuidanceSpec


class RecordError(ValueError):
    """A record does not belong to the tokens, sites, layers or weights it is used with."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SiteRecord:
    """One site's record.

    Invariants:
        * `row_exponent` uint8 `[L, B, S, ...]` is the one byte a row: the biased exponent of the row scale (127 for
          MXFP4, which has none), and 0 where there is no record (row never fed, or poisoned in compact scales).
        * `scales` uint8 `[L, B, S, ..., K/block]`, or `[..., K/block/4]` with two bits a scale when compact.
        * `mantissa` uint8 `[L, B, S, ..., K/8]`, value i in bit i, in mode `mantissa`; else None.
        * `words` uint32 `[L, B, S, ..., K/8]`, value i in nibble i, in mode `full`; else None.
        * `site` and `spec` are keys: they travel with the arrays and are compared before use.
    """

    row_exponent: Any
    scales: Any
    mantissa: Any = None
    words: Any = None
    site: str = dataclasses.field(metadata={"static": True})
    spec: GuidanceSpec = dataclasses.field(metadata={"static": True})

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of one row by these arrays' own account, `(..., width)`, for `check_site` where no model is at hand.

        The width is a whole number of blocks, 0 for an array that is missing. Compact scales without codes do not say
        how many of their last four blocks are padding: all count.
        """
        block = get_format(self.spec.format).block
        array, values = {
            "scale": (self.scales, 4 * block if self.spec.compact_scales else block),
            "mantissa": (self.mantissa, 8),
            "full": (self.words, 8),
        }[self.spec.mode]
        width = (0, *np.shape(array))[-1] * values
        return (*np.shape(self.row_exponent)[3:], width // block * block)

    def guide(self) -> Guide:
        """The kernels' view of the record."""
        valid = self.row_exponent != 0
        return Guide(
            scales=self.scales,
            row_exponent=self.row_exponent,
            mantissa=self.mantissa,
            words=self.words,
            valid=valid,
            mode=self.spec.mode,
            compact=self.spec.compact_scales,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class GuidanceRecord:
    """Records of all guided sites and the keys that prove where they belong.

    Invariants:
        * `routes` `[M, B, S, k]`, expert ids of every MoE layer, the dtype's largest value where there is none.
        * `route_layers`: which layers of the model these are; None where they are all.
        * `row_hash` uint32 `[B, S]` = hash of (token, position) of the row that was fed, 0 where none was.
        * `weight_version` int32 `[B, S]`, the weights that computed the row, -1 where none was.
        * `format_version` is `RECORD_VERSION` of the writer.
    """

    sites: dict[str, SiteRecord]
    routes: Any
    row_hash: Any
    weight_version: Any
    route_layers: tuple[int, ...] | None = dataclasses.field(default=None, metadata={"static": True})
    format_version: int = dataclasses.field(default=RECORD_VERSION, metadata={"static": True})


def by_site(groups: dict[str, dict[str, SiteRecord]] | None) -> dict[str, SiteRecord]:
    """The records by site, of records by the groups of sites in which they left the layers."""
    return {site: record for group in (groups or {}).values() for site, record in group.items()}


def row_hash(
    tokens: Int[Array | np.ndarray, "*rows"], positions: Int[Array | np.ndarray, "*rows"]
) -> UInt32[Array | np.ndarray, "*rows"]:
    """32-bit hash of (token, position), never 0. Finalizer of MurmurHash3 (A. Appleby, public domain)."""
    xp = np if isinstance(tokens, np.ndarray) else jnp
    h = tokens.astype(xp.uint32) * xp.uint32(0x9E3779B1) ^ (
        positions.astype(xp.uint32) * xp.uint32(0x85EBCA77) + xp.uint32(1)
    )
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = (h ^ (h >> xp.uint32(shift))) * xp.uint32(factor)
    h = h ^ (h >> xp.uint32(16))
    return xp.where(h == 0, xp.uint32(1), h)


def check_record(
    record: GuidanceRecord,
    *,
    spec: GuidanceSpec | None,
    row_shapes: dict[str, tuple[int, ...]],
    tokens: np.ndarray,
    fed: np.ndarray,
    weight_version: np.ndarray,
) -> None:
    """Refuses a record that is not exactly the one these rows produced. Runs on the host, before the train step.

    Args:
        record: with host arrays.
        spec: what the trainer expects; None when it uses no guidance.
        row_shapes: per site the shape of one recorded row, e.g. `(G, d)` for keys.
        tokens: int32 `[B, S]`.
        fed: bool `[B, S]`, rows that went through the rollout's model.
        weight_version: int32 `[B, S]`, the version that produced each row by the trajectory's own account.

    Raises:
        RecordError: names what differs, where, and what to do.
    """
    if record.format_version != RECORD_VERSION:
        raise RecordError(
            f"record format version {record.format_version}, this code reads {RECORD_VERSION}; re-record with it."
        )
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    expected = np.where(fed, row_hash(tokens, positions), np.uint32(0))
    _same(
        "row hash (token, position)", np.asarray(record.row_hash), expected, "records are shifted or foreign"
    )
    versions = np.where(fed, weight_version, -1).astype(np.int32)
    _same("weight version", np.asarray(record.weight_version), versions, "records come from other weights")
    sites = tuple(spec.sites) if spec else ()
    if set(record.sites) != set(sites):
        raise RecordError(f"record has sites {sorted(record.sites)}, the trainer guides {sorted(sites)}.")
    for name in sites:
        check_site(name, record.sites[name], spec, row_shapes[name], tokens.shape)


def check_routes(routes: np.ndarray, *, num_layers: int, num_experts: int, k: int, fed: np.ndarray) -> None:
    """Refuses recorded routes that no router of this model can have chosen.

    Args:
        routes: unsigned `[L, B, S, k]`.
        num_layers, num_experts, k: MoE layers of the model, and their sizes.
        fed: bool `[B, S]`; exactly these rows have routes, the others the dtype's largest value.

    Raises:
        RecordError: names what differs.
    """
    shape = (num_layers, *fed.shape, k)
    if routes.shape != shape or routes.dtype.kind != "u":
        raise RecordError(
            f"routes are {routes.dtype}{list(routes.shape)}, expected unsigned integers {list(shape)}."
        )
    missing = routes == np.iinfo(routes.dtype).max
    if not np.array_equal(missing, np.broadcast_to(~fed[None, :, :, None], shape)):
        raise RecordError(
            "routes are there for rows that were not fed, or missing for rows that were; they are shifted."
        )
    known = routes[:, fed]
    if known.size and known.max() >= num_experts:
        raise RecordError(f"routes name expert {known.max()}, the model has {num_experts} experts.")
    if k > 1 and (np.diff(np.sort(known, axis=-1), axis=-1) == 0).any():
        raise RecordError("routes name one expert twice for a token; a router chooses distinct experts.")


def check_site(
    name: str,
    site: SiteRecord,
    spec: GuidanceSpec,
    row_shape: tuple[int, ...],
    batch_shape: tuple[int, ...],
) -> None:
    """Refuses a site's record that lacks an array, or has one of another shape or dtype than its spec says.

    Args:
        name: of the site.
        site: its record.
        spec: what it must have been taken under.
        row_shape: of one recorded row, e.g. `(G, d)` for keys.
        batch_shape: (sequences, positions).

    Raises:
        RecordError: names the array, what it is and what was expected.
    """
    if site.site != name:
        raise RecordError(
            f"the record under {name!r} was taken at {site.site!r}; sites must not be exchanged."
        )
    if site.spec != spec:
        raise RecordError(f"record of {name!r} was taken under {site.spec}, the trainer expects {spec}.")
    *lead, width = row_shape
    rows = (len(spec.layers_of(name)), *batch_shape, *lead)
    blocks = width // get_format(spec.format).block
    shapes = {
        "row_exponent": (rows, np.uint8),
        "mantissa": ((*rows, width // 8), np.uint8) if spec.mode == "mantissa" else None,
        "words": ((*rows, width // 8), np.uint32) if spec.mode == "full" else None,
        # After the codes: without them a `row_shape` of the record's own has no width, and they are what is missing.
        "scales": ((*rows, -(-blocks // 4) if spec.compact_scales else blocks), np.uint8),
    }
    for field, wanted in shapes.items():
        value = getattr(site, field)
        if wanted is None:
            if value is not None:
                raise RecordError(f"record {name}.{field} is present, but mode {spec.mode!r} has none.")
            continue
        if value is None or tuple(value.shape) != wanted[0] or value.dtype != wanted[1]:
            found = "missing" if value is None else f"{value.dtype}{list(value.shape)}"
            raise RecordError(
                f"record {name}.{field} is {found}, expected {np.dtype(wanted[1])}{list(wanted[0])} = "
                "[layer, sequence, position, ...]; the record was written for another model, batch or spec."
            )


def _same(what: str, found: np.ndarray, expected: np.ndarray, meaning: str) -> None:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        raise RecordError(
            f"{what} is {found.dtype}{list(found.shape)}, expected {expected.dtype}{list(expected.shape)}."
        )
    wrong = np.argwhere(found != expected)
    if wrong.size:
        b, s = wrong[0]
        raise RecordError(
            f"{what} differs in {len(wrong)} of {found.size} rows, first at sequence {b}, position {s}: record "
            f"{found[b, s]}, expected {expected[b, s]}; {meaning}. Refused."
        )
