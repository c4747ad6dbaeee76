"""Shared set-up of the tests: eight simulated CPU devices, checked array shapes, real text."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from jaxtyping import install_import_hook

# All of this must stand before the first import of jax, and so before the modules under test.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("MPLBACKEND", "Agg")
# Eight devices; and code that is compiled in half the time, for models that run for milliseconds.
for flag, value in {
    "--xla_force_host_platform_device_count": 8,
    "--xla_backend_optimization_level": 0,
}.items():
    if flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}={value}".strip()

# The jaxtyping annotations of these packages are checked at every call. The configuration is left
# out: it has its own validation, and the tests read its messages.
install_import_hook(
    ["shardlm.data", "shardlm.model", "shardlm.optim", "shardlm.parallel"], "beartype.beartype"
)


@pytest.fixture(scope="session", autouse=True)
def cache() -> Iterator[None]:
    """Text is tokenized into a directory of the test session's own, here and in processes."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as path:
        patch.setenv("XDG_CACHE_HOME", path)
        yield


@pytest.fixture(scope="session")
def tinyshakespeare() -> Path:
    """The path of the tiny Shakespeare text (1,115,394 bytes, ASCII)."""
    path = Path(__file__).parents[2] / "shared" / "data" / "tinyshakespeare.txt"
    if not path.is_file():
        pytest.skip(f"needs the tiny Shakespeare text as {path}")
    return path


@pytest.fixture
def unprivileged() -> Iterator[Path]:
    """A directory of a user whom the system can refuse something: not root, even if root tests."""
    nobody = 65534
    with tempfile.TemporaryDirectory() as path:
        if os.geteuid():
            yield Path(path)
            return
        os.chown(path, nobody, nobody)
        os.seteuid(nobody)
        try:
            yield Path(path)
        finally:
            os.seteuid(0)
