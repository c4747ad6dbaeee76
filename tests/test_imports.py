"""Imports go one way: from what knows little to what knows much."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1] / "shardlm"

ORDER = [
    {"config", "files", "words"},
    {"keys", "options", "validation"},
    {"arguments"},
    {"mesh"},
    {"parallel"},
    {"model", "data", "optim", "checkpoint", "observe"},
    {"train"},
    {"plan", "bench", "describe", "evaluate", "generate", "prepare"},
    {"cli"},
]
"""Parts of the package; each may import those of the lines before, none of its own line."""


def part(module: str) -> str:
    return module.split(".")[1]


def imports(file: Path) -> set[str]:
    """Modules of this package that a file names, at its top or in a function."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}: a relative import"
            base = node.module or ""
            found |= {f"shardlm.{n.name}" for n in node.names} if base == "shardlm" else {base}
    return {name for name in found if name.startswith("shardlm.")}


def test_imports_go_one_way():
    rank = {name: i for i, line in enumerate(ORDER) for name in line}
    files = [f for f in ROOT.rglob("*.py") if f != ROOT / "__init__.py"]
    parts = {file: file.relative_to(ROOT).parts[0].removesuffix(".py") for file in files}
    assert set(parts.values()) == set(rank)
    wrong = [
        f"{file.relative_to(ROOT)} imports {name}"
        for file in files
        for name in imports(file)
        if part(name) != parts[file] and rank[part(name)] >= rank[parts[file]]
    ]
    assert not wrong


def test_only_the_mesh_asks_for_devices():
    """`jax.devices` starts a backend; elsewhere a mesh says what there is."""
    asking = {
        str(file.relative_to(ROOT))
        for file in ROOT.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("devices", "local_devices")
        if isinstance(node.value, ast.Name) and node.value.id == "jax"
    }
    assert asking == {"mesh/build.py", "bench/step.py"}
