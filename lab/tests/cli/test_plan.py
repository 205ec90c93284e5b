import dataclasses
import html
import io
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import distlion
from distlion_lab.cli import app
from distlion_lab.cli.plan import EXAMPLE
from distlion_lab.cli.plan_table import format_number, print_plan, write_call
from distlion_lab.planning.advice import DO_NOT_COMPRESS, advise
from distlion_lab.planning.line import model_line
from distlion_lab.planning.planner import compare_methods
from distlion_lab.planning.scenario import Scenario

GIVEN = {
    "--params": "1e9",
    "--nodes": "16",
    "--gpus-per-node": "8",
    "--link": "10gbit",
    "--compute-s": "0.8",
}

DOCS = Path(__file__).resolve().parents[3] / "docs"


def plan(*more, **changes):
    given = GIVEN | {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
    words = [word for pair in given.items() for word in pair]
    return CliRunner().invoke(app, ["plan", *words, *more])


@pytest.mark.smoke
def test_example_of_the_help_runs():
    words = EXAMPLE.removeprefix("Example: distlion ").split()
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0
    assert result.stdout == plan().stdout


def test_table_has_the_best_exchange_of_each_method_and_all_on_demand():
    record = json.loads(plan("--json").stdout)
    methods = {forecast["method"] for forecast in record["forecasts"]}
    assert count_rows(plan().stdout) == len(methods)
    assert count_rows(plan("--all").stdout) == len(record["forecasts"])


def test_votes_over_own_sockets_wait_for_half_of_the_latency(monkeypatch):
    def fastest_s(*more):
        record = json.loads(plan("--json", *more, nodes="2", latency_us="200ms").stdout)
        ranked = [each for each in record["forecasts"] if each["votes"] and not each["overlap"]]
        baseline = [each["step_s"] for each in record["forecasts"] if not each["votes"]]
        return ranked[0]["step_s"], min(baseline)

    (gloo_s, baseline_s), found = fastest_s("--wire", "gloo"), fastest_s("--wire", "tcp")
    assert gloo_s - found[0] == pytest.approx(0.2)  # two rounds
    assert found[1] == baseline_s
    for wire, each, words in (
        ("gloo", (gloo_s, baseline_s), "votes over Gloo"),
        ("tcp", found, "votes over own sockets"),
        ("", found if sys.platform == "linux" else (gloo_s, baseline_s), "votes over "),
    ):
        monkeypatch.setenv("DISTLION_WIRE", wire)
        assert fastest_s() == each
        assert words in plan().stdout


def test_page_has_the_advice_each_method_and_a_picture_and_asks_for_nothing(tmp_path):
    page = tmp_path / "plan.html"
    record = json.loads(plan("--json", "--html", str(page)).stdout)
    text = html.unescape(page.read_text())
    assert record["advice"]["text"] in text
    assert all(
        f"<td>{forecast['method'].replace('torch.', '')}</td>" in text
        for forecast in record["forecasts"]
    )
    assert 'src="data:image/png;base64,' in text
    assert "http" not in text and "<script" not in text


def test_page_that_cannot_be_written_is_one_line(tmp_path):
    result = plan("--html", str(tmp_path / "missing" / "plan.html"))
    assert result.exit_code == 1
    assert "cannot be written" in result.stderr


def count_rows(text):
    return len(list_rows(text))


def list_rows(text):
    _, table = text.split("speed-up", maxsplit=1)  # of the title
    _, table = table.split("speed-up", maxsplit=1)  # of the heads
    return [line for line in table.splitlines() if "% " in line]


def test_every_row_has_every_number():
    rows = list_rows(plan("--all").stdout)
    # method (two words of all-reduce), exchange, overlap, bits, MB, network and step with units.
    words = {len(row.replace(" all-reduce", "-all-reduce").split()) for row in rows}
    assert words == {11}
    assert not any("e+" in row for row in rows)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1875, "1,875"),
        (15000.4, "15,000"),
        (99.96, "100"),
        (54.85, "54.9"),
        (0.8708, "0.871"),
        (0.00123456, "0.00123"),
        (9.996, "10.0"),
        (0, "0"),
    ],
)
def test_numbers_have_three_digits_and_no_exponent(value, text):
    assert format_number(value) == text


