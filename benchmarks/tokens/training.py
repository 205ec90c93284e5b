"""A GPT on tokens, trained by votes of virtual workers, by AdamW or by both."""

from __future__ import annotations

import hashlib
import math
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from text import SPLITS, Block
from torch import Tensor, nn

import distlion
from distlion_lab.baselines.muon import MuonWithAdamW

VOCABULARY, WIDTH, LAYERS, HEADS, CONTEXT = 8192, 64, 2, 4, 64
WORKERS = 4
WARM_UP_SHARE, SCORE_EVERY, SCORED = 0.2, 100, 256
ON_THE_MEAN = ("adamw", "lion", "muon")
PARTS = {"tokens.weight": "embedding", "head.weight": "head"}
ADAMW_BETAS, ADAMW_DECAY = (0.9, 0.99), 0.1
METHODS = (*ON_THE_MEAN, "cautious", "plain", "orthogonal")
Scored = Literal["valid", "test"]


@dataclass(frozen=True)
class Run:
    """A run.

    Attributes:
        method: One of ``METHODS``: adamw, muon (with AdamW for what is no hidden matrix) and lion
            (cautious) on the mean gradient; votes: cautious, plain (not cautious) and orthogonal
            (cautious but for hidden matrices).
        lr: Its rate.
        embedding, head: Times the rate, of the embedding and of the output weights.
        beside: Of "embedding", "head" and "rest" (norms, biases, positions), what AdamW moves on
            the mean gradient, beside votes on all others.
        beside_lr: AdamW's rate there.
        ternary: Whether the embedding is voted on by ``TernaryVote``.
        windows: Of all workers in a step.
        tied: Whether the output weights are the embedding's.
        seed: Of weights and batches.
        steps: Steps.
        scored: The book that the loss is of.
    """

    method: str
    lr: float
    embedding: float = 1.0
    head: float = 1.0
    beside: tuple[str, ...] = ()
    beside_lr: float = 4e-3
    ternary: bool = False
    windows: int = 16
    tied: bool = False
    seed: int = 1
    steps: int = 300
    scored: Scored = "valid"

    @property
    def name(self) -> str:
        """Name of its record."""
        beside = f"-beside-{'-'.join(self.beside)}-{self.beside_lr:g}" if self.beside else ""
        shares = f"-e{self.embedding:g}-h{self.head:g}" + "-ternary" * self.ternary
        size = f"-w{self.windows}-s{self.steps}" + "-tied" * self.tied
        return f"{self.method}-{self.lr:g}{shares}{beside}{size}-seed{self.seed}-{self.scored}"


