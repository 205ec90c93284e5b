"""A run that is saved and resumed has the bits of one that was not interrupted."""

from __future__ import annotations

import itertools
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import distlion
import matrix
from checkpoint.runs import STEPS, Run
from distlion import errors
from distlion.checkpoint.remap import WORLD_CHANGES, mix_momenta, share_out
from tiers import in_tiers

SYNCS = {"none": None, "every 2": distlion.MomentumSync(every=2), "some": None}
SYNCS["some"] = distlion.MomentumSync(every=2, select="*weight")


FIRST = matrix.first_of_each_class()


# Quick: a rule of each class, and every way of averaging.
@pytest.mark.parametrize(
    ("rule", "sync"),
    in_tiers(
        itertools.product(matrix.RULES, SYNCS),
        lambda case: case[0] == "majority" or (case[0] in FIRST and case[1] == "none"),
    ),
)
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(
    tmp_path: Path, rule: str, sync: str
) -> None:
    settings: dict[str, Any] = {"aggregation": matrix.RULES[rule], "momentum_sync": SYNCS[sync]}
    whole = Run(**settings)
    losses = whole.train(0, STEPS)
    first = Run(**settings)
    first.train(0, 3)
    first.save(tmp_path)
    second = Run(**settings)
    second.train(0, 1)  # what is loaded must not depend on what was there
    loaded = second.load(tmp_path)
    assert loaded.step == second.optimizer.committed_step == 3
    assert second.train(3, STEPS) == losses[3 * 4 :]
    assert second.equals(whole.tensors())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", ["mean", "map"])
def test_the_mean_momentum_is_kept_for_every_pair_of_numbers(rule: Any, dtype: torch.dtype) -> None:
    for saved in range(1, 9):
        generator = torch.Generator().manual_seed(saved)
        momenta = [torch.randn(65, generator=generator).to(dtype) for _ in range(saved)]
        mean = torch.stack(momenta).double().mean(0)
        for present in range(1, 9):
            mixed = []
            for voter in range(present):
                shares = share_out(voter, saved=saved, present=present, rule=rule)
                assert sum(weight for _, weight in shares) == 1
                mixed.append(mix_momenta([momenta[index] for index, _ in shares], shares))
                assert mixed[-1].dtype == dtype
            # Each momentum is rounded once to its dtype: half a unit in the last place of the
            # largest, about 4.
            tolerance = 4 * torch.finfo(dtype).eps
            assert float((torch.stack(mixed).double().mean(0) - mean).abs().max()) <= tolerance
            if saved == present:
                assert all(map(torch.equal, mixed, momenta))


def test_momenta_are_averaged_without_a_rounding_of_each_share() -> None:
    generator = torch.Generator().manual_seed(3)
    momenta = [1 + torch.rand(1000, generator=generator) for _ in range(3)]
    found = mix_momenta(momenta, share_out(0, saved=3, present=1, rule="mean"))
    rows = zip(*(momentum.tolist() for momentum in momenta), strict=True)
    # One rounding to float32, of numbers from 1 to 2, beside which those to float64 are nothing.
    bound = Fraction(1, 2**24) + Fraction(1, 2**48)
    for row, mean in zip(rows, found.tolist(), strict=True):
        assert abs(sum(map(Fraction, row)) / 3 - Fraction(mean)) <= bound