def test_short_steps_are_in_milliseconds():
    text = plan(compute_s="0.001", params="1e6").stdout
    assert " ms" in text
    assert " ms" not in plan().stdout


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 140])
def test_no_terminal_is_too_narrow_for_what_matters(width):
    scenario = Scenario(
        n_params=10**9, nodes=16, link=model_line(1e10, latency_s=1e-4), compute_s=0.8
    )
    forecasts = compare_methods(scenario)
    console = Console(file=io.StringIO(), force_terminal=True, width=width, no_color=True)
    print_plan(console, forecasts, advise(forecasts))
    text = console.file.getvalue()
    assert "\u2026" not in text
    assert "FullPrecision(dtype=bfloat16)" in text
    assert format_number(forecasts.best_vote.step_s) in text
    assert f"{forecasts.gain + 1:.2f}" in text


def test_table_names_every_rule_and_baseline_and_then_advises():
    text = plan().stdout
    for name in ("MajorityVote", "TernaryVote", "Average", "QuantizedVote", "FullPrecision"):
        assert name in text
    assert text.index("fp32 all-reduce") < text.index("Compress: MajorityVote()")
    assert "5x against fp32 ring all-reduce" in text
    assert '"Choose a rule"' in text


def test_advice_is_also_written_as_the_call_that_follows_it():
    (line,) = list_calls(plan().stdout)
    adamw = {"adamw_lr": 4e-3, "adamw_weight_decay": 0.1}
    optimizer = eval(line, {"distlion": distlion, "model": torch.nn.Linear(1, 1), **adamw})
    assert isinstance(optimizer, distlion.DistributedLion)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["weight_decay"]) == (2e-3, 0.2)
    assert (group["betas"], group["cautious"]) == ((0.9, 0.95), True)
    assert (
        'exchange=distlion.AllReduce(), nodes=distlion.Nodes(ranks_per_node=8), overlap="auto"'
        in line
    )
    assert "nodes=" not in list_calls(plan(gpus_per_node="1").stdout)[0]


def test_the_call_has_the_momenta_and_the_matrices_of_the_forecast():
    shown = plan(momentum_sync_every="50", momentum_sync_bits="16", orthogonalized_width="64")
    (line,) = list_calls(shown.stdout)
    names = {"distlion": distlion, "torch": torch, "adamw_lr": 4e-3, "adamw_weight_decay": 0.1}
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16, bias=False) for _ in range(3)))
    optimizer = eval(line, names | {"model": model})
    assert any(group["orthogonalize"] for group in optimizer.param_groups)
    assert "momentum_sync=distlion.MomentumSync(every=50, dtype=torch.bfloat16)" in line


@pytest.mark.parametrize("option", [{"link": "1e-320kbit"}, {"price_per_gb": "1e300"}])
@pytest.mark.parametrize("as_json", [[], ["--json"]])
def test_a_plan_without_finite_numbers_is_refused(option, as_json):
    result = plan(*as_json, **option)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "whose results are finite" in result.stderr


@pytest.mark.parametrize("name", ["MajorityVote()", "FullPrecision(dtype=torch.bfloat16)"])
def test_every_rule_is_written_as_it_is_called(name):
    scenario = Scenario(
        n_params=10**9, nodes=16, link=model_line(1e10, latency_s=1e-4), compute_s=0.8
    )
    forecast = compare_methods(scenario).best_vote
    call = write_call(scenario, dataclasses.replace(forecast, method=name, overlap=False))
    assert f"aggregation=distlion.{name}" in call
    assert "overlap" not in call


def list_calls(text):
    return [line for line in text.splitlines() if line.startswith("distlion.DistributedLion(")]


def test_fast_link_gets_the_advice_not_to_compress():
    text = plan(link="400gbit").stdout
    assert DO_NOT_COMPRESS in text
    assert not list_calls(text)


def test_json_holds_scenario_forecasts_and_advice():
    record = json.loads(plan("--json").stdout)
    assert record["scenario"]["nodes"] == 16
    assert record["advice"]["compress"] is True
    assert {"step_s", "efficiency", "cost_per_1000_steps"} <= record["forecasts"][0].keys()


def test_prices_add_a_column():
    assert "1000 steps" not in plan().stdout
    assert "1000 steps" in plan(price_per_gpu_hour="2").stdout


