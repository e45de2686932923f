"""Not a test: a training process that kills itself with SIGKILL in a given phase.

python tests/experiments/killed_run.py rollout|train|checkpoint STEP OVERRIDE...
"""

import os
import signal
import sys
import threading
import time

from trace_jax.rl.trainer import Trainer
from trace_jax.rollout.executor import Executor
from trace_jax.runs.checkpoints import Checkpoints


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def dies_in(cls, name: str, call: int, before) -> None:
    """Makes the `call`-th call of a method die after `before(self, *args)` has run."""
    original, calls = getattr(cls, name), 0

    def replaced(self, *args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == call:
            before(original, self, *args, **kwargs)
        return original(self, *args, **kwargs)

    setattr(cls, name, replaced)


def in_the_middle(original, self, *args, **kwargs):
    """Half a rollout: the first chunk has been dispatched, its record is still on the way."""
    original(self, *args, **kwargs)
    kill()


def while_it_writes(original, self, *args, **kwargs):
    """A thread that strikes as soon as the save has begun to write."""

    def strike():
        before = {entry.name for entry in self.folder.iterdir()} if self.folder.exists() else set()
        while not self.folder.exists() or {entry.name for entry in self.folder.iterdir()} <= before:
            time.sleep(0.0002)
        kill()

    threading.Thread(target=strike, daemon=True).start()


phase, step = sys.argv[1], int(sys.argv[2])
if phase == "rollout":
    dies_in(Executor, "launch", 2 * step + 1, in_the_middle)
elif phase == "train":
    dies_in(Trainer, "step", step, lambda *_args, **_kwargs: threading.Timer(0.005, kill).start())
elif phase == "checkpoint":
    dies_in(Checkpoints, "save", step, while_it_writes)
else:
    raise SystemExit(f"unknown phase {phase!r}")

sys.argv = ["train", *sys.argv[3:]]
from experiments.train import main  # noqa: E402

main()
