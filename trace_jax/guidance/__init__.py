"""Guidance records: what to record, how it is captured, checked, counted and watched."""

from trace_jax.guidance.alarm import HealthAlarm
from trace_jax.guidance.capture import capture_site, mantissa_bits, poisoned_rows, take_rows
from trace_jax.guidance.record import (
    GuidanceRecord,
    RecordError,
    SiteRecord,
    by_site,
    check_record,
    check_routes,
    check_site,
    row_hash,
)
from trace_jax.guidance.rows import LayerRows, PackedRows, is_backed, pack_layer, pack_rows, unpack_rows
from trace_jax.guidance.spec import LAYER_SETS, MODES, RECORD_VERSION, GuidanceSpec, resolve_layers

__all__ = [
    "LAYER_SETS",
    "MODES",
    "RECORD_VERSION",
    "GuidanceRecord",
    "GuidanceSpec",
    "HealthAlarm",
    "LayerRows",
    "PackedRows",
    "RecordError",
    "SiteRecord",
    "by_site",
    "capture_site",
    "check_record",
    "check_routes",
    "check_site",
    "is_backed",
    "mantissa_bits",
    "pack_layer",
    "pack_rows",
    "poisoned_rows",
    "resolve_layers",
    "row_hash",
    "take_rows",
    "unpack_rows",
]
