"""A small GPT over bytes, and the text that it learns: both scripts of this folder use them."""

from pathlib import Path
from pydoc_data import topics

import torch
from torch import Tensor, nn

N_TOKENS = 256


class Block(nn.Module):
    """Causal attention and a perceptron, each beside a residual connection."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.before_attention, self.before_perceptron = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, time, width) to the same shape."""
        batch, time, width = x.shape
        parts = self.attend(self.before_attention(x)).view(batch, time, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        found = nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        x = x + self.project(found.transpose(1, 2).reshape(batch, time, width))
        return x + self.perceptron(self.before_perceptron(x))


class GPT(nn.Module):
    """Predict the next byte; the first and the last layer share a matrix.

    Args:
        context: Bytes that a prediction sees at most.
        layers, heads, width: Sizes of the network.
        dropout: Probability of dropping an element.
    """

    def __init__(
        self, context: int, *, layers: int, heads: int, width: int, dropout: float
    ) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(N_TOKENS, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, N_TOKENS, bias=False)
        for name, param in self.named_parameters():
            if param.dim() >= 2:
                nn.init.normal_(param, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(param)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss in nats of (batch, time) int64 targets after these tokens."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        logits = self.head(self.norm(self.blocks(self.token(tokens) + self.place(places))))
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


class Text:
    """Bytes of a file, nine tenths to train on and the rest to validate.

    Args:
        path: The file; None for the texts of Python's own help.
        context: Bytes in a sequence.
        device: Device of the batches.
    """

    def __init__(self, path: Path | None, context: int, device: str) -> None:
        text = "".join(topics.topics.values()).encode() if path is None else path.read_bytes()
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        n_train = len(data) * 9 // 10
        self.parts = {"train": data[:n_train], "validation": data[n_train:]}
        self.context, self.device = context, device
        if len(data) - n_train <= context:
            raise SystemExit(f"{path} has {len(data)} bytes; more than {10 * context} are needed")

    def draw(self, part: str, batch_size: int) -> tuple[Tensor, Tensor]:
        """Draw sequences and their next bytes, both (batch, context) int64, by torch's seed."""
        data = self.parts[part]
        starts = torch.randint(len(data) - self.context, (batch_size, 1))
        found = data[starts + torch.arange(self.context + 1)].long().to(self.device)
        return found[:, :-1], found[:, 1:]
