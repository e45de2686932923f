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
def counts(tmp_path_factory):
    """Bundles by generation and case; each generation is compiled in a process of its own, all at once."""
    folder, running, found = tmp_path_factory.mktemp("bundles"), {}, {}
    for generation in TOPOLOGIES:
        command = [sys.executable, "-m", "tests.kernels_pallas.tpu_bundles", "--generation", str(generation)]
        with (folder / f"{generation}.out").open("w") as out, (folder / f"{generation}.err").open("w") as err:
            running[generation] = subprocess.Popen(command, stdout=out, stderr=err)

    def get(generation):
        if generation not in found:
            failed = running[generation].wait(timeout=3600)
            assert not failed, (folder / f"{generation}.err").read_text()[-4000:]
            last = (folder / f"{generation}.out").read_text().splitlines()[-1]
            found[generation] = json.loads(last)[str(generation)]
        return found[generation]

    yield get
    for process in running.values():
        process.kill()


@pytest.mark.parametrize("generation", sorted(TOPOLOGIES))
def test_no_kernel_needs_more_instructions_than_the_table_says(counts, generation):
    table = json.loads(TABLE.read_text())[str(generation)]
    found = counts(generation)
    assert found.keys() == table.keys(), (
        "write the table anew: python -m tests.kernels_pallas.tpu_bundles --write"
    )
    bundles = {name: (table[name]["bundles"], case["bundles"]) for name, case in found.items()}
    assert min(now for _, now in bundles.values()) > 0
    risen = {name: (before, now) for name, (before, now) in bundles.items() if now > SLACK * before}
    assert not risen, f"bundles before and now: {risen}"


@pytest.mark.parametrize(("generation", "format"), MOST)
def test_decoding_a_tile_costs_no_more_than_its_share(counts, generation, format):
    found = counts(generation)
    ours, plain = (found[f"tile {name}"]["bundles"] for name in (format, "bf16"))
    assert ours <= MOST[generation, format] * plain
