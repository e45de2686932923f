"""The contract's vectors, through the conformance script, on every implementation of this platform."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.conformance import main
from kernels_pallas.formats import NVFP4
from kernels_pallas.quantize import quantize
from kernels_pallas.quantize.api import IMPLEMENTATIONS
from tests.kernels_pallas.serving import skip_where_refused

REPOSITORY = Path(__file__).resolve().parents[2]
VECTORS = REPOSITORY / "tests" / "data" / "fp4_contract.npz"
FAMILIES = 10


SLOW = ("pallas_tpu",)  # interpreted


@pytest.mark.parametrize(
    "implementation",
    [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in sorted(IMPLEMENTATIONS)],
)
def test_every_vector_is_met_bit_for_bit(implementation, capsys):
    x, options = jax.ShapeDtypeStruct((4, 64), jnp.bfloat16), {"axis": -1, "row_axes": (-1,)}
    skip_where_refused(IMPLEMENTATIONS, implementation, quantize, (x,), NVFP4, **options, scale_rule="amax")
    assert main(["--vectors", str(VECTORS), "--implementation", implementation]) == 0
    lines = capsys.readouterr().out.splitlines()
    with np.load(VECTORS) as file:
        answers = [name for name in file.files if not name.endswith("x_bf16")]
    reported = {line.split()[0] for line in lines}
    assert set(answers) <= reported
    assert len({name.rsplit("/", 1)[0].removesuffix("/guided") for name in answers}) == 2 * FAMILIES
    assert lines[-1].endswith(" 0 differences")


def test_optimised_code_meets_every_vector():
    """What users run: this process compiles without most optimisations, which might drop or reorder a rounding."""
    done = subprocess.run(
        [sys.executable, "-m", "experiments.conformance", "--vectors", str(VECTORS)],
        cwd=REPOSITORY,
        env=os.environ | {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "0"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.rstrip().endswith(" 0 differences")


def test_a_single_wrong_bit_is_found(tmp_path, capsys):
    with np.load(VECTORS) as file:
        arrays = {name: file[name] for name in file.files if name.startswith("nvfp4/ties/")}
    arrays["nvfp4/ties/guided/mantissa_codes"] = arrays["nvfp4/ties/guided/mantissa_codes"] ^ np.eye(
        16, 256, dtype=np.uint8
    )
    np.savez(tmp_path / "wrong.npz", **arrays)
    assert main(["--vectors", str(tmp_path / "wrong.npz")]) == 1
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if "mantissa_codes" in line and "compact" not in line)
    assert row.split()[2:] == ["16", "16"]


def test_an_unknown_array_is_an_error(tmp_path):
    with np.load(VECTORS) as file:
        arrays = {name: file[name] for name in file.files if name.startswith("mxfp4/ties/")}
    arrays["mxfp4/ties/fp8_codes"] = arrays["mxfp4/ties/codes"]
    np.savez(tmp_path / "more.npz", **arrays)
    with pytest.raises(ValueError, match=r"mxfp4/ties/fp8_codes is no array of the contract"):
        main(["--vectors", str(tmp_path / "more.npz")])
