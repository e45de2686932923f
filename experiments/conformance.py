"""Compare an implementation with the numeric contract's vectors, bit for bit.

    python -m experiments.conformance --vectors tests/data/fp4_contract.npz [--implementation NAME]

Every family and array of the file is computed eagerly and under jit. Prints the number of differing elements
per family and array, and exits with 1 if there is any.
"""

import argparse
import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kernels_pallas.arrays import Fp4Array, Fp4Codes
from kernels_pallas.formats import Fp4Format, get_format, pack_bits
from kernels_pallas.guided_round import MODES, Guide, compact_scales, guided_round, guided_values
from kernels_pallas.guided_round.api import IMPLEMENTATIONS as GUIDED_ROUND
from kernels_pallas.implementations import NotServedError
from kernels_pallas.quantize import dequantize, quantize
from kernels_pallas.quantize.api import IMPLEMENTATIONS as QUANTIZE

Results = dict[str, jax.Array]


class Row(NamedTuple):
    """Elements of one answer, and how many differ."""

    name: str
    elements: int
    eager: int
    jit: int


def quantized(x: jax.Array, format: Fp4Format, implementation: str | None) -> Results:
    """The arrays that the file holds for an input."""
    packed = quantize(x, format, implementation=implementation)
    codes = packed.unpack()
    # MXFP4 has no row scale: its exponent byte is 127 (2^0) here and 0 (unused) in the file.
    row_exponent = codes.row_exponent if format.has_row_scale else codes.row_exponent - 127
    return {
        "codes": codes.codes,
        "scales": codes.scales,
        "row_exponent": row_exponent,
        "dequantized": dequantize(packed, jnp.float32),
    }


def guided(trainer: jax.Array, record: Fp4Array, implementation: str | None) -> Results:
    """The arrays that the file holds for the trainer's input under a rollout's record."""
    common = {
        "row_exponent": record.row_exponent,
        "mantissa": pack_bits(record.unpack().codes & 1),
        "words": record.words,
        "valid": jnp.ones(record.row_exponent.shape, bool),
    }
    results = {}
    for mode in MODES:
        guide = Guide(scales=record.scales, mode=mode, **common)
        results[f"guided/{mode}_codes"] = guided_codes(trainer, guide, record.format, implementation).codes
    guide = Guide(scales=compact_scales(record.scales), mode="mantissa", compact=True, **common)
    rounded = guided_codes(trainer, guide, record.format, implementation)
    results["guided/compact_scales"] = rounded.scales
    results["guided/compact_mantissa_codes"] = rounded.codes
    return results


def guided_codes(x: jax.Array, guide: Guide, format: Fp4Format, implementation: str | None) -> Fp4Codes:
    """Of `guided_round`, the reference's for an implementation that makes values alone; 255, which is no code, wherever
    the value that a trainer gets from `guided_values` is not the code's.
    """
    makes_codes = implementation in (None, *GUIDED_ROUND)
    codes = guided_round(x, guide, format, implementation=implementation if makes_codes else "reference")
    values = guided_values(x, guide, format, implementation=implementation)
    expected = dequantize(codes, x.dtype)
    bits, expected_bits = (lax.bitcast_convert_type(a, jnp.uint16) for a in (values, expected))
    same = (bits == expected_bits) | (jnp.isnan(values) & jnp.isnan(expected))
    return dataclasses.replace(codes, codes=jnp.where(same, codes.codes, jnp.uint8(255)))


JITTED = (
    jax.jit(quantized, static_argnames=("format", "implementation")),
    jax.jit(guided, static_argnames="implementation"),
    jax.jit(quantize, static_argnames=("format", "implementation")),
)


def rms_norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    """RMSNorm in float32 with a BF16 result: what usually feeds a quantizer."""
    x = x.astype(jnp.float32)
    return (x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * weight[None]).astype(jnp.bfloat16)


