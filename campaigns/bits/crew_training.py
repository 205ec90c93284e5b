"""One case of a crew: a worker leaves, and returns as a new one, at steps that are given."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist

import distlion
from bits.cases import ALL_OPTIONS, ALL_RULES, MEMBERS, N_RANKS, N_STEPS, Case, Option
from bits.local_training import digest_local, make_inner
from bits.training import digest, list_kept, prepare_rank, set_grads

LEAVES, RETURNS = MEMBERS
(LEAVER,) = {*range(N_RANKS)} - {*MEMBERS[LEAVES]}


class _LeavesError(Exception):
    """This worker leaves its crew."""


def host_store() -> Any:
    """Start the store of crews in this process, which outlives all members."""
    return dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )


def train_crews(
    rank: int, world_size: int, cases: Sequence[Case], port: int
) -> list[tuple[int, str, str]]:
    """Train case by case; return this worker's last id in each, and digests as on ranks."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    return [_Member(rank, case, store).train() for case in cases]


class _Member:
    """One worker of one case; keys in the store order what the crew leaves to chance."""

    def __init__(self, rank: int, case: Case, store: Any) -> None:
        self.rank, self.case, self.store = rank, case, store
        self.option = ALL_OPTIONS[case.option]
        self.optimizer: Any = None  # a crew closes the connections of one that is still there

    def train(self) -> tuple[int, str, str]:
        """Train to the end, as one member or as two in succession."""
        if self.rank:
            self._await(f"here {self.rank - 1}")  # ids follow ranks
        crew = self._join(min_workers=N_RANKS)
        self._note(f"here {self.rank}")
        if self.rank == LEAVER:
            try:
                with crew:
                    self._do_steps(crew, until=LEAVES)
                    # Nobody takes a step again that this worker has committed.
                    self._await(*(f"at {LEAVES}, {rank}" for rank in MEMBERS[LEAVES]))
                    raise _LeavesError
            except _LeavesError:
                self._hang_up()
                self._await("return")
            crew = self._join(min_workers=N_RANKS - 1)
        with crew:
            digests = self._do_steps(crew, until=N_STEPS)
        self._hang_up()
        return (crew.id, *digests)

    def _hang_up(self) -> None:
        """Free the optimizer, and with it connections that the others would wait for."""
        self.optimizer = None
        gc.collect()

    def _join(self, *, min_workers: int) -> distlion.Crew:
        assert self.option.newcomers
        return distlion.Crew(
            self.store.host + f":{self.store.port}",
            min_workers=min_workers,
            max_workers=N_RANKS,
            run_id=self.case.name,
            secret="of these cases",
            newcomers=self.option.newcomers,
            store_timeout_s=30,
        )

    def _do_steps(self, crew: distlion.Crew, *, until: int) -> tuple[str, str]:
        model, arguments = prepare_rank(self.rank, self.case, None)
        params = list(model.parameters())
        is_local = bool(self.option.inner)
        if is_local:
            inner = make_inner(dict(model.named_parameters()), self.option)
            rule = ALL_RULES[self.case.rule].aggregation
            self.optimizer = crew.local_steps(inner, aggregation=rule, **arguments)
        else:
            self.optimizer = crew.optimizer(model.list_groups(self.case), **arguments)
        optimizer = self.optimizer
        # All begin together, and go on with fewer: a late starter would miss a vote.
        crew._membership.min_workers = N_RANKS - 1
        # The step in which a worker is seen counts without it; a vote of local steps is given up.
        await_at = RETURNS if is_local else RETURNS - 1
        while (step := _count_steps(optimizer, self.option)) < until:
            if step == await_at:
                if self.rank == 0:
                    self._note("return")
                await_members(crew, N_RANKS)
            set_grads(params, crew.id, step, self.option)
            optimizer.step()
            optimizer.zero_grad()
            if _count_steps(optimizer, self.option) == LEAVES:
                self._note(f"at {LEAVES}, {self.rank}")
        if is_local:
            return digest_local(optimizer, params, self.option)
        return digest(params), digest(list_kept(optimizer, params))

    def _note(self, event: str) -> None:
        self.store.set(f"{self.case.name}: {event}", "")

    def _await(self, *events: str) -> None:
        self.store.wait([f"{self.case.name}: {event}" for event in events])


def _count_steps(optimizer: Any, option: Option) -> int:
    count: int = optimizer.local_step if option.inner else optimizer.committed_step
    return count


def await_members(crew: distlion.Crew, size: int) -> None:
    """Wait until the crew has so many members, or has to form anew for more."""
    never = threading.Event()
    while crew.size < size and not crew.wants_change:
        never.wait(0.02)


def join_rows(rows: Iterable[tuple[int, str, str]]) -> list[tuple[str, str]]:
    """Return the digests of members in the order of their ids."""
    return [(params, state) for _, params, state in sorted(rows)]
