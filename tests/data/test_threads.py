import subprocess
import sys
import threading

import pytest

from shardlm.data.threads import Threads


def test_they_do_what_they_are_given():
    with Threads(3) as threads:
        futures = [threads.submit(pow, i, exp=2) for i in range(50)]
        assert [future.result(timeout=60) for future in futures] == [i * i for i in range(50)]
        with pytest.raises(ZeroDivisionError):
            threads.submit(divmod, 1, 0).result(timeout=60)


def test_so_many_at_a_time():
    meeting = threading.Barrier(4)
    with Threads(4) as threads:
        # Each waits for the three others.
        futures = [threads.submit(meeting.wait, 60) for _ in range(4)]
        assert sorted(future.result(timeout=60) for future in futures) == [0, 1, 2, 3]


def test_closed_they_leave_what_has_not_begun():
    begun, leave = threading.Event(), threading.Event()

    def wait():
        begun.set()
        leave.wait(60)
        return threading.current_thread()

    with Threads(1) as threads:
        first = threads.submit(wait)
        second = threads.submit(int)
        assert begun.wait(60)
    leave.set()
    thread = first.result(timeout=60)
    thread.join(60)
    assert not thread.is_alive()
    assert not second.done()


def test_the_end_of_a_process_does_not_wait_for_them():
    program = """
import time
from shardlm.data.threads import Threads
threads = Threads(2)
for _ in range(8):
    threads.submit(time.sleep, 600)
"""
    # Raises when it takes longer.
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
