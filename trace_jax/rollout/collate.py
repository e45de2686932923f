"""Sequences of an engine, one beside the other, as the trainer takes them."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from trace_jax.guidance import GuidanceRecord, PackedRows, by_site, unpack_rows
from trace_jax.models import ModelConfig
from trace_jax.rollout.requests import Result
from trace_jax.rollout.trajectories import Trajectories


def blank_row(layout: PackedRows) -> np.ndarray:
    """A row uint8 `[bytes]` of a token that was never fed."""
    # The first leaf is the routes, whose largest value says that there are none; all else is 0.
    blank = np.zeros(layout.data.shape[-1], np.uint8)
    blank[layout.fields[0].bytes] = 0xFF
    return blank


def collate(
    results: Sequence[Result],
    layout: PackedRows,
    audit_layout: PackedRows | None,
    model: ModelConfig,
    *,
    length: int,
    rows: np.ndarray | None = None,
) -> Trajectories:
    """Trajectories of finished sequences, in their order, padded to `length`.

    Args:
        results: of one engine.
        layout, audit_layout: `Engine.layout` and `Engine.audit_layout`.
        model: whose layers the record is of.
        length: S, tokens of the longest sequence at least.
        rows: uint8 `[N, S, bytes]` that the requests had their rows put into (`Request.rows`); by default they are
            copied to a new array.

    Raises:
        ValueError: a sequence has not ended, lacks rows (it was cancelled before all of it was fed), or is longer.
    """
    if not results:
        raise ValueError("no sequences to collate.")
    for r in results:
        if r.rows is None or len(r.rows) != len(r.tokens) - 1:
            fed = "no rows" if r.rows is None else f"{len(r.rows)} rows"
            raise ValueError(
                f"sequence {r.id} ({r.finish}) has {len(r.tokens)} tokens and {fed}; leave it out."
            )
        if len(r.tokens) > length:
            raise ValueError(f"sequence {r.id} has {len(r.tokens)} tokens; expected at most {length}.")
    shape = (len(results), length)
    if rows is None:
        blank = blank_row(layout)
        rows = np.empty((*shape, blank.size), np.uint8)
        for n, r in enumerate(results):
            rows[n, : len(r.rows)], rows[n, len(r.rows) :] = r.rows, blank
    tokens, logprobs = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    versions, sampled = np.full(shape, -1, np.int32), np.zeros(shape, bool)
    for n, r in enumerate(results):
        count = len(r.tokens)
        tokens[n, :count], logprobs[n, :count], sampled[n, :count] = r.tokens, r.logprobs, r.sampled
        versions[n, : count - 1] = r.versions
    packed = dataclasses.replace(layout, data=rows)
    (routes, groups), row_hash = unpack_rows(rows, packed)
    audited = tuple(n for n, r in enumerate(results) if r.audit is not None)
    audit = None
    if audit_layout is not None:
        codes = np.zeros((len(audited), length, audit_layout.data.shape[-1]), np.uint8)
        for place, n in enumerate(audited):
            codes[place, : len(results[n].audit)] = results[n].audit
        audit, _ = unpack_rows(codes, audit_layout)

    def unless_every(layers: tuple[int, ...]) -> tuple[int, ...] | None:
        return None if len(layers) == model.num_layers else layers

    sites = {site: unless_every(model.site_layers(site)) for site in audit or ()}
    trajectories = Trajectories(
        tokens=tokens,
        prompt_length=np.array([r.prompt_length for r in results], np.int32),
        length=np.array([len(r.tokens) for r in results], np.int32),
        logprobs=logprobs,
        record=GuidanceRecord(
            sites=by_site(groups),
            routes=routes,
            route_layers=unless_every(model.layers_of("moe")),
            row_hash=row_hash,
            weight_version=versions,
        ),
        audit=audit,
        audit_rows=audited,
        audit_layers=tuple((site, layers) for site, layers in sites.items() if layers is not None),
        packed=packed,
    )
    observed = trajectories.sampled & ~sampled
    return dataclasses.replace(trajectories, observed=observed) if observed.any() else trajectories
