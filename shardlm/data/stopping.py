"""Work that can be told to stop."""

import contextlib
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from shardlm.data.threads import Threads

Result = TypeVar("Result")


class Interrupted(Exception):
    """A preparation that was asked to stop; the shards that are finished stay."""


Progress = Callable[[int, int], None]
"""Is told, from any thread, that so many more bytes of the inputs, as stored, are read, and that so
many ids were made of them. Both are 0 now and then: the work goes on."""

Display = Callable[[str, int], contextlib.AbstractContextManager[Progress]]
"""Shows, within the context, how far what the first argument names is; of so many bytes, 0 if
nobody knows."""


def unseen(stored_bytes: int, tokens: int) -> None:
    """Progress that nobody sees."""


def quiet(what: str, total: int) -> contextlib.AbstractContextManager[Progress]:
    """A display that shows nothing."""
    return contextlib.nullcontext(unseen)


def unless_stopped(
    work: Callable[[], Result], stopped: Callable[[], bool], progress: Progress = unseen
) -> Result:
    """The result of `work`, which a library does that knows nothing of signals.

    It runs in a thread, so that this one sees them: Python handles a signal only between two of its
    own instructions. When it is to stop, the thread is left alone and ends with the process.

    Raises:
      Interrupted: `stopped`.
      Exception: what `work` raises.
    """
    with Threads(1) as threads:
        return result_of(threads.submit(work), stopped, progress)


def result_of(
    future: Future[Result], stopped: Callable[[], bool], progress: Progress = unseen
) -> Result:
    """The result of a future, waited for.

    Raises:
      Interrupted: `stopped`, which is asked now and then.
      Exception: what it ended with.
    """
    while not stopped():
        try:
            # Not what the work itself raises as a TimeoutError.
            error = future.exception(timeout=0.2)
        except TimeoutError:
            progress(0, 0)
            continue
        if error is not None:
            raise error
        return future.result()
    raise Interrupted
