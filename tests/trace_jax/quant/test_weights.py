"""Expert weights: what the trainer rounds to is what the rollout holds, after a sync and between two."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kernels_pallas.arrays import Fp4Array
from kernels_pallas.formats import round_to_bf16, unpack_codes
from kernels_pallas.quantize import dequantize, quantize_codes
from tests.trace_jax import small
from trace_jax.models import Transformer
from trace_jax.quant import Bf16Numerics, FakeQuantNumerics, QuantPlan, expert_guides, quantize_weight

FORMATS = ("nvfp4", "mxfp4")


def expert_masters(params):
    return {
        "gate_up": params["moe"]["gate_up"].get_value(),
        "down": params["moe"]["down"].get_value(),
    }


pack = jax.jit(quantize_weight, static_argnums=1)


@functools.partial(jax.jit, static_argnums=1)
def weight_codes(w, plan):
    return quantize_codes(w, plan.fp4, axis=-2, row_axes=(-2, -1))


@functools.partial(jax.jit, static_argnums=(2, 3))
def trainer_weights(masters, guides, plan, dtype):
    """The trainer's operands, layer by layer under scan as in the model."""
    numerics = FakeQuantNumerics(plan=plan)

    def layer(_, inputs):
        w, guide = inputs
        return None, {name: numerics.expert_weight(name, w[name], guide, dtype) for name in w}

    return jax.lax.scan(layer, None, (masters, guides))[1]


@pytest.mark.parametrize("format", FORMATS)
def test_trainer_codes_equal_the_rollouts_after_every_sync(format):
    plan = QuantPlan(format=format)
    params = small.masters()[1]
    for version, relative in enumerate((0.0, 1e-4, 1e-2, 0.3)):
        params = small.perturbed(params, relative, version)
        packed = expert_guides(small.sync(params, plan, "bfloat16"))
        masters = expert_masters(params)
        assert set(packed) == set(masters)
        operands = trainer_weights(masters, None, plan, "bfloat16")
        for name, w in masters.items():
            codes = weight_codes(w, plan)
            assert np.array_equal(codes.codes, unpack_codes(packed[name].words, -2))
            assert np.array_equal(codes.scales, packed[name].scales)
            assert np.array_equal(codes.row_exponent, packed[name].row_exponent)
            assert operands[name].dtype == jnp.bfloat16
            assert np.array_equal(operands[name], dequantize(packed[name]))
            # Masters are rounded to BF16 before they are quantized.
            assert small.equal_trees(pack(round_to_bf16(w), plan), packed[name])


def test_only_experts_are_packed_and_all_else_is_bf16():
    params = small.masters()[1]
    rollout = small.sync(params, QuantPlan(), "bfloat16")
    for (path, master), (_, variable) in zip(
        nnx.to_flat_state(params), nnx.to_flat_state(rollout), strict=True
    ):
        value, w = variable.get_value(), master.get_value()
        if path[-1] in ("gate_up", "down"):
            assert isinstance(value, Fp4Array) and value.shape == w.shape
            assert value.nbytes < 0.6 * w.size  # really 4 bits, plus scales
        else:
            assert value.dtype == jnp.bfloat16 and np.array_equal(value.astype(jnp.float32), round_to_bf16(w))
            assert not np.array_equal(value.astype(jnp.float32), w), f"{path} cannot show a missing rounding"


def test_sync_copies_so_that_masters_can_be_donated():
    params = small.masters(small.dataclasses.replace(small.MODEL, dtype="float32"))[1]
    rollout = small.sync(params, QuantPlan(), "float32")
    theirs = {id(leaf) for leaf in jax.tree.leaves(params)}
    pointers = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(params)}
    for leaf in jax.tree.leaves(rollout):
        assert id(leaf) not in theirs and leaf.unsafe_buffer_pointer() not in pointers


@functools.partial(jax.jit, static_argnums=(0, 1))
def forward(graphdef, numerics, params, tokens):
    model: Transformer = nnx.merge(graphdef, params)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    out = model(tokens, positions, jnp.ones(tokens.shape, bool), numerics=numerics)
    return out.hidden, model.logits(out.hidden), out.routes


def test_no_weight_is_used_unrounded(rng):
    graphdef, params = small.masters()
    tokens = jnp.asarray(rng.integers(0, small.MODEL.vocab_size, (3, 7)), jnp.int32)
    rounded = small.sync(params, None, "bfloat16")
    found = forward(graphdef, Bf16Numerics(), params, tokens)
    expected = forward(graphdef, Bf16Numerics(), rounded, tokens)
    assert small.equal_trees(found, expected)


@pytest.mark.parametrize(
    "numerics", [Bf16Numerics(), FakeQuantNumerics(plan=QuantPlan())], ids=["bf16", "fake_quant"]
)
def test_masters_of_the_same_bf16_value_give_the_same_bits(rng, numerics):
    graphdef, params = small.masters()
    tokens = jnp.asarray(rng.integers(0, small.MODEL.vocab_size, (3, 7)), jnp.int32)
    same = jax.tree.map(round_to_bf16, params)
    assert not small.equal_trees(params, same)
    assert small.equal_trees(
        forward(graphdef, numerics, params, tokens), forward(graphdef, numerics, same, tokens)
    )


@pytest.mark.parametrize("format", FORMATS)
def test_guided_weights_change_nothing_right_after_a_sync(format):
    plan, masters = QuantPlan(format=format), expert_masters(small.masters()[1])
    guides = expert_guides(small.sync(small.masters()[1], plan, "bfloat16"))
    assert small.equal_trees(
        trainer_weights(masters, guides, plan, "bfloat16"), trainer_weights(masters, None, plan, "bfloat16")
    )


@pytest.mark.parametrize("format", FORMATS)
def test_guided_weights_keep_the_rollouts_codes_after_small_moves(format):
    plan, params = QuantPlan(format=format), small.masters()[1]
    guides = expert_guides(small.sync(params, plan, "bfloat16"))
    moved = expert_masters(small.perturbed(params, 3e-3, 11))
    guided, own = (
        trainer_weights(moved, guides, plan, "bfloat16"),
        trainer_weights(moved, None, plan, "bfloat16"),
    )
    for name, packed in guides.items():
        rollout = dequantize(packed)
        assert np.array_equal(guided[name], rollout)
        assert 1e-3 < np.mean(np.asarray(own[name] != rollout)) < 0.2  # what own rounding would have flipped


def test_weight_gradient_passes_straight_through(rng):
    plan, params = QuantPlan(), small.masters()[1]
    w = expert_masters(params)["down"][0]
    factor = jnp.asarray(rng.integers(-3, 4, w.shape), jnp.bfloat16)
    guide = {
        "down": jax.tree.map(
            lambda leaf: leaf[0], expert_guides(small.sync(params, plan, "bfloat16"))["down"]
        )
    }
    for guides in (None, guide):

        @jax.jit
        def product(w, guides=guides):
            rounded = FakeQuantNumerics(plan=plan).expert_weight("down", w, guides, "bfloat16")
            return jnp.sum((rounded * factor).astype(jnp.float32))

        grad = jax.grad(product)(w)
        assert np.array_equal(grad, factor.astype(jnp.float32))