class TokenGPT(nn.Module):
    """Predict the next token.

    Args:
        tied: Whether the output weights are those of the embedding.
    """

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block(WIDTH, HEADS) for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        nn.init.normal_(self.tokens.weight, std=0.05)
        nn.init.normal_(self.places.weight, std=0.05)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        nn.init.normal_(self.head.weight, std=0.05)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, windows: Tensor) -> Tensor:
        """Return logits (count, length, vocabulary) of windows (count, length) int64."""
        x = self.tokens(windows) + self.places.weight[: windows.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def read_tokens(folder: Path) -> dict[str, Tensor]:
    """Return the tokens of the books to train on, of those for validation and of those for tests.

    They are kept in a file for the next call with the same books.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.txt")):
        digest.update(path.name.encode() + path.read_bytes())
    name = f"distlion-tokens-{VOCABULARY}-{digest.hexdigest()[:16]}-2.npz"
    kept = Path(tempfile.gettempdir()) / name
    if not kept.exists():
        from tokenizers import Tokenizer, models, pre_tokenizers, trainers

        validation, test = SPLITS[0]
        held_out = (*validation, *test)
        books = {path.stem: path.read_text(errors="replace") for path in folder.glob("*.txt")}
        train = [text for name, text in sorted(books.items()) if name not in held_out]
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet)
        tokenizer.train_from_iterator(train, trainer)

        def encode(texts: Iterable[str]) -> Any:
            return np.concatenate([np.array(tokenizer.encode(text).ids) for text in texts])

        draft = kept.with_suffix(".draft.npz")  # a call that is interrupted leaves no half file
        parts = {"valid": validation, "test": test}
        encoded = {part: encode(books[name] for name in names) for part, names in parts.items()}
        np.savez(draft, train=encode(train), **encoded)
        draft.replace(kept)
    found = np.load(kept)
    return {part: torch.from_numpy(found[part].astype(np.int64)) for part in found.files}


def build_groups(model: TokenGPT, run: Run) -> list[dict[str, Any]]:
    """Return param groups, each with its part of the model and its share of the rate."""
    shares = {"embedding": run.embedding, "head": run.head}
    if run.method in ("orthogonal", "muon"):
        decay = 0.2 if run.method == "orthogonal" else ADAMW_DECAY
        groups = distlion.group_params(model, weight_decay=decay)
    else:
        kind = {} if run.method == "adamw" else {"cautious": run.method != "plain"}
        decay = ADAMW_DECAY if run.method == "adamw" else 0.2
        groups = [{"params": list(model.named_parameters()), "weight_decay": decay, **kind}]
    found = []
    for group in groups:
        by_part: dict[str, list[Any]] = {}
        for name, param in group["params"]:
            is_matrix = group.get("orthogonalize", False)
            part = PARTS.get(name, "matrices" if is_matrix else "rest")
            by_part.setdefault(part, []).append((name, param))
        for part, params in by_part.items():
            rule = {"aggregation": distlion.TernaryVote()} if run.ternary else {}
            rule = rule if part == "embedding" else {}
            share = shares.get(part, 1.0)
            found.append({**group, **rule, "params": params, "share": share, "part": part})
    return found


def build_optimizers(
    model: TokenGPT, run: Run
) -> list[tuple[torch.optim.Optimizer, float, list[float]]]:
    """Return optimizers, each with its rate and the shares of it for its groups."""
    groups = build_groups(model, run)
    beside = [group for group in groups if group["part"] in run.beside]
    groups = [group for group in groups if group["part"] not in run.beside]
    shares, more = ([group.pop("share") for group in each] for each in (groups, beside))
    for group in (*groups, *beside):
        del group["part"]
    made: torch.optim.Optimizer
    if run.method == "adamw":
        made = torch.optim.AdamW(groups, lr=run.lr, betas=ADAMW_BETAS)
    elif run.method == "muon":
        made = MuonWithAdamW(groups, run.lr, ADAMW_BETAS, weight_decay=ADAMW_DECAY)
    else:
        workers = 1 if run.method == "lion" else WORKERS
        made = distlion.VirtualCluster(groups, lr=run.lr, workers=workers)
    found = [(made, run.lr, shares)]
    if beside:
        params = [{"params": group["params"], "weight_decay": ADAMW_DECAY} for group in beside]
        adamw = torch.optim.AdamW(params, lr=run.beside_lr, betas=ADAMW_BETAS)
        found.append((adamw, run.beside_lr, more))
    return found


def find_share(step: int, steps: int) -> float:
    """Return the share of the rate in a step: it rises in a line, then falls as a cosine."""
    warm_up = int(WARM_UP_SHARE * steps)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / (steps - warm_up)))


def train(
    run: Run, books: Path, *, show: Callable[[int, float], None] = lambda step, loss: None
) -> dict[str, Any]:
    """Train.

    Args:
        run: The run.
        books: Folder of texts, one for each book.
        show: Called with a step and the loss after it, now and then.

    Returns:
        The loss after the last step in nats a token, losses by step, and the seconds that it took.
    """
    read = read_tokens(books)
    tokens, held_out = read["train"], read[run.scored]
    torch.manual_seed(1000 + run.seed)
    model, chance = TokenGPT(tied=run.tied), torch.Generator().manual_seed(run.seed)
    optimizers = build_optimizers(model, run)
    voting = optimizers[0][0]
    n_parts = 1 if run.method in ON_THE_MEAN else WORKERS

    def compute_loss(windows: Tensor) -> Tensor:
        logits = model(windows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())

    def cut(source: Tensor, starts: Tensor) -> Tensor:
        return torch.stack([source[start : start + CONTEXT + 1] for start in starts])

    spread = torch.linspace(0, len(held_out) - CONTEXT - 2, SCORED).long()
    scored, began_s, losses = cut(held_out, spread), time.monotonic(), {}
    for step in range(run.steps):
        share = find_share(step, run.steps)
        for optimizer, lr, own in optimizers:
            for group, times in zip(optimizer.param_groups, own, strict=True):
                group["lr"] = lr * share * times
        starts = torch.randint(0, len(tokens) - CONTEXT - 1, (run.windows,), generator=chance)
        for worker, part in enumerate(cut(tokens, starts).chunk(n_parts)):
            compute_loss(part).backward()  # type: ignore[no-untyped-call]
            if isinstance(voting, distlion.VirtualCluster):
                voting.collect(worker)
        for param in model.parameters():  # of those beside votes, the workers' gradients add up
            if param.grad is not None:
                param.grad /= n_parts
        for optimizer, _, _ in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if (step + 1) % SCORE_EVERY == 0 or step + 1 == run.steps:
            with torch.no_grad():
                losses[step + 1] = float(
                    np.mean([compute_loss(part).item() for part in scored.chunk(8)])
                )
            show(step + 1, losses[step + 1])
    seconds = round(time.monotonic() - began_s, 1)
    return {"loss": losses[run.steps], "losses": losses, "seconds": seconds}
