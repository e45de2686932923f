"""The cache of latent attention: one FP4 row per token for all heads, and the one key that carries its position."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32, UInt8

from kernels_pallas.arrays import Fp4Array, pytree_dataclass
from kernels_pallas.formats import Fp4Format
from kernels_pallas.kv_cache.cache import empty_entries
from kernels_pallas.kv_cache.pages import entry_index, write
from kernels_pallas.quantize import quantize_recorded


@pytree_dataclass()
@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class LatentCache:
    """Latents and RoPE keys of one layer, [B, S, R] and [B, S, Dr], or of stacked layers, [L, B, S, ...].

    Keys and values of all heads are linear in the latent, so it is what is quantized; the RoPE key is a few values per
    token, whose phase rounding would blur, and stays in the compute dtype.

    Attributes:
      latent: Fp4Array along R (one row per token), or an array.
      rope_key: array, after RoPE.
    """

    latent: Any
    rope_key: Any

    @property
    def format(self) -> Fp4Format | None:
        """Format of the latents; None if they are not quantized."""
        return self.latent.format if isinstance(self.latent, Fp4Array) else None

    @property
    def length(self) -> int:
        """Entries per sequence, S."""
        return self.rope_key.shape[-2]


def init_latent_cache(
    batch: int,
    length: int,
    latent_rank: int,
    rope_dim: int,
    format: Fp4Format | None,
    *,
    layers: int | None = None,
    dtype: jnp.dtype = jnp.bfloat16,
) -> LatentCache:
    """A cache of zeros for `length` entries per sequence; `layers` adds an axis.

    RoPE keys, and latents with `format` None, are in `dtype`, the compute dtype of the model.

    ValueError if `latent_rank` is no whole number of blocks.
    """
    shape = (batch, length) if layers is None else (layers, batch, length)
    return LatentCache(
        latent=empty_entries(shape, latent_rank, format, dtype),
        rope_key=empty_entries(shape, rope_dim, None, dtype),
    )


def append_latent(
    cache: LatentCache,
    latent: Float[Array, "b t r"],
    rope_key: Float[Array, "b t dr"],
    positions: Int32[Array, "b t"],
    valid: Bool[Array, "b t"],
    *,
    layer: Int32[Array, ""] | None = None,
    page_table: Int32[Array, "b pages"] | None = None,
) -> tuple[LatentCache, tuple[Fp4Array, UInt8[Array, "b t r8"]] | None]:
    """Quantize new latents and write them, and their RoPE keys, at their positions.

    Args:
      cache: of one layer, or with `layer` stacked over layers, of which only that one is written.
      latent: after its norm. Each token is one row.
      rope_key: after RoPE.
      positions: the entry that each token is written to.
      valid: tokens that are not valid, or whose position lies outside the cache or in an unmapped page, are not
        written.
      page_table: as in `append`; the cache then is [P, page_size, ...].

    Returns:
      The cache, and for the guidance record the quantized rows as Fp4Array [B, T, R] with the low bits of their codes
      [B, T, R / 8], as `quantize_recorded` gives them (None if the cache is not FP4).

    Raises:
      ValueError for shapes that do not fit the cache.
    """
    sequences = latent.shape[0] if page_table is None else cache.rope_key.shape[-3]
    expected = (*(() if layer is None else cache.rope_key.shape[:1]), sequences, cache.length)
    if cache.rope_key.shape != (*expected, rope_key.shape[-1]) or cache.latent.shape != (
        *expected,
        latent.shape[-1],
    ):
        raise ValueError(
            f"latent {latent.shape} and rope_key {rope_key.shape} do not fit the cache {cache.latent.shape} and "
            f"{cache.rope_key.shape}; expected {'[B, S, ...]' if layer is None else '[L, B, S, ...]'}"
        )
    rows = None if cache.format is None else quantize_recorded(latent, cache.format)
    new = LatentCache(
        latent=latent.astype(cache.latent.dtype) if rows is None else rows[0],
        rope_key=rope_key.astype(cache.rope_key.dtype),
    )
    index = entry_index(positions, valid, page_table, cache.rope_key.shape[-3:])
    return write(cache, new, index, layer), rows


def in_rows(cache: LatentCache, page_table: Int32[Array, "b pages"]) -> LatentCache:
    """The pages [P, page_size, ...] of one layer as rows [B, pages x page_size, ...], by sequence.

    What an unmapped page holds in its place is arbitrary.
    """

    def gather(leaf):
        pages = leaf[jnp.maximum(page_table, 0)]
        return pages.reshape(pages.shape[0], -1, *pages.shape[3:])

    return jax.tree.map(gather, cache)
