"""Fp4Array and Fp4Codes as pytrees: transformations, sharding, donation, checkpoints, and the checks on them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp

from kernels_pallas.arrays import Fp4Array, Fp4Codes
from kernels_pallas.formats import MXFP4, NVFP4
from kernels_pallas.quantize import dequantize, quantize

FORMATS = pytest.mark.parametrize("format", [NVFP4, MXFP4], ids=lambda f: f.name)
VALUES = jax.jit(dequantize)


@functools.cache
def weights(format):
    w = np.random.default_rng(0).standard_normal((4, 64, 16)).astype(np.float32)
    return jax.jit(lambda w: quantize(w, format, axis=-2, row_axes=(-2, -1)))(
        w * np.float32([1, 9, 0.1, 5])[:, None, None]
    )


def assert_same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


@FORMATS
def test_shape_and_bytes(format):
    w = weights(format)
    assert w.shape == (4, 64, 16) and w.ndim == 3
    assert w.nbytes == w.words.nbytes + w.scales.nbytes + w.row_exponent.nbytes
    assert w.words.nbytes * 2 == 4 * 64 * 16 and w.scales.shape == (4, 64 // format.block, 16)


@FORMATS
def test_pack_and_unpack_invert_each_other(format):
    w = weights(format)

    @jax.jit
    def chain(w):
        codes = w.unpack()
        rows = Fp4Array.from_codes(codes)
        again = Fp4Array.from_codes(codes, -2), Fp4Array.from_codes(rows.unpack())
        return codes, rows, *again, dequantize(rows)

    codes, rows, weights_again, rows_again, values = chain(w)
    assert codes.shape == (4, 16, 64) and codes.row_exponent.shape == (4, 1)
    assert rows.axis == -1 and rows.shape == (4, 16, 64)
    assert_same(weights_again, w)
    assert_same(rows_again, rows)
    np.testing.assert_array_equal(np.asarray(values), np.asarray(VALUES(w)).swapaxes(1, 2))


@FORMATS
def test_jit_scan_and_vmap_see_slices(format):
    w = weights(format)
    expected = np.asarray(VALUES(w))
    assert_same(jax.jit(lambda a: a)(w), w)
    _, scanned = jax.jit(lambda a: jax.lax.scan(lambda _, a: (None, dequantize(a)), None, a))(w)
    np.testing.assert_array_equal(np.asarray(scanned), expected)
    np.testing.assert_array_equal(np.asarray(jax.jit(jax.vmap(dequantize))(w)), expected)
    one = jax.tree.map(lambda leaf: leaf[2], w)
    assert one.shape == (64, 16)
    np.testing.assert_array_equal(np.asarray(VALUES(one)), expected[2])
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), one, one)
    assert stacked.shape == (2, 64, 16)


@FORMATS
def test_vmap_of_quantize_equals_quantize(format, rng):
    x = jnp.asarray(rng.standard_normal((3, 4, 64)), jnp.float32)
    mapped = jax.jit(jax.vmap(lambda x: quantize(x, format)))(x)
    assert_same(mapped, jax.jit(lambda x: quantize(x, format))(x))


@FORMATS
def test_shard_map_over_one_device(format):
    w = weights(format)
    mesh = jax.make_mesh((1,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec("expert")
    f = jax.shard_map(dequantize, mesh=mesh, in_specs=(spec,), out_specs=spec)
    np.testing.assert_array_equal(np.asarray(jax.jit(f)(w)), np.asarray(VALUES(w)))
    # Specs and shardings take the places of leaves.
    shardings = jax.tree.map(lambda _: NamedSharding(mesh, spec), w)
    placed = jax.device_put(w, shardings)
    assert placed.words.sharding.spec == spec
    specs = Fp4Array(words=spec, scales=spec, row_exponent=spec, format=format, axis=-2)
    f = jax.shard_map(dequantize, mesh=mesh, in_specs=(specs,), out_specs=spec)
    np.testing.assert_array_equal(np.asarray(jax.jit(f)(placed)), np.asarray(VALUES(w)))


def test_donation_reuses_every_buffer():
    w = jax.tree.map(jnp.copy, weights(NVFP4))
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(w)]
    bump = jax.jit(lambda a: jax.tree.map(lambda leaf: leaf + 1, a), donate_argnums=0)
    out = bump(w)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(w))
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(out)] == pointers


@FORMATS
def test_orbax_round_trip_with_an_abstract_template(format, tmp_path):
    state = {"experts": weights(format), "step": jnp.int32(3)}
    ocp.save(tmp_path / "checkpoint", state)
    template = jax.eval_shape(lambda: state)
    assert isinstance(template["experts"].words, jax.ShapeDtypeStruct)
    assert template["experts"].shape == (4, 64, 16)
    assert_same(ocp.load(tmp_path / "checkpoint", template), state)


def test_leaves_may_be_anything_inside_a_transformation():
    w = weights(NVFP4)
    for replacement in (None, object(), "name", 3, np.zeros(0, jax.dtypes.float0)):
        mapped = jax.tree.map(lambda _, r=replacement: r, w)
        assert mapped.format is NVFP4 and mapped.axis == -2
    assert jax.tree.map(lambda a, b: bool((a == b).all()), w, w).words is True
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path({"w": w})]
    assert paths == ["['w'].words", "['w'].scales", "['w'].row_exponent"]


def test_static_fields_are_part_of_the_structure():
    a, b = weights(NVFP4), weights(MXFP4)
    assert jax.tree.structure(a) != jax.tree.structure(b)
    with pytest.raises(ValueError, match=r"."):
        jax.tree.map(lambda x, y: x, a, b)


def test_grad_passes_through_a_function_that_also_takes_fp4():
    w = weights(NVFP4)
    grad = jax.jit(jax.grad(lambda x, w: (x * dequantize(w, jnp.float32)).sum()))(jnp.ones(w.shape), w)
    np.testing.assert_array_equal(np.asarray(grad), np.asarray(VALUES(w), np.float32))


def test_construction_checks_dtypes_and_shapes():
    w = weights(NVFP4)
    parts = {
        "words": w.words,
        "scales": w.scales,
        "row_exponent": w.row_exponent,
        "format": NVFP4,
        "axis": -2,
    }
    with pytest.raises(TypeError, match="words is int32; expected uint32"):
        Fp4Array(**parts | {"words": w.words.astype(jnp.int32)})
    with pytest.raises(TypeError, match="scales is bfloat16; expected uint8"):
        Fp4Array(**parts | {"scales": w.scales.astype(jnp.bfloat16)})
    with pytest.raises(TypeError, match="row_exponent is float32; expected uint8"):
        Fp4Array(**parts | {"row_exponent": w.row_exponent.astype(jnp.float32)})
    with pytest.raises(ValueError, match=r"scales has shape \(4, 4, 16\); expected \(4, 2, 16\)"):
        Fp4Array(**parts | {"format": MXFP4})
    with pytest.raises(ValueError, match=r"row_exponent has shape \(3,\)"):
        Fp4Array(**parts | {"row_exponent": w.row_exponent[:3]})
    with pytest.raises(ValueError, match="axis is 1; expected -1"):
        Fp4Array(**parts | {"axis": 1})
    with pytest.raises(ValueError, match="size 24, not a multiple of the nvfp4 block of 16"):
        Fp4Codes(
            codes=jnp.zeros((2, 24), jnp.uint8),
            scales=jnp.zeros((2, 1), jnp.uint8),
            row_exponent=jnp.zeros(2, jnp.uint8),
            format=NVFP4,
        )


def test_ops_check_what_a_transformation_built():
    broken = jax.tree.map(lambda leaf: leaf.astype(jnp.uint8), weights(NVFP4))
    with pytest.raises(TypeError, match="words is uint8"):
        dequantize(broken)