def test_map_gives_each_worker_its_own_neighbourhood() -> None:
    halves = [share_out(voter, saved=4, present=2, rule="map") for voter in range(2)]
    assert [[(index, float(weight)) for index, weight in each] for each in halves] == [
        [(0, 0.5), (1, 0.5)],
        [(2, 0.5), (3, 0.5)],
    ]
    thirds = [share_out(voter, saved=2, present=3, rule="map") for voter in range(3)]
    assert [[(index, float(weight)) for index, weight in each] for each in thirds] == [
        [(0, 1.0)],
        [(0, 0.5), (1, 0.5)],
        [(1, 1.0)],
    ]


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_other_workers_begin_with_what_the_rule_says(tmp_path: Path, workers: int) -> None:
    first = Run(4)
    first.train(0, 3)
    first.save(tmp_path)
    saved = [first.optimizer.exp_avg(worker) for worker in range(4)]
    mean = [torch.stack(each).double().mean(0).float() for each in zip(*saved, strict=True)]
    resumed = Run(workers)
    before = resumed.tensors()
    with pytest.raises(errors.CheckpointError, match=f"4 workers, and now there are {workers}"):
        resumed.load(tmp_path)
    assert resumed.equals(before)
    for rule in WORLD_CHANGES[1:]:
        resumed.load(tmp_path, on_world_change=rule)
        momenta = [resumed.optimizer.exp_avg(worker) for worker in range(workers)]
        if rule == "reset":
            assert not any(tensor.any() for each in momenta for tensor in each)
        if rule == "mean":
            assert all(all(map(torch.equal, each, mean)) for each in momenta)
        if rule == "map" and workers == 2:
            pair = [
                torch.stack(each).double().mean(0).float() for each in zip(*saved[2:], strict=True)
            ]
            assert all(map(torch.equal, momenta[1], pair))
        model = [*resumed.model.state_dict().values()]
        assert all(map(torch.equal, model, first.model.state_dict().values()))
        resumed.train(3, 4)


def test_what_comes_back_beside_the_momenta(tmp_path: Path) -> None:
    extra = {
        "epoch": 3,
        ("a", 1): [1.5, None, True, float("inf")],
        "random": torch.get_rng_state(),
        "numpy": np.random.default_rng(0).bit_generator.state,
        "array": np.arange(6, dtype=np.uint32).reshape(2, 3),
    }
    run = Run()
    path = run.save(tmp_path, extra)
    assert path == tmp_path / "step-000000000000"
    found = Run().load(path).extra
    assert torch.equal(found.pop("random"), extra.pop("random"))
    array, expected = found.pop("array"), extra.pop("array")
    assert array.dtype == expected.dtype and np.array_equal(array, expected)
    assert found == extra
    assert type(found["numpy"]["state"]["state"]) is int


@pytest.mark.parametrize(
    ("extra", "named"),
    [({"a": [1, object()]}, "extra.a.1 is a object"), (lambda: 0, "extra is a function")],
)
def test_what_would_run_code_when_read_is_refused(tmp_path: Path, extra: Any, named: str) -> None:
    with pytest.raises(errors.CheckpointError, match=named):
        Run().save(tmp_path, extra)
    assert not list(tmp_path.iterdir())


def test_other_parameters_or_another_seed_are_refused_and_nothing_is_changed(
    tmp_path: Path,
) -> None:
    Run().save(tmp_path)
    other = Run(seed=7)
    before = other.tensors()
    with pytest.raises(errors.CheckpointError, match="seed=0"):
        other.load(tmp_path)
    assert other.equals(before)
    model = torch.nn.Linear(9, 9)
    cluster = distlion.VirtualCluster(model.parameters(), workers=4)
    with pytest.raises(errors.CheckpointError, match="parameters of the optimizer"):
        distlion.load_checkpoint(tmp_path, model, cluster)
    with pytest.raises(errors.UnsupportedTypeError, match="Lion"):
        distlion.save_checkpoint(tmp_path, model, distlion.Lion(model.parameters()))


def test_a_save_in_the_background_holds_what_was_there_when_it_began(tmp_path: Path) -> None:
    run = Run()
    run.train(0, 3)
    expected = run.tensors()
    pending = distlion.save_checkpoint(
        tmp_path, run.model, run.optimizer, run.scheduler, async_=True
    )
    run.train(3, STEPS)
    path = pending.wait()
    assert pending.is_done
    resumed = Run()
    resumed.load(path)
    assert resumed.equals(expected)


def test_checkpoint_of_other_coins_is_refused_and_nothing_is_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("distlion.checkpoint.writer.COINS", 2)
        Run().save(tmp_path)
    other = Run()
    before = other.tensors()
    with pytest.raises(errors.CheckpointError, match="version 2 of the coins"):
        other.load(tmp_path)
    assert other.equals(before)


def test_checkpoint_of_the_first_coins_names_no_version(tmp_path: Path) -> None:
    Run().save(tmp_path)  # so that earlier versions of the package read it
    (path,) = tmp_path.glob("step-*/manifest.json")
    assert "coins" not in path.read_text()
