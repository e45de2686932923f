"""`kill -9` while a checkpoint is written, in a process of its own: the last good one can be restored."""

import os
import signal
import subprocess
import sys
import time

import jax.numpy as jnp
import pytest

from trace_jax.runs import Checkpoints

SIZE = 4_000_000
# Incompressible, so that a save takes long enough to be hit.
CHILD = """
import sys
import jax
from trace_jax.runs import Checkpoints

with Checkpoints(sys.argv[1], keep=int(sys.argv[2])) as checkpoints:
    for step in range(int(sys.argv[3]), 1000):
        state = {"w": jax.random.normal(jax.random.key(step), (SIZE,)), "step": jax.numpy.full(3, step)}
        checkpoints.save(step, state, {"step": step})
        print("saved", step, flush=True)
""".replace("SIZE", str(SIZE))


def run_until_killed_in_a_save(folder, keep, first, delay):
    """Starts a process that saves step after step, kills it in a save, returns the last step it reported."""
    command = [sys.executable, "-c", CHILD, str(folder), str(keep), str(first)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"}
    ) as child:
        try:
            reported = [int(child.stdout.readline().split()[1]) for _ in range(2)][-1]
            deadline = time.monotonic() + 60
            while not list(folder.glob("*.orbax-checkpoint-tmp")):
                assert child.poll() is None and time.monotonic() < deadline
                time.sleep(0.0005)
            time.sleep(delay)
        finally:
            child.send_signal(signal.SIGKILL)
        lines = child.stdout.read().split()
    return max([reported, *map(int, lines[1::2])])


@pytest.mark.slow
@pytest.mark.parametrize("keep", [1, 2])
def test_last_good_checkpoint_survives(tmp_path, keep):
    folder = tmp_path / "checkpoints"
    first, interrupted = 0, 0
    for delay in (0.0, 0.02, 0.05, 0.1):
        reported = run_until_killed_in_a_save(folder, keep, first, delay)
        interrupted += bool(list(folder.glob("*.orbax-checkpoint-tmp")))
        checkpoints = Checkpoints(folder, keep=keep)
        restored = checkpoints.restore({"w": jnp.zeros(SIZE), "step": jnp.zeros(3, int)})
        # The process may have died between the end of a save and its report.
        assert reported <= restored.step <= reported + 1
        assert (
            restored.extra == {"step": restored.step} and list(restored.state["step"]) == [restored.step] * 3
        )
        first = restored.step + 1
    assert interrupted, "no kill hit a save: make the state larger"
    # The next save goes on from there, and clears away what the kills left.
    with checkpoints:
        checkpoints.save(first, {"w": jnp.zeros(SIZE), "step": jnp.full(3, first)}, {"step": first})
    assert checkpoints.latest_step() == first and len(checkpoints.all_steps()) <= keep
    assert not list(folder.glob("*.orbax-checkpoint-tmp"))
