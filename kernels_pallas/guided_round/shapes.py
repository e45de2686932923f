"""Realistic shapes, by name, for benchmarks and tests: what is guided is what is quantized."""

from kernels_pallas.quantize.shapes import SHAPES as QUANTIZE_SHAPES

SHAPES = {name: shape for name, shape in QUANTIZE_SHAPES.items() if not name.endswith("_decode")}
