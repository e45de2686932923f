"""Matmul of rows grouped by expert with that expert's weights."""

from kernels_pallas.grouped_matmul.api import arranged, grouped_matmul

__all__ = ["arranged", "grouped_matmul"]
