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

from kernels_pallas import triton_bridge, triton_fp4

TYPES = {
    "bfloat16": "bf16", "float32": "fp32", "uint32": "u32", "int32": "i32", "uint16": "u16", "uint8": "u8",
    "bool": "i1",
}  # fmt: skip


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


INSTRUCTIONS = {
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
    def __init__(self, handle):
        self.handle = handle

    def get_result(self, index):
        return self.handle


def _inline_asm(self, asm, constraints, values, types, is_pure, pack):
    with np.errstate(all="ignore"):
        data = INSTRUCTIONS[asm](*(value.data for value in values))
    dtype = interpreter.tl.float32 if constraints.startswith("=f") else interpreter.tl.uint32
    return _Results(interpreter.TensorHandle(data, dtype))


interpreter.InterpreterBuilder.create_inline_asm = _inline_asm


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
