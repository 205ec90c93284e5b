"""The methods of the study: those of ``distlion compare``, and momentum after the vote."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from delayed import DELAYED, Delayed
from feedback import FeedbackVote
from inner_kinds import build_over, find_head, split_inner
from masked import MaskedVote
from scaled_votes import build_scaled
from schedule import DECAY_PER_STEP, Run
from torch import Tensor, nn
from variants import STOCHASTIC, VARIANTS, VariantVote
from weighed_votes import WeighedVotes, Weighing

from distlion.errors import InvalidArgumentError
from distlion.optim import Lion
from distlion.virtual import VirtualCluster
from distlion.votes import RULES, Aggregation, QuantizedVote
from distlion.votes.full_precision import FullPrecision
from distlion.votes.ternary import TernaryVote
from distlion_lab.baselines.half import HalfPrecision
from distlion_lab.baselines.one_bit_adam import OneBitAdam
from distlion_lab.baselines.power_sgd import PowerSGD
from distlion_lab.baselines.virtual import VirtualBaseline
from distlion_lab.training.methods import find_method
from distlion_lab.training.name_parts import split_betas
from distlion_lab.training.workers import LION_BETAS, MethodRun, VirtualVoting, name_matrices

SHARED_BETA = 0.9
_SHARED = re.compile(r"shared-(?P<rule>.+?)(-b(?P<beta>\d+))?")
_FULL_RANGE = re.compile(r"quantized-(?P<bits>\d)-linf-full")
_FEEDBACK_BITS = {"feedback": 1, "feedback-2": 2}
_LIBRARY = "library-"
_BY_FAN_IN, _PLAIN_FAN_IN = "orthogonal-fan-in", 64
_SGD = ("global-sgd", "dgc")
_SGD_DECAY = 5e-4
_MASKED, _MASKED_COIN, _ONE_BIT_ADAM = "masked", "masked-coin", "one-bit-adam"
_DECAY = re.compile(r"(?P<base>.+)-decay-(?P<factor>025|4)")
_UNDER_ADAMW = {"fp16-adamw": HalfPrecision(), "powersgd-adamw": PowerSGD()}


class Method(Protocol):
    """N workers that take turns with one model, then step together."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer whose learning rate the schedule sets."""

    @property
    def up_bits_per_parameter(self) -> float:
        """Return the bits from worker to server, for each parameter and step."""

    @property
    def down_bits_per_parameter(self) -> float:
        """Return the bits from server to worker, for each parameter and step."""

    def collect(self, worker: int) -> None:
        """Take every ``p.grad`` as the gradient of a worker, and clear it."""

    def step(self) -> None:
        """Move the parameters."""


def build_method(name: str, model: nn.Module, run: Run) -> Method:
    """Build a method by name.

    ``shared-RULE`` and ``shared-RULE-b95`` are momentum after the vote, of weight 0.9 or 0.95;
    ``quantized-P-linf-full`` is scaled by the maximum, with the highest level at it;
    ``majority-full-vectors`` sends norms and biases in full and ``majority-ternary-embeddings``
    votes on embeddings with zeros, ``feedback`` has error feedback, ``feedback-2`` with two bits,
    and these may have other betas, as ``-betas-90-95`` at the end; ``fp16-adamw`` and
    ``powersgd-adamw`` are AdamW on a mean that is rounded or of low rank; those of ``variants``
    differ from a majority vote in one thing; other names are those of ``distlion compare``, and
    so is what follows ``library-``: error feedback has a loop of its own here, older than the rule.
    ``majority-every-8`` takes local steps and votes on their deltas. ``weighted`` and ``gated``
    weigh workers by their agreement.
    ``orthogonal-fan-in`` is an orthogonalized vote with rates by fan-in.
    ``masked`` applies the mask of cautious votes where votes are counted, ``masked-coin`` tosses a
    coin for what it masks, and ``one-bit-adam`` is 1-bit Adam. ``-over-muon`` and
    ``-over-grouped-lion`` behind a method with local steps replace their AdamW. ``-decay-025`` or
    ``-decay-4`` at the end multiplies the weight decay. ``delayed-`` in front commits each step
    after the next backward pass.

    Raises:
        InvalidArgumentError: There is no such method.
    """
    method = _build_in_time(name.removeprefix(DELAYED), model, run)
    if name.startswith(DELAYED):
        return Delayed(method, list(model.parameters()), run.steps)
    return method


