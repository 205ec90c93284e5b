"""One worker: a ``DistributedLion`` that is trained until its end, and a diary of it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

import distlion
from distlion.errors import DistlionError, ProcessGroupError, StepError
from distlion.votes.registry import RULES
from simulation.distributed import Distributed
from simulation.faults import Injector
from simulation.network import Machine, Network
from simulation.plan import MESSAGE_FAULTS, Fault, Plan

SETTLING_S = 1.0
"""From a timeout to its error, as the package promises."""

CONSTRUCTION = -1
"""In place of the number of a call."""


@dataclass(frozen=True)
class Raised:
    """An error that ended a call.

    Attributes:
        call: Which call of ``step()``, from 0, or CONSTRUCTION.
        step: The step that it was to commit.
        kind: The class of the error.
        culprits: Whom it names.
        is_recoverable: Whether it lets the worker go on.
        text: What it says.
        at_s: When.
        begun_s: When the call began.
    """

    call: int
    step: int
    kind: str
    culprits: tuple[int, ...]
    is_recoverable: bool
    text: str
    at_s: float
    begun_s: float


@dataclass
class Diary:
    """What became of one worker.

    Attributes:
        ending: "finished", "raised", "died", "stopped" for good, "left", or "refused" of one that
            came back; "" while it runs.
        committed: Steps.
        params: After each number of committed steps, the bits of the parameters.
        states: The same with the momenta.
        raised: Errors, in order; only the last one may have ended it.
        wrong: What it found wrong by itself.
    """

    ending: str = ""
    committed: int = 0
    params: dict[int, bytes] = field(default_factory=dict)
    states: dict[int, bytes] = field(default_factory=dict)
    raised: list[Raised] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def fatal(self) -> Raised | None:
        """The error that ended it."""
        return self.raised[-1] if self.ending == "raised" else None


class Worker:
    """Train as the plan says.

    Args:
        plan: The schedule.
        network: The network.
        machine: The process.
        injector: Is told of faults that strike at calls.
        diary: Is written.
    """

    def __init__(
        self, plan: Plan, network: Network, machine: Machine, *, injector: Injector, diary: Diary
    ) -> None:
        self._plan, self._network, self._machine = plan, network, machine
        self._kernel, self._injector, self._diary = network.kernel, injector, diary
        self._optimizer: distlion.DistributedLion | None = None
        self._own = [
            fault
            for fault in plan.faults
            if fault.victim == machine.rank and fault.kind not in MESSAGE_FAULTS
        ]

    def live(self) -> None:
        """Train, then end the process."""
        diary, rank = self._diary, self._machine.rank
        diary.ending = self._train()
        self._machine.limit_s = math.inf
        self._kernel.sleep(self._plan.lingers_s[rank])
        for function in list(self._machine.at_exit):
            function()
        self._network.end(self._machine, is_crash=False)

    def _train(self) -> str:
        """Return how it ended."""
        plan = self._plan
        self._pause(self._kernel.random.uniform(0, plan.compute_s))
        longest_s = max(plan.timeouts.start_s, plan.longest_wait_s)
        if not self._attempt(CONSTRUCTION, self._construct, longest_s):
            return "raised"
        optimizer = self._optimizer
        assert optimizer is not None
        self._note_state()
        for call in range(plan.most_calls):
            if optimizer.committed_step >= plan.steps:
                break
            self._pause(self._kernel.random.uniform(0, plan.compute_s))
            if self._strike(call) == "left":
                return "left"
            if not self._attempt(call, partial(self._step, call), plan.longest_wait_s):
                return "raised"
            self._note_state()
        return "finished"

    def _construct(self) -> None:
        plan, rank = self._plan, self._machine.rank
        chance = np.random.default_rng((plan.seed, rank))
        params = [
            torch.nn.Parameter(torch.from_numpy(chance.standard_normal(n, np.float32)))
            for n in plan.sizes
        ]
        named = [(f"p{index}", param) for index, param in enumerate(params)]
        groups = [
            {"params": named[number :: len(plan.rules)], "aggregation": RULES[rule].rule}
            for number, rule in enumerate(plan.rules)
        ]
        group = None if plan.is_default else self._machine.groups["world"]
        self._optimizer = distlion.DistributedLion(groups, process_group=group, **plan.options)  # type: ignore[arg-type]

    def _attempt(self, call: int, action: Callable[[], None], limit_s: float) -> bool:
        """Call something that may raise; return whether the worker can go on."""
        machine, diary, kernel = self._machine, self._diary, self._kernel
        begun_s = kernel.now_s
        machine.note_progress(begun_s)
        machine.limit_s = limit_s + SETTLING_S
        try:
            action()
        except DistlionError as error:
            raised = Raised(
                call,
                diary.committed,
                type(error).__name__,
                getattr(error, "culprits", ()),
                error.is_recoverable,
                str(error),
                kernel.now_s,
                begun_s,
            )
            diary.raised.append(raised)
            kernel.tell(machine, f"raises {raised.kind}: {raised.text}")
            self._check_raised(raised, error)
        else:
            return True
        finally:
            if not machine.is_gone:
                machine.note_progress(kernel.now_s)
                machine.limit_s = math.inf
        return raised.is_recoverable

    def _check_raised(self, raised: Raised, error: DistlionError) -> None:
        """Check that whoever raised is as it was, and that a dead optimizer stays dead."""
        optimizer, diary = self._optimizer, self._diary
        if raised.call == CONSTRUCTION or optimizer is None:
            return
        commits = optimizer.committed_step
        if commits != diary.committed:
            # A comparison of replicas that follows a commit may fail after it.
            self._note_state()
            raised = diary.raised[-1]
        elif self._digest(with_momenta=True) != diary.states[commits]:
            diary.wrong.append(f"call {raised.call} raised {raised.kind} and changed the state")
        if isinstance(error, StepError) and error.committed_step != commits:
            diary.wrong.append(f"{raised.kind} says {error.committed_step} steps, not {commits}")
        if raised.is_recoverable:
            return
        begun = self._count_begun()
        try:
            self._fill_gradients(raised.call + 1)
            optimizer.step()
        except ProcessGroupError:
            pass
        else:
            diary.wrong.append(f"stepped after {raised.kind}")
        if self._count_begun() != begun:
            diary.wrong.append(f"sent something after {raised.kind}")

    def _count_begun(self) -> int:
        return sum(end.n_begun for end in self._machine.groups.values())

    def _pause(self, seconds: float) -> None:
        """Compute for a while."""
        self._machine.paused_s += seconds
        self._kernel.sleep(seconds)

    def _strike(self, call: int) -> str:
        """Let a fault of this call strike; return "left" where the worker ends by it."""
        fault = self._find(call, "late", "leave", "settings")
        if fault is None:
            return ""
        self._injector.note(fault)
        if fault.kind == "late":
            self._pause(fault.seconds)
        if fault.kind == "settings":
            assert self._optimizer is not None
            for group in self._optimizer.param_groups:
                group["lr"] *= 2
        return "left" if fault.kind == "leave" else ""

    def _find(self, call: int, *kinds: str) -> Fault | None:
        found = (fault for fault in self._own if fault.at == call and fault.kind in kinds)
        return next(found, None)

    def _step(self, call: int) -> None:
        optimizer = self._optimizer
        assert optimizer is not None
        optimizer.zero_grad()
        self._fill_gradients(call)
        fault = self._find(call, "give up")
        if fault is not None:
            self._injector.note(fault)
            optimizer.zero_grad()
            return
        fault = self._find(call, "call")
        if fault is not None:
            self._injector.note(fault)
            optimizer.verify_replicas()
            return
        optimizer.step()

    def _fill_gradients(self, call: int) -> None:
        """Let gradients arrive, through a backward pass where votes leave in it."""
        plan, rank, optimizer = self._plan, self._machine.rank, self._optimizer
        assert optimizer is not None
        params = [p for group in optimizer.param_groups for p in group["params"]]
        chance = np.random.default_rng((plan.seed, rank, call + 1))
        grads: list[tuple[Tensor, Tensor]] = []
        for index, param in enumerate(params):
            grad = torch.from_numpy(chance.standard_normal(param.numel(), np.float32))
            if any((p.call, p.rank, p.index) == (call, rank, index) for p in plan.poisons):
                grad[0] = math.nan
            if not (plan.absent and index and chance.random() < 0.2):
                grads.append((param, grad))
        if plan.has_overlap:
            sum((param * grad).sum() for param, grad in grads).backward()  # type: ignore[union-attr]
            return
        for param, grad in grads:
            param.grad = grad

    def _note_state(self) -> None:
        optimizer, diary = self._optimizer, self._diary
        assert optimizer is not None
        diary.committed = optimizer.committed_step
        diary.params[diary.committed] = self._digest(with_momenta=False)
        diary.states[diary.committed] = self._digest(with_momenta=True)

    def _digest(self, *, with_momenta: bool) -> bytes:
        optimizer = self._optimizer
        assert optimizer is not None
        params = [p for group in optimizer.param_groups for p in group["params"]]
        tensors = [p.detach() for p in params]
        if with_momenta:
            tensors += [optimizer.state[p]["exp_avg"] for p in params]
        return b"".join(bytes(memoryview(tensor.view(-1).numpy())) for tensor in tensors)


def come_back(plan: Plan, distributed: Distributed, diary: Diary) -> None:
    """Try to join, as a process that was started again: the group has no place for it.

    A script that overlooks that may go on, and must not train alone.
    """
    with contextlib.suppress(RuntimeError):
        distributed.init_process_group(plan.timeouts.start_s)
    try:
        param = torch.nn.Parameter(torch.zeros(3))
        distlion.DistributedLion([param], lr=1e-2)
    except ProcessGroupError:
        diary.ending = "refused"
    else:
        diary.wrong.append("a worker that came back trains alone")
