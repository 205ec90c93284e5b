"""Buckets: their parameters, pattern and links, and their order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from distlion.failures import Status
from distlion.kernels.dispatch import choose_kernels
from distlion.layout import BucketLayout, BucketShape, fill_buckets, repack, take_part
from distlion.peers.connections import Connections
from distlion.peers.warm_up import compile_kernels
from distlion.step.bucket import Bucket, run_all
from distlion.step.cut_matrices import CutMatrices, CutMatrix
from distlion.step.matrix_cuts import find_matrices
from distlion.step.nodes import NodeBucket
from distlion.step.outcome import explain
from distlion.step.overlap_trial import OverlapTrial
from distlion.step.param import VotingParam
from distlion.step.ranks import Ranks
from distlion.step.settings import Settings
from distlion.step.traffic import TrafficMeter
from distlion.votes.aggregation import Aggregation
from distlion.votes.ternary import TernaryVote
from distlion.wire.cost import LinkModel, choose_exchange, count_overlap_buckets
from distlion.wire.frame import ChunkKind, Header
from distlion.wire.node_frames import share_verdict
from distlion.wire.pattern import Exchange
from distlion.wire.probe import agree_on_model, probe_link
from distlion.wire.transport import ByteCount, Transport
from distlion.wire.verdict import Verdict, worst_of


class Routing:
    """Place the parameters of an optimizer with several ranks into buckets.

    Args:
        ranks: All ranks of the optimizer.
        settings: The optimizer's settings.
        connections: Its process groups.
        meter: Meter that counts the exchange of rules' state.
        model: The link measured before members of a crew changed; None for the first.

    Attributes:
        model: The measured link; None where nothing depends on it.
        buckets: The buckets, in the order of exchanges.
        between: The link between the ranks that vote with each other, since ``lay_out``.
        inside: The link between the ranks of this worker; None if the worker has a single rank.
        trial: The trial that decides whether buckets are sent during backward.
    """

    def __init__(
        self,
        ranks: Ranks,
        settings: Settings,
        connections: Connections,
        meter: TrafficMeter,
        model: LinkModel | None,
    ) -> None:
        self._ranks, self._settings = ranks, settings
        self._connections, self._meter = connections, meter
        self.model, self._has_agreed = model, False
        self.between: Transport | None = None
        self.inside: Transport | None = None
        self.buckets: list[Bucket] = []
        self._matrices: dict[int, CutMatrix] = {}
        self.begin_trial()

    def take_ranks(self, ranks: Ranks) -> None:
        """Take over the ranks, whose roster has weights after the handshake."""
        self._ranks = ranks

    def lay_out(self, params: Sequence[VotingParam], *, step: int) -> None:
        """Put parameters into buckets, and choose a pattern for each; every rank must call it.

        Args:
            params: The trainable parameters, in group order.
            step: The step that errors name.
        """
        if self.between is None:
            timeout_s = self._settings.timeouts.step_s
            self.between = self._connections.link_voters(timeout_s, shares=True)
            if len(self._ranks.inside) > 1:
                self.inside = self._connections.link_worker(timeout_s)
            self._meter.links = self.between, self.inside
        if not self._has_agreed and self._wants_model():
            self.model, self._has_agreed = self._find_model(step), True
        if self._ranks.roster.n_voters == 1:
            # Its reply is its own direction: the step is Lion's.
            params = [replace(param, rule=TernaryVote()) for param in params]
        layouts = self._fill_buckets(params, self._bucket_elements(params))
        if self._ranks.is_sharded:
            layouts = tuple(
                repack(layout, [params[index].slot for index in layout.members])
                for layout in layouts
            )
        is_first = not self.buckets
        if self.inside is not None:
            self._matrices = find_matrices(params, self.inside, step=step)
        self.buckets = [self._build(layout, params) for layout in layouts]
        compile_kernels(self.buckets, self._settings)
        patterns = dict.fromkeys(part.pattern for bucket in self.buckets for part in bucket.parts)
        for pattern in patterns:
            for peer in pattern.list_peers(self.between.n_members, self.between.rank):
                limit_s = self._ranks.connect_timeout_s or self._settings.timeouts.connect_s
                self.between.connect(peer, timeout_s=limit_s)
        if not is_first:  # at construction there is no state yet
            self.send_rule_state(step=step)

    def send_rule_state(self, *, step: int) -> None:
        """Send the rules' state of workers to the ranks that count; every rank must call it.

        Bytes are counted separately. At 32 bits per element this takes as long as many steps, so it
        has the timeout of construction.

        Raises:
            CorruptFrameError: Bytes were damaged on the way; on all ranks of a worker.
            PeerLostError, StepTimeoutError: A peer is gone, or did not answer in time.
        """
        if not any(bucket.rule.worker_state for bucket in self.buckets):
            return
        ranks, timeout_s = self._ranks, self._settings.timeouts.start_s
        header = Header(ChunkKind.VOTE, step, 0, 0, 0, epoch=ranks.roster.epoch)
        link, inside = (
            self._connections.link_voters(timeout_s),
            self._connections.link_worker(timeout_s),
        )
        told = (bucket.send_rule_state(link, header) for bucket in self.buckets)
        replies = run_all(exchanging for exchanging in told if exchanging is not None)
        self._meter.count_rule_state(link.counted.sent_bytes)
        verdict = worst_of([Verdict(Status.OK), *(reply.verdict for reply in replies)])
        if inside is not None:  # errors that other ranks of this worker have heard
            verdict = share_verdict(inside, verdict, header, n_voters=ranks.roster.n_voters)
        if verdict.status is not Status.OK:
            params = [param for bucket in self.buckets for param in bucket.params]
            raise explain(verdict, params, rank=ranks.rank, step=step)

    def begin_trial(self) -> None:
        """Forget the times of steps, as later steps may differ."""
        self.trial = OverlapTrial(self._settings.overlap)

    def try_overlap(self, params: Sequence[VotingParam], *, step: int) -> bool:
        """Note that a step is over, and switch overlap on or off if its time says so.

        Every rank must call it.

        Returns:
            Whether there are new buckets.
        """
        timeout_s = self._settings.timeouts.step_s
        changes = self.trial.note_step(lambda: self._connections.link_all(timeout_s), step=step)
        if changes:
            self.lay_out(params, step=step)
        return changes

    def plan(self) -> ByteCount:
        """Declare the bytes that this rank sends between voters in a step."""
        return sum((bucket.plan() for bucket in self.buckets), ByteCount())

    def _wants_model(self) -> bool:
        settings = self._settings
        sizes_buckets = bool(settings.overlap) and settings.bucket_elements is None
        return settings.exchange == "auto" or sizes_buckets

    def _find_model(self, step: int) -> LinkModel:
        """Measure the link; a crew does so only in its first epoch, as this takes long.

        A newcomer takes the model of the earlier members.
        """
        timeout_s, model = self._settings.timeouts.start_s, None
        everybody = self._connections.link_all(timeout_s)
        if self._ranks.roster.epoch:
            model = agree_on_model(everybody, self.model, step=step)
        if model is None:
            measured = probe_link(self._connections.link_voters(timeout_s), step=step)
            # Each rank of a worker has its own measurement, and buckets must be equal.
            model = agree_on_model(everybody, measured, step=step)
        assert model is not None  # this rank has one
        return model

    def _fill_buckets(
        self, params: Sequence[VotingParam], bucket_elements: int, *, backwards: bool | None = None
    ) -> tuple[BucketLayout, ...]:
        """Fill buckets with whole parameters, so that all ranks of a worker have the same ones."""
        return fill_buckets(
            [param.whole_slot for param in params],
            [param.kind for param in params],
            n_shards=self._ranks.roster.n_shards,
            bucket_elements=bucket_elements,
            backwards=self.trial.overlaps if backwards is None else backwards,
        )

    def _bucket_elements(self, params: Sequence[VotingParam]) -> int:
        """Choose the size of buckets: the given one, else the limit, or less for overlap."""
        limit = self._settings.bucket_limit
        if not self.trial.overlaps or self._settings.bucket_elements is not None:
            return limit
        whole = self._fill_buckets(params, limit, backwards=False)
        assert self.model is not None  # ``_wants_model`` says so
        n_votes = self._ranks.roster.n_votes
        shapes = [
            (params[bucket.members[0]].rule.shape(bucket, n_votes), self.model) for bucket in whole
        ]
        n_elements = sum(param.whole_slot.n_elements for param in params)
        return min(limit, max(1, -(-n_elements // count_overlap_buckets(shapes))))

    def _build(self, layout: BucketLayout, params: Sequence[VotingParam]) -> Bucket:
        """Build a bucket; with nodes, each rank of a node votes on its part of it."""
        members = _place(layout, params)
        rule, _, device = members[0].kind
        matrices = self._join_matrices(members, device)
        n_votes, shards = self._ranks.roster.n_votes, self._ranks.roster.n_shards
        if self.inside is None or self._ranks.is_sharded:
            pattern = self._choose_pattern(rule, rule.shape(layout, n_votes))
            return self._build_one(layout, members, rule, device, pattern, matrices)
        pieces = [param.pieces for param in params]
        cuts = [
            take_part(layout, pieces, part, n_shards=shards)
            for part in range(len(self._ranks.inside))
        ]
        # One pattern for all parts, as its rounds are interleaved with exchanges inside the node.
        shapes = [rule.shape(cut, n_votes) for cut in cuts]
        pattern = self._choose_pattern(rule, max(shapes, key=lambda shape: shape.vote_bytes))
        parts = [
            self._build_one(cut, _place(cut, params, part=part), rule, device, pattern)
            for part, cut in enumerate(cuts)
        ]
        return NodeBucket(layout, members, parts, self.inside, matrices)

    def _join_matrices(
        self, members: Sequence[VotingParam], device: torch.device
    ) -> CutMatrices | None:
        """Join the cut matrices of a bucket; None for none."""
        cut = [self._matrices[each.position] for each in members if each.position in self._matrices]
        if self.inside is None or not cut:
            return None
        return CutMatrices(self.inside, device, choose_kernels(device), tuple(cut))

    def _choose_pattern(self, rule: Aggregation, shape: BucketShape) -> Exchange:
        if self._settings.exchange != "auto":
            self._settings.exchange.check_carries(shape, rule)
            return self._settings.exchange
        assert self.model is not None  # ``_wants_model`` says so
        weighted = self._ranks.roster.is_weighted
        return choose_exchange(shape, self.model, weighted=weighted)

    def _build_one(
        self,
        layout: BucketLayout,
        params: Sequence[VotingParam],
        rule: Aggregation,
        device: torch.device,
        pattern: Exchange,
        matrices: CutMatrices | None = None,
    ) -> Bucket:
        """Build a bucket, or a rank's part of one, which may be empty."""
        assert self.between is not None
        return Bucket(
            layout,
            params,
            rule.start(layout, self._ranks.roster),
            pattern,
            device,
            choose_kernels(device),
            self.between,
            inside=self.inside if self._ranks.is_sharded else None,
            matrices=matrices,
        )


def _place(
    layout: BucketLayout, params: Sequence[VotingParam], *, part: int | None = None
) -> list[VotingParam]:
    """Return the records of a bucket's parameters, or of a part's pieces of them."""
    return [
        params[position].at(layout.slots[index], part=part)
        for index, position in enumerate(layout.members)
    ]
