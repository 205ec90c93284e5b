import os
import signal

import pytest

from distlion_lab.errors import NetlabError, WorkerFailedError
from distlion_netlab import Lab, VectorWorkload
from distlion_netlab.fleet import Fleet

pytestmark = [pytest.mark.root, pytest.mark.usefixtures("namespaces_work")]


def list_workers(lab):
    """Processes whose network namespace is one of the lab's."""
    inodes = {os.stat(f"/run/netns/{name}").st_ino for name in lab.plan.host_namespaces}
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{pid}/ns/net").st_ino in inodes:
                found.append(int(pid))
        except OSError:
            continue
    return found


@pytest.mark.slow
def test_all_workers_answer_in_rank_order_and_none_is_left(shared_lab):
    with Fleet(shared_lab) as fleet:
        assert len(list_workers(shared_lab)) == 3
        assert fleet.ask("build", "majority-all-reduce", VectorWorkload(512)) == [512] * 3
        blocks = fleet.ask("run_block", "majority-all-reduce", 2)
        assert len(blocks) == 3
        with pytest.raises(NetlabError, match="KeyError"):
            fleet.ask("run_block", "never-built", 1)
        assert fleet.ask("verify", "majority-all-reduce") == [None] * 3
    assert list_workers(shared_lab) == []


def test_a_worker_that_dies_is_reported_and_none_is_left():
    with Lab(2) as lab:
        with Fleet(lab) as fleet:
            os.kill(list_workers(lab)[0], signal.SIGKILL)
            with pytest.raises(WorkerFailedError, match="status 137"):
                fleet.ask("verify", "never-built")
        assert list_workers(lab) == []
