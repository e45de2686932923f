"""Puts rows that leave the device in chunks back into sequences, on the host."""

from typing import Any

import jax
import numpy as np

from trace_jax.guidance import GuidanceRecord
from trace_jax.rollout.trajectories import Trajectories


class Assembly:
    """Collects the prefill's and the decode chunks' rows of one wave.

    A chunk is held until the next one has been dispatched (`flush`), so its copy to the host overlaps with compute.
    """

    def __init__(self, prompts, lengths, group_size: int, length: int, weight_version: int, audit_rows):
        self.group_size, self.weight_version, self.audit_rows = group_size, weight_version, tuple(audit_rows)
        slots = len(prompts) * group_size
        self.shape = (slots, length)
        self.prompt_length = np.repeat(lengths, group_size)
        self.count = self.prompt_length.copy()
        self.tokens = np.zeros(self.shape, np.int32)
        self.tokens[:, : prompts.shape[1]] = np.repeat(prompts, group_size, axis=0)
        self.logprobs = np.zeros(self.shape, np.float32)
        self.fed = np.zeros(self.shape, bool)
        self.pending, self.kept = None, None

    def add_prefill(self, kept) -> None:
        """Allocates the record and fills the prompt rows, shared by the samples of a group."""
        kept = jax.tree.map(np.asarray, kept)
        slots, length = self.shape
        bucket = kept["row_hash"].shape[1]
        self.fed[:, :bucket] = np.arange(bucket) < self.prompt_length[:, None]

        def allocate(leaf, rows):
            # [L, sequences, bucket, ...] -> [L, rows, length, ...]
            return np.zeros((leaf.shape[0], rows, length, *leaf.shape[3:]), leaf.dtype)

        def expand(leaf):
            out = allocate(leaf, slots)
            out[:, :, :bucket] = np.repeat(leaf, self.group_size, axis=1)
            return out

        def audited(leaf):
            out = allocate(leaf, len(self.audit_rows))
            out[:, :, :bucket] = leaf
            return out

        routes = expand(kept["routes"])
        routes[:, :, bucket:] = np.iinfo(routes.dtype).max
        hashes = np.zeros(self.shape, np.uint32)
        hashes[:, :bucket] = np.repeat(kept["row_hash"], self.group_size, axis=0)
        self.kept = {
            "routes": routes,
            "row_hash": hashes,
            "sites": _map_leaves(expand, kept["sites"]),
            "audit": _map_leaves(audited, kept["audit"]),
        }

    def add_chunk(self, kept) -> None:
        self.pending = kept

    def flush(self) -> None:
        """Writes the pending chunk's rows to their (sequence, position)."""
        if self.pending is None:
            return
        kept, self.pending = jax.tree.map(np.asarray, self.pending), None
        position = kept["position"]
        step, row = np.nonzero(kept["sampled"])
        self.tokens[row, position[step, row]] = kept["token"][step, row]
        self.logprobs[row, position[step, row]] = kept["logprob"][step, row]
        np.add.at(self.count, row, 1)
        step, row = np.nonzero(kept["fed"])
        where = position[step, row]
        self.fed[row, where] = True
        self.kept["row_hash"][row, where] = kept["row_hash"][step, row, 0]

        def write(target, leaf):
            # leaf [steps, L, N, 1, ...] -> target [L, N, S, ...]
            target[:, row, where] = np.moveaxis(leaf[step, :, row, 0], 0, 1)

        write(self.kept["routes"], kept["routes"])
        for target, leaf in zip(
            jax.tree.leaves(self.kept["sites"]), jax.tree.leaves(kept["sites"]), strict=True
        ):
            write(target, leaf)
        if self.audit_rows and kept["audit"] is not None:
            slot = {n: i for i, n in enumerate(self.audit_rows)}
            mine = np.asarray([i for i, n in enumerate(row) if n in slot], int)
            index = np.asarray([slot[row[i]] for i in mine], int)
            leaves = zip(jax.tree.leaves(self.kept["audit"]), jax.tree.leaves(kept["audit"]), strict=True)
            for target, leaf in leaves:
                if mine.size:
                    target[:, index, where[mine]] = np.moveaxis(leaf[step[mine], :, index, 0], 0, 1)

    def finish(self, sequences: int) -> Trajectories:
        """The first `sequences` slots; slots without a prompt are dropped."""
        self.flush()
        keep = slice(0, sequences)
        audit_rows = tuple(row for row in self.audit_rows if row < sequences)
        kept = self.kept
        audit = kept["audit"]
        if audit is not None:
            audit = _map_leaves(lambda leaf: leaf[:, : len(audit_rows)], audit)
        return Trajectories(
            tokens=self.tokens[keep],
            prompt_length=self.prompt_length[keep],
            length=self.count[keep],
            logprobs=self.logprobs[keep],
            record=GuidanceRecord(
                sites=_map_leaves(lambda leaf: leaf[:, keep], kept["sites"]) or {},
                routes=kept["routes"][:, keep],
                row_hash=kept["row_hash"][keep],
                weight_version=np.where(self.fed, self.weight_version, -1).astype(np.int32)[keep],
            ),
            audit=audit,
            audit_rows=audit_rows if audit is not None else (),
        )


def _map_leaves(fn, tree: dict[str, Any] | None):
    return None if tree is None else jax.tree.map(fn, tree)
