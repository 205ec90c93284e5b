import json
import os
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from distlion.wire import LinkModel
from distlion_lab.cli import app
from distlion_lab.planning.accelerator import Accelerators
from distlion_lab.planning.bench import KernelRates
from distlion_lab.planning.checkup import Checkup
from distlion_lab.planning.link_probe import LinkProbe
from distlion_lab.planning.machine import CPU
from distlion_lab.planning.worker_report import WorkerReport

WORKER = WorkerReport(
    host="a",
    cpu="some processor",
    cores=8,
    affinity="ff",
    threads=1,
    interface="lo",
    loopback=False,
    congestion_control="cubic",
    slow_after_pause=True,
    denormals=True,
    debug=False,
    kernels=KernelRates("avx2", 1e10, CPU),
)
LINKS = tuple(LinkModel(1e-4, rate) for rate in (1e9, 2e8, 1e9))


def doctor(*words):
    return CliRunner().invoke(app, ["doctor", *words])


def show(monkeypatch, workers, warnings=(), controls=("cubic", "cubic", "cubic")):
    links = LinkProbe(LINKS[0], LINKS[:workers])
    found = tuple(replace(WORKER, congestion_control=name) for name in controls[:workers])
    checkup = Checkup(found, links, warnings)
    monkeypatch.setattr("distlion_lab.cli.doctor.run_workers", lambda *_, **__: checkup)
    result = doctor()
    assert result.exit_code == 0, result.stderr
    return result.stdout


@pytest.mark.distributed
def test_two_local_workers_are_examined():
    result = doctor("--json", "--params", "1e6", "--compute-s", "0.01")
    assert result.exit_code == 0, result.stderr
    record = json.loads(result.stdout)
    assert {"devices", "triton", "missing"} <= record["accelerators"].keys()
    assert len(record["workers"]) == len(record["link"]["ranks"]) == 2
    assert record["scenario"]["n_params"] == 1_000_000
    assert record["scenario"]["link"] == record["link"]["combined"]
    assert isinstance(record["advice"]["compress"], bool)


def test_slowest_rank_is_named(monkeypatch):
    text = show(monkeypatch, 3)
    assert "slowest link: rank 1, 5.00 times slower" in text
    assert "nothing is wrong" in text


def test_with_two_ranks_the_slower_link_is_not_blamed_on_one(monkeypatch):
    assert "share the only one" in show(monkeypatch, 2)


def test_single_worker_has_no_link(monkeypatch):
    text = show(monkeypatch, 1)
    assert "single node" in text
    for words in ("slowest", "Gloo", "a round", "bit/s a rank", "congestion"):
        assert words not in text


def test_congestion_control_is_named_with_when_it_matters(monkeypatch):
    (line,) = [line for line in show(monkeypatch, 2).splitlines() if line.startswith("TCP")]
    assert line.startswith("TCP congestion control: cubic. ")
    for words in ("large messages", "long or lossy links", "bbr"):
        assert words in line


def test_congestion_control_that_differs_between_ranks_is_named_for_each(monkeypatch):
    text = show(monkeypatch, 3, controls=("bbr", "cubic", ""))
    (line,) = [line for line in text.splitlines() if line.startswith("TCP")]
    assert "bbr on rank 0, cubic on rank 1, unknown on rank 2. " in line


def show_beside(monkeypatch, missing, workers=2):
    found = Accelerators((), "13.0", "3.7", missing, "")
    monkeypatch.setattr("distlion_lab.cli.doctor.find_accelerators", lambda: found)
    return show(monkeypatch, workers)


def test_beside_a_gpu_the_forecast_is_said_to_be_for_cpus(monkeypatch):
    text = show_beside(monkeypatch, missing="")
    (said,) = [line for line in text.splitlines() if "for training on these CPUs" in line]
    assert text.index(said) < text.index("for 1e+08 parameters")
    (command,) = [line for line in text.splitlines() if line.startswith("distlion plan ")]
    words = command.split()
    assert words.pop() == "NAME"
    planned = CliRunner().invoke(app, [*words[1:], "h100", "--json"])
    assert planned.exit_code == 0, planned.stderr
    scenario = json.loads(planned.stdout)["scenario"]
    assert [scenario[name] for name in ("n_params", "nodes", "compute_s")] == [10**8, 2, 0.5]
    # The command has three digits of the line's rate, in which headers travel too.
    assert scenario["link"]["rate_bit_per_s"] == pytest.approx(LINKS[0].rate_bit_per_s, rel=0.005)
    assert scenario["link"]["latency_s"] == pytest.approx(LINKS[0].latency_s)


def test_without_a_gpu_or_a_link_no_plan_for_gpus_is_shown(monkeypatch):
    assert "distlion plan" not in show_beside(monkeypatch, missing="there is none")
    assert "distlion plan" not in show_beside(monkeypatch, missing="", workers=1)


@pytest.mark.parametrize(
    ("wire", "words"),
    [("gloo", "votes travel over Gloo"), ("tcp", "votes travel over distlion's own sockets: ")],
)
def test_the_transport_of_votes_is_named(monkeypatch, wire, words):
    monkeypatch.setenv("DISTLION_WIRE", wire)
    (line,) = [line for line in show(monkeypatch, 2).splitlines() if line.startswith("votes")]
    assert words in line


def test_a_transport_that_there_is_not_is_refused_before_anything_is_measured(monkeypatch):
    monkeypatch.setenv("DISTLION_WIRE", "udp")
    result = doctor()
    assert result.exit_code == 2
    assert "DISTLION_WIRE=udp" in result.stderr


def test_warnings_are_shown(monkeypatch):
    text = show(monkeypatch, 2, warnings=("the roof leaks",))
    assert "warning: the roof leaks" in text
    assert "nothing is wrong" not in text


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--workers", "0"], "--workers"),
        (["--threads", "0"], "--threads"),
        (["--params", "x"], "--params"),
        (["--params", "0.5"], "--params"),
        (["--compute-s", "0"], "--compute-s"),
    ],
)
def test_wrong_argument_is_one_clear_message(words, named):
    result = doctor(*words)
    assert result.exit_code == 2
    assert named in result.stderr
    assert "Traceback" not in result.stderr


def test_number_of_workers_must_be_that_of_torchrun(monkeypatch):
    left = []
    monkeypatch.setitem(os.environ, "RANK", "0")
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "2")
    monkeypatch.setattr("distlion_lab.cli.failure.os._exit", left.append)
    result = doctor("--workers", "3")
    assert result.exit_code == 2
    assert "torchrun started 2" in result.stderr
    assert left == []
