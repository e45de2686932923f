"""The jitted programs of an engine: prefill, first tokens, decode, copies of pages. All state is in the cache."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from trace_jax.guidance import GuidanceSpec, LayerRows, PackedRows, pack_rows, row_hash
from trace_jax.models import ModelConfig, init_cache, lay_out
from trace_jax.models.transformer import ForwardOutput
from trace_jax.quant import Bf16Numerics, Numerics, PackedNumerics, QuantPlan
from trace_jax.rollout.engine_config import EngineConfig
from trace_jax.rollout.sampling import MAX_STOP_TOKENS, Draws, Sampled, sample, scale_logits

TOKEN, POSITION, LIMIT, LIVE, TOP_K, STOPS = range(6)
"""Columns of `Slots.ints`; stop tokens are from `STOPS` on."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Slots:
    """What the host says of the sequences of a batch, before a program runs; `[N]` unless stated.

    Attributes:
        ints: int32 `[N, STOPS + MAX_STOP_TOKENS]`: the `TOKEN` to feed, its `POSITION`, the `LIMIT` of tokens at which
            the response ends, whether the sequence takes part, top_k, and stop tokens (-1 where there is none). One
            array, as `floats`: each costs the host a transfer.
        floats: float32 `[N, 3]`: inverse temperature, top_p, min_p.
        keys: uint32 `[N, words]`.
        table: int32 `[N, pages]`, pages of each sequence, -1 where there is none.
    """

    ints: Any
    floats: Any
    keys: Any
    table: Any

    @classmethod
    def empty(cls, count: int, pages: int, words: int) -> "Slots":
        """NumPy arrays for `count` sequences that take no part."""
        ints = np.zeros((count, STOPS + MAX_STOP_TOKENS), np.int32)
        ints[:, STOPS:] = -1
        floats = np.ones((count, 3), np.float32)
        floats[:, 2] = 0
        table = np.full((count, pages), -1, np.int32)
        return cls(ints=ints, floats=floats, keys=np.zeros((count, words), np.uint32), table=table)

    def draws(self, positions: jax.Array) -> Draws:
        """For tokens at `positions`: a sequence's token depends on its key and position, on no company."""
        keys = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(self.keys), positions)
        return Draws(
            inverse_temperature=self.floats[:, 0],
            top_k=self.ints[:, TOP_K],
            top_p=self.floats[:, 1],
            min_p=self.floats[:, 2],
            keys=keys,
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoded:
    """What `chunk` decode steps leave, the step axis first.

    `tokens` int32 `[chunk, N]`, -1 where none was drawn; a sequence that drew one fed one. `logprobs` float32
    `[2, chunk, N]`, where it was drawn and of the model's own; `rows` and `audit` `[chunk, N, 1, bytes]`.
    """

    tokens: Any
    logprobs: Any
    rows: PackedRows
    audit: PackedRows | None


def check_plan(model: ModelConfig, plan: QuantPlan | None, record: GuidanceSpec | None) -> None:
    """Raises PlanError for a model that cannot be quantized as planned, ValueError for a record of a BF16 rollout."""
    if plan is not None:
        plan.check(**model.contractions)
    elif record is not None:
        raise ValueError("a BF16 rollout has no FP4 codes to record; set record=None or give a QuantPlan.")


def rollout_numerics(
    plan: QuantPlan | None, record: GuidanceSpec | None, audit_rows: tuple[int, ...]
) -> Numerics:
    """A rollout's arithmetic; `plan` None is BF16, which has no codes to audit."""
    if plan is None:
        return Bf16Numerics()
    return PackedNumerics(plan=plan, record=record, audit_rows=audit_rows)


def captured_layers(model: ModelConfig, record: GuidanceSpec | None) -> tuple[int, ...]:
    """All layers are captured, the record's are kept: a scan split at the first guided layer is two programs."""
    return tuple(range(model.num_layers)) if record else ()


def kept_rows(
    model: ModelConfig, record: GuidanceSpec | None, out: ForwardOutput, tokens, positions, fed
) -> tuple[PackedRows, PackedRows | None]:
    """What leaves the device of rows `[B, T]`: routes, hash and record of each, and the audited ones' full codes."""
    dtype = np.uint8 if model.num_experts < 255 else np.uint16
    routes = jnp.where(fed[None, :, :, None], out.routes, np.iinfo(dtype).max)
    hashes = jnp.where(fed, row_hash(tokens, positions), jnp.uint32(0))
    guided = None
    if record is not None:
        guided = {group[0]: _recorded(model, record, group, out.guided[group[0]]) for group in record.groups}
    rows = pack_rows((routes.astype(dtype), guided), hashes)
    return rows, None if out.every is None else pack_rows(out.every, None)


def _recorded(
    model: ModelConfig, record: GuidanceSpec, group: tuple[str, ...], captured: LayerRows
) -> LayerRows:
    """The record's layers, of the captured ones: those that have every site of the group."""
    having = set.intersection(*(set(model.site_layers(site)) for site in group))
    assert captured.data.shape[0] == len(having), (group, captured.data.shape, having)
    places = [sorted(having).index(layer) for layer in record.layers_of(group[0])]
    return dataclasses.replace(captured, data=captured.data[np.asarray(places)])


class Programs:
    """Compiled for one model, precision and set of static shapes; `compilations` counts all of them."""

    def __init__(
        self,
        graphdef: nnx.GraphDef,
        model: ModelConfig,
        config: EngineConfig,
        *,
        plan: QuantPlan | None = None,
        record: GuidanceSpec | None = None,
    ):
        """`plan` None rolls out in BF16; `record` says what guided layers keep, None records routes only."""
        check_plan(model, plan, record)
        self.graphdef, self.model, self.config, self.plan, self.record = graphdef, model, config, plan, record
        self._layouts: tuple[PackedRows, PackedRows | None] | None = None

    @property
    def compilations(self) -> int:
        """Programs compiled in this process so far, for any engine: it stands still once an engine is warm."""
        jitted = Programs.prefill, Programs.first, Programs.decode, copy_pages, copy_states
        return sum(f._cache_size() for f in jitted)

    @functools.partial(jax.jit, static_argnums=0)
    def init_cache(self) -> dict[str, Any]:
        """Pages for what grows with the tokens, a row per slot for what does not."""
        c, kv_format = self.config, None if self.plan is None else self.plan.kv_format
        return init_cache(self.model, c.slots, c.page_size, kv_format, pages=c.pages)

    def _feed(self, model, cache, tokens, positions, fed, table, audited: int):
        """Feeds tokens `[B, T]`: the output, with its cache laid out."""
        out = model(
            tokens,
            positions,
            fed,
            numerics=rollout_numerics(self.plan, self.record, tuple(range(audited))),
            cache=cache,
            page_table=table,
            guided_layers=captured_layers(self.model, self.record),
        )
        return dataclasses.replace(out, cache=lay_out(out.cache, paged=True))

    def _kept(self, out, tokens, positions, fed) -> tuple[PackedRows, PackedRows | None]:
        return kept_rows(self.model, self.record, out, tokens, positions, fed)

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
    def prefill(self, params, cache, tokens, starts, counts, slots, table):
        """Feeds `counts` `[R]` of the tokens `[R, C]`, of which the first is at `starts`, to sequences in `slots`.

        Returns the cache, the logits `[R, V]` that follow the last token fed, and what was kept, `[R, C, bytes]`.
        """
        model = nnx.merge(self.graphdef, params)
        column = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        positions, fed = starts[:, None] + column, column < counts[:, None]
        states = _states_of(cache, slots, starts)
        out = self._feed(
            model, cache | states, tokens, positions, fed, table, min(self.config.audit_slots, len(tokens))
        )
        # No lane that feeds nothing has a slot; past the end nothing is written.
        slots = jnp.where(counts > 0, slots, self.config.slots)
        cache = out.cache | {
            name: jax.tree.map(lambda old, new: old.at[:, slots].set(new, mode="drop"), cache[name], state)
            for name, state in out.cache.items()
            if name in states
        }
        last = jnp.take_along_axis(out.hidden, jnp.maximum(counts - 1, 0)[:, None, None], axis=1)[:, 0]
        return lay_out(cache, paged=True), model.logits(last), *self._kept(out, tokens, positions, fed)

    @functools.partial(jax.jit, static_argnums=0, static_argnames="plain")
    def first(self, logits, lanes, state: Slots, *, plain: bool) -> Sampled:
        """The tokens `[M]` that follow a prefill: of each sequence of `state` from the logits of its lane."""
        return sample(logits[lanes], state.draws(state.ints[:, POSITION] + 1), plain=plain)

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=2, static_argnames="plain")
    def decode(self, params, cache, state: Slots, *, plain: bool):
        """`chunk` steps, each of which feeds a token of every sequence and draws the next: the cache and `Decoded`."""
        model = nnx.merge(self.graphdef, params)
        limit, stops = state.ints[:, LIMIT], state.ints[:, STOPS:]

        def step(carry, _):
            cache, token, position, live = carry
            column, where, fed = token[:, None], position[:, None], live[:, None]
            out = self._feed(model, cache, column, where, fed, state.table, self.config.audit_slots)
            rows, audit = self._kept(out, column, where, fed)
            drawn = sample(model.logits(out.hidden[:, 0]), state.draws(position + 1), plain=plain)
            stop = jnp.any(drawn.tokens[:, None] == stops, axis=-1) | (position + 2 >= limit)
            kept = Decoded(
                tokens=jnp.where(live, drawn.tokens, -1),
                logprobs=jnp.stack([drawn.logprobs, drawn.raw_logprobs]),
                rows=rows,
                audit=audit,
            )
            # A sequence that is done stays where it is; what it would feed is not written.
            carry = out.cache, jnp.where(live, drawn.tokens, token), position + live, live & ~stop
            return carry, kept

        carry = cache, state.ints[:, TOKEN], state.ints[:, POSITION], state.ints[:, LIVE] > 0
        (cache, *_), kept = jax.lax.scan(step, carry, length=self.config.chunk)
        return cache, dataclasses.replace(kept, logprobs=jnp.moveaxis(kept.logprobs, 1, 0))

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=2, static_argnames="temperature")
    def force(self, params, cache, tokens, positions, table, *, temperature: float):
        """Decodes given tokens: feeds `tokens` `[N, steps + 1]`, -1 past a sequence's end, from `positions` `[N]` on.

        Returns the cache and log-probs float32 `[N, steps]` of every token but the first, given those before it.
        """
        model = nnx.merge(self.graphdef, params)

        def step(cache, inputs):
            token, following, position = inputs
            fed = following >= 0
            out = self._feed(model, cache, token[:, None], position[:, None], fed[:, None], table, 0)
            logits = scale_logits(model.logits(out.hidden[:, 0]), temperature)
            logprobs = jax.nn.log_softmax(logits, axis=-1)
            return out.cache, jnp.take_along_axis(logprobs, following[:, None], axis=-1)[:, 0]

        steps = jnp.arange(tokens.shape[1] - 1, dtype=jnp.int32)[:, None]
        inputs = jnp.maximum(tokens.T[:-1], 0), tokens.T[1:], positions[None] + steps
        cache, logprobs = jax.lax.scan(step, cache, inputs)
        return cache, logprobs.T

    def layouts(self, params: nnx.State, words: int) -> tuple[PackedRows, PackedRows | None]:
        """How rows and audited rows are packed, by shapes alone: the same for all weights of the model."""
        if self._layouts is not None:
            return self._layouts
        state = Slots.empty(self.config.slots, 1, words)
        _, kept = jax.eval_shape(
            functools.partial(Programs.decode, self, plain=True),
            params,
            jax.eval_shape(self.init_cache),
            state,
        )
        self._layouts = kept.rows, kept.audit
        return self._layouts


