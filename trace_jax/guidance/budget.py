"""What a record costs, measured from its arrays."""

import dataclasses
import math

import jax

from trace_jax.guidance.record import GuidanceRecord, SiteRecord


@dataclasses.dataclass(frozen=True, kw_only=True)
class SiteBudget:
    """`bits_per_value` counts codes and scales; `row_bytes` the one byte of each row; both per recorded value / row."""

    values: int
    rows: int
    bits_per_value: float
    row_bytes: float
    total_bytes: int


def site_budget(record: SiteRecord, width: int) -> SiteBudget:
    """Budget of one site; `width` is the number of values in a row (the contraction)."""
    rows = math.prod(record.row_exponent.shape)
    payload = sum(leaf.nbytes for leaf in (record.mantissa, record.words, record.scales) if leaf is not None)
    return SiteBudget(
        values=rows * width,
        rows=rows,
        bits_per_value=8 * payload / (rows * width),
        row_bytes=record.row_exponent.nbytes / rows,
        total_bytes=payload + record.row_exponent.nbytes,
    )


def bytes_per_token(record: GuidanceRecord) -> float:
    """Bytes of all sites per (sequence, position): what guidance adds to a token."""
    tokens = math.prod(record.row_hash.shape)
    return sum(leaf.nbytes for leaf in jax.tree.leaves(record.sites)) / tokens


def route_bytes_per_token(record: GuidanceRecord) -> float:
    return record.routes.nbytes / math.prod(record.row_hash.shape)
