"""Play cases, many in each launch of workers, and compare their digests with digests.json."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch.distributed.device_mesh import init_device_mesh

from bits.cases import N_RANKS, VIRTUAL, Case
from bits.training import Digests, train_on_ranks, train_virtually
from cluster import run_workers

PATH = Path(__file__).with_name("digests.json")
CASES_PER_LAUNCH = 150
SECONDS_PER_CASE = 5


class BitsError(AssertionError):
    """A case raised, or its replicas differ."""


def play(
    cases: Sequence[Case],
    *,
    environment: Mapping[str, str] | None = None,
    report: Callable[[int], None] = lambda n_played: None,
) -> dict[str, Digests]:
    """Play cases, real workers with ``environment``; call ``report`` after each launch."""
    real = [case for case in cases if case.pattern != VIRTUAL]
    found = {case.name: train_virtually(case) for case in cases if case.pattern == VIRTUAL}
    report(len(found))
    for first in range(0, len(real), CASES_PER_LAUNCH):
        found |= _launch(real[first : first + CASES_PER_LAUNCH], dict(environment or {}))
        report(len(found))
    return found


def _launch(cases: Sequence[Case], environment: dict[str, str]) -> dict[str, Digests]:
    ranks = run_workers(
        _train_all,
        N_RANKS,
        cases,
        environment=environment,
        timeout_s=60 + SECONDS_PER_CASE * len(cases),
        measured=False,
    )
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


def _train_all(rank: int, world_size: int, cases: Sequence[Case]) -> list[tuple[str, str] | str]:
    """Train case by case; one that raises does so on all ranks, so that the next can go on."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    rows: list[tuple[str, str] | str] = []
    for case in cases:
        try:
            rows.append(train_on_ranks(rank, case, mesh))
        except Exception:
            rows.append(traceback.format_exc())
    return rows


def read() -> dict[str, Digests]:
    """Read digests.json."""
    table = json.loads(PATH.read_text())
    return {name: Digests(params, tuple(states)) for name, (params, states) in table.items()}


def write(found: Mapping[str, Digests]) -> None:
    """Write digests.json, one line for each case."""
    lines = [f"{json.dumps(name)}: {json.dumps([d.params, d.states])}" for name, d in found.items()]
    PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def compare(found: Mapping[str, Digests], recorded: Mapping[str, Digests]) -> list[str]:
    """Return a line for each case that is not as recorded."""
    lines = []
    for name, digests in found.items():
        expected = recorded.get(name)
        if expected is None:
            lines.append(f"{name}: not recorded")
            continue
        parts = ["parameters"] if digests.params != expected.params else []
        pairs = zip(digests.states, expected.states, strict=True)
        parts += [f"state of {rank}" for rank, (is_, was) in enumerate(pairs) if is_ != was]
        if parts:
            lines.append(f"{name}: {', '.join(parts)}")
    return lines
