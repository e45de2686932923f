"""Every TPU kernel compiles for v5e, v6e and v7x, in no more instructions than the table says; decoding stays cheap."""

import importlib.util
import json
import subprocess
import sys

import pytest

from tests.kernels_pallas.tpu_bundles import TABLE, TOPOLOGIES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="compiling for TPUs needs libtpu: pip install .[tpu]",
    ),
]
SLACK = 1.1  # compilers differ a little
# An FP4 tile's bundles over those of the same tile in BF16, at most: what is bound by memory in BF16 must still gain.
MOST = {(7, "mxfp4"): 1.6, (7, "nvfp4"): 2.2, (6, "nvfp4"): 3.0}


@pytest.fixture(scope="module")
def counts():
    """Bundles by generation and case, each generation compiled once and in a process of its own."""
    found = {}

    def get(generation):
        if generation not in found:
            command = [
                sys.executable,
                "-m",
                "tests.kernels_pallas.tpu_bundles",
                "--generation",
                str(generation),
            ]
            done = subprocess.run(command, capture_output=True, text=True, timeout=3600)
            assert done.returncode == 0, done.stderr[-4000:]
            found[generation] = json.loads(done.stdout.splitlines()[-1])[str(generation)]
        return found[generation]

    return get


@pytest.mark.parametrize("generation", sorted(TOPOLOGIES))
def test_no_kernel_needs_more_instructions_than_the_table_says(counts, generation):
    table = json.loads(TABLE.read_text())[str(generation)]
    found = counts(generation)
    assert found.keys() == table.keys(), (
        "write the table anew: python -m tests.kernels_pallas.tpu_bundles --write"
    )
    assert min(found.values()) > 0
    risen = {name: (table[name], n) for name, n in found.items() if n > SLACK * table[name]}
    assert not risen, f"bundles before and now: {risen}"


@pytest.mark.parametrize(("generation", "format"), MOST)
def test_decoding_a_tile_costs_no_more_than_its_share(counts, generation, format):
    found = counts(generation)
    assert found[f"tile {format}"] <= MOST[generation, format] * found["tile bf16"]
