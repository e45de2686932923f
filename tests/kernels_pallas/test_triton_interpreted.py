"""Triton kernels against the reference on a machine without GPU, in Triton's interpreter."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
MODULES = ("quantize", "guided_values", "append", "matmul", "epilogue", "attention", "prefill")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None,
        reason="triton is not installed: pip install 'triton>=3.6,<3.7'",
    ),
]


@pytest.mark.parametrize("op", MODULES)
def test_interpreted_kernels_give_the_bits_of_the_reference(op):
    """A process of its own: Triton interprets all kernels of a process or none."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels_pallas.triton_on_cpu", op],
        cwd=REPOSITORY,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert lines and all(line.endswith(": 0 differences") for line in lines)
