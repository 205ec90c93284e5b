"""The model, the data of each client, and a client's local steps between two votes."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

N_TRAIN = 1500


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def load_data() -> tuple[Tensor, Tensor]:
    digits = load_digits()
    return torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)


def load_part(client: int, n_clients: int, skew: float) -> tuple[Tensor, Tensor]:
    """Return the digits of one client; the smaller ``skew``, the fewer classes it has."""
    images, labels = load_data()
    generator = torch.Generator().manual_seed(0)
    shares = torch._sample_dirichlet(torch.full((10, n_clients), skew), generator)
    mine = []
    for digit in range(10):
        found = (labels[:N_TRAIN] == digit).nonzero().flatten()
        ends = (shares[digit].cumsum(0) * len(found)).round().long().tolist()
        mine.append(found[([0, *ends])[client] : ends[client]])
    indices = torch.cat(mine)
    return images[indices], labels[indices]


def train(model: nn.Module, part: tuple[Tensor, Tensor], steps: int, lr: float, seed: int) -> float:
    """Do local steps with any optimizer; return the last loss."""
    images, labels = part
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    generator, loss = torch.Generator().manual_seed(seed), torch.zeros(())
    for _ in range(steps):
        batch = torch.randint(len(labels), (16,), generator=generator)
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


@torch.no_grad()
def measure_accuracy(model: nn.Module) -> float:
    images, labels = load_data()
    found = model(images[N_TRAIN:]).argmax(1) == labels[N_TRAIN:]
    return found.float().mean().item()
