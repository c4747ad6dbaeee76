"""Files that are either the old or the new one, whatever happens in between; and locks."""

import contextlib
import fcntl
import os
import socket
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Replace a file's contents atomically and durably; a reader sees all of it or none."""
    replace_bytes(path, text.encode())


def replace_bytes(path: Path, data: bytes | memoryview) -> None:
    """`replace_text` for bytes. When it fails, what it had written is removed."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        directory = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        # A full disk is told without the name.
        error.filename = error.filename or str(path)
        raise


class Occupied(Exception):
    """A lock that another process holds; its text says which process."""


def lock(path: Path) -> int:
    """Own a lock file until the descriptor that is returned is closed, or the process ends: the
    kernel holds the lock, so that a killed process leaves none.

    Raises:
      Occupied: another process has it.
      OSError: the file cannot be made.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    except BlockingIOError:
        owner = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
        os.close(descriptor)
        raise Occupied(owner or "another process") from None
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, OSError):
            error.filename = error.filename or str(path)
        raise
    return descriptor
