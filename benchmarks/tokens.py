"""Votes and AdamW on a text of tokens, with rates of their own for embeddings and output weights.

    python benchmarks/tokens.py --books FOLDER --method adamw --lr 4e-3 [--embedding 4] [--head 4]
                                [--ternary] [--seed 1] [--steps 300] [--windows 16] [--tied]
    python benchmarks/tokens.py --books FOLDER --method orthogonal --lr 4e-3
                                --beside embedding head [--beside-lr 4e-3]

The studies of text train on bytes, so that each row of the embedding gets a gradient in nearly
every step. With a vocabulary of thousands of tokens few rows do. This program trains a GPT of 1.2
million parameters, 1.05 of them in the embedding and the output weights, which are not tied, on
8,192 tokens that a byte-pair encoding finds in the books: 4 workers, 4 windows of 64 tokens each in
a step, one bit each way. It prints the validation loss in nats a token.

Methods: adamw, muon (with AdamW for what is no hidden matrix) and lion (cautious) on the mean
gradient; votes: cautious, plain (not cautious) and orthogonal (cautious but for hidden matrices).
With --beside, AdamW moves these parameters on the mean gradient, beside votes on all others. It
makes first looks, not evidence: one seed a call.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE / "study"))

from text import SPLITS, Block  # noqa: E402

import distlion  # noqa: E402
from distlion_lab.baselines.muon import MuonWithAdamW  # noqa: E402

VOCABULARY, WIDTH, LAYERS, HEADS, CONTEXT = 8192, 64, 2, 4, 64
WORKERS = 4
WARM_UP_SHARE, SCORE_EVERY, SCORED = 0.2, 100, 256
ON_THE_MEAN = ("adamw", "lion", "muon")
PARTS = {"tokens.weight": "embedding", "head.weight": "head"}
ADAMW_BETAS, ADAMW_DECAY = (0.9, 0.99), 0.1
METHODS = (*ON_THE_MEAN, "cautious", "plain", "orthogonal")


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


def read_tokens(folder: Path) -> tuple[Tensor, Tensor]:
    """Return the tokens of the books to train on, and of those for validation.

    They are kept in a file for the next call with the same books.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.txt")):
        digest.update(path.name.encode() + path.read_bytes())
    name = f"distlion-tokens-{VOCABULARY}-{digest.hexdigest()[:16]}.npz"
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
        np.savez(draft, train=encode(train), valid=encode(books[name] for name in validation))
        draft.replace(kept)
    found = np.load(kept)
    train, valid = (torch.from_numpy(found[name].astype(np.int64)) for name in ("train", "valid"))
    return train, valid


