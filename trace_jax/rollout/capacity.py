"""How many sequences a device has room for."""

from typing import Any

import jax

from kernels_pallas.formats import Fp4Format
from trace_jax.config import ConfigError
from trace_jax.models import ModelConfig, init_cache

RESERVE = 0.1
"""Share of the device's memory that is left for what programs need while they run: logits, parts of attention, rows."""


def nbytes(tree: object) -> int:
    """Bytes of all arrays, or shapes, of a tree."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def cache_bytes(model: ModelConfig, kv_format: Fp4Format | None) -> tuple[int, int]:
    """Bytes of one token in the cache, all layers, and of what a sequence has beside (DeltaNet's states)."""

    def size(sequences: int, tokens: int) -> int:
        return nbytes(jax.eval_shape(lambda: init_cache(model, sequences, 1, kv_format, pages=tokens)))

    return size(1, 2) - size(1, 1), size(2, 1) - size(1, 1)


def sequences_that_fit(
    model: ModelConfig, kv_format: Fp4Format | None, *, length: int, page_size: int, budget: int
) -> int:
    """Sequences of `length` tokens, each with its own pages, for which `budget` bytes are enough.

    Raises:
        ConfigError: there is no room for one.
    """
    token, sequence = cache_bytes(model, kv_format)
    each = -(-length // page_size) * page_size * token + sequence
    if budget < each:
        raise ConfigError(
            f"{budget} bytes are left for the cache, a sequence of {length} tokens takes {each}. Shorten sequences, or "
            "use FP4 weights or a smaller model."
        )
    return budget // each


def free_bytes(device: Any, reserve: float = RESERVE) -> int:
    """Bytes of a device that nothing holds, but for the reserve, once the weights are there.

    Raises:
        ConfigError: the device does not say, as CPUs do not.
    """
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        raise ConfigError(f"{device.device_kind} does not say how much memory it has; set engine.pages.")
    return int(stats["bytes_limit"] * (1 - reserve)) - stats["bytes_in_use"]