def _build_in_time(name: str, model: nn.Module, run: Run) -> Method:
    params = list(model.parameters())
    variant = VARIANTS.get(name) or STOCHASTIC.get(name)
    if variant is not None:
        chosen = name_matrices(model, head=find_head(model))
        names = [name for name, _ in model.named_parameters()]
        matrices = {index for index, each in enumerate(names) if each in chosen}
        return VariantVote(params, run, variant, matrices)
    name, factor = split_decay(name)
    run = replace(run, decay=factor * run.decay)
    if name == "median-lion":
        return MedianLion(params, run)
    if shared := _SHARED.fullmatch(name):
        if shared["rule"] not in RULES:
            raise InvalidArgumentError(f"method {name!r}: there is no rule {shared['rule']!r}")
        beta = float(f"0.{shared['beta']}") if shared["beta"] else SHARED_BETA
        return SharedMomentum(params, RULES[shared["rule"]].rule, run, beta=beta)
    if name in _UNDER_ADAMW:
        adamw = torch.optim.AdamW(params, run.lr, weight_decay=run.decay / run.lr)
        compression = _UNDER_ADAMW[name]
        return VirtualBaseline(adamw, workers=run.workers, compression=compression, seed=run.seed)
    entry = MethodRun(
        params=list(model.named_parameters()),
        lr=run.lr,
        weight_decay=_SGD_DECAY if name in _SGD else run.decay / run.lr,
        workers=run.workers,
        steps=run.steps,
        seed=run.seed,
        matrices=name_matrices(model, head=find_head(model)),
    )
    if split_inner(name)[1]:
        return build_over(name, model, entry)
    if name.startswith(_LIBRARY):
        return find_method(name.removeprefix(_LIBRARY)).enter(entry)
    base, betas = split_betas(name)
    if base == _BY_FAN_IN:
        return _vote_by_fan_in(entry, betas or LION_BETAS)
    if base in (_MASKED, _MASKED_COIN, _ONE_BIT_ADAM, *_FEEDBACK_BITS):
        return _build_loop(base, params, run, betas or LION_BETAS)
    if base in _RULES_OF_SOME:
        return _vote_by_kind(model, entry, *_RULES_OF_SOME[base], betas=betas or LION_BETAS)
    if full := _FULL_RANGE.fullmatch(base):
        bits = int(full["bits"])
        rule = QuantizedVote(bits=bits, norm="linf", step=2.0 ** (1 - bits))
        return VirtualVoting.build(entry, rule, betas=betas or LION_BETAS)
    return _enter(name, entry)


def _enter(name: str, entry: MethodRun) -> Method:
    """Build a vote weighed by agreement, a vote on scaled deltas, or what comparisons know."""
    if name in list(Weighing):
        return WeighedVotes(entry, Weighing(name))
    return build_scaled(name, entry) or find_method(name).enter(entry)


def split_decay(name: str) -> tuple[str, float]:
    """Split a name into what is before ``-decay-025`` or ``-decay-4``, and the factor."""
    match = _DECAY.fullmatch(name)
    if match is None:
        return name, 1.0
    return match["base"], 0.25 if match["factor"] == "025" else 4.0


def _build_loop(
    base: str, params: Sequence[nn.Parameter], run: Run, betas: tuple[float, float]
) -> Method:
    """Build a method that has a loop of its own here."""
    if base == _ONE_BIT_ADAM:
        return OneBitAdam(params, lr=run.lr, decay=run.decay, workers=run.workers, steps=run.steps)
    if base in (_MASKED, _MASKED_COIN):
        return MaskedVote(params, run, betas=betas, coin=base == _MASKED_COIN)
    return FeedbackVote(params, run, betas=betas, bits=_FEEDBACK_BITS[base])


def _vote_by_kind(
    model: nn.Module,
    entry: MethodRun,
    choose: Callable[[nn.Module], list[nn.Parameter]],
    rule: Aggregation,
    *,
    betas: tuple[float, float],
) -> VirtualVoting:
    """Build a majority vote in which the chosen parameters have a rule of their own."""
    chosen = {id(param) for param in choose(model)}
    groups = [
        {"params": [named for named in entry.params if id(named[1]) not in chosen]},
        {
            "params": [named for named in entry.params if id(named[1]) in chosen],
            "aggregation": rule,
        },
    ]
    cluster = VirtualCluster(
        [group for group in groups if group["params"]],
        entry.lr,
        betas,
        workers=entry.workers,
        weight_decay=entry.weight_decay,
        aggregation=RULES["majority"].rule,
        seed=entry.seed,
    )
    # Rules do not share a bucket, and their exchanges are under way together.
    return VirtualVoting(cluster, VirtualVoting.build(entry, rule).rounds)


