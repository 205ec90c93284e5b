"""What many workers must agree on: settings, layout, replicas, and whether they go on at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import ParamsT

from distlion import faults
from distlion.errors import (
    CheckpointError,
    InvalidArgumentError,
    ProcessGroupError,
    ReplicaMismatchError,
)
from distlion.exchange import (
    ByteCount,
    ChunkKind,
    Exchanging,
    Header,
    Status,
    Verdict,
    run_all,
    worst_of,
)
from distlion.kernels import Coins
from distlion.layout import Cutter
from distlion.optim.arguments import check_rounding, check_rule, list_group
from distlion.optim.description import Description
from distlion.optim.lion import LionBase
from distlion.optim.saved_state import parse_groups, spell_groups
from distlion.voting.clipping import Clipper
from distlion.voting.follow_up import FollowUp
from distlion.voting.group import VotingGroup
from distlion.voting.momentum_stage import describe_selection, fill_selection
from distlion.voting.network import VotingNetwork
from distlion.voting.node_stage import PIECE_UNIT_ELEMENTS
from distlion.voting.outcome import log_skip, raise_verdict
from distlion.voting.overlap import Overlap
from distlion.voting.replicas import (
    broadcast_params,
    digest_settings,
    explain_difference,
    shake_hands,
    verify_replicas,
)
from distlion.voting.route import Route
from distlion.voting.settings import (
    Settings,
    describe_params,
    list_rules,
)
from distlion.voting.traffic import Traffic
from distlion.voting.vote import BucketVote, abstain_from


class AssembledLion(LionBase):
    """Parameters and momenta of one worker among many: laid out, compared, saved and loaded alike.

    Args:
        params: As for every torch optimizer.
        defaults: Of param groups.
        settings: What does not change from step to step.
        process_group: The workers; None for the default group, or for one worker alone.
        exp_avg_dtype: Of the momentum; None for the parameter's.
    """

    _follow_up: FollowUp

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        *,
        settings: Settings,
        process_group: dist.ProcessGroup | None,
        exp_avg_dtype: torch.dtype | None,
    ) -> None:
        self._settings = settings
        self._group = VotingGroup(process_group)
        self._node_size = settings.node_size(self._group.world_size)
        self._network = VotingNetwork(self._group, settings, self._node_size)
        self._cutter = Cutter(self._node_size, PIECE_UNIT_ELEMENTS)
        self._pieces: dict[Tensor, tuple[tuple[int, int], ...]] = {}
        self._traffic = Traffic()
        self._overlap: Overlap | None = None
        self._clipper: Clipper | None = None
        self._verified = False
        self._dead: str | None = None
        self._is_torn = False
        self._ready = False
        super().__init__(params, defaults, exp_avg_dtype=exp_avg_dtype)
        check_rounding(settings.rounding, {param.dtype for param in self._all_params()})
        self._connect()
        self._ready = True

    @property
    def committed_step(self) -> int:
        """Number of steps committed so far; also the number, counted from 0, of the next one."""
        return int(self.param_groups[0]["step"])

    @property
    def traffic(self) -> Traffic:
        """Bytes and messages of this rank, in the last step and in total."""
        return self._traffic

    @property
    def plan(self) -> ByteCount:
        """What this rank will hand to the network in one step; with nodes, to other nodes."""
        if self._group.world_size == 1:
            return ByteCount()
        return self._network.plan() + self._follow_up.plan(self.committed_step)

    def verify_replicas(self) -> None:
        """Compare the parameters of all workers, bit by bit; every worker must call it.

        Raises:
            ReplicaMismatchError: On every rank; names the parameters, and the ranks that left the
                majority.
            ConfigMismatchError: Another worker is at another call; on every rank.
            ProcessGroupError: The group is gone.
        """
        self._check_usable()
        self._check_idle("verify_replicas()")
        if self._group.world_size > 1:
            with self._fatal("verify_replicas()"):
                self._meet("verify_replicas()", self._describe())
                self._compare_replicas()

    def _compare_replicas(self) -> None:
        link = self._network.link(self._params[0].device, self._settings.step_timeout_s)
        names = [slot.name for slot in self._slots]
        verify_replicas(link, self._params, names, step=self.committed_step)
        sent_bytes = self._traffic.check_sent_bytes + link.take_counted().sent_bytes
        self._traffic = replace(self._traffic, check_sent_bytes=sent_bytes)
        self._verified = True

    @contextmanager
    def _fatal(self, what: str) -> Iterator[None]:
        """Declare this optimizer dead if what follows is left by an error.

        Whatever interrupts an exchange leaves peers at an unknown place. Who knows better, because
        all ranks raise the same error, clears ``_dead`` first.
        """
        self._dead = f"{what} is under way"
        try:
            yield
        except ReplicaMismatchError:
            self._dead = None
            raise
        except BaseException as error:
            if self._dead is not None:
                if self._overlap is not None:
                    self._overlap.close()
                self._dead = f"{what} failed ({type(error).__name__}: {error})"
            raise
        self._dead = None

    def _meet(self, call: str, lines: Sequence[str], step: int | None = None) -> None:
        """Meet all workers before collectives out of turn: a step in which nobody votes.

        A peer that is at a step or at another call sees other settings, and all ranks raise.

        Args:
            call: What this worker is at.
            lines: What must be equal on all workers.
            step: The step that must be equal; None for the present one.
        """
        lines = [f"call: {call}", *lines]
        step = self.committed_step if step is None else step
        header = Header(ChunkKind.VOTE, step, 0, 0, digest_settings(lines))
        if self._clipper is not None:
            self._clipper.take_part(header)
        votes = run_all(self._abstain(route, header) for route in self._network.routes)
        self._network.take_counted()
        verdict = worst_of([vote.verdict for vote in votes])
        if verdict.status is not Status.OK:
            self._abandon(verdict, lines)

    def _abstain(self, route: Route, header: Header) -> Exchanging[BucketVote]:
        coins = Coins(self._settings.seed, header.step, self._network.voter)
        return abstain_from(route, header, coins, nonfinite=self._settings.nonfinite)

    def _abandon(self, verdict: Verdict, lines: Sequence[str]) -> Literal[False]:
        """Raise what the verdict says, or skip the step where that is the policy."""
        rank, step = self._group.rank, self.committed_step
        if verdict.status < Status.CONFIG:
            self._dead = None
        if verdict.status is Status.NON_FINITE and self._settings.nonfinite == "skip":
            log_skip(self._slots, verdict, rank=rank, step=step)
            return False
        if verdict.status is Status.CONFIG:
            link = self._network.link(self._params[0].device, self._settings.step_timeout_s)
            explain_difference(link, lines, step=step)
        return raise_verdict(self._slots, verdict, rank=rank, step=step)

    def _check_idle(self, call: str) -> None:
        if self._overlap is not None and self._overlap.has_begun:
            raise InvalidArgumentError(
                f"{call} between backward and step(): with overlap=True votes of this step have "
                "left; call step() before, or zero_grad() on all workers"
            )

    def _count_traffic(self) -> None:
        """Move what the links have counted since the last step into ``traffic``."""
        between, inside = self._network.take_counted()
        n_elements = sum(slot.n_elements for slot in self._slots)
        self._traffic = self._traffic.add_step(between, inside, n_elements)

    def _fire(self, point: faults.Point) -> None:
        faults.fire(rank=self._group.rank, step=self.committed_step, point=point, subject=self)

    def _check_usable(self) -> None:
        if self._dead is not None:
            raise ProcessGroupError(
                f"this optimizer is dead: {self._dead}; restart the workers from a checkpoint"
            )
        self._group.check_alive()

    def _check_frozen(self) -> None:
        try:
            self._description.check_frozen()
        except InvalidArgumentError:
            self._dead = None  # all workers raise it
            raise

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; after construction, every worker must call it with the same group.

        Raises:
            InvalidArgumentError, UnsupportedTypeError, ConfigMismatchError: As in the constructor;
                nothing has been changed then.
        """
        group = list_group(param_group)
        if not self._ready:
            super().add_param_group(group)
            return
        self._check_usable()
        self._check_idle("add_param_group()")
        super().add_param_group({**group, "step": self.committed_step})
        with self._fatal("add_param_group()"):
            try:
                if self._group.world_size > 1:
                    lines = self._make_description().tell(self.param_groups)
                    self._meet("add_param_group()", lines + self._description.tell_thawed())
                self._check_frozen()
            except BaseException:
                for param in self.param_groups.pop()["params"]:
                    self.state.pop(param, None)
                raise
            self._lay_out()
            self._broadcast(self.param_groups[-1]["params"])

    def _check_group(self, group: Mapping[str, Any]) -> None:
        super()._check_group(group)
        check_rule(group["aggregation"])

    def _create_momentum(self, param: Tensor) -> None:
        if self._node_size > 1:
            self._pieces[param] = self._cutter.cut(param.numel())
        super()._create_momentum(param)

    def _momentum_shape(self, param: Tensor) -> torch.Size:
        """Return the parameter's shape; with nodes, that of this rank's flat piece of it."""
        if param not in self._pieces:
            return param.shape
        start, stop = self._own_piece(param)
        return torch.Size([stop - start])

    def _own_piece(self, param: Tensor) -> tuple[int, int]:
        return self._pieces[param][self._group.rank % self._node_size]

    def _take_momentum(self, param: Tensor, exp_avg: Tensor) -> Tensor:
        """Return what is kept here of a saved momentum: with nodes, a piece of a whole one."""
        if param not in self._pieces or exp_avg.shape == self._momentum_shape(param):
            return exp_avg
        start, stop = self._own_piece(param)
        return exp_avg.reshape(-1)[start:stop]

    def _connect(self) -> None:
        """Compare settings with all workers, make replicas equal, and lay out buckets."""
        params, _ = self._place_trainable()
        if self._group.world_size > 1:
            if not any(param.numel() for param in params):
                raise InvalidArgumentError(
                    "no parameter requires a gradient, so there is nothing to vote on"
                )
            self._description = self._make_description()
            link = self._network.link(params[0].device, self._settings.init_timeout_s)
            shake_hands(link, self._describe(), step=self.committed_step)
            self._broadcast(self._all_params())
        self._lay_out()

    def _broadcast(self, params: Sequence[Tensor]) -> None:
        """Overwrite parameters with those of the group's first rank."""
        self._verified = False
        if self._group.world_size > 1:
            timeout_s = self._settings.init_timeout_s
            links = {param.device: self._network.link(param.device, timeout_s) for param in params}
            broadcast_params(links, params, step=self.committed_step)

    def _lay_out(self) -> None:
        """Place parameters into buckets and choose what carries each."""
        self._description = self._make_description()
        self._params, self._slots = self._place_trainable()
        self._follow_up = FollowUp(
            self._settings,
            self._network,
            self.param_groups,
            self._params,
            [slot.name for slot in self._slots],
            [self._momentum_shape(param).numel() for param in self._params],
            earlier=self._follow_up if self._ready else None,
        )
        if self._group.world_size == 1:
            return
        self._network.lay_out(
            self._params,
            self._slots,
            list_rules(self.param_groups, self._params),
            [self._pieces.get(param, ((0, param.numel()),)) for param in self._params],
            step=self.committed_step,
        )
        self._clipper = self._network.build_clipper(self._params[0].device)
        if self._overlap is not None:
            self._overlap.close()
        if self._settings.overlap:
            self._overlap = self._make_overlap()

    def _make_overlap(self) -> Overlap:
        raise NotImplementedError

    def _describe(self) -> list[str]:
        return self._description.tell(self.param_groups)

    def _make_description(self) -> Description:
        lines = [
            f"distlion version: {version('distlion')}",
            f"world size: {self._group.world_size}",
            f"node size: {self._node_size}",
            *self._settings.describe(),
            f"exp_avg_dtype: {self._exp_avg_dtype}",
            *describe_params(self.param_groups, self._param_names()),
        ]
        if (sync := self._settings.momentum_sync) is not None:
            params, slots = self._place_trainable()
            lines.append(sync.describe_choice([slot.name for slot in slots], params))
        return Description(lines, self._param_names())

    def state_dict(self) -> dict[str, Any]:
        """Return the state: tensors, numbers and strings only; rules as their ``repr``.

        Raises:
            CheckpointError: An exception (Ctrl-C, no memory) cut a commit short here: parameters
                are between two steps.
        """
        if self._is_torn:
            raise CheckpointError(
                "an exception cut the commit of a step short, so that parameters and momenta are "
                "between two steps; restart from an earlier checkpoint"
            )
        return spell_groups(super().state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this worker, or that of another Lion; every worker must call it.

        Keys that the state lacks keep their present values.

        Raises:
            CheckpointError: Groups, shapes, momenta, steps or rules do not fit.
            InvalidArgumentError: A parameter was frozen and is not any more.
            StepMismatchError, ConfigMismatchError: Workers load different steps or settings; on
                every rank. Nothing has been changed after any of these.
        """
        self._check_idle("load_state_dict()")
        parsed = parse_groups(state_dict, step=self.committed_step)
        fill_selection(parsed["param_groups"], self._settings.momentum_sync)
        filled = self._check_state(parsed)
        if self._group.world_size > 1:
            self._check_usable()
            with self._fatal("load_state_dict()"):
                lines = self._description.tell(filled["param_groups"])
                if self._node_size == 1:  # the ranks of a node select for themselves
                    lines += describe_selection(filled["param_groups"])
                self._meet("load_state_dict()", lines, filled["param_groups"][0]["step"])
        self._check_frozen()
        self._load_state(filled)
        self._lay_out()
        self._verified = False
