import json
import os
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from distlion_netlab.command import netlab_app

REFUSED = [
    ("up --hosts 0", "--hosts"),
    ("up --rate fast", "--rate"),
    ("up --name NO", "--name"),
    ("run --per-host 0 -- true", "--per-host"),
    ("run --hosts 0 -- true", "--hosts"),
    ("run --master-port 0 -- true", "--master-port"),
    ("run --master-port 65536 -- true", "--master-port"),
    ("run --name lab --hosts 3 -- true", "--hosts"),
    ("sweep --rate fast", "--rate"),
    ("sweep --method sometimes", "--method"),
    ("sweep --repetitions 0", "--repetitions"),
    ("sweep --block-s -1", "--block-s"),
    ("sweep --vector 0", "--vector"),
    ("sweep --layers 0", "--layers"),
    # Python would read 10.
    ("up --hosts 1_0", "--hosts"),
    ("run --hosts 1_0 -- true", "--hosts"),
    ("run --per-host 1_0 -- true", "--per-host"),
    ("run --master-port 1_0 -- true", "--master-port"),
    ("sweep --hosts 1_0", "--hosts"),
    ("sweep --layers 1_0", "--layers"),
    ("sweep --width 1_0", "--width"),
    ("sweep --vocabulary 1_0", "--vocabulary"),
    ("sweep --repetitions 1_0", "--repetitions"),
]
NEAR = [
    ("sweep --method majority-all-gathr", "majority-all-gather"),
    ("sweep --method ddp-fp31", "ddp-fp32"),
    ("sweeep", "sweep"),
]


def invoke(*arguments):
    return CliRunner().invoke(netlab_app, [*arguments])


@pytest.mark.parametrize(("words", "named"), REFUSED)
def test_refusal_is_one_line_with_the_name_of_the_option(words, named):
    result = invoke(*words.split())
    assert result.exit_code == 2, result.exception
    (line,) = result.stderr.splitlines()
    assert line.startswith("distlion: ")
    assert named in line


@pytest.mark.parametrize(("words", "meant"), NEAR)
def test_unknown_name_is_answered_with_the_nearest(words, meant):
    result = invoke(*words.split())
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert f"did you mean {meant}" in line.lower().replace("'", "")


@pytest.mark.parametrize("columns", [30, 60, 80, 200])
def test_help_has_every_option_whole_and_every_name_at_any_width(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = invoke("sweep", "--help").stdout
    for param in typer.main.get_command(netlab_app).commands["sweep"].params:
        assert param.opts[0] in shown.split()
    if columns < 80:
        text = "".join(shown.split())
        for name in ("majority-zero", "quantized-P", "parameter-server", "ddp-powersgd"):
            assert name in text


@pytest.mark.smoke
@pytest.mark.parametrize("command", ["up", "run", "sweep", "down"])
def test_help_shows_an_example(command):
    result = invoke(command, "--help")
    assert result.exit_code == 0
    assert f"Example: distlion netlab {command}" in result.stdout


@pytest.mark.smoke
def test_wrong_rate_is_one_clear_line_and_exits_with_2():
    result = invoke("up", "--rate", "fast")
    assert result.exit_code == 2
    assert "rate 'fast'" in result.stderr
    assert "Traceback" not in result.stderr


def test_sweep_of_an_unknown_method_exits_with_2():
    result = invoke("sweep", "--method", "sometimes")
    assert result.exit_code == 2
    assert "method 'sometimes'" in result.stderr


def test_sweep_of_a_vector_has_no_accelerator():
    result = invoke("sweep", "--vector", "1k", "--device-s", "1")
    assert result.exit_code == 2
    assert "--device-s" in result.stderr


def test_run_without_a_command_exits_with_2():
    assert invoke("run").exit_code == 2


def test_hosts_of_a_lab_that_has_its_own_exit_with_2():
    assert invoke("run", "--name", "lab", "--hosts", "3", "--", "true").exit_code == 2


def test_latency_of_a_lab_that_has_its_own_exits_with_2():
    result = invoke("run", "--name", "lab", "--latency", "5ms", "--", "true")
    assert result.exit_code == 2
    assert "--latency is for a new lab" in result.stderr


def test_latency_out_of_range_exits_with_2():
    for command in ("up", "sweep"):
        result = invoke(command, "--latency", "20")
        assert result.exit_code == 2, command
        assert "latency of 20 s: expected 0 for none, or 0.001 to 10 s" in result.stderr


def test_an_empty_rate_is_no_unlimited_one():
    result = invoke("run", "--rate", "", "--", "true")  # as of a shell's unset variable
    assert result.exit_code == 2
    assert "--rate '': expected a number of bits a second" in result.stderr


def test_without_root_rights_is_one_clear_line(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    result = invoke("up")
    assert result.exit_code == 1
    assert "NetlabError: the network lab needs root rights" in result.stderr


@pytest.mark.slow
def test_missing_package_names_the_extra():
    code = (
        "import sys; sys.modules['pyroute2'] = None; "
        "sys.argv = ['distlion', 'netlab', 'up']; "
        "from distlion.__main__ import main; main()"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert 'pip install "distlion[netlab]"' in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.root
@pytest.mark.usefixtures("namespaces_work")
class TestInALab:
    def test_up_run_and_down(self):
        up = invoke("up", "--hosts", "2", "--rate", "1gbit,10mbit", "--name", "test-cli", "--json")
        try:
            assert up.exit_code == 0, up.stderr
            hosts = json.loads(up.stdout)["hosts"]
            assert hosts[1] == {
                "host": 1,
                "namespace": "distlion-test-cli-h1",
                "address": "10.77.0.2",
                "rate": "10mbit",
            }
            run = invoke("run", "--name", "test-cli", "--", "sh", "-c", "echo $WORLD_SIZE")
            assert run.exit_code == 0, run.stderr
            assert sorted(run.stdout.splitlines()) == ["[0] 2", "[1] 2"]
        finally:
            down = invoke("down", "--name", "test-cli")
        assert down.exit_code == 0, down.stderr
        assert "lab test-cli is removed" in down.stderr

    def test_a_lab_with_latency_says_so(self):
        up = invoke("up", "--hosts", "2", "--latency", "5ms", "--name", "test-slow")
        down = invoke("down", "--name", "test-slow")
        assert (up.exit_code, down.exit_code) == (0, 0), up.stderr + down.stderr
        assert "lab test-slow, 5 ms one way" in up.stdout

    def test_run_exits_with_the_status_of_the_rank_that_failed(self):
        result = invoke("run", "--hosts", "2", "--", "sh", "-c", "exit $((RANK * 5))")
        assert result.exit_code == 5
        assert "distlion: rank 1 ended with exit code 5" in result.stderr

    def test_down_of_a_lab_that_is_not_there_exits_with_1(self):
        result = invoke("down", "--name", "no-such-lab")
        assert result.exit_code == 1
        assert "there is no lab named 'no-such-lab'" in result.stderr

    def test_sweep_shows_a_table_and_writes_record_and_figure(self, tmp_path):
        result = invoke(
            *("sweep", "--hosts", "2", "--rate", "unlimited", "--vector", "4096"),
            *("--method", "all-reduce-fp32", "--method", "majority-all-reduce"),
            *("--repetitions", "2", "--block-s", "0", "--results", str(tmp_path)),
        )
        assert result.exit_code == 0, result.stderr
        assert "majority-all-reduce" in result.stdout
        record = json.loads((tmp_path / "sweep.json").read_text())
        assert record["replicas_equal"] == {"majority-all-reduce": True}
        assert (tmp_path / "sweep.png").stat().st_size > 0
