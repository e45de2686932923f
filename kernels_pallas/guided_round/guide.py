"""What a rollout left behind for the trainer's rounding of one tensor."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from kernels_pallas.arrays import check_block, check_leaf, pytree_dataclass, resize_axis
from kernels_pallas.formats import Fp4Format

MODES = ("scale", "mantissa", "full")


@pytree_dataclass(static=("mode", "compact"))
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Guide:
    """The rollout's scales and, by mode, its low bits or whole codes.

    Laid out like the tensor it guides (grouped axis K last for activations, second to last for weights).

    Attributes:
      scales: uint8 [..., K / block] scale bytes; their two low bits [..., ceil(K / block / 4)] when
        `compact`.
      row_exponent: uint8 per row.
      mantissa: uint8 [..., K / 8] low bits of the codes (bit i of a byte: value i), or None. Mode "mantissa".
      words: uint32 [..., K / 8] packed codes, or None. Mode "full".
      valid: bool per row, the shape of `row_exponent`; rows without a record are False.
      mode: static, "scale", "mantissa" or "full".
      compact: static, whether `scales` holds two bits per block.
    """

    scales: Any
    row_exponent: Any
    mantissa: Any = None
    words: Any = None
    valid: Any
    mode: str
    compact: bool = False

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"unknown guidance mode {self.mode!r}; expected one of {MODES}")
        for mode, name in (("mantissa", "mantissa"), ("full", "words")):
            if self.mode == mode and getattr(self, name) is None:
                raise ValueError(
                    f"guidance mode {mode!r} needs `{name}`, which is None; record it, or use 'scale'"
                )

    def check(self, shape: tuple[int, ...], format: Fp4Format, axis: int, row_axes: tuple[int, ...]) -> None:
        """Raise TypeError or ValueError if the record does not fit a tensor of `shape`."""
        size = shape[axis]
        check_block(size, axis, format)
        count = size // format.block
        scales = resize_axis(shape, axis, -(-count // 4) if self.compact else count)
        rows = tuple(n for i, n in enumerate(shape) if i - len(shape) not in row_axes)
        check_leaf("guide.scales", self.scales, jnp.uint8, scales)
        check_leaf("guide.row_exponent", self.row_exponent, jnp.uint8, rows)
        check_leaf("guide.valid", self.valid, jnp.bool_, rows)
        if self.mode == "mantissa":
            check_leaf("guide.mantissa", self.mantissa, jnp.uint8, resize_axis(shape, axis, size // 8))
        if self.mode == "full":
            check_leaf("guide.words", self.words, jnp.uint32, resize_axis(shape, axis, size // 8))
