"""`quantize` and `operand` as programs: called outside one, each of their many operations is compiled by itself."""

import jax

from kernels_pallas import quantize as op

quantize = jax.jit(
    op.quantize, static_argnames=("format", "axis", "row_axes", "scale_rule", "implementation")
)
operand = jax.jit(op.operand)