def fused_against_split(format: Fp4Format, implementation: str | None) -> tuple[int, int]:
    """Codes, and those that differ, of RMSNorm and quantize compiled as one program and as two.

    The BF16 rounding between the two must survive their fusion. Both programs quantize the norm that the fused one
    returns, so that only the seam is compared and not the norm's own order of summation.
    """
    key_x, key_w = jax.random.split(jax.random.key(0))
    x = jax.random.normal(key_x, (64, 1024)) * 3.0
    weight = 1.0 + 0.1 * jax.random.normal(key_w, (1024,))

    def fused(x, weight):
        normed = rms_norm(x, weight)
        return normed, quantize(normed, format, implementation=implementation)

    normed, one = jax.jit(fused)(x, weight)
    two = jax.jit(lambda a: quantize(a, format, implementation=implementation))(normed)
    return x.size, differences(one.unpack().codes, two.unpack().codes)


def differences(actual: jax.Array, expected: jax.Array | np.ndarray) -> int:
    """Elements that are not the same bits; any two NaNs count as the same."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return max(actual.size, expected.size)
    if actual.dtype == np.float32:
        same = actual.view(np.uint32) == expected.view(np.uint32)
        return int((~(same | (np.isnan(actual) & np.isnan(expected)))).sum())
    return int((actual != expected).sum())


def answers(vectors: Mapping[str, np.ndarray], prefix: str, implementation: str | None, jit: bool) -> Results:
    """Everything that the file holds about the input at `prefix`, computed."""
    quantized_, guided_, quantize_ = JITTED if jit else (quantized, guided, quantize)
    format = get_format(prefix.split("/")[0])

    def load(name: str) -> jax.Array:
        return lax.bitcast_convert_type(jnp.asarray(vectors[f"{prefix}/{name}"]), jnp.bfloat16)

    x = load("x_bf16")
    results = quantized_(x, format=format, implementation=implementation)
    if f"{prefix}/guided/x_bf16" in vectors:
        record = quantize_(x, format=format, implementation=implementation)
        results |= guided_(load("guided/x_bf16"), record, implementation=implementation)
    return results


def compare(vectors: Mapping[str, np.ndarray], implementation: str | None) -> list[Row]:
    """A row for every answer in the file. ValueError for an array that this program cannot compute."""
    rows = []
    for prefix in [name.removesuffix("/codes") for name in vectors if name.endswith("/codes")]:
        eager, jitted = (answers(vectors, prefix, implementation, jit) for jit in (False, True))
        for name in [n.removeprefix(f"{prefix}/") for n in vectors if n.startswith(f"{prefix}/")]:
            if name.endswith("x_bf16"):
                continue
            if name not in eager:
                raise ValueError(
                    f"{prefix}/{name} is no array of the contract; expected one of {sorted(eager)}"
                )
            expected = vectors[f"{prefix}/{name}"]
            counts = (differences(results[name], expected) for results in (eager, jitted))
            rows.append(Row(f"{prefix}/{name}", expected.size, *counts))
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--vectors", required=True, help="npz file of inputs and exact answers")
    parser.add_argument(
        "--implementation", default=None, help="implementation of the ops; default by platform"
    )
    args = parser.parse_args(argv)
    if not Path(args.vectors).is_file():
        parser.error(f"--vectors {args.vectors}: no such file")
    if args.implementation not in (None, *QUANTIZE):
        parser.error(f"--implementation {args.implementation}: expected one of {', '.join(sorted(QUANTIZE))}")

    with np.load(args.vectors) as file:
        try:
            rows = compare(dict(file), args.implementation)
        except NotServedError as error:
            parser.error(str(error))
    for name in ("nvfp4", "mxfp4"):
        elements, count = fused_against_split(get_format(name), args.implementation)
        rows.append(Row(f"{name}/fused_rmsnorm/codes", elements, 0, count))

    device = jax.devices()[0]
    print(f"implementation {args.implementation or 'default'} on {device.platform} ({device.device_kind})")
    print(f"{'array':<52} {'elements':>9} {'eager':>6} {'jit':>6}")
    for row in rows:
        print(f"{row.name:<52} {row.elements:>9} {row.eager:>6} {row.jit:>6}")
    total = sum(row.eager + row.jit for row in rows)
    print(f"{len(rows)} arrays, {sum(row.elements for row in rows)} elements, {total} differences")
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main())
