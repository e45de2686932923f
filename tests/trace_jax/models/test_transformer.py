"""The trainer's forward: padding, independence of rows, replayed routes, splits at guided layers, remat."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.trace_jax import small
from trace_jax.guidance import GuidanceSpec
from trace_jax.models.moe import MoE
from trace_jax.quant import Bf16Numerics, FakeQuantNumerics, QuantPlan, guides_of
from trace_jax.rollout.rerecord import rerecord

MODEL = small.MODEL
AUDITED = FakeQuantNumerics(plan=QuantPlan(), audit_rows=6)


@functools.partial(jax.jit, static_argnums=(0, 4), static_argnames=("numerics",))
def forward(model, params, tokens, fed, guided_layers, routes, sites, numerics=AUDITED):
    transformer = nnx.merge(small.masters(model)[0], params)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    out = transformer(
        tokens,
        positions,
        fed,
        numerics=numerics,
        routes=routes,
        guides=guides_of(sites),
        guided_layers=guided_layers,
    )
    return transformer.logits(out.hidden), out


def unguided(tokens, fed, routes):
    return jax.device_get(forward(MODEL, small.masters()[1], tokens, fed, (), routes, None))


@pytest.fixture(scope="module")
def rows():
    """(tokens, fed, routes) of a rollout, and what the trainer makes of them with the routes replayed."""
    trajectories = small.rollout("trace_all_sites")
    routes = small.routes(trajectories)
    return (
        trajectories.tokens,
        trajectories.fed,
        routes,
        unguided(trajectories.tokens, trajectories.fed, routes),
    )


def test_padding_content_reaches_no_row(rows, rng):
    tokens, fed, routes, (logits, out) = rows
    other = np.where(fed, tokens, rng.integers(0, MODEL.vocab_size, tokens.shape)).astype(np.int32)
    assert not np.array_equal(other, tokens)
    other_logits, other_out = unguided(other, fed, routes)
    assert np.array_equal(other_logits[fed], logits[fed])
    assert np.array_equal(other_out.routes[:, fed], out.routes[:, fed])


def test_rows_do_not_depend_on_their_companions_or_place(rows, rng):
    tokens, fed, routes, (logits, _) = rows
    # Sequence 1 moves to the end; all others are replaced.
    others = rng.integers(0, MODEL.vocab_size, tokens.shape).astype(np.int32)
    others[-1] = tokens[1]
    other_fed = np.ones_like(fed)
    other_fed[-1] = fed[1]
    other_routes = np.full_like(routes, -1)
    other_routes[:, -1] = routes[:, 1]
    other_logits, _ = unguided(others, other_fed, other_routes)
    assert np.array_equal(other_logits[-1][fed[1]], logits[1][fed[1]])


def test_negative_routes_choose_for_themselves(rows):
    tokens, fed, routes, _ = rows
    none = np.full_like(routes, -1)
    logits, out = unguided(tokens, fed, none)
    again, _ = unguided(tokens, fed, np.where(fed[None, :, :, None], out.routes, -1))
    assert np.array_equal(again[fed], logits[fed])


def test_replayed_routes_are_used_and_own_choice_is_reported(rows):
    tokens, fed, routes, (logits, out) = rows
    # The last layer's replay cannot change what the layers before it choose, nor its own reported choice.
    swapped = routes.copy()
    swapped[-1] = np.where(routes[-1] >= 0, (routes[-1] + 1) % MODEL.num_experts, -1)
    other_logits, other_out = unguided(tokens, fed, swapped)
    assert not np.array_equal(other_logits[fed], logits[fed])
    assert np.array_equal(other_out.routes[:, fed], out.routes[:, fed])


def test_order_of_replayed_experts_does_not_matter_beyond_rounding(rows):
    tokens, fed, routes, (logits, _) = rows
    reversed_logits, _ = unguided(tokens, fed, routes[..., ::-1].copy())
    assert np.median(np.abs(reversed_logits - logits)[fed]) < 0.02


def route(router, h, replay):
    config = dataclasses.replace(MODEL, num_experts=5)
    moe = MoE(config, 1, nnx.Rngs(0))
    moe.router = nnx.Param(router)
    return moe.route(h, replay, config)


def test_gates_are_recomputed_at_the_recorded_experts(rng):
    router = jnp.asarray(rng.standard_normal((8, 5)), jnp.float32)
    h = jnp.asarray(rng.standard_normal((2, 3, 8)), jnp.float32)
    replay = rng.integers(0, 5, (2, 3, 2)).astype(np.int32)
    replay[..., 1] = (replay[..., 0] + 1) % 5
    replay[0, 1] = -1
    own, used, gates = route(router, h, jnp.asarray(replay))
    logits = np.einsum("btd,de->bte", h, router)
    expected_own = np.argsort(-logits, axis=-1)[..., :2]
    assert np.array_equal(own, expected_own)
    expected = np.where(replay >= 0, replay, expected_own)
    assert np.array_equal(used, expected)
    chosen = np.take_along_axis(logits, expected, axis=-1)
    weights = np.exp(chosen) / np.exp(chosen).sum(-1, keepdims=True)
    np.testing.assert_allclose(gates, weights, rtol=1e-5)
    np.testing.assert_allclose(np.sum(gates, axis=-1), 1, rtol=1e-6)


def test_gradient_flows_through_the_gates_of_replayed_experts(rng):
    router = jnp.asarray(rng.standard_normal((8, 5)), jnp.float32)
    h = jnp.asarray(rng.standard_normal((1, 1, 8)), jnp.float32)
    replay = jnp.asarray([[[3, 1]]], jnp.int32)

    def first_gate(router):
        return route(router, h, replay)[2][0, 0, 0]

    grad, gate = np.asarray(jax.grad(first_gate)(router)), first_gate(router)
    slope = float(gate * (1 - gate)) * np.asarray(h[0, 0])
    np.testing.assert_allclose(grad[:, 3], slope, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(grad[:, 1], -slope, rtol=1e-4, atol=1e-6)
    assert not np.any(grad[:, [0, 2, 4]])


def recorded(layers):
    spec = GuidanceSpec(layers=layers, sites=("expert_input", "down_input", "key", "value"))
    return rerecord(small.rollout("trace_all_sites"), spec).record.sites


def guided(layers, sites, model=MODEL):
    t = small.rollout("trace_all_sites")
    routes = small.routes(t)
    return jax.device_get(forward(model, small.masters(model)[1], t.tokens, t.fed, layers, routes, sites))


def test_splits_at_any_guided_layers():
    """Layers 0 and 2 in runs of their own, against one run whose record of layer 1 is empty.

    The compiler fuses the two programs differently, so that the unguided layer flips some codes.
    """
    everywhere = recorded((0, 1, 2))
    empty = {
        site: dataclasses.replace(
            r, row_exponent=np.where(np.arange(3) == 1, 0, r.row_exponent.T).T.astype(np.uint8)
        )
        for site, r in everywhere.items()
    }
    t = small.rollout("trace_all_sites")
    one_logits, one = guided((0, 1, 2), empty)
    split_logits, split = guided((0, 2), recorded((0, 2)))
    own_logits, _ = unguided(t.tokens, t.fed, small.routes(t))
    gap, without = (np.median(np.abs(other - one_logits)[t.fed]) for other in (split_logits, own_logits))
    assert gap < 0.5 * without
    for site, counts in split.guided.items():
        merged = one.guided[site]
        assert np.array_equal(counts.guided_rows, merged.guided_rows[[0, 2]]) and counts.guided_rows.min() > 0
        assert merged.guided_rows[1] == 0 and merged.unguided_rows[1] == merged.guided_rows[0]
        assert not counts.unguided_rows.any()
        for out in (one, split):
            used, recorded_codes = out.every[site].used, t.audit[site]
            # A guided row has the scales of its record, whatever its input: each layer was given its own.
            assert np.array_equal(used.scales[[0, 2]][:, t.fed], recorded_codes.scales[[0, 2]][:, t.fed])
            assert (
                not np.array_equal(used.scales[1][t.fed], recorded_codes.scales[1][t.fed])
                or site != "down_input"
            )
            assert np.array_equal(used.words[0][t.fed], recorded_codes.words[0][t.fed])


def test_guided_layers_reproduce_the_rollouts_codes():
    """Every site guided: the trainer's codes are the rollout's, and only a few of its own roundings are overruled."""
    t = small.rollout("trace_all_sites")
    _, out = guided((0, 1, 2), recorded((0, 1, 2)))
    for site, audit in out.every.items():
        assert np.array_equal(audit.used.words[:, t.fed], t.audit[site].words[:, t.fed])
        assert (out.guided[site].overruled <= 0.05 * out.guided[site].values).all()


def test_identity_through_the_model():
    """A record of the trainer's own codes changes nothing: no value is overruled, the codes are the same."""
    t = small.rollout("trace_all_sites")
    everywhere = (0, 1, 2)
    spec = GuidanceSpec(layers=everywhere, sites=("expert_input", "down_input", "key", "value"))
    routes = small.routes(t)
    own_logits, own = unguided(t.tokens, t.fed, routes)
    codes = {site: audit.used for site, audit in own.every.items()}
    record = rerecord(dataclasses.replace(t, audit=codes), spec).record.sites
    logits, out = guided(everywhere, record)
    for site, counts in out.guided.items():
        assert counts.overruled.sum() == 0 and counts.values.min() > 0
        assert np.array_equal(out.every[site].used.words[:, t.fed], codes[site].words[:, t.fed])
        assert np.array_equal(out.every[site].used.scales[:, t.fed], codes[site].scales[:, t.fed])
    np.testing.assert_allclose(logits[t.fed], own_logits[t.fed], atol=0.02)


