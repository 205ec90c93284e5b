"""A run: clients in one process, by votes or by FedAvg, and what one learns."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import study_path  # noqa: F401
import torch
import torch.nn.functional as F
from design import (
    BATCH,
    CLIENTS,
    LEAST_IMAGES,
    LOCAL_STEPS,
    MOMENTUM,
    NETWORK,
    SPREAD,
    Cell,
)
from images import Images, ImageTask, crop_and_flip
from torch import Tensor, nn

import distlion_flower
from distlion_flower.count import weigh
from distlion_lab.tasks.base import seeded_generator
from distlion_lab.tasks.partition import ByClass, Even

_BATCHES = 0x636C69656E74
MAX_WEIGHT = 10.0


class AveragedClients:
    """FedAvg with a server momentum, in the place of votes: the same rounds, 32 bits up.

    Equation:
        u = sum_i w_i d_i / sum_i w_i;  v <- momentum * v + u;  x <- x - lr * v

    Args:
        params: The model's.
        clients: How many there are.
        lr: Server rate of a round.
        momentum: In [0, 1).
        seed: Of the clients that are drawn, the same ones as those of ``VirtualClients``.
    """

    def __init__(
        self,
        params: Iterable[tuple[str, nn.Parameter]],
        *,
        clients: int,
        lr: Any,
        momentum: float,
        seed: int,
    ) -> None:
        self._params = [param for _, param in params]
        self._common = [param.detach().clone() for param in self._params]
        self._momenta = [torch.zeros_like(param) for param in self._common]
        self._sent: list[tuple[int, list[Tensor]]] = []
        self._n_clients, self._lr, self._momentum = clients, lr, momentum
        self._generator, self._round = torch.Generator().manual_seed(seed), 0
        self.payload_bytes = 4 * sum(param.numel() for param in self._params)

    def draw(self, n_clients: int) -> list[int]:
        """Begin a round."""
        order = torch.randperm(self._n_clients, generator=self._generator)
        drawn: list[int] = order[:n_clients].tolist()
        return drawn

    @torch.no_grad()
    def collect(self, client: int, n_examples: int) -> None:
        """Take how far a client came, and put the model back."""
        del client
        pairs = list(zip(self._common, self._params, strict=True))
        self._sent.append((n_examples, [common - param for common, param in pairs]))
        for common, param in pairs:
            param.copy_(common)

    @torch.no_grad()
    def step(self) -> None:
        """Move the model."""
        votes = weigh([n for n, _ in self._sent], max_weight=MAX_WEIGHT)
        lr = self._lr(self._round)
        for index, (common, momentum) in enumerate(zip(self._common, self._momenta, strict=True)):
            mean = sum(n * deltas[index] for n, (_, deltas) in zip(votes, self._sent, strict=True))
            momentum.mul_(self._momentum).add_(mean / sum(votes))
            common.sub_(lr * momentum)
            self._params[index].copy_(common)
        self._sent, self._round = [], self._round + 1


def make_clients(cell: Cell, model: nn.Module) -> Any:
    """Return the server with its clients."""

    def rate(number: int) -> float:
        return cell.lr * (1 - number / cell.rounds)

    given: dict[str, Any] = {
        "clients": CLIENTS,
        "lr": rate,
        "momentum": MOMENTUM,
        "seed": cell.seed,
    }
    if cell.method == "fedavg":
        return AveragedClients(model.named_parameters(), **given)
    return distlion_flower.VirtualClients(
        model.named_parameters(), rule=cell.method, spread=SPREAD, max_weight=MAX_WEIGHT, **given
    )


def share_out(labels: Tensor, alpha: float | None, seed: int) -> list[Tensor]:
    """Return the numbers of each client's images."""
    partition = Even() if alpha is None else ByClass(alpha)
    return partition.split_images(labels, seed=seed, world_size=CLIENTS, batch_size=LEAST_IMAGES)


def train_client(
    model: nn.Module, data: Images, owned: Tensor, rate: float, generator: torch.Generator
) -> None:
    """Do the local steps of a client; its batches are drawn with replacement."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    images, labels = data.train
    for _ in range(LOCAL_STEPS):
        numbers = owned[torch.randint(len(owned), (BATCH,), generator=generator)]
        inputs = crop_and_flip(images[numbers], generator)
        loss = F.cross_entropy(model(inputs), labels[numbers])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def train(cell: Cell, data: Images) -> dict[str, Any]:
    """Do a run; return its record."""
    began_s = time.process_time()
    task = ImageTask(data, batch=1, workers=1, seed=cell.seed, alpha=None, **NETWORK)
    model = task.build_model()
    clients = make_clients(cell, model)
    owned = share_out(data.train[1], cell.alpha, cell.seed)
    is_finite = True
    for number in range(cell.rounds):
        for client in clients.draw(cell.part):
            generator = seeded_generator(cell.seed, _BATCHES, client, number)
            train_client(model, data, owned[client], cell.local_rate, generator)
            is_finite = is_finite and all(bool(p.isfinite().all()) for p in model.parameters())
            if not is_finite:
                break
            clients.collect(client, n_examples=len(owned[client]))
        if not is_finite:
            break
        clients.step()
    return {
        "validation": task.validate(model).accuracy if is_finite else 0.0,
        "test": task.test(model).accuracy if is_finite else 0.0,
        "payload_bytes": clients.payload_bytes,
        "finished": is_finite,
        "data": data.digest,
        "torch": torch.__version__,
        "cpu_s": round(time.process_time() - began_s, 1),
    }
