"""The tables of a comparison."""

from __future__ import annotations

import math
from collections.abc import Sequence

from distlion.wire import LinkModel
from distlion_lab.report.comparison import LOSS, Cell, Comparison, Metric, Spread
from distlion_lab.report.document import Table

REFERENCE = "global-lion"
"""Method to which others are compared, seed by seed, if it is among the methods."""

_MEGA = 1e6
_MILLI = 1e3
_DIVERGED = "diverged"


def tabulate_outcome(comparison: Comparison, workers: int, *, link: LinkModel, rate: str) -> Table:
    """Tabulate the outcomes of all methods with a number of workers, the best first."""
    outcome = comparison.outcome
    head = ["method", outcome.name, "least to most"]
    if comparison.is_classification:
        head.append(LOSS.name)
    reference = _find_reference(comparison, workers)
    if reference:
        head.append(f"minus {REFERENCE}")
    head += [
        "lr",
        "lr at the edge",
        "bits up",
        "bits down",
        "MB sent",
        f"ms a step at {rate}/s",
        "diverged",
    ]
    cells = [comparison.cell(method, workers) for method in comparison.methods]
    cells.sort(key=lambda cell: _sort_key(cell, outcome))
    rows = [_describe_cell(comparison, cell, reference, link) for cell in cells]
    return Table(head, rows)


def _find_reference(comparison: Comparison, workers: int) -> Cell | None:
    if REFERENCE not in comparison.methods:
        return None
    cell = comparison.cell(REFERENCE, workers)
    return cell if cell.finished else None


def _sort_key(cell: Cell, outcome: Metric) -> tuple[int, float]:
    """Return a key that sorts by the number of diverged runs, then by the mean of the others."""
    final = cell.final(outcome)
    return cell.diverged, final.mean if final else math.inf


def _describe_cell(
    comparison: Comparison, cell: Cell, reference: Cell | None, link: LinkModel
) -> list[str]:
    outcome = comparison.outcome
    final = cell.final(outcome)
    row = [cell.method, format_spread(final, outcome.digits), _format_range(final, outcome.digits)]
    if comparison.is_classification:
        row.append(format_spread(cell.final(LOSS), LOSS.digits))
    if reference:
        row.append(format_spread(pair(cell, reference, outcome), outcome.digits, signed=True))
    row += [_format_lr(cell), _mark_edge(cell)]
    if final:
        row += [
            f"{cell.mean_of('up_bits_per_parameter'):.3g}",
            f"{cell.mean_of('down_bits_per_parameter'):.3g}",
            f"{cell.mean_of('sent_bytes_per_step') * comparison.settings['steps'] / _MEGA:.3g}",
            f"{_MILLI * cell.step_s(link, compute_s=comparison.compute_s):.3g}",
        ]
    else:
        row += [""] * 4
    return [*row, _describe_divergence(cell)]


def pair(cell: Cell, reference: Cell, metric: Metric) -> Spread | None:
    """Return the final difference from a reference, seed by seed; None if no seed has both."""
    theirs = {record["settings"]["seed"]: metric.read(record)[-1] for record in reference.finished}
    differences = [
        metric.read(record)[-1] - theirs[record["settings"]["seed"]]
        for record in cell.finished
        if record["settings"]["seed"] in theirs
    ]
    return Spread.of(differences) if differences else None


def _describe_divergence(cell: Cell) -> str:
    if cell.lr is None:
        return "at every lr"
    return f"{cell.diverged} of {len(cell.records)}"


def _format_lr(cell: Cell) -> str:
    return "" if cell.lr is None else f"{cell.lr:g}"


def _mark_edge(cell: Cell) -> str:
    return "yes" if cell.is_at_edge else ""


def tabulate_tuning(comparison: Comparison) -> Table:
    """Tabulate the validation loss of every tried learning rate, and the choice."""
    points = comparison.settings["lrs"]
    head = ["method", "workers"]
    head += [name for k in range(1, points + 1) for name in (f"lr {k}", "loss")]
    head += ["chosen", "at the edge"]
    return Table(head, [_describe_tuning(cell) for cell in comparison.cells])


def _describe_tuning(cell: Cell) -> list[str]:
    row = [cell.method, str(cell.workers)]
    for lr, record in zip(cell.grid, cell.tuning, strict=True):
        diverged = record["diverged"] is not None
        loss = _DIVERGED if diverged else f"{record['series']['validation_loss'][-1]:.4f}"
        row += [f"{lr:g}", loss]
    return [*row, _format_lr(cell) or "none", _mark_edge(cell)]


def tabulate_methods(comparison: Comparison) -> Table:
    """Tabulate the methods with their definitions."""
    rows = [
        [
            name,
            each["description"],
            _shorten(each["definition"]),
            each["kind"],
            f"{each['weight_decay']:g}",
        ]
        for name, each in comparison.index["methods"].items()
    ]
    return Table(["method", "what it is", "exactly", "side", "weight decay"], rows)


def _shorten(definition: str) -> str:
    """Leave out a ``MomentumSync`` that averages no momenta."""
    return definition.removesuffix(", None")


def tabulate_settings(comparison: Comparison) -> Table:
    """Tabulate the settings of the comparison that no other table shows."""
    shown = {"methods", "workers"}
    rows = [
        [name.replace("_", " "), "default" if value is None else str(value)]
        for name, value in comparison.settings.items()
        if name not in shown and not (value is None and name in ("alpha", "tokenizer"))
    ]
    return Table(["setting", "value"], rows)


def format_spread(spread: Spread | None, digits: int, *, signed: bool = False) -> str:
    """Format mean and standard deviation; a single value has none."""
    if spread is None:
        return _DIVERGED
    mean = f"{spread.mean:{'+' if signed else ''}.{digits}f}"
    return f"{mean} ± {spread.sd:.{digits}f}" if spread.count > 1 else mean


def _format_range(spread: Spread | None, digits: int) -> str:
    return f"{spread.least:.{digits}f} – {spread.most:.{digits}f}" if spread else ""


def list_versions(comparison: Comparison, names: Sequence[str]) -> list[str]:
    """Return the software of the runs, with each version once."""
    return [
        f"{name} {', '.join(sorted({record['versions'][name] for record in comparison.records}))}"
        for name in names
    ]
