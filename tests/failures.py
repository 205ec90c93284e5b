"""Make a worker fail, and tell what it raised and whether it was left as it was."""

from __future__ import annotations

import itertools
import re
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

import distlion
import oracle
from distlion.wire import gloo, roll_call, watch
from distlion.wire.watch import watch_peers

SIZES = {"first": 70, "second": 130}


@dataclass(frozen=True)
class Caught:
    """What one rank raised, and whether its parameters, momenta and counter are as before."""

    kind: str
    text: str
    rank: int | None
    step: int | None
    culprits: tuple[int, ...]
    committed_step: int | None
    unchanged: bool


def make_params(sizes: dict[str, int] | None = None) -> list[tuple[str, torch.nn.Parameter]]:
    return [
        (name, torch.nn.Parameter(torch.full((n,), 0.5))) for name, n in (sizes or SIZES).items()
    ]


def bfloat16_params() -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, torch.nn.Parameter(p.data.bfloat16())) for name, p in make_params()]


def make_optimizer(named_params: Any = None, **options: Any) -> distlion.DistributedLion:
    return distlion.DistributedLion(
        named_params or make_params(),
        **({"timeouts": distlion.Timeouts(step_s=20, busy_s=20), "lr": 1e-2} | options),
    )


def params_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def set_grads(optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    for index, p in enumerate(params_of(optimizer)):
        p.grad = torch.from_numpy(oracle.gradient(9, step, rank, index, p.numel()))


def freeze_state(optimizer: distlion.DistributedLion) -> list[bytes]:
    tensors = params_of(optimizer) + [optimizer.state[p]["exp_avg"] for p in params_of(optimizer)]
    steps = [
        str(optimizer.committed_step),
        *(str(group["step"]) for group in optimizer.param_groups),
    ]
    return [t.detach().float().numpy().tobytes() for t in tensors] + [s.encode() for s in steps]


def caught(optimizer: distlion.DistributedLion | None, action: Callable[[], Any]) -> Caught | None:
    """Run ``action`` and return what it raised, or None."""
    before = None if optimizer is None else freeze_state(optimizer)
    try:
        action()
    except Exception as error:
        return Caught(
            type(error).__name__,
            str(error),
            getattr(error, "rank", None),
            getattr(error, "step", None),
            tuple(getattr(error, "culprits", ())),
            getattr(error, "committed_step", None),
            optimizer is None or freeze_state(optimizer) == before,
        )
    return None


def give_time() -> None:
    """Give other ranks long to answer an alarm and to read what all agree on: cores are busy."""
    watch.ANSWER_S, watch.READ_S, watch.SETTLE_S = 2.0, 10.0, 30.0


def note_wait(rank: int, group: dist.ProcessGroup | None = None, *, at: str = "step") -> None:
    """Let the others know once this rank waits in an exchange of a group: see ``await_waits``."""
    peer_watch, store = watch_peers(group or dist.group.WORLD), _get_default_store()
    enter = peer_watch.enter_exchange

    def enter_and_tell(transfer: object) -> None:
        enter(transfer)
        store.set(f"waits/{at}/{rank}", "")

    peer_watch.enter_exchange = enter_and_tell  # type: ignore[method-assign]


def await_waits(ranks: Iterable[int], *, at: str = "step") -> None:
    """Wait until all these ranks wait."""
    _get_default_store().wait([f"waits/{at}/{rank}" for rank in ranks])


JUDGE = roll_call.Patience._judge


def note_extensions(store: Any, scene: str) -> None:
    """Let others know in a store how often this process has gone on to wait for a busy worker."""
    count = itertools.count(1)

    def judge_and_tell(patience: roll_call.Patience, *answers: Any) -> None:
        before = patience._deadline_s
        JUDGE(patience, *answers)
        if patience._deadline_s > before:
            store.set(f"{scene}/extended {next(count)}", "")

    roll_call.Patience._judge = judge_and_tell  # type: ignore[method-assign]


def count_looks_as_time(look_s: float = 7.5) -> None:
    """Let waits of this process last for so many looks for roll calls, on any machine.

    No time passes before a roll call of this process is answered. So no worker that runs is taken
    for a silent one, with ``Timeouts.step_s`` of several looks.
    """
    look, now_s, ticks = roll_call.RollCalls.look, [0.0], itertools.count()
    asking: weakref.WeakSet[roll_call.RollCalls] = weakref.WeakSet()

    def pass_time_and_look(calls: roll_call.RollCalls, describe: Callable[[], Any]) -> None:
        asking.add(calls)
        if all(each._own is None or each._own.answers is not None for each in asking):
            now_s[0] += look_s
        look(calls, describe)

    roll_call.RollCalls.look = pass_time_and_look  # type: ignore[method-assign]
    clock = SimpleNamespace(monotonic=lambda: now_s[0] + 1e-6 * next(ticks))
    gloo.time = roll_call.time = clock  # type: ignore[attr-defined]


def lose_patience(optimizer: distlion.DistributedLion, *, after_s: float = 1.0) -> None:
    """Let this rank alone give up so soon, whatever its ``Timeouts.step_s`` is."""
    link = optimizer._session.routing.between
    assert link is not None
    link.timeout_s = link.busy_timeout_s = after_s


def assert_raised(found: Caught | None, kind: type[Exception], *fragments: str) -> Caught:
    assert found is not None, f"nothing was raised; expected {kind.__name__}"
    assert found.kind == kind.__name__, f"{found.kind}: {found.text}"
    for fragment in fragments:
        assert re.search(fragment, found.text), f"{fragment!r} is not in: {found.text}"
    return found


def assert_all_raised(
    outcomes: list[Caught | None], kind: type[Exception], *fragments: str
) -> None:
    """Assert that each rank raised ``kind``, told every fragment, and is as before."""
    for outcome in outcomes:
        assert assert_raised(outcome, kind, *fragments).unchanged
