"""What a model remembers of the tokens that it was fed, by kind of mixer."""

from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.formats import Fp4Format
from kernels_pallas.kv_cache import init_cache as init_kv_cache
from kernels_pallas.kv_cache import init_latent_cache
from trace_jax.models.config import ModelConfig
from trace_jax.models.delta import DELTA_STATE_AXES, DeltaState, init_delta_state
from trace_jax.parallel import constrain


def init_cache(
    config: ModelConfig, sequences: int, length: int, kv_format: Fp4Format | None, *, pages: int | None = None
) -> dict[str, Any]:
    """An empty cache, each part stacked over the layers of its mixer.

    Args:
        sequences: B.
        length: entries of a sequence, or of a page.
        kv_format: FP4 format of what is cached for each token; None for the compute dtype.
        pages: what grows with the tokens is cached in so many pages, which a page table gives to sequences.
    """
    rows = sequences if pages is None else pages
    dtype, cache = jnp.dtype(config.dtype), {}
    if layers := len(config.layers_of("attention")):
        cache["attention"] = init_kv_cache(
            rows, length, config.num_kv_heads, config.head_dim, kv_format, layers=layers, dtype=dtype
        )
    if layers := len(config.layers_of("delta")):
        cache["delta"] = init_delta_state(config.delta, layers, sequences, dtype)
    if layers := len(config.layers_of("latent")):
        c = config.latent
        cache["latent"] = init_latent_cache(
            rows, length, c.latent_rank, c.rope_dim, kv_format, layers=layers, dtype=dtype
        )
    return cache


def lay_out(cache: dict[str, Any], *, paged: bool = False) -> dict[str, Any]:
    """Logical axes of a cache."""
    rows = "pages" if paged else "batch"

    def entries(part, *axes):
        # Row exponents lack the last axis.
        return jax.tree.map(lambda leaf: constrain(leaf, axes[: leaf.ndim]), part)

    laid_out = {}
    if "attention" in cache:
        laid_out["attention"] = entries(cache["attention"], "layers", rows, "length", "kv_heads", "head_dim")
    if "latent" in cache:
        laid_out["latent"] = entries(cache["latent"], "layers", rows, "length", None)
    if "delta" in cache:
        state = cache["delta"]
        laid_out["delta"] = DeltaState(
            recurrent=constrain(state.recurrent, DELTA_STATE_AXES.recurrent),
            conv=constrain(state.conv, DELTA_STATE_AXES.conv),
        )
    return laid_out
