"""The example of fine-tuning runs with votes and with DDP, from a folder with any network."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "09_finetune.py"
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "cheap", "pills", "meeting", "monday")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Save a tiny BERT with a tokenizer of eight words."""
    folder = tmp_path / "model"
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]"
    ).save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=8,
    )
    transformers.BertModel(config).save_pretrained(folder)
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = [{"text": "cheap pills", "label": 1}, {"text": "monday meeting", "label": 0}] * 40
    for name, some in (("train", rows), ("test", rows[:20])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, some)), "utf-8")
    return tmp_path


@pytest.mark.parametrize(("before", "method"), [([], "distlion"), (["--before"], "DDP")])
def test_it_learns_and_says_what_it_sent(
    model: Path, data: Path, before: list[str], method: str
) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    options = ["--model", model, "--data", data, "--folder", data / "out"]
    command = [*launcher, "--nproc-per-node=2", SCRIPT, *options, "--lr=0.02", "--steps=30"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*map(str, command), *before], check=True, env=environment, timeout=300)
    (found,) = [json.loads(path.read_text()) for path in (data / "out").glob("*.json")]
    assert found["method"].startswith(method)
    assert found["accuracy"] > 0.95
    parameters = sum(
        each.numel()
        for each in transformers.AutoModelForSequenceClassification.from_pretrained(
            model, num_labels=2
        ).parameters()
    )
    if method == "distlion":  # counted; DDP's bytes are computed
        bits = 8e6 * found["megabytes"] / parameters
        assert 0.9 < bits < 20
