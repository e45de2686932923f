"""Hypothesis strategies of BF16 rows: all bit patterns, Gaussian, ties, wide spreads, mostly zeros."""

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

ROWS, COLUMNS = 4, 64  # one shape, so that jitted functions compile once
TIES = np.array([0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0])


@st.composite
def bf16_rows(draw: st.DrawFn, finite: bool = False, exponents: tuple[int, int] = (-120, 120)) -> np.ndarray:
    """A [ROWS, COLUMNS] array. Other `exponents` than these bound its magnitudes: no raw bit patterns."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from(["bits", "gaussian", "ties", "spread", "sparse"]))
    scale = np.ldexp(1.0, draw(st.integers(*exponents)))
    shape = (ROWS, COLUMNS)
    if kind == "bits" and exponents == (-120, 120):
        x = rng.integers(0, 2**16, shape, dtype=np.uint16).view(ml_dtypes.bfloat16)
        if finite:
            x = np.where(np.isfinite(x.astype(np.float32)), x, ml_dtypes.bfloat16(1))
        return x
    if kind == "ties":
        x = rng.choice(TIES, shape) * rng.choice([-1, 1], shape) * scale
    elif kind == "spread":
        x = rng.standard_normal(shape) * np.ldexp(1.0, rng.integers(-12, 3, shape)) * scale
    elif kind == "sparse":
        x = rng.standard_normal(shape) * (rng.random(shape) < 0.1) * scale
    else:
        x = rng.standard_normal(shape) * scale
    return x.astype(ml_dtypes.bfloat16)
