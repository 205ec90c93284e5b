"""What the workers of one process share: settings, places, momenta, traffic, saved state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from distlion.aggregation import Aggregation
from distlion.errors import (
    CheckpointError,
    InvalidArgumentError,
    SparseGradientError,
    UnsupportedTypeError,
)
from distlion.exchange import MAX_WORKERS, ByteCount, Exchange
from distlion.layout import fill_buckets
from distlion.optim import Traffic, VotingBase
from distlion.optim.arguments import list_group
from distlion.virtual.poll import Poll
from distlion.voting import (
    Diagnosis,
    Examiner,
    MomentumStage,
    Settings,
    describe_sparse,
    plan_norms,
)

# Of a mean momentum on its way back.
_MEAN_BITS = 32

Grads = Sequence[Tensor | None]


@dataclass
class _Account:
    """What one worker hands to the network in a step.

    Attributes:
        votes: For votes, and what precedes them.
        rest: For what follows only a vote that succeeded.
        up_bits, down_bits: Of votes and replies, as papers count: without frames and shards.
        momenta_up_bits, momenta_down_bits: Of momenta.
    """

    votes: ByteCount = field(default_factory=ByteCount)
    rest: ByteCount = field(default_factory=ByteCount)
    up_bits: int = 0
    down_bits: int = 0
    momenta_up_bits: float = 0.0
    momenta_down_bits: int = 0


class AssembledCluster(VotingBase):
    """Parameters, and the momenta of all workers, shape (workers, *param.shape).

    Args:
        params: As for every torch optimizer.
        defaults: Of param groups.
        workers: Their number.
        settings: What does not change from step to step.
        exp_avg_dtype: Of the momenta; None for the parameter's.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        betas: tuple[float, float],
        *,
        workers: int,
        weight_decay: float,
        aggregation: Aggregation | None,
        settings: Settings,
        exp_avg_dtype: torch.dtype | None,
    ) -> None:
        self._workers = check_workers(workers)
        self._settings = settings
        self._traffic = Traffic()
        self._up_bits = self._down_bits = 0.0
        self._is_torn = False
        self._examiner: Examiner | None = None
        self._ready = False
        super().__init__(
            params,
            lr,
            betas,
            weight_decay=weight_decay,
            aggregation=aggregation,
            rounding=settings.rounding,
            exp_avg_dtype=exp_avg_dtype,
        )
        self._ready = True
        self._lay_out()

    @property
    def workers(self) -> int:
        """Number of workers."""
        return self._workers

    @property
    def traffic(self) -> Traffic:
        """What one worker would have handed to the network; not the one that serves."""
        return self._traffic

    @property
    def up_bits_per_parameter(self) -> float:
        """Bits of a worker's votes and momenta for each coordinate, the mean of all steps."""
        return self._up_bits / max(1, self._traffic.steps * self._n_elements)

    @property
    def down_bits_per_parameter(self) -> float:
        """Bits of the replies for each coordinate, the mean of all steps."""
        return self._down_bits / max(1, self._traffic.steps * self._n_elements)

    def diagnostics(self) -> list[Diagnosis]:
        """Return how far workers agreed, as ``DistributedLion.diagnostics``."""
        return [] if self._examiner is None else self._examiner.found

    def exp_avg(self, worker: int) -> list[Tensor]:
        """Return the momenta of a worker: views, one for each trainable parameter in order."""
        self._check_worker(worker)
        return [param.exp_avg[worker] for param in self._params]

    def _lay_out(self) -> None:
        self._params = self._list_trainable()
        self._n_elements = sum(param.slot.n_elements for param in self._params)
        self._buckets = fill_buckets(
            [param.slot for param in self._params],
            [param.kind for param in self._params],
            n_shards=self._workers,
            bucket_elements=self._settings.bucket_limit,
        )
        sync, every = self._settings.momentum_sync, self._settings.diagnose_every
        n_workers, seed = self._workers, self._settings.seed
        self._momenta = None
        if sync is not None:
            stage = MomentumStage(
                sync, self.param_groups, self._params, n_workers=n_workers, seed=seed
            )
            self._momenta = stage if n_workers > 1 else None
        if every is not None and n_workers > 1:
            self._examiner = Examiner(
                every, self._params, n_workers=n_workers, seed=seed, earlier=self._examiner
            )
        self._begin_step()

    def _begin_step(self) -> None:
        """Forget all that was collected."""
        self._collected: set[int] = set()
        self._held: dict[int, Grads] = {}
        self._absorbed = False
        self._samples: dict[int, list[float]] = {}
        self._polls: list[Poll] = []
        if self._workers > 1:
            self._polls = [
                Poll.open(bucket, self._params, workers=self._workers) for bucket in self._buckets
            ]

    def _draw_account(self) -> _Account:
        """Sum up what a step will send, before it changes what the next one will."""
        step, last = self.committed_step, self._workers - 1
        pattern = self._settings.exchange
        assert isinstance(pattern, Exchange)
        account = _Account()
        for poll in self._polls:
            account.votes += pattern.plan(poll.rule.shape(poll.bucket), last)
            n_elements = sum(slot.n_elements for slot in poll.bucket.slots)
            account.up_bits += n_elements * poll.rule.vote_planes
            account.down_bits += n_elements * poll.rule.reply_planes(self._workers)
        clip = self._settings.clip_norm
        if self._workers > 1 and clip is not None and clip.scope == "global":
            account.votes += plan_norms(self._workers)
        if self._examiner is not None:
            account.rest += self._examiner.plan(step)
        if self._momenta is not None:
            account.rest += self._momenta.plan(step, pattern, last)
            for rows in self._momenta.list_rows(step):
                account.momenta_up_bits += rows.up_bits
                account.momenta_down_bits += rows.n_elements * _MEAN_BITS
        return account

    def _count_traffic(self, account: _Account, *, committed: bool) -> None:
        """Count a step; one that was skipped ended with its votes."""
        self._up_bits += account.up_bits + account.momenta_up_bits * committed
        self._down_bits += account.down_bits + account.momenta_down_bits * committed
        sent = account.votes + account.rest if committed else account.votes
        self._traffic = self._traffic.add_step(sent, ByteCount(), self._n_elements)

    def _check_worker(self, worker: int) -> None:
        if not 0 <= worker < self._workers:
            raise InvalidArgumentError(
                f"there is no worker {worker} among {self._workers}; expected 0 to "
                f"{self._workers - 1}"
            )

    def _check_whole(self) -> None:
        if self._is_torn:
            raise CheckpointError(
                "a worker's gradient was not finite after others had been collected, so that "
                f"momenta are past step {self.committed_step} and parameters are not; start again, "
                "with "
                "nonfinite='skip' or 'abstain' if such steps are to be survived"
            )

    def _check_grads(self, worker: int) -> None:
        """Refuse what no worker can vote with."""
        known = {param.param for param in self._params}
        for tensor, name in self._param_names().items():
            if tensor.requires_grad and tensor not in known:
                raise InvalidArgumentError(
                    f"{name} was frozen when this cluster was made and requires a gradient now; "
                    "make a new cluster and load the state into it"
                )
        for param in self._params:
            if param.has_sparse_grad():
                raise SparseGradientError(
                    describe_sparse(param.name), rank=worker, step=self.committed_step
                )

    def _momentum_shape(self, param: Tensor) -> torch.Size:
        return torch.Size([self._workers, *param.shape])

    def _take_momentum(self, param: Tensor, exp_avg: Tensor) -> Tensor:
        """Return all workers' momenta; that of a single Lion becomes everybody's."""
        return exp_avg.expand(self._momentum_shape(param))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, checked as in the constructor, between two steps.

        Raises:
            InvalidArgumentError, UnsupportedTypeError: As in the constructor, or workers have been
                collected for the present step.
        """
        if not self._ready:
            super().add_param_group(param_group)
            return
        self._check_idle("add_param_group()")
        super().add_param_group({**list_group(param_group), "step": self.committed_step})
        self._lay_out()

    def state_dict(self) -> dict[str, Any]:
        """Return the state: tensors, numbers and strings only; rules as their ``repr``."""
        self._check_whole()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of a cluster of as many workers, or that of one Lion for all of them.

        Raises:
            CheckpointError: Groups, shapes, momenta, steps or rules do not fit.
            InvalidArgumentError: Workers have been collected for the present step.
        """
        self._check_idle("load_state_dict()")
        self._load_state(self._parse_state(state_dict, self._settings.momentum_sync))
        self._is_torn = False
        self._lay_out()

    def _check_idle(self, call: str) -> None:
        if self._collected and not self._is_torn:
            raise InvalidArgumentError(
                f"{call} after workers {sorted(self._collected)} were collected; call step() before"
            )


def check_workers(workers: int) -> int:
    """Return the number of workers, if it is one."""
    if not isinstance(workers, int) or isinstance(workers, bool):
        raise UnsupportedTypeError(f"workers={workers!r}: expected an integer")
    if not 1 <= workers <= MAX_WORKERS:
        raise InvalidArgumentError(f"workers={workers}: expected 1 to {MAX_WORKERS}")
    return workers


def check_pattern(exchange: Any) -> Exchange:
    """Return the pattern whose bytes are counted, if it is one."""
    if not isinstance(exchange, Exchange):
        raise UnsupportedTypeError(
            f"exchange={exchange!r}: expected AllReduce(), AllGather() or "
            "ParameterServer(); without a network 'auto' has nothing to measure"
        )
    return exchange
