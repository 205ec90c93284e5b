import json

import numpy as np
import pytest
import torch

from distlion_lab.errors import DataError
from distlion_lab.tasks.base import batch_loss, score_batch, seeded_generator
from distlion_lab.tasks.partition import ByBook, Contiguous, Even
from distlion_lab.tasks.text import TextTask, Tokenizer

TINY = {"model_type": "gpt2", "vocab_size": 256, "n_positions": 16, "n_embd": 8, "n_layer": 1}
TINY |= {"n_head": 2}


@pytest.fixture
def numbered(tmp_path):
    """A text whose windows show their place: line k holds k."""
    path = tmp_path / "numbers.txt"
    path.write_text("".join(f"{line:07d}\n" for line in range(2000)))
    return path


@pytest.fixture
def config_path(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    return path


@pytest.fixture
def task(numbered, config_path):
    return TextTask(
        data=str(numbered), tokenizer=Tokenizer.BYTE, model_config=config_path, batch_size=64
    )


def windows_of(batch):
    rows = torch.cat([batch.inputs["input_ids"], batch.targets[:, -1:]], dim=1)
    return {bytes(row.tolist()) for row in rows}


def test_ranks_draw_from_disjoint_parts_of_the_text(task, numbered):
    text = numbered.read_bytes()
    spans = []
    for rank in range(3):
        batches = [
            task.training_batch(seed=0, step=step, rank=rank, world_size=3) for step in range(10)
        ]
        places = [text.index(window) for batch in batches for window in windows_of(batch)]
        spans.append((min(places), max(places) + 17))
    assert spans[0][1] <= spans[1][0]
    assert spans[1][1] <= spans[2][0]


@pytest.fixture
def books(tmp_path):
    """A folder of 20 books, each of one letter only; t.txt is the 20th and held out."""
    folder = tmp_path / "books"
    folder.mkdir()
    for number, letter in enumerate("abcdefghijklmnopqrst"):
        (folder / f"{letter}.txt").write_text(letter * (1000 + 100 * number))
    return folder


def letters_by_rank(folder, config_path, partition, *, world_size, tokenizer=Tokenizer.BYTE):
    """Return for each rank the distinct tokens that it sees in 60 batches of 16 windows."""
    task = TextTask(
        data=str(folder),
        tokenizer=tokenizer,
        model_config=config_path,
        batch_size=16,
        partition=partition,
    )
    return [
        set(
            torch.cat(
                [
                    task.training_batch(
                        seed=0, step=step, rank=rank, world_size=world_size
                    ).targets.flatten()
                    for step in range(60)
                ]
            ).tolist()
        )
        for rank in range(world_size)
    ]


# A book of one letter is one word.
@pytest.mark.parametrize("tokenizer", [Tokenizer.BYTE, Tokenizer.CHAR])
def test_whole_books_have_one_reader(books, config_path, tokenizer):
    seen = letters_by_rank(books, config_path, ByBook(), world_size=5, tokenizer=tokenizer)
    assert sum(map(len, seen)) == len(set().union(*seen)) == 19


def test_every_rank_reads_all_books_where_they_are_shared_out_evenly(books, config_path):
    # A rank owns a block of 512 tokens of every 1,024, and each book is longer.
    seen = letters_by_rank(books, config_path, Even(), world_size=2)
    assert seen[0] == seen[1] == set(b"abcdefghijklmnopqrs")


def test_contiguous_parts_of_a_folder_follow_the_names_of_its_books(books, config_path):
    first, second = letters_by_rank(books, config_path, Contiguous(), world_size=2)
    assert max(first) <= min(second)


@pytest.mark.parametrize("partition", [Even(), ByBook()], ids=repr)
def test_ranks_draw_disjoint_windows_whatever_the_partition(numbered, config_path, partition):
    text = numbered.read_bytes()
    folder = numbered.parent / "cut"
    folder.mkdir()
    for number in range(20):
        part = text[number * len(text) // 20 : (number + 1) * len(text) // 20]
        (folder / f"{number:02d}.txt").write_bytes(part)
    task = TextTask(
        data=str(folder),
        tokenizer=Tokenizer.BYTE,
        model_config=config_path,
        batch_size=64,
        partition=partition,
    )
    seen = []
    for rank in range(3):
        batches = [
            task.training_batch(seed=0, step=step, rank=rank, world_size=3) for step in range(20)
        ]
        starts = [text.index(window) for batch in batches for window in windows_of(batch)]
        seen.append({start + offset for start in starts for offset in range(17)})
    assert sum(map(len, seen)) == len(set().union(*seen))


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 32])
def test_default_partition_is_the_nth_part_of_the_text(task, numbered, world_size):
    text = numbered.read_bytes()[: task.describe()["train_tokens"]]
    for rank in range(world_size):
        begin, end = (len(text) * number // world_size for number in (rank, rank + 1))
        generator = seeded_generator(3, 7, rank)
        starts = begin + torch.randint(end - begin - 16, (64,), generator=generator)
        expected = [list(text[start : start + 16]) for start in starts.tolist()]
        batch = task.training_batch(seed=3, step=7, rank=rank, world_size=world_size)
        assert batch.inputs["input_ids"].tolist() == expected


@pytest.mark.parametrize("partition", [Even(), Contiguous(), ByBook()], ids=repr)
def test_one_worker_sees_the_same_windows_under_each_partition(books, config_path, partition):
    where = {"seed": 1, "step": 2, "rank": 0, "world_size": 1}
    first, second = (
        TextTask(
            data=str(books),
            tokenizer=Tokenizer.BYTE,
            model_config=config_path,
            batch_size=64,
            partition=chosen,
        ).training_batch(**where)
        for chosen in (partition, Contiguous())
    )
    assert torch.equal(first.inputs["input_ids"], second.inputs["input_ids"])


def test_fewer_books_than_workers_are_refused(books, config_path):
    with pytest.raises(DataError, match=r"in 19 books for 20 workers, .* ByBook\(\), .* rank 19"):
        letters_by_rank(books, config_path, ByBook(), world_size=20)


def test_facts_name_the_partition_and_count_the_books(books, config_path):
    task = TextTask(
        data=str(books),
        tokenizer=Tokenizer.BYTE,
        model_config=config_path,
        batch_size=1,
        partition=ByBook(),
    )
    facts = task.describe()
    assert (facts["partition"], facts["train_books"]) == ("ByBook()", 19)


def test_even_and_odd_heldout_batches_share_no_target(task, numbered):
    text = numbered.read_bytes()
    batches = task.heldout_batches()
    # A window ends with the token with which the next one may begin: as an input, not a target.
    even, odd = (
        {
            text.index(window) + offset
            for batch in batches[first::2]
            for window in windows_of(batch)
            for offset in range(1, 17)
        }
        for first in (0, 1)
    )
    assert even.isdisjoint(odd)
    assert len(even) and len(odd)


def test_batch_is_a_pure_function_of_seed_step_and_rank(task):
    first = task.training_batch(seed=3, step=7, rank=1, world_size=2)
    task.training_batch(seed=3, step=8, rank=1, world_size=2)
    again = task.training_batch(seed=3, step=7, rank=1, world_size=2)
    assert torch.equal(first.inputs["input_ids"], again.inputs["input_ids"])


@pytest.mark.parametrize("change", [{"seed": 4}, {"step": 8}])
def test_batch_changes_with_seed_and_step(task, change):
    where = {"seed": 3, "step": 7, "rank": 1, "world_size": 2}
    first = task.training_batch(**where)
    other = task.training_batch(**where | change)
    assert not torch.equal(first.inputs["input_ids"], other.inputs["input_ids"])


def test_targets_are_inputs_shifted_by_one(task):
    batch = task.training_batch(seed=0, step=0, rank=0, world_size=1)
    assert torch.equal(batch.inputs["input_ids"][:, 1:], batch.targets[:, :-1])


def test_training_never_sees_heldout_text(task, numbered):
    text = numbered.read_bytes()
    heldout = min(text.index(w) for b in task.heldout_batches() for w in windows_of(b))
    drawn = [
        text.index(window) + 17
        for step in range(20)
        for window in windows_of(task.training_batch(seed=0, step=step, rank=1, world_size=2))
    ]
    assert max(drawn) <= heldout


def test_too_many_workers_for_a_text_are_refused(task):
    with pytest.raises(DataError, match="5000 workers"):
        task.training_batch(seed=0, step=0, rank=4999, world_size=5000)


def test_model_weights_depend_on_the_seed_alone(task):
    torch.manual_seed(1)
    first = task.build_model(seed=5).state_dict()
    torch.manual_seed(2)
    second = task.build_model(seed=5).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_building_a_model_leaves_the_global_generator_alone(task):
    before = torch.get_rng_state()
    task.build_model(seed=5)
    assert torch.equal(before, torch.get_rng_state())


def test_model_config_sets_the_model(task):
    assert task.build_model(seed=0).config.n_embd == TINY["n_embd"]


def test_model_config_sets_the_context(task):
    batch = task.training_batch(seed=0, step=0, rank=0, world_size=1)
    assert batch.targets.shape == (64, TINY["n_positions"])


def test_preset_has_about_half_a_million_parameters():
    preset = TextTask(data=None, tokenizer=Tokenizer.BYTE, model_config=None, batch_size=1)
    assert 300_000 < sum(p.numel() for p in preset.build_model(seed=0).parameters()) < 600_000


def test_untrained_loss_is_near_that_of_guessing(task):
    batch = task.training_batch(seed=0, step=0, rank=0, world_size=1)
    loss = batch_loss(task.build_model(seed=0), batch).detach()
    # Initial logits have a deviation far below 1, so the loss is within a few tenths of ln 256.
    assert float(loss) == pytest.approx(np.log(256), abs=0.5)


def test_scoring_keeps_the_training_mode(task):
    model = task.build_model(seed=0)
    score_batch(model, task.heldout_batches()[0])
    assert model.training


def test_vocabulary_below_that_of_the_tokens_is_refused(tmp_path, numbered):
    path = tmp_path / "small.json"
    path.write_text(json.dumps(TINY | {"vocab_size": 100}))
    with pytest.raises(DataError, match="vocab_size 100"):
        TextTask(data=str(numbered), tokenizer=Tokenizer.BYTE, model_config=path, batch_size=1)


def test_char_level_task_counts_characters_not_bytes(tmp_path):
    path = tmp_path / "umlauts.txt"
    path.write_text("äöü\n" * 2000)
    task = TextTask(data=str(path), tokenizer=Tokenizer.CHAR, model_config=None, batch_size=1)
    facts = task.describe()
    assert facts["train_tokens"] + facts["heldout_tokens"] == 8000


def test_word_level_task_counts_words(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text("def run\n" * 2000)
    task = TextTask(data=str(path), tokenizer=Tokenizer.WORD, model_config=None, batch_size=1)
    facts = task.describe()
    assert facts["train_tokens"] + facts["heldout_tokens"] == 6000  # "def", " run", end of line
    assert facts["vocabulary"] == 1 + 3


def test_a_sample_continues_the_text_from_the_start_of_a_line(task, numbered):
    sample = task.sample(task.build_model(seed=0), seed=0)
    assert sorted(sample) == ["data", "model", "prompt"]
    text = sample["prompt"] + sample["data"]
    assert len(text) == 32 and len(sample["model"]) == len(sample["data"])
    assert sample["prompt"] == text[:8]  # the end of the line is its eighth
    assert f"\n{text}" in numbered.read_text()


def test_a_sample_is_the_models_and_its_seeds(task):
    model = task.build_model(seed=0)
    first = task.sample(model, seed=0)
    assert model.training
    assert task.sample(model, seed=0) == first
    assert task.sample(model, seed=1)["model"] != first["model"]
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.transformer.wte.weight[ord("x")] = 0
        model.transformer.ln_f.weight.zero_()
        model.transformer.ln_f.bias.fill_(100.0)
        model.lm_head.weight[ord("x")] = 1.0
    assert set(task.sample(model, seed=0)["model"]) == {"x"}


def test_a_text_without_line_ends_has_a_sample(tmp_path, config_path):
    path = tmp_path / "one_line.txt"
    path.write_text("word " * 1000)
    task = TextTask(
        data=str(path), tokenizer=Tokenizer.BYTE, model_config=config_path, batch_size=1
    )
    sample = task.sample(task.build_model(seed=0), seed=0)
    assert sample["prompt"].endswith(" ") and 3 <= len(sample["prompt"]) <= 8
    assert len(sample["prompt"] + sample["data"]) == 32


def test_what_is_unknown_is_never_written(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text("to be or not to be\n" * 1000)
    task = TextTask(data=str(path), tokenizer=Tokenizer.WORD, model_config=None, batch_size=1)
    model = task.build_model(seed=0)
    # An untrained model draws from 7 tokens and the unknown one alike.
    assert "…" not in task.sample(model, seed=0)["model"]


def test_tokens_that_only_the_config_has_are_never_written(tmp_path, numbered):
    path = tmp_path / "large.json"
    path.write_text(json.dumps(TINY | {"vocab_size": 50_257}))  # GPT-2's own
    task = TextTask(data=str(numbered), tokenizer=Tokenizer.BYTE, model_config=path, batch_size=1)
    # An untrained model draws from all of them alike.
    assert task.sample(task.build_model(seed=0), seed=0)["model"]
