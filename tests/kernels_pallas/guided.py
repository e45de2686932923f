"""Helpers of the guided rounding tests: a record of a rollout's rows, and the trainer's rows under it."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from kernels_pallas.arrays import Fp4Array, Fp4Codes
from kernels_pallas.formats import pack_bits
from kernels_pallas.guided_round import MODES, Guide, compact_scales, guided_round
from kernels_pallas.quantize import dequantize, quantize, quantize_codes
from tests.kernels_pallas.strategies import COLUMNS, ROWS


def guide_of(packed: Fp4Array, mode: str, valid=None, compact=False) -> Guide:
    codes = packed.unpack()
    return Guide(
        scales=compact_scales(packed.scales) if compact else packed.scales,
        row_exponent=packed.row_exponent,
        mantissa=pack_bits(codes.codes & 1),
        words=packed.words,
        valid=jnp.ones(packed.row_exponent.shape, bool) if valid is None else valid,
        mode=mode,
        compact=compact,
    )


@functools.partial(jax.jit, static_argnames=("format", "implementation"))
def every_mode(trainer, rollout, valid, format, implementation):
    """The record of the rollout's rows, and the trainer's rows under it in every mode: one program, one compile."""
    packed = quantize(rollout, format)
    results = {}
    for mode, compact in [(mode, compact) for mode in MODES for compact in (False, True)]:
        guide = guide_of(packed, mode, valid, compact)
        codes = guided_round(trainer, guide, format, implementation=implementation)
        results[mode, compact] = codes, dequantize(codes, jnp.float32)
    return results, packed.unpack(), dequantize(packed, jnp.float32)


def run(trainer, rollout, format, mode, valid=None, compact=False, implementation="reference"):
    """Codes and values of the trainer's rows under the rollout's record, and those of the record itself.

    Rows and columns are filled up with zeros, which change no other row or block, to one shape for all tests.
    """
    rows, columns = trainer.shape
    grown = [np.zeros((ROWS, COLUMNS), np.asarray(trainer).dtype) for _ in range(2)]
    grown[0][:rows, :columns], grown[1][:rows, :columns] = trainer, rollout
    valid = np.ones(rows, bool) if valid is None else np.asarray(valid)
    valid = np.concatenate([valid, np.ones(ROWS - rows, bool)])
    results, record, record_values = every_mode(*grown, valid, format, implementation)

    def shrink(codes, values):
        codes = Fp4Codes(
            codes=codes.codes[:rows, :columns],
            scales=codes.scales[:rows, : -(-columns // format.block)],
            row_exponent=codes.row_exponent[:rows],
            format=format,
        )
        return codes, values[:rows, :columns]

    # Both sides as NumPy: slices of device arrays would each be a program of their own.
    as_numpy = functools.partial(jax.tree.map, np.asarray)
    return *shrink(*as_numpy(results[mode, compact])), *shrink(*as_numpy((record, record_values)))


own = jax.jit(quantize_codes, static_argnames=("format", "axis", "row_axes"))


def noisy(x: np.ndarray, seed: int, share: float) -> np.ndarray:
    """The trainer's slightly different rows."""
    noise = np.random.default_rng(seed).standard_normal(x.shape).astype(np.float32)
    return (x.astype(np.float32) * (1 + share * noise)).astype(ml_dtypes.bfloat16)
