"""The study of fine-tuning: its parts, and what it decides from records."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from programs import imported_by_name
from quality_records import Archive, best_at

pytest.importorskip("scipy")
pytest.importorskip("transformers")

MODULES = ("study_path", "scoring", "cells", "settings", "design", "answers", "pages")
PROTOCOL = Path(__file__).resolve().parents[2] / "studies" / "finetune-protocol.md"


@pytest.fixture(scope="module")
def finetune() -> Iterator[Any]:
    with imported_by_name("finetune", *MODULES) as found:
        yield found


class Points(Archive):
    """Records whose test units are shares that are right, on every task."""

    def add(self, run: Any) -> None:
        super().add(run)
        _, units = self._score(run)
        right = 1 - np.array(units) / 100
        self.found[run.name]["test"]["units"] = self._quality.scoring.pack_units(right)


def complete(finetune: Any, *factors: tuple[str, float], names: tuple[str, ...]) -> Archive:
    """Make up all records of some parts."""
    archive = Points(finetune, best_at(*factors))
    archive.complete([part for part in finetune.design.PARTS if part.name in names])
    return archive


BASES = ("f-spam", "f-brown", "f-images")


def test_parts_are_those_of_the_protocol_in_its_order(finetune: Any) -> None:
    listed = re.findall(r"^\| `(f-[a-z0-9-]+)`", PROTOCOL.read_text(), re.M)
    assert listed == [part.name for part in finetune.design.PARTS]


def test_methods_are_those_of_the_protocol(finetune: Any) -> None:
    name = r"^\| `((?:global|majority|library|local)-[a-z0-9-]+)`"
    listed = re.findall(name, PROTOCOL.read_text(), re.M)
    assert set(listed) == set(finetune.settings.TEXT_METHODS)


def test_recipe_that_is_as_good_as_adamw_reaches_the_aim(finetune: Any) -> None:
    archive = complete(finetune, names=BASES)
    claims = finetune.answers.list_claims(archive.find)
    assert finetune.answers.judge_aim(claims) == "yes"
    verdicts = {each.difference.verdict.value for each in claims if each.part in BASES}
    assert verdicts == {"matches"}


def test_recipe_that_loses_a_point_does_not_and_another_rule_closes_it(finetune: Any) -> None:
    archive = complete(finetune, ("majority-cautious", 1.0), names=BASES)
    claims = finetune.answers.list_claims(archive.find)
    assert finetune.answers.judge_aim(claims) == "no"
    assert finetune.answers.judge_aim(claims, finetune.settings.FEEDBACK) == "yes"
    trailing = {each.method for each in claims if each.difference.verdict.value == "trails"}
    assert trailing == {finetune.settings.CAUTIOUS}


def test_aim_is_open_while_only_one_task_is_run(finetune: Any) -> None:
    archive = complete(finetune, names=BASES[:1])
    claims = finetune.answers.list_claims(archive.find)
    assert finetune.answers.judge_aim(claims) == "not yet known"


def test_first_try_is_the_factor_of_least_regret(finetune: Any) -> None:
    archive = complete(finetune, names=(*BASES, "f-first-rate"))
    tries = finetune.answers.list_first_tries(archive.find)
    assert len(tries) == 12
    # Made-up losses are lowest near one rate for all methods, so AdamW's own is best.
    assert finetune.answers.choose_factor(tries) == 1.0


def test_skewed_cells_take_the_rate_of_even_data(finetune: Any) -> None:
    (skew,) = (part for part in finetune.design.PARTS if part.name == "f-skew")
    assert all(cell.tuned_as is not None and cell.workers == 4 for cell in skew.list_cells())
