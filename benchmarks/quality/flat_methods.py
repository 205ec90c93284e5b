"""Methods of the study on flat rows, as operations that a CUDA graph can repeat.

Nothing here depends on numbers of the host: the step, and all that changes with it, is on the
device. On a CPU results are bitwise identical to those of the library and of
``torch.optim.AdamW``. CUDA may fuse a multiplication with an addition.

Rows are float32 tensors on the device: ``params`` (elements,), ``grads`` (workers, elements).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import study_path  # noqa: F401
import torch
from flat_layout import CoinTable, FlatLayout, ParameterMeans
from inner_kinds import find_head
from methods import split_decay
from runs import RunConfig
from schedule import Run, rate_factor
from torch import Tensor, nn

from distlion.kernels import matrix_shape, orthogonalize
from distlion_lab.baselines.muon import MOMENTUM, scale_update
from distlion_lab.training.inner import ADAMW_BETAS
from distlion_lab.training.name_parts import split_name
from distlion_lab.training.workers import LION_BETAS, name_matrices

_EPS = 1e-8
_SCALE_BITS = 32


@dataclass(frozen=True)
class Place:
    """Layout and size of the runs of a method.

    Attributes:
        layout: Of the parameters.
        workers: N.
        steps: Of a run.
        device: Where it trains.
        matrices: Numbers of the hidden weight matrices in the layout.
    """

    layout: FlatLayout
    workers: int
    steps: int
    device: torch.device
    matrices: tuple[int, ...] = ()

    def view_matrices(self, rows: Tensor) -> list[Tensor]:
        """Return a view (rows, out, rest) of each hidden matrix in rows (rows, elements)."""
        found = []
        for index in self.matrices:
            begin, size = self.layout.begins[index], self.layout.sizes[index]
            shape = matrix_shape(self.layout.shapes[index])
            assert shape is not None  # it is a matrix
            found.append(rows[:, begin : begin + size].unflatten(1, shape))
        return found


class FlatMethod(ABC):
    """Update rule applied to all workers' gradients.

    Args:
        place: What it is built for.
        betas: Its betas.

    Attributes:
        bits_up, bits_down: Bits of a worker's message and of the reply, for each parameter.
    """

    bits_up = bits_down = 32.0

    def __init__(self, place: Place, betas: tuple[float, float]) -> None:
        self._betas = betas
        self._place = place
        self._scalars = torch.zeros(place.steps, self._count_scalars(), device=place.device)
        self._states: list[Tensor] = []

    def start(self, run: Run) -> None:
        """Begin a run: states are 0, and the schedule is that of its rate."""
        for state in self._states:
            state.zero_()
        rows = [
            self._list_scalars(step, run.lr * rate_factor(step, run.steps), run.decay / run.lr)
            for step in range(run.steps)
        ]
        self._scalars.copy_(torch.tensor(rows, dtype=torch.float64))

    @abstractmethod
    def move(self, params: Tensor, grads: Tensor, step: Tensor) -> None:
        """Do a step: write ``params``; ``step`` is (1,) int64, from 0."""

    def _new_state(self, *shape: int) -> Tensor:
        self._states.append(torch.zeros(*shape, device=self._place.device))
        return self._states[-1]

    @abstractmethod
    def _count_scalars(self) -> int: ...

    @abstractmethod
    def _list_scalars(self, step: int, lr: float, weight_decay: float) -> list[float]:
        """Return what a step multiplies by, in double."""


class MeanAdamW(FlatMethod):
    """AdamW on the mean gradient."""

    def __init__(self, place: Place, betas: tuple[float, float]) -> None:
        super().__init__(place, betas)
        self._first = self._new_state(place.layout.length)
        self._second = self._new_state(place.layout.length)

    def move(self, params: Tensor, grads: Tensor, step: Tensor) -> None:
        kept, size, root = self._scalars[step][0][:3]
        grad = _mean(grads)
        params.mul_(kept)
        self._first.lerp_(grad, 1 - self._betas[0])
        self._second.mul_(self._betas[1]).addcmul_(grad, grad, value=1 - self._betas[1])
        params.sub_(self._first * size / (self._second.sqrt() / root + _EPS))

    def _count_scalars(self) -> int:
        return 3

    def _list_scalars(self, step: int, lr: float, weight_decay: float) -> list[float]:
        first, second = (1 - beta ** (step + 1) for beta in self._betas)
        return [1 - lr * weight_decay, lr / first, math.sqrt(second)]


class MeanMuon(MeanAdamW):
    """Muon on the mean gradient for hidden matrices, AdamW for all other parameters."""

    def __init__(self, place: Place, betas: tuple[float, float]) -> None:
        super().__init__(place, betas)
        self._momentum = self._new_state(place.layout.length)

    def move(self, params: Tensor, grads: Tensor, step: Tensor) -> None:
        grad = _mean(grads)
        self._momentum.lerp_(grad, 1 - MOMENTUM)
        ahead = self._place.view_matrices(grad.lerp(self._momentum, MOMENTUM).unsqueeze(0))
        kept, _, _, *sizes = self._scalars[step][0]
        moved = [
            each * kept - orthogonalize(direction[0]) * size
            for each, direction, size in zip(self._view(params), ahead, sizes, strict=True)
        ]
        super().move(params, grads, step)
        for each, value in zip(self._view(params), moved, strict=True):
            each.copy_(value)

    def _count_scalars(self) -> int:
        return 3 + len(self._place.matrices)

    def _list_scalars(self, step: int, lr: float, weight_decay: float) -> list[float]:
        shapes = [each.shape[1:] for each in self._place.view_matrices(self._first.unsqueeze(0))]
        sizes = [lr * scale_update((shape[0], shape[1])) for shape in shapes]
        return [*super()._list_scalars(step, lr, weight_decay), *sizes]

    def _view(self, params: Tensor) -> list[Tensor]:
        return [each[0] for each in self._place.view_matrices(params.unsqueeze(0))]


class _SignStep(FlatMethod):
    """x' = fl(fl(d x) - fl(a S)), where S is -1, 0 or 1."""

    def _move_by(self, params: Tensor, signs: Tensor, step: Tensor) -> None:
        kept, size = self._scalars[step][0]
        params.mul_(kept).sub_(signs * size)

    def _count_scalars(self) -> int:
        return 2

    def _list_scalars(self, step: int, lr: float, weight_decay: float) -> list[float]:
        return [1 - lr * weight_decay, lr]

    def _take(self, momenta: Tensor, grads: Tensor) -> Tensor:
        """Return directions, and move momenta."""
        directions = _blend(self._betas[0], momenta, grads)
        momenta.copy_(_blend(self._betas[1], momenta, grads))
        return directions