def build_groups(model: TokenGPT, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return param groups, each with its part of the model and its share of the rate."""
    shares = {"embedding": args.embedding, "head": args.head}
    if args.method in ("orthogonal", "muon"):
        decay = 0.2 if args.method == "orthogonal" else ADAMW_DECAY
        groups = distlion.group_params(model, weight_decay=decay)
    else:
        kind = {} if args.method == "adamw" else {"cautious": args.method != "plain"}
        decay = ADAMW_DECAY if args.method == "adamw" else 0.2
        groups = [{"params": list(model.named_parameters()), "weight_decay": decay, **kind}]
    found = []
    for group in groups:
        by_part: dict[str, list[Any]] = {}
        for name, param in group["params"]:
            is_matrix = group.get("orthogonalize", False)
            part = PARTS.get(name, "matrices" if is_matrix else "rest")
            by_part.setdefault(part, []).append((name, param))
        for part, params in by_part.items():
            rule = {"aggregation": distlion.TernaryVote()} if args.ternary else {}
            rule = rule if part == "embedding" else {}
            share = shares.get(part, 1.0)
            found.append({**group, **rule, "params": params, "share": share, "part": part})
    return found


def build_optimizers(
    model: TokenGPT, args: argparse.Namespace
) -> list[tuple[torch.optim.Optimizer, float, list[float]]]:
    """Return optimizers, each with its rate and the shares of it for its groups."""
    groups = build_groups(model, args)
    beside = [group for group in groups if group["part"] in args.beside]
    groups = [group for group in groups if group["part"] not in args.beside]
    shares, more = ([group.pop("share") for group in each] for each in (groups, beside))
    for group in (*groups, *beside):
        del group["part"]
    made: torch.optim.Optimizer
    if args.method == "adamw":
        made = torch.optim.AdamW(groups, lr=args.lr, betas=ADAMW_BETAS)
    elif args.method == "muon":
        made = MuonWithAdamW(groups, args.lr, ADAMW_BETAS, weight_decay=ADAMW_DECAY)
    else:
        workers = 1 if args.method == "lion" else WORKERS
        made = distlion.VirtualCluster(groups, lr=args.lr, workers=workers)
    found = [(made, args.lr, shares)]
    if beside:
        params = [{"params": group["params"], "weight_decay": ADAMW_DECAY} for group in beside]
        adamw = torch.optim.AdamW(params, lr=args.beside_lr, betas=ADAMW_BETAS)
        found.append((adamw, args.beside_lr, more))
    return found


def find_share(step: int, steps: int) -> float:
    """Return the share of the rate in a step: it rises in a line, then falls as a cosine."""
    warm_up = int(WARM_UP_SHARE * steps)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.5 * (1 + math.cos(math.pi * (step - warm_up) / (steps - warm_up)))


def train(args: argparse.Namespace) -> None:
    """Train, and print the validation loss now and then."""
    tokens, held_out = read_tokens(args.books)
    torch.manual_seed(1000 + args.seed)
    model, chance = TokenGPT(tied=args.tied), torch.Generator().manual_seed(args.seed)
    optimizers = build_optimizers(model, args)
    voting = optimizers[0][0]
    n_parts = 1 if args.method in ON_THE_MEAN else WORKERS

    def compute_loss(windows: Tensor) -> Tensor:
        logits = model(windows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())

    def cut(source: Tensor, starts: Tensor) -> Tensor:
        return torch.stack([source[start : start + CONTEXT + 1] for start in starts])

    spread = torch.linspace(0, len(held_out) - CONTEXT - 2, SCORED).long()
    scored, began_s = cut(held_out, spread), time.monotonic()
    for step in range(args.steps):
        share = find_share(step, args.steps)
        for optimizer, lr, own in optimizers:
            for group, times in zip(optimizer.param_groups, own, strict=True):
                group["lr"] = lr * share * times
        starts = torch.randint(0, len(tokens) - CONTEXT - 1, (args.windows,), generator=chance)
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
        if (step + 1) % SCORE_EVERY == 0 or step + 1 == args.steps:
            with torch.no_grad():
                loss = float(np.mean([compute_loss(part).item() for part in scored.chunk(8)]))
            print(f"step {step + 1}: {loss:.4f} ({time.monotonic() - began_s:.0f} s)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--books", type=Path, required=True, help="folder of *.txt, a book each")
    parser.add_argument("--method", choices=METHODS, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--embedding", type=float, default=1.0, help="times the rate, of tokens")
    parser.add_argument("--head", type=float, default=1.0, help="times the rate, of output weights")
    parser.add_argument("--ternary", action="store_true", help="TernaryVote for the embedding")
    parts = ("embedding", "head", "rest")
    parser.add_argument("--beside", nargs="+", choices=parts, default=[], help="AdamW moves these")
    parser.add_argument("--beside-lr", type=float, default=4e-3, help="its rate")
    parser.add_argument("--windows", type=int, default=16, help="in a step, of all workers")
    parser.add_argument("--tied", action="store_true", help="output weights are the embedding's")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    if args.method in ON_THE_MEAN and (args.ternary or args.beside):
        parser.error(f"--ternary and --beside go with votes, and {args.method} has none")
    torch.set_num_threads(1)
    train(args)


if __name__ == "__main__":
    main()