def test_figure_is_written(tmp_path):
    path = tmp_path / "plan.png"
    assert plan("--figure", str(path)).exit_code == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_slower_link_inside_a_node_is_read():
    by_name = json.loads(plan("--json", node_link="pcie").stdout)
    by_rate = json.loads(plan("--json", node_link="200gbit").stdout)
    assert by_name["scenario"]["node_link"] == by_rate["scenario"]["node_link"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"params": "many"}, "many"),
        ({"params": "0.5"}, "0.5"),
        ({"params": "inf"}, "inf"),
        ({"link": "fast"}, "100mbit"),
        ({"node_link": "fast"}, "nvlink"),
        ({"node_link": "12 parsecs"}, "100mbit"),
        ({"nodes": "100001"}, "100,000"),
        ({"compute_s": "0"}, "--compute-s is 0.0"),
        ({"latency_us": "-1"}, "--latency-us"),
        ({"link": "fast"}, "--link"),
        ({"node_link": "fast"}, "--node-link"),
    ],
)
def test_wrong_argument_is_one_clear_message(changes, words):
    result = plan(**changes)
    assert result.exit_code == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "changes",
    [
        {"params": "1B"},
        {"link": "10Gbps"},
        {"link": "1e10"},
        {"compute_s": "800ms"},
        {"latency_us": "0.1ms"},
        {"message_us": "10us"},
    ],
)
def test_suffixes_that_people_write_mean_what_numbers_do(changes):
    shown = plan("--json", **changes)
    assert shown.exit_code == 0, shown.stderr
    assert shown.stdout == plan("--json").stdout


def test_a_device_is_known_by_its_name_or_refused_with_those_that_are():
    h200, l4 = (json.loads(plan("--json", device=name).stdout) for name in ("H200", "l4"))
    rates = [record["scenario"]["machine"]["encode_bytes_per_s"] for record in (h200, l4)]
    assert rates[0] > 10 * rates[1]
    result = plan(device="h20")
    assert result.exit_code == 2
    said = " ".join(result.stderr.split())
    assert "--device h20" in said
    assert "did you mean h200" in said


def test_a_plan_says_how_often_to_vote():
    slow = plan(
        "--wire", "gloo", link="10mbit", latency_us="50ms", gpus_per_node="1", params="1e6"
    ).stdout
    assert "distlion.LocalSteps(inner, every=" in slow
    assert "--sites shows slower links" in slow
    assert "No local steps here" in plan(link="400gbit", params="1e6").stdout


def test_sites_are_a_table_with_what_to_choose():
    text = plan("--sites", gpus_per_node="1", params="1e6", compute_s="0.2").stdout
    rows = [line for line in text.splitlines() if "mbit/s" in line and " ms " in line]
    assert len(rows) == 15
    assert all(row.count("*") == 1 for row in rows)
    for name in ("all-reduce", "each step", "every 4", "every 8", "every 16", "every 32"):
        assert name in text
    assert '"Train across sites"' in text


def test_local_steps_are_in_the_json():
    record = json.loads(plan("--json", gpus_per_node="1", params="1e6").stdout)
    assert [each["every"] for each in record["local_steps"]["local"]] == [4, 8, 16, 32]
    assert len(record["sites"]) == 15
    assert record["sites"][0]["latency_s"] == 0.05


def test_the_guide_quotes_what_plan_says():
    text = (DOCS / "how-to" / "slow-link.md").read_text()
    (quoted,) = re.findall(r"^(Compress: .*) \[\.\.\.\]$", text, re.MULTILINE)
    assert quoted in " ".join(plan().stdout.split())


LINKS = ("100mbit", "1gbit", "10gbit", "25gbit", "100gbit")
SIZES = {"million": "M", "billion": "B"}


def read_forecasts():
    """Read the table of the page that helps to decide: size, seconds, link and what it says."""
    text = (DOCS / "is-it-for-me.md").read_text()
    row = r"^\| (\d+) (million|billion).*?, ([\d.]+) s ((?:\| [^|]+){5})\|$"
    for number, unit, seconds, cells in re.findall(row, text, re.MULTILINE):
        for link, cell in zip(LINKS, cells.strip("| ").split(" | "), strict=True):
            yield number + SIZES[unit], seconds, link, cell


FORECASTS = list(read_forecasts())


def test_a_page_has_forecasts_of_three_sizes():
    assert len(FORECASTS) == 3 * len(LINKS)


@pytest.mark.parametrize(("params", "seconds", "link", "cell"), FORECASTS)
def test_forecasts_of_a_page_are_those_of_plan(params, seconds, link, cell):
    text = plan(nodes="4", gpus_per_node="1", params=params, compute_s=seconds, link=link).stdout
    if cell == "no gain":
        assert DO_NOT_COMPRESS in text
    else:
        (times,) = re.findall(r"([\d.]+) times as fast", " ".join(text.split()))
        digits = len(cell.replace(".", ""))
        assert float(f"{float(times):.{digits}g}") == float(cell)
