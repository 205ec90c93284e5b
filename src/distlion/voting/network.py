"""The network of an optimizer: its links, and which bucket goes over which of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distlion.aggregation import Aggregation, TernaryVote
from distlion.exchange import AllReduce, ByteCount, Exchange, Link
from distlion.kernels import choose_kernels
from distlion.layout import Bucket, Slot, fill_buckets, take_part
from distlion.link import (
    LinkModel,
    agree_on_model,
    choose_exchange,
    count_overlap_buckets,
    probe_link,
)
from distlion.voting.clipping import Clipper
from distlion.voting.group import VotingGroup
from distlion.voting.node_groups import NodeGroups, node_groups, own_group
from distlion.voting.node_stage import PIECE_UNIT_ELEMENTS, NodeStage
from distlion.voting.route import Route
from distlion.voting.settings import Settings


class VotingNetwork:
    """Links and routes of an optimizer with several workers.

    Args:
        group: The workers.
        settings: The optimizer's.
        node_size: Ranks of a node; 1 without nodes.

    Attributes:
        routes: What carries each bucket, in the order in which they are exchanged.
        between: For each device, the link between those who vote.
        inside: For each device, the link between the ranks of this node, if there are nodes.
        pieces: For every trainable parameter, (start, stop) of each rank's piece.
    """

    def __init__(self, group: VotingGroup, settings: Settings, node_size: int) -> None:
        self._group = group
        self._settings = settings
        self._node_size = node_size
        self._nodes: NodeGroups | None = None
        self.between: dict[torch.device, Link] = {}
        self.inside: dict[torch.device, Link] = {}
        self._models: dict[torch.device, LinkModel] = {}
        self.routes: list[Route] = []
        self.pieces: Sequence[Sequence[tuple[int, int]]] = ()
        self._clipper: Clipper | None = None

    @property
    def n_voters(self) -> int:
        """Workers that vote: nodes, where there are some."""
        return self._group.world_size // self._node_size

    @property
    def voter(self) -> int:
        """The number of this one, which its coins depend on."""
        return self._group.rank // self._node_size

    @property
    def momentum_pattern(self) -> Exchange:
        """The pattern that averages momenta: "auto" is ``AllReduce``."""
        return AllReduce() if self._settings.exchange == "auto" else self._settings.exchange

    def link(self, device: torch.device, timeout_s: float) -> Link:
        """Return a link between all workers."""
        assert self._group.process_group is not None
        return Link(self._group.process_group, device, timeout_s=timeout_s, watch=self._group.watch)

    def lay_out(
        self,
        params: Sequence[Tensor],
        slots: Sequence[Slot],
        rules: Sequence[Aggregation],
        pieces: Sequence[Sequence[tuple[int, int]]],
        *,
        step: int,
    ) -> None:
        """Put parameters into buckets, and choose what carries each; every worker must call it.

        Args:
            params: The trainable parameters, in group order.
            slots: Their places.
            rules: Their rules.
            pieces: With nodes, for each of them (start, stop) of every rank's piece.
            step: The step that errors name.
        """
        self._connect(params)
        if self._wants_models():
            timeout_s = self._settings.init_timeout_s
            for device in self.between:
                if device not in self._models:
                    probe = self._make_link(device, inside=False, timeout_s=timeout_s)
                    model = probe_link(probe, step=step)
                    # Each part of the nodes has measured for itself, and buckets must be equal.
                    everybody = self.link(device, timeout_s)
                    self._models[device] = agree_on_model(everybody, model, step=step)
        if self.n_voters == 1:
            # Its reply is its own direction: the step is Lion's.
            rules = [TernaryVote() for _ in rules]
        kinds = [
            (rule, param.dtype, param.device) for rule, param in zip(rules, params, strict=True)
        ]
        self.pieces = pieces
        buckets = fill_buckets(
            slots,
            kinds,
            n_shards=self.n_voters,
            bucket_elements=self._bucket_elements(slots, kinds),
            backwards=self._settings.overlap,
        )
        self.routes = [self._build_route(bucket, *kinds[bucket.members[0]]) for bucket in buckets]

    def _wants_models(self) -> bool:
        settings = self._settings
        sizes_buckets = settings.overlap and settings.bucket_elements is None
        return settings.exchange == "auto" or sizes_buckets

    def _connect(self, params: Sequence[Tensor]) -> None:
        """Make the links of every device that is new."""
        assert self._group.process_group is not None
        if self._node_size > 1 and self._nodes is None:
            self._nodes = node_groups(
                self._group.process_group, self._node_size, self._settings.group_timeout_s
            )
        timeout_s = self._settings.step_timeout_s
        for device in dict.fromkeys(param.device for param in params):
            if device not in self.between:
                self.between[device] = self._make_link(device, inside=False, timeout_s=timeout_s)
                if self._nodes is not None:
                    self.inside[device] = self._make_link(device, inside=True, timeout_s=timeout_s)

    def _make_link(self, device: torch.device, *, inside: bool, timeout_s: float) -> Link:
        if self._nodes is None:
            if not self._settings.overlap:
                return self.link(device, timeout_s)
            assert self._group.process_group is not None
            group = own_group(self._group.process_group, self._settings.group_timeout_s)
            return Link(group, device, timeout_s=timeout_s, watch=self._group.watch)
        group = self._nodes.inside if inside else self._nodes.between
        ranks = self._nodes.inside_ranks if inside else self._nodes.between_ranks
        return Link(group, device, timeout_s=timeout_s, ranks=ranks, watch=self._group.watch)

    def _bucket_elements(
        self, slots: Sequence[Slot], kinds: Sequence[tuple[Aggregation, torch.dtype, torch.device]]
    ) -> int:
        """Choose a size of buckets: as asked for, else the limit, or several to overlap."""
        limit = self._settings.bucket_limit
        if not self._settings.overlap or self._settings.bucket_elements is not None:
            return limit
        whole = fill_buckets(slots, kinds, n_shards=self.n_voters, bucket_elements=limit)
        shapes = []
        for bucket in whole:
            rule, _, device = kinds[bucket.members[0]]
            shapes.append((rule.shape(bucket), self._models[device]))
        n_elements = sum(slot.n_elements for slot in slots)
        return min(limit, max(1, -(-n_elements // count_overlap_buckets(shapes))))

    def _build_route(
        self, bucket: Bucket, rule: Aggregation, dtype: torch.dtype, device: torch.device
    ) -> Route:
        kernels, ballot, stage = choose_kernels(device), bucket, None
        if self._nodes is not None:
            parts = tuple(
                take_part(bucket, self.pieces, part, n_shards=self.n_voters)
                for part in range(self._node_size)
            )
            link = self.inside[device]
            ballot = parts[link.rank]
            stage = NodeStage(
                link=link,
                bucket=bucket,
                parts=parts,
                pieces=self.pieces,
                dtype=dtype,
                kernels=kernels,
                part_shapes=tuple(rule.shape(part) for part in parts),
                reply_planes=rule.reply_planes(self.n_voters),
                reply_format=rule.reply_format,
            )
        pattern = self._choose_pattern(ballot, rule, device)
        return Route(bucket, ballot, rule, pattern, kernels, self.between[device], stage)

    def _choose_pattern(self, ballot: Bucket, rule: Aggregation, device: torch.device) -> Exchange:
        if self._settings.exchange != "auto":
            return self._settings.exchange
        return choose_exchange(rule.shape(ballot), self._models[device])

    def build_clipper(self, device: torch.device) -> Clipper | None:
        """Build what clips; None where nothing is to be clipped."""
        self._clipper = None
        clip = self._settings.clip_norm
        if clip is None:
            return None
        units = [
            sum(
                -(-(stop - start) // PIECE_UNIT_ELEMENTS)
                for cut in self.pieces
                for start, stop in [cut[part]]
            )
            for part in range(self._node_size)
        ]
        self._clipper = Clipper(
            clip,
            between=self.between[device] if clip.scope == "global" else None,
            inside=self.inside.get(device),
            most_blocks=max(units),
        )
        return self._clipper

    def plan(self) -> ByteCount:
        """Declare what this rank will hand to the network between those who vote, in a step."""
        clipping = ByteCount() if self._clipper is None else self._clipper.plan()
        return sum((route.plan() for route in self.routes), clipping)

    def take_counted(self) -> tuple[ByteCount, ByteCount]:
        """Return what was sent since the last call: between those who vote, and inside the node."""
        between = sum((link.take_counted() for link in self.between.values()), ByteCount())
        inside = sum((link.take_counted() for link in self.inside.values()), ByteCount())
        return between, inside
