"""Quantize to FP4 and back."""

from kernels_pallas.quantize.api import dequantize, operand, quantize, quantize_codes

__all__ = ["dequantize", "operand", "quantize", "quantize_codes"]
