"""The session of an optimizer: the parts that all its ranks use alike."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from importlib import metadata
from itertools import chain
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor
from torch._compile import _disable_dynamo

from distlion.errors import (
    CorruptFrameError,
    InvalidArgumentError,
    PeerLostError,
    StepTimeoutError,
    UnsupportedTypeError,
)
from distlion.failures import Status
from distlion.peers.connections import Connections
from distlion.peers.fingerprint import Fingerprint, FixedGroups, describe_params
from distlion.peers.meetings import Meetings, compare
from distlion.peers.replicas import ReplicatedParams
from distlion.peers.routing import Routing
from distlion.peers.weights import agree_on_weights, describe_weights
from distlion.step.alone import step_alone
from distlion.step.bucket import Bucket
from distlion.step.clipping import build_clipping
from distlion.step.diagnostics import Diagnosis, Examination, build_examination
from distlion.step.gradients import WATCHED_STEPS, GradientWatch, UseWatch
from distlion.step.inputs import StepInputs
from distlion.step.lifecycle import Lifecycle
from distlion.step.momentum import build_averaging
from distlion.step.nodes import NodePieces
from distlion.step.outcome import log_skip, note_overflow
from distlion.step.overlap import Overlap
from distlion.step.param import Records, VotingParam
from distlion.step.ranks import Ranks
from distlion.step.settings import Settings
from distlion.step.shard_pieces import ShardPieces
from distlion.step.sharding import Sharding, find_sharding
from distlion.step.stage import Stage, Surroundings
from distlion.step.traffic import TrafficMeter
from distlion.wire.frame import PROTOCOL_VERSION
from distlion.wire.transport import ByteCount
from distlion.wire.verdict import Verdict

# Reading a package's metadata takes 5 ms.
version = cache(metadata.version)


class Session:
    """The parts of an optimizer that all its ranks must use alike.

    Args:
        ranks: All ranks of the optimizer.
        settings: The optimizer's settings.
        sharding: The sharding over the ranks of each worker; None for whole parameters.
        earlier: The session that this one continues; None for the first.

    Attributes:
        ranks, settings, sharding: The arguments.
        lifecycle: The lifecycle, which decides whether calls may begin.
        connections: The optimizer's process groups.
        routing: The buckets.
        meetings: Calls that all ranks make together.
        replicas: The parameters that are equal on all workers.
        meter: The meter of this rank's traffic.
        gradients: The watch for gradients that carry no information.
        use: The watch for parameters without gradients.
        overlap: The votes that are sent during backward; None without overlap.
        params: The trainable parameters; empty before ``lay_out``, like the next two.
        fingerprint: The settings that must be equal on all ranks.
        stages: The stages of each step.
        n_elements: Number of trainable elements.
        has_ended_epoch: Whether its last committed step is the last one of a crew's epoch.
        grad_norm: The norm that clipping found in the last committed step; None for none.
    """

    def __init__(
        self,
        ranks: Ranks,
        settings: Settings,
        sharding: Sharding | None,
        *,
        earlier: Session | None = None,
    ) -> None:
        self.ranks, self.settings, self.sharding = ranks, settings, sharding
        self.lifecycle = Lifecycle(ranks)
        self.meter: TrafficMeter = TrafficMeter() if earlier is None else earlier.meter
        name = str(self.lifecycle.number)
        self.connections = Connections(ranks, settings, name=name)
        model = None if earlier is None else earlier.routing.model
        self.routing: Routing = Routing(ranks, settings, self.connections, self.meter, model)
        self.meetings = Meetings(ranks, settings, self.connections, self.routing)
        self.replicas = ReplicatedParams(ranks, settings, self.connections, self.routing)
        self.gradients = GradientWatch()
        self.use: UseWatch = UseWatch("on any worker") if earlier is None else earlier.use
        self.overlap: Overlap | None = None
        self.params = Records()
        self.fingerprint = Fingerprint.of_nothing()
        self.stages: list[Stage] = []
        self.n_elements, self.has_ended_epoch = 0, False
        self.grad_norm: float | None = None

    def await_all(self, call: str, *, step: int) -> None:
        """Wait for all ranks to come to a call, as in a step; a loss ends this session.

        Args:
            call: The call, for errors.
            step: The step that errors name.

        Raises:
            ConfigMismatchError, StepMismatchError: Another rank is at another call or step.
        """
        losses = PeerLostError, StepTimeoutError, CorruptFrameError
        with suppress(*losses), self.lifecycle.collective(call):
            self.meetings.meet(call, [], step=step)

    def join(
        self,
        lines: Sequence[str],
        params: Sequence[VotingParam],
        everything: Mapping[Tensor, str],
        *,
        step: int,
        alike: Sequence[int] = (),
    ) -> None:
        """Become one of the workers: 1 compare settings, 2 connect, 3 take over parameters.

        After 1, all ranks know all workers' weights.

        Args:
            lines: Lines that must be equal on all ranks.
            params: The trainable parameters.
            everything: All parameters, with their names.
            step: The step that errors name.
            alike: Workers whose parameters must be equal already, where some have trained before.

        Raises:
            InvalidArgumentError: There is nothing to vote on, or a weight cannot be used; on every
                rank.
            ConfigMismatchError: Settings differ, or the order of parameters; on every rank.
            ProcessGroupError: Connections failed.
            ReplicaMismatchError: Parameters that must be equal differ.
        """
        # 1 compare settings; a worker without anything to vote on does too, or others would wait
        if not self.ranks.is_alone:
            self.connections.approach()
            link = self.connections.link_all(self.settings.timeouts.start_s)
            compare(link, lines, step=step)
            self.ranks = agree_on_weights(link, self.ranks, self.settings, step=step)
            # A worker may have said its weight and then been interrupted while it waited.
            link.check_present(step=step)
            self.routing.take_ranks(self.ranks)
        elif problem := self.settings.find_weight_problem():
            raise InvalidArgumentError(problem)
        if not any(param.whole_slot.n_elements for param in params):
            reason = "every parameter that requires a gradient has no elements"
            if not params:
                reason = "no parameter requires a gradient"
            raise InvalidArgumentError(f"{reason}, so there is nothing to vote on")
        if self.ranks.is_alone:
            return

        # 2 connect
        assert self.ranks.watch is not None  # there is a group
        self.ranks.watch.turns.admit(self)
        self.connections.connect()

        # 3 take over parameters
        if step >= WATCHED_STEPS:  # the others would wait for a newcomer's look at its gradients
            self.gradients.steps_left = 0
        if alike:
            self.replicas.catch_up(everything, alike, step=step)
        else:
            self.replicas.take_over(params, list(everything), step=step)

    def take_fingerprint(
        self,
        groups: Sequence[Mapping[str, Any]],
        params: Sequence[VotingParam],
        names: Mapping[Tensor, str],
        fixed: FixedGroups,
        more: Sequence[str] = (),
    ) -> Fingerprint:
        """Take the settings fingerprint of the optimizer.

        Args:
            groups: Its param groups.
            params: Its trainable parameters.
            names: Names of all its parameters.
            fixed: The contents of its param groups when parameters were laid out.
            more: Lines that only this kind of optimizer has.
        """
        lines = [
            f"distlion version: {version('distlion')}",
            f"protocol version: {PROTOCOL_VERSION}",
            f"wire: {self.connections.wire}",
            f"optimizer: number {self.lifecycle.number} of its process group",
            f"world size: {self.ranks.n_ranks}",
            f"node size: {self.ranks.node_size}",
            f"workers that vote: {self.ranks.roster.n_voters}",
            *describe_weights(self.ranks.roster),
            *self.settings.describe(),
            *more,
            *describe_params(groups, names),
        ]
        if (sync := self.settings.momentum_sync) is not None:
            lines.append(sync.describe_choice(params))
        return Fingerprint(lines, names, fixed, params)

    def lay_out(
        self,
        groups: Sequence[dict[str, Any]],
        params: Sequence[VotingParam],
        fingerprint: Fingerprint,
        *,
        step: int,
        begin: Callable[[], StepInputs],
        own: Sequence[Stage] = (),
    ) -> None:
        """Put parameters into buckets and choose a pattern for each; every rank must call it.

        Args:
            groups: The param groups.
            params: The trainable parameters.
            fingerprint: The settings that must be equal on all ranks.
            step: The step that errors name.
            begin: Function that returns the shared inputs of a step's buckets, for votes that are
                sent during backward.
            own: Stages that no setting asks for.

        Raises:
            InvalidArgumentError, UnsupportedTypeError: A setting does not suit the others.
        """
        self.params, self.fingerprint = Records(params), fingerprint
        self.lifecycle.is_ready = True
        self.n_elements = sum(param.slot.n_elements for param in params)
        if not self.ranks.is_alone:
            self.routing.begin_trial()
            self.routing.lay_out(params, step=step)
        links = self.routing.between, self.routing.inside
        among, settings = Surroundings(self.ranks, groups, params, *links, step), self.settings
        built: list[Stage | None] = [
            build_clipping(settings.clip_norm, among),
            build_examination(settings, among, self.stages),
            build_averaging(settings.momentum_sync, settings.exchange, among),
        ]
        self.stages = [*(stage for stage in built if stage is not None), *own]
        for stage in own:
            stage.lay_out(params)
        if self.ranks.is_alone:
            return
        if self.settings.overlap:
            for stage in self.stages:
                if stage.needs_all:
                    raise InvalidArgumentError(
                        f"{type(stage).__name__} changes gradients before the first vote, and "
                        "overlap=True sends votes while gradients arrive. Expected one of them"
                    )
            self.overlap = self.overlap or Overlap(begin=begin, lifecycle=self.lifecycle)
            self.overlap.take(self.routing.buckets, waits=not self.routing.trial.overlaps)

    def try_overlap(self, *, step: int) -> None:
        """Note that a step is over, after which "auto" may switch; every rank must call it."""
        if self.routing.try_overlap(self.params, step=step) and self.overlap is not None:
            self.overlap.take(self.routing.buckets, waits=not self.routing.trial.overlaps)

    def check_idle(self, call: str, added: Mapping[str, Tensor] | None = None) -> None:
        """Check that a call may meet the other ranks between two steps, perhaps to add parameters.

        Raises:
            ProcessGroupError: This optimizer is dead, or its group is gone.
            PeerLostError: This member of a crew waits for the next epoch.
            InvalidArgumentError: Votes of a step are under way.
        """
        self.lifecycle.check_usable(call)
        if self.sharding is not None and added is not None:
            self.sharding.check(added)
        if self.overlap is not None and self.overlap.has_begun:
            raise InvalidArgumentError(
                f"{call} between backward and step(): with overlap votes of this step have "
                "left; call step() before, or zero_grad() on all workers"
            )

    def meet_to_load(
        self, groups: Sequence[Mapping[str, Any]], cuts: Sequence[str], *, step: int
    ) -> None:
        """Meet all ranks, which must load these param groups, and momenta with the same cuts."""
        lines = [*self.fingerprint.list_lines(groups), *cuts]
        if self.ranks.node_size == 1:  # each rank of a node has its own agreements
            lines += [line for stage in self.stages for line in stage.describe_kept(groups)]
        next_step = int(groups[0]["step"])
        self.meetings.meet("load_state_dict()", lines, step=step, next_step=next_step)

    def compare_replicas(self, *, step: int) -> None:
        """Compare the parameters of all workers at the same step, and repair them if allowed.

        Raises:
            ReplicaMismatchError: They differ; on every rank.
        """
        self.meter.count_check(self.replicas.compare(self.params, step=step))

    @property
    def diagnoses(self) -> list[Diagnosis]:
        """The measurements of the workers' agreement, oldest first."""
        found = (stage for stage in self.stages if isinstance(stage, Examination))
        return [each for stage in found for each in stage.examiner.found]

    def note_norm(self, norm: float) -> None:
        """Note the norm by which the gradients of a step were clipped."""
        self.grad_norm = norm

    def step_alone(self, groups: Sequence[Mapping[str, Any]], inputs: StepInputs) -> bool:
        """Do a step of ``Lion``, under the same policy for values that are not finite.

        Returns:
            Whether it was committed, which is False if the policy skips it.
        """
        moved = (stage.move_alone(self.params, inputs) for stage in self.stages)
        verdict = next((each for each in moved if each is not None), None)
        if verdict is None:
            verdict = step_alone(self.params, inputs, self.settings.clip_norm)
        self.meter.count_step(self.n_elements)
        return verdict.status is Status.OK or self.abandon(verdict, groups, inputs)

    def check_scaler(self, groups: Sequence[Mapping[str, Any]], grad_scale: object) -> None:
        """Refuse a GradScaler with overlap: votes leave before it gives the scale of gradients.

        Raises:
            InvalidArgumentError: It has given a scale; the step was given up.
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
        with self.lifecycle.collective(call, votes=True):
            inputs, verdict = self.overlap.cancel()
            verdict = self.meetings.share_verdict(verdict, inputs.header)
            self.meter.count_step(self.n_elements)
            if not (verdict.status is Status.CANCELLED and verdict.cancelled_by_all):
                self.abandon(verdict, groups, inputs)

    def abandon(
        self, verdict: Verdict, groups: Sequence[Mapping[str, Any]], inputs: StepInputs
    ) -> Literal[False]:
        """Raise the verdict's error, or return False if the policy is to skip the step.

        Args:
            verdict: The verdict of all workers.
            groups: Param groups.
            inputs: The step's inputs.
        """
        step = inputs.header.step
        if verdict.status in (Status.NON_FINITE, Status.OVERFLOW):
            note_overflow()
        # A GradScaler begins with a scale that overflows, so its steps are skipped under "raise".
        if verdict.status is Status.OVERFLOW or (
            verdict.status is Status.NON_FINITE and self.settings.nonfinite == "skip"
        ):
            # The step number does not change, so that coins stay paired.
            log_skip(self.params, verdict, rank=self.ranks.rank, step=step)
            return False
        lines, problem = self.fingerprint.list_lines(groups), "".join(inputs.problems[:1])
        return self.meetings.fail(verdict, lines, self.params, problem, step=step)

    def observe(self, buckets: Sequence[Bucket], *, wants_digest: bool) -> None:
        """Warn of what a committed step shows: gradients that say nothing, workers that disagree.

        Args:
            buckets: The buckets of the step.
            wants_digest: Whether gradients were digested in this step.
        """
        replies, warn = [bucket.reply for bucket in buckets], self.lifecycle.afterwards.append
        if wants_digest or not any(reply.present.any() for reply in replies):
            warn(partial(self.gradients.observe, replies, self.params))
        if not self.use.is_over:
            voted = [bucket.list_voted() for bucket in buckets]
            warn(partial(self._watch_use, set(chain.from_iterable(voted))))
        for stage in self.stages:
            warn(stage.warn)

    def observe_alone(self) -> None:
        """Warn of what a committed step of a worker without others shows."""
        self.gradients.observe([], self.params)
        if not self.use.is_over:
            self._watch_use({each.position for each in self.params if each.param.grad is not None})

    def _watch_use(self, voted: Collection[int]) -> None:
        named = [(each.name, each.param) for each in self.params if each.slot.n_elements]
        used = [each.param for each in self.params if each.position in voted]
        self.use.observe(used, named)

    def plan(self, step: int) -> ByteCount:
        """Declare the bytes that this rank sends in a step; with nodes, to other nodes."""
        if self.ranks.is_alone:
            return ByteCount()
        return sum((stage.plan(step) for stage in self.stages), self.routing.plan())


def open_session(
    params: Mapping[str, Tensor], process_group: dist.ProcessGroup | None, settings: Settings
) -> tuple[Session, NodePieces | ShardPieces]:
    """Find all ranks of an optimizer, and this rank's part of each momentum.

    Args:
        params: The optimizer's parameters by name.
        process_group: The workers that vote; None for the default group.
        settings: The optimizer's settings.

    Raises:
        ProcessGroupError, InvalidArgumentError, UnsupportedTypeError: The voters are not clear.
    """
    sharding = find_sharding(params, process_group, timeout_s=settings.timeouts.start_s)
    if sharding is not None:
        sharding.ranks.start_watch()
        if settings.node_size(sharding.ranks.n_ranks) > 1:
            raise UnsupportedTypeError(
                "nodes= averages gradients inside a node, which FSDP has done for DTensors; "
                "leave nodes out"
            )
        return Session(sharding.ranks, settings, sharding), ShardPieces(sharding)
    ranks = Ranks.of(process_group)
    ranks.start_watch()
    size = settings.node_size(ranks.n_ranks)
    return Session(ranks.in_nodes(size), settings, None), NodePieces(size, ranks.rank % size)