def _vote_by_fan_in(entry: MethodRun, betas: tuple[float, float]) -> VirtualVoting:
    """Build orthogonalized votes in which a matrix's rate is multiplied by sqrt(64 / fan-in)."""
    groups: list[dict[str, Any]] = []
    for group in entry.group(orthogonalize=True):
        if not group.get("orthogonalize", False):
            groups.append(group)
            continue
        for name, param in group["params"]:
            factor = math.sqrt(_PLAIN_FAN_IN / param[0].numel())
            # Decay stays the same share of a weight.
            own = {"params": [(name, param)], "weight_decay": entry.weight_decay / factor}
            groups.append(group | own | {"rate_factor": factor})
    cluster = VirtualCluster(
        groups,
        entry.lr,
        betas,
        workers=entry.workers,
        weight_decay=entry.weight_decay,
        aggregation=RULES["majority"].rule,
        seed=entry.seed,
    )
    return VirtualVoting(cluster, VirtualVoting.build(entry, RULES["majority"].rule).rounds)


def _list_vectors(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.ndim <= 1]


def _list_embeddings(model: nn.Module) -> list[nn.Parameter]:
    return [each.weight for each in model.modules() if isinstance(each, nn.Embedding)]


_RULES_OF_SOME = {
    "majority-full-vectors": (_list_vectors, FullPrecision()),
    "majority-ternary-embeddings": (_list_embeddings, TernaryVote()),
}


class SharedMomentum:
    """Workers that vote on gradients, and one momentum that is kept of the outcomes.

    Equation:
        S = vote(g_1, ..., g_N);  y' = b y + (1 - b) S;  x' = (1 - lr wd) x - lr y'
        (signSGD with majority vote, arXiv:1810.05291, its momentum after the aggregation)

    Each worker would hold the same y, so it is kept once. The votes are those of ``VirtualCluster``
    without momenta, on parameters that stand in for the model's: they begin a step at 0 with a
    rate of 1 and therefore end it at -S.

    Args:
        params: Of the model.
        rule: What a worker sends, and how votes are counted.
        run: Rate, workers and seed.
        beta: Weight of the momentum, in [0, 1).
    """

    def __init__(
        self, params: Sequence[nn.Parameter], rule: Aggregation, run: Run, *, beta: float
    ) -> None:
        self._params = params
        self._beta = beta
        self._outcomes = [nn.Parameter(torch.zeros_like(param).contiguous()) for param in params]
        self._momenta = [torch.zeros_like(each) for each in self._outcomes]
        self._votes = VirtualCluster(
            self._outcomes,
            1.0,
            (0.0, 0.0),
            workers=run.workers,
            aggregation=rule,
            seed=run.seed,
        )
        # It moves by lr y; the decay is done before.
        self.optimizer = torch.optim.SGD(params, run.lr)
        self._decay = DECAY_PER_STEP / run.lr

    @property
    def up_bits_per_parameter(self) -> float:
        return self._votes.up_bits_per_parameter

    @property
    def down_bits_per_parameter(self) -> float:
        return self._votes.down_bits_per_parameter

    def collect(self, worker: int) -> None:
        for param, outcome in zip(self._params, self._outcomes, strict=True):
            outcome.grad = None if param.grad is None else param.grad.contiguous()
            param.grad = None
        self._votes.collect(worker)

    @torch.no_grad()
    def step(self) -> None:
        self._votes.step()
        kept = 1 - float(self.optimizer.param_groups[0]["lr"]) * self._decay
        for param, outcome, momentum in zip(
            self._params, self._outcomes, self._momenta, strict=True
        ):
            _mix_(momentum, outcome, beta=self._beta)
            outcome.zero_()
            param.mul_(kept)
            param.grad = momentum.clone()
        self.optimizer.step()
        for param in self._params:
            param.grad = None


class MedianLion:
    """Workers whose gradients are sent whole, and Lion on the median of each element.

    Args:
        params: Of the model.
        run: Rate and workers.
    """

    up_bits_per_parameter = 32.0
    down_bits_per_parameter = 32.0

    def __init__(self, params: Sequence[nn.Parameter], run: Run) -> None:
        self._params = params
        self._held: list[list[Tensor]] = []
        self.optimizer = Lion(params, run.lr, LION_BETAS, weight_decay=DECAY_PER_STEP / run.lr)

    def collect(self, worker: int) -> None:
        grads = [param.grad for param in self._params]
        self._held.append([grad for grad in grads if grad is not None])
        for param in self._params:
            param.grad = None

    def step(self) -> None:
        for param, grads in zip(self._params, zip(*self._held, strict=True), strict=True):
            # torch.median takes the lower one of two in the middle.
            ordered = torch.stack(grads).sort(dim=0).values
            low, high = (len(grads) - 1) // 2, len(grads) // 2
            param.grad = (ordered[low] + ordered[high]) / 2
        self._held.clear()
        self.optimizer.step()
        for param in self._params:
            param.grad = None


def _mix_(momentum: Tensor, outcome: Tensor, *, beta: float) -> None:
    """Set ``momentum`` to b y + (1 - b) S, where ``outcome`` is -S."""
    momentum.mul_(beta).sub_(outcome, alpha=1 - beta)
