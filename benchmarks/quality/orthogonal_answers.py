"""What the study of orthogonalized votes decides: the recipe, and its learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import study_path  # noqa: F401
from answers import Answer, Claim, are_beside, list_claims
from cells import Cell, Choice, Find, choose_rate
from design import choose_recipe, make_cell
from differences import Verdict
from orthogonal_design import BY_FAN_IN, EVERY, ORTHOGONAL_PARTS, RULES
from settings import CAUTIOUS, ORTHOGONAL, RATE_FROM, SETTINGS

NEEDED = ("o-text", "o-images", "o-workers", "o-wider", "o-longer")
LEAST_LEAD_NATS, MOST_BEHIND_POINTS = 0.02, 0.3
MOST_WORKERS = 8
MOST_LOST_NATS = 0.01
FACTORS = (0.25, 0.5, 1.0, 2.0)
WIDTHS = (64, 128, 256)
MOST_DRIFT = 2.0


def list_orthogonal_claims(find: Find) -> list[Claim]:
    """List every comparison of the protocol, once each, with verdicts."""
    return list_claims(find, ORTHOGONAL_PARTS, _pair)


def _pair(cells: Sequence[Cell], find: Find) -> Iterator[tuple[Cell, Cell]]:
    """Yield all methods with AdamW, and orthogonalized votes with what they are made of."""
    for cell in cells:
        if cell.is_screened:
            continue
        beside = {each.method: each for each in cells if are_beside(each, cell)}
        own, *means = (
            choose_recipe(family, cell.setting.task, find).method
            for family in ("orthogonal", "muon", "muon-sign")
        )
        adamw = choose_recipe("adamw", cell.setting.task, find).method
        wanted = [next((name for name in (adamw, "global-adamw") if name in beside), None)]
        if cell.method in (own, ORTHOGONAL):
            wanted += [CAUTIOUS, *means]
        if cell.method in RULES:
            wanted.append(own)
        for name in wanted:
            if name in beside and name != cell.method:
                yield cell, beside[name]


def decide_recipe(claims: Sequence[Claim]) -> Answer:
    """Return whether the recipe becomes orthogonalized votes."""
    asked = [each for each in claims if _speaks_for_recipe(each)]
    known = [each for each in asked if each.difference.is_whole]
    # Verdicts move while other comparisons are open, means of complete cells do not.
    is_final = _has_all(claims)
    failing = [each for each in known if not _holds(each, by_verdict=is_final)]
    if failing:
        text = "no"
    else:
        text = "yes" if is_final else "not yet"
    leading = [each for each in known if each.difference.verdict is Verdict.LEADS]
    question = "Does the recipe become orthogonalized votes?"
    return Answer(question, known, failing, len(leading), text)


def _speaks_for_recipe(claim: Claim) -> bool:
    is_votes = claim.cell.method.startswith(ORTHOGONAL)
    is_beside_adamw = claim.difference.reference.cell.method.startswith("global-adamw")
    is_small = claim.cell.setting.task == "images" or claim.cell.workers <= MOST_WORKERS
    return is_votes and is_beside_adamw and claim.is_even and is_small


def _has_all(claims: Sequence[Claim]) -> bool:
    """Return whether the votes of all needed parts are there, and all that they are beside."""
    needed = [each for each in claims if each.part in NEEDED]
    voted = {each.part for each in needed if each.cell.method.startswith(ORTHOGONAL)}
    return voted == set(NEEDED) and all(each.difference.is_whole for each in needed)


def _holds(claim: Claim, *, by_verdict: bool) -> bool:
    difference = claim.difference
    if claim.cell.setting.task == "images":
        return difference.mean <= MOST_BEHIND_POINTS
    leads = difference.verdict is Verdict.LEADS or not by_verdict
    return leads and difference.mean <= -LEAST_LEAD_NATS


@dataclass(frozen=True)
class RateCell:
    """A tuned cell of orthogonalized votes beside AdamW.

    Attributes:
        setting: Name of the setting.
        workers: N.
        adamw: AdamW's chosen rate.
        best: The votes' chosen rate.
        regrets: Validation loss at each factor of AdamW's rate minus the lowest one; infinite where
            that rate was not tried, which is farther from the best one than those that were.
    """

    setting: str
    workers: int
    adamw: float
    best: float
    regrets: Mapping[float, float]


def list_rate_cells(find: Find) -> list[RateCell]:
    """List the complete tuned cells with up to 8 workers and even data."""
    found: dict[tuple[str, int], RateCell] = {}
    for part in ORTHOGONAL_PARTS:
        for cell in part.list_cells(find):
            setting = next(name for name, each in SETTINGS.items() if each == cell.setting)
            is_even = cell.alpha is None and not cell.attackers
            is_asked = cell.method.startswith(ORTHOGONAL) and cell.workers <= MOST_WORKERS
            if setting in RATE_FROM or cell.is_screened or not (is_even and is_asked):
                continue
            rates = _compare_rates(cell, setting, find)
            if rates is not None:
                found[setting, cell.workers] = rates
    return list(found.values())


def _compare_rates(cell: Cell, setting: str, find: Find) -> RateCell | None:
    adamw_name = choose_recipe("adamw", cell.setting.task, find).method
    if adamw_name is None:
        return None
    adamw = choose_rate(make_cell(setting, adamw_name), find)
    votes = choose_rate(cell, find)
    if adamw.rate is None or votes.rate is None:
        return None
    lowest = votes.losses[votes.rate]
    regrets = {factor: _loss_at(votes, factor * adamw.rate) - lowest for factor in FACTORS}
    return RateCell(setting, cell.workers, adamw.rate, votes.rate, regrets)


def _loss_at(choice: Choice, rate: float) -> float:
    near = [each for each in choice.losses if math.isclose(each, rate, rel_tol=1e-2)]
    return choice.losses[near[0]] if near else math.inf


def choose_factor(cells: Sequence[RateCell]) -> float | None:
    """Return the factor of AdamW's rate whose largest regret is the lowest.

    Returns:
        The factor; None without cells, or if no factor was tried in all of them.
    """
    largest = {factor: max(each.regrets[factor] for each in cells) for factor in FACTORS if cells}
    tried = [factor for factor, regret in largest.items() if math.isfinite(regret)]
    return min(tried, key=largest.__getitem__, default=None)


@dataclass(frozen=True)
class Every:
    """A way to orthogonalize in some steps only.

    Attributes:
        method: Name.
        rate: The best rate.
        loss: Validation loss there.
    """

    method: str
    rate: float
    loss: float


def list_every(find: Find) -> list[Every]:
    """List what is known of orthogonalizing in every step, and in some."""
    found = []
    for method in EVERY:
        choice = choose_rate(make_cell("text-small-1k", method), find)
        if choice.rate is not None:
            found.append(Every(method, choice.rate, choice.losses[choice.rate]))
    return found


def decide_every(found: Sequence[Every]) -> str:
    """Return whether orthogonalizing in every second step becomes an option."""
    losses = {each.method: each.loss for each in found}
    if not set(EVERY[:3]) <= set(losses):
        return "not yet"
    each_step, *second = (losses[method] for method in EVERY[:3])
    return "yes" if min(second) - each_step <= MOST_LOST_NATS else "no"


@dataclass(frozen=True)
class WidthRates:
    """The best rates over widths.

    Attributes:
        method: Name.
        rates: By width, those that are known.
    """

    method: str
    rates: Mapping[int, float]

    @property
    def drift(self) -> float:
        """The highest best rate divided by the lowest one, once all widths are there."""
        if not set(WIDTHS) <= set(self.rates):
            return math.nan
        rates = [self.rates[width] for width in WIDTHS]
        return max(rates) / min(rates)


def list_width_rates(find: Find) -> list[WidthRates]:
    """List the best rates without and with the factor by fan-in."""
    found = []
    for method in (ORTHOGONAL, BY_FAN_IN):
        rates = {}
        for name in SETTINGS:
            if name.startswith("text-width-"):
                rate = choose_rate(make_cell(name, method), find).rate
                if rate is not None:
                    rates[int(name.rpartition("-")[2])] = rate
        found.append(WidthRates(method, rates))
    return found


def decide_fan_in(plain: WidthRates, by_fan_in: WidthRates) -> str:
    """Return whether a factor by fan-in becomes part of the recipe."""
    if math.isnan(plain.drift) or math.isnan(by_fan_in.drift):
        return "not yet"
    return "yes" if by_fan_in.drift <= MOST_DRIFT < plain.drift else "no"
