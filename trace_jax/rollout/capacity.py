"""How many pages of a KV cache a device has room for."""

import jax

from kernels_pallas.formats import Fp4Format
from trace_jax.config import ConfigError
from trace_jax.models import ModelConfig, init_cache

RESERVE = 0.1
"""Share of the device's memory that is left for what programs need while they run: logits, parts of attention, rows."""


def nbytes(tree: object) -> int:
    """Bytes of all arrays, or shapes, of a tree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def cache_bytes(model: ModelConfig, kv_format: Fp4Format | None, page_size: int) -> tuple[int, int]:
    """Bytes of a page of `page_size` positions, all layers, and of what a slot has beside pages (DeltaNet's states)."""

    def size(slots: int, pages: int) -> int:
        return nbytes(jax.eval_shape(lambda: init_cache(model, slots, page_size, kv_format, pages=pages)))

    return size(1, 2) - size(1, 1), size(2, 1) - size(1, 1)


def pages_that_fit(
    model: ModelConfig, kv_format: Fp4Format | None, *, slots: int, page_size: int, budget: int
) -> int:
    """Pages that `budget` bytes hold beside the states of `slots` sequences.

    Raises:
        ConfigError: they hold none.
    """
    page, slot = cache_bytes(model, kv_format, page_size)
    pages = (budget - slots * slot) // page
    if pages < 1:
        raise ConfigError(
            f"{budget} bytes are left for the cache; {slots} slots take {slots * slot} and a page of {page_size} "
            f"positions {page}. Lower engine.slots, or use FP4 weights or a smaller model."
        )
    return pages


def free_bytes(device: jax.Device, reserve: float = RESERVE) -> int:
    """Bytes of a device that nothing holds, but for the reserve, once the weights are there.

    Raises:
        ConfigError: the device does not say, as CPUs do not.
    """
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        raise ConfigError(f"{device.device_kind} does not say how much memory it has; set engine.pages.")
    return int(stats["bytes_limit"] * (1 - reserve)) - stats["bytes_in_use"]
