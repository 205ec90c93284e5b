"""Tasks, budgets and methods of the protocol, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import study_path  # noqa: F401
from cells import Setting
from plan import IMAGES, TEXT, WIDE

_SMALL = dict(TEXT.network)
_MEDIUM = {"width": 168, "layers": 3, "heads": 4, "context": 64}
_LARGE = {"width": 384, "layers": 6, "heads": 6, "context": 64}

SETTINGS: dict[str, Setting] = {
    "text-small-1k": TEXT,
    "text-small-4k": Setting("text", 4000, 64, 16, _SMALL),
    "text-small-16k": Setting("text", 16000, 64, 32, _SMALL),
    "text-medium-1k": Setting("text", 1000, 64, 8, _MEDIUM),
    "text-medium-4k": Setting("text", 4000, 64, 16, _MEDIUM),
    "text-large-1k": Setting("text", 1000, 64, 8, _LARGE),
    "images-3": IMAGES,
    "images-10": WIDE,
    "images-30": Setting("images", 10547, 128, 30, {"width": 32, "groups": 2}),
}
_WIDTHS = (64, 128, 256, 384, 768)
SETTINGS |= {"text-others-1k": Setting("text", 1000, 64, 8, _SMALL | {"split": 1})}
SETTINGS |= {
    f"text-width-{width}": Setting(
        "text", 300, 16, 3, {"width": width, "layers": 2, "heads": width // 32, "context": 64}
    )
    for width in _WIDTHS
}
BASES: Mapping[str, str] = {"text": "text-small-1k", "images": "images-3"}
"""Where betas and decay of a family are chosen, by task."""
RATE_FROM: Mapping[str, str] = {
    "text-small-16k": "text-small-4k",
    "text-medium-4k": "text-medium-1k",
    "images-30": "images-10",
}
"""Settings whose rate is not tuned: they have that of a shorter one."""

MOST_SEEDS, FEWER_SEEDS = (1, 2, 3, 4, 5), (1, 2, 3)
FIVE_SEEDS = ("text-small-1k", "text-small-4k", "text-medium-1k", "images-3", "images-10")
WORKERS = (4, 8, 32)
MARGINS: Mapping[str, float] = {"text": 0.01, "images": 0.3}


@dataclass(frozen=True)
class Family:
    """A method whose betas and decay are tuned.

    Attributes:
        title: For reports.
        candidates: Names of the method, one for each pair of betas.
    """

    title: str
    candidates: tuple[str, ...]


def _with_betas(name: str, *betas: str) -> tuple[str, ...]:
    return tuple(f"{name}-betas-{pair}" if pair else name for pair in betas)


_OF_LION = ("", "90-95", "80-95")
FAMILIES: Mapping[str, Family] = {
    "adamw": Family("AdamW", _with_betas("global-adamw", "", "90-99", "90-95")),
    "lion": Family("Lion on the mean", _with_betas("global-lion", *_OF_LION)),
    "majority": Family("majority vote", _with_betas("majority", *_OF_LION)),
    "cautious": Family("cautious majority vote", _with_betas("majority-cautious", *_OF_LION)),
    "feedback": Family("two bits with feedback", _with_betas("library-feedback-2", "", "90-95")),
}
ORTHOGONAL = "majority-orthogonal-betas-90-95"
MUON, MUON_SIGN = "global-muon-betas-90-99", "global-lion-orthogonal-betas-90-95"
MATRIX_FAMILIES: Mapping[str, Family] = {
    "orthogonal": Family("votes on orthogonalized directions", (ORTHOGONAL,)),
    "muon": Family("Muon and AdamW on the mean", (MUON,)),
    "muon-sign": Family("sign of Muon's direction on the mean", (MUON_SIGN,)),
}
"""Families of the study of orthogonalized votes; their betas are not tuned."""
DECAYS = ("", "-decay-025", "-decay-4")
"""Ends of names: once, a quarter of, and four times the weight decay."""

PAPER, SHORT = "majority", "majority-betas-90-95"
CAUTIOUS, CAUTIOUS_PAPER = "majority-cautious-betas-90-95", "majority-cautious"
MASKED, MASKED_COIN = "masked-betas-90-95", "masked-coin-betas-90-95"
OTHERS = (
    "global-lion-cautious-betas-90-95",
    "library-feedback-2-cautious-betas-90-95",
    "quantized-2-betas-90-95",
    "quantized-2-cautious-betas-90-95",
    MASKED,
    "one-bit-adam",
    "powersgd-adamw",
)
"""Methods with one pair of betas, in the base settings only."""

NEEDED = ("text-base", "images-base", "workers", "text-longer", "text-wider", "images-longer")
"""Parts without which no default is decided; the others count once they are complete."""
