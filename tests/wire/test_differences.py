"""Differences between descriptions are found by the keys of lines, not by their positions."""

from __future__ import annotations

from distlion.wire.ask import find_difference

SETTINGS = ["distlion version: 1", "world size: 3", "lr of group 0: 0.1"]


def compare(*descriptions: list[str]) -> tuple[str, tuple[int, ...]] | None:
    return find_difference(["\n".join(lines) for lines in descriptions])


def test_equal_descriptions_differ_in_nothing() -> None:
    assert compare(SETTINGS, SETTINGS, SETTINGS) is None


def test_a_call_is_compared_with_a_call_and_never_with_a_setting() -> None:
    step, verify = ["call: step()", *SETTINGS], ["call: verify_replicas()", *SETTINGS]
    told = "call: step() on ranks 0, 2, but call: verify_replicas() on rank 1"
    assert compare(step, verify, step) == (told, (1,))


def test_a_line_that_a_rank_has_not_is_told_as_missing() -> None:
    more = [*SETTINGS, "parameter 1 of group 0: second"]
    told = "parameter 1 of group 0: second on rank 1, but not on ranks 0, 2"
    assert compare(SETTINGS, more, SETTINGS) == (told, (1,))


def test_lines_after_one_that_is_missing_are_still_compared_with_their_like() -> None:
    other = ["world size: 3", "lr of group 0: 0.2", "distlion version: 1"]
    told = "lr of group 0: 0.1 on rank 0, but lr of group 0: 0.2 on rank 1"
    assert compare(SETTINGS, other) == (told, ())


def test_lines_of_one_kind_are_told_together() -> None:
    unfrozen = ["no longer frozen: a", "no longer frozen: b"]
    told = "no longer frozen: a, no longer frozen: b on rank 0, but no longer frozen: a on rank 1"
    assert compare(unfrozen, unfrozen[:1]) == (told, ())
