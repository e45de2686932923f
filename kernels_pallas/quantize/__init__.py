"""Quantize to FP4 and back."""

from kernels_pallas.quantize.api import (
    SCALE_RULES,
    dequantize,
    operand,
    quantize,
    quantize_codes,
    quantize_recorded,
    rms_norm_quantize,
)

__all__ = [
    "SCALE_RULES",
    "dequantize",
    "operand",
    "quantize",
    "quantize_codes",
    "quantize_recorded",
    "rms_norm_quantize",
]
