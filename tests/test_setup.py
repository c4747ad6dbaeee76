"""The set-up scripts: which Python is taken, what is said when there is none, what is pinned."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = [ROOT / "scripts" / name for name in ("find_python.sh", "setup.sh")]
CONSTRAINTS = [ROOT / "constraints" / name for name in ("py311.txt", "py312.txt")]
PIN = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([0-9][A-Za-z0-9._]*)")


def fake_python(path: Path, version: tuple[int, int], *, lacks: str = "") -> Path:
    """An executable that answers as a Python of that version at that path would."""
    path.parent.mkdir(parents=True, exist_ok=True)
    prelude = (
        f"import sys; sys.version_info = {(*version, 0)}; "
        f"sys.executable = sys._base_executable = {str(path)!r}; "
        f"sys.modules.update(dict.fromkeys({lacks.split()!r})); exec(sys.argv[-1])"
    )
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -c {shlex.quote(prelude)} "$@"\n')
    path.chmod(0o755)
    return path


def broken_python(path: Path) -> Path:
    """An executable such as a shim of a Python that is not there: it exits 127."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\necho 'no such version' >&2\nexit 127\n")
    path.chmod(0o755)
    return path


def find(*directories: Path, python: str = "") -> subprocess.CompletedProcess[str]:
    """Run the finder with a PATH of these directories only."""
    shell = shutil.which("sh")
    assert shell is not None
    return subprocess.run(
        [shell, str(SCRIPTS[0])],
        env={"PATH": os.pathsep.join(map(str, directories)), "PYTHON": python},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


def assert_refused(result: subprocess.CompletedProcess[str], *parts: str) -> None:
    assert result.returncode != 0
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, f"one sentence expected, got {lines}"
    for part in parts:
        assert part in lines[0]


def test_newest_supported_python_that_starts_is_taken(tmp_path: Path) -> None:
    broken_python(tmp_path / "shims" / "python3.14")
    broken_python(tmp_path / "shims" / "python3.12")
    fake_python(tmp_path / "a" / "python3.11", (3, 11))
    fake_python(tmp_path / "a" / "python3", (3, 9))
    fake_python(tmp_path / "a" / "python", (3, 15))
    best = fake_python(tmp_path / "b c" / "python3.12", (3, 12))
    result = find(tmp_path / "shims", tmp_path / "absent", tmp_path / "a", tmp_path / "b c")
    assert (result.returncode, result.stdout, result.stderr) == (0, f"{best}\n", "")


def test_unversioned_name_can_be_the_newest(tmp_path: Path) -> None:
    fake_python(tmp_path / "python3.11", (3, 11))
    best = fake_python(tmp_path / "python3", (3, 13))
    assert find(tmp_path).stdout == f"{best}\n"


def test_first_on_the_path_wins_among_equals(tmp_path: Path) -> None:
    first = fake_python(tmp_path / "z" / "python3", (3, 12))
    fake_python(tmp_path / "a" / "python3.12", (3, 12))
    assert find(tmp_path / "z", tmp_path / "a").stdout == f"{first}\n"


def test_no_python_is_one_sentence(tmp_path: Path) -> None:
    assert_refused(find(tmp_path), "no Python at all", "Python 3.11 to 3.14", "make PYTHON=")


def test_old_and_broken_pythons_are_named(tmp_path: Path) -> None:
    old = fake_python(tmp_path / "python3", (3, 9))
    broken = broken_python(tmp_path / "python3.12")
    assert_refused(
        find(tmp_path), f"Python 3.9 ({old})", f"{broken} (does not start)", "Python 3.11 to 3.14"
    )


@pytest.mark.parametrize("module", ["venv", "ensurepip"])
def test_missing_module_is_named_with_its_fix(tmp_path: Path, module: str) -> None:
    fake_python(tmp_path / "python3.12", (3, 12), lacks=module)
    assert_refused(find(tmp_path), f"module {module} is missing", "apt install python3.12-venv")
    complete = fake_python(tmp_path / "python3.11", (3, 11))
    assert find(tmp_path).stdout == f"{complete}\n"


def test_python_can_be_chosen(tmp_path: Path) -> None:
    fake_python(tmp_path / "python3.13", (3, 13))
    chosen = fake_python(tmp_path / "other" / "snake", (3, 11))
    assert find(tmp_path, python=str(chosen)).stdout == f"{chosen}\n"
    too_old = fake_python(tmp_path / "old", (3, 10))
    assert_refused(find(tmp_path, python=str(too_old)), "PYTHON=", "Python 3.10", "3.11 to 3.14")
    assert_refused(find(tmp_path, python=str(tmp_path / "gone")), "PYTHON=", "does not start")


def test_active_environment_is_seen_through() -> None:
    """The Python of a virtual environment, which may be about to be removed, is not the choice."""
    result = find(Path(sys.executable).parent)
    assert result.returncode == 0
    assert Path(result.stdout.strip()).samefile(getattr(sys, "_base_executable", sys.executable))
    assert Path(result.stdout.strip()).parent != Path(sys.prefix) / "bin"


class Project:
    """A copy of what setup.sh works on, with a Python that makes environments without pip and a
    pip that only writes down what it was asked for."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "project"
        for path in [*SCRIPTS, *CONSTRAINTS, ROOT / "pyproject.toml"]:
            target = self.root / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)

        python = fake_python(folder / "bin" / "python3.14", (3, 14))
        answer = python.read_text().removeprefix("#!/bin/sh\n")
        make = f'if [ "$1" = -m ]; then exec {sys.executable} -m venv --without-pip "$3"; fi'
        python.write_text(f"#!/bin/sh\n{make}\n{answer}")

        self.log = folder / "pip.log"
        self.fails = folder / "pip.fails"
        stub = folder / "stub" / "pip" / "__main__.py"
        stub.parent.mkdir(parents=True)
        stub.write_text(
            "import os, sys\n"
            f"open({str(self.log)!r}, 'a').write(' '.join(sys.argv[1:]) + '\\n')\n"
            f"sys.exit(os.path.exists({str(self.fails)!r}))\n"
        )
        path = os.pathsep.join([str(python.parent), os.environ["PATH"]])
        self.environment = {"PATH": path, "PYTHONPATH": str(stub.parents[1])}

    def setup(self, *extras: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", str(self.root / "scripts" / "setup.sh"), *extras],
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
        )

    def installs(self, *extras: str) -> tuple[bool, list[str]]:
        """Run the set-up: whether it made .venv anew, and the installations it asked pip for."""
        mark = self.root / ".venv" / "mark"
        self.log.write_text("")
        result = self.setup(*extras)
        assert result.returncode == 0, result.stderr
        made = not mark.exists()
        mark.touch()
        return made, self.log.read_text().splitlines()


def test_setup_installs_once(tmp_path: Path) -> None:
    project = Project(tmp_path)
    made, (install,) = project.installs()
    pins = "py311" if sys.version_info[:2] == (3, 11) else "py312"
    assert made
    assert install.endswith(f"-c constraints/{pins}.txt -e .")
    assert project.installs() == (False, [])

    made, (install,) = project.installs("dev")
    assert not made
    assert install.endswith("-e .[dev]")
    made, (install,) = project.installs("tensorboard", "dev")
    assert not made
    assert install.endswith("-e .[tensorboard,dev]")
    for extras in ([], ["dev"], ["tensorboard"], ["tensorboard", "dev"]):
        assert project.installs(*extras) == (False, [])


def test_setup_follows_the_files_it_installs_from(tmp_path: Path) -> None:
    project = Project(tmp_path)
    project.installs("dev")
    changed = project.root / "pyproject.toml"
    changed.write_text(changed.read_text() + "# changed\n")
    made, (install,) = project.installs()
    assert not made
    assert install.endswith("-e .")
    made, (install,) = project.installs("dev")
    assert not made
    assert install.endswith("-e .[dev]")
    assert project.installs("dev") == (False, [])


def test_interrupted_installation_is_started_anew(tmp_path: Path) -> None:
    project = Project(tmp_path)
    project.fails.touch()
    result = project.setup()
    assert result.returncode != 0
    assert "error: the installation did not finish" in result.stderr
    (project.root / ".venv" / "mark").touch()
    project.fails.unlink()
    made, (install,) = project.installs()
    assert made
    assert install.endswith("-e .")

    project.fails.touch()
    assert project.setup("dev").returncode != 0
    project.fails.unlink()
    assert project.installs()[0]


def test_moved_or_dead_environment_is_made_anew(tmp_path: Path) -> None:
    project = Project(tmp_path)
    project.installs()
    project.root = project.root.rename(tmp_path / "else where")
    assert project.installs()[0]
    assert project.installs() == (False, [])

    (project.root / ".venv" / "bin" / "python").unlink()
    assert project.installs()[0]


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("path", CONSTRAINTS, ids=lambda path: path.stem)
def test_constraints_pin_every_direct_dependency(path: Path) -> None:
    lines = path.read_text().splitlines()
    assert [line for line in lines if not PIN.fullmatch(line)] == []
    pinned = [normalised(line.split("==")[0]) for line in lines]
    assert len(pinned) == len(set(pinned))

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    direct = [*project["dependencies"], *(line for extra in extras for line in extra)]
    names = {normalised(re.split(r"[^A-Za-z0-9._-]", line)[0]) for line in direct}
    assert names - set(pinned) == set()


def test_scripts_leave_the_registry_to_pip() -> None:
    for path in [*SCRIPTS, ROOT / "Makefile", ROOT / ".ci" / "run"]:
        text = path.read_text()
        for word in ("://", "index-url", "find-links", "trusted-host"):
            assert word not in text, f"{path.name} names a registry: {word}"
