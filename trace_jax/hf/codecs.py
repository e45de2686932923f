"""How a checkpoint's file holds the values of a tensor: as they are, or packed in the way of an FP4 format."""

import dataclasses

import numpy as np
from ml_dtypes import float8_e4m3fn

from kernels_pallas.formats import MXFP4, ROW_EXPONENT_BIAS

Shape = tuple[int, ...]


class CodecError(ValueError):
    """Stored values that are no numbers, or have no counterpart here."""


DAMAGED = (
    "expected numbers: the checkpoint is damaged, or its training has diverged. Take another copy or step."
)


@dataclasses.dataclass(frozen=True)
class Codec:
    """Values as they are: any floating dtype up to FP32.

    `dtypes` are those that a file may have, the one that exports write first.
    """

    dtypes: tuple[str, ...] = ("BF16", "F16", "F32")

    def stored_shape(self, shape: Shape) -> Shape:
        """Shape in the file of a tensor of `shape`."""
        return shape

    def decode(self, stored: np.ndarray) -> np.ndarray:
        if not np.isfinite(stored).all():
            raise CodecError(f"it holds NaN or infinity; {DAMAGED}")
        return stored

    def encode(self, x: np.ndarray) -> np.ndarray:
        return x


@dataclasses.dataclass(frozen=True)
class Words(Codec):
    """uint32 words of 8 codes, held as bytes of 2 codes, low nibble first."""

    dtypes: tuple[str, ...] = ("U8",)

    def stored_shape(self, shape: Shape) -> Shape:
        return (*shape[:-1], shape[-1] * 4)

    def decode(self, stored: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(stored).view("<u4")

    def encode(self, x: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(x).view(np.uint8)


@dataclasses.dataclass(frozen=True)
class BlockWords(Codec):
    """uint32 words of 8 codes, held as `[..., K / 32, 16]` bytes of MXFP4 blocks, low nibble first.

    -0 (code 8) is read as 0, since no quantizer here writes it: a trainer that rounds the same values would seem to
    differ.
    """

    dtypes: tuple[str, ...] = ("U8",)

    def stored_shape(self, shape: Shape) -> Shape:
        return (*shape[:-1], shape[-1] // 4, 16)

    def decode(self, stored: np.ndarray) -> np.ndarray:
        words = np.ascontiguousarray(stored).view("<u4").reshape(*stored.shape[:-2], -1)
        nonzero = (words | words >> 1 | words >> 2) & np.uint32(0x11111111)
        return words & (np.uint32(0x77777777) | nonzero << 3)

    def encode(self, x: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(x).view(np.uint8).reshape(self.stored_shape(x.shape))


@dataclasses.dataclass(frozen=True)
class Bytes(Codec):
    """Scale bytes (E8M0) as they are."""

    dtypes: tuple[str, ...] = ("U8",)

    def decode(self, stored: np.ndarray) -> np.ndarray:
        if (stored == MXFP4.poison).any():
            raise CodecError(f"a block's scale is NaN (byte {MXFP4.poison}); {DAMAGED}")
        return stored


@dataclasses.dataclass(frozen=True)
class E4M3Bytes(Codec):
    """Scale bytes, held as E4M3 numbers."""

    dtypes: tuple[str, ...] = ("F8_E4M3",)

    def decode(self, stored: np.ndarray) -> np.ndarray:
        scales = stored.view(np.uint8)
        if (scales & 0x7F == 0x7F).any():
            raise CodecError(f"a block's scale is NaN; {DAMAGED}")
        if (scales >= 0x80).any():
            raise CodecError(
                "a block's scale is negative, which no quantizer writes: the checkpoint is damaged. Take another copy."
            )
        return scales

    def encode(self, x: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(x).view(float8_e4m3fn)


@dataclasses.dataclass(frozen=True)
class RowScale(Codec):
    """A row exponent's byte, held as the FP32 number 2^(byte - 127), or its inverse.

    Both are exact. `ndim` is 1 for a format that keeps a scale in an array of one element.
    """

    dtypes: tuple[str, ...] = ("F32",)
    inverse: bool = False
    ndim: int = 0

    def stored_shape(self, shape: Shape) -> Shape:
        return (1,) * self.ndim

    def decode(self, stored: np.ndarray) -> np.ndarray:
        mantissa, exponent = np.frexp(stored.reshape(()))
        if mantissa != 0.5 or not -126 <= exponent - 1 <= 126:
            raise CodecError(
                f"a matrix scale of {float(stored.reshape(()))!r}; expected a power of two between 2^-126 and 2^126, "
                "as rollouts use. The checkpoint was quantized under other rules: import its BF16 original and "
                "quantize that."
            )
        exponent = exponent - 1
        return np.asarray((-exponent if self.inverse else exponent) + ROW_EXPONENT_BIAS, np.uint8)

    def encode(self, x: np.ndarray) -> np.ndarray:
        exponent = x.astype(np.int32) - ROW_EXPONENT_BIAS
        scale = np.ldexp(np.float32(1), -exponent if self.inverse else exponent)
        return np.asarray(scale, np.float32).reshape((1,) * self.ndim)


PLAIN = Codec()
