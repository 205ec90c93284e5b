"""One worker among its peers: what they settle outside of a vote, and what a vote needs of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo

from distlion.errors import (
    CheckpointError,
    InvalidArgumentError,
    UnsupportedTypeError,
)
from distlion.exchange import ChunkKind, Header, Status, Verdict, share_verdict, worst_of
from distlion.kernels import Coins
from distlion.transport import ByteCount
from distlion.voting.custody import agree_alone
from distlion.voting.description import (
    Description,
    FixedGroups,
    describe_params,
    digest_settings,
)
from distlion.voting.follow_up import FollowUp
from distlion.voting.grad_scaler import note_overflow
from distlion.voting.gradients import GradientWatch
from distlion.voting.grid import Grid
from distlion.voting.group import VotingGroup
from distlion.voting.handshake import (
    explain_verdict,
    refuse_step,
    shake_hands,
    share_problem,
)
from distlion.voting.lifecycle import Lifecycle
from distlion.voting.momentum_stage import describe_selection
from distlion.voting.network import VotingNetwork
from distlion.voting.nodes import NodePieces
from distlion.voting.outcome import log_skip, raise_verdict
from distlion.voting.overlap import Overlap
from distlion.voting.param import VotingParam
from distlion.voting.replicas import Replicas
from distlion.voting.settings import Settings
from distlion.voting.shard_pieces import ShardPieces
from distlion.voting.sharding import Sharding
from distlion.voting.traffic import TrafficMeter
from distlion.voting.vote import StepInputs, abstain_from_all


class Peers:
    """The workers of an optimizer, as one of them sees them.

    Args:
        process_group: The workers; None for the default group, or for one worker alone.
        settings: The optimizer's.
        sharding: How parameters are cut over the ranks of each worker; None for whole ones.

    Attributes:
        group: All ranks of the workers.
        settings: The optimizer's.
        node_size: Ranks of a node; 1 without nodes.
        pieces: What is kept here of each parameter's momentum.
        network: Links and routes.
        replicas: The parameters that are equal on all workers.
        params: The trainable parameters.
        description: What must be equal on all workers.
        overlap: The votes that leave during backward; None without overlap.
        follow_up: What follows a vote; None where nothing does.
        lifecycle: Whether they can go on.
        meter: What this rank has handed to the network.
        is_alone: Whether there is nobody to vote with.
        n_elements: Trainable elements.
        gradients: What warns of gradients that say nothing.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        settings: Settings,
        sharding: Sharding | None = None,
    ) -> None:
        self.group = VotingGroup(process_group if sharding is None else sharding.everybody)
        self.is_alone = self.group.world_size == 1
        self.lifecycle = Lifecycle(self.group)
        self.overlap: Overlap | None = None
        self.node_size = settings.node_size(self.group.world_size)
        self.sharding = sharding
        rank, world_size = self.group.rank, self.group.world_size
        grid = Grid.of_nodes(rank, world_size, self.node_size)
        self.pieces: NodePieces | ShardPieces = NodePieces(self.node_size, rank % self.node_size)
        if sharding is not None:
            if self.node_size > 1:
                raise UnsupportedTypeError(
                    "nodes= averages gradients inside a node, which FSDP has done for DTensors; "
                    "leave nodes out"
                )
            grid, self.pieces = sharding.grid, ShardPieces(sharding)
        is_sharded, name = sharding is not None, str(self.lifecycle.number)
        self.network = VotingNetwork(self.group, settings, grid, name=name, is_sharded=is_sharded)
        self.replicas = Replicas(self.network, settings, is_sharded=is_sharded)
        self.follow_up: FollowUp | None = None
        self.meter = TrafficMeter()
        self.gradients = GradientWatch()
        self.settings = settings
        self.n_elements = 0

    def describe(
        self,
        groups: Sequence[Mapping[str, Any]],
        params: Sequence[VotingParam],
        names: Mapping[Tensor, str],
        exp_avg_dtype: torch.dtype | None,
        fixed: FixedGroups,
    ) -> Description:
        """Describe an optimizer.

        Args:
            groups: Its param groups.
            params: Its trainable parameters.
            names: Of all its parameters.
            exp_avg_dtype: Of its momentum, as asked for.
            fixed: What its param groups held when parameters were laid out.
        """
        lines = [
            f"distlion version: {version('distlion')}",
            f"optimizer: number {self.lifecycle.number} of its process group",
            f"world size: {self.group.world_size}",
            f"node size: {self.node_size}",
            f"workers that vote: {self.network.roster.n_voters}",
            *self.settings.describe(),
            f"exp_avg_dtype: {exp_avg_dtype}",
            *describe_params(groups, names),
        ]
        if (sync := self.settings.momentum_sync) is not None:
            lines.append(sync.describe_choice(params))
        return Description(lines, names, fixed, params)

    def join(
        self,
        lines: Sequence[str],
        params: Sequence[VotingParam],
        everything: Sequence[Tensor],
        *,
        step: int,
    ) -> None:
        """Become one of the workers: 1 compare settings, 2 connect, 3 take over parameters.

        Args:
            lines: What must be equal on all workers.
            params: The trainable parameters.
            everything: All parameters.
            step: The step that errors name.

        Raises:
            InvalidArgumentError: There is nothing to vote on; on every rank.
            ConfigMismatchError: Settings differ, or the order of parameters; on every rank.
            ProcessGroupError: Connections did not come about.
        """
        # 1 compare settings; a worker without anything to vote on does too, or others would wait
        if not self.is_alone:
            self.network.approach()
            shake_hands(self.network.link(self.settings.init_timeout_s), lines, step=step)
        if not any(param.whole_slot.n_elements for param in params):
            raise InvalidArgumentError(
                "no parameter requires a gradient, so there is nothing to vote on"
            )
        if self.is_alone:
            return

        # 2 connect
        self.group.watch.turns.admit(self)
        self.network.connect()

        # 3 take over parameters
        self.replicas.take_over(params, everything, step=step)

    def lay_out(
        self,
        groups: Sequence[dict[str, Any]],
        params: list[VotingParam],
        description: Description,
        *,
        step: int,
        begin: Callable[[], StepInputs],
    ) -> None:
        """Put parameters into buckets and choose what carries each; every worker must call it.

        Args:
            groups: The param groups.
            params: The trainable parameters.
            description: What must be equal on all workers.
            step: The step that errors name.
            begin: Returns what the buckets of a step share, for votes that leave during
                backward.
        """
        self.params, self.description = params, description
        self.lifecycle.is_ready = True
        self.n_elements = sum(param.slot.n_elements for param in params)
        self.follow_up = FollowUp.build(
            self.settings, self.network, groups, params, earlier=self.follow_up
        )
        if self.is_alone:
            return
        self.network.begin_trial()
        self.network.lay_out(params, step=step)
        self.meter.links = self.network.between, self.network.inside
        if self.settings.overlap:
            self.overlap = self.overlap or Overlap(begin=begin, lifecycle=self.lifecycle)
            self.overlap.take(self.network.routes, waits=not self.network.trial.overlaps)

    def try_overlap(self, *, step: int) -> None:
        """Note that a step is over, after which "auto" may change; every worker must call it."""
        if self.network.try_overlap(self.params, step=step) and self.overlap is not None:
            self.overlap.take(self.network.routes, waits=not self.network.trial.overlaps)

    def check_idle(self, call: str, added: Mapping[str, Tensor] | None = None) -> None:
        """Check that a call may meet the peers between two steps, perhaps to add parameters.

        Raises:
            ProcessGroupError: This optimizer is dead, or its group is gone.
            InvalidArgumentError: Votes of a step are under way.
        """
        self.lifecycle.check_usable()
        if self.sharding is not None and added is not None:
            self.sharding.check(added)
        if self.overlap is not None and self.overlap.has_begun:
            raise InvalidArgumentError(
                f"{call} between backward and step(): with overlap votes of this step have "
                "left; call step() before, or zero_grad() on all workers"
            )

    def check_scaler(self, groups: Sequence[Mapping[str, Any]], grad_scale: object) -> None:
        """Refuse a GradScaler with overlap: votes leave before it gives the scale of gradients.

        Raises:
            InvalidArgumentError: It has given one; the step was given up.
            ProcessGroupError: This optimizer is dead, or its group is gone.
        """
        self.lifecycle.check_usable()
        if grad_scale is not None:
            self.give_up("step() of a GradScaler", groups)
            raise InvalidArgumentError(
                f"overlap={self.settings.overlap!r} cannot be used with a GradScaler; use "
                "overlap=False, or bfloat16, which needs no scaler"
            )

    @_disable_dynamo  # zero_grad() may stand in a compiled train step
    def give_up(self, call: str, groups: Sequence[Mapping[str, Any]]) -> None:
        """Complete the exchanges of a step that has begun, without committing it."""
        if self.overlap is None or not self.overlap.has_begun:
            return
        if self.lifecycle.is_dead:
            self.overlap.forget()
            return
        with self.lifecycle.exchange(call):
            inputs, verdict = self.overlap.cancel()
            verdict = self.settle(verdict, inputs.header)
            self.meter.count_step(self.n_elements)
            if not (verdict.status is Status.CANCELLED and verdict.cancelled_by_all):
                self.abandon(verdict, groups, inputs)

    def meet(
        self, call: str, lines: Sequence[str], *, step: int, next_step: int | None = None
    ) -> None:
        """Meet all workers before collectives out of turn: a step in which nobody votes.

        The same call on one rank while another is at ``step()`` would pair collectives of different
        sizes, which can abort a process inside Gloo. Here a peer that is at another call, or at
        another step, sees other settings, and all ranks raise, with nothing changed.

        Args:
            call: What this worker is at.
            lines: What must be equal on all workers.
            step: The step that errors name.
            next_step: The step that must be equal; None for the same.
        """
        if self.is_alone:
            return
        lines = [f"call: {call}", *lines]
        agreed = step if next_step is None else next_step
        header = Header(
            ChunkKind.VOTE,
            agreed,
            0,
            0,
            digest_settings(lines),
            epoch=self.network.roster.epoch,
        )
        coins = Coins(self.settings.seed, agreed, self.network.voter)
        votes = abstain_from_all(
            self.network.routes,
            header,
            coins,
            nonfinite=self.settings.nonfinite,
            clipper=self.network.clipper,
        )
        verdict = self.settle(worst_of([vote.reply.verdict for vote in votes]), header)
        self.meter.discard()
        if verdict.status is not Status.OK:
            self._raise(verdict, lines, step=step)

    def settle(self, verdict: Verdict, header: Header) -> Verdict:
        """Let all ranks that hold shards of this worker's parameters find together.

        A step is one transaction over all shards: what was found on one of them keeps all from
        their commit.

        Args:
            verdict: What was found on this rank's shards.
            header: Of the step, without an error.
        """
        inside = self.network.inside
        if self.sharding is None or inside is None:
            return verdict
        return share_verdict(inside, verdict, header, n_voters=self.network.roster.n_voters)

    def meet_to_load(
        self, groups: Sequence[Mapping[str, Any]], cuts: Sequence[str], *, step: int
    ) -> None:
        """Meet all workers, who must load these param groups, and momenta that are cut alike."""
        lines = [*self.description.list_lines(groups), *cuts]
        if self.node_size == 1:  # the ranks of a node select for themselves
            lines += describe_selection(groups)
        self.meet("load_state_dict()", lines, step=step, next_step=int(groups[0]["step"]))

    def agree(self, call: str, problem: CheckpointError | None, *, step: int) -> None:
        """Meet all workers, and hear whether any of them cannot do what all are about to do.

        Args:
            call: What this worker is at.
            problem: What keeps it from going on; None for nothing.
            step: The step that errors name.

        Raises:
            CheckpointError: Some worker has a problem; the same on every rank, which may go on.
            ConfigMismatchError: Another worker is at another call; on every rank.
        """
        if self.is_alone:
            agree_alone(call, problem)
            return
        self.meet(call, [], step=step)
        link = self.network.link(self.settings.step_timeout_s)
        share_problem(link, problem, call=call, step=step)

    def abandon(
        self, verdict: Verdict, groups: Sequence[Mapping[str, Any]], inputs: StepInputs
    ) -> Literal[False]:
        """Raise what the verdict says, or return where the policy is to skip the step.

        Args:
            verdict: What all workers found.
            groups: Param groups.
            inputs: Of the step.
        """
        if verdict.status is Status.NON_FINITE:
            note_overflow()
        if verdict.status is Status.NON_FINITE and self.settings.nonfinite == "skip":
            # The step number stays as it is, so that coins stay paired.
            log_skip(self.params, verdict, rank=self.group.rank, step=inputs.header.step)
            return False
        step, problem = inputs.header.step, "".join(inputs.problems[:1])
        if verdict.status is Status.INPUT and self.is_alone:
            raise refuse_step((0,), problem, step=step)
        return self._raise(verdict, self.description.list_lines(groups), problem, step=step)

    def _raise(
        self, verdict: Verdict, lines: Sequence[str], problem: str = "", *, step: int
    ) -> NoReturn:
        if not self.is_alone:
            link = self.network.link(self.settings.step_timeout_s)
            explain_verdict(link, verdict, lines, problem, step=step)
        raise_verdict(self.params, verdict, rank=self.group.rank, step=step)

    def compare_replicas(self, *, step: int) -> None:
        """Compare the parameters of all workers, who are at the same step; perhaps repair them.

        Raises:
            ReplicaMismatchError: They differ; on every rank.
        """
        self.meter.count_check(self.replicas.compare(self.params, step=step))

    def plan(self, step: int) -> ByteCount:
        """Declare what this rank will hand to the network in a step; with nodes, to other nodes."""
        if self.is_alone:
            return ByteCount()
        following = ByteCount() if self.follow_up is None else self.follow_up.plan(step)
        return self.network.plan() + following
