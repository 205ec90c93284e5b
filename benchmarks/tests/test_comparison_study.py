"""The study asks for what the claims need, and its answers follow from the runs alone."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from comparisons import make_record, make_text_comparison
from distlion_lab.report.comparison import Cell, Comparison
from distlion_lab.report.document import Table, render_markdown
from distlion_lab.training.methods import find_method
from programs import imported_program

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks/results/comparison"

pytest.importorskip("matplotlib")
pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def modules() -> Iterator[Any]:
    """The modules ``claims`` and ``parts``, and the program."""
    with imported_program("comparison", "claims", "parts") as found:
        yield found


@pytest.fixture(scope="module")
def claims(modules: Any) -> Any:
    return modules[0]


@pytest.fixture(scope="module")
def parts(modules: Any) -> Any:
    return modules[1]


@pytest.fixture(scope="module")
def program(modules: Any) -> Any:
    return modules[2]


def read_tables(part: str) -> tuple[dict[tuple[str, int], list[float]], dict[str, str]]:
    """Read a committed report: the grid of each cell, and what each method was."""
    grids, definitions = {}, {}
    for line in (RESULTS / part / "report.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 10 and cells[-1] in ("", "yes") and cells[1].isdecimal():
            grids[cells[0], int(cells[1])] = [float(lr) for lr in cells[2:8:2]]
        if len(cells) == 5 and "(" in cells[2]:
            definitions[cells[0]] = cells[2]
    return grids, definitions


# Averages that were spread over steps are recorded and can no longer be run: in each step
# a part ("stagger=True"), or those that differ most.
AUTO = "majority-sync-10-auto"


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["images-baselines", "images-rules", "images-alpha-0.1"])
def test_committed_study_tuned_what_the_methods_are_today(parts: Any, name: str) -> None:
    grids, definitions = read_tables(name)
    (part,) = (each for each in parts.PARTS if each.name == name)
    cells = part.settings("data", seeds=3).cells()
    grids = {cell: grid for cell, grid in grids.items() if cell[0] != AUTO}
    assert set(grids) == {(cell.method, cell.workers) for cell in cells}
    for cell in cells:
        assert grids[cell.method, cell.workers] == pytest.approx(cell.grid(), rel=1e-2)
    for method, definition in definitions.items():
        if "stagger=True" in definition:
            continue
        assert find_method(method).definition.removesuffix(", None") == definition


def test_committed_pictures_are_those_that_reports_show(parts: Any) -> None:
    for part in parts.PARTS:
        folder = RESULTS / part.name
        shown = re.findall(r"\]\((\w+\.png)\)", (folder / "report.md").read_text())
        assert shown == list(part.figures)
        assert {path.name for path in folder.glob("*.png")} == set(shown)


def answer_first(claims: Any, part: Comparison) -> dict[str, Any]:
    """Return the first answer to each claim."""
    return {claim: each[0] for claim, each in claims.answer_all({"p": part}).items()}


def make_part(
    errors: Mapping[str, Sequence[float]],
    *,
    workers: int = 4,
    bits: Mapping[str, float] | None = None,
    diverged: Sequence[str] = (),
    edge: Sequence[str] = (),
    alpha: float | None = None,
) -> Comparison:
    """Make up a comparison on images from the errors, in percent, of seeds 1, 2, ..."""
    cells = [
        Cell(
            method=method,
            workers=workers,
            grid=(1e-3, 2e-3) if method in edge else (5e-4, 1e-3, 2e-3),
            tuning=(),
            lr=1e-3,
            records=tuple(
                make_record(
                    method=method,
                    workers=workers,
                    seed=seed,
                    test_accuracy=1 - error / 100,
                    bits=(bits or {}).get(method, 1.0) / 2,
                    diverged=method in diverged,
                )
                for seed, error in enumerate(seeds, start=1)
            ),
        )
        for method, seeds in errors.items()
    ]
    settings = {"task": "images", "methods": list(errors), "workers": [workers], "alpha": alpha}
    settings |= {"partition": "even", "steps": 10, "batch_size": 8, "seeds": 3}
    return Comparison({"settings": settings}, tuple(cells))


def test_a_par_is_within_the_margin_on_the_mean_of_paired_differences(claims: Any) -> None:
    part = make_part(
        {
            "global-lion": [50, 60, 70],
            "majority": [50.5, 61.6, 70.6],
            "average": [51.5, 60.5, 71.3],
        }
    )

    answers = answer_first(claims, part)

    majority = answers["Majority vote matches global Lion"]
    assert (majority.holds, majority.seeds) == (True, "2 of 3")
    assert majority.figures == "majority - global-lion: +0.90 ± 0.61 points"
    average = answers["Average matches global Lion"]
    assert (average.holds, average.seeds) == (False, "1 of 3")


def test_being_ahead_counts_only_at_no_more_traffic(claims: Any) -> None:
    errors = {"majority": [50.0, 50.0], "average": [50.0, 50.0], "dgc": [60.0, 60.0]}
    part = make_part(errors, bits={"majority": 2, "average": 7, "dgc": 6})

    answers = answer_first(claims, part)

    assert answers["majority leads dgc at no more traffic"].holds is True
    dearer = answers["average leads dgc at no more traffic"]
    assert dearer.holds is None
    assert dearer.figures == "average - dgc: -10.00 ± 0.00 points; 7 bits against 6"


@pytest.mark.parametrize(
    ("two", "four", "holds", "enough"),
    [(50.5, 50, True, "p = 2"), (52, 50.5, True, "p = 4"), (52, 52, False, "none")],
)
def test_the_fewest_bits_that_close_the_gap_are_named(
    claims: Any, two: float, four: float, holds: bool, enough: str
) -> None:
    errors = {"global-lion": [50], "majority": [53], "quantized-2": [two], "quantized-4": [four]}

    answers = answer_first(claims, make_part(errors))

    answer = answers["votes of p bits close the gap between one bit and global Lion"]
    assert answer.holds is holds
    assert answer.figures.endswith(f"enough: {enough}")


def test_bits_are_compared_one_step_at_a_time(claims: Any) -> None:
    errors = {"majority": [53], "quantized-2": [52], "quantized-4": [52]}

    answers = claims.answer_all({"p": make_part(errors)})["votes of more bits end lower"]

    assert [(answer.holds, answer.figures.partition(":")[0]) for answer in answers] == [
        (True, "quantized-2 - majority"),
        (False, "quantized-4 - quantized-2"),
    ]


def test_lion_cub_is_set_against_its_votes_alone(claims: Any) -> None:
    errors = {"global-lion": [50], "quantized-2": [52], "lion-cub": [51.5]}

    answers = answer_first(claims, make_part(errors))

    helped = answers[
        "averaging momenta once in 100 steps, as Lion Cub does, helps votes of two bits"
    ]
    assert helped.holds is True
    assert helped.figures.startswith("lion-cub - quantized-2: -0.50")
    assert answers["Lion Cub matches global Lion"].holds is False


def test_lion_cub_is_what_the_claim_says() -> None:
    definition = find_method("lion-cub").definition
    assert "QuantizedVote(bits=2" in definition
    assert "MomentumSync(every=100" in definition


def test_where_there_is_no_gap_nothing_is_claimed(claims: Any) -> None:
    errors = {"global-lion": [50], "majority": [50], "quantized-2": [50], "quantized-4": [50]}
    errors |= {"majority-sync-10": [50], "majority-sync-10-auto": [49]}
    bits = {"majority-sync-10": 10, "majority-sync-10-auto": 4}

    answers = answer_first(claims, make_part(errors, bits=bits))

    gap = answers["votes of p bits close the gap between one bit and global Lion"]
    subset = answers["averaging the momenta of some parameters recovers what averaging all does"]
    assert gap.holds is None
    assert subset.holds is None


def test_a_subset_recovers_by_its_share_of_the_gain(claims: Any) -> None:
    every, attention = "majority-sync-10", "majority-sync-10-attention"
    errors = {"majority": [60], every: [50], attention: [52], "majority-sync-10-auto": [55]}
    bits = {"majority": 2, every: 10, attention: 4, "majority-sync-10-auto": 6}

    answers = claims.answer_all({"p": make_part(errors, bits=bits)})

    claim = "averaging the momenta of some parameters recovers what averaging all does"
    gain = "gained by all +10.00 ± 0.00 points, by"
    auto = "majority-sync-10-auto"
    assert [(each.holds, each.figures) for each in answers[claim]] == [
        (True, f"{gain} {attention} +8.00 ± 0.00 points with 25% of the momenta's bits"),
        (False, f"{gain} {auto} +5.00 ± 0.00 points with 50% of the momenta's bits"),
    ]


def test_a_coin_is_asked_of_even_numbers_only(claims: Any) -> None:
    errors = {"majority": [49.0, 52.0], "majority-zero": [51.0, 51.0]}
    claim = "random tie-breaking is better than no update"

    (even,) = claims.answer_all({"p": make_part(errors, workers=2)})[claim]

    assert (even.holds, even.seeds) == (True, "1 of 2")
    assert claim not in claims.answer_all({"p": make_part(errors, workers=3)})


def test_equal_is_not_better(claims: Any) -> None:
    errors = {"majority": [50.0, 52.0], "majority-zero": [51.0, 51.0]}
    answer = answer_first(claims, make_part(errors))["random tie-breaking is better than no update"]
    assert (answer.holds, answer.seeds) == (False, "1 of 2")


@pytest.mark.parametrize(
    ("diverged", "holds"), [("majority", False), ("global-lion", True), ("both", False)]
)
def test_what_diverged_is_behind_what_did_not(claims: Any, diverged: str, holds: bool) -> None:
    which = ("majority", "global-lion") if diverged == "both" else (diverged,)
    part = make_part({"global-lion": [50, 50], "majority": [50, 50]}, diverged=which)

    answer = answer_first(claims, part)["Majority vote matches global Lion"]

    assert answer.holds is holds
    assert answer.figures.endswith("(diverged)")


def test_a_rate_at_the_edge_of_its_grid_is_reported(claims: Any) -> None:
    part = make_part({"majority": [50], "dgc": [60]}, edge=("dgc",))
    answer = answer_first(claims, part)["majority leads dgc at no more traffic"]
    assert "lr at the edge of the grid: dgc;" in answer.figures


def test_parts_that_share_runs_answer_once_and_in_order(claims: Any) -> None:
    errors = {"global-lion": [50], "majority": [50]}
    first, again, other = (make_part(errors, workers=workers) for workers in (4, 4, 2))
    elsewhere = make_part(errors, alpha=0.1)
    parts = {"first": first, "again": again, "other": other, "elsewhere": elsewhere}

    answers = claims.answer_all(parts)["Majority vote matches global Lion"]

    assert [(answer.part, answer.workers) for answer in answers] == [
        ("first", 4),
        ("other", 2),
        ("elsewhere", 4),
    ]


@pytest.mark.parametrize(
    ("held", "says"),
    [
        ([None], "has no object here"),
        ([True, None], "holds here (1 of 1)"),
        ([False, False], "does not hold here (0 of 2)"),
        ([True, False], "holds in 1 of 2 cases"),
    ],
)
def test_a_sum_says_in_how_many_cases(claims: Any, held: list[bool | None], says: str) -> None:
    assert claims.sum_up([claims.Answer("c", "p", 4, "", holds) for holds in held]) == says


def test_all_parts_have_settings_with_and_without_data(parts: Any) -> None:
    for part in parts.PARTS:
        real = part.settings("somewhere", seeds=3)
        embedded = part.settings(None, seeds=3)
        assert (real.methods, real.workers) == (embedded.methods, embedded.workers)
        assert (real.data, embedded.data) == ("somewhere", None)
        assert real.partition is embedded.partition
        json.loads(Path(real.model_config).read_text())


def test_the_program_runs_parts_and_writes_what_they_say(
    program: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings = make_text_comparison(tmp_path, workers=(2,))
    part = program.PARTS[0]
    monkeypatch.setattr(type(part), "settings", lambda *_, **__: settings)
    results = tmp_path / "results"
    monkeypatch.setattr(
        sys,
        "argv",
        f"comparison --parts {part.name} --jobs 1 --records {tmp_path / 'records'} "
        f"--results {results}".split(),
    )

    program.main()

    assert "Majority vote matches global Lion: " in capsys.readouterr().out
    found = json.loads((results / "claims.json").read_text())
    assert [each["seed"] for each in found["outcomes"]] == [1, 2, 1, 2]
    assert [each["workers"] for each in found["answers"]] == [2]
    text = (results / "claims.md").read_text()
    assert f"[{part.name}]({part.name}/report.md)" in text
    assert {path.name for path in (results / part.name).iterdir()} == {"report.md", *part.figures}
    assert "](bits.png)" in (results / part.name / "report.md").read_text()


def test_the_program_does_not_mix_data(
    program: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["comparison", "--images", "x"])
    with pytest.raises(SystemExit):
        program.main()
    assert "go together" in capsys.readouterr().err


def test_embedded_data_and_single_parts_leave_the_committed_results_alone(
    program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    comparison = make_part({"global-lion": [50], "majority": [50]})
    monkeypatch.setattr(program, "run_part", lambda *_: comparison)
    monkeypatch.setattr(program, "RESULTS", tmp_path / "committed")
    for number, arguments in enumerate(("", "--images x --books y --parts text-rules")):
        records = tmp_path / str(number)
        given = f"comparison --records {records} {arguments}"
        monkeypatch.setattr(sys, "argv", given.split())
        program.main()
        assert (records / "results" / "claims.md").exists()
    assert not (tmp_path / "committed").exists()
    monkeypatch.setattr(sys, "argv", ["comparison", "--images", "x", "--books", "y"])
    program.main()
    assert (tmp_path / "committed" / "claims.md").exists()


def test_claims_stand_in_a_table_with_their_answers(program: Any, claims: Any) -> None:
    part = make_part({"global-lion": [50], "majority": [50]})
    answers = claims.answer_all({"p": part})

    blocks = program.describe_claims(answers, {"p": part}, "python benchmarks/comparison")

    first = next(block for block in blocks if isinstance(block, Table))
    assert first.rows == [["Majority vote matches global Lion", "holds here (1 of 1)"]]
    assert (
        "| p | 4 | majority - global-lion: +0.00 ± 0.00 points | holds | 1 of 1 |"
        in render_markdown(blocks)
    )
