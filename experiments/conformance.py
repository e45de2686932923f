"""Compare an implementation with the numeric contract's vectors, bit for bit.

    python -m experiments.conformance --vectors tests/data/fp4_contract.npz [--implementation NAME]

Every family and array of the file is computed eagerly and under jit. Prints the number of differing elements per
family and array, and exits with 1 if there is any.
"""

import argparse
import sys
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kernels_pallas.arrays import Fp4Array
from kernels_pallas.formats import Fp4Format, get_format, pack_bits
from kernels_pallas.guided_round import MODES, Guide, compact_scales, guided_round
from kernels_pallas.quantize import dequantize, quantize

Results = dict[str, jax.Array]


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
        rounded = guided_round(trainer, guide, record.format, implementation=implementation)
        results[f"guided/{mode}_codes"] = rounded.codes
    guide = Guide(scales=compact_scales(record.scales), mode="mantissa", compact=True, **common)
    rounded = guided_round(trainer, guide, record.format, implementation=implementation)
    results["guided/compact_scales"] = rounded.scales
    results["guided/compact_mantissa_codes"] = rounded.codes
    return results


def rms_norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    """RMSNorm in float32 with a BF16 result: what usually feeds a quantizer."""
    x = x.astype(jnp.float32)
    return (x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * weight[None]).astype(jnp.bfloat16)


def fused_against_split(format: Fp4Format, implementation: str | None) -> int:
    """Codes that differ between RMSNorm and quantize compiled as one program and as two, on random rows.

    The BF16 rounding between them must survive fusion. The rows that the split program rounds are given to both, so
    that only the seam is compared, not the norm's own reduction order.
    """
    key_x, key_w = jax.random.split(jax.random.key(0))
    x = jax.random.normal(key_x, (64, 1024)) * 3.0
    weight = 1.0 + 0.1 * jax.random.normal(key_w, (1024,))

    def fused(x, weight):
        normed = rms_norm(x, weight)
        return normed, quantize(normed, format, implementation=implementation)

    normed, one = jax.jit(fused)(x, weight)
    two = jax.jit(lambda a: quantize(a, format, implementation=implementation))(normed)
    return differences(one.unpack().codes, two.unpack().codes)


def differences(actual: jax.Array, expected: jax.Array | np.ndarray) -> int:
    """Elements that are not the same bits; any two NaNs count as the same."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return max(actual.size, expected.size)
    if actual.dtype == np.float32:
        same = actual.view(np.uint32) == expected.view(np.uint32)
        return int((~(same | (np.isnan(actual) & np.isnan(expected)))).sum())
    return int((actual != expected).sum())


def compare(vectors: Mapping[str, np.ndarray], implementation: str | None) -> list[tuple[str, int, int, int]]:
    """Rows (name, elements, differences eager, differences under jit) for every answer in the file."""

    def load(name: str) -> jax.Array:
        return lax.bitcast_convert_type(jnp.asarray(vectors[name]), jnp.bfloat16)

    rows = []
    prefixes = [name.removesuffix("/codes") for name in vectors if name.endswith("/codes")]
    for prefix in prefixes:
        format = get_format(prefix.split("/")[0])
        x = load(f"{prefix}/x_bf16")

        def run(wrap: Callable, prefix=prefix, format=format, x=x) -> Results:
            results = wrap(lambda x: quantized(x, format, implementation))(x)
            if f"{prefix}/guided/x_bf16" in vectors:
                record = wrap(lambda x: quantize(x, format, implementation=implementation))(x)
                trainer = load(f"{prefix}/guided/x_bf16")
                results |= wrap(lambda t, r: guided(t, r, implementation))(trainer, record)
            return results

        eager, jitted = run(lambda f: f), run(jax.jit)
        answers = [n.removeprefix(f"{prefix}/") for n in vectors if n.startswith(f"{prefix}/")]
        for name in answers:
            if name.endswith("x_bf16"):
                continue
            expected = vectors[f"{prefix}/{name}"]
            if name not in eager:
                raise ValueError(
                    f"the file holds {prefix}/{name}, which this program does not know how to compute"
                )
            rows.append(
                (
                    f"{prefix}/{name}",
                    expected.size,
                    differences(eager[name], expected),
                    differences(jitted[name], expected),
                )
            )
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--vectors", required=True, help="npz file of inputs and exact answers")
    parser.add_argument(
        "--implementation", default=None, help="implementation of the ops; default by platform"
    )
    args = parser.parse_args(argv)

    with np.load(args.vectors) as file:
        rows = compare(dict(file), args.implementation)
    for name in ("nvfp4", "mxfp4"):
        count = fused_against_split(get_format(name), args.implementation)
        rows.append((f"{name}/fused_rmsnorm_quantize/codes", 64 * 1024, 0, count))

    device = jax.devices()[0]
    print(f"implementation {args.implementation or 'default'} on {device.platform} ({device.device_kind})")
    print(f"{'array':<52} {'elements':>9} {'eager':>6} {'jit':>6}")
    for name, elements, eager, jitted in rows:
        print(f"{name:<52} {elements:>9} {eager:>6} {jitted:>6}")
    total = sum(eager + jitted for _, _, eager, jitted in rows)
    print(f"{len(rows)} arrays, {sum(r[1] for r in rows)} elements, {total} differences")
    return 1 if total else 0


if __name__ == "__main__":
    sys.exit(main())
