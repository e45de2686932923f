"""The trainer's view of a rollout."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trace_jax.guidance import (
    GuidanceSpec,
    PackedRows,
    RecordError,
    by_site,
    check_record,
    check_routes,
    is_backed,
    unpack_rows,
)
from trace_jax.models import ModelConfig
from trace_jax.parallel import constrain, place
from trace_jax.rollout import Trajectories


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("tokens", "fed", "sampled", "rollout_logprobs", "advantages", "routes", "sites"),
    meta_fields=(),
    drop_fields=("packed",),
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainBatch:
    """B sequences of S tokens.

    `fed` bool `[B, S]` marks the rows that the rollout fed, and the trainer feeds exactly those; `sampled` the tokens
    in the loss. `routes` `[L, B, S, k]` or None without replay; `sites` the records by site, empty without guidance;
    `packed` the bytes that both are views of, or None (see `to_device`).
    """

    tokens: Any
    fed: Any
    sampled: Any
    rollout_logprobs: Any
    advantages: Any
    routes: Any
    sites: Any
    packed: Any = None

    def rows(self, part: slice) -> "TrainBatch":
        """Sequences `part`."""
        by_sequence = ("tokens", "fed", "sampled", "rollout_logprobs", "advantages")
        return TrainBatch(
            **{name: getattr(self, name)[part] for name in by_sequence},
            routes=None if self.routes is None else self.routes[:, part],
            sites=jax.tree.map(lambda leaf: leaf[:, part], self.sites),
            packed=jax.tree.map(lambda leaf: leaf[part], self.packed),
        )

    def without_guidance(self) -> "TrainBatch":
        return dataclasses.replace(self, sites={}, packed=None)

    def to_device(self, sent: PackedRows | None = None) -> "TrainBatch":
        """The batch with its record on the device, moved there as one array: views would be copied leaf by leaf.

        `sent` is the copy that `send_rows` has already started of these rows.
        """
        if self.packed is None:
            return self
        routes, groups = _unpacked(sent or send_rows(self.packed))
        sites = by_site(groups)
        return dataclasses.replace(
            self, routes=None if self.routes is None else routes, sites=sites, packed=None
        )


def send_rows(packed: PackedRows | None, part: slice = slice(None)) -> PackedRows | None:
    """Starts the copy of sequences `part` to the device; it goes on behind the call. None if there are no rows."""
    return (
        None
        if packed is None
        else dataclasses.replace(packed, data=place(packed.data[part], ("batch", None, None)))
    )


@jax.jit
def _unpacked(packed):
    return unpack_rows(packed.data, packed)[0]


def make_batch(
    trajectories: Trajectories,
    advantages: np.ndarray,
    *,
    model: ModelConfig,
    spec: GuidanceSpec | None,
    weight_version: int,
    replay_routes: bool,
) -> TrainBatch:
    """Checks the record against the tokens and builds the batch. Consumes it exactly once: all rows or an error.

    Args:
        trajectories: N sequences.
        advantages: float32 `[N]`.
        model, spec: what the trainer is about to run.
        weight_version: of the weights that the rollout was given.
        replay_routes: whether the trainer replays the recorded experts.

    Raises:
        RecordError: the record does not belong to these rows, sites, layers or weights.
        ValueError: shapes disagree, or no token was sampled at all.
    """
    t = trajectories
    if advantages.shape != (len(t),):
        raise ValueError(f"{advantages.shape} advantages for {len(t)} trajectories; expected one each.")
    if not t.sampled.any():
        raise ValueError("no response has a single token (all have zero length); nothing to train on.")
    check_record(
        t.record,
        spec=spec,
        row_shapes={site: model.row_shape(site) for site in (spec.sites if spec else ())},
        tokens=t.tokens,
        fed=t.fed,
        weight_version=np.full(t.tokens.shape, weight_version, np.int32),
    )
    routed = model.layers_of("moe")
    if t.record.route_layers not in (routed, None if len(routed) == model.num_layers else routed):
        raise RecordError(
            f"routes are those of layers {t.record.route_layers}, the model's experts are in {routed}."
        )
    check_routes(
        t.record.routes,
        num_layers=len(routed),
        num_experts=model.num_experts,
        k=model.experts_per_token,
        fed=t.fed,
    )
    return TrainBatch(
        tokens=t.tokens,
        fed=t.fed,
        sampled=t.sampled,
        rollout_logprobs=t.logprobs,
        advantages=advantages,
        routes=t.record.routes if replay_routes else None,
        sites=t.record.sites,
        packed=t.packed if spec is not None and _is_view(t) else None,
    )


def _is_view(t: Trajectories) -> bool:
    """Whether the record's arrays are still views of the packed rows: an exchanged array counts, not those bytes."""
    if t.packed is None:
        return False
    routes, groups = unpack_rows(t.packed.data, t.packed)[0]
    return is_backed((t.record.routes, t.record.sites), (routes, by_site(groups)))


def replayed_routes(routes: jax.Array | None) -> jax.Array | None:
    """int32 routes with -1 where there is none, as the model takes them."""
    if routes is None:
        return None
    return jnp.where(routes == np.iinfo(routes.dtype).max, -1, routes.astype(jnp.int32))


def constrain_batch(batch: TrainBatch) -> TrainBatch:
    """Lays records out exactly like their tokens."""

    def layered(leaf):
        return constrain(leaf, ("layers", "batch", *(None,) * (leaf.ndim - 2)))

    def by_sequence(leaf):
        return constrain(leaf, ("batch", *(None,) * (leaf.ndim - 1)))

    return TrainBatch(
        **{
            name: by_sequence(getattr(batch, name))
            for name in ("tokens", "fed", "sampled", "rollout_logprobs", "advantages")
        },
        routes=None if batch.routes is None else layered(batch.routes),
        sites=jax.tree.map(layered, batch.sites),
    )
