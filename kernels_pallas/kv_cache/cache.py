"""The KV cache as a pytree."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, UInt8

from kernels_pallas import formats
from kernels_pallas.arrays import Fp4Array, check_block, pytree_dataclass
from kernels_pallas.formats import Fp4Format

AppendedRows = tuple[Fp4Array, UInt8[Array, "b t h d8"]]
"""Keys or values as they were quantized, and the low bits of their codes: what `quantize_recorded` gives."""


@pytree_dataclass()
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class KVCache:
    """Keys and values of one layer, [B, S, H, Dh], or of stacked layers, [L, B, S, H, Dh].

    A paged cache has pages in the place of sequences, [P, page_size, H, Dh]; `init_cache` makes one of P "sequences".

    Attributes:
      k, v: Fp4Array along the head dimension (one row per token and head), or bfloat16 arrays.
    """

    k: Any
    v: Any

    @property
    def format(self) -> Fp4Format | None:
        """Format of the entries; None for bfloat16."""
        return self.k.format if isinstance(self.k, Fp4Array) else None

    @property
    def length(self) -> int:
        """Entries per sequence, S; per page if the cache is paged."""
        return self.k.shape[-3]


def empty_entries(
    shape: tuple[int, ...], width: int, format: Fp4Format | None, dtype: DTypeLike
) -> Fp4Array | Array:
    """Zeros [*shape, width]: rows in `format`, or with None unquantized, in `dtype`.

    ValueError if `width` is no whole number of blocks.
    """
    if format is None:
        return jnp.zeros((*shape, width), dtype)
    check_block(width, -1, format)
    return Fp4Array(
        words=jnp.zeros((*shape, width // 8), jnp.uint32),
        scales=jnp.zeros((*shape, width // format.block), jnp.uint8),
        row_exponent=jnp.full(shape, formats.ROW_EXPONENT_BIAS, jnp.uint8),
        format=format,
    )


def init_cache(
    batch: int,
    length: int,
    kv_heads: int,
    head_dim: int,
    format: Fp4Format | None,
    *,
    layers: int | None = None,
    dtype: jnp.dtype = jnp.bfloat16,
) -> KVCache:
    """A cache of zeros for `length` entries per sequence; `layers` adds an axis.

    With `format` None the entries are unquantized, in `dtype`, the compute dtype of the model.

    ValueError if `head_dim` is no whole number of blocks.
    """
    shape = (batch, length, kv_heads) if layers is None else (layers, batch, length, kv_heads)

    # Two arrays, not one twice: buffers are donated.
    return KVCache(
        k=empty_entries(shape, head_dim, format, dtype), v=empty_entries(shape, head_dim, format, dtype)
    )
