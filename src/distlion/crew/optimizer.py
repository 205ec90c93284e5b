"""The optimizer of a crew: a ``DistributedLion`` that is rebuilt in place."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DistError
from torch.optim.optimizer import Optimizer, ParamsT

from distlion import faults
from distlion.checkpoint.identity import hand_on_identities, take_identities
from distlion.crew import carried
from distlion.crew.carried import check_group, describe_groups, take_groups
from distlion.crew.catch_up import Newcomer, find_refusal
from distlion.crew.changes import CrewTraffic
from distlion.crew.donor import Donor
from distlion.crew.epoch import QUICK_S, Epoch, FormingError, MissingError, call_roll
from distlion.crew.lane_shards import LaneSharding, open_lanes
from distlion.crew.lanes import Lanes
from distlion.crew.local_votes import CrewVotes
from distlion.crew.membership import Membership
from distlion.crew.options import (
    check_options,
    check_whole,
    limit_forming,
    list_buffers,
    list_lines,
)
from distlion.crew.replies import Replica
from distlion.errors import (
    CorruptFrameError,
    CrewError,
    EpochOverError,
    PeerLostError,
    ProcessGroupError,
    ReplicaMismatchError,
    StepError,
    StepTimeoutError,
)
from distlion.failures import Status
from distlion.optim.arguments import name_tensors
from distlion.optim.distributed_lion import DistributedLion
from distlion.optim.saved_groups import WORKER_KEY
from distlion.peers.ownership import MomentumOwnership, name_worker
from distlion.peers.replicas import broadcast_tensor
from distlion.peers.session import Session
from distlion.signals import deferred_signals
from distlion.step.agreement import AGREEMENT_KEY
from distlion.step.inputs import StepInputs
from distlion.step.newcomers import begin_momentum
from distlion.step.nodes import NodePieces
from distlion.step.param import local_tensor
from distlion.step.timeouts import Timeouts
from distlion.wire.verdict import with_error
from distlion.wire.watch import PeerWatch

logger = logging.getLogger("distlion")

_LOST = (PeerLostError, StepTimeoutError)


class CrewLion(DistributedLion):
    """A ``DistributedLion`` whose workers may change between two steps.

    Args:
        membership: This worker's membership in the crew.
        params: As for ``DistributedLion``.
        *args: As for ``DistributedLion``.
        buffers: Tensors that a newcomer takes from the most advanced worker.
        local: The local steps between votes; None where every step is a vote.
        timeouts: As for ``DistributedLion``.
        **options: As for ``DistributedLion``.

    Raises:
        InvalidArgumentError: A crew cannot have this option.
        UnsupportedTypeError: A buffer is no tensor, or this process has DTensors for itself.
        CrewError: A param group has a value that a newcomer cannot be given.
    """

    _sharding: LaneSharding | None = None

    def __init__(
        self,
        membership: Membership,
        params: ParamsT,
        *args: Any,
        buffers: Iterable[Tensor] = (),
        local: CrewVotes | None = None,
        timeouts: Timeouts = Timeouts(),
        **options: Any,
    ) -> None:
        lanes = membership.lanes
        check_options(options, lanes)
        timeouts = limit_forming(timeouts)
        self._membership, self._buffers, self._local = membership, list_buffers(buffers), local
        self._whole_epoch, self._donor_groups = 0, list[dict[str, Any]]()
        self._newcomer: Newcomer | None = None
        super().__init__(params, *args, timeouts=timeouts, **options)
        if self._sharding is None:
            check_whole(self._all_params())
        rules = [group["aggregation"] for group in self.param_groups]
        refusal = find_refusal(membership.newcomers, rules, lanes, is_local=local is not None)
        donors = [stage for stage in self._own_stages if isinstance(stage, Donor)]
        if lanes.leads:
            self._newcomer = Newcomer(membership.rendezvous, refusal, self)
        self._donor = donors[0] if donors else None
        if self._donor is not None:
            self._donor.bind(self, refusal)
            membership.lookout.donor = self._donor

    def list_all(self) -> list[Tensor]:
        """List all parameters, in the order of their groups."""
        return self._all_params()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as ``DistributedLion`` does; newcomers must begin with this group."""
        check_group(param_group)
        super().add_param_group(param_group)

    def make_replica(self) -> Replica:
        """Make the replica of the parameters that a newcomer writes while it catches up."""
        return Replica(self._all_params(), self._list_trainable())

    def _begin(self, params: list[Any], process_group: dist.ProcessGroup | None) -> dict[str, Any]:
        """Begin alone; ``form`` connects this worker with the others."""
        begun: dict[str, Any] = {"pieces": NodePieces(1, 0), "worker": None}
        lanes = self._membership.lanes
        if isinstance(lanes, Lanes):
            self._sharding, begun["pieces"] = open_lanes(lanes, name_tensors(params))
        self._session = Session(lanes.alone, self._settings, None)
        return begun

    @property
    def patience_s(self) -> float:
        """Seconds that other members may take to notice that the epoch has ended."""
        # During local steps, a worker that misses a vote counts as silent.
        return QUICK_S if self._local is None else self._settings.timeouts.step_s

    @property
    def has_lost_somebody(self) -> bool:
        """True if some member is gone, or failed, since the epoch was formed."""
        return self._watch is not None and self._watch.alarmed.is_set()

    def is_left_out(self) -> bool:
        """Return whether the others, after this worker's ``announce_end``, went on without it."""
        watch = self._watch
        return watch is not None and watch.is_left_out(self._session.ranks.inside)

    @property
    def _watch(self) -> PeerWatch | None:
        return self._session.ranks.watch

    @property
    def traffic(self) -> CrewTraffic:
        """Bytes and messages of this worker in all epochs, and the changes of members."""
        return replace(self._membership.changes.counted, **asdict(super().traffic))

    @property
    def momentum_ownership(self) -> MomentumOwnership:
        """The momenta that this process keeps, for checkpoints.

        Raises:
            CrewError: It is in no epoch, so that the other workers cannot be asked.
        """
        if self._session.ranks.is_alone:
            raise CrewError(
                "this worker has left its crew, and a checkpoint needs all members; save and load "
                "inside `with crew:`"
            )
        return super().momentum_ownership

    def step(self, closure: Callable[[], Any] | None = None) -> bool:  # type: ignore[override]
        """Do one step, or form the next epoch when members change.

        Args:
            closure: Re-evaluates the model; run once.

        Returns:
            True if the step is done: it was committed, or all workers have skipped it
            (``nonfinite="skip"``). False where members changed: take the batch of
            ``committed_step`` again.

        Raises:
            CrewError: Too few workers are left, or the store is gone.
            StepError: As ``DistributedLion``, for errors that do not concern members.
        """
        if self.admit():
            return False
        lifecycle = self._session.lifecycle
        if lifecycle.is_dead or not lifecycle.is_ready:
            self._form_after(lifecycle.death)
            return False
        self._membership.carried.check()
        before = self.committed_step
        try:
            self._run_step(closure)
        except EpochOverError:
            self.form((), patience_s=self.patience_s)
            return False
        except (*_LOST, CorruptFrameError) as error:
            if self.committed_step == before:
                self._form_after(error)
                return False
            # The step was committed, and a later part failed: the next call forms an epoch.
        return True

    def admit(self) -> bool:
        """Form the next epoch if the last step found a worker that waits (``Crew.admit``).

        Returns:
            True if it did: members changed, and ``committed_step`` may be another one.

        Raises:
            CrewError: Too few workers are left, or the store is gone.
            CheckpointError: An exception cut the commit of a step short here.
            StepError: Settings, steps or parameters of members differ.
        """
        session = self._session
        if not session.has_ended_epoch:
            return False
        self._fire_forming("admit")
        if not session.lifecycle.is_dead:
            session.await_all("leaving an epoch", step=self.committed_step)
        self._form_after(session.lifecycle.death)
        return True

    def _form_after(self, error: BaseException | None) -> None:
        """Form the next epoch after the error that ended this one; None if there was none."""
        lost: tuple[int, ...] = ()
        if error is not None:
            lost = self._find_lost(error, self._membership.epoch)
            self._membership.changes.note_loss(error, self._membership.epoch)
        self.form(lost, patience_s=self.patience_s)

    def _gather_inputs(self) -> StepInputs:
        """Tell in the vote's header that a worker waits, so that all leave the epoch at one step.

        They commit it, and leave in ``admit()``: by then schedulers and samplers have moved on.
        Some must give this vote up instead. With overlap the next votes would be under
        way, a newcomer shares local steps from the vote that lets it in, a GradScaler acts on what
        all workers saw in this vote, and a member that was left behind has no say any more.
        """
        inputs, membership = super()._gather_inputs(), self._membership
        if self._local is not None:
            membership.lookout.look_closely()
        if not membership.lookout.wants_change:
            return inputs
        scales = getattr(self, "grad_scale", None) is not None
        must_give_up = self._local is not None or self._settings.overlap or scales
        if must_give_up or membership.lookout.is_left_behind:
            header = with_error(inputs.header, Status.EPOCH_OVER, culprit=inputs.rank)
        else:
            header = inputs.header.amended(ends_epoch=True)
        return replace(inputs, header=header)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients; if votes are sent and a worker is lost, the next step forms an epoch.

        Args:
            set_to_none: As in ``torch.optim.Optimizer``.
        """
        try:
            super().zero_grad(set_to_none)
        except (EpochOverError, CorruptFrameError, *_LOST):
            Optimizer.zero_grad(self, set_to_none)

    def form(self, lost: Collection[int], *, patience_s: float = QUICK_S) -> None:
        """Form the next epoch; all members must call it. If it fails, parameters are as before.

        Args:
            lost: Places in the present epoch of members that all others found to be gone.
            patience_s: Seconds within which the others follow this worker.

        Raises:
            CrewError: Too few workers are left, the store is gone, or this worker has left.
            CheckpointError: An exception cut the commit of a step short here.
            ReplicaMismatchError: Workers at one step have different parameters.
        """
        self._session.lifecycle.check_whole()
        self._membership.check_here()
        try:
            self._form(lost, patience_s)
        except BaseException:
            self._membership.lookout.is_outside = True
            if self._newcomer is not None:
                self._newcomer.give_up()
            raise

    def _form(self, lost: Collection[int], patience_s: float) -> None:
        membership, began_s = self._membership, time.monotonic()
        while True:
            self._let_go()
            epoch, step = None, self.committed_step
            settings = self._digest_settings()
            calls = 0 if self._local is None else self._local.n_calls
            own = membership.describe(
                epoch=self._whole_epoch, step=step, calls=calls, settings=settings
            )
            newcomer = None
            try:
                membership.note_if_left_behind()
                if self._newcomer is not None and membership.has_to_catch_up:
                    newcomer = self._newcomer
                    own = replace(own, donor=newcomer.find_donor(own))
                self._fire_forming("arrive")
                ready = {} if newcomer is None else {"is_ready": newcomer.is_ready}
                epoch = membership.find_next(own, lost, patience_s=patience_s, **ready)
                self._fire_forming("roster")
                if newcomer is not None:
                    newcomer.arrive(epoch)
                self._enter(epoch)
            except (FormingError, ProcessGroupError, DistError, CorruptFrameError, *_LOST) as error:
                was_away = membership.endure(error)
                lost, patience_s = (), QUICK_S
                if epoch is not None and not was_away:
                    # If nobody is known to be gone, newcomers may be the reason for the failure.
                    lost = self._find_lost(error, epoch) or epoch.guests
                    logger.warning("worker %d: no epoch was formed, once more: %s", own.id, error)
                    membership.changes.note_loss(error, epoch)
                    membership.sit_out(epoch)
                continue
            except ReplicaMismatchError as error:
                lost, patience_s = self._set_back(error, epoch), QUICK_S
                continue
            except StepError as error:
                # A worker that joins has a fault that only the handshake finds.
                if epoch is None:
                    raise
                blamed = epoch.find_misfits(epoch.find_places(error.culprits))
                if not blamed or epoch.place in blamed:
                    raise
                logger.warning("worker %d: no epoch was formed, once more: %s", own.id, error)
                lost, patience_s = blamed, QUICK_S
                continue
            membership.enter(epoch, seconds=time.monotonic() - began_s, settings=self._settings)
            if newcomer is not None:
                newcomer.enter(own.id)
            return

    def catch_up(self) -> None:
        """Join the others' current call, if this worker came in the middle of one."""
        if self._local is not None:
            self._local.catch_up()

    def leave(self, why: str | None = None) -> None:
        """Close the connections of this worker.

        They stay open as long as something refers to them, such as the frames of an error that its
        handler keeps. So the others are also told.

        Args:
            why: The reason, for their error; None where no other worker is left.
        """
        self.announce_end(why)
        self._let_go()
        if self._donor is not None:
            self._donor.stop()
        if self._newcomer is not None:
            self._newcomer.give_up()

    def announce_end(self, why: str | None) -> None:
        """Tell the others that this worker joins no later call: they wait a second at most.

        Args:
            why: The reason, for their error; None tells nobody.
        """
        if why and self._watch is not None and not self._session.lifecycle.is_dead:
            self._watch.leave(self._watch.turns.now.number + 1, why)

    def _set_back(self, error: ReplicaMismatchError, epoch: Epoch | None) -> tuple[int, ...]:
        """Make this worker a newcomer if it differs from the majority and replicas are repaired.

        Newcomers that have caught up to other parameters begin anew; the others go on without them.

        Returns:
            Ranks of the members to go on without.

        Raises:
            ReplicaMismatchError: Replicas are not repaired, or no majority is known.
        """
        followers = () if epoch is None else epoch.find_misled(epoch.find_places(error.culprits))
        if epoch is not None and followers:
            logger.warning("%s; newcomers there catch up once more", error)
            if epoch.is_follower and self._newcomer is not None:
                self._newcomer.give_up()
            return followers
        if self._settings.replicas.on_mismatch != "repair" or not error.culprits:
            raise error
        logger.warning("%s; they take the parameters of the others", error)
        if self._session.ranks.rank in error.culprits:
            self._whole_epoch = 0
        return ()

    def _fire_forming(self, point: faults.FormingPoint | faults.JoinPoint) -> None:
        if faults.armed:
            step = self.committed_step
            faults.fire(rank=self._membership.id, step=step, point=point, subject=self)

    def _digest_settings(self) -> int:
        """Digest the settings that must be equal on all members in all steps."""
        fingerprint = self._take_fingerprint(self._list_trainable())
        return fingerprint.digest(self._list_crew_lines(), [])

    def _list_crew_lines(self) -> list[str]:
        """List lines, beside those of any optimizer, that must be equal on all members."""
        return list_lines(self._membership, self.param_groups, self._buffers)

    def _let_go(self) -> None:
        """Drop the connections of the present epoch."""
        before = self._session
        membership = self._membership
        self._session = Session(membership.lanes.alone, self._settings, None, earlier=before)
        membership.rendezvous.pulse.rest()
        membership.lanes.disconnect(before.ranks, has_failed=before.lifecycle.is_dead)

    @torch.no_grad()
    def _enter(self, epoch: Epoch) -> None:
        """Become a member of an epoch: take its hyperparameters, then its parameters."""
        membership, store = self._membership, epoch.lane_store
        membership.rendezvous.begin_beating(epoch.number, epoch.rank)
        call_roll(epoch)
        limit_s = self._settings.timeouts.start_s
        ranks = membership.lanes.connect(epoch, timeout_s=limit_s, silence_s=membership.silence_s)
        ranks = replace(
            ranks,
            members=epoch.roster,
            connect_timeout_s=epoch.connect_timeout_s,
            is_sharded=self._sharding is not None,
        )
        sharding = None if self._sharding is None else self._sharding.among(ranks)
        self._session = Session(ranks, self._settings, sharding, earlier=self._session)
        self._fire_forming("connect")
        gives, given = epoch.place == 0 and epoch.gives_state, {}
        if gives:
            carried.give(store, self._describe_state())
        if epoch.takes_state:
            given = carried.take(store, limit_s=limit_s, watch=self._watch)
        kept = [{**group} for group in self.param_groups]
        if epoch.takes_parameters and self._donor is not None:
            self._donor.stop()  # before the count of steps is that of other parameters
        try:
            if epoch.takes_state:
                self._take_given(given)
            with self._session.lifecycle.collective("forming an epoch"):
                taken = self._take_part(epoch)
        except BaseException:
            for group, values in zip(self.param_groups, kept, strict=True):
                group.update(values)
            raise
        # From here on nothing that involves others can fail.
        self._fire_forming("load")
        lifecycle = self._session.lifecycle
        with deferred_signals("forming an epoch"):
            lifecycle.is_torn = True
            for own, new in taken:
                own.copy_(new)
            self._take_state(epoch, given)
            if self._newcomer is not None:
                self._newcomer.keep()
            self._whole_epoch, lifecycle.is_torn = epoch.number, False
        if gives:
            with suppress(DistError):  # a store that is gone is noticed where it is needed
                carried.clear(store)

    def _take_part(self, epoch: Epoch) -> list[tuple[Tensor, Tensor]]:
        """Meet the others; return pairs of a tensor to overwrite and its new values."""
        session, step = self._session, self.committed_step
        for group in (*self.param_groups, self.defaults):
            group[WORKER_KEY] = name_worker(session)
        self._fixed.note(self.param_groups, self.state)
        names = self._param_names()
        own = [local_tensor(param).detach() for param in names]
        # Late messages of an epoch that was given up must not reach parameters.
        new = [param.clone() for param in own] if epoch.takes_parameters else own
        trained = self._list_trainable()
        lines = self._take_fingerprint(trained).list_lines(self.param_groups)
        lines += self._list_crew_lines()
        everything = dict(zip(new, names.values(), strict=True))
        session.join(lines, trained, everything, step=step, alike=epoch.most_advanced)
        self._fire_forming("broadcast")
        self._lay_out()
        session.routing.send_rule_state(step=step)
        taken = list(zip(own, new, strict=True)) if epoch.takes_parameters else []
        if epoch.gives_state:
            taken += self._fetch_buffers(epoch)
        if epoch.has_newcomers and epoch.members[0].epoch and self._membership.newcomers != "zeros":
            taken += self._fetch_momenta(epoch)
        session.meetings.agree_inside(step=step)
        return taken

    def _fetch_buffers(self, epoch: Epoch) -> list[tuple[Tensor, Tensor]]:
        buffers = self._buffers + ([] if self._local is None else self._local.list_buffers())
        pairs = [(buffer, self._broadcast(buffer, source=0)) for buffer in buffers]
        return pairs if epoch.takes_state else []

    def _describe_state(self) -> dict[str, Any]:
        """Return the state, apart from tensors, that the first worker gives lagging workers."""
        return {
            "groups": describe_groups(self.param_groups),
            "carried": self._membership.carried.describe(),
            "checkpoints": hand_on_identities(self),
            **({} if self._local is None else self._local.describe()),
        }

    def _take_given(self, given: Mapping[str, Any]) -> None:
        """Take the state that is needed before tensors come; if this raises, nothing was taken."""
        if self._local is not None:
            self._local.check_given(given)
        self._take_groups(given["groups"])

    def _take_state(self, epoch: Epoch, given: Mapping[str, Any]) -> None:
        """Keep the state that a lagging worker was given; tensors are in place."""
        if epoch.takes_state:
            # What this worker has counted since is not to be taken back.
            self._donor_groups = [
                {key: value for key, value in group.items() if key != AGREEMENT_KEY}
                for group in given["groups"]
            ]
            self._membership.carried.take(given["carried"])
            take_identities(self, given["checkpoints"])
        if self._local is not None:
            self._local.take(epoch, given)

    def _fetch_momenta(self, epoch: Epoch) -> list[tuple[Tensor, Tensor]]:
        """Return a newcomer's momenta, from members that have them."""
        members = epoch.members
        sources = [rank for rank, member in enumerate(members) if member.epoch]
        if self._membership.newcomers == "donor":
            sources = sources[:1]
        pairs = []
        for param in self._all_params():
            if "exp_avg" in self.state.get(param, {}):
                own = self.state[param]["exp_avg"]
                momenta = (self._broadcast(own, source=source) for source in sources)
                pairs.append((own, begin_momentum(momenta, self._membership.newcomers)))
        return pairs if members[epoch.place].epoch == 0 else []

    def _broadcast(self, tensor: Tensor, *, source: int) -> Tensor:
        """Return the tensor of a member, of the same shape and dtype."""
        link = self._session.connections.link_lane(self._settings.timeouts.start_s)
        row = tensor.detach().clone().to(link.wire_device).contiguous()
        broadcast_tensor(link, row, step=self.committed_step, source=source)
        return row.to(tensor.device)

    def take_donor_groups(self) -> None:
        """Restore the hyperparameters that this worker was given when it joined."""
        self._take_groups(self._donor_groups)
        if self._local is not None:
            self._local.take_donor_groups()

    def _take_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Take the hyperparameters and the step number of the most advanced worker."""
        take_groups(self.param_groups, groups)
        self._known_step = self.committed_step

    def _find_lost(self, error: BaseException, epoch: Epoch) -> tuple[int, ...]:
        """Return the places of members that all others know to be gone.

        Only the receiver of damaged bytes may know of them, so these name nobody here.
        """
        if not isinstance(error, (MissingError, *_LOST)):
            return ()
        return self._membership.lanes.find_lost(error.culprits, epoch)
