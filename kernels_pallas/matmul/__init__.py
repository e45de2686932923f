"""Matmul of BF16 and FP4 operands."""

from kernels_pallas.matmul.api import matmul

__all__ = ["matmul"]
