"""What the soak of a crew reads from logs: here made-up ones, of which the answers are known."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from programs import imported_by_name

MODULES = ("event_plan", "training_load", "systems", "fleet", "step_log", "soak_run")
MORE_MODULES = ("reading", "tables", "step_cost")
HELD = {"rss_kib": 2048, "fds": 20, "threads": 9}


@pytest.fixture(scope="module")
def crew() -> Iterator[Any]:
    with imported_by_name("crew", *MODULES, *MORE_MODULES) as found:
        yield found


class Log:
    """A log that a worker has written."""

    def __init__(self, folder: Path, worker: int, life: int = 0) -> None:
        self._file = folder / f"worker-{worker}.{life}.jsonl"

    def add(self, time_s: float, kind: str = "step", **fields: Any) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps({"time_s": time_s, "kind": kind, **fields}) + "\n")

    def add_steps(self, epoch: int, steps: range, begin_s: float, **fields: Any) -> None:
        """Add a step each tenth of a second."""
        for place, step in enumerate(steps):
            at_s = round(begin_s + place / 10, 4)
            self.add(at_s, step=step, epoch=epoch, digest=step, **fields)


def event(kind: str, worker: int, time_s: float, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "worker": worker, "time_s": time_s, "is_hasty": False, **fields}


def test_a_kill_lasts_until_a_step_of_a_later_epoch(crew: Any, tmp_path: Path) -> None:
    logs = [Log(tmp_path, worker) for worker in range(3)]
    for log in logs:
        log.add_steps(1, range(10), 0.0)
    logs[0].add_steps(1, range(10, 11), 1.05)  # was under way when worker 2 was killed
    for log in logs[:2]:
        log.add_steps(2, range(11, 20), 2.5)
    lines = crew.reading.read_logs(tmp_path)
    (kill,) = crew.reading.measure_events(lines, [event("kill", 2, 1.0)])
    assert kill["next_step_s"] == pytest.approx(1.5)
    assert kill["pause_s"] == pytest.approx(1.45)


def test_a_loss_lasts_until_a_step_that_is_new_and_takes_steps_back(
    crew: Any, tmp_path: Path
) -> None:
    for worker in range(3):
        Log(tmp_path, worker).add_steps(1, range(10), 0.0)
        Log(tmp_path, worker, life=1).add_steps(2, range(5, 20), 4.0)
    lines = crew.reading.read_logs(tmp_path)
    (loss,) = crew.reading.measure_events(lines, [event("loss", -1, 1.0)])
    assert loss["again_s"] == pytest.approx(3.0)
    assert loss["regained_s"] == pytest.approx(3.5)
    assert loss["steps_lost"] == 5


def test_a_stop_has_a_pause_and_a_return(crew: Any, tmp_path: Path) -> None:
    logs = [Log(tmp_path, worker) for worker in range(3)]
    for log in logs:
        log.add_steps(1, range(10), 0.0)
    for log in logs[:2]:
        log.add_steps(2, range(10, 20), 5.0)
    for log in logs:
        log.add_steps(3, range(20, 30), 7.0)
    stop = event("stop", 2, 0.95, woken_s=6.0)
    (found,) = crew.reading.measure_events(crew.reading.read_logs(tmp_path), [stop])
    assert found["pause_s"] == pytest.approx(4.05)
    assert found["return_pause_s"] == pytest.approx(1.0)
    assert found["back_s"] == pytest.approx(1.0)


def test_a_pause_ends_with_the_next_event_that_waited(crew: Any, tmp_path: Path) -> None:
    logs = [Log(tmp_path, worker) for worker in range(3)]
    for log in logs:
        log.add_steps(1, range(20), 0.0)
    newcomer = Log(tmp_path, 3)
    newcomer.add(0.7, "ready")
    for log in (*logs[:2], newcomer):
        log.add_steps(2, range(20, 30), 9.0)
    events = [event("join", 3, 0.5), event("kill", 2, 1.95)]
    join, _ = crew.reading.measure_events(crew.reading.read_logs(tmp_path), events)
    assert join["pause_s"] == pytest.approx(0.1)
    assert join["in_s"] == pytest.approx(8.5)
    assert join["joined_s"] == pytest.approx(8.3)
    events[1]["is_hasty"] = True
    join, _ = crew.reading.measure_events(crew.reading.read_logs(tmp_path), events)
    assert join["pause_s"] == pytest.approx(7.1)


def test_a_line_of_time_has_steps_members_and_events(crew: Any, tmp_path: Path) -> None:
    logs = [Log(tmp_path, worker) for worker in range(3)]
    for log in logs:
        log.add_steps(1, range(10), 50.0)
    for log in logs[:2]:
        log.add_steps(2, range(10, 20), 53.0)
    lines = crew.reading.read_logs(tmp_path)
    kill = event("kill", 2, 51.0, settled_s=53.5, pause_s=2.0)
    traced = crew.reading.trace_steps(lines, [kill])
    assert traced["step_s"] == [n / 10 for n in range(10)] + [3 + n / 10 for n in range(10)]
    assert traced["members"] == [[0.0, 3], [3.0, 2]]
    assert traced["events"] == [event("kill", 2, 1.0, settled_s=3.5, pause_s=2.0)]
    summary = {"last_step": 20, "seconds": 3.9, "steps_repeated": 0, "forks": []}
    result = {"conditions": {"a": 1}, "tuning": "none", "summary": summary, **traced}
    page = crew.tables.write_timeline(result)
    assert "| kill | 2 | 1.0 | 2.00 | 2 |" in page


def test_forks_and_repeated_steps_are_found(crew: Any, tmp_path: Path) -> None:
    first, second = Log(tmp_path, 0), Log(tmp_path, 1)
    for log in (first, second):
        log.add_steps(1, range(10), 0.0)
        log.add_steps(2, range(8, 12), 3.0)  # steps 8 and 9 were taken back
    first.add(4.0, step=12, epoch=2, digest=1)
    second.add(4.0, step=12, epoch=2, digest=2)
    lines = crew.reading.read_logs(tmp_path)
    assert crew.reading.find_forks(lines) == [(2, 12)]
    assert crew.reading.count_repeated(lines) == 2


def test_growth_is_that_of_one_process(crew: Any, tmp_path: Path) -> None:
    log = Log(tmp_path, 0)
    for start, fds in enumerate((20, 90)):  # an agent that starts its process again
        log.add(30.0 * start, "ready")
        log.add_steps(2 * start, range(100), 30.0 * start, **HELD | {"fds": fds})
        log.add_steps(2 * start + 1, range(100, 200), 30.0 * start + 10, **HELD | {"fds": fds + 4})
    rows = crew.reading.measure_growth(crew.reading.read_logs(tmp_path))
    assert [(row["first"]["fds"], row["last"]["fds"]) for row in rows] == [(20, 24), (90, 94)]


def test_a_line_that_a_kill_cut_off_is_left_out(crew: Any, tmp_path: Path) -> None:
    Log(tmp_path, 4, 1).add_steps(1, range(3), 0.0)
    with (tmp_path / "worker-4.1.jsonl").open("a") as file:
        file.write('{"time_s": 0.3, "kind"')
    lines = crew.reading.read_logs(tmp_path)
    assert [(line.worker, line.life, line.step) for line in lines] == [(4, 1, n) for n in range(3)]


def test_a_worker_reads_its_own_log_as_it_was_written(crew: Any, tmp_path: Path) -> None:
    log = crew.step_log.StepLog(tmp_path / "worker-0.0.jsonl")
    model = crew.training_load.build_model()
    log.write_ready()
    log.write_commit(step=1, epoch=3, params=model.parameters())
    log.write_failure(2)
    ready, step, failed = crew.reading.read_logs(tmp_path)
    assert (ready.kind, step.kind, failed.kind) == ("ready", "step", "failed")
    assert (step.step, step.epoch, failed.step) == (1, 3, 2)
    assert step.digest == crew.step_log.digest(model.parameters()) != 0
    assert len(step.held) == 3


def test_plans_are_the_same_for_a_seed_and_leave_enough_workers(crew: Any) -> None:
    plan = crew.event_plan.plan_events(300, 5)
    assert plan == crew.event_plan.plan_events(300, 5)
    assert {planned.kind for planned in plan} == {"kill", "stop", "join"}
    workers, asleep = set(range(crew.event_plan.START_WITH)), set()
    for planned in plan:
        asleep = asleep if planned.is_hasty else set()
        if planned.kind == "join":
            workers.add(planned.worker)
        else:
            assert planned.worker in workers - asleep
        if planned.kind == "kill":
            workers.remove(planned.worker)
        if planned.kind == "stop":
            asleep.add(planned.worker)
        assert 3 <= len(workers - asleep) <= len(workers) <= 6


def test_a_page_has_all_systems(crew: Any, tmp_path: Path) -> None:
    logs = [Log(tmp_path, worker) for worker in range(3)]
    for log in logs:
        log.add_steps(1, range(100), 0.0, **HELD)
    for log in logs[:2]:
        log.add_steps(2, range(100, 200), 12.0, **HELD)
    record = {"events": [event("kill", 2, 9.95)], "accidents": []}
    summary = crew.reading.summarize(crew.reading.read_logs(tmp_path), record)
    runs = [{"system": name, "tuning": "none", "round": 0, **summary} for name in ("one", "two")]
    page = crew.tables.write_soak({"conditions": {"a": 1}, "left_out": {"x": "y"}, "runs": runs})
    assert "| kill: to the next step | 2.05, 2.05 (1) | 2.05, 2.05 (1) |" in page
    assert "- left out: x (y)" in page
    assert "| seconds lost | 2 | 2 |" in page


def test_a_page_of_sizes_tells_pauses_beyond_a_usual_step(crew: Any, tmp_path: Path) -> None:
    logs = [Log(tmp_path, worker) for worker in range(3)]
    for log in logs:
        log.add_steps(1, range(100), 0.0)
    newcomer = Log(tmp_path, 3)
    newcomer.add(9.95, "ready")
    for log in (*logs, newcomer):
        log.add_steps(2, range(100, 200), 10.15)
    events = [event("join", 3, 9.85)]
    record = {"events": events, "accidents": [], "peaks_kib": {"worker-0.0": 3 * 2**20, "x": 5}}
    summary = crew.reading.summarize(crew.reading.read_logs(tmp_path), record)
    run = {"system": "one", "size": "1m", "rate": "1gbit", "n_parameters": 1000, "tuning": "none"}
    run |= {"workers": 3, "measured": "commit 1"}
    page = crew.tables.write_sizes({"conditions": {}, "left_out": {}, "runs": [run | summary]})
    cells = (
        "0.10 | - | 0.15, 0.15 (1) | 0.15, 0.15 (1) | 0.20, 0.20 (1) | - | - | - | 3.0 | 0 | 0 |"
    )
    row = f"| 1,000 | 3 | 1gbit | one | {cells} commit 1 |"
    assert row in page
    never = {**summary["events"][0], "pause_s": 0.2, "change_s": None, "joined_s": None}
    summary = {**summary, "events": [*summary["events"], never]}
    page = crew.tables.write_sizes({"conditions": {}, "left_out": {}, "runs": [run | summary]})
    assert "| 0.12, 0.15 (2) | 0.15, 0.15 (1), 1 never | 0.20, 0.20 (1), 1 never |" in page


def test_steps_are_told_apart_from_those_while_a_newcomer_catches_up(
    crew: Any, tmp_path: Path
) -> None:
    logs = [Log(tmp_path, worker) for worker in range(3)]
    for log in logs:
        log.add_steps(1, range(10), 0.0)
        for place in range(20):  # a step takes 0.3 s while the newcomer catches up
            log.add(1.2 + 0.3 * place, step=10 + place, epoch=1, digest=0)
    newcomer = Log(tmp_path, 3)
    newcomer.add(1.15, "ready")
    for log in (*logs, newcomer):
        log.add_steps(2, range(30, 40), 7.2)
    lines = crew.reading.read_logs(tmp_path)
    events = crew.reading.measure_events(lines, [event("join", 3, 0.9)])
    usual_s, meanwhile_s = crew.reading.find_usual_steps(crew.reading.list_commits(lines), events)
    assert usual_s == pytest.approx(0.1)
    assert meanwhile_s == pytest.approx(0.3)
    assert crew.reading.find_usual_steps(crew.reading.list_commits(lines), [])[1] is None


def test_the_page_of_losses_has_a_row_for_each_system(crew: Any, tmp_path: Path) -> None:
    for worker in range(3):
        Log(tmp_path, worker).add_steps(1, range(10), 0.0)
        Log(tmp_path, worker, life=1).add_steps(2, range(5, 20), 4.0)
    record = {"events": [event("loss", -1, 1.0)], "accidents": [], "peaks_kib": {"x": 2**20}}
    summary = crew.reading.summarize(crew.reading.read_logs(tmp_path), record)
    run = {"system": "one", "size": "1m", "rate": "1gbit", "n_parameters": 1000, "tuning": "none"}
    run |= {"workers": 3, "measured": "commit 1"}
    page = crew.tables.write_losses({"conditions": {}, "left_out": {}, "runs": [run | summary]})
    assert (
        "| 3 | 1gbit | one | 0.10 | 3.00, 3.00 (1) | 3.50, 3.50 (1) | 5 | 1.0 | 0 | 0 | commit 1 |"
        in page
    )


def test_rows_that_are_measured_again_replace_those_of_a_record(crew: Any) -> None:
    def make(n_parameters: int, system: str, commit: str, *, n_workers: int = 3) -> dict[str, Any]:
        place = {"size": f"{n_parameters}m", "rate": "1gbit", "system": system, "round": 0}
        place["workers"] = n_workers
        return {"n_parameters": n_parameters, "measured": commit, **place}

    before = {"conditions": {"a": 1}, "left_out": {"x": "y", "two": "not installed"}}
    before["runs"] = [make(25, "one", "old"), make(25, "two", "old")]
    after = {"conditions": {"a": 2}, "left_out": {}}
    after["runs"] = [make(25, "two", "new"), make(1, "two", "new")]
    after["runs"].append(make(25, "one", "new", n_workers=1))
    both = crew.program.add_runs(before, after)
    assert both["conditions"] == {"a": 2}
    assert both["left_out"] == {"x": "y"}
    shown = "size", "workers", "system", "measured"
    assert [tuple(run[name] for name in shown) for run in both["runs"]] == [
        ("1m", 3, "two", "new"),
        ("25m", 1, "one", "new"),
        ("25m", 3, "one", "old"),
        ("25m", 3, "two", "new"),
    ]


@pytest.mark.parametrize("start_with", [2, 3])
def test_large_networks_are_played_with_few_workers(crew: Any, start_with: int) -> None:
    plan, workers = crew.event_plan.plan_sizes(17.0, start_with), set(range(start_with))
    for planned in plan:
        if planned.kind == "join":
            workers.add(planned.worker)
        else:
            assert planned.worker in workers
        if planned.kind == "kill":
            workers.remove(planned.worker)
        assert start_with <= len(workers) <= start_with + 1
    assert [planned.stop_s for planned in plan if planned.kind == "stop"] == [17.0]
    assert {planned.kind for planned in plan} == {"kill", "stop", "join"}


def test_the_cost_of_a_crew_is_found_whatever_a_start_of_processes_adds(crew: Any) -> None:
    def take(seconds: float) -> Any:
        return crew.step_cost.Segment(seconds, seconds, 2 * seconds)

    turns = [
        [{"without": take(slow), "with": take(1.5 * slow), "control": take(slow)}] * 3
        for slow in (1.0, 10.0)
    ]
    row = crew.step_cost.compare_modes(turns)
    assert row["whole_s"]["ratio_with"] == {"median": 1.5, "lower": 1.5, "upper": 1.5}
    assert row["cpu_s"]["ratio_control"] == {"median": 1.0, "lower": 1.0, "upper": 1.0}
    row |= {"workers": 4, "parameters": 10, "rate": "1gbit", "rest": 0.01}
    page = crew.tables.write_cost({"conditions": {"cores": 2}, "rows": [row]})
    assert page.splitlines()[-3].endswith("| 1.530 |")  # threads of four share two cores


def test_the_interval_of_a_ratio_is_as_wide_as_starts_of_processes_differ(crew: Any) -> None:
    alike = crew.step_cost.find_ratio([[1.0, 1.1, 1.2]] * 4)
    unlike = crew.step_cost.find_ratio([[1.0] * 3, [1.1] * 3, [1.1] * 3, [1.2] * 3])
    assert alike["median"] == unlike["median"] == 1.1
    assert unlike["lower"] == 1.0
    assert unlike["upper"] == 1.2
    assert alike["lower"] >= 1.0
    assert alike["upper"] - alike["lower"] <= unlike["upper"] - unlike["lower"]
