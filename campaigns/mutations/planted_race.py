"""Bugs in a race of two runs to one loss, and in the words that they are trained on."""

from __future__ import annotations

from planted import Mutation

RACE = ("lab/report/test_race.py",)

RACES = (
    Mutation(
        "race: validations count as training",
        "lab/report/race.py",
        "seconds.append(begin - validating_s if step else 0.0)",
        "seconds.append(begin if step else 0.0)",
        RACE,
    ),
    Mutation(
        "race: a run arrives at the validation after the loss",
        "lab/report/race.py",
        "share = (losses[at - 1] - target) / (losses[at - 1] - losses[at])",
        "share = 1.0",
        RACE,
    ),
    Mutation(
        "race: the target is what one run reaches",
        "lab/report/race.py",
        'return float(max(min(record["evaluations"]["loss"]) for record in records))',
        'return float(min(min(record["evaluations"]["loss"]) for record in records))',
        RACE,
    ),
    Mutation(
        "race: computed seconds take bytes for bits",
        "lab/report/race.py",
        'step_bits = 8 * record["sent_bytes_per_worker"]',
        'step_bits = record["sent_bytes_per_worker"]',
        RACE,
    ),
    Mutation(
        "words: the rarest are kept",
        "lab/tasks/vocabulary.py",
        "key=lambda word: (-counts[word], word)",
        "key=lambda word: (counts[word], word)",
        ("lab/tasks/test_vocabulary.py",),
    ),
)
