"""Checkpoints of a state: any tree of arrays, on any mesh, through Orbax.

A checkpoint is the directory DIRECTORY/STEP. In it `state` holds every array under its dotted path
(`params.embed.table`), in shards that each process writes (OCDBT), and `metadata` a JSON object
with the caller's own metadata and the path, shape, dtype and checksum of every array. A directory
gets its final name only when it is complete.

The store knows trees, shapes and shardings, and nothing of models.
"""

import json
import logging
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as managers

from shardlm.checkpoint.checksum import checksums

FORMAT = "shardlm-3"

_STEP = re.compile(r"0|[1-9]\d*")
_OURS = re.compile(r"[._].*|\d+\.(broken|orbax-checkpoint-tmp.*)")


class CheckpointError(ValueError):
    """A checkpoint, or a directory of them, that cannot be used: which, why, and what would do."""


class SaveError(OSError):
    """A save that failed. Earlier checkpoints are untouched, and `save` may be called again."""


class CheckpointStore:
    """The checkpoints of one run.

    Reading never changes the directory and looks at the disk each time, so one process may read
    while another saves.
    """

    def __init__(self, directory: str | Path, keep: int = 2, keep_every: int = 0):
        """
        Args:
          directory: where the step directories are; made by the first save.
          keep: newest checkpoints kept.
          keep_every: keep every step that is a multiple of this for ever; 0: none.
        """
        self.directory = Path(directory).absolute()
        self._keep = keep
        self._keep_every = keep_every
        self._manager: ocp.CheckpointManager | None = None
        self._saving: int | None = None
        self._is_ours = False
        """Nothing foreign was in the directory when it was first looked at."""

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending.

        Raises:
          CheckpointError: the directory holds something else, or step directories none of which is
            complete.
        """
        complete, broken = self._scan()
        if broken and not complete:
            reasons = "; ".join(f"{step}: {why}" for step, why in broken.items())
            raise CheckpointError(
                f"{self.directory} has no complete checkpoint ({reasons}): restore those "
                "directories, or remove them to start from the beginning"
            )
        return complete

    def latest(self) -> int | None:
        """Newest complete step, or None. Raises as `steps`."""
        return max(self.steps(), default=None)

    def broken(self) -> dict[int, str]:
        """Step directories newer than `latest` that are passed over, and why."""
        complete, broken = self._scan()
        return {step: why for step, why in broken.items() if step > max(complete, default=-1)}

    def metadata(self, step: int) -> dict[str, Any]:
        """The metadata given to `save`.

        Raises:
          CheckpointError: no complete checkpoint of this step.
        """
        metadata = self._contents(step)["metadata"]
        assert isinstance(metadata, dict)
        return metadata

    def save(self, step: int, state: Any, metadata: dict[str, Any], wait: bool = False) -> bool:
        """Save the state as it is now; the arrays may be donated as soon as this returns.

        A save that is still being written is waited for. Files are written in the background.

        Args:
          step: updates done.
          state: tree of `jax.Array`s.
          metadata: JSON-serialisable.
          wait: return only when the checkpoint is complete.

        Returns:
          False when a complete checkpoint of this step exists already, and nothing was done.

        Raises:
          SaveError: this save, or the one that was being written, failed; this state is not saved.
          CheckpointError: the directory holds something else.
        """
        self.wait()
        complete, broken = self._scan()
        if step in complete:
            return False
        leaves = _named(state)
        contents = {
            "format": FORMAT,
            "leaves": {name: _describe(leaf) for name, leaf in leaves.items()},
            "checksums": checksums(leaves),
            "metadata": json.loads(json.dumps(metadata)),
        }
        try:
            if self._manager is None:
                self._manager = self._open(complete, broken)
            self._saving = step
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.PyTreeSave(leaves), metadata=ocp.args.JsonSave(contents)
                ),
                force=True,
            )
        except Exception as error:
            self._fail(step, error)
        if wait:
            self.wait()
        return True

    def wait(self) -> None:
        """Return when nothing is being written.

        Raises:
          SaveError: the save that was being written failed.
        """
        if self._saving is None or self._manager is None:
            return
        step, self._saving = self._saving, None
        try:
            self._manager.wait_until_finished()
            self._manager.check_for_errors()
        except Exception as error:
            self._fail(step, error)

    def close(self) -> None:
        """Wait, and end the threads of the store. Raises as `wait`."""
        try:
            self.wait()
        finally:
            if self._manager is not None:
                manager, self._manager = self._manager, None
                manager.close()

    def restore(self, step: int, abstract_state: Any, partial: bool = False) -> Any:
        """Restore onto any mesh.

        Args:
          step: a complete step.
          abstract_state: tree of `jax.ShapeDtypeStruct`s with shardings.
          partial: leave out arrays of the checkpoint that the tree does not have.

        Returns:
          The tree with arrays of these shapes, dtypes and shardings, bit-equal to what was saved.

        Raises:
          CheckpointError: the checkpoint is missing or damaged, or differs from the tree: an array
            is missing, is extra, or has another shape or dtype (found before anything is read), or
            has not the values that were saved.
        """
        wanted = _named(abstract_state)
        contents = self._contents(step)
        saved = contents["leaves"]
        self._compare(step, saved, {n: _describe(leaf) for n, leaf in wanted.items()}, partial)
        path = self.directory / str(step) / "state"
        try:
            with ocp.Checkpointer(_state_handler()) as checkpointer:
                restored = checkpointer.restore(
                    path,
                    args=ocp.args.PyTreeRestore(
                        wanted,
                        restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
                        partial_restore=partial,
                    ),
                )
        except Exception as error:
            raise CheckpointError(
                f"{path} cannot be read: {_read_failure(error)}; {self._instead(step)}"
            ) from error
        found = checksums(restored)
        damaged = [name for name in wanted if found[name] != contents["checksums"][name]]
        if damaged:
            raise CheckpointError(
                f"{path.parent} is damaged: {', '.join(damaged[:4])} "
                f"{'are' if len(damaged) > 1 else 'is'} not as saved; {self._instead(step)}"
            )
        return jax.tree.unflatten(
            jax.tree.structure(abstract_state), [restored[name] for name in wanted]
        )

    def _instead(self, step: int) -> str:
        """What a user can do without the checkpoint of this step."""
        before = [other for other in self._scan()[0] if other < step]
        whence = f"checkpoint {max(before)}" if before else "the beginning"
        return f"remove {self.directory / str(step)} to resume from {whence}"

    def _compare(
        self, step: int, saved: dict[str, Any], wanted: dict[str, Any], partial: bool
    ) -> None:
        found = []
        for name in [*wanted, *(name for name in saved if name not in wanted)]:
            if name not in saved:
                found.append(f"{name} {_show(wanted[name])} is not in the checkpoint")
            elif name not in wanted:
                if not partial:
                    found.append(f"{name} {_show(saved[name])} is in the checkpoint only")
            elif saved[name] != wanted[name]:
                found.append(f"{name} is {_show(saved[name])} there, {_show(wanted[name])} here")
        if found:
            more = f"; and {len(found) - 4} more" if len(found) > 4 else ""
            raise CheckpointError(
                f"checkpoint {self.directory / str(step)} does not match this model and optimizer: "
                f"{'; '.join(found[:4])}{more}. Use the configuration that it was saved with, or "
                "another run.dir"
            )

    def _scan(self) -> tuple[list[int], dict[int, str]]:
        """Complete steps, and what is wrong with the others."""
        complete, broken = [], {}
        if self.directory.exists() and not self.directory.is_dir():
            raise CheckpointError(f"{self.directory} is not a directory: checkpoints go there")
        names = [path.name for path in self.directory.iterdir()] if self.directory.exists() else []
        for name in sorted(names):
            if _STEP.fullmatch(name):
                problem = self._problem(int(name))
                if problem is None:
                    complete.append(int(name))
                else:
                    broken[int(name)] = problem
            # What comes later, a note perhaps, is no reason to end a run.
            elif not _OURS.fullmatch(name) and not self._is_ours:
                raise CheckpointError(
                    f"{self.directory / name} is not a checkpoint: the directory belongs to "
                    "something else; use another run.dir"
                )
        self._is_ours = True
        return sorted(complete), dict(sorted(broken.items()))

    def _problem(self, step: int) -> str | None:
        try:
            self._contents(step)
        except CheckpointError as error:
            if isinstance(error.__cause__, OSError | ValueError):
                return _first_line(error.__cause__)
            raise
        return None

    def _contents(self, step: int) -> dict[str, Any]:
        """What `save` wrote to the JSON file of a complete checkpoint."""
        path = self.directory / str(step)
        try:
            contents = json.loads((path / "metadata" / "metadata").read_text())
            for name in ("manifest.ocdbt", "_METADATA"):
                (path / "state" / name).stat()
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path} is not a complete checkpoint: {_first_line(error)}"
            ) from error
        if not isinstance(contents, dict) or contents.get("format") != FORMAT:
            raise CheckpointError(
                f"{path} is a checkpoint of another program or version: {FORMAT!r} is the format "
                "that can be read"
            )
        leaves, sums = contents.get("leaves"), contents.get("checksums")
        known = isinstance(leaves, dict) and isinstance(sums, dict) and leaves.keys() == sums.keys()
        if not known or not isinstance(contents.get("metadata"), dict):
            raise CheckpointError(f"{path} is damaged: its metadata is not as saved")
        return contents

    def _open(self, complete: list[int], broken: Iterable[int]) -> ocp.CheckpointManager:
        for step in broken if jax.process_index() == 0 else ():
            # An old one is the rest of a deletion that was interrupted. A new one may be missed:
            # it goes out of the way of the next save of its step, and is not counted as kept.
            aside = self.directory / f"{step}.broken"
            shutil.rmtree(aside, ignore_errors=True)
            if step < max(complete, default=0):
                shutil.rmtree(self.directory / str(step))
            else:
                (self.directory / str(step)).rename(aside)
        policies: list[Any] = [managers.LatestN(self._keep)]
        if self._keep_every:
            policies.append(managers.EveryNSteps(self._keep_every))
        return ocp.CheckpointManager(
            self.directory,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=managers.AnyPreservationPolicy(policies),
                cleanup_tmp_directories=True,
            ),
            item_handlers={"state": _state_handler(), "metadata": ocp.JsonCheckpointHandler()},
        )

    def _fail(self, step: int, error: Exception) -> NoReturn:
        """Raise `SaveError`. A manager is of no use after an error: the next save makes a new one.

        What was written is removed at once: a full disk would stop the metrics too.
        """
        self._saving = None
        if self._manager is not None:
            manager, self._manager = self._manager, None
            try:
                manager.close()
            except Exception as again:
                error.add_note(f"closing: {again}")
        if jax.process_index() == 0:
            for path in self.directory.glob(f"{step}.orbax-checkpoint-tmp*"):
                shutil.rmtree(path, ignore_errors=True)
        reason = _first_line(error).rpartition('": ')[2]
        raise SaveError(
            f"checkpoint {self.directory / str(step)} was not saved: {reason}"
        ) from error


class _Quiet(logging.Filter):
    """Drops what Orbax logs: its progress, and errors that it raises as well."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "/orbax/" not in record.pathname


logging.getLogger("absl").addFilter(_Quiet())


def _state_handler() -> ocp.PyTreeCheckpointHandler:
    # Weights and moments hardly compress; without zstd a restore takes half the time.
    return ocp.PyTreeCheckpointHandler(use_compression=False)


def _named(tree: Any) -> dict[str, Any]:
    """Leaves by dotted path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    assert len(named) == len(leaves), "two leaves have the same dotted path"
    return named


def _describe(leaf: Any) -> list[Any]:
    return [list(leaf.shape), str(leaf.dtype)]


def _show(description: list[Any]) -> str:
    shape, dtype = description
    return f"({', '.join(map(str, shape))}) {dtype}"


def _read_failure(error: BaseException) -> str:
    """What TensorStore says last of the first cause, without its settings."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return _first_line(error).partition(" [tensorstore_spec")[0].rpartition(": ")[2]


def _first_line(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
