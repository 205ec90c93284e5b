"""Play cases, many in each launch of workers, and compare their digests with digests.json."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import init_device_mesh

from bits.cases import ALL_OPTIONS, CLIENT_RULES, CREW, N_RANKS, VIRTUAL, Case
from bits.crew_training import host_store, join_rows, train_crews
from bits.local_training import train_clients, train_locally, train_locally_virtual
from bits.training import Digests, train_on_ranks, train_virtually
from cluster import run_workers

PATH = Path(__file__).with_name("digests.json")
CASES_PER_LAUNCH = 150
SECONDS_PER_CASE = 5


Row = tuple[str, str] | str
"""Digests of one worker's parameters and state, or its error."""


class BitsError(AssertionError):
    """A case raised, or its replicas differ."""


def play(
    cases: Sequence[Case],
    *,
    environment: Mapping[str, str] | None = None,
    report: Callable[[int], None] = lambda n_played: None,
) -> dict[str, Digests]:
    """Play cases, real workers with ``environment``; call ``report`` after each launch."""
    found = {case.name: _train_virtually(case) for case in cases if case.pattern == VIRTUAL}
    report(len(found))
    launches: dict[tuple[int, bool], list[Case]] = {}
    for case in cases:
        if case.pattern != VIRTUAL:
            n_workers = ALL_OPTIONS[case.option].n_workers
            launches.setdefault((n_workers, case.pattern == CREW), []).append(case)
    for (n_workers, is_crew), alike in launches.items():
        for first in range(0, len(alike), CASES_PER_LAUNCH):
            some = alike[first : first + CASES_PER_LAUNCH]
            ranks = _launch(some, n_workers, dict(environment or {}), is_crew=is_crew)
            found |= _read_rows(some, ranks)
            report(len(found))
    return found


def _train_virtually(case: Case) -> Digests:
    """Train all workers, or all clients, in this process."""
    if case.rule in CLIENT_RULES:
        return train_clients(case)
    is_local = ALL_OPTIONS[case.option].inner
    return train_locally_virtual(case) if is_local else train_virtually(case)


def _launch(
    cases: Sequence[Case], n_workers: int, environment: dict[str, str], *, is_crew: bool
) -> list[list[Row]]:
    """Train cases in processes; return what each worker has to say of each case."""
    options: dict[str, Any] = {
        "environment": environment,
        "timeout_s": 60 + SECONDS_PER_CASE * len(cases) * (1 + 3 * is_crew),
        "measured": False,
    }
    if not is_crew:
        return run_workers(_train_all, n_workers, cases, **options)
    store = host_store()
    told = run_workers(train_crews, n_workers, cases, store.port, process_group=False, **options)
    joined = [join_rows(rows) for rows in zip(*told, strict=True)]
    return [list(rows) for rows in zip(*joined, strict=True)]


def _read_rows(cases: Sequence[Case], ranks: Sequence[Sequence[Row]]) -> dict[str, Digests]:
    found, problems = {}, []
    for case, *rows in zip(cases, *ranks, strict=True):
        errors = {row for row in rows if isinstance(row, str)}
        params = {row[0] for row in rows if not isinstance(row, str)}
        if errors or len(params) > 1:
            problems.append(f"{case.name}: {min(errors, default='replicas differ')}")
            continue
        found[case.name] = Digests(params.pop(), tuple(row[1] for row in rows))
    if problems:
        raise BitsError("\n".join(problems))
    return found


def _train_all(rank: int, world_size: int, cases: Sequence[Case]) -> list[Row]:
    """Train case by case; one that raises does so on all ranks, so that the next can go on."""
    mesh = None
    if world_size == N_RANKS:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    rows: list[Row] = []
    for case in cases:
        train = train_locally if ALL_OPTIONS[case.option].inner else train_on_ranks
        try:
            rows.append(train(rank, case, mesh))
        except Exception:
            rows.append(traceback.format_exc())
    return rows


def read(path: Path = PATH) -> dict[str, Digests]:
    """Read digests of cases by name."""
    table = json.loads(path.read_text())
    return {name: Digests(params, tuple(states)) for name, (params, states) in table.items()}


def write(found: Mapping[str, Digests], path: Path = PATH) -> None:
    """Write digests, one line for each case."""
    lines = [f"{json.dumps(name)}: {json.dumps([d.params, d.states])}" for name, d in found.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def compare(
    found: Mapping[str, Digests],
    recorded: Mapping[str, Digests],
    *,
    missing: str = "not recorded",
    is_complete: bool = False,
) -> list[str]:
    """Return a line for each case that is not as recorded.

    Args:
        found: Digests of the cases that were played.
        recorded: What they must be.
        missing: What to say of a case without a record.
        is_complete: Whether every record must belong to a case that was played.
    """
    lines = []
    for name, digests in found.items():
        expected = recorded.get(name)
        if expected is None:
            lines.append(f"{name}: {missing}")
            continue
        parts = ["parameters"] if digests.params != expected.params else []
        if len(digests.states) != len(expected.states):
            parts.append(f"{len(digests.states)} states in place of {len(expected.states)}")
        pairs = zip(digests.states, expected.states, strict=False)
        parts += [f"state of {rank}" for rank, (is_, was) in enumerate(pairs) if is_ != was]
        if parts:
            lines.append(f"{name}: {', '.join(parts)}")
    if is_complete:
        lines += [f"{name}: no such case" for name in recorded if name not in found]
    return lines
