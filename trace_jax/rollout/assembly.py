"""Puts rows that leave the device in chunks back into sequences, on the host."""

import dataclasses

import numpy as np

from trace_jax.guidance import GuidanceRecord, PackedRows, by_site, unpack_rows
from trace_jax.models import ModelConfig
from trace_jax.rollout.collate import blank_row
from trace_jax.rollout.collector import Collector
from trace_jax.rollout.host_memory import HostMemory
from trace_jax.rollout.trajectories import Trajectories


class Assembly:
    """Collects the prefill's and the decode chunks' rows of one wave."""

    def __init__(
        self,
        model: ModelConfig,
        prompts,
        lengths,
        group_size: int,
        length: int,
        weight_version: int,
        audit_rows,
        memory: HostMemory,
        collector: Collector,
    ):
        """`memory` is where the record's rows are put, by `collector`."""
        self.model, self.memory, self.collector = model, memory, collector
        self.group_size, self.weight_version, self.audit_rows = group_size, weight_version, tuple(audit_rows)
        self.prompt_length = np.repeat(lengths, group_size)
        self.shape = (self.prompt_length.size, length)
        self.count = self.prompt_length.copy()
        self.tokens = np.zeros(self.shape, np.int32)
        self.tokens[:, : prompts.shape[1]] = np.repeat(prompts, group_size, axis=0)
        self.logprobs = np.zeros(self.shape, np.float32)
        self.fed = np.zeros(self.shape, bool)

    def add_prefill(self, rows: PackedRows, audit: PackedRows | None) -> None:
        self.collector.add((rows, audit), self._write_prefill)

    def add_chunk(self, kept) -> None:
        self.collector.add(kept, self._write_chunk)

    def _write_prefill(self, kept: tuple[PackedRows, PackedRows | None]) -> None:
        """Allocates the record and fills the prompt rows, shared by the samples of a group."""
        rows, audit = kept
        self.layout, self.audit_layout = rows, audit
        bucket = rows.data.shape[1]
        self.fed[:, :bucket] = np.arange(bucket) < self.prompt_length[:, None]
        self.bucket, self.rows = bucket, self.memory.take((*self.shape, rows.data.shape[-1]))
        self.rows[:, :bucket] = np.repeat(rows.data, self.group_size, axis=0)
        if audit is not None:
            self.audited = np.zeros((len(self.audit_rows), self.shape[1], audit.data.shape[-1]), np.uint8)
            self.audited[:, :bucket] = audit.data

    def _write_chunk(self, kept) -> None:
        """Writes a chunk's rows to their (sequence, position)."""
        position = kept["position"]
        step, row = np.nonzero(kept["sampled"])
        self.tokens[row, position[step, row]] = kept["token"][step, row]
        self.logprobs[row, position[step, row]] = kept["logprob"][step, row]
        self.count += kept["sampled"].sum(axis=0)
        step, row = np.nonzero(kept["fed"])
        self.fed[row, position[step, row]] = True
        for at, fed, rows in zip(position, kept["fed"], kept["rows"].data[:, :, 0], strict=True):
            row = np.flatnonzero(fed)
            self.rows[row, at[row]] = rows if row.size == len(rows) else rows[row]  # no copy in between
        if kept["audit"] is not None:
            fed = kept["fed"][:, self.audit_rows]
            step, index = np.nonzero(fed)
            where = position[:, self.audit_rows][step, index]
            self.audited[index, where] = kept["audit"].data[step, index, 0]

    def _unless_every_layer(self, layers: tuple[int, ...]) -> tuple[int, ...] | None:
        return None if len(layers) == self.model.num_layers else layers

    def finish(self, sequences: int) -> Trajectories:
        """The first `sequences` slots; slots without a prompt are dropped."""
        self.collector.wait()
        blank = blank_row(self.layout)
        for n, unfed in enumerate(np.maximum(self.count - 1, self.bucket)):
            self.rows[n, unfed:] = blank
        keep = slice(0, sequences)
        packed = dataclasses.replace(self.layout, data=self.rows[keep])
        (routes, groups), row_hash = unpack_rows(packed.data, packed)
        audit, audit_rows = None, ()
        if self.audit_layout is not None:
            audit_rows = tuple(row for row in self.audit_rows if row < sequences)
            audit, _ = unpack_rows(self.audited[: len(audit_rows)], self.audit_layout)
        sites = {site: self._unless_every_layer(self.model.site_layers(site)) for site in audit or ()}
        return Trajectories(
            tokens=self.tokens[keep],
            prompt_length=self.prompt_length[keep],
            length=self.count[keep],
            logprobs=self.logprobs[keep],
            record=GuidanceRecord(
                sites=by_site(groups),
                routes=routes,
                route_layers=self._unless_every_layer(self.model.layers_of("moe")),
                row_hash=row_hash,
                weight_version=np.where(self.fed, self.weight_version, -1).astype(np.int32)[keep],
            ),
            audit=audit,
            audit_rows=audit_rows,
            audit_layers=tuple((site, layers) for site, layers in sites.items() if layers is not None),
            packed=packed,
        )
