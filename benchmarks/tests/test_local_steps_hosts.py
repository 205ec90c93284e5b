"""What the hosts of the lab exchange in the study of local steps, and its bytes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cluster import run_workers
from local_study import imported_study

pytest.importorskip("matplotlib")
pytest.importorskip("pyroute2")
pytestmark = pytest.mark.distributed

TOLERANCE = 1e-5

SHAPES = ((40, 50), (7,), (3, 5))


def draw_params() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def exchange_all(rank: int, world_size: int) -> dict[str, Any]:
    """Let every contestant exchange twice; return what there is to compare."""
    with imported_study() as found:
        torch.manual_seed(rank)
        contestants = found.contestants.make_contestants(draw_params())
        for _ in range(2):
            for each in contestants.values():
                each.prepare()
                each.exchange()
        signs, sparse = contestants["signs"], contestants["sparse"]
        votes = {
            name: contestants[name].optimizer.committed_step
            for name in ("majority", *found.contest.RULES)
        }
        sent = {name: contestants[name].account.sent_bytes for name in ("mean", "half")}
        sent |= {"signs": signs.sent_bytes, "sparse": sparse.sent_bytes}
        return {"votes": votes, "sent": sent, "signs": signs.outcome, "sparse": sparse.means}


def test_hosts_exchange_what_methods_exchange() -> None:
    results = run_workers(exchange_all, 3)
    n, tensors = 40 * 50 + 7 + 15, 3
    for each in results:
        assert set(each["votes"].values()) == {2}
        assert all(map(torch.equal, each["sparse"], results[0]["sparse"]))
        assert torch.equal(each["signs"], results[0]["signs"])
        assert each["signs"].numel() == n
        assert each["sent"]["mean"] == 2 * each["sent"]["half"] == 2 * (2 * 2 * 4 * n // 3)
        # Twice: bits of two shards, scales of each tensor and of a shard, bits of this shard.
        shard = -(-n // (8 * 3))
        assert each["sent"]["signs"] == 2 * 2 * (shard + 4 * tensors + 4 + shard)
        wire = sum(8 + math.ceil(14 * max(1, round(size / 64)) / 8) for size in (2000, 7, 15))
        assert each["sent"]["sparse"] == 2 * 2 * wire


class Recorder:
    """A contestant that notes the bytes of each of its exchanges."""

    def __init__(self, contestant: Any) -> None:
        self._contestant = contestant
        self.prepare = contestant.prepare
        self.sent: list[int] = []

    def exchange(self) -> None:
        before = self._contestant.account.sent_bytes
        self._contestant.exchange()
        self.sent.append(self._contestant.account.sent_bytes - before)


def time_low_ranks(rank: int, world_size: int, place: str) -> dict[str, Any]:
    """Return the bytes of each exchange, and what was timed."""
    with imported_study() as found:
        contestants = found.contestants.make_contestants(draw_params())
        names = (found.contestants.LOW_RANK, found.contestants.LOW_RANK_4)
        recorders = {name: Recorder(contestants[name]) for name in names}
        job = found.lab_host.Job(
            task="text", folder="", out="", links=("10mbit",), repetitions=2, place=place
        )
        timed = found.lab_host.time_links(job, lambda: None, recorders)
        sent = {name: each.sent for name, each in recorders.items()}
        return {"sent": sent, "seconds": timed.seconds, "cpu_seconds": timed.cpu_seconds}


def test_only_compressed_exchanges_of_powersgd_are_timed(tmp_path: Path) -> None:
    (tmp_path / "set").write_text("10mbit")  # in place of the program that owns the lab
    results = run_workers(time_low_ranks, 3, str(tmp_path))
    whole = 2 * 2 * 4 * (2000 + 7 + 15) // 3
    for each in results:
        for name, rank in (("low rank", 1), ("low rank 4", 4)):
            sent = each["sent"][name]
            compressed = 2 * 2 * 4 * (rank * (40 + 50) + 7 + 15) // 3
            assert sent[0] == pytest.approx(whole, abs=8)
            assert sent[-3:] == pytest.approx([compressed] * 3, abs=8)
            # Those that are timed have others like them before: one at this rate, and one without.
            assert sent[-4] == sent[-1]
            assert len(each["seconds"]["10mbit"][name]) == 2
            assert all(cpu_s > 0 for cpu_s in each["cpu_seconds"]["10mbit"][name])


def exchange_signs(rank: int, world_size: int) -> tuple[Tensor, Tensor]:
    """Return a worker's momentum and the outcome of a first exchange."""
    with imported_study() as found:
        torch.manual_seed(rank)
        contestant = found.contestants.SignsMean([torch.nn.Parameter(p) for p in draw_params()])
        contestant.prepare()
        contestant.exchange()
        return contestant._momentum, contestant.outcome


def test_signs_are_those_of_the_scaled_sum_in_each_shard() -> None:
    results = run_workers(exchange_signs, 3)
    sizes = [2000, 7, 15]
    total = np.zeros(2022)
    for momentum, _ in results:
        parts = np.split(momentum.double().numpy(), np.cumsum(sizes)[:-1])
        scaled = [np.linalg.norm(p) / math.sqrt(p.size) * np.where(p < 0, -1.0, 1.0) for p in parts]
        total += np.concatenate(scaled) / 3
    n_shard = -(-2022 // 24) * 8
    padded = np.zeros(3 * n_shard)
    padded[:2022] = total
    expected = [
        np.linalg.norm(shard) / math.sqrt(n_shard) * np.where(shard < 0, -1.0, 1.0)
        for shard in padded.reshape(3, n_shard)
    ]
    for _, outcome in results:
        np.testing.assert_allclose(
            outcome.numpy(), np.concatenate(expected)[:2022], rtol=0, atol=TOLERANCE
        )


NETWORK = {"width": 8, "layers": 1, "heads": 2, "context": 8}


def make_task(found: Any, seed: int) -> Any:
    windows = torch.randint(256, (64, 9), generator=torch.Generator().manual_seed(0)).byte()
    novels = found.text.Novels(windows.flatten(), windows[:32], windows[32:], "noise")
    return found.text.TextTask(novels, batch=9, workers=3, seed=seed, **NETWORK)


def configure(found: Any, method: str) -> Any:
    """Return a short run of three workers."""
    cell = found.contest.ContestCell(found.cells.Setting("text", 8, 9, 2, NETWORK), method, 3)
    return cell.config(0.01, 1, is_tuning=False)


def train_on_hosts(rank: int, world_size: int, method: str) -> list[Tensor]:
    with imported_study() as found:
        config = configure(found, method)
        task = make_task(found, config.seed)
        model = task.build_model()
        worker = found.lab_host.build_worker(config, task, model)
        for _ in range(config.steps):
            worker.step()
        return [param.detach() for param in model.parameters()]


@pytest.mark.parametrize("method", ["diloco-2", "diloco-2-plain", "local-2-scaled-nesterov"])
def test_a_run_on_hosts_is_the_virtual_one(method: str) -> None:
    results = run_workers(train_on_hosts, 3, method)
    with imported_study() as found:
        config = configure(found, method)
        task = make_task(found, config.seed)
        trainer = found.runs.Trainer(config, task, lambda _: None)
        trainer.run()
        expected = [param.detach() for param in trainer._model.parameters()]
        started = task.build_model().state_dict().values()

    assert all(torch.equal(*each) for each in zip(results[0], results[2], strict=True))
    for own, other in zip(results[0], expected, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=TOLERANCE)
    assert any((own - old).abs().max() > 0.01 for own, old in zip(expected, started, strict=True))
