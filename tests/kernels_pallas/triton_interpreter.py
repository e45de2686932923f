"""Triton kernels on a machine without GPU: the interpreter of Triton, with the instructions that kernels write in PTX.

Import this module first: it decides that Triton interprets, for the whole process.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import triton.runtime.interpreter as interpreter

from kernels_pallas import tiled, triton_bridge, triton_fp4, triton_matmul
from kernels_pallas.decode_attention import triton_kernels as attention_kernels
from kernels_pallas.decode_attention import triton_prefill_kernels as prefill_kernels
from kernels_pallas.formats import E2M1_VALUES
from tests.kernels_pallas.triton_types import TYPES


def _halves(word: np.ndarray, dtype) -> np.ndarray:
    """Both halves of uint32 words, low first, along a new last axis."""
    return np.ascontiguousarray(word).view(np.uint16).reshape(*word.shape, 2).view(dtype)


def _word(halves: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(halves).view(np.uint32)[..., 0]


def _snap(a, b):
    q = np.stack([a, b], -1).astype(np.float16) * np.float16(2.0**-14)
    least = np.fmin(np.abs(q), np.float16(6 * 2.0**-14))
    return _word(np.copysign(least, q))


def _larger(a, b):
    a, b = _halves(a, np.uint16), _halves(b, np.uint16)
    largest = np.maximum(a & 0x7FFF, b & 0x7FFF)
    return _word(np.where(largest > 0x7F80, 0x7FFF, largest | ((a ^ b) & 0x8000)).astype(np.uint16))


def _values(a, b):
    a, b = (_halves(x, ml_dtypes.bfloat16).astype(np.float64) for x in (a, b))
    # What BF16 does in two steps is exact, so that one in FP64 does the same; NaN may differ in its bits.
    return _word((a * 2.0**126 * b + 0.0).astype(ml_dtypes.bfloat16))


def _decoded(places: tuple[tuple[int, ...], ...], scales_of):
    """A word of codes, whose bits are at `places`, times the scale of each code's column: 8 BF16 tensors."""

    def run(words, scales):
        words, values = words.astype(np.uint32), []
        for (sign, *bits), factor in zip(places, scales_of(scales), strict=True):
            code = sum(((words >> bit) & 1) << (2 - i) for i, bit in enumerate(bits))
            value = E2M1[code] * np.where((words >> sign) & 1, -1.0, 1.0) * factor
            values.append(value.astype(ml_dtypes.bfloat16).view(np.uint16))
        return tuple(values)

    return run


def _of_two_columns(scale):
    """Two scale bytes in one number: pairs of codes belong to the columns in turns."""
    return lambda both: [
        scale((both.astype(np.int64) >> (8 * (pair % 2))) & 0xFF) for pair in (0, 0, 1, 1, 2, 2, 3, 3)
    ]


def _widened_e4m3(byte):
    """2^-7 times the scales whose bytes have 5 exponent bits."""
    byte = byte.astype(np.int64)
    return np.where(byte == 0xFF, np.nan, (1 + (byte & 7) / 8) * 2.0 ** ((byte >> 3) + 224 - 127 - 126))


def _e8m0(byte):
    return np.where(byte.astype(np.int64) >= 0xFF, np.nan, 2.0 ** (byte.astype(np.float64) - 127))


def _lowered_e8m0(byte):
    """2^126 less than the BF16 numbers that have the bytes as exponents."""
    return np.where(byte == 0, 0.0, _e8m0(byte) * 2.0**-126)


def _prepared(scales):
    """BF16 halves 2^119 times E4M3 scales, as `_prepare_e4m3` makes them, to 2^-7 times the scales."""
    return _halves(scales.astype(np.uint32), ml_dtypes.bfloat16)[..., 0].astype(np.float64) * 2.0**-126


def _twice(values):
    half = values.astype(ml_dtypes.bfloat16)
    return _word(np.stack([half, half], -1).view(np.uint16))


TILED = [tuple((16 * i + place) % 32 for place in places) for places in tiled._POSITIONS for i in range(2)]
NATURAL = [tuple(4 * code + bit for bit in (3, 2, 1, 0)) for p in range(4) for code in (p, p + 4)]
E2M1 = np.asarray(E2M1_VALUES)

INSTRUCTIONS = {
    triton_matmul.DECODE_E4M3.value: _decoded(TILED, _of_two_columns(_widened_e4m3)),
    triton_matmul.DECODE_E8M0.value: _decoded(TILED, _of_two_columns(_lowered_e8m0)),
    attention_kernels.DECODE_E4M3.value: _decoded(NATURAL, lambda scales: [_prepared(scales)] * 8),
    attention_kernels.DECODE_E8M0.value: _decoded(NATURAL, lambda scales: [_prepared(scales) * 2.0**126] * 8),
    attention_kernels.PREPARE_E4M3.value: lambda byte: _twice(
        byte.astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64) * 2.0**119
    ),
    attention_kernels.PREPARE_E8M0.value: lambda byte: _twice(_e8m0(byte)),
    prefill_kernels.PREPARE_E4M3_OF_ROW.value: lambda byte, exponent: _twice(
        byte.astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64) * _e8m0(exponent)
    ),
    "mov.b32 $0, $1;": lambda x: x,
    triton_fp4.SNAP.value: _snap,
    triton_fp4.LARGER.value: _larger,
    triton_fp4.RECIPROCAL.value: lambda a: np.float32(1) / a,
    triton_fp4.TO_BF16.value: lambda a, b: _word(np.stack([a, b], -1).astype(ml_dtypes.bfloat16)),
    triton_fp4.VALUES.value: _values,
    triton_fp4.LARGER_UNSIGNED.value: lambda a, b: _word(
        np.maximum(_halves(a, np.uint16), _halves(b, np.uint16))
    ),
}


