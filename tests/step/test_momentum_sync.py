"""When and where momenta are averaged."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from distlion import MomentumSync
from distlion.errors import InvalidArgumentError, UnsupportedTypeError
from distlion.step.momentum import MomentumRows, MomentumSlice, choose_least_coherent, cut_slices
from distlion.step.sample import draw_sample, measure_coherence
from records import make_records

RECORDS = make_records([2, 3, 5], ["layers.0.attn.weight", "layers.0.mlp.weight", "head.weight"])


@pytest.mark.parametrize("every", [1, 3, 7, 100])
@pytest.mark.parametrize("n_elements", [0, 1, 5, 100, 4133])
@pytest.mark.parametrize("stagger", [True, False])
def test_every_coordinate_has_its_turn_once_in_k_steps(
    every: int, n_elements: int, stagger: bool
) -> None:
    sync = MomentumSync(every=every, stagger=stagger)

    moved = [range(*sync.part(step, n_elements)) for step in range(2 * every, 3 * every)]

    assert sorted(index for part in moved for index in part) == list(range(n_elements))
    if stagger:
        assert max(map(len, moved)) <= -(-n_elements // every)
    else:
        assert [len(part) for part in moved[:-1]] == [0] * (every - 1)


@pytest.mark.parametrize("stagger", [True, False])
def test_exponential_intervals_double(stagger: bool) -> None:
    sync = MomentumSync(schedule="exponential", stagger=stagger)
    n_elements = 1000

    for interval in (1, 2, 4, 8, 64):
        steps = range(interval - 1, 2 * interval - 1)
        moved = [range(*sync.part(step, n_elements)) for step in steps]
        assert sorted(index for part in moved for index in part) == list(range(n_elements))
        assert max(map(len, moved)) <= (-(-n_elements // interval) if stagger else n_elements)


LAST_LOOK = 4096


def test_auto_looks_early_and_then_now_and_then() -> None:
    sync = MomentumSync(every=2, select="auto")
    looks = [step + 1 for step in range(LAST_LOOK) if sync.is_measured(step)]
    assert looks == [16, 2048, 4096]


def list_active() -> list[int]:
    resting = [range(16), range(2048 - 256, 2048), range(4096 - 256, 4096)]
    return [step for step in range(LAST_LOOK) if not any(step in each for each in resting)]


@pytest.mark.parametrize("sync", [{"every": 1}, {"schedule": "exponential"}])
def test_auto_averages_in_all_steps_but_those_up_to_a_look(sync: dict[str, Any]) -> None:
    auto = MomentumSync(**sync, select="auto")
    moving = [step for step in range(LAST_LOOK) if len(range(*auto.part(step, 10**6)))]
    assert moving == list_active()


@pytest.mark.parametrize("stagger", [True, False])
@pytest.mark.parametrize(
    "sync",
    [{"every": k} for k in (10, 512, 1000, 1024, 2048)] + [{"schedule": "exponential"}],
    ids=str,
)
def test_rest_of_auto_costs_no_coordinate_its_turn(sync: dict[str, Any], stagger: bool) -> None:
    auto = MomentumSync(**sync, select="auto", stagger=stagger)
    plain = MomentumSync(**sync, stagger=stagger)
    moved = [auto.part(step, 1000) for step in list_active()]
    assert moved == [plain.part(step, 1000) for step in range(len(moved))]


def test_all_never_rests() -> None:
    sync = MomentumSync(every=1)
    assert all(sync.part(step, 100) == (0, 100) for step in range(2100))
    assert not any(sync.is_measured(step) for step in range(2100))


@pytest.mark.parametrize(
    ("select", "expected"),
    [
        ("all", [True, True, True]),
        ("auto", [True, True, True]),
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
        ({}, InvalidArgumentError, "expected one of the two"),
        ({"every": 3, "schedule": "exponential"}, InvalidArgumentError, "expected one of the two"),
        ({"every": 0}, InvalidArgumentError, "expected 1 or more"),
        ({"every": 2.0}, UnsupportedTypeError, "expected an integer"),
        ({"schedule": "linear"}, InvalidArgumentError, "expected 'exponential'"),
        ({"every": 2, "dtype": torch.float16}, InvalidArgumentError, "torch.int8"),
        ({"every": 2, "stagger": 1}, UnsupportedTypeError, "expected a bool"),
        ({"every": 2, "select": ()}, InvalidArgumentError, "selects nothing"),
        ({"every": 2, "select": 3}, UnsupportedTypeError, "expected 'all'"),
        ({"every": 2, "select": "auto", "share": 0}, InvalidArgumentError, "above 0"),
        ({"every": 2, "select": "auto", "share": "1"}, UnsupportedTypeError, "expected a number"),
        ({"every": 2, "share": 0.3}, InvalidArgumentError, "belongs to select='auto'"),
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
    sync = MomentumSync(every=3, select=["a", "b"], dtype=torch.int8, stagger=False)

    assert eval(repr(sync), {"MomentumSync": MomentumSync, "torch": torch}) == sync


def test_slices_of_a_step_cross_parameters() -> None:
    sync = MomentumSync(every=2)
    selected = [RECORDS[0], RECORDS[2]]

    first = cut_slices(sync, 0, selected)
    second = cut_slices(sync, 1, selected)

    assert first == (MomentumSlice(0, 0, 2), MomentumSlice(2, 0, 1))
    assert second == (MomentumSlice(2, 1, 5),)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("n_elements", [1, 255, 256, 257, 4133])
@pytest.mark.parametrize("n_workers", [2, 3, 8])
def test_averaging_leaves_the_mean_and_takes_the_differences(
    dtype: torch.dtype, n_elements: int, n_workers: int
) -> None:
    generator = torch.Generator().manual_seed(n_elements)
    momenta = torch.randn(n_workers, n_elements, generator=generator)
    rows = MomentumRows((MomentumSlice(0, 0, n_elements),), dtype, n_workers)

    joined = [rows.join([momentum]) for momentum in momenta]
    votes = torch.stack([rows.encode(row).view(-1) for row in joined])
    reply = rows.reduce(votes, torch.ones(n_workers, 1, dtype=torch.bool), 0).view(n_workers, -1)
    settled = torch.stack([rows.settle(row, reply)[0][1] for row in joined])

    assert votes.shape[1] == n_workers * rows.shape.vote_bytes
    assert reply.shape[1] == rows.shape.reply_bytes
    # A sum of N numbers below 6 in float32, and one more sum for each worker.
    rounding = 6 * (n_workers + 2) * 2.0**-24
    mean = momenta.double().mean(0)
    assert (settled.double().mean(0) - mean).abs().max() <= rounding
    # What Q leaves: half a level of 1/127 of the largest, or half of the last of 8 bits.
    left = {torch.float32: 0.0, torch.bfloat16: 2.0**-9, torch.int8: 0.5 / 127}[dtype]
    spread = (settled.double() - mean).abs().max()
    assert spread <= 2 * left * momenta.abs().max() + rounding
    if dtype is torch.float32:
        assert all(torch.equal(row, settled[0]) for row in settled)


def test_zeros_survive_int8() -> None:
    rows = MomentumRows((MomentumSlice(0, 0, 300),), torch.int8, 2)

    row = rows.join([torch.zeros(300)])

    assert torch.equal(rows.decode(rows.encode(row)), row)


def test_coherence_is_1_where_workers_agree_and_1_over_n_where_they_do_not() -> None:
    agreed = [[3.0, -4.0]] * 4
    strangers = [[1.0 if i == j else 0.0 for j in range(4)] for i in range(4)]

    assert measure_coherence(agreed) == 1
    assert measure_coherence(strangers) == 0.25
    assert measure_coherence([[0.0, 0.0]] * 3) == 1


def test_the_most_dispersed_are_chosen_until_their_share_is_full() -> None:
    assert choose_least_coherent([0.9, 0.2, 0.5], [50, 10, 40], 0.1) == [False, True, False]
    assert choose_least_coherent([0.9, 0.2, 0.5], [50, 10, 40], 0.11) == [False, True, True]
    assert choose_least_coherent([0.9, 0.2, 0.5], [50, 10, 40], 1.0) == [True, True, True]


def test_sample_is_everything_of_a_small_parameter_and_256_of_a_large_one() -> None:
    small, empty, large = draw_sample(make_records([3, 0, 100_000]), seed=2**64 - 1)

    assert small.tolist() == [0, 1, 2]
    assert empty.tolist() == []
    assert len(large) == 256
    assert 0 <= int(large.min()) < 1000 < 99_000 < int(large.max()) < 100_000