class MeanLion(_SignStep):
    """Lion on the mean gradient."""

    def __init__(self, place: Place, betas: tuple[float, float]) -> None:
        super().__init__(place, betas)
        self._momentum = self._new_state(place.layout.length)

    def move(self, params: Tensor, grads: Tensor, step: Tensor) -> None:
        self._move_by(params, self._take(self._momentum, _mean(grads)).sign(), step)


class _Vote(_SignStep):
    """Workers with momenta of their own, and coins.

    Args:
        cautious: Whether a worker masks its direction.
    """

    bits_up = bits_down = 1.0

    def __init__(self, place: Place, betas: tuple[float, float], *, cautious: bool) -> None:
        super().__init__(place, betas)
        self._cautious = cautious
        self._momenta = self._new_state(place.workers, place.layout.length)
        self._coins = CoinTable(place.layout, place.workers, place.steps, place.device)

    def start(self, run: Run) -> None:
        super().start(run)
        self._coins.start(run.seed)

    def _take_masked(self, grads: Tensor) -> Tensor:
        directions = self._take(self._momenta, grads)
        if not self._cautious:
            return directions
        agree = ((directions > 0) & (grads > 0)) | ((directions < 0) & (grads < 0))
        return torch.where(agree, directions, 0.0)


class Majority(_Vote):
    """One-bit votes."""

    def move(self, params: Tensor, grads: Tensor, step: Tensor) -> None:
        directions = self._take_masked(grads)
        ties, zeros = self._coins.draw(step)
        ones = (directions > 0) | ((directions == 0) & zeros)
        total = 2 * ones.sum(0, dtype=torch.int32) - len(ones)
        self._move_by(params, _sign_or_coin(total, ties[0]), step)


class OrthogonalMajority(Majority):
    """One-bit votes of hidden matrices on orthogonalized directions, and cautious ones elsewhere.

    On a device the products of all workers are one batch.
    """

    def __init__(self, place: Place, betas: tuple[float, float], *, cautious: bool) -> None:
        assert not cautious  # there is no such name
        super().__init__(place, betas, cautious=True)

    def _take_masked(self, grads: Tensor) -> Tensor:
        before = self._momenta.clone()
        voted = super()._take_masked(grads)
        matrices = self._place.view_matrices(_blend(self._betas[0], before, grads))
        for target, direction in zip(self._place.view_matrices(voted), matrices, strict=True):
            target.copy_(_orthogonalize_each(direction))
        return voted


