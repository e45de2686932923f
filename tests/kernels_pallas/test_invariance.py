"""Kernels in invariant mode: a row's bits depend neither on the batch it is in nor on its place there.

XLA's GEMMs promise no such thing: the reference is left out.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.decode_attention import attention
from kernels_pallas.formats import MXFP4, NVFP4
from kernels_pallas.grouped_matmul import grouped_matmul
from kernels_pallas.grouped_matmul.api import IMPLEMENTATIONS
from kernels_pallas.kv_cache import KVCache
from kernels_pallas.matmul import matmul
from kernels_pallas.target import interpreted
from tests.kernels_pallas.jitted import quantize
from tests.kernels_pallas.serving import served

BATCHES = (1, 3, 16, 64, 257)
INTERPRETED = (1, 3, 16)  # kernels that are interpreted here are slow
FORMATS = pytest.mark.parametrize("format", [None, NVFP4, MXFP4], ids=["bf16", "nvfp4", "mxfp4"])


@pytest.fixture(params=sorted(set(IMPLEMENTATIONS) - {"reference"}), scope="module")
def implementation(request):
    return request.param


@pytest.fixture(scope="module")
def batches(implementation):
    return INTERPRETED if implementation == "pallas_tpu" and interpreted() else BATCHES


def weight(rng, format, *shape):
    w = jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
    return w if format is None else quantize(w, format, axis=-2, row_axes=(-2, -1))


def rows_of(rng, count, width):
    return jnp.asarray(rng.standard_normal((count, width)), jnp.bfloat16)


def places(rng, batch):
    return sorted({0, batch - 1, int(rng.integers(batch))})


@FORMATS
def test_a_row_of_a_matmul(implementation, batches, rng, format):
    run = served(implementation, jax.jit(functools.partial(matmul, implementation=implementation)))
    w, row = weight(rng, format, 4096, 384), rows_of(rng, 1, 4096)
    expected = np.asarray(run(row, w))[0]
    for batch in batches:
        for place in places(rng, batch):
            x = rows_of(rng, batch, 4096).at[place].set(row[0])
            np.testing.assert_array_equal(
                np.asarray(run(x, w))[place], expected, err_msg=f"{place} of {batch}"
            )


@FORMATS
def test_a_row_of_a_group(implementation, batches, rng, format):
    run = jax.jit(functools.partial(grouped_matmul, activation="swiglu", implementation=implementation))
    run = served(implementation, run)
    experts, k = 4, 512
    w, row = weight(rng, format, experts, k, 256), rows_of(rng, 1, k)
    expected = np.asarray(run(row, w, jnp.int32([0, 0, 1, 0])))[0]
    for batch in batches:
        for place in places(rng, batch):
            before = int(rng.integers(place + 1))  # rows of the groups before
            sizes = jnp.int32([before, 0, batch - before, 0])
            x = rows_of(rng, batch, k).at[place].set(row[0])
            np.testing.assert_array_equal(
                np.asarray(run(x, w, sizes))[place], expected, err_msg=f"{place} of {batch}"
            )


@FORMATS
def test_a_sequence_of_decode_attention(implementation, batches, rng, format):
    run = served(implementation, jax.jit(functools.partial(attention, implementation=implementation)))

    def entries(batch, length):
        x = jnp.asarray(rng.standard_normal((batch, length, 2, 128)), jnp.bfloat16)
        return x if format is None else quantize(x, format)

    position, short = (1234, 1280) if batches is BATCHES else (200, 256)
    one = KVCache(k=entries(1, short), v=entries(1, short))
    q = jnp.asarray(rng.standard_normal((1, 1, 8, 128)), jnp.bfloat16)
    expected = np.asarray(run(q, one, jnp.int32([[position]])))[0]
    for batch in batches:
        length = short if batch > 16 else 3 * short  # nor on the length of the cache
        for place in places(rng, batch):
            others = KVCache(k=entries(batch, length), v=entries(batch, length))
            cache = jax.tree.map(lambda all, one, at=place: all.at[at, :short].set(one[0]), others, one)
            queries = jnp.asarray(rng.standard_normal((batch, 1, 8, 128)), jnp.bfloat16).at[place].set(q[0])
            positions = jnp.asarray(rng.integers(0, length, (batch, 1)), jnp.int32).at[place].set(position)
            out = np.asarray(run(queries, cache, positions))
            np.testing.assert_array_equal(out[place], expected, err_msg=f"{place} of {batch}")


@FORMATS
def test_a_chunk_of_prefill(implementation, rng, format):
    """Nor on the chunk that a token is in: 40 tokens at once, or in parts, some of which are padding."""
    run = served(implementation, jax.jit(functools.partial(attention, implementation=implementation)))

    def entries(batch):
        x = jnp.asarray(rng.standard_normal((batch, 256, 2, 128)), jnp.bfloat16)
        return x if format is None else quantize(x, format)

    one = KVCache(k=entries(1), v=entries(1))
    q = jnp.asarray(rng.standard_normal((1, 40, 8, 128)), jnp.bfloat16)
    positions = 150 + jnp.arange(40, dtype=jnp.int32)[None]
    expected = np.asarray(run(q, one, positions))
    padded = run(q, one, jnp.where(positions < 160, -1, positions))
    np.testing.assert_array_equal(np.asarray(padded)[:, 10:], expected[:, 10:])
    for cut in (2, 23):
        for part in (slice(cut), slice(cut, None)):
            out = np.asarray(run(q[:, part], one, positions[:, part]))
            np.testing.assert_array_equal(out, expected[:, part], err_msg=f"{part}")
    for batch in (3, 16):
        for place in places(rng, batch):
            others = KVCache(k=entries(batch), v=entries(batch))
            cache = jax.tree.map(lambda all, one, at=place: all.at[at].set(one[0]), others, one)
            queries = jnp.asarray(rng.standard_normal((batch, 40, 8, 128)), jnp.bfloat16).at[place].set(q[0])
            at = jnp.asarray(rng.integers(0, 256, (batch, 40)), jnp.int32).at[place].set(positions[0])
            np.testing.assert_array_equal(np.asarray(run(queries, cache, at))[place], expected[0])
