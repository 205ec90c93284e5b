"""The settings of ``DistributedLion`` that do not change from step to step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal

from torch import Tensor

from distlion.errors import InvalidArgumentError, UnsupportedTypeError
from distlion.numpy_numbers import keep_as_python
from distlion.step.agreement import Agreement
from distlion.step.arguments import check_choice, check_count, check_record
from distlion.step.clipping import ClipNorm
from distlion.step.momentum import MomentumSync
from distlion.step.nodes import Nodes
from distlion.step.precision import Precision
from distlion.step.replicas import Replicas
from distlion.step.timeouts import Timeouts
from distlion.votes.aggregation import Aggregation
from distlion.votes.roster import MOST_WEIGHT
from distlion.wire.pattern import Exchange
from distlion.wire.registry import list_patterns

DEFAULT_BUCKET_ELEMENTS = 64 * 1024 * 1024


@dataclass(frozen=True)
class Settings:
    """Arguments of ``DistributedLion``, which documents them; validated at construction."""

    exchange: Exchange | Literal["auto"] = "auto"
    nodes: Nodes | None = None
    momentum_sync: MomentumSync | None = None
    overlap: bool | Literal["auto"] = False
    nonfinite: Literal["raise", "skip", "abstain"] = "raise"
    clip_norm: ClipNorm | None = None
    bucket_elements: int | None = None
    replicas: Replicas = Replicas()
    agreement: Agreement = Agreement()
    precision: Precision = Precision()
    timeouts: Timeouts = Timeouts()
    seed: int = 0
    weight: int = 1

    def __post_init__(self) -> None:
        keep_as_python(self, "bucket_elements", "seed", "weight")
        if self.exchange != "auto" and not isinstance(self.exchange, Exchange):
            raise UnsupportedTypeError(
                f"exchange={self.exchange!r}: expected 'auto', or one of {list_patterns()}"
            )
        check_record("nodes", self.nodes, Nodes, or_none=True)
        check_record("momentum_sync", self.momentum_sync, MomentumSync, or_none=True)
        self._check_momenta_travel()
        if self.overlap != "auto" and not isinstance(self.overlap, bool):
            raise UnsupportedTypeError(f"overlap={self.overlap!r}: expected True, False or 'auto'")
        check_record("clip_norm", self.clip_norm, ClipNorm, or_none=True)
        if self.overlap and self.clip_norm is not None:
            raise InvalidArgumentError(
                "clip_norm= needs all gradients before the first vote, and "
                f"overlap={self.overlap!r} sends votes while gradients still arrive; choose one"
            )
        check_choice("nonfinite", self.nonfinite, ("raise", "skip", "abstain"))
        check_record("replicas", self.replicas, Replicas)
        check_record("agreement", self.agreement, Agreement)
        check_record("precision", self.precision, Precision)
        check_record("timeouts", self.timeouts, Timeouts)
        self._check_exclusion()
        check_count("bucket_elements", self.bucket_elements, or_none=True)
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise UnsupportedTypeError(f"seed={self.seed!r}: expected an integer")
        if not 0 <= self.seed < 1 << 64:
            raise InvalidArgumentError(f"seed={self.seed}: expected 0 to 2^64 - 1")

    @property
    def bucket_limit(self) -> int:
        """Most elements of several parameters in a bucket.

        None stands for 64 Mi: every further bucket adds latency and, without overlap, has no
        benefit. With overlap, a smaller number may be chosen.
        """
        return self.bucket_elements or DEFAULT_BUCKET_ELEMENTS

    def node_size(self, world_size: int) -> int:
        """Return the number of ranks of a node; 1 without nodes.

        Raises:
            InvalidArgumentError: The number of workers is not a multiple of it.
        """
        if self.nodes is None or world_size == 1:
            return 1
        return self.nodes.resolve(world_size)

    def _check_exclusion(self) -> None:
        if not self.agreement.excludes:
            return
        is_global = self.clip_norm is not None and self.clip_norm.scope == "global"
        for name, is_mean, remedy in (
            ("momentum_sync", self.momentum_sync is not None, "Leave momentum_sync out"),
            ("clip_norm", is_global, "Use scope='worker'"),
        ):
            if is_mean:
                raise InvalidArgumentError(
                    f"{self.agreement} and {name}={getattr(self, name)!r}, a mean over all "
                    "workers, which includes those whose votes do not count. Expected no mean over "
                    f"workers. {remedy}, or on_disagreement='warn'"
                )

    def check_rule(self, rule: Aggregation) -> None:
        """Check that the rule of a param group suits the other settings.

        Raises:
            InvalidArgumentError: It does not.
        """
        if isinstance(self.exchange, Exchange):
            self.exchange.check_carries(rule.shape_of(1, 2), rule)
        if self.agreement.excludes and rule.worker_state:
            raise InvalidArgumentError(
                f"{self.agreement} and aggregation={rule!r}, which counts what a worker sent in "
                "earlier steps too. Expected a rule without memory, such as MajorityVote(). Or use "
                "on_disagreement='warn'"
            )

    def check_leaves(self, params: Sequence[Tensor], names: Mapping[Tensor, str]) -> None:
        """Check that torch can tell when each parameter's gradient has arrived.

        Raises:
            InvalidArgumentError: Overlap needs it, and a parameter is not a leaf.
        """
        for param in params if self.overlap else ():
            if not param.is_leaf:
                raise InvalidArgumentError(
                    f"overlap={self.overlap!r} and {names[param]}, which is not a leaf: torch does "
                    "not tell when such a gradient is complete. Pass overlap=False, or a leaf"
                )

    def _check_momenta_travel(self) -> None:
        if (
            self.momentum_sync is not None
            and isinstance(self.exchange, Exchange)
            and self.exchange.counts_in_parts
        ):
            raise InvalidArgumentError(
                f"exchange={self.exchange!r} counts votes in parts, and momentum_sync= averages "
                "floats, whose sums depend on their order; pass exchange=AllReduce(), or leave "
                "momentum_sync out"
            )

    def find_weight_problem(self) -> str:
        """Explain why ``weight`` cannot be used; return "" if it can.

        The constructor does not check it: if one worker raised alone, the others would wait. They
        learn of it in the handshake.
        """
        weight: object = self.weight
        if not isinstance(weight, int) or isinstance(weight, bool):
            return f"weight={weight!r}: expected an integer from 1 to {MOST_WEIGHT}"
        if not 1 <= weight <= MOST_WEIGHT:
            return (
                f"weight={weight}: expected 1 to {MOST_WEIGHT}. Only ratios matter: divide the "
                "weights of all workers by the same number"
            )
        if weight > 1 and self.momentum_sync is not None:
            return (
                f"weight={weight} and momentum_sync={self.momentum_sync!r}, which averages momenta "
                "of workers that count alike. Expected one of them. Leave momentum_sync out"
            )
        if weight > 1 and self.clip_norm is not None and self.clip_norm.scope == "global":
            return (
                f"weight={weight} and clip_norm={self.clip_norm!r}, whose norm is a mean over "
                "workers that count alike. Expected one of them. Use scope='worker'"
            )
        pattern = self.exchange
        if weight > 1 and isinstance(pattern, Exchange) and pattern.counts_in_parts:
            return (
                f"weight={weight} and exchange={pattern!r}, which adds votes that count alike. "
                "Expected one of them. Use exchange=AllReduce()"
            )
        return ""

    def describe(self) -> list[str]:
        """List a line for each setting that must be equal on all workers."""
        apart = ("timeouts", "momentum_sync", "weight")
        sync = self.momentum_sync
        return [
            f"momentum_sync: {None if sync is None else sync.describe()}",
            *(
                f"{field.name}: {getattr(self, field.name)!r}"
                for field in fields(self)
                if field.name not in apart
            ),
        ]
