import itertools
import os
import signal
import time

import pytest

from distlion_lab.errors import DataError, WorkerFailedError
from distlion_lab.training.pool import Finished, Pool, Reported

pytestmark = pytest.mark.distributed


def double(emit, job):
    emit(f"doubling {job}")
    return 2 * job


def report_pid_and_wait(emit, job):
    emit(os.getpid())
    time.sleep(60)


def fail(emit, job):
    raise DataError(f"no data for {job}")


def crash(emit, job):
    os.kill(os.getpid(), signal.SIGKILL)


def break_down(emit, job):
    raise RuntimeError("a bug")


def run_all(work, jobs, *, size=2):
    with Pool(work, size=size) as pool:
        for job in jobs:
            pool.submit(job)
        return list(pool.events())


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_every_job_tells_and_finishes():
    events = run_all(double, [1, 2, 3])
    assert {e.job: e.result for e in events if isinstance(e, Finished)} == {1: 2, 2: 4, 3: 6}
    assert {e.content for e in events if isinstance(e, Reported)} == {
        "doubling 1",
        "doubling 2",
        "doubling 3",
    }


def test_job_submitted_meanwhile_is_done_too():
    results = []
    with Pool(double, size=1) as pool:
        pool.submit(1)
        for event in pool.events():
            if isinstance(event, Finished):
                results.append(event.result)
                if event.result < 8:
                    pool.submit(event.result)
    assert results == [2, 4, 8]


def test_no_jobs_are_no_events():
    assert run_all(double, []) == []


def test_error_of_ours_is_reported_with_its_job():
    with pytest.raises(WorkerFailedError, match="job 7 failed: DataError: no data"):
        run_all(fail, ["job 7"])


def test_other_exceptions_keep_their_traceback():
    with pytest.raises(WorkerFailedError, match="RuntimeError: a bug") as raised:
        run_all(break_down, ["job"])
    assert "in break_down" in str(raised.value.__cause__)


def test_killed_process_is_reported_with_its_job():
    with pytest.raises(WorkerFailedError, match="job 7 was killed by SIGKILL"):
        run_all(crash, ["job 7"])


def test_leaving_the_pool_ends_its_processes():
    with Pool(report_pid_and_wait, size=2) as pool:
        pool.submit("a")
        pool.submit("b")
        pids = [event.content for event in itertools.islice(pool.events(), 2)]
        assert all(is_alive(pid) for pid in pids)
    assert not any(is_alive(pid) for pid in pids)
