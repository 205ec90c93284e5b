"""What is run, and in which order: the protocol of the study as data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from cells import Cell, Setting
from variants import LOCAL_THEN_SHARED, STOCHASTIC, VARIANTS

IMAGES = Setting("images", 1055, 128, 5, {"width": 16, "groups": 2})
WIDE = Setting("images", 3516, 128, 10, {"width": 24, "groups": 2})
TEXT = Setting("text", 1000, 64, 5, {"width": 64, "layers": 2, "heads": 4, "context": 64})


@dataclass(frozen=True)
class Part:
    """Cells that answer one question.

    Attributes:
        name: Of the part.
        title: For reports.
        cells: In the order in which they are run.
    """

    name: str
    title: str
    cells: tuple[Cell, ...]


# Betas of (0.9, 0.95), on images the best of those that were tried by validation data.
SHORT = "majority-betas-90-95"
SHORT_LION, SHORT_ADAMW = "global-lion-betas-90-95", "global-adamw-betas-90-95"
SHORT_TWO_BITS = "quantized-2-betas-90-95"
FEEDBACK, SHORT_FEEDBACK = "feedback", "feedback-betas-90-95"
SHORT_FEEDBACK_2 = "feedback-2-betas-90-95"
_FEEDBACKS = (FEEDBACK, SHORT_FEEDBACK, SHORT_FEEDBACK_2)
# The rule of the library, at the rate of the loop that it came from.
LIBRARY_FEEDBACK_2 = f"library-{SHORT_FEEDBACK_2}"
OTHER_BETAS = (
    "majority-betas-95-98",
    "majority-betas-90-97",
    SHORT,
    "majority-betas-80-95",
    "majority-betas-95-95",
    "majority-betas-80-80",
)

_FIRST = ("global-adamw", "global-lion", "majority", "shared-majority")
_OTHERS = (
    "quantized-2",
    "average",
    "signum",
    "terngrad-adamw",
    "global-sgd",
    "dgc",
    "shared-average",
)
_NORMS = (
    "quantized-2-linf-betas-90-95",
    "quantized-2-linf-full-betas-90-95",
    "quantized-4-linf-full-betas-90-95",
    "quantized-4-betas-90-95",
    "majority-ternary-embeddings-betas-90-95",
)
_EIGHT = (
    *("majority", SHORT, "quantized-2", "average", "signum", "terngrad-adamw", "dgc"),
    *_FEEDBACKS,
)

# The method around whose best rate a grid begins, where that is not the majority vote's; None: its
# own center.
_KIN: Mapping[str, str | None] = {
    **dict.fromkeys((*_FIRST, "global-sgd"), None),
    "terngrad-adamw": "global-adamw",
    SHORT_ADAMW: "global-adamw",
    **dict.fromkeys((SHORT_LION, SHORT_TWO_BITS, *_NORMS, *VARIANTS), SHORT),
    "dgc": "global-sgd",
    **dict.fromkeys(
        (
            "shared-average",
            "shared-quantized-2",
            "shared-majority-b95",
            "shared-majority-b80",
            LOCAL_THEN_SHARED,
        ),
        "shared-majority",
    ),
    **dict.fromkeys(OTHER_BETAS, "signum"),
    **dict.fromkeys((SHORT_FEEDBACK, SHORT_FEEDBACK_2), SHORT),
}


def _cell(setting: Setting, method: str, workers: int) -> Cell:
    """Return a cell; what sees only the mean gradient of alike workers does not depend on N."""
    is_global = method.startswith("global-")
    kin = _KIN.get(method, "majority")
    return Cell(
        setting,
        method,
        0 if is_global else workers,
        centered_on=None if kin is None else _cell(setting, kin, workers),
    )


def _cells(setting: Setting, methods: tuple[str, ...], workers: int) -> tuple[Cell, ...]:
    return tuple(_cell(setting, method, workers) for method in methods)


# What is compared with others, and which methods it may lead.
_TUNED_AGAIN = ("majority", SHORT, "terngrad-adamw", "dgc")


def _more(setting: Setting, method: str, workers: int) -> Cell:
    """Return a cell of more than 4 workers.

    Some have a grid of their own, around their best rate with 4; the others have that rate.
    """
    cell, four = _cell(setting, method, workers), _cell(setting, method, 4)
    if cell == four:
        return cell
    if method in _FEEDBACKS:  # not run with 4 workers on each task
        return replace(cell, centered_on=_more(setting, _KIN.get(method) or "majority", workers))
    if method in _TUNED_AGAIN:
        return replace(cell, centered_on=four)
    return replace(cell, centered_on=None, tuned_as=four)


def _skewed(method: str, alpha: float) -> Cell:
    base = method.partition("-sync")[0]
    return Cell(IMAGES, method, 8, alpha=alpha, tuned_as=_more(IMAGES, base, 8))


def _skewed_at_own_rate(method: str) -> Cell:
    base = "majority" if method in STOCHASTIC else method.partition("-sync")[0]
    even = _more(IMAGES, base, 8)
    return replace(_skewed(method, 0.1), tuned_as=None, centered_on=even)


def _wide(method: str) -> Cell:
    return replace(_cell(WIDE, method, 4), tuned_as=_cell(IMAGES, method, 4))


def _attacked(method: str, attackers: int, factor: float) -> Cell:
    cell = Cell(IMAGES, method, 8, attackers=attackers, factor=factor)
    voted = "global-lion" if method == "median-lion" else method
    return replace(cell, tuned_as=_more(IMAGES, voted, 8))


_SKEWED = (
    "majority",
    "majority-sync-10",
    "quantized-2",
    SHORT,
    "shared-majority",
    "global-lion",
    "global-adamw",
    SHORT_LION,
    *_FEEDBACKS,
)
_MOST_SKEWED_ONLY = ("quantized-2", "shared-majority")
_TUNED_WHEN_SKEWED = (
    *("majority", "majority-sync-10", SHORT, "shared-majority"),
    *(*_FEEDBACKS, *STOCHASTIC),
)
_ATTACKED = ("majority", "global-lion", "median-lion")

PARTS = (
    Part("images-4", "Images, 4 workers", _cells(IMAGES, _FIRST + _OTHERS, 4)),
    Part(
        "leads",
        "Images, 4 workers: variants of momentum after the vote, and of the majority vote",
        _cells(
            IMAGES,
            (
                "shared-quantized-2",
                "shared-majority-b95",
                "shared-majority-b80",
                "majority-betas-95-98",
                SHORT,
                SHORT_LION,
                SHORT_ADAMW,
                "majority-betas-95-95",
                "majority-betas-80-80",
                "majority-full-vectors",
                "majority-betas-80-95",
                "majority-betas-90-97",
            ),
            4,
        ),
    ),
    Part(
        "text-4",
        "Text, 4 workers",
        _cells(
            TEXT,
            (*_FIRST, "signum", SHORT, SHORT_LION, SHORT_ADAMW, *_FEEDBACKS),
            4,
        ),
    ),
    Part(
        "confirmation",
        "Images at higher accuracy, 4 workers",
        tuple(map(_wide, ("global-adamw", "majority", SHORT))),
    ),
    Part("images-8", "Images, 8 workers", tuple(_more(IMAGES, method, 8) for method in _EIGHT)),
    Part(
        "skew",
        "Images, 8 workers whose classes are skewed",
        tuple(
            _skewed(method, alpha)
            for alpha in (0.1, 1.0)
            for method in _SKEWED
            if alpha < 1.0 or method not in _MOST_SKEWED_ONLY
        ),
    ),
    Part(
        "skew-tuned",
        "Images, 8 workers whose classes are most skewed, at rates tuned on skewed classes",
        (
            *map(_skewed_at_own_rate, _TUNED_WHEN_SKEWED),
            replace(
                _skewed(LIBRARY_FEEDBACK_2, 0.1), tuned_as=_skewed_at_own_rate(SHORT_FEEDBACK_2)
            ),
        ),
    ),
    Part(
        "text-8",
        "Text, 8 workers; two bits with 4",
        (
            _more(TEXT, "majority", 8),
            _more(TEXT, SHORT, 8),
            _cell(TEXT, SHORT_TWO_BITS, 4),
        ),
    ),
    Part(
        "norms",
        "Text, 4 workers: the scale of p bits, embeddings that may stay",
        _cells(TEXT, _NORMS, 4),
    ),
    Part(
        "images-32",
        "Images, 32 workers",
        tuple(_more(IMAGES, method, 32) for method in ("majority", "average", SHORT)),
    ),
    Part(
        "byzantine",
        "Images, 8 workers, one or two of them Byzantine",
        tuple(
            _attacked(method, attackers, factor)
            for attackers, factor in ((1, -100.0), (2, -1.0))
            for method in _ATTACKED
        ),
    ),
    Part(
        "screen",
        "Text, 4 workers: majority votes that differ in one thing, by validation data",
        tuple(replace(_cell(TEXT, method, 4), is_screened=True) for method in VARIANTS),
    ),
)


def list_cells() -> Iterator[Cell]:
    """Yield all cells in the order of the protocol."""
    for part in PARTS:
        yield from part.cells
