"""Compilation without much optimization, for programs that run once or twice."""

from functools import partial
from typing import Any

import jax
import pytest

OPTIONS: dict[str, Any] = {"xla_backend_optimization_level": 0}
if jax.__version_info__ < (0, 11):
    OPTIONS["xla_cpu_use_fusion_emitters"] = False


@pytest.fixture(scope="session")
def quick_jit() -> Any:
    """`jax.jit` that compiles up to six times as fast; what it makes is slower."""
    return partial(jax.jit, compiler_options=OPTIONS)
