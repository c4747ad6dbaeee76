"""The directory of a run: who may use it, and where things are in it."""

import errno
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from shardlm.arguments import from_yaml, to_yaml
from shardlm.config import Config, ConfigError
from shardlm.files import LOCK, Occupied, OwnedDirectory, replace_text

_NOT_CONTENTS = (LOCK, ".config.yaml.tmp")


class RunDirectoryError(ConfigError):
    """A `run.dir` that cannot be used: occupied, foreign, not empty, or not writable."""


class RunDirectory:
    """A run directory. `RunDirectory(path)` reads; `RunDirectory.open` makes and owns it."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._owned: OwnedDirectory | None = None

    @property
    def config_path(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def tokenizer_path(self) -> Path:
        return self.path / "tokenizer.json"

    @property
    def picture_path(self) -> Path:
        return self.path / "loss.png"

    @property
    def checkpoints_path(self) -> Path:
        return self.path / "checkpoints"

    @classmethod
    def open(cls, path: str | Path, fresh: bool = False) -> Self:
        """Make the directory if need be, and own it until `close` or the end of the process.

        Nothing is written into a directory that is refused. A lock that a killed process held is
        free again at once, since the kernel holds it. In a run of several processes, one opens it.

        Args:
          path: `run.dir`.
          fresh: refuse a directory that holds anything.

        Raises:
          RunDirectoryError: another live process owns it, it holds something that is no run, it is
            not empty and `fresh`, or it cannot be written to.
        """
        run = cls(path)
        try:
            run._owned = OwnedDirectory(run.path, lambda: run._check_contents(fresh))
        except Occupied as owner:
            raise RunDirectoryError(
                f"run.dir is {path}, which {owner} is using: wait for it to end, or name another "
                "directory"
            ) from None
        except OSError as error:
            raise RunDirectoryError(
                f"run.dir is {path}: {error.strerror} ({error.filename}); name a directory that "
                "can be written to"
            ) from error
        return run

    def close(self) -> None:
        """Give the directory up; one in which nothing was made is removed, if it was made here."""
        if self._owned is not None:
            self._owned.close()
            self._owned = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def read_config(self) -> Config | None:
        """The run's configuration; None when it has none yet.

        Raises:
          ConfigError: config.yaml cannot be read; the message has file and line.
        """
        try:
            text = self.config_path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise RunDirectoryError(f"{self.config_path} cannot be read: {error}") from error
        if not text.strip():
            raise RunDirectoryError(
                f"{self.config_path} is empty, though it was written whole: restore it, or name "
                "another run.dir"
            )
        return from_yaml(text, str(self.config_path))

    def write_config(self, config: Config) -> None:
        """Write config.yaml: the old one or the new one is there at any moment."""
        replace_text(self.config_path, to_yaml(config))

    def _check_contents(self, fresh: bool) -> None:
        names = sorted(path.name for path in self.path.iterdir() if path.name not in _NOT_CONTENTS)
        if not names:
            return
        if fresh:
            raise RunDirectoryError(
                f"run.dir is {self.path}, which is not empty, and run.fresh is true: name another "
                "directory, or leave out run.fresh to resume"
            )
        files = self.config_path, self.metrics_path, self.tokenizer_path, self.picture_path
        for path in files:
            if path.is_dir():
                raise RunDirectoryError(f"{path} is a directory, where a run has a file: remove it")
        # Here, rather than when the first checkpoint or line is due.
        effective = os.access in os.supports_effective_ids
        for path in (*files, self.checkpoints_path):
            if path.exists() and not os.access(path, os.R_OK | os.W_OK, effective_ids=effective):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        if self.config_path.name not in names:
            raise RunDirectoryError(
                f"run.dir is {self.path}, which is not empty and has no config.yaml, so it is no "
                f"run (it has {', '.join(names[:3])}): name another directory"
            )
