import pytest

from distlion_lab.names import name_runs, suggest

FEW = ("all-reduce", "all-gather", "auto")
MANY = [f"rule-number-{number}" for number in range(20)]


@pytest.mark.parametrize("name", ["allreduce", "ALL-REDUCE", " all-reduced "])
def test_nearest_name_is_meant(name):
    said = suggest(name, FEW, all_in="it --help")
    assert said.startswith("did you mean all-reduce")
    assert said.endswith("? 'it --help' lists all")


def test_few_names_are_listed_where_none_is_near():
    assert suggest("pigeon", FEW, all_in="it") == "expected one of all-reduce, all-gather, auto"


def test_many_names_are_never_listed():
    assert suggest("pigeon", MANY, all_in="it --help") == "'it --help' lists all"
    assert suggest("rule-numbr-7", MANY, all_in="it").count("rule-number") <= 2


def test_a_part_between_hyphens_is_what_was_meant() -> None:
    known = ("ternary", "majority-cautious-betas-90-95", "incautious", "cautions")
    said = suggest("cautious", known, all_in="x")
    assert said == "did you mean majority-cautious-betas-90-95? 'x' lists all"


def test_runs_of_one_rule_are_told_apart_by_their_learning_rates() -> None:
    runs = [{"rule": "majority", "lr": 1e-3}, {"rule": "majority", "lr": 3e-4}]
    assert name_runs(runs) == ["majority, lr 0.001", "majority, lr 0.0003"]
    assert name_runs([runs[0], {"rule": "ternary", "lr": 1e-3}]) == ["majority", "ternary"]
