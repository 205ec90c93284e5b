"""The votes of a crew's local steps, and what a lagging worker takes of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

from torch import Tensor
from torch.optim.optimizer import Optimizer

from distlion.crew.carried import check_groups, describe_groups, encode_state, take_groups
from distlion.crew.epoch import Epoch
from distlion.local.votes import LocalVotes
from distlion.optim.distributed_lion import DistributedLion

At = Literal["", "step", "vote"]
"""The call in which workers vote: none, ``step()`` or ``vote()``."""

_OF_THE_MACHINE = ("foreach", "fused", "capturable", "differentiable")
"""Keys of torch's optimizers that depend on this machine."""


class CrewVotes(LocalVotes):
    """Vote again after a change of members, with the deltas that this worker still has.

    Args:
        make: Function that makes the crew's optimizer of the common point, given these votes.
        inner: The optimizer that takes the local steps.
        *args: As for ``LocalVotes``.
        **options: Likewise.

    Attributes:
        at: The call in which this worker votes, or in which the others vote that it is to join.
    """

    def __init__(
        self,
        make: Callable[..., DistributedLion],
        inner: Optimizer,
        *args: Any,
        **options: Any,
    ) -> None:
        encode_state(describe_groups(inner.param_groups, but=_OF_THE_MACHINE))
        self.at: At = ""
        self._is_first = False  # the next call of step() is the one that the others are in
        self._donor_groups: list[dict[str, Any]] = []
        super().__init__(inner, *args, make=partial(make, local=self), **options)

    @property
    def n_calls(self) -> int:
        """Number of this worker's local steps."""
        return self.period.calls

    def list_buffers(self) -> list[Tensor]:
        """List the outer momentum, which a lagging worker takes from the first one."""
        return self.stage.momentum.buffers

    def describe(self) -> dict[str, Any]:
        """Describe this worker's groups and its place, for lagging workers."""
        place = {"calls": self.period.calls, "since": self.period.since, "at": self.at}
        return {
            "inner": describe_groups(self._inner.param_groups, but=_OF_THE_MACHINE),
            "local": place,
        }

    def check_given(self, given: Mapping[str, Any]) -> None:
        """Refuse groups that do not fit."""
        check_groups(self._inner.param_groups, given["inner"])

    def take(self, epoch: Epoch, given: Mapping[str, Any]) -> None:
        """Take the most advanced worker's groups and place, if this one has fallen behind."""
        if epoch.is_behind:
            self._donor_groups = given["inner"]
            self.take_donor_groups()
            self._take_place(given["local"])
        if epoch.takes_parameters:
            self._begin_anew()

    def take_donor_groups(self) -> None:
        """Restore the hyperparameters that this worker was given when it joined."""
        take_groups(self._inner.param_groups, self._donor_groups)

    def catch_up(self) -> None:
        """Join the others' current call, if this worker came in the middle of one."""
        while self.at:
            self.join()

    def _take_place(self, given: Mapping[str, Any]) -> None:
        """Take the most advanced worker's place; this worker's deltas are dropped."""
        calls: int = given["calls"]
        # The others are in step(): this worker's next call must join it, unless it is in one.
        is_first = given["at"] == "step" and self.at != "step"
        self.period.set_progress(calls - is_first, given["since"])
        self._abstains, self._is_first = True, is_first
        self.at = given["at"]

    def join(self) -> None:
        """Take part in the vote that has let this worker in, without deltas."""
        if self._is_first:
            self.period.calls += 1
        self._is_first = False
        if self.at == "step":
            self.vote_when_due()
        elif self.at:
            self._vote_at(self.at)

    def vote_when_due(self) -> None:
        if self._vote_at("step") == "vote":
            self.count_step()  # the others have still to take the step that this call is

    def vote_on_demand(self) -> None:
        self.join()
        if self.at:  # the next call of step() is the one that the others are in
            return
        if self.period.since:
            self._vote_at("vote")
            return
        self.period.check_begin()
        problem = self.period.find_problem(self._inner.param_groups)
        if problem is not None:
            raise problem
        self._begin_anew()

    def _vote_at(self, at: At) -> At:
        """Vote until the vote succeeds, whatever members are lost or join meanwhile.

        Returns:
            The call that the others were in at the end, which differs if this worker fell behind.
        """
        self.at = at
        try:
            while self.at and not self._is_first:  # else this call has nothing left to vote on
                if self._cast_vote() and (self.at == "step" or not self.period.since):
                    break
            return self.at
        finally:
            if not self._is_first:
                self.at, self._abstains = "", False
