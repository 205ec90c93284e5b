"""When and where momenta are averaged."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distlion import MomentumSync
from distlion.errors import InvalidArgumentError, UnsupportedTypeError
from distlion.step import momentum
from distlion.step.diagnostics import draw_sample, measure_coherence
from distlion.step.momentum import MomentumRows, MomentumSchedule
from records import make_records

RECORDS = make_records([2, 3, 5], ["layers.0.attn.weight", "layers.0.mlp.weight", "head.weight"])


@pytest.mark.parametrize("every", [1, 3, 7, 100])
def test_momenta_are_due_in_every_kth_step(every: int) -> None:
    sync = MomentumSync(every=every)

    due = [step + 1 for step in range(3 * every) if sync.is_due(step)]

    assert due == [every, 2 * every, 3 * every]


@pytest.mark.parametrize(
    ("select", "expected"),
    [
        ("all", [True, True, True]),
        ("head.weight", [False, False, True]),
        ("layers.*", [True, True, False]),
        (["*.attn.*", "head.*"], [True, False, True]),
        (lambda name, param: param.numel() == 3, [False, True, False]),
    ],
)
def test_parameters_are_selected_by_name_pattern_or_function(
    select: Any, expected: list[bool]
) -> None:
    assert MomentumSync(every=2, select=select).choose(RECORDS) == expected


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        ({"every": 0}, InvalidArgumentError, "expected 1 or more"),
        ({"every": 2.0}, UnsupportedTypeError, "expected an integer"),
        ({"every": 2, "dtype": torch.int8}, InvalidArgumentError, "torch.bfloat16"),
        ({"every": 2, "select": ()}, InvalidArgumentError, "selects nothing"),
        ({"every": 2, "select": 3}, UnsupportedTypeError, "expected 'all'"),
    ],
)
def test_wrong_arguments_are_refused(
    wrong: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        MomentumSync(**wrong)


def test_selection_of_nothing_names_what_there_is() -> None:
    with pytest.raises(InvalidArgumentError, match=r"selects none .* layers\.0\.attn\.weight"):
        MomentumSync(every=2, select="encoder.*").choose(RECORDS)


def test_repr_rebuilds_it() -> None:
    sync = MomentumSync(every=3, select=["a", "b"], dtype=torch.bfloat16)

    assert eval(repr(sync), {"MomentumSync": MomentumSync, "torch": torch}) == sync


def test_rows_hold_whole_parameters_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(momentum, "_ROW_ELEMENTS", 5)
    records = make_records([2, 3, 0, 1, 7, 4])
    stage = MomentumSchedule(MomentumSync(every=2), records, n_workers=2)

    rows = [[param.n_kept for param in row.params] for row in stage.list_rows(1)]

    assert rows == [[2, 3], [1], [7], [4]]
    assert not stage.list_rows(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("n_elements", [1, 255, 256, 257, 4133])
@pytest.mark.parametrize("n_workers", [2, 3, 8])
def test_averaging_leaves_the_mean_and_takes_the_differences(
    dtype: torch.dtype, n_elements: int, n_workers: int
) -> None:
    generator = torch.Generator().manual_seed(n_elements)
    momenta = torch.randn(n_workers, n_elements, generator=generator)
    rows = MomentumRows(tuple(make_records([n_elements])), dtype, n_workers)

    joined = [rows.join([momentum]) for momentum in momenta]
    votes = torch.stack([rows.encode(row).view(-1) for row in joined])
    reply = rows.reduce(votes, torch.ones(n_workers, 1, dtype=torch.bool), 0).view(n_workers, -1)
    settled = torch.stack([rows.read_means(row, reply)[0][1] for row in joined])

    assert votes.shape[1] == n_workers * rows.shape.vote_bytes
    assert reply.shape[1] == rows.shape.reply_bytes
    # A sum of N numbers below 6 in float32, and one more sum for each worker.
    rounding = 6 * (n_workers + 2) * 2.0**-24
    mean = momenta.double().mean(0)
    assert (settled.double().mean(0) - mean).abs().max() <= rounding
    # What Q leaves: half of the last of 8 bits.
    left = {torch.float32: 0.0, torch.bfloat16: 2.0**-9}[dtype]
    spread = (settled.double() - mean).abs().max()
    assert spread <= 2 * left * momenta.abs().max() + rounding
    if dtype is torch.float32:
        assert all(torch.equal(row, settled[0]) for row in settled)


def test_coherence_is_1_where_workers_agree_and_1_over_n_where_they_do_not() -> None:
    agreed = [[3.0, -4.0]] * 4
    strangers = [[1.0 if i == j else 0.0 for j in range(4)] for i in range(4)]

    assert measure_coherence(agreed) == 1
    assert measure_coherence(strangers) == 0.25
    assert measure_coherence([[0.0, 0.0]] * 3) == 1


def test_sample_is_everything_of_a_small_parameter_and_256_of_a_large_one() -> None:
    small, empty, large = draw_sample(make_records([3, 0, 100_000]), seed=2**64 - 1)

    assert small.tolist() == [0, 1, 2]
    assert empty.tolist() == []
    assert len(large) == 256
    assert 0 <= int(large.min()) < 1000 < 99_000 < int(large.max()) < 100_000
