"""The report of a comparison: figures, Markdown beside them, and one page with all of it."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from distlion.wire import LinkModel
from distlion_lab.errors import DataError
from distlion_lab.report.comparison import Comparison, read_comparison
from distlion_lab.report.comparison_figures import (
    draw_bits,
    draw_bytes,
    draw_course,
    draw_seconds,
    draw_workers,
)
from distlion_lab.report.comparison_tables import (
    REFERENCE,
    list_versions,
    tabulate_methods,
    tabulate_outcome,
    tabulate_settings,
    tabulate_tuning,
)
from distlion_lab.report.comparison_warnings import list_warnings
from distlion_lab.report.document import (
    Block,
    Code,
    Heading,
    Paragraph,
    Picture,
    render_html,
    render_markdown,
)

MARKDOWN_NAME = "report.md"
PAGE_NAME = "report.html"
FIGURES = ("steps.png", "workers.png", "bits.png", "bytes.png", "seconds.png")
_SOFTWARE = ("distlion", "torch", "transformers", "python", "platform")


def write_comparison_report(folder: Path, *, link: LinkModel, rate: str) -> list[Path]:
    """Write figures, ``report.md`` and ``report.html`` into the folder of a comparison.

    Args:
        folder: Folder with ``comparison.json`` and the records of the runs.
        link: Link of each worker, for predicted times.
        rate: Name of the link's rate, such as ``1gbit``.

    Returns:
        The written files; the page comes last.

    Raises:
        DataError: A record cannot be used, or the folder cannot be written.
    """
    comparison = read_comparison(folder)
    blocks = build_report(comparison, link=link, rate=rate)
    pictures = [block for block in blocks if isinstance(block, Picture)]
    contents = {picture.name: picture.png for picture in pictures}
    contents[MARKDOWN_NAME] = render_markdown(blocks).encode()
    contents[PAGE_NAME] = render_html(blocks).encode()
    try:
        for name, content in contents.items():
            (folder / name).write_bytes(content)
    except OSError as error:
        raise DataError(f"report {str(folder)!r} cannot be written: {error}") from error
    return [folder / name for name in contents]


def build_report(
    comparison: Comparison, *, link: LinkModel, rate: str, figures: Collection[str] = FIGURES
) -> list[Block]:
    """Build the report with the figures that are asked for."""
    return [
        *_introduce(comparison),
        *(Paragraph(f"Warning: {warning}.") for warning in list_warnings(comparison)),
        *_describe_outcomes(comparison, link=link, rate=rate),
        *_show_figures(comparison, figures, link=link, rate=rate),
        *_describe_tuning(comparison),
        Heading("Methods"),
        tabulate_methods(comparison),
        Heading("Settings"),
        tabulate_settings(comparison),
        Paragraph(f"Made with {'; '.join(list_versions(comparison, _SOFTWARE))}."),
        Heading("To repeat"),
        Paragraph("Runs with a record in the folder are not repeated."),
        Code(comparison.index["command"]),
    ]


def _introduce(comparison: Comparison) -> list[Block]:
    settings, record = comparison.settings, comparison.records[0]
    data = Path(str(record["task"]["data"])).name
    title = f"{len(comparison.methods)} methods on {settings['task']}, {data}"
    return [
        Heading(title, level=1),
        Paragraph(
            f"A model of {record['trainable_parameters']:,} parameters "
            f"({record['task']['model_type']}), trained from random weights for "
            f"{settings['steps']} steps by {_join(comparison.workers)} workers inside one process, "
            f"each with a batch of {settings['batch_size']} of its own. The reported runs have "
            f"{_count(settings['seeds'], 'seed')}; equal seeds mean equal initial weights and "
            "batches for all methods."
        ),
    ]


def _describe_outcomes(comparison: Comparison, *, link: LinkModel, rate: str) -> list[Block]:
    text = (
        f"{comparison.outcome.name[0].upper()}{comparison.outcome.name[1:]} after the last step, "
        "mean ± standard deviation over the seeds that did not diverge; no checkpoint is picked. "
        "Methods with fewer diverged runs come first, then the best. Bits are the traffic between "
        "a worker and a server for each parameter and step, the mean of all steps, with indices "
        "and scales (TernGrad: the 2 bits of a code; its paper counts 1.585). Compare traffic by "
        "these bits. MB also depend on the exchange: they are one worker's bytes in the whole run "
        "without a server (votes by all-to-all, sums by a ring, other payloads by an all-gather)."
    )
    if REFERENCE in comparison.methods:
        text += f" `minus {REFERENCE}` is the difference, taken seed by seed."
    blocks: list[Block] = [Heading("Outcome"), Paragraph(text)]
    for workers in comparison.workers:
        blocks.append(Heading(f"{workers} workers", level=3))
        blocks.append(tabulate_outcome(comparison, workers, link=link, rate=rate))
    return blocks


def _show_figures(
    comparison: Comparison, figures: Collection[str], *, link: LinkModel, rate: str
) -> list[Block]:
    captions = _write_captions(comparison, link=link, rate=rate)
    draw: dict[str, Callable[[], Figure]] = {
        "steps.png": lambda: draw_course(comparison),
        "workers.png": lambda: draw_workers(comparison),
        "bits.png": lambda: draw_bits(comparison),
        "bytes.png": lambda: draw_bytes(comparison),
        "seconds.png": lambda: draw_seconds(comparison, link, rate=rate),
    }
    pictures = [_picture(name, captions[name], draw[name]()) for name in FIGURES if name in figures]
    return [Heading("Figures"), *pictures] if pictures else []


def _write_captions(comparison: Comparison, *, link: LinkModel, rate: str) -> dict[str, str]:
    band = "Lines are means over seeds, bands reach from the minimum to the maximum."
    bars = "Bars are standard deviations over seeds."
    lines = "Lines of votes are solid, of uncompressed baselines dashed, of other baselines dotted."
    metric = comparison.course.name.partition(" (")[0].capitalize()
    final = comparison.outcome.name.partition(" (")[0]
    latency = f"{link.latency_s * 1e6:g} us a round"
    return {
        "steps.png": f"{metric} against steps. {lines} {band}",
        "workers.png": (f"Final {final} against workers; methods are side by side. {bars}"),
        "bits.png": (
            f"Final {final} against bits per parameter and step between a worker and a server. "
            f"Closer to the lower left is better. {bars}"
        ),
        "bytes.png": f"Loss against the bytes that each worker has sent. {band}",
        "seconds.png": (
            f"Loss against the predicted time at {rate}/s, {latency}: "
            f"{comparison.compute_s * 1e3:.3g} ms of forward and backward a step, the median of "
            f"all runs, and the exchange, without the optimizer's own arithmetic. {band}"
        ),
    }


def _describe_tuning(comparison: Comparison) -> list[Block]:
    settings = comparison.settings
    if settings["lrs"] == 1:
        text = "No learning rate was tuned: each method ran with its default."
        return [Heading("Learning rates"), Paragraph(text)]
    scale = settings.get("lr_scale", 1)
    scaled = f" (all of them times {scale:g})" if scale != 1 else ""
    seed = comparison.index["tuning_seed"]
    text = (
        f"Every method got the same budget: for each number of workers {settings['lrs']} learning "
        f"rates, a factor of {settings['lr_factor']:g} apart, around a default of its own{scaled}, "
        f"one run each of {settings['tuning_steps']} steps with seed {seed}, "
        "which is reported nowhere. The rate with the lowest final loss on the validation half of "
        "the evaluation batches was taken; all other numbers here are from the other half, the "
        "test half. Nothing else was tuned."
    )
    blocks: list[Block] = [Heading("Learning rates"), Paragraph(text)]
    if any(cell.is_at_edge for cell in comparison.cells):
        blocks.append(
            Paragraph(
                "Where the choice is at the edge of its grid, a better one may lie beyond: read "
                "such a method's numbers with that in mind."
            )
        )
    return [*blocks, tabulate_tuning(comparison)]


def _picture(name: str, caption: str, figure: Figure) -> Picture:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return Picture(name, caption, buffer.getvalue())


def _join(numbers: Sequence[int]) -> str:
    *first, last = map(str, numbers)
    return f"{', '.join(first)} and {last}" if first else last


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
