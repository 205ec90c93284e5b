"""The network of an optimizer: its links, and which bucket goes over which of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from distlion.aggregation import Aggregation, TernaryVote
from distlion.cost import (
    LinkModel,
    agree_on_model,
    choose_exchange,
    count_overlap_buckets,
    probe_link,
)
from distlion.exchange import (
    AllReduce,
    ChunkKind,
    Exchange,
    Header,
    Status,
    Verdict,
    run_all,
    share_verdict,
    worst_of,
)
from distlion.kernels import choose_kernels
from distlion.layout import Bucket, BucketShape, fill_buckets, repack, take_part
from distlion.transport import (
    ByteCount,
    Gloo,
    Transport,
    carries_host_memory,
    gather_bytes,
    own_group,
)
from distlion.vote import Roster
from distlion.voting.clipping import Clipper
from distlion.voting.flat_route import FlatRoute
from distlion.voting.grid import Grid, GridGroups
from distlion.voting.group import VotingGroup
from distlion.voting.node_route import NodeRoute
from distlion.voting.nodes import PIECE_UNIT_ELEMENTS
from distlion.voting.outcome import raise_verdict
from distlion.voting.overlap_trial import OverlapTrial
from distlion.voting.param import VotingParam
from distlion.voting.route import Route
from distlion.voting.settings import Settings
from distlion.voting.traffic import Traffic
from distlion.voting.warm_up import compile_kernels


class VotingNetwork:
    """Links and routes of an optimizer with several workers.

    Args:
        group: The workers.
        settings: The optimizer's.
        grid: Which of its ranks act as one worker.
        name: Of the optimizer, unlike that of any other on the process group.
        is_sharded: Whether these hold shards of the parameters, and not whole ones.

    Attributes:
        roster: Who votes.
        voter: The id of this worker among them, which its coins depend on.
        routes: What carries each bucket, in the order in which they are exchanged.
        between: The link between those who vote, since ``lay_out``.
        inside: The link between the ranks of this worker; None where it has one.
        grad_norm: What the last committed step was clipped by; None where nothing was.
        trial: Whether buckets leave during backward.
    """

    def __init__(
        self, group: VotingGroup, settings: Settings, grid: Grid, *, name: str, is_sharded: bool
    ) -> None:
        self._group = group
        self._settings = settings
        self._grid = grid
        self._is_sharded = is_sharded
        self.roster = Roster.of(len(grid.between))
        self.voter = self.roster.ids[grid.between.index(group.rank)]
        self._name = name
        self._everybody = group.process_group
        self._for_checkpoints: dist.ProcessGroup | None = None
        self._groups: GridGroups | None = None
        self.between: Transport | None = None
        self.inside: Transport | None = None
        self._model: LinkModel | None = None
        self.routes: list[Route] = []
        self.clipper: Clipper | None = None
        self.grad_norm: float | None = None
        self.trial = OverlapTrial(settings.overlap)
        self._told_sent_bytes = 0

    def complete(self, traffic: Traffic) -> Traffic:
        """Add to the traffic of an optimizer what is counted here."""
        return replace(traffic, rule_state_sent_bytes=self._told_sent_bytes)

    def note_norm(self, norm: float) -> None:
        """Keep the norm of a step."""
        self.grad_norm = norm

    @property
    def momentum_pattern(self) -> Exchange:
        """The pattern that averages momenta: "auto" is ``AllReduce``."""
        return AllReduce() if self._settings.exchange == "auto" else self._settings.exchange

    def approach(self) -> None:
        """Make a group for the first words, where the workers' own cannot carry host memory."""
        workers = self._group.process_group
        assert workers is not None
        if not carries_host_memory(workers):
            self._everybody = own_group(
                workers, name=f"{self._name}/handshake", timeout_s=self._settings.group_timeout_s
            )

    def connect(self) -> None:
        """Make groups for this optimizer alone; every worker must call it.

        What others send, other optimizers and the caller, could meet its bytes on shared ones, and
        sizes that differ can abort a process inside Gloo.
        """
        workers, timeout_s = self._group.process_group, self._settings.group_timeout_s
        assert workers is not None
        name = self._name
        self._everybody = own_group(workers, name=name, timeout_s=timeout_s)
        if len(self._grid.inside) > 1 or self._is_sharded:
            self._groups = GridGroups(workers, self._grid, name=name, timeout_s=timeout_s)

    def link(self, timeout_s: float) -> Transport:
        """Return a link between all ranks of all workers: their own, once they are connected."""
        assert self._everybody is not None
        return Gloo(self._everybody, timeout_s=timeout_s, watch=self._group.watch)

    def replica_link(self, timeout_s: float) -> Transport:
        """Return a link between those who hold the same parameters, or shards of them."""
        if self._is_sharded:
            return self._make_link(inside=False, timeout_s=timeout_s)
        return self.link(timeout_s)

    def checkpoint_link(self, *, in_background: bool) -> Transport:
        """Return a link between all workers on a group of its own, which waits for slow disks.

        In the background it is without the watch, which speaks for the thread of the steps.
        """
        workers, timeout_s = self._group.process_group, self._settings.group_timeout_s
        assert workers is not None
        if self._for_checkpoints is None:
            name = f"{self._name}/checkpoints"
            self._for_checkpoints = own_group(workers, name=name, timeout_s=timeout_s)
        watch = None if in_background else self._group.watch
        return Gloo(self._for_checkpoints, timeout_s=timeout_s, watch=watch)

    def lay_out(self, params: Sequence[VotingParam], *, step: int) -> None:
        """Put parameters into buckets, and choose what carries each; every worker must call it.

        Args:
            params: The trainable parameters, in group order.
            step: The step that errors name.
        """
        if self.between is None:
            timeout_s = self._settings.step_timeout_s
            self.between = self._make_link(inside=False, timeout_s=timeout_s)
            if len(self._grid.inside) > 1:
                self.inside = self._make_link(inside=True, timeout_s=timeout_s)
        if self._model is None and self._wants_model():
            self._model = self._measure_link(step)
        if self.roster.n_voters == 1:
            # Its reply is its own direction: the step is Lion's.
            params = [replace(param, rule=TernaryVote()) for param in params]
        # Of whole parameters, so that all ranks of a worker have the same buckets.
        buckets = fill_buckets(
            [param.whole_slot for param in params],
            [param.kind for param in params],
            n_shards=self.roster.n_shards,
            bucket_elements=self._bucket_elements(params),
            backwards=self.trial.overlaps,
        )
        if self._is_sharded:
            buckets = tuple(
                repack(bucket, [params[index].slot for index in bucket.members])
                for bucket in buckets
            )
        is_first, self.routes = (
            not self.routes,
            [self._build_route(bucket, params) for bucket in buckets],
        )
        self.clipper = self._build_clipper(params, step=step)
        compile_kernels(self.routes, self._settings)
        if not is_first:  # at construction nothing has been said
            self.tell_counters(step=step)

    def tell_counters(self, *, step: int) -> None:
        """Tell those who count what workers keep for rules with state; every worker must call it.

        Bytes are counted apart. In 32 bits an element this takes as long as many steps do, so that
        it has the time of construction.

        Raises:
            CorruptFrameError: Bytes were damaged on the way; on all ranks of a worker.
            PeerLostError, StepTimeoutError: A peer is gone, or did not answer in time.
        """
        if not any(route.rule.worker_state for route in self.routes):
            return
        header = Header(ChunkKind.VOTE, step, 0, 0, 0, epoch=self.roster.epoch)
        link = self._make_link(inside=False, timeout_s=self._settings.init_timeout_s)
        told = (route.tell_counters(link, header) for route in self.routes)
        replies = run_all(exchanging for exchanging in told if exchanging is not None)
        self._told_sent_bytes += link.take_counted().sent_bytes
        verdict = worst_of([Verdict(Status.OK), *(reply.verdict for reply in replies)])
        if self._groups is not None:  # what other ranks of this worker have heard
            inside = self._make_link(inside=True, timeout_s=self._settings.init_timeout_s)
            verdict = share_verdict(inside, verdict, header, n_voters=self.roster.n_voters)
        if verdict.status is not Status.OK:
            params = [param for route in self.routes for param in route.params]
            raise_verdict(params, verdict, rank=self._group.rank, step=step)

    def begin_trial(self) -> None:
        """Forget how long steps took: those to come may be others."""
        self.trial = OverlapTrial(self._settings.overlap)

    def try_overlap(self, params: Sequence[VotingParam], *, step: int) -> bool:
        """Note that a step is over, and lay out for overlap or against it, where its time says so.

        Every rank must call it.

        Returns:
            Whether there are new routes.
        """
        changes = self.trial.note_step(lambda: self.link(self._settings.step_timeout_s), step=step)
        if changes:
            self.lay_out(params, step=step)
        return changes

    def _wants_model(self) -> bool:
        settings = self._settings
        sizes_buckets = bool(settings.overlap) and settings.bucket_elements is None
        return settings.exchange == "auto" or sizes_buckets

    def _measure_link(self, step: int) -> LinkModel:
        timeout_s = self._settings.init_timeout_s
        model = probe_link(self._make_link(inside=False, timeout_s=timeout_s), step=step)
        # Each rank of a worker has measured for itself, and buckets must be equal.
        return agree_on_model(self.link(timeout_s), model, step=step)

    def _make_link(self, *, inside: bool, timeout_s: float) -> Transport:
        if self._groups is None:
            return self.link(timeout_s)
        group = self._groups.inside if inside else self._groups.between
        ranks = self._grid.inside if inside else self._grid.between
        return Gloo(group, timeout_s=timeout_s, ranks=ranks, watch=self._group.watch)

    def _bucket_elements(self, params: Sequence[VotingParam]) -> int:
        """Choose a size of buckets: as asked for, else the limit, or several to overlap."""
        limit = self._settings.bucket_limit
        if not self.trial.overlaps or self._settings.bucket_elements is not None:
            return limit
        whole = fill_buckets(
            [param.whole_slot for param in params],
            [param.kind for param in params],
            n_shards=self.roster.n_shards,
            bucket_elements=limit,
        )
        assert self._model is not None  # ``_wants_model`` says so
        n_votes = self.roster.n_votes
        shapes = [
            (params[bucket.members[0]].rule.shape(bucket, n_votes), self._model) for bucket in whole
        ]
        n_elements = sum(param.whole_slot.n_elements for param in params)
        return min(limit, max(1, -(-n_elements // count_overlap_buckets(shapes))))

    def _build_route(self, bucket: Bucket, params: Sequence[VotingParam]) -> Route:
        members = [
            params[position].at(bucket.slots[index])
            for index, position in enumerate(bucket.members)
        ]
        rule, _, device = members[0].kind
        if self._groups is None or self._is_sharded:
            pattern = self._choose_pattern(rule.shape(bucket, self.roster.n_votes))
            return self._build_flat(bucket, members, rule, device, pattern)
        all_pieces = [param.pieces for param in params]
        cuts = [
            take_part(bucket, all_pieces, part, n_shards=self.roster.n_shards)
            for part in range(len(self._grid.inside))
        ]
        # One pattern for all parts: its rounds are interleaved with exchanges inside the node.
        pattern = self._choose_pattern(
            max(
                (rule.shape(cut, self.roster.n_votes) for cut in cuts),
                key=lambda shape: shape.vote_bytes,
            )
        )
        parts = []
        for part, cut in enumerate(cuts):
            pieces = [
                params[position].at(cut.slots[index], part=part)
                for index, position in enumerate(cut.members)
            ]
            parts.append(self._build_flat(cut, pieces, rule, device, pattern))
        assert self.inside is not None
        return NodeRoute(bucket, tuple(members), tuple(parts), self.inside)

    def _choose_pattern(self, shape: BucketShape) -> Exchange:
        if self._settings.exchange != "auto":
            return self._settings.exchange
        assert self._model is not None  # ``_wants_model`` says so
        return choose_exchange(shape, self._model)

    def _build_flat(
        self,
        bucket: Bucket,
        params: Sequence[VotingParam],
        rule: Aggregation,
        device: torch.device,
        pattern: Exchange,
    ) -> FlatRoute:
        """Build the route of a bucket, or of a part of one that may be empty."""
        kernels = choose_kernels(device)
        inside = self.inside if self._is_sharded else None
        assert self.between is not None
        return FlatRoute(
            bucket,
            tuple(params),
            rule,
            pattern,
            device,
            kernels,
            self.between,
            self.roster,
            inside,
        )

    def _build_clipper(self, params: Sequence[VotingParam], *, step: int) -> Clipper | None:
        """Build what clips; None where nothing is to be clipped."""
        clip = self._settings.clip_norm
        if clip is None:
            return None
        inside = self.inside
        blocks = [0] * len(params[0].pieces)
        for param in params:
            for part, (start, stop) in enumerate(param.pieces):
                blocks[part] += -(-(stop - start) // PIECE_UNIT_ELEMENTS)
        if self._is_sharded and inside is not None:  # other ranks' shards may be larger
            rows = gather_bytes(inside, blocks[0].to_bytes(8, "little"), step=step)
            blocks = [int.from_bytes(row, "little") for row in rows]
        return Clipper(
            clip,
            between=self.between if clip.scope == "global" else None,
            inside=inside,
            most_blocks=max(blocks),
        )

    def plan(self) -> ByteCount:
        """Declare what this rank will hand to the network between those who vote, in a step."""
        clipping = ByteCount() if self.clipper is None else self.clipper.plan()
        return sum((route.plan() for route in self.routes), clipping)
