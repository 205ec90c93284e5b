"""What the papers claim, and the comparisons of the study that answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cells import Cell, Find
from evidence import Comparison, Ending, Verdict, compare
from plan import (
    FEEDBACK,
    LIBRARY_FEEDBACK_2,
    OTHER_BETAS,
    PARTS,
    SHORT,
    SHORT_ADAMW,
    SHORT_FEEDBACK,
    SHORT_FEEDBACK_2,
    SHORT_LION,
    SHORT_TWO_BITS,
)
from variants import STOCHASTIC

_LION = "Distributed Lion (arXiv:2404.00438)"
_CUB = "Lion Cub (arXiv:2411.16462)"
_EF21 = "ours, with EF21 (arXiv:2106.05203)"
_SIGNUM = "signSGD with majority vote (arXiv:1810.05291)"
_FEEDBACKS = (FEEDBACK, SHORT_FEEDBACK, SHORT_FEEDBACK_2)
_ADAMW, _GLOBAL_LION, _SGD = "global-adamw", "global-lion", "global-sgd"


@dataclass(frozen=True)
class Claim:
    """A statement and the pairs that it is about.

    Attributes:
        source: Who says so.
        text: The statement.
        pairs: Method and reference; empty where the study does not ask.
        wants_lead: A lead is claimed, rather than a match.
        conditions: Which cells: ``even``, or those of the part of this name.
        elsewhere: Where an untested one was looked at, if anywhere.
    """

    source: str
    text: str
    pairs: tuple[tuple[str, str], ...] = ()
    wants_lead: bool = False
    conditions: str = "even"
    elsewhere: str = ""


CLAIMS = (
    Claim(_LION, "majority vote matches global AdamW", (("majority", _ADAMW),)),
    Claim(_LION, "majority vote matches global Lion", (("majority", _GLOBAL_LION),)),
    Claim(_LION, "Average matches global AdamW", (("average", _ADAMW),)),
    Claim(_LION, "Average matches global Lion", (("average", _GLOBAL_LION),)),
    Claim(
        _LION,
        "votes lead TernGrad at no more traffic",
        (("majority", "terngrad-adamw"), ("average", "terngrad-adamw")),
        wants_lead=True,
    ),
    Claim(
        _LION,
        "votes lead DGC at no more traffic",
        (("majority", "dgc"), ("average", "dgc")),
        wants_lead=True,
    ),
    Claim(_LION, "votes lead D-Signum", (("majority", "signum"),), wants_lead=True),
    Claim(
        _LION,
        "votes lead GradDrop at no more traffic",
        elsewhere="[the start of training](../../studies/start-of-training.md)",
    ),
    Claim(_LION, "the same on ImageNet, OpenWebText (350M, 760M) and few-shot fine-tuning (7B)"),
    Claim(
        _CUB,
        "two bits match global Lion",
        (("quantized-2", _GLOBAL_LION), (SHORT_TWO_BITS, SHORT_LION)),
    ),
    *(
        claim
        for conditions, words in (("skew", ""), ("skew-tuned", ", at rates tuned on it"))
        for claim in (
            Claim(
                "ours",
                f"on skewed data majority vote matches global Lion{words}",
                (("majority", _GLOBAL_LION), ("majority-sync-10", _GLOBAL_LION)),
                conditions=conditions,
            ),
            Claim(
                _CUB,
                f"averaged momenta win back what majority vote loses on skewed data{words}",
                (("majority-sync-10", "majority"),),
                wants_lead=True,
                conditions=conditions,
            ),
            Claim(
                "ours",
                "on skewed data betas (0.9, 0.95), or momentum after the vote, lead "
                f"majority vote{words}",
                ((SHORT, "majority"), ("shared-majority", "majority")),
                wants_lead=True,
                conditions=conditions,
            ),
            Claim(
                "ours",
                "on skewed data momentum after the vote leads betas (0.9, 0.95)" + words,
                (("shared-majority", SHORT),),
                wants_lead=True,
                conditions=conditions,
            ),
            Claim(
                _EF21,
                f"on skewed data error feedback lets votes lead averaged momenta{words}",
                tuple((method, "majority-sync-10") for method in _FEEDBACKS),
                wants_lead=True,
                conditions=conditions,
            ),
            Claim(
                _EF21,
                "on skewed data votes with error feedback match global Lion of the "
                f"same betas{words}",
                (
                    (FEEDBACK, _GLOBAL_LION),
                    (SHORT_FEEDBACK, SHORT_LION),
                    (SHORT_FEEDBACK_2, SHORT_LION),
                ),
                conditions=conditions,
            ),
            Claim(
                _EF21,
                f"on skewed data votes with error feedback match global AdamW{words}",
                tuple((method, _ADAMW) for method in _FEEDBACKS),
                conditions=conditions,
            ),
        )
    ),
    Claim(
        "ours",
        "the library's FeedbackVote matches the study's loop of the same equations",
        ((LIBRARY_FEEDBACK_2, SHORT_FEEDBACK_2),),
        conditions="skew-tuned",
    ),
    Claim(
        _EF21,
        "on even data votes with error feedback match majority vote of the same betas",
        ((FEEDBACK, "majority"), (SHORT_FEEDBACK, SHORT), (SHORT_FEEDBACK_2, SHORT)),
    ),
    Claim(
        _EF21,
        "on even data votes with error feedback match global AdamW",
        tuple((method, _ADAMW) for method in _FEEDBACKS),
    ),
    Claim(
        "signSGD on different data (arXiv:1906.01736, arXiv:1905.12938)",
        "on skewed data stochastic signs lead majority vote, at rates tuned on it",
        tuple((method, "majority") for method in STOCHASTIC),
        wants_lead=True,
        conditions="skew-tuned",
    ),
    Claim(
        _CUB,
        "averaging the momenta of some layers is enough",
        elsewhere="[the start of training](../../studies/start-of-training.md)",
    ),
    Claim(
        _CUB,
        "p bits scaled by L1 lead L-infinity at full range",
        (
            (SHORT_TWO_BITS, "quantized-2-linf-full-betas-90-95"),
            ("quantized-4-betas-90-95", "quantized-4-linf-full-betas-90-95"),
        ),
        wants_lead=True,
    ),
    Claim(
        _CUB,
        "p bits scaled by L1 lead L-infinity that clamps",
        ((SHORT_TWO_BITS, "quantized-2-linf-betas-90-95"),),
        wants_lead=True,
    ),
    Claim(
        _CUB,
        "a 1-bit all-reduce is faster than full precision on slow links",
        elsewhere="[end_to_end.md](end_to_end.md), seconds of a step, and "
        "[time_to_target.md](time_to_target.md)",
    ),
    Claim(
        "ours",
        "Lion matches AdamW on these tasks",
        ((_GLOBAL_LION, _ADAMW),),
    ),
    Claim(
        "ours",
        "momentum after the vote matches global AdamW",
        (("shared-majority", _ADAMW),),
    ),
    Claim(
        "ours",
        "momentum after the vote leads majority vote over Lion",
        (("shared-majority", "majority"),),
        wants_lead=True,
    ),
    Claim(
        "ours",
        "momentum after the vote, or D-Signum, leads betas (0.9, 0.95)",
        (("shared-majority", SHORT), ("signum", SHORT)),
        wants_lead=True,
    ),
    Claim(
        "ours",
        "two bits before the shared momentum lead one",
        (("shared-quantized-2", "shared-majority"),),
        wants_lead=True,
    ),
    Claim(
        "ours",
        "a shared momentum of 0.95 or 0.8 matches 0.9",
        (("shared-majority-b95", "shared-majority"), ("shared-majority-b80", "shared-majority")),
    ),
    Claim(
        "ours",
        "norms and biases in full precision improve a majority vote",
        (("majority-full-vectors", "majority"),),
        wants_lead=True,
    ),
    Claim(
        "ours",
        "with other betas, votes lead votes with Lion's",
        tuple((method, "majority") for method in (*OTHER_BETAS, "signum")),
        wants_lead=True,
    ),
    Claim(
        "ours",
        "with other betas, votes match global AdamW",
        tuple((method, _ADAMW) for method in (*OTHER_BETAS, "signum")),
    ),
    Claim(
        "ours",
        "with betas (0.9, 0.95) for both, majority vote matches global Lion",
        ((SHORT, SHORT_LION),),
    ),
    Claim(
        "ours",
        "with betas (0.9, 0.95), Lion, and votes, match AdamW of any",
        ((SHORT_LION, _ADAMW), (SHORT_LION, SHORT_ADAMW), (SHORT, SHORT_ADAMW)),
    ),
    Claim(
        "ours",
        "AdamW with betas (0.9, 0.95) leads AdamW with its default",
        ((SHORT_ADAMW, _ADAMW),),
        wants_lead=True,
    ),
    Claim(
        "ours",
        "votes on embeddings that may be zero improve a majority vote",
        (("majority-ternary-embeddings-betas-90-95", SHORT),),
        wants_lead=True,
    ),
    Claim("ours", "DGC matches the SGD that is in it", (("dgc", _SGD),)),
    Claim(
        _SIGNUM,
        "with Byzantine workers, majority vote leads the mean",
        (("majority", _GLOBAL_LION),),
        wants_lead=True,
        conditions="byzantine",
    ),
    Claim(
        "ours",
        "with Byzantine workers, majority vote matches the median of 32-bit gradients",
        (("majority", "median-lion"),),
        conditions="byzantine",
    ),
    Claim(
        "ours",
        "at higher accuracy, votes match global AdamW",
        (("majority", _ADAMW), (SHORT, _ADAMW)),
        conditions="confirmation",
    ),
    Claim(
        "ours",
        "at higher accuracy, votes with betas (0.9, 0.95) lead votes with Lion's",
        ((SHORT, "majority"),),
        wants_lead=True,
        conditions="confirmation",
    ),
)


# What the papers show, the parts that show it here, and what is different or missing.
SHOWN = (
    (
        _LION,
        "figures of CIFAR-10: accuracy over epochs, error against workers and against bits",
        ("images-4", "images-8", "images-32"),
        "a convolutional network for 3 epochs, not a ViT for 200",
    ),
    (
        _LION,
        "tables of ImageNet (ViT-S, ViT-B), OpenWebText (350M, 760M), few-shot fine-tuning (7B)",
        (),
        "not run; the programs of examples/recipes are what such runs need",
    ),
    (
        _CUB,
        "time of a step end to end, on slow links",
        (),
        "in end_to_end.md and time_to_target.md, on emulated networks",
    ),
    (_CUB, "the norm that scales p bits", ("norms",), "a small GPT"),
    (
        _CUB,
        "averaging momenta, of which layers and how often",
        ("skew",),
        "all layers every 10 steps; others in studies/start-of-training.md",
    ),
)


class Study:
    """All cells of the protocol, with the records that are there.

    Args:
        find: Returns a record by its name.
    """

    def __init__(self, find: Find) -> None:
        self.endings: dict[str, list[Ending]] = {
            part.name: [Ending.find(cell, find) for cell in part.cells] for part in PARTS
        }

    def compare(self, part: str, method: str, reference: str) -> list[Comparison]:
        """Compare within a part, for each condition (such as skew) that has both methods."""
        pairs = [
            self.compare_cell(ending, part, reference)
            for ending in self.endings[part]
            if ending.cell.method == method
        ]
        return [each for each in pairs if each is not None]

    def compare_cell(self, ending: Ending, part: str, reference: str) -> Comparison | None:
        """Compare a cell with the method that stands beside it; None where there is none."""
        other = self.find_beside(ending.cell, reference, part=part)
        return None if other is None else compare(ending, other)

    def find_beside(self, cell: Cell, method: str, *, part: str | None = None) -> Ending | None:
        """Return the ending that stands beside a cell: the same task, N and condition.

        Args:
            cell: Which one.
            method: The other's.
            part: Where to look first.
        """
        for name in (*([] if part is None else [part]), *self.endings):
            for ending in self.endings[name]:
                other = ending.cell
                same = (
                    other.method == method
                    and other.setting == cell.setting
                    and other.alpha == cell.alpha
                    and (other.attackers, other.factor) == (cell.attackers, cell.factor)
                    and other.workers in (0, cell.workers)
                )
                if same:
                    return ending
        return None

    def answer(self, claim: Claim) -> Iterator[tuple[str, Comparison]]:
        """Yield the parts and comparisons that a claim is about."""
        for part in PARTS:
            if claim.conditions != condition_of(part.name):
                continue
            for method, reference in claim.pairs:
                for comparison in self.compare(part.name, method, reference):
                    yield part.name, comparison


def condition_of(part: str) -> str:
    """Return which kind of claim a part answers."""
    own = ("skew", "skew-tuned", "byzantine", "confirmation")
    return part if part in own else "even"


def holds(claim: Claim, comparison: Comparison) -> str:
    """Return what a comparison says of a claim."""
    verdict = comparison.verdict
    if verdict in (Verdict.OPEN, Verdict.INCONCLUSIVE):
        return verdict.value
    if claim.wants_lead and verdict is Verdict.MATCHES:
        return "not shown: matches"
    return "does not hold" if verdict is Verdict.TRAILS else "holds"
