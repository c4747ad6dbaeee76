"""Files that are either the old or the new one, whatever happens in between; locks; and directories
that one process writes to."""

import contextlib
import fcntl
import itertools
import os
import socket
import time
from collections.abc import Callable
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
        still_there = _is_at(path, descriptor)
    except BlockingIOError:
        owner = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
        os.close(descriptor)
        raise Occupied(owner or "another process") from None
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, OSError):
            error.filename = error.filename or str(path)
        raise
    if not still_there:
        # Its owner has removed it after it was opened here: it keeps nobody out.
        os.close(descriptor)
        return lock(path)
    return descriptor


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


LOCK = ".lock"
"""Name of the lock of a directory."""
_TRIES = 20
"""Of owning a directory, where what is above it comes and goes."""


class OwnedDirectory:
    """A directory that this process alone writes to until `close`; made, if need be, with those
    above it."""

    def __init__(self, path: Path, check: Callable[[], None]) -> None:
        """
        Args:
          check: raises what refuses the directory; called before anything is written into it, and
            again when no other process can.

        Raises:
          Occupied: another process owns it.
          OSError: it cannot be made or written to.
        """
        self.path = path
        self._lock: int | None = None
        self._made: list[Path] = []
        try:
            for left in reversed(range(_TRIES)):
                try:
                    self._take(check)
                    break
                except (FileNotFoundError, FileExistsError):
                    # Other processes may make and remove directories in this moment.
                    if not left:
                        raise
                    self._unlock()
                    time.sleep(0.01)
        except BaseException:
            self.close()
            raise

    def _take(self, check: Callable[[], None]) -> None:
        chain = (self.path, *self.path.parents)
        missing = [*itertools.takewhile(lambda p: not os.path.lexists(p), chain)]
        # Both begin with the directory itself, so the longer has all of the other.
        self._made = max(self._made, missing, key=len)
        self.path.mkdir(parents=True, exist_ok=True)
        check()
        self._lock = lock(self.path / LOCK)
        check()

    def close(self) -> None:
        """Give it up. Where nothing was made in it, nothing of it is left."""
        if self._lock is not None:
            with contextlib.suppress(OSError):
                if os.listdir(self.path) == [LOCK]:
                    (self.path / LOCK).unlink()
        for directory in self._made:
            # Of those above, some may be there and others not.
            with contextlib.suppress(OSError):
                directory.rmdir()
        self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