@functools.partial(jax.jit, static_argnums=0)
def loss_and_gradients(model, params, tokens, fed, routes, sites):
    def loss(params):
        numerics = FakeQuantNumerics(plan=QuantPlan())
        logits, _ = forward(model, params, tokens, fed, (0, 1, 2), routes, sites, numerics=numerics)
        logprobs = jax.nn.log_softmax(logits, axis=-1)[..., 3]
        return jnp.sum(jnp.where(fed, logprobs, 0.0))

    return jax.value_and_grad(loss)(params)


def test_remat_gives_the_same_loss_and_gradients():
    t, sites = small.rollout("trace_all_sites"), recorded((0, 1, 2))
    routes = small.routes(t)
    args = (small.masters()[1], t.tokens, t.fed, routes, sites)
    loss, grads = loss_and_gradients(MODEL, *args)
    again, regrads = loss_and_gradients(dataclasses.replace(MODEL, remat=True), *args)
    np.testing.assert_allclose(again, loss, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(regrads), strict=True):
        assert np.isfinite(a).all() and np.any(np.asarray(a))
        np.testing.assert_allclose(b, a, rtol=1e-2, atol=1e-2 * np.abs(a).max())


def test_embedding_gradients_sum_in_fp32():
    """A token that occurs 512 times gets the sum of 512 gradients; BF16 sums would stop growing on the way."""
    model = dataclasses.replace(MODEL, vocab_size=512, num_layers=1)
    graphdef, params = small.masters(model)
    moe, attention = params["moe"], params["attention"]
    for weight in (moe["down"], attention["output"]):  # layers that add nothing: each row is on its own
        weight.set_value(jnp.zeros_like(weight.get_value()))
    table = params["embedding"]
    table.set_value(jnp.broadcast_to(table.get_value()[:1], table.get_value().shape))
    direction = np.random.default_rng(0).standard_normal((4, 128, model.hidden_size))

    def loss(params, tokens):
        positions = jnp.broadcast_to(jnp.arange(128, dtype=jnp.int32), tokens.shape)
        out = nnx.merge(graphdef, params)(tokens, positions, positions >= 0, numerics=Bf16Numerics())
        return jnp.sum(out.hidden.astype(jnp.float32) * direction)

    gradient = jax.jit(jax.grad(loss))
    each = gradient(params, jnp.arange(512, dtype=jnp.int32).reshape(4, 128))["embedding"].get_value()
    once = gradient(params, jnp.zeros((4, 128), jnp.int32))["embedding"].get_value()
    each = np.asarray(each, np.float64)
    expected = each.sum(axis=0)
    np.testing.assert_allclose(once[0], expected, atol=1e-5 * np.abs(each).sum(axis=0).max())
