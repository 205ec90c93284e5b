"""Majority votes that weigh workers by how far they agree.

A study of them; what it led to is ``Agreement(on_disagreement="exclude")``.
"""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor

from distlion.errors import InvalidArgumentError, NonFiniteError
from distlion.kernels import Coin, Coins
from distlion.kernels.words import coin_bits, unpack
from distlion.layout import place_parameters
from distlion.votes import MajorityVote
from distlion.wire import AllReduce
from distlion_lab.training.workers import LION_BETAS, MethodRun

DECAY = 0.95
"""Weight of the past in a running agreement: about 20 steps of it."""
FIRST_AGREEMENT = 0.75
LEAST_SHARE, MOST_SHARE = 0.02, 0.98
MOST_WEIGHT = 7
GATE = 0.5
"""A worker that agrees less with the others does not count."""
_NUMBER_BYTES = 4


class Weighing(str, Enum):
    """Map from a worker's agreement to its weight."""

    RUNNING = "weighted"
    GATED = "gated"


class WeighedVotes:
    """N workers that vote by signs, each counted by its running agreement.

    Equation:
        c_i = beta1 m_i + (1 - beta1) g_i;  m_i' = beta2 m_i + (1 - beta2) g_i
        S = sign(sum_i w_i sign(c_i)), ties and zeros by the coin;  x' = (1 - lr wd) x - lr S
        a_i <- 0.95 a_i + 0.05 share_i, from 0.75
        weighted: share_i of the elements where sign(c_i) = S;
                  w_i = round(7 l_i / max_j l_j), l_i = max(0, log(a_i / (1 - a_i)))
        gated: share_i where sign(c_i) is the majority of the others, of those without a tie there;
               w_i = 1 if a_i > 0.5, else 0
        In log(), a_i is kept within 0.02 and 0.98. Where all w_i would be 0, all are 1.

    Args:
        run: The model, rate and N.
        weighing: Which of the two.
        betas: (beta1, beta2), each in [0, 1).

    Attributes:
        optimizer: Steps on S; a scheduler sets its rate.
        agreement: (N,) float64, a_i after the last step.
        rounds: Messages of a step that wait for each other.

    Raises:
        InvalidArgumentError: ``workers`` is less than 1.

    Notes:
        With equal weights this is ``MajorityVote``, bitwise, for N of 2 or more. A gradient that is
        missing counts as 0. Beside the votes, as one bucket, a worker sends each other one number:
        its own share ("weighted"), or N counts of its shard ("gated").
    """

    up_bits_per_parameter = 1.0
    down_bits_per_parameter = 1.0

    def __init__(
        self, run: MethodRun, weighing: Weighing, *, betas: tuple[float, float] = LION_BETAS
    ) -> None:
        if run.workers < 1:
            raise InvalidArgumentError(f"workers is {run.workers}; expected 1 or more")
        self._run, self._weighing, self._betas = run, weighing, betas
        self._params = [param for _, param in run.params]
        self._sizes = [param.numel() for param in self._params]
        self._slots = place_parameters([name for name, _ in run.params], self._sizes)
        # It moves by lr S; the decay is done before.
        self.optimizer = torch.optim.SGD(self._params, run.lr)
        self.agreement = torch.full(
            (run.workers,), FIRST_AGREEMENT, dtype=torch.float64, device="cpu"
        )
        device = self._params[0].device
        self._momenta = torch.zeros(run.workers, run.n_elements, dtype=torch.float32, device=device)
        self._votes: list[Tensor] = []
        self._done = 0
        shape = MajorityVote().shape_of(run.n_elements, run.workers)
        is_alone = run.workers == 1
        self.rounds = 0 if is_alone else AllReduce().cost(shape).rounds + 1
        numbers = run.workers if weighing is Weighing.GATED else 1
        self._step_bytes = _NUMBER_BYTES * numbers * (run.workers - 1)
        if not is_alone:
            self._step_bytes += AllReduce().plan(shape, 0).sent_bytes

    @property
    def sent_bytes(self) -> int:
        """Bytes that each of N processes would have sent in all steps so far."""
        return self._done * self._step_bytes

    @property
    def weights(self) -> Tensor:
        """Weights of the next vote: (N,) float64, whole numbers."""
        if self._weighing is Weighing.GATED:
            weights = (self.agreement > GATE).double()
        else:
            odds = self.agreement.clamp(LEAST_SHARE, MOST_SHARE).logit().clamp(min=0.0)
            weights = (MOST_WEIGHT * odds / odds.max().clamp(min=1e-6)).round()
        return weights if bool(weights.any()) else torch.ones_like(weights)

    @torch.no_grad()
    def collect(self, worker: int) -> None:
        """Take every ``p.grad`` as the gradient of a worker, and clear it.

        Raises:
            InvalidArgumentError: It is not this worker's turn; nothing is taken.
            NonFiniteError: A direction is not finite.
        """
        if worker != len(self._votes) or worker == self._run.workers:
            raise InvalidArgumentError(
                f"worker {worker} is collected; expected worker {len(self._votes)} of "
                f"{self._run.workers}, then step()"
            )
        grad = torch.cat(
            [
                (torch.zeros_like(param) if param.grad is None else param.grad).flatten().float()
                for param in self._params
            ]
        )
        for param in self._params:
            param.grad = None
        momentum, (first, second) = self._momenta[worker], self._betas
        direction = momentum.mul(first).add_(grad.mul(1 - first))
        if not bool(direction.isfinite().all()):
            raise NonFiniteError(
                f"a direction of worker {worker} is not finite", rank=worker, step=self._done
            )
        momentum.mul_(second).add_(grad.mul(1 - second))
        self._votes.append(self._decide(direction, Coins(self._run.seed, self._done, worker).zero))

    @torch.no_grad()
    def step(self) -> None:
        """Count the votes, move the parameters, and note how far workers agreed.

        Raises:
            InvalidArgumentError: Not all workers were collected.
        """
        if len(self._votes) != self._run.workers:
            raise InvalidArgumentError(
                f"step() after {len(self._votes)} of {self._run.workers} workers"
            )
        votes = torch.stack(self._votes)
        # Sums of small whole numbers: exact in float32.
        total = self.weights.to(votes) @ votes
        outcome = self._decide(total, Coins(self._run.seed, self._done, 0).tie)
        self._note_agreement(votes, outcome)
        self._move(outcome)
        self._votes.clear()
        self._done += 1

    def _decide(self, values: Tensor, coin: Coin) -> Tensor:
        """Return signs, (n_elements,) of 1.0 and -1.0, where 0 is drawn from a coin."""
        signs = values.sign()
        if bool((signs == 0).any()):
            bits = [
                unpack(coin_bits(coin, slot, device=values.device), slot.n_elements)
                for slot in self._slots
            ]
            signs = torch.where(signs == 0, 2 * torch.cat(bits).to(signs) - 1, signs)
        return signs

    def _note_agreement(self, votes: Tensor, outcome: Tensor) -> None:
        """Update the running agreements by (N, n_elements) votes."""
        if self._weighing is Weighing.GATED:
            # Of those with a majority of the others; there is none at all for a single worker.
            products = votes * (votes.sum(0) - votes)
            agreed, compared = (products > 0).sum(1), (products != 0).sum(1)
        else:
            agreed = (votes == outcome).sum(1)
            compared = torch.full_like(agreed, votes.shape[1])
        share = (agreed.double() / compared.double().clamp(min=1)).to(self.agreement)
        share = torch.where(compared.to(self.agreement) > 0, share, self.agreement)
        self.agreement.mul_(DECAY).add_(share, alpha=1 - DECAY)

    def _move(self, outcome: Tensor) -> None:
        (group,) = self.optimizer.param_groups
        kept = 1 - float(group["lr"]) * self._run.weight_decay
        for param, signs in zip(self._params, torch.split(outcome, self._sizes), strict=True):
            param.mul_(kept)
            param.grad = signs.view_as(param).to(param.dtype)
        self.optimizer.step()
        for param in self._params:
            param.grad = None