def _states_of(cache: dict[str, Any], slots: jax.Array, starts: jax.Array) -> dict[str, Any]:
    """The states of `slots`, of a cache's parts that are kept by slot; zeros where a sequence starts."""
    if "delta" not in cache:
        return {}

    def of(leaf):
        taken = jnp.take(leaf, slots, axis=1, mode="clip")
        return jnp.where(
            (starts == 0).reshape(1, -1, *(1,) * (leaf.ndim - 2)), jnp.zeros((), leaf.dtype), taken
        )

    return {"delta": jax.tree.map(of, cache["delta"])}


@functools.partial(jax.jit, donate_argnums=0)
def copy_pages(cache: dict[str, Any], sources: jax.Array, targets: jax.Array) -> dict[str, Any]:
    """Copies pages, all layers of each; a target past the last page is not written."""
    return {
        name: part if name == "delta" else _copied(part, sources, targets) for name, part in cache.items()
    }


@functools.partial(jax.jit, donate_argnums=0)
def copy_states(cache: dict[str, Any], sources: jax.Array, targets: jax.Array) -> dict[str, Any]:
    """Copies what is kept by slot; a target past the last slot is not written."""
    return cache | {"delta": _copied(cache["delta"], sources, targets)}


def _copied(part: Any, sources: jax.Array, targets: jax.Array) -> Any:
    return jax.tree.map(lambda leaf: leaf.at[:, targets].set(leaf[:, sources], mode="drop"), part)
