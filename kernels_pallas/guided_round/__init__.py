"""Round the trainer's values under a record of the rollout's rounding."""

from kernels_pallas.guided_round.api import (
    compact_scales,
    expand_compact_scales,
    guided_round,
    guided_values,
    own_scale_bytes,
    usable_rows,
)
from kernels_pallas.guided_round.guide import MODES, Guide

__all__ = [
    "MODES",
    "Guide",
    "compact_scales",
    "expand_compact_scales",
    "guided_round",
    "guided_values",
    "own_scale_bytes",
    "usable_rows",
]