class _Results:
    """What an instruction returns: one tensor, or several."""

    def __init__(self, handles):
        self.handles = handles

    def get_result(self, index):
        return self.handles[index]


def _inline_asm(self, asm, constraints, values, types, is_pure, pack):
    with np.errstate(all="ignore"):
        data = INSTRUCTIONS[asm](*(value.data for value in values))
    data = data if isinstance(data, tuple) else (data,)
    kinds = {"=f": interpreter.tl.float32, "=h": interpreter.tl.bfloat16}
    dtype = kinds.get(constraints[:2], interpreter.tl.uint32)
    if dtype is interpreter.tl.uint32 and data[0].dtype == np.uint16:
        dtype = interpreter.tl.bfloat16
    if data[0].dtype == np.int32:
        dtype = interpreter.tl.int32
    return _Results([interpreter.TensorHandle(d, dtype) for d in data])


def _dot(self, a, b, d, *options):
    """Products of BF16, which the interpreter holds as bits, summed in FP64: BLAS adds up a row by where it lies."""
    a, b = (x.data.view(ml_dtypes.bfloat16).astype(np.float64) for x in (a, b))
    return interpreter.TensorHandle((a @ b + d.data).astype(np.float32), d.dtype)


def _cast(self, source, dtype, cast=interpreter.InterpreterBuilder.cast_impl):
    """FP32 to BF16 rounds to nearest even, as on a GPU; the interpreter truncates."""
    pair = source.dtype.scalar, dtype.scalar
    if pair == (interpreter.tl.float32, interpreter.tl.bfloat16):
        data = source.data.astype(ml_dtypes.bfloat16).view(np.uint16)
    elif pair == (interpreter.tl.bfloat16, interpreter.tl.float32):
        data = source.data.view(ml_dtypes.bfloat16).astype(np.float32)
    else:
        return cast(self, source, dtype)
    return interpreter.TensorHandle(data, dtype.scalar)


def _patch_tensor(tensor, scope, patch=interpreter._patch_lang_tensor):
    """A number that was read from memory, of shape [1], may end a loop."""
    patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(np.asarray(self.handle.data).item()))


interpreter._patch_lang_tensor = _patch_tensor
interpreter.InterpreterBuilder.create_inline_asm = _inline_asm
interpreter.InterpreterBuilder.create_dot = _dot
interpreter.InterpreterBuilder.cast_impl = _cast


class _Buffer:
    """What the interpreter wants of a tensor."""

    def __init__(self, array: np.ndarray):
        self.array, self.dtype = array, TYPES[array.dtype.name]

    def data_ptr(self):
        return self.array.ctypes.data

    def untyped_storage(self):
        return self

    def cpu(self):
        return self

    def new_empty(self, *args, **options):
        return self

    def set_(self, *args):
        pass

    copy_ = set_

    def storage_offset(self):
        return 0

    size = stride = storage_offset


def call(kernel, *arguments, outputs, grid, num_warps, num_stages=3, aliases=None, **constants):
    """`triton_bridge.call`, interpreted. Outputs that alias nothing start as a pattern that no kernel writes."""
    del num_warps, num_stages
    arrays = [np.array(a) for a in arguments if not isinstance(a, int)]
    results = [np.full(o.shape, 0xA5, np.uint8).astype(o.dtype) for o in outputs]
    for index, result in (aliases or {}).items():
        results[result] = arrays[index]
    queue = iter(arrays)
    buffers = [a if isinstance(a, int) else _Buffer(next(queue)) for a in arguments]
    with np.errstate(all="ignore"):
        kernel[grid](*buffers, *map(_Buffer, results), **constants)
    return [jnp.asarray(result) for result in results]


triton_bridge.call = call


def differences(actual, expected) -> int:
    """Elements whose bits differ, over all leaves; any NaN equals any other."""
    count = 0
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.shape == b.shape and a.dtype == b.dtype, (a.shape, a.dtype, b.shape, b.dtype)
        if jnp.issubdtype(a.dtype, jnp.floating):
            unsigned = f"uint{8 * a.dtype.itemsize}"
            same = (a.view(unsigned) == b.view(unsigned)) | (np.isnan(a) & np.isnan(b))
        else:
            same = a == b
        count += int((~same).sum())
    return count
