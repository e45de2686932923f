"""Cache writes on NVIDIA GPUs: keys and values in one launch, in place. The kernels are in `triton_kernels`."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Bool, Float, Int32

from kernels_pallas import triton_bridge
from kernels_pallas.formats import MXFP4, NVFP4, Fp4Format
from kernels_pallas.kv_cache.cache import AppendedRows, KVCache, init_cache
from kernels_pallas.quantize.triton import (
    fp4_array,
    fp4_shapes,
    launch_options,
    rounded_rows,
    row_refusal,
    small_tile,
)
from kernels_pallas.triton_bridge import CompileCase

COPIED = 8  # BF16 values that a thread copies at a time


def refusal(
    cache: KVCache,
    k: jax.Array | jax.ShapeDtypeStruct,
    v: jax.Array | jax.ShapeDtypeStruct,
    positions: jax.Array | jax.ShapeDtypeStruct,
    valid: jax.Array | jax.ShapeDtypeStruct,
    *,
    layer: jax.Array | jax.ShapeDtypeStruct | None = None,
    page_table: jax.Array | jax.ShapeDtypeStruct | None = None,
) -> str | None:
    """Why this kernel does not serve these arguments, None if it does."""
    if cache.format is None:
        if cache.k.dtype != jnp.bfloat16:
            return f"it writes bfloat16 or FP4, not {cache.k.dtype}"
        if k.shape[-1] % COPIED:
            return f"head dimension {k.shape[-1]} is not a multiple of {COPIED}"
    return row_refusal(k)


def append(
    cache: KVCache,
    k: Float[Array, "b t h d"],
    v: Float[Array, "b t h d"],
    positions: Int32[Array, "b t"],
    valid: Bool[Array, "b t"],
    *,
    layer: Int32[Array, ""] | None = None,
    page_table: Int32[Array, "b pages"] | None = None,
) -> tuple[KVCache, AppendedRows | None, AppendedRows | None]:
    """See `api.append`."""
    from kernels_pallas.kv_cache.triton_kernels import append_bf16_kernel, append_fp4_kernel

    format, lead = cache.format, k.shape[:-1]
    old, tree = jax.tree.flatten(cache)
    outputs = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in old]
    k, v = (_rounded(x, format) for x in (k, v))
    rows, size = k.shape
    block = COPIED if format is None else format.block
    if format is not None:
        outputs += 2 * fp4_shapes(rows, size, format, True)
    options = launch_options(rows, size, block, small_tile(rows, size, block))
    options["grid"] = (*options["grid"], 2)  # keys and values
    # What is not given is not read: any array stands in its place.
    arrays = [
        k,
        v,
        positions,
        valid,
        positions if page_table is None else page_table,
        positions if layer is None else layer,
    ]
    new = triton_bridge.call(
        append_bf16_kernel if format is None else append_fp4_kernel,
        *arrays,
        *old,
        rows,
        outputs=outputs,
        aliases={len(arrays) + i: i for i in range(len(old))},
        TOKENS=positions.shape[1],
        HEADS=lead[-1],
        LENGTH=cache.length,
        SEQUENCES=cache.k.shape[-4],
        PAGES=0 if page_table is None else page_table.shape[1],
        LAYERS=0 if layer is None else cache.k.shape[0],
        **options,
    )
    cache = jax.tree.unflatten(tree, new[: len(old)])
    if format is None:
        return cache, None, None
    appended = (new[len(old) :][:4], new[len(old) :][4:])
    return cache, *((fp4_array(leaves, lead, format), bits.reshape(*lead, -1)) for *leaves, bits in appended)


def _rounded(x: Float[Array, "b t h d"], format: Fp4Format | None) -> BFloat16[Array, "rows d"]:
    # To an FP4 cache BF16 rounding is part of the numeric contract, to a BF16 cache it is a cast.
    if format is None:
        return x.astype(jnp.bfloat16).reshape(-1, x.shape[-1])
    return rounded_rows(x)


def compile_cases() -> Iterator[CompileCase]:
    """Both kernels at decode and prefill, and for pages of stacked layers."""

    def shape(*shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype)

    for format in (None, NVFP4, MXFP4):
        name = f"append_{'bf16' if format is None else format.name}"
        for batch, tokens, heads, dim in (
            (256, 1, 4, 128),
            (8, 2048, 4, 128),
            (16, 1, 8, 64),
            (3, 5, 2, 256),
        ):
            entries = shape(batch, tokens, heads, dim, dtype=jnp.bfloat16)
            arrays = (entries, entries, shape(batch, tokens), shape(batch, tokens, dtype=jnp.bool_))
            cache = jax.eval_shape(functools.partial(init_cache, batch, 8192, heads, dim, format))
            yield CompileCase(f"{name}_{batch}x{tokens}x{heads}x{dim}", append, (cache, *arrays))
        pages = jax.eval_shape(functools.partial(init_cache, 1000, 64, heads, dim, format, layers=4))
        yield CompileCase(
            f"{name}_paged_layered",
            lambda *arguments: append(*arguments[:-2], layer=arguments[-2], page_table=arguments[-1]),
            (pages, *arrays, shape(), shape(batch, 20)),
        )
