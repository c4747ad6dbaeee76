"""Opening what may be missing: files, URLs by fsspec, optional packages, datasets by name.

Optional packages are imported when they are first needed, so that nobody waits for what they do
not use, and every fault is an error that names the source.
"""

import contextlib
import importlib
import re
import sys
from collections.abc import Iterator
from typing import IO, Any, NoReturn

from shardlm.data.errors import DataError

HUB = "hf:"
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")


def is_url(path: str) -> bool:
    """Whether `path` starts with a scheme."""
    return _URL.match(path) is not None


@contextlib.contextmanager
def opened(path: str) -> Iterator[IO[bytes]]:
    """The bytes of a path or a URL. A fault while they are read is an error that names it.

    Raises:
      DataError: they cannot be opened or read.
    """
    if is_url(path):
        fs, inner = filesystem(path)
        with reported(path), fs.open(inner, "rb") as file:
            yield file
        return
    try:
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        unreadable(error, path)


def require(package: str, extra: str, what: str) -> Any:
    """The optional package, imported.

    Raises:
      DataError: it is not installed; `what`, as messages begin, needs it, and the extra `extra`
        of shardlm brings it.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise DataError(
            f"{what} needs the package {package} ({error}): in the clone of shardlm, give make "
            f"setup EXTRAS={extra}, or, for an environment of your own, pip install '.[{extra}]'"
        ) from error


def from_hub(path: str, load: str, **options: Any) -> Any:
    """What the function `load` of datasets returns for `hf:NAME:CONFIG:SPLIT`.

    Raises:
      DataError: no such dataset, or it cannot be reached.
    """
    datasets = require("datasets", "hf", f"data.sources: {path}")
    name, config, _ = path.removeprefix(HUB).split(":")
    with reported(path, "correct the name, the configuration and the split, or the network"):
        return getattr(datasets, load)(name, config or None, **options)


def unreadable(error: OSError, path: str | None = None) -> NoReturn:
    raise DataError(
        f"data.sources: {path or error.filename} cannot be read ({error.strerror or error}): make "
        "it readable, or leave it out of the sources"
    ) from error


def filesystem(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL and the path in it."""
    import fsspec.core
    from fsspec.registry import known_implementations

    try:
        with reported(url):
            return fsspec.core.url_to_fs(url)
    except DataError as error:
        if not isinstance(error.__cause__, ImportError):
            raise
        scheme = url.split("://")[0]
        package = known_implementations[scheme]["class"].split(".")[0]
        # What fsspec itself implements needs packages that an extra of fsspec names.
        package = f"fsspec[{scheme}]" if package == "fsspec" else package
        raise DataError(
            f"data.sources: {url} needs a package ({error.__cause__}): {sys.executable} -m pip "
            f"install '{package}'"
        ) from error.__cause__


@contextlib.contextmanager
def reported(path: str, do: str = "make it readable, or leave it out") -> Iterator[None]:
    """Faults of fsspec's and the hub's many packages, which share no type, as errors of `path`."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise DataError(
            f"data.sources: {path} cannot be read ({type(error).__name__}: {error}): {do}"
        ) from error
