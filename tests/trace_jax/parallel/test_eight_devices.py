"""Mesh data 2 x fsdp 2 x expert 2 on 8 virtual devices, in a process of its own, against one device."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[3]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def findings():
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": str(ROOT),
    }
    run = subprocess.run(
        [sys.executable, "-m", "tests.trace_jax.parallel.eight_devices"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    found = json.loads(run.stdout.splitlines()[-1])
    print(json.dumps(found, indent=2))
    return found


def test_each_layer_fed_identical_inputs_gives_identical_codes(findings):
    for site, by_layer in findings["layers"].items():
        assert by_layer == [0.0] * len(by_layer), site


def test_parameters_are_really_sharded(findings):
    specs = " ".join(findings["sharded"]["shardings"])
    assert "fsdp" in specs and "expert" in specs


def test_whole_train_step_under_a_single_device_record(findings):
    """Guided sites follow the record, whatever the order of summation; loss and gradients are the same."""
    for site, share in findings["sharded"]["guided"].items():
        assert share <= 1e-4, site
    assert findings["sharded"]["loss"] == pytest.approx(findings["single"]["loss"], abs=1e-3)
    for path, gap in findings["gradient_gaps"].items():
        assert gap < 0.02, path


def test_tensor_parallel_with_a_vocabulary_that_does_not_divide(findings):
    assert "tensor" in " ".join(findings["tensor"]["shardings"])
    assert findings["tensor"]["loss"] == pytest.approx(findings["single"]["loss"], abs=1e-3)
    assert max(findings["tensor"]["guided"].values()) <= 1e-4


def test_unguided_mismatch_is_what_guidance_is_for(findings):
    unguided = findings["sharded"]["unguided"]
    print("unguided mismatch of the sharded trainer:", unguided)
    print(
        "words that differ between sharded and single rollout:",
        findings["rollout_words_that_differ"],
    )
    assert max(unguided.values()) > 1e-3
