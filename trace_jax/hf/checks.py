"""Values that a reader of an export would turn into something else, found before anything is written."""

import functools
import math
import operator
from collections.abc import Callable
from collections.abc import Mapping as Maps

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.arrays import Fp4Array
from kernels_pallas.formats import MXFP4, ROW_EXPONENT_BIAS
from trace_jax.hf.folder import CheckpointFormatError
from trace_jax.hf.table import Mapping
from trace_jax.quant import cast_weight

SMALLEST_NORMAL_SCALE = 0x08  # E4M3 byte of 2^-6
# Weight-only kernels multiply a matrix scale by 2^119, which is what the exponent biases of BF16 and E2M1 differ by,
# less 7: vLLM, `marlin_utils_fp4.py`.
MAX_WEIGHT_ONLY_EXPONENT = 8


def _not_finite(x: jax.Array) -> jax.Array:
    return ~jnp.isfinite(cast_weight(x, jnp.bfloat16).astype(jnp.float32))


def _nan_scale(scales: jax.Array) -> jax.Array:
    return (scales & 0x7F) == 0x7F


def _nan_e8m0(scales: jax.Array) -> jax.Array:
    return scales == MXFP4.poison


def _negative_scale(scales: jax.Array) -> jax.Array:
    return scales >= 0x80


def _subnormal_scale(scales: jax.Array) -> jax.Array:
    return (scales > 0) & (scales < SMALLEST_NORMAL_SCALE)


def _minus_zero(words: jax.Array) -> jax.Array:
    return functools.reduce(operator.or_, [(words >> 4 * i) & 15 == 8 for i in range(8)])


def _not_normal(row_exponent: jax.Array) -> jax.Array:
    """Bytes whose 2^e or 2^-e is no normal FP32 number."""
    return (row_exponent < 1) | (row_exponent > 253)


def _beyond_weight_only(row_exponent: jax.Array) -> jax.Array:
    return row_exponent > MAX_WEIGHT_ONLY_EXPONENT + ROW_EXPONENT_BIAS


def _product_vanishes(exponent: int, row_exponent: jax.Array) -> jax.Array:
    """Bytes e for which 2^e times 2^exponent, or its inverse, is no normal FP32 number (2^-126 to 2^127)."""
    product = row_exponent.astype(jnp.int32) - ROW_EXPONENT_BIAS + exponent
    return (product < -126) | (product > 126)


NAN = "is NaN: the block held NaN or infinity when it was quantized. Export an earlier step."
CODES = ("words", _minus_zero, "holds the code of -0, which no quantizer here writes: the words are damaged.")
NO_PRODUCT = (
    "times the input scale {!r} is not between 2^-126 and 2^126: engines multiply sums by this product or divide by it "
    "in FP32, and take numbers below 2^-126 for 0. Choose an input scale for which it is, or export without input "
    "scales."
)
E8M0 = (("scales", _nan_e8m0, NAN), CODES)
ALWAYS = (
    ("scales", _nan_scale, NAN),
    ("scales", _negative_scale, "is negative, which no quantizer here writes: the scales are damaged."),
    CODES,
    ("row_exponent", _not_normal, "is no normal FP32 number in one of its two forms, 2^e and 2^-e."),
)
WEIGHT_ONLY = (
    (
        "row_exponent",
        _beyond_weight_only,
        f"is above 2^{MAX_WEIGHT_ONLY_EXPONENT}, which weight-only kernels (GPUs without FP4) turn into infinity. "
        "Export with native_fp4=true for GPUs that have FP4.",
    ),
    (
        "scales",
        _subnormal_scale,
        "is below 2^-6, E4M3's smallest normal number, which weight-only kernels (GPUs without FP4) decode to another "
        "value. Set the block's weights to zero (they are below 1/14000 of the matrix's largest), or export with "
        "native_fp4=true for GPUs that have FP4.",
    ),
)


def check_finite(mapping: Mapping, values: Maps[str, jax.Array]) -> None:
    """Raises CheckpointFormatError, naming the tensor, for a value that is not finite once it is rounded to BF16."""
    floating = {param: x for param, x in values.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    for param, bad in _any_not_finite(floating).items():
        if bad:
            where = _first(mapping, param, floating[param], _not_finite)
            raise CheckpointFormatError(
                f"{where} is NaN, infinite or beyond BF16's range, so that there is no export of it. Export an earlier "
                "step. Nothing was written."
            )


def check_packed(
    mapping: Mapping, param: str, packed: Fp4Array, *, native_fp4: bool, input_scale: float | None
) -> None:
    """Refuses what is not a number, and what readers of the layouts decode to another value.

    Args:
        mapping: the table of the packed layout.
        param: dotted path of the expert matrices.
        packed: `[L, E, K, N]`.
        native_fp4: the target multiplies FP4 in hardware; otherwise the limits of weight-only kernels for NVFP4 hold
            too.
        input_scale: of the matrices' activations, see `check_input_scales`; None where they are not quantized.

    Raises:
        CheckpointFormatError: naming a tensor, what is wrong with it, and what to do.
    """
    checks = E8M0 if packed.format == MXFP4 else ALWAYS if native_fp4 else ALWAYS + WEIGHT_ONLY
    if input_scale is not None:
        vanishes = functools.partial(_product_vanishes, math.frexp(input_scale)[1] - 1)
        checks += (("row_exponent", vanishes, NO_PRODUCT.format(input_scale)),)
    found = _any_of(tuple(getattr(packed, leaf) for leaf, _, _ in checks), tuple(bad for _, bad, _ in checks))
    for (leaf, bad, what), is_bad in zip(checks, found, strict=True):
        if is_bad:
            where = _first(mapping, f"{param}.{leaf}", getattr(packed, leaf), bad)
            raise CheckpointFormatError(f"{where} {what} Nothing was written.")


def check_input_scales(input_scales: Maps[str, float] | None) -> None:
    """Raises CheckpointFormatError unless every scale is a power of two whose inverse is an FP32 number as well."""
    for site, scale in (input_scales or {}).items():
        if not (2.0**-126 <= scale <= 2.0**126 and math.frexp(scale)[0] == 0.5):
            raise CheckpointFormatError(
                f"the input scale of {site} is {scale}; expected a power of two between 2^-126 and 2^126: only then "
                "does an engine round activations to the codes that rollouts here have."
            )


@jax.jit
def _any_not_finite(values: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {param: _not_finite(x).any() for param, x in values.items()}


@functools.partial(jax.jit, static_argnums=1)
def _any_of(values: tuple[jax.Array, ...], bad: tuple[Callable, ...]) -> list[jax.Array]:
    return [flags(x).any() for x, flags in zip(values, bad, strict=True)]


def _first(mapping: Mapping, param: str, value: jax.Array, bad: Callable) -> str:
    """The tensor with the first bad value of a parameter, and where that is."""
    link = mapping.links[param][0]
    for layer in range(value.shape[0]) if link.per_layer else [None]:
        found = np.argwhere(np.asarray(bad(value if layer is None else value[layer])))
        if len(found):
            index = (*(() if layer is None else (layer,)), *found[0].tolist())
            break
    unit = index[link.leading :]
    for link in mapping.links[param]:
        if not unit or unit[link.axis] in mapping.ours(link):
            break
    return f"{mapping.name(link, index[: link.leading])} ({param}{list(index)})"
