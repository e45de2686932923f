"""Gradients of the guided loss against finite differences of the straight-through surrogate, in float64.

The surrogate adds to every quantized tensor the rounding error of the base point, frozen, and keeps the routes: it is
smooth, equals the guided loss at the base point, and has the straight-through gradient as its true gradient.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from kernels_pallas import norms
from kernels_pallas.guided_round import guided_values
from kernels_pallas.quantize import dequantize, quantize_codes
from tests.trace_jax import small
from trace_jax.quant import SITES, FakeQuantNumerics, QuantPlan
from trace_jax.rl import RLConfig, Trainer
from trace_jax.rl.batch import replayed_routes
from trace_jax.rl.losses import policy_loss
from trace_jax.rollout import token_logprobs

MODEL = dataclasses.replace(small.MODEL, dtype="float64")
CONFIG = RLConfig(prompts=3, group_size=2, kl_coefficient=0.1, entropy_coefficient=0.01, temperature=0.7)
PLAN = QuantPlan()
LAYERS = tuple(range(MODEL.num_layers))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundingErrors(FakeQuantNumerics):
    """Reports rounded minus unrounded of every activation."""

    def collect(self, captured, valid, guided):
        return None, {
            site: guided_values(x, guide, self.plan.fp4) - x
            for site, (x, guide) in captured.items()
            if site in SITES
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrozenErrors:
    """x + frozen rounding error, with the errors in the place of records and weight guides."""

    def activation(self, site, x, guides):
        return x + guides[site], None

    def norm_activation(self, site, x, gain, eps, guides):
        h = norms.rms_norm(x, gain, eps)
        return h, *self.activation(site, h, guides)

    def expert_weight(self, name, w, guides, dtype):
        return w + guides[name]

    def collect(self, captured, valid, guided):
        return None, None


def expert_errors(params):
    moe = params["moe"]
    weights = {name: moe[name].get_value() for name in ("gate_up", "down")}
    return {
        name: dequantize(quantize_codes(w, PLAN.fp4, axis=-2, row_axes=(-2, -1)), w.dtype) - w
        for name, w in weights.items()
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    params: object
    gradients: object
    guided: float
    surrogate: object  # params -> loss


@pytest.fixture(scope="module")
def case():
    with jax.enable_x64(True):
        graphdef, params = small.masters(MODEL)
        params = jax.tree.map(lambda w: w.astype(jnp.float64), params)
        batch = jax.tree.map(jnp.asarray, small.batch("trace_all_sites"))
        reference = batch.rollout_logprobs - 0.3
        trainer = Trainer(
            graphdef,
            MODEL,
            CONFIG,
            optax.sgd(1.0),
            numerics=FakeQuantNumerics(plan=PLAN),
            spec=small.method("trace_all_sites").record_spec(MODEL),
        )

        def loss_of(logprobs, entropy):
            return policy_loss(
                logprobs,
                entropy,
                rollout=batch.rollout_logprobs,
                old=None,
                reference=jnp.asarray(reference),
                advantages=batch.advantages,
                mask=batch.sampled,
                normalizer=jnp.float32(batch.sampled.sum()),
                config=CONFIG,
            )[0]

        @jax.jit
        def guided(params):
            def loss(params):
                result = trainer.forward(params, batch, None)
                return loss_of(result.logprobs, result.entropy)

            capture = Trainer(
                graphdef, MODEL, CONFIG, optax.sgd(1.0), numerics=RoundingErrors(plan=PLAN), spec=trainer.spec
            )
            errors = capture.forward(params, batch, None).audit
            return jax.value_and_grad(loss)(params), (errors, expert_errors(params))

        (value, gradients), errors = guided(params)

        @jax.jit
        def surrogate(params, errors):
            model = nnx.merge(graphdef, params)
            out = model(
                batch.tokens,
                jnp.broadcast_to(jnp.arange(batch.tokens.shape[1], dtype=jnp.int32), batch.tokens.shape),
                batch.fed,
                numerics=FrozenErrors(),
                routes=replayed_routes(batch.routes),
                guides=errors[0],
                weight_guides=errors[1],
                guided_layers=LAYERS,
            )
            return loss_of(*token_logprobs(model.logits(out.hidden), batch.tokens, CONFIG.temperature))

        yield Case(
            params=params,
            gradients=gradients,
            guided=float(value),
            surrogate=lambda params: float(surrogate(params, errors)),
        )


def slope(case, direction, step=3e-6):
    """Central difference; its error falls with the square of the step, 4e-7 of the slope here."""

    def at(sign):
        return case.surrogate(jax.tree.map(lambda w, d: w + sign * step * d, case.params, direction))

    return (at(1) - at(-1)) / (2 * step)


def inner(a, b):
    return sum(float(jnp.sum(x * y)) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def direction(case, seed, only=None):
    rng = np.random.default_rng(seed)
    leaves, tree = jax.tree.flatten(case.params)
    drawn = [jnp.asarray(rng.standard_normal(w.shape) * (only in (None, i))) for i, w in enumerate(leaves)]
    return jax.tree.unflatten(tree, drawn)


def test_surrogate_is_the_guided_loss_at_the_base_point(case):
    with jax.enable_x64(True):
        assert abs(case.surrogate(case.params) - case.guided) < 1e-12
        assert all(leaf.dtype == jnp.float64 for leaf in jax.tree.leaves(case.gradients))


@pytest.mark.parametrize("seed", range(4))
def test_gradient_agrees_in_random_directions(case, seed):
    with jax.enable_x64(True):
        along = direction(case, seed)
        expected = slope(case, along)
        assert abs(expected) > 1e-4
        np.testing.assert_allclose(inner(case.gradients, along), expected, rtol=1e-6)


def test_gradient_agrees_for_every_parameter(case):
    with jax.enable_x64(True):
        paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(case.params)]
        for index, path in enumerate(paths):
            along = direction(case, index, only=index)
            found, expected = inner(case.gradients, along), slope(case, along)
            assert abs(expected) > 1e-7, path
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-10, err_msg=path)


def test_a_wrong_gradient_would_be_seen(case):
    """The tolerance is far below what one missing site's gradient would make: here, the router's."""
    with jax.enable_x64(True):
        along = direction(case, 0)
        leaves = jax.tree_util.tree_leaves_with_path(case.gradients)
        router = [i for i, (path, _) in enumerate(leaves) if "router" in jax.tree_util.keystr(path)]
        assert len(router) == 1
        part = float(jnp.sum(leaves[router[0]][1] * jax.tree.leaves(along)[router[0]]))
        assert abs(part) > 1e-4 * abs(inner(case.gradients, along))
