"""A load under a framework that one rank cannot do changes nothing on any rank."""

from __future__ import annotations

import pytest

from cluster import run_workers
from integrations.lightning_refusals import meet_damage_under_lightning
from integrations.refusals import DAMAGES, Facts, meet_damage

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def accelerate(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Facts]]:
    pytest.importorskip("accelerate")
    folder = str(tmp_path_factory.mktemp("accelerate"))
    return run_workers(meet_damage, 2, folder, timeout_s=240)


@pytest.mark.parametrize("damage", [*DAMAGES, "a missing folder"])
def test_what_one_rank_cannot_load_is_loaded_by_none(
    accelerate: list[dict[str, Facts]], damage: str
) -> None:
    for facts in accelerate:
        assert facts[damage]["said"].startswith("CheckpointError")
        assert "on rank" in facts[damage]["said"]
        assert facts[damage]["is as before"]


def test_files_of_workers_are_checked_before_anything_else(
    accelerate: list[dict[str, Facts]],
) -> None:
    for facts in accelerate:
        assert not facts["a worker's file"]["hooked"]
        assert facts["the schedule"]["hooked"]


def test_a_state_is_loaded_as_it_is_given_after_loads_that_failed(
    accelerate: list[dict[str, Facts]],
) -> None:
    for facts in accelerate:
        assert facts["after"]["lrs"] == [0.025, 0.025]
        assert facts["after"]["steps"] == [1, 1]
        assert facts["after"]["hooks"] == 1
        assert facts["after"]["loads"]


@pytest.fixture(scope="module")
def lightning(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, tuple[str, bool]]]:
    pytest.importorskip("lightning")
    folder = str(tmp_path_factory.mktemp("lightning"))
    return run_workers(meet_damage_under_lightning, 2, folder, timeout_s=240)


@pytest.mark.slow
def test_fabric_loads_on_all_ranks_or_on_none(
    lightning: list[dict[str, tuple[str, bool]]],
) -> None:
    for facts in lightning:
        for damage in ("a worker's file", "the schedule", "no names"):
            said, is_as_before = facts[f"Fabric, {damage}"]
            assert said.startswith("CheckpointError") and "on rank" in said
            assert is_as_before
        assert facts["Fabric, whole"] == ("nothing", False)


@pytest.mark.slow
def test_lightning_refuses_damage_before_it_loads_weights(
    lightning: list[dict[str, tuple[str, bool]]],
) -> None:
    for facts in lightning:
        said, is_as_before = facts["Lightning, a worker's file"]
        assert said.startswith("CheckpointError") and "failed on rank 1" in said
        assert is_as_before


@pytest.mark.slow
def test_lightning_and_fabric_do_not_warn_of_a_state_that_they_save_for_all(
    lightning: list[dict[str, tuple[str, bool]]],
) -> None:
    for facts in lightning:
        assert facts["told of one worker's state"][0] == ""


@pytest.mark.slow
def test_lightning_ends_with_an_error_where_replicas_differ(
    lightning: list[dict[str, tuple[str, bool]]],
) -> None:
    for facts in lightning:
        assert facts["Lightning, drift"][0].startswith("ReplicaMismatchError")


@pytest.mark.slow
def test_lightning_says_what_is_loaded_where_an_optimizer_does_not_fit(
    lightning: list[dict[str, tuple[str, bool]]],
) -> None:
    for facts in lightning:
        said, is_as_before = facts["Lightning, another seed"]
        assert said.startswith("CheckpointError") and "seed=0" in said
        assert "Lightning has already loaded the model" in said
        assert not is_as_before
