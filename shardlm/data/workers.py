"""Processes that tokenize."""

import contextlib
import multiprocessing
import multiprocessing.resource_tracker
import os
import queue
import signal
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import NamedTuple

from shardlm.data.errors import DataError
from shardlm.data.readers import Chunk, Reading
from shardlm.data.tokenizer import Tokenizer, from_json
from shardlm.data.tokenizing import Tokenized, tokenize


class WorkerLost(Exception):
    """A process that tokenizes has ended before its work."""


class _Worker(NamedTuple):
    process: multiprocessing.process.BaseProcess
    connection: Connection


class Workers:
    """So many processes, and as many threads here, each of which hands a chunk to an idle process.

    `concurrent.futures.ProcessPoolExecutor` cannot be told to leave its work, and a process of it
    outlives a parent that was killed. One of these ends when its pipe does.
    """

    def __init__(self, number: int, reading: Reading, tokenizer: Tokenizer) -> None:
        # Not forked: threads of libraries that are loaded would not come along.
        context = multiprocessing.get_context("spawn")
        self._workers: list[_Worker] = []
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        # A process begins with the signals blocked that are blocked here. Ctrl-C and TERM, which a
        # terminal or a supervisor sends to all, are for this process to answer. The tracker, which
        # the first process brings with it, would let them through again.
        multiprocessing.resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
        try:
            for _ in range(number):
                here, there = context.Pipe()
                # The tokenizer is sent by the pipe, from a thread: it may be large, and to start a
                # process with more than it reads at once waits for ever if it dies.
                process = context.Process(target=_serve, args=(there, reading), daemon=True)
                self._workers.append(_Worker(process, here))
                process.start()
                there.close()
        except BaseException:
            self._end()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._threads = ThreadPoolExecutor(number)
        for worker in self._workers:
            self._threads.submit(self._greet, worker, tokenizer.to_json())

    def submit(self, chunk: Chunk) -> Future[Tokenized]:
        """`tokenize` in one of the processes.

        Raises, by the future:
          DataError: see `tokenize`.
          WorkerLost: the process has ended.
        """
        return self._threads.submit(self._ask, chunk)

    def _greet(self, worker: _Worker, tokenizer: str) -> None:
        # That it has ended is for the one to say who asks it for something.
        with contextlib.suppress(OSError):
            worker.connection.send(tokenizer)
        self._idle.put(worker)

    def _ask(self, chunk: Chunk) -> Tokenized:
        worker = self._idle.get()
        try:
            worker.connection.send(chunk)
            answer = worker.connection.recv()
        except (EOFError, OSError):
            raise _lost(worker.process) from None
        finally:
            # Also one that has ended: who takes it next must not wait for ever.
            self._idle.put(worker)
        if isinstance(answer, Exception):
            raise answer
        return Tokenized(*answer)

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        for worker in self._workers:
            worker.process.kill()
        self._threads.shutdown(cancel_futures=True)
        self._end()

    def _end(self) -> None:
        for worker in self._workers:
            # The last one may not have started.
            if worker.process.pid is not None:
                worker.process.kill()
                worker.process.join()
            worker.connection.close()


def _lost(process: multiprocessing.process.BaseProcess) -> WorkerLost:
    process.join(timeout=5)
    code = process.exitcode
    if code is None:
        how = "does not answer"
    else:
        how = f"was ended by signal {-code}" if code < 0 else f"ended with status {code}"
    why = " (the system does that when memory runs out)" if code == -signal.SIGKILL else ""
    return WorkerLost(
        f"process {process.pid}, which tokenized, {how}{why}: the shards that are finished are "
        "kept; give the same command again, with fewer processes (shardlm prepare --workers) if "
        "memory is short"
    )


def _serve(connection: Connection, reading: Reading) -> None:
    """The life of a process."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # Of this process: the workers are the threads.
    answer: tuple | Exception
    try:
        tokenizer = from_json(connection.recv())
        while True:
            chunk = connection.recv()
            try:
                answer = tuple(tokenize(chunk, reading, tokenizer))
            except DataError as error:
                answer = error
            except Exception:  # Of a type that may not be sendable.
                answer = RuntimeError(f"in a process that tokenizes: {traceback.format_exc()}")
            connection.send(answer)
    except (EOFError, OSError):
        return  # Nobody is there any more.
