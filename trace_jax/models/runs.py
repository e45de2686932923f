"""Layers of different kinds as scans: runs of repeated periods, and where the layers of a run find what is theirs."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from trace_jax.models.config import Layer


class Run(NamedTuple):
    """Layers that are one scan: `repeats` times the `period` layers from `start` on, all guided or none."""

    start: int
    period: int
    repeats: int
    guided: bool


def layer_runs(layers: tuple[Layer, ...], guided: tuple[int, ...]) -> list[Run]:
    """Splits layers into runs, each as long as a repeated period of at most 8 layers reaches."""
    kinds = [(layer, index in guided) for index, layer in enumerate(layers)]
    runs, start = [], 0
    while start < len(kinds):
        end = start
        while end < len(kinds) and kinds[end][1] == kinds[start][1]:
            end += 1

        def repeats(period, start=start, end=end):
            count = 1
            while start + (count + 1) * period <= end and (
                kinds[start + count * period : start + (count + 1) * period] == kinds[start : start + period]
            ):
                count += 1
            return count

        # A period that repeats; where none does, one layer.
        best = max(
            (p for p in range(1, min(8, end - start) + 1) if p == 1 or repeats(p) > 1),
            key=lambda p: (p * repeats(p), -p),
        )
        runs.append(Run(start, best, repeats(best), kinds[start][1]))
        start += best * repeats(best)
    return runs


class Places:
    """Where the layers of a run find what only `layers` have, in arrays stacked over these."""

    def __init__(self, layers: tuple[int, ...], run: Run):
        inside = [layer for layer in layers if run.start <= layer < run.start + run.period]
        self.offsets = {layer - run.start: place for place, layer in enumerate(inside)}
        self.first, self.count, self.repeats = (
            sum(layer < run.start for layer in layers),
            len(inside),
            run.repeats,
        )

    def of(self, offset: int) -> int | None:
        """Place of the period's layer `offset` among those of its period."""
        return self.offsets.get(offset)

    def traced(self, index: Int[Array, ""], offset: int) -> Int[Array, ""]:
        """Place of that layer of period `index` in the whole stack."""
        return self.first + index * self.count + self.offsets[offset]

    def slices(self, tree: Any) -> Any:
        """The run's part `[repeats, layers of a period, ...]` of arrays `[L, ...]`."""
        part = slice(self.first, self.first + self.repeats * self.count)
        return jax.tree.map(lambda leaf: leaf[part].reshape(self.repeats, self.count, *leaf.shape[1:]), tree)


def stack_kept(kept: list[dict[str, Any]]) -> dict[str, Any]:
    """What the layers of a period kept, stacked over those that kept anything under a key."""
    keys = dict.fromkeys(key for part in kept for key in part)
    return {
        key: jax.tree.map(lambda *leaves: jnp.stack(leaves), *[part[key] for part in kept if key in part])
        for key in keys
    }


def concatenate_kept(parts: list[dict[str, Any]]) -> dict[str, Any] | None:
    """What the runs kept, one after the other under every key."""
    keys = dict.fromkeys(key for part in parts for key in part)
    return {
        key: jax.tree.map(
            lambda *leaves: jnp.concatenate(leaves), *[part[key] for part in parts if key in part]
        )
        for key in keys
    } or None