def _orthogonalize_each(matrices: Tensor) -> Tensor:
    if matrices.device.type == "cpu":  # products of a batch round otherwise
        return torch.stack([orthogonalize(each) for each in matrices])
    return orthogonalize(matrices)


class TwoBitFeedback(_Vote):
    """Votes of two bits with error feedback: ``FeedbackVote(bits=2)``."""

    def __init__(self, place: Place, betas: tuple[float, float], *, cautious: bool) -> None:
        super().__init__(place, betas, cautious=cautious)
        self._estimates = self._new_state(place.workers, place.layout.length)
        self._means = ParameterMeans(place.layout, place.device)
        scales = 2 * _SCALE_BITS * len(place.layout.sizes)
        self.bits_up = 2 + scales / sum(place.layout.sizes)

    def move(self, params: Tensor, grads: Tensor, step: Tensor) -> None:
        ties, zeros = self._coins.draw(step)
        rests = self._take_masked(grads) - self._estimates
        sizes = rests.abs()
        total = self._means.add_up(sizes)
        is_large = sizes >= self._means.spread((total / self._means.counts).float())
        large, small = self._average(sizes, is_large), self._average(sizes, ~is_large)
        said = torch.where(is_large, self._means.spread(large), self._means.spread(small))
        is_positive = (rests > 0) | ((rests == 0) & zeros)
        self._estimates.add_(torch.where(is_positive, said, -said))
        summed = self._estimates[0].clone()
        for worker in range(1, len(self._estimates)):  # in order: the sum of float32 depends on it
            summed += self._estimates[worker]
        self._move_by(params, _sign_or_coin(summed, ties[0]), step)

    def _average(self, sizes: Tensor, chosen: Tensor) -> Tensor:
        """Return the mean of the chosen sizes of each parameter; 0 for none."""
        count = self._means.add_up(chosen).clamp(min=1)
        return (self._means.add_up(sizes.masked_fill(~chosen, 0.0)) / count).float()


def _mean(grads: Tensor) -> Tensor:
    total = grads[0]
    for grad in grads[1:]:
        total = total + grad
    return total / len(grads)


def _blend(beta: float, momenta: Tensor, grads: Tensor) -> Tensor:
    return momenta * beta + grads * (1.0 - beta)


def _sign_or_coin(total: Tensor, ties: Tensor) -> Tensor:
    return torch.where((total > 0) | ((total == 0) & ties), 1.0, -1.0)


_MEANS = {
    "global-adamw": (MeanAdamW, ADAMW_BETAS),
    "global-muon": (MeanMuon, ADAMW_BETAS),
    "global-lion": (MeanLion, LION_BETAS),
}
_VOTES = {
    "majority": Majority,
    "majority-orthogonal": OrthogonalMajority,
    "library-feedback-2": TwoBitFeedback,
}
_GROUPED = ("majority-orthogonal", "global-muon")


def has_flat_form(config: RunConfig) -> bool:
    """Return whether a run can be done here: even data, no attackers, and a method of these."""
    base, cautious, _ = split_name(split_decay(config.method)[0])
    is_known = base in _VOTES or (base in _MEANS and not cautious)
    return is_known and config.alpha is None and not config.attackers


def build_flat_method(name: str, place: Place) -> FlatMethod:
    """Build a method by its name in the study."""
    base, cautious, betas = split_name(split_decay(name)[0])
    if base in _MEANS:
        build, usual = _MEANS[base]
        return build(place, betas or usual)
    return _VOTES[base](place, betas or LION_BETAS, cautious=cautious)


def arrange(model: nn.Module, method: str) -> tuple[list[nn.Parameter], tuple[int, ...]]:
    """Return parameters in the order of the library's groups, and which are hidden matrices.

    Args:
        model: Of a run.
        method: Name. Only orthogonalized methods have groups.
    """
    matrices = name_matrices(model, head=find_head(model))
    is_grouped = split_name(split_decay(method)[0])[0] in _GROUPED
    named = sorted(
        model.named_parameters(), key=lambda item: is_grouped and item[0] not in matrices
    )
    chosen = (index for index, (name, _) in enumerate(named) if is_grouped and name in matrices)
    return [param for _, param in named], tuple(chosen)


def describe_run(config: RunConfig) -> Run:
    """Return rate, decay and seed of a run."""
    workers = max(1, config.workers)
    run = Run(lr=config.lr, workers=workers, steps=config.steps, seed=config.seed)
    return replace(run, decay=split_decay(config.method)[1] * run.decay)
