"""Bytes of votes on deltas: by the plan, by the optimizer's account, and by the interface."""

from __future__ import annotations

import json
import sys
import textwrap

import pytest

from distlion.wire import ByteCount
from distlion.wire.tcp import choose_wire
from distlion_lab.planning.line import wire_bytes
from distlion_netlab import Lab, run_command

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.usefixtures("namespaces_work")]

HOSTS, EVERY, SHORT, LONG = 3, 2, 5, 105
CASES = {
    "scaled": "aggregation=distlion.ScaledVote()",
    "residuals, 1 bit": "aggregation=distlion.ResidualVote()",
    "residuals, 2 bits": "aggregation=distlion.ResidualVote(bits=2)",
    "estimates, 1 bit": "aggregation=distlion.EstimateVote()",
    "estimates, 2 bits": "aggregation=distlion.EstimateVote(bits=2)",
    "stochastic": "aggregation=distlion.StochasticVote()",
    "outer momentum": "outer_momentum=0.9, nesterov=True",
    "server": "exchange=distlion.ParameterServer()",
}
"""Arguments of ``LocalSteps``."""

PROGRAM = textwrap.dedent(
    """
    import json, sys
    import torch
    import torch.distributed as dist
    from torch import nn
    import distlion

    arguments, periods, every = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    params = [nn.Parameter(torch.zeros(shape)) for shape in [(500, 400), (400,), (300, 500), (7,)]]
    for param in params:
        param.grad = torch.randn_like(param)
    options = {"exchange": distlion.AllReduce(), **eval(f"dict({arguments})")}
    optimizer = distlion.LocalSteps(
        torch.optim.SGD(params, 0.1),
        every=every,
        replicas=distlion.Replicas(check_every=None),
        **options,
    )
    plans = []
    for step in range(periods * every):
        if (step + 1) % every == 0:
            plans.append(vars(optimizer.plan))
        optimizer.step()
    traffic = optimizer.traffic
    print(json.dumps([dist.get_rank(), plans, traffic.sent_bytes, traffic.last_sent_bytes]))
    dist.barrier()
    dist.destroy_process_group()
    """
)


def train(lab: Lab, arguments: str, periods: int) -> tuple[list[list], list[int]]:
    """Train for some periods; return what each rank says, and the bytes that left each host."""
    lines: list[str] = []
    settings = json.dumps([arguments, periods, EVERY])
    before = lab.read_counters()
    status = run_command(
        lab,
        [sys.executable, "-c", PROGRAM, settings],
        show=lambda rank, err, line: lines.append(line.decode()),
    )
    assert status == 0, lines
    sent = [(now - then).tx_bytes for now, then in zip(lab.read_counters(), before, strict=True)]
    return sorted(json.loads(line) for line in lines if line.startswith("[")), sent


@pytest.mark.parametrize("arguments", CASES.values(), ids=CASES)
def test_plan_account_and_interface_agree(shared_lab: Lab, arguments: str) -> None:
    # The difference holds votes alone; it is large, so that resent packets weigh little.
    short, short_bytes = train(shared_lab, arguments, SHORT)
    long, long_bytes = train(shared_lab, arguments, LONG)
    assert len(long) == HOSTS
    expected, wire = [], choose_wire()
    for one, other in zip(short, long, strict=True):
        plans = [ByteCount(**plan) for plan in other[1]]
        assert other[2] - one[2] == sum(plan.sent_bytes for plan in plans[len(one[1]) :])
        assert other[3] == plans[-1].sent_bytes
        expected.append(sum(wire_bytes(plan, wire=wire) for plan in plans[len(one[1]) :]))
    assert min(expected) > 0
    counted = [more - less for more, less in zip(long_bytes, short_bytes, strict=True)]
    ratios = [found / wanted for found, wanted in zip(counted, expected, strict=True)]
    assert ratios == pytest.approx([1.0] * HOSTS, abs=0.03), (counted, expected)
