"""Files of the agent: each is written whole, and only its owner can read it."""

import os
from pathlib import Path


def write_file(path: Path, content: bytes) -> None:
    """Write a file to the disk, whole or not at all, readable by this user only.  Raises OSError."""
    unfinished = path.with_name(f"{path.name}.new")
    try:
        with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
