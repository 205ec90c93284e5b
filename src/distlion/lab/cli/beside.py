"""A second run beside the first one: the same task, data, seed and steps with another rule."""

from __future__ import annotations

import dataclasses

from rich.console import Console
from rich.text import Text

from distlion.lab.cli.table import build_table, print_table
from distlion.lab.training import AUTO, Overlap, Record, TrainSettings, find_rule

WIRE_BITS_PER_S = 100e6
_NEXT = (
    ("both tuned, with other seeds", "distlion compare --quick --task {task} --methods {methods}"),
    ("how fast on your network", "distlion plan --help"),
    ("your own script", "docs/tutorials/from-ddp.md"),
)


def settle_beside(settings: TrainSettings, rule: str, lr: float | None) -> TrainSettings:
    """Return the settings of the second run: those of the first one but for what its rule decides.

    Args:
        settings: Of the first run.
        rule: Of the second one.
        lr: Its highest learning rate; None for that of the rule.

    Raises:
        InvalidArgumentError: The rule is unknown, or does not train with these settings.
    """
    method = find_rule(rule)
    changes = {
        "rule": rule,
        "lr": method.train_lr if lr is None else lr,
        "weight_decay": method.train_weight_decay,
    }
    if not method.votes:
        changes |= {"exchange": AUTO, "overlap": Overlap.OFF}
        changes |= dict.fromkeys(("sync_every", "diagnose_every", "step_timeout_s"))
    return dataclasses.replace(settings, **changes)


def print_beside(console: Console, first: Record, second: Record) -> None:
    """Show what two runs reached after equally many steps and in equal time, and what they sent."""
    runs, within_s = (first, second), min(_last(run, "seconds") for run in (first, second))
    rules = [str(run.settings["rule"]) for run in runs]
    ahead = second.final_heldout_loss - first.final_heldout_loss
    rows = {
        "learning rate": [f"{run.settings['lr']:g}" for run in runs],
        "validation loss": [f"{run.final_heldout_loss:.4f}" for run in runs],
        f"... after {within_s:.0f} s on this machine": [
            f"{_find_loss(run, within_s):.4f}" for run in runs
        ],
        "validation accuracy": [f"{run.final_heldout_accuracy:.1%}" for run in runs],
        "sent by each worker in a step": [f"{_count_step_bytes(run) / 1e6:.2f} MB" for run in runs],
        "... which takes, at 100 Mbit/s": [
            f"{8 * _count_step_bytes(run) / WIRE_BITS_PER_S:.3f} s" for run in runs
        ],
    }
    table = build_table(
        ("", *rules),
        [(name, *cells) for name, cells in rows.items()],
        left=("",),
        title=f"{first.settings['steps']} steps each, on the same data",
    )
    print_table(console, table)
    share, where = abs(ahead) / second.final_heldout_loss, "ahead of" if ahead > 0 else "behind"
    console.print(
        Text(
            f"{rules[0]} ends {share:.1%} {where} {rules[1]} and sends "
            f"{_count_step_bytes(second) / max(1.0, _count_step_bytes(first)):.1f} times less. "
            "One run decides little."
        ),
        soft_wrap=True,
    )
    names = {"task": first.settings["task"], "methods": ",".join(rules)}
    for what, command in _NEXT:
        console.print(Text(f"next, {what}: {command.format(**names)}"), soft_wrap=True)


def _last(run: Record, name: str) -> float:
    return run.evaluations[name][-1]


def _find_loss(run: Record, within_s: float) -> float:
    """Return the last validation loss that a run had by then."""
    pairs = zip(run.evaluations["seconds"], run.evaluations["loss"], strict=True)
    return [loss for seconds, loss in pairs if seconds <= within_s][-1]


def _count_step_bytes(run: Record) -> float:
    return run.sent_bytes_per_worker / int(run.settings["steps"])
