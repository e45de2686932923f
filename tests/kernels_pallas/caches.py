"""Caches of one content in every layout: a row per sequence, pages in any order, one layer of a stack."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.kv_cache import KVCache

LAYOUTS = ("rows", "layer", "pages", "layer_and_pages")
LAYER, LAYERS = 2, 4


@dataclasses.dataclass(frozen=True)
class Laid:
    """A cache [B, S, ...] in another layout, the options that name it, and how to get [B, S, ...] back."""

    cache: KVCache
    options: dict[str, Any]
    mapped: np.ndarray  # bool [B, S]: entries that have a place

    def rows(self, cache: KVCache) -> KVCache:
        """Entries [B, S, ...] of `cache`, laid out like this one; unmapped ones are anything."""
        layer, table = self.options.get("layer"), self.options.get("page_table")

        def gather(leaf):
            leaf = np.asarray(leaf)
            leaf = leaf if layer is None else leaf[int(layer)]
            if table is None:
                return leaf
            return leaf[np.asarray(table)].reshape(*self.mapped.shape, *leaf.shape[2:])

        return jax.tree.map(gather, cache)

    def others(self, cache: KVCache) -> list[np.ndarray]:
        """Everything in `cache` that no mapped entry of its layer lies in."""
        layer, table = self.options.get("layer"), self.options.get("page_table")
        found = []
        for leaf in map(np.asarray, jax.tree.leaves(cache)):
            own = leaf
            if layer is not None:
                found.append(np.delete(leaf, int(layer), axis=0))
                own = leaf[int(layer)]
            if table is not None:
                used = np.asarray(table).reshape(-1)
                found.append(np.delete(own, used[used >= 0], axis=0))
        return found


def garbage(leaf):
    """All bits set: NaN as BF16, poison as a scale byte."""
    return np.full(leaf.shape, -1, f"i{leaf.dtype.itemsize}").view(leaf.dtype)


def lay_out(cache: KVCache, layout: str, rng: np.random.Generator, page_size: int, holes=()) -> Laid:
    """`cache` [B, S, ...] in `layout`; everything around it is garbage.

    Pages lie in a random order among unused ones; `holes` are the (sequence, page) that stay unmapped.
    """
    batch, length = cache.k.shape[:2]
    options, mapped = {}, np.ones((batch, length), bool)
    leaves, tree = jax.tree.flatten(cache)
    leaves = [np.asarray(leaf) for leaf in leaves]
    if "pages" in layout:
        pages = length // page_size
        pool = batch * pages + 3
        table = rng.permutation(pool)[: batch * pages].reshape(batch, pages).astype(np.int32)
        paged = []
        for leaf in leaves:
            new = garbage(np.empty((pool, page_size, *leaf.shape[2:]), leaf.dtype))
            new[table] = leaf.reshape(batch, pages, page_size, *leaf.shape[2:])
            paged.append(new)
        for sequence, page in holes:
            for new in paged:
                new[table[sequence, page]] = garbage(new[0])
            table[sequence, page] = -rng.integers(1, 9)
            mapped[sequence, page * page_size : (page + 1) * page_size] = False
        leaves, options["page_table"] = paged, jnp.asarray(table)
    if "layer" in layout:
        leaves = [
            np.stack([leaf if layer == LAYER else garbage(leaf) for layer in range(LAYERS)])
            for leaf in leaves
        ]
        options["layer"] = jnp.int32(LAYER)
    return Laid(jax.tree.unflatten(tree, [jnp.asarray(leaf) for leaf in leaves]), options, mapped)
