"""Tasks, budgets and methods of the protocol, as data."""

from __future__ import annotations

from collections.abc import Mapping

import study_path  # noqa: F401
from cells import Setting
from evidence import NOVELS

LENGTH, SIDE = 48, 96
BATCH, STEPS, EVALUATIONS = 32, 128, 2
SHOTS = (16, 64, 256)
TOKENS, RANK, LONG_TOKENS = 64, 8, 256
"""Tokens of a window, and rank of adapters, of SmolLM2 on novels."""
SCORED_IMAGES = 2000
"""Of the 5,000 images of validation."""

SETTINGS: Mapping[str, Setting] = {
    "spam": Setting("spam", STEPS, BATCH, EVALUATIONS, {"length": LENGTH}),
    "brown": Setting("brown", STEPS, BATCH, EVALUATIONS, {"length": LENGTH}),
    "images": Setting("images", STEPS, BATCH, EVALUATIONS, {"side": SIDE}),
    **{
        f"spam-{shots}": Setting(
            "spam", STEPS, BATCH, EVALUATIONS, {"length": LENGTH, "shots": shots}
        )
        for shots in SHOTS
    },
    "novels": Setting("novels", 24, 16, 1, {"length": TOKENS}),
    "novels-lora": Setting("novels-lora", 24, 16, 1, {"length": TOKENS, "rank": RANK}),
    "novels-long": Setting("novels-long", 100, 32, 2, {"length": LONG_TOKENS}),
    "novels-long-lora": Setting(
        "novels-long-lora", 100, 32, 2, {"length": LONG_TOKENS, "rank": RANK}
    ),
}
TASKS = ("spam", "brown", "images")
MARGINS: Mapping[str, float] = {**dict.fromkeys(TASKS, 0.3), **dict.fromkeys(NOVELS, 0.02)}
"""Points of test error, or nats a token; smaller differences do not matter."""

ADAMW_CENTERS: Mapping[str, float] = {
    "spam": 2e-4,
    "brown": 2e-4,
    "images": 1e-3,
    "novels": 1e-4,
    "novels-lora": 1e-3,
    "novels-long": 1e-4,
    "novels-long-lora": 1e-3,
}
"""The middle of AdamW's first three rates."""
ADAMW_DECAY = 0.01
DECAYS: Mapping[str, float] = {task: ADAMW_DECAY * rate for task, rate in ADAMW_CENTERS.items()}
"""Weight decay of one step at the highest learning rate; equal for all methods and rates."""
WARM_UP_SHARE = 0.1

ADAMW = "global-adamw"
LION = "global-lion-betas-90-95"
MAJORITY = "majority-betas-90-95"
CAUTIOUS = "majority-cautious-betas-90-95"
ORTHOGONAL = "majority-orthogonal-betas-90-95"
FEEDBACK = "library-feedback-2-betas-90-95"
LOCAL = "local-8-scaled-nesterov"
TERNARY = "majority-ternary-embeddings-betas-90-95"

VOTES = (CAUTIOUS, MAJORITY, ORTHOGONAL, FEEDBACK)
"""Rules whose first rate is asked for."""
METHODS = (ADAMW, LION, *VOTES, LOCAL)
TEXT_METHODS = (*METHODS, TERNARY)
LANGUAGE = (ADAMW, LION, CAUTIOUS, MAJORITY, FEEDBACK)
"""Methods on novels. Orthogonalizing would take minutes a step of a CPU."""
SHORT_LIST = (ADAMW, CAUTIOUS, ORTHOGONAL, FEEDBACK)
ONE_BIT = (CAUTIOUS, MAJORITY, ORTHOGONAL)
"""Votes of one bit an element and step; the first is the recipe."""

SEEDS, FEWER_SEEDS = (1, 2, 3, 4, 5), (1, 2, 3)
FACTORS = (0.25, 0.5, 1.0, 2.0)
"""Of AdamW's best rate: candidates for a first try."""
ALPHA = 0.3
"""Concentration of classes on workers, where data are skewed."""
