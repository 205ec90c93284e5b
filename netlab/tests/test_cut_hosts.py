"""A host whose cable is pulled: both sides stop at the timeout, and nobody trains on alone."""

from __future__ import annotations

import json
import sys

import pytest

pytestmark = [
    pytest.mark.root,
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.usefixtures("namespaces_work"),
]

TIMEOUT_S = 3.0
PULLED_AT_STEP = 3

WORKER = f"""
import hashlib, json, os, sys
import torch, torch.distributed as dist
import distlion

rank = int(os.environ["RANK"])
torch.set_num_threads(1)
torch.manual_seed(rank)
dist.init_process_group("gloo")
model = torch.nn.Linear(200, 100)
optimizer = distlion.DistributedLion(
    model.parameters(),
    lr=1e-3,
    exchange=distlion.AllReduce(),
    timeouts=distlion.Timeouts(step_s={TIMEOUT_S}),
)

def digest():
    tensors = [t for p in model.parameters() for t in (p, optimizer.state[p]["exp_avg"])]
    return hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()

try:
    while True:
        model(torch.randn(4, 200)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        committed = digest()
        if optimizer.committed_step == {PULLED_AT_STEP}:
            print("ready", flush=True)
except distlion.errors.StepError as error:
    print(json.dumps({{
        "kind": type(error).__name__,
        "text": str(error),
        "culprits": error.culprits,
        "committed_step": error.committed_step,
        "counter": optimizer.committed_step,
        "unchanged": digest() == committed,
    }}), flush=True)
    raise
"""


@pytest.fixture(scope="module")
def partition(namespaces_work):
    """Pull the cable of host 2 while all train; return what each rank reported."""
    from distlion_netlab import Lab, run_command

    ready, reports, statuses, errors = set(), {}, {}, []
    # The shell reports the status of each, and no rank is ended because another one has failed.
    command = ["sh", "-c", '"$0" -c "$1"; echo ended $?', sys.executable, WORKER]
    with Lab(3) as lab:

        def show(rank, is_error, line):
            if is_error:
                errors.append((rank, line.decode()))
            elif line == b"ready":
                ready.add(rank)
                if len(ready) == 3:
                    lab.set_link(2, up=False)
            elif line.startswith(b"ended"):
                statuses[rank] = int(line.split()[1])
            else:
                reports[rank] = json.loads(line)

        run_command(lab, command, show=show)
    assert len(ready) == 3, errors
    return reports, statuses, errors


@pytest.mark.parametrize("rank", [0, 1])
def test_both_other_hosts_name_the_one_without_cable_at_the_timeout(partition, rank):
    reports, _, errors = partition
    report = reports[rank]
    assert report["kind"] == "StepTimeoutError", errors
    assert report["culprits"] == [2], report["text"]


def test_host_without_cable_stops_too(partition):
    reports, _, errors = partition
    report = reports[2]
    assert report["kind"] == "StepTimeoutError", errors
    assert "cut off" in report["text"]


def test_nobody_trains_on_alone(partition):
    reports, *_ = partition
    counters = [reports[rank]["counter"] for rank in range(3)]
    assert max(counters) - min(counters) <= 1
    for report in reports.values():
        assert report["committed_step"] == report["counter"]
        assert report["unchanged"]


def test_interpreters_end_by_themselves(partition):
    """With the traceback's exit status, not by a signal."""
    assert partition[1] == {0: 1, 1: 1, 2: 1}
