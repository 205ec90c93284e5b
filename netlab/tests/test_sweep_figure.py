import pytest
from matplotlib import image

from distlion_lab.errors import DataError
from distlion_netlab import DeviceWorkload, GptWorkload, VectorWorkload, sweep
from distlion_netlab.sweep_figure import draw_sweep_figure
from distlion_netlab.sweep_table import tabulate_sweep


def summary(median):
    return {"median": median, "q1": 0.9 * median, "q3": 1.1 * median, "values": [median]}


def result(seconds, *, baseline_seconds, megabytes):
    return {
        "steps": 1,
        "seconds": summary(seconds),
        "speed_up": {"ddp-fp32": summary(baseline_seconds / seconds)},
        "interface_bytes": [megabytes * 1e6 / 2, megabytes * 1e6],
        "sent_bytes": [None, None],
        "wire_bytes": [None, None],
    }


@pytest.fixture
def record():
    def at(baseline_seconds):
        return {
            "none": result(0.1, baseline_seconds=baseline_seconds, megabytes=0.001),
            "ddp-fp32": result(baseline_seconds, baseline_seconds=baseline_seconds, megabytes=50),
            "majority-all-reduce": result(0.2, baseline_seconds=baseline_seconds, megabytes=1.6),
        }

    return {
        "settings": {
            "hosts": 4,
            "methods": ["none", "ddp-fp32", "ddp-powersgd", "majority-all-reduce"],
            "workload": {"kind": "gpt"},
        },
        "n_parameters": 8_000_000,
        "missing": {"ddp-powersgd": "reason"},
        "results": {"100mbit": at(4.0), "unlimited": at(0.25)},
    }


def test_figure_is_a_png_with_something_drawn(record, tmp_path):
    draw_sweep_figure(record, tmp_path / "sweep.png")
    assert image.imread(tmp_path / "sweep.png").std() > 0


@pytest.mark.parametrize(
    "workload",
    [GptWorkload(), DeviceWorkload(layers=1, width=8, step_s=0.1), VectorWorkload(64)],
)
def test_figure_of_every_workload_that_a_sweep_has(workload, record, tmp_path):
    record["settings"]["workload"] = sweep._describe(workload)
    draw_sweep_figure(record, tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").exists()


def test_figure_may_show_some_of_the_methods(record, tmp_path):
    draw_sweep_figure(record, tmp_path / "all.png")
    draw_sweep_figure(record, tmp_path / "some.png", methods=["none", "majority-all-reduce"])
    assert (tmp_path / "all.png").read_bytes() != (tmp_path / "some.png").read_bytes()


def test_figure_does_without_a_baseline(record, tmp_path):
    for methods in record["results"].values():
        del methods["ddp-fp32"]
    record["settings"]["methods"].remove("ddp-fp32")
    draw_sweep_figure(record, tmp_path / "sweep.png")
    assert image.imread(tmp_path / "sweep.png").std() > 0


def test_table_has_times_speed_ups_and_bytes(record):
    head, rows = tabulate_sweep(record)
    assert head == [
        "method",
        "100mbit, ms",
        "unlimited, ms",
        "100mbit, x ddp-fp32",
        "unlimited, x ddp-fp32",
        "MB a step",
    ]
    assert rows[0] == ["none", "100", "100", "40", "2.5", "0.001"]
    assert rows[3] == ["majority-all-reduce", "200", "200", "20", "1.25", "1.6"]


def test_table_says_what_was_left_out(record):
    assert tabulate_sweep(record)[1][2] == ["ddp-powersgd"] + ["left out"] * 5


def test_record_of_something_else_is_a_data_error(tmp_path):
    with pytest.raises(DataError, match="sweep"):
        draw_sweep_figure({"losses": []}, tmp_path / "sweep.png")


def test_figure_that_cannot_be_written_is_a_data_error(record, tmp_path):
    with pytest.raises(DataError, match="cannot be written"):
        draw_sweep_figure(record, tmp_path / "no-such-folder" / "sweep.png")
