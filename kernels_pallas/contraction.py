"""The inner product of Pallas TPU GEMM kernels: a weight tile, BF16 or FP4, in chunks along K.

K is walked in an order and in chunks that depend on K alone, each a BF16 product accumulated in FP32: what a row gives
does not depend on the rows beside it or on how many there are.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, BFloat16, Float

from kernels_pallas import tiles
from kernels_pallas.arrays import Fp4Array
from kernels_pallas.formats import Fp4Format

CHUNK, SMALL_CHUNK = 512, 256
STEP_CHUNKS = 8  # chunks in VMEM at a time
COLUMNS = 512


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contraction:
    """How a kernel walks K.

    Attributes:
      size: K.
      format: of the weights; None for BF16.
      generation: of the TPU.
    """

    size: int
    format: Fp4Format | None
    generation: int

    @property
    def chunk(self) -> int:
        """Values along K that are multiplied at a time."""
        if self.size % SMALL_CHUNK == 0:
            return CHUNK if self.size % CHUNK == 0 else SMALL_CHUNK
        return CHUNK if self.size > CHUNK else SMALL_CHUNK

    @property
    def chunks(self) -> int:
        return pl.cdiv(self.size, self.chunk)

    @property
    def step_chunks(self) -> int:
        """Chunks in a grid step."""
        return min(self.chunks, STEP_CHUNKS)

    @property
    def steps(self) -> int:
        """Grid steps along K."""
        return pl.cdiv(self.chunks, self.step_chunks)

    @property
    def unit(self) -> float:
        """What the accumulator must be multiplied by."""
        return 1.0 if self.format is None else tiles.unit(self.generation)

    def arranged(self, x: BFloat16[Array, "m k"]) -> BFloat16[Array, "chunks m chunk"]:
        """The left operand by chunks, zeros past K, in the order of the weights' rows."""
        x = jnp.pad(x, ((0, 0), (0, self.chunks * self.chunk - self.size)))
        if self.format is not None:
            x = tiles.permuted(x, self.generation)
        return x.reshape(x.shape[0], self.chunks, self.chunk).swapaxes(0, 1)

    def weights(self, w: Float[Array, "..."] | Fp4Array) -> list[tuple[Array, int]]:
        """The arrays of a weight, each with its rows in a grid step."""
        rows = self.step_chunks * self.chunk
        if isinstance(w, Fp4Array):
            return [(w.words, rows // 8), (w.scales, rows // w.format.block)]
        return [(w, rows)]

    def scratch(self, columns: int) -> list[Any]:
        """Scratch arrays that `accumulate` needs."""
        if self.format is None:
            return []
        shape = (self.step_chunks, columns // tiles.LANES, self.chunk // self.format.block, tiles.LANES)
        return [pltpu.VMEM(shape, jnp.uint32)]

    def accumulate(
        self,
        x_ref: Any,
        weight_refs: Sequence[Any],
        scratch: Sequence[Any],
        acc_ref: Any,
        step: Array,
    ) -> None:
        """Add a grid step's product to `acc_ref` [m, n]."""
        first = step * self.step_chunks
        whole = self.size % (self.step_chunks * self.chunk) == 0
        if self.format is not None:
            left = (
                None if whole else self.size // self.format.block - first * (self.chunk // self.format.block)
            )
            tiles.stage_scales(weight_refs[1][...], scratch[0], self.format, self.generation, left)

        def multiply(i, _):
            size = self.chunk if self.format is None else self.chunk // 8
            w = weight_refs[0][pl.ds(pl.multiple_of(i * size, size), size)]
            if self.format is not None:
                w = tiles.decoded(w, scratch[0].at[i], self.format, self.generation)
            elif not whole:  # rows past K hold anything, and meet zeros of x
                row = lax.broadcasted_iota(jnp.int32, w.shape, 0)
                w = jnp.where(row < self.size - (first + i) * self.chunk, w, jnp.bfloat16(0))
            acc_ref[...] += jnp.dot(x_ref[i], w, preferred_element_type=jnp.float32)

        last = self.step_chunks if self.steps == 1 else jnp.minimum(self.step_chunks, self.chunks - first)
        lax.fori_loop(0, last, multiply, None)
