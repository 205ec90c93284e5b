"""The claims of the protocol, and what they decide for the defaults of the library."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import study_path  # noqa: F401
from cells import Cell, Find
from design import PARTS, Part, choose_recipe, identify
from differences import Difference, Verdict, decide, find_difference
from evidence import Ending
from settings import CAUTIOUS, CAUTIOUS_PAPER, MASKED, NEEDED, PAPER, SETTINGS, SHORT

_MASKABLE = (
    (CAUTIOUS, SHORT),
    (CAUTIOUS_PAPER, PAPER),
    ("library-feedback-2-cautious-betas-90-95", "library-feedback-2-betas-90-95"),
    ("quantized-2-cautious-betas-90-95", "quantized-2-betas-90-95"),
    ("global-lion-cautious-betas-90-95", "global-lion-betas-90-95"),
)


PairUp = Callable[[Sequence[Cell], Find], Iterator[tuple[Cell, Cell]]]


@dataclass(frozen=True)
class Claim:
    """A difference and where it was looked for.

    Attributes:
        part: Name of the part.
        setting: Name of the setting.
        difference: With its verdict.
    """

    part: str
    setting: str
    difference: Difference

    @property
    def cell(self) -> Cell:
        """The cell of the method."""
        return self.difference.method.cell

    @property
    def is_even(self) -> bool:
        """Whether all workers draw from the same data, and none is Byzantine."""
        return self.cell.alpha is None and not self.cell.attackers


def list_claims(
    find: Find, parts: Sequence[Part] = PARTS, pair_up: PairUp | None = None
) -> list[Claim]:
    """List every comparison of a protocol, once each, with verdicts.

    Args:
        find: Finds records.
        parts: Of the protocol.
        pair_up: Yields methods with their references; None for those of the second study.
    """
    found: dict[str, tuple[str, Cell, Cell]] = {}
    for part in parts:
        for pair in (pair_up or _pair)(part.list_cells(find), find):
            found.setdefault(" - ".join(map(identify, pair)), (part.name, *pair))
    differences = decide(
        [
            find_difference(Ending.find(method, find), Ending.find(reference, find))
            for _, method, reference in found.values()
        ]
    )
    return [
        Claim(part, _name_setting(method), difference)
        for (part, method, _), difference in zip(found.values(), differences, strict=True)
    ]


def _name_setting(cell: Cell) -> str:
    return next(name for name, setting in SETTINGS.items() if setting == cell.setting)


def _pair(cells: Sequence[Cell], find: Find) -> Iterator[tuple[Cell, Cell]]:
    """Yield methods with their references: AdamW, the paper's votes, and what has no mask."""
    for cell in cells:
        beside = {each.method: each for each in cells if are_beside(each, cell)}
        adamw = choose_recipe("adamw", cell.setting.task, find).method
        names = [adamw, "global-adamw"] if cell.alpha or cell.attackers else [adamw]
        wanted = [next((name for name in names if name in beside), None)]
        if cell.method == SHORT:
            wanted.append(PAPER)
        if cell.method == MASKED:
            wanted.append(CAUTIOUS)
        wanted += [plain for masked, plain in _MASKABLE if masked == cell.method]
        for name in wanted:
            if name in beside and name != cell.method:
                yield cell, beside[name]


def are_beside(one: Cell, other: Cell) -> bool:
    same = (one.setting, one.alpha, one.attackers, one.factor)
    if same != (other.setting, other.alpha, other.attackers, other.factor):
        return False
    return one.workers in (0, other.workers) or other.workers == 0


@dataclass(frozen=True)
class Answer:
    """What the protocol decides.

    Attributes:
        question: What is decided.
        claims: The comparisons that it rests on.
        failing: Those that speak against it.
        n_leading: How many lead.
        text: ``yes``, ``no`` or ``not yet``.
    """

    question: str
    claims: Sequence[Claim]
    failing: Sequence[Claim]
    n_leading: int
    text: str


def list_answers(claims: Sequence[Claim]) -> list[Answer]:
    """Return the protocol's three answers."""
    betas = _ask_for_default("Do betas become (0.9, 0.95) by default?", claims, SHORT, PAPER)
    pair = (CAUTIOUS_PAPER, PAPER) if betas.text == "no" else (CAUTIOUS, SHORT)
    mask = _ask_for_default("Does cautious become the default?", claims, *pair)
    return [betas, mask, _ask_for_masked(claims)]


def _ask_for_default(question: str, claims: Sequence[Claim], method: str, than: str) -> Answer:
    """Not worse by more than the margin in any cell of even data, leading in half of them."""
    asked = _select(claims, method, than)
    known = [each for each in asked if each.difference.is_whole]
    failing = [each for each in known if each.difference.mean > each.difference.margin]
    leading = [each for each in known if each.difference.verdict is Verdict.LEADS]
    if failing:
        text = "no"
    elif not known or any(each.part in NEEDED and each not in known for each in asked):
        text = "not yet"
    else:
        text = "yes" if 2 * len(leading) >= len(known) else "no"
    return Answer(question, known, failing, len(leading), text)


def _ask_for_masked(claims: Sequence[Claim]) -> Answer:
    """Leading with 32 workers on text, and not worse on images by more than the margin."""
    asked = _select(claims, MASKED, CAUTIOUS)
    at_32 = [each for each in asked if each.cell.workers == 32]
    text_32 = [each for each in at_32 if each.cell.setting.task == "text"]
    images_32 = [each for each in at_32 if each.cell.setting.task == "images"]
    leading = [each for each in text_32 if each.difference.verdict is Verdict.LEADS]
    failing = [each for each in images_32 if each.difference.mean > each.difference.margin]
    failing += [
        each for each in text_32 if each.difference.verdict not in (Verdict.LEADS, Verdict.OPEN)
    ]
    is_known = bool(text_32 and images_32) and all(each.difference.is_whole for each in at_32)
    text = "not yet" if not is_known else "no" if failing else "yes"
    question = "Does a mask at the counter become a rule?"
    return Answer(question, at_32, failing, len(leading), text)


def _select(claims: Sequence[Claim], method: str, than: str) -> list[Claim]:
    return [
        each
        for each in claims
        if each.is_even
        and (each.cell.method, each.difference.reference.cell.method) == (method, than)
    ]
