"""The study of votes on tokens: which parameters are moved by what, and its answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import distlion
from programs import imported_modules


@pytest.fixture(scope="module")
def benchmark() -> Iterator[Any]:
    folder = Path(__file__).parents[1] / "tokens"
    with imported_modules(folder, "study_path", "training", "study") as (_, training, study):
        yield training, study


@pytest.mark.parametrize("method", ["cautious", "orthogonal"])
def test_embedding_and_head_have_rates_of_their_own(benchmark: Any, method: str) -> None:
    training, _ = benchmark
    model = training.TokenGPT()
    run = training.Run(method, 1e-3, embedding=4.0, head=2.0, ternary=True)
    groups = training.build_groups(model, run)
    shares = {name: group["share"] for group in groups for name, _ in group["params"]}
    assert set(shares) == {name for name, _ in model.named_parameters()}
    assert {name: share for name, share in shares.items() if share != 1} == {
        "tokens.weight": 4.0,
        "head.weight": 2.0,
    }
    ruled = [group for group in groups if "aggregation" in group]
    assert [name for group in ruled for name, _ in group["params"]] == ["tokens.weight"]
    assert all(isinstance(group["aggregation"], distlion.TernaryVote) for group in ruled)


def test_what_is_beside_the_votes_is_moved_by_adamw_alone(benchmark: Any) -> None:
    training, _ = benchmark
    model = training.TokenGPT()
    beside = ("embedding", "head")
    run = training.Run("orthogonal", 1e-3, embedding=4.0, beside=beside, beside_lr=2e-3)
    (voting, lr, _), (adamw, beside_lr, shares) = training.build_optimizers(model, run)
    assert (lr, beside_lr, sorted(shares)) == (1e-3, 2e-3, [1.0, 4.0])
    names = {id(param): name for name, param in model.named_parameters()}
    moved = [
        {names[id(p)] for group in each.param_groups for p in group["params"]}
        for each in (voting, adamw)
    ]
    assert isinstance(adamw, torch.optim.AdamW)
    assert moved[1] == {"tokens.weight", "head.weight"}
    assert moved[0] | moved[1] == set(names.values())
    assert not moved[0] & moved[1]


def test_a_tiny_run_of_votes_beside_adamw_is_that_of_a_plain_loop(
    benchmark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, _ = benchmark
    chance = np.random.default_rng(0)
    parts = {part: torch.from_numpy(chance.integers(0, 60, 400)) for part in ("train", "test")}
    monkeypatch.setattr(training, "read_tokens", lambda folder: parts)
    monkeypatch.setattr(training, "VOCABULARY", 60)
    run = training.Run(
        "orthogonal", 1e-2, beside=("embedding",), beside_lr=1e-2, windows=8, steps=3, scored="test"
    )
    found = training.train(run, tmp_path)

    torch.manual_seed(1001)
    model, draws = training.TokenGPT(), torch.Generator().manual_seed(1)
    (votes, _, _), _ = training.build_optimizers(model, run)
    mean = torch.optim.AdamW([model.tokens.weight], lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)
    for step in range(3):
        share = training.find_share(step, 3)
        for optimizer in (votes, mean):
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 * share
        windows = [
            parts["train"][start : start + 65]
            for start in torch.randint(0, 400 - 65, (8,), generator=draws)
        ]
        total = torch.zeros_like(model.tokens.weight)
        for worker in range(4):
            batch = torch.stack(windows[2 * worker : 2 * worker + 2])
            logits = model(batch[:, :-1]).flatten(0, 1)
            torch.nn.functional.cross_entropy(logits, batch[:, 1:].flatten()).backward()
            total += model.tokens.weight.grad
            model.tokens.weight.grad = None
            votes.collect(worker)
        votes.step()
        model.tokens.weight.grad = total / 4
        mean.step()
        mean.zero_grad()
    rows = torch.linspace(0, 400 - 66, training.SCORED).long()
    scored = torch.stack([parts["test"][start : start + 65] for start in rows])
    with torch.no_grad():
        logits = model(scored[:, :-1]).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, scored[:, 1:].flatten())
    assert found["loss"] == pytest.approx(float(loss), rel=1e-5)


def test_answers_follow_from_the_records(benchmark: Any) -> None:
    _, study = benchmark
    cell = study.CELLS[0]
    records = {run.name: {"loss": 6.0 - run.embedding / 100} for run in study.TUNING}
    tuned = study.choose("adamw", records.get)
    assert (tuned.method, tuned.embedding) == ("adamw", 64)
    losses = {"adamw": 5.8, "muon": 5.75, "orthogonal": 5.9, "beside": 5.7}
    for run in study.list_runs(cell, records.get):
        records[run.name] = {"loss": losses[study.find_method(run)] + 0.01 * run.seed}
    assert study.judge(records.get) == {"advised": True, "ahead of AdamW": True}
    mean, half = study.compare(cell, "beside", "adamw", records.get)
    assert mean == pytest.approx(-0.1)
    assert half == pytest.approx(0, abs=1e-9)
    for run in study.list_runs(cell, records.get):
        if run.method == "adamw" and run.seed == 3:
            records[run.name] = {"loss": 5.0}
    assert study.judge(records.get) == {"advised": True, "ahead of AdamW": False}
    assert study.judge({}.get) == {"advised": None, "ahead of AdamW": None}
    page = study.write_page(records.get)
    assert "| orthogonalized votes, AdamW for embedding and output weights | 5.740 |" in page
    assert "open" in page
