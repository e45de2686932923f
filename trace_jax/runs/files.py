"""Writing a file so that a reader, or a run that was killed, never finds half of it."""

import os
from pathlib import Path


def write_atomically(path: Path, data: bytes) -> None:
    """Replaces `path` in one step: other processes see the old content or the new, also after a kill."""
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
