"""One worker of a crew, trained to its goal, and a diary of it."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

import distlion
from distlion.crew import CrewLion
from distlion.crew.epoch import Epoch, Member
from distlion.errors import DistlionError
from distlion.votes.registry import RULES
from simulation.crews.estimates import Said, find_said
from simulation.crews.faults import CrewInjector
from simulation.crews.network import CrewMachine
from simulation.crews.plan import STORE_WAIT_S, WAIT_S, CrewPlan
from simulation.kernel import Kernel

Key = tuple[int, int]
"""An epoch, and a number of committed steps."""


class ScriptError(Exception):
    """What a script of a user may raise."""


class AbandonedError(ScriptError):
    """The same in a script that does not leave its crew by that."""


@dataclass(frozen=True)
class Entry:
    """An epoch that a worker has entered.

    Attributes:
        number: Of the epoch.
        members: By rank, the id of each, the last epoch it was whole in, and its steps.
        progress: By rank, the last epoch and the steps that its parameters have: of a newcomer that
            has caught up, its donor's.
        step: Steps of this worker, once it is in.
        params: Bits of its parameters then.
        buffer: Those of its buffer.
        own, held: What its votes have said, and what it holds of all.
        at_s: When.
    """

    number: int
    members: tuple[tuple[int, int, int], ...]
    progress: tuple[tuple[int, ...], ...]
    step: int
    params: int
    buffer: int
    own: Said
    held: Said
    at_s: float


@dataclass
class CrewDiary:
    """What became of one worker.

    Attributes:
        number: Of its machine.
        id: In the crew; -1 before it has one.
        crew: The token of its crew; "" before it is in an epoch.
        ending: "finished", "raised", "left", "broken" by an error that is not the package's;
            "died", "stopped" for good, or "has no end"; "" while it runs.
        error: The class of the error that ended it, and what it says.
        started_s, ended_s: When.
        entries: Epochs that it has entered.
        before: Where it was each time that it asked for the next epoch: the last epoch that it was
            whole in, its steps, bits of its parameters, and of its buffer.
        tried: Each time, the epoch that it got, or 0, and whether somebody there had trained.
        commits: What it committed: the bits of its parameters after that, and when.
        carried: Between two steps: steps its scheduler counts, the cursor of its sampler, its lr.
        followed: For each of ``before``, whether it had caught up with a donor.
        wrong: What it found wrong by itself.
    """

    number: int
    id: int = -1
    crew: str = ""
    ending: str = ""
    error: tuple[str, str] = ("", "")
    started_s: float = 0.0
    ended_s: float = float("inf")
    entries: list[Entry] = field(default_factory=list)
    before: list[tuple[int, int, int, int]] = field(default_factory=list)
    tried: list[tuple[int, bool]] = field(default_factory=list)
    commits: list[tuple[Key, int, float]] = field(default_factory=list)
    carried: dict[Key, tuple[int, int, float]] = field(default_factory=dict)
    followed: list[bool] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


class Scheduler:
    """Lets lr fall a little with each step that it counts."""

    def __init__(self, optimizer: CrewLion) -> None:
        self._optimizer, self.count = optimizer, 0

    def step(self) -> None:
        self.count += 1
        for group in self._optimizer.param_groups:
            group["lr"] = 1e-2 * 0.9**self.count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class CrewWorker:
    """Train as the plan says.

    Args:
        plan: The schedule.
        kernel: The clock.
        machine: The process.
        injector: Strikes at commits and between steps.
        diary: Is written.
        keep: Keeps an object until the schedule is over, so that none ends on another's task.
        on_step: Called with how many steps this worker has committed.
        meet: Makes the group of this worker's processes; None where it is one.
    """

    def __init__(
        self,
        plan: CrewPlan,
        kernel: Kernel,
        machine: CrewMachine,
        *,
        injector: CrewInjector,
        diary: CrewDiary,
        keep: Callable[[object], None],
        on_step: Callable[[int], None],
        meet: Callable[[], Any] = lambda: None,
    ) -> None:
        self._meet = meet
        self._plan, self._kernel, self._machine = plan, kernel, machine
        self._injector, self._diary, self._keep = injector, diary, keep
        self._on_step = on_step
        self._n_commits = self._n_formed = 0
        self._crew: distlion.Crew
        self._optimizer: CrewLion
        self._buffer = torch.zeros(3)

    def live(self) -> None:
        """Train, and note the end."""
        diary, kernel = self._diary, self._kernel
        diary.started_s = kernel.now_s
        try:
            self._train()
            diary.ending = "finished"
        except DistlionError as error:
            diary.ending, diary.error = "raised", (type(error).__name__, str(error))
        except ScriptError:
            diary.ending = "left"
        except Exception as error:
            diary.ending, diary.error = "broken", (type(error).__name__, str(error))
        diary.ended_s = kernel.now_s
        kernel.tell(self._machine, f"{diary.ending} {': '.join(diary.error)}")

    def _train(self) -> None:
        plan = self._plan
        named = {"max_workers": plan.max_workers, "replay_steps": plan.replay_steps}
        more = {key: value for key, value in named.items() if value is not None}
        crew = distlion.Crew(
            "store:29400",
            member=self._meet_inside(),
            min_workers=plan.min_workers,
            secret="of the simulation",
            newcomers=plan.newcomers,  # type: ignore[arg-type]
            wait_timeout_s=WAIT_S,
            store_wait_s=STORE_WAIT_S,
            **more,
        )
        self._crew, self._diary.id = crew, crew.id
        self._keep(crew)
        membership = crew._membership
        find_next, enter = membership.find_next, membership.enter

        def note_and_find(own: Member, lost: Collection[int], **options: float) -> Epoch:
            self._note_forming(own)
            found = None
            try:
                found = find_next(own, lost, **options)
            finally:
                has_trained = found is not None and found.members[0].epoch > 0
                self._diary.tried.append((0 if found is None else found.number, has_trained))
            return found

        def enter_and_note(epoch: Epoch, **options: float) -> None:
            self._note_entry(epoch)
            enter(epoch, **options)

        membership.find_next = note_and_find  # type: ignore[method-assign]
        membership.enter = enter_and_note  # type: ignore[method-assign]
        with contextlib.ExitStack() as stack:
            stack.enter_context(crew)
            try:
                self._train_in(crew)
            except AbandonedError:
                stack.pop_all()
                raise

    def _meet_inside(self) -> Any:
        """Make the group of this worker's processes, of which one may be gone."""
        try:
            return self._meet()
        except RuntimeError as error:
            raise ScriptError from error

    def _train_in(self, crew: distlion.Crew) -> None:
        plan, diary, machine = self._plan, self._diary, self._machine
        sampler = distlion.CrewSampler(crew, n_examples=50, batch_size=2)
        optimizer = self._make_optimizer(crew)
        scheduler = Scheduler(optimizer)
        crew.carry(scheduler=scheduler)
        while optimizer.committed_step < plan.goal:
            if plan.admits:
                sampler.take()
            step = optimizer.committed_step
            rates = {group["lr"] for group in optimizer.param_groups}
            diary.carried[crew.epoch.number, step] = scheduler.count, sampler.cursor, min(rates)
            if scheduler.count != step or len(rates) > 1:
                diary.wrong.append(f"step {step}: {scheduler.count} steps of the scheduler {rates}")
            self._kernel.sleep(self._kernel.random.uniform(0, plan.compute_s))
            fault = self._injector.find_own(machine, self._n_commits)
            if fault is not None and fault.kind == "leave":
                raise ScriptError
            if fault is not None and fault.kind == "abandon":
                raise AbandonedError
            if fault is not None:
                self._kernel.sleep(fault.seconds)
            optimizer.zero_grad()
            self._fill_gradients(step)
            if optimizer.step():
                scheduler.step()
                sampler.advance()
        self._injector.note(machine, "ending")
        self._kernel.check_alive()

    def _make_optimizer(self, crew: distlion.Crew) -> CrewLion:
        plan = self._plan
        chance = np.random.default_rng((plan.seed, crew.id))
        params = [
            torch.nn.Parameter(torch.from_numpy(chance.standard_normal(n, np.float32)))
            for n in plan.sizes
        ]
        self._params, self._buffer = params, torch.full((3,), float(crew.id))
        named = [(f"p{index}", param) for index, param in enumerate(params)]
        groups = [
            {"params": named[number :: len(plan.rules)], "aggregation": RULES[rule].rule}
            for number, rule in enumerate(plan.rules)
        ]
        return crew.optimizer(groups, buffers=[self._buffer], **plan.options)  # type: ignore[arg-type]

    def _watch(self, optimizer: CrewLion) -> None:
        """Look on as the optimizer commits."""
        self._optimizer = optimizer
        advance = optimizer._advance

        def advance_and_note() -> None:
            advance()
            self._note_commit()

        optimizer._advance = advance_and_note  # type: ignore[method-assign]

    def _note_forming(self, own: Member) -> None:
        place = (own.epoch, own.step, self._digest(), _check(self._buffer))
        self._diary.before.append(place)
        self._diary.followed.append(own.donor is not None)
        self._machine.begin("forming", self._n_formed)

    def _note_entry(self, epoch: Epoch) -> None:
        optimizer = self._crew._optimizer
        assert optimizer is not None
        found = optimizer()
        assert found is not None
        if self._n_formed == 0:
            self._watch(found)
        self._check_momentum(epoch, found)
        self._diary.crew = self._crew._membership.rendezvous.memory.crew
        own, held = find_said(found, epoch.place) if self._plan.lanes == 1 else ({}, {})
        self._diary.entries.append(
            Entry(
                epoch.number,
                tuple((member.id, member.epoch, member.step) for member in epoch.members),
                tuple(tuple(member.progress[:2]) for member in epoch.members),
                found.committed_step,
                self._digest(),
                _check(self._buffer),
                own,
                held,
                self._kernel.now_s,
            )
        )
        self._machine.begin("training", self._n_formed)
        self._n_formed += 1

    def _check_momentum(self, epoch: Epoch, optimizer: CrewLion) -> None:
        """Note it where a newcomer does not begin with momenta of zeros, as it should."""
        is_new = epoch.members[epoch.place].epoch == 0 and epoch.members[0].epoch > 0
        momenta = [each["exp_avg"] for each in optimizer.state.values() if "exp_avg" in each]
        if is_new and self._plan.newcomers == "zeros" and any(map(torch.any, momenta)):
            self._diary.wrong.append(f"epoch {epoch.number} begins with somebody's momentum")

    def _note_commit(self) -> None:
        key = self._crew.epoch.number, self._optimizer.committed_step
        self._diary.commits.append((key, self._digest(), self._kernel.now_s))
        self._buffer += 1 + self._crew.id  # as running means of a batch
        self._on_step(key[1])
        self._n_commits += 1
        self._injector.note(self._machine, "committed", self._n_commits - 1)
        self._kernel.check_alive()

    def _fill_gradients(self, step: int) -> None:
        plan = self._plan
        lane = (self._crew.lane,) if plan.lanes > 1 else ()
        chance = np.random.default_rng((plan.seed, self._crew.id, step + 1, *lane))
        grads: list[tuple[Tensor, Tensor]] = []
        for index, param in enumerate(self._params):
            grad = torch.from_numpy(chance.standard_normal(param.numel(), np.float32))
            if not (plan.absent and index and chance.random() < 0.2):
                grads.append((param, grad))
        if plan.options["overlap"]:
            sum((param * grad).sum() for param, grad in grads).backward()  # type: ignore[union-attr]
            return
        for param, grad in grads:
            param.grad = grad

    def _digest(self) -> int:
        params = [param.detach().numpy().tobytes() for param in self._params]
        return zlib.crc32(b"".join(params))


def _check(tensor: Tensor) -> int:
    return zlib.crc32(tensor.numpy().tobytes())
