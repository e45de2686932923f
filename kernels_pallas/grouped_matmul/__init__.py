"""Matmul of rows grouped by expert with that expert's weights."""

from kernels_pallas.grouped_matmul.api import grouped_matmul

__all__ = ["grouped_matmul"]
