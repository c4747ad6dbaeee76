"""The directory of a store that is made: whose it is, and what an earlier preparation left."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shardlm.data.errors import DataError
from shardlm.data.stopping import Display, Interrupted, Progress, quiet
from shardlm.data.store import MANIFEST, TOKENIZER, is_store, read_manifest
from shardlm.data.tokenizer import Tokenizer, from_json
from shardlm.files import LOCK, Occupied, OwnedDirectory

PROGRESS = "progress.json"
"""Of an unfinished store: how far it is."""


@contextlib.contextmanager
def owned(
    path: Path,
    cache: Path | None = None,
    stopped: Callable[[], bool] = lambda: False,
    display: Display = quiet,
) -> Iterator[None]:
    """Own the directory of a store that is to be made. Where nothing is made, nothing is left.

    Args:
      path: the directory.
      cache: `data.cache`, if it is below that: then another process that owns it is waited for.
      stopped: asked meanwhile: whether to stop.
      display: shows for whom it waits.

    Raises:
      DataError: it cannot be made or written to, or another process owns it.
      Interrupted: `stopped`.
    """

    with contextlib.ExitStack() as waiting:
        progress: Progress | None = None
        while True:
            try:
                directory = OwnedDirectory(path, lambda: _refuse_foreign(path))
                break
            except Occupied as owner:
                if cache is None:
                    raise DataError(
                        f"{owner} is preparing {path}: wait for it to end, or name another "
                        "directory"
                    ) from None
                if progress is None:
                    what = f"waiting for {owner}, which is preparing {path}"
                    progress = waiting.enter_context(display(what, 0))
            except OSError as error:
                place = f"STORE is {path}" if cache is None else f"data.cache is {cache}"
                raise DataError(
                    f"{place}: {error.strerror} ({error.filename}); name a directory that can be "
                    "written to"
                ) from error
            if stopped():
                raise Interrupted
            progress(0, 0)
            time.sleep(0.2)
    try:
        yield
    finally:
        directory.close()


def _refuse_foreign(path: Path) -> None:
    """Refuse a directory that holds something else than a store, before it gets a file."""
    # Listed once: its owner may be finishing it, which puts one of the two in place of the other.
    names = {found.name for found in path.iterdir()}
    if names.isdisjoint({MANIFEST, PROGRESS}) and (others := names - {LOCK, f".{PROGRESS}.tmp"}):
        raise DataError(
            f"{path} is not empty and no store (it has {', '.join(sorted(others)[:3])}): name "
            "another directory"
        )


def tokenizer_left(path: Path, made_from: str) -> Tokenizer | None:
    """The tokenizer that an earlier preparation made from the text of the digest `made_from` and
    left in the directory; None if there is none.

    Raises:
      DataError: the directory holds the work of another one, or something else.
    """
    if is_store(path):
        found = read_manifest(path)
        if found.get("made_from") != made_from:
            raise other_store(path)
    else:
        found = progress_of(path, "made_from", made_from)
    try:
        tokenizer = from_json((path / TOKENIZER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return tokenizer if tokenizer.fingerprint() == found.get("tokenizer") else None


def other_store(path: Path) -> DataError:
    """What refuses a finished store that is not the one that is to be made."""
    return DataError(
        f"{path} is a finished store of other text, tokenizer or settings: name another "
        "directory, or remove it"
    )


def progress_of(path: Path, mark: str, value: str) -> dict[str, Any]:
    """How far an earlier preparation came whose `mark` has this value; empty if there was none, or
    another one that has finished nothing."""
    try:
        found = json.loads((path / PROGRESS).read_text(encoding="utf-8"))
        same, started = found[mark] == value, bool(found["shards"])
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError):
        raise DataError(
            f"{path / PROGRESS} is not what an unfinished preparation leaves: name another "
            "directory, or remove it"
        ) from None
    if same:
        return dict(found)
    if started:
        raise DataError(
            f"{path} holds an unfinished store of other text, tokenizer or settings: finish that, "
            "name another directory, or remove it"
        )
    return {}
