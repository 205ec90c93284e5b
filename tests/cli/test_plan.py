import json

import pytest
from typer.testing import CliRunner

from distlion.cli import app
from distlion.cli.plan import EXAMPLE
from distlion.planning import DO_NOT_COMPRESS

GIVEN = {
    "--params": "1e9",
    "--nodes": "16",
    "--gpus-per-node": "8",
    "--link": "10gbit",
    "--compute-s": "0.8",
}


def plan(*more, **changes):
    given = GIVEN | {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
    words = [word for pair in given.items() for word in pair]
    return CliRunner().invoke(app, ["plan", *words, *more])


def test_example_of_the_help_runs():
    words = EXAMPLE.removeprefix("Example: distlion ").split()
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0
    assert result.stdout == plan().stdout


def test_table_names_every_rule_and_baseline_and_then_advises():
    text = plan().stdout
    for name in ("MajorityVote", "TernaryVote", "Average", "QuantizedVote", "FullPrecision"):
        assert name in text
    assert text.index("fp32 all-reduce") < text.index("Compress: MajorityVote()")
    assert "5x against fp32 ring all-reduce" in text


def test_fast_link_gets_the_advice_not_to_compress():
    assert DO_NOT_COMPRESS in plan(link="400gbit").stdout


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
        ({"node_link": "fast"}, "100mbit"),
        ({"nodes": "100001"}, "100,000"),
        ({"compute_s": "0"}, "compute_s"),
    ],
)
def test_wrong_argument_is_one_clear_message(changes, words):
    result = plan(**changes)
    assert result.exit_code == 1
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_a_device_is_known_by_its_name_or_refused_with_those_that_are():
    h200, l4 = (json.loads(plan("--json", device=name).stdout) for name in ("H200", "l4"))
    rates = [record["scenario"]["machine"]["encode_bytes_per_s"] for record in (h200, l4)]
    assert rates[0] > 10 * rates[1]
    result = plan(device="tpu")
    assert result.exit_code != 0
    said = " ".join(result.stderr.split())
    assert "--device tpu" in said
    assert "h200" in said
