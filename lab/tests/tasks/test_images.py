import json
import pickle

import numpy as np
import pytest
import torch

from distlion_lab.errors import DataError
from distlion_lab.tasks.base import batch_loss, score_batch, seeded_generator
from distlion_lab.tasks.cifar import TEST_FILE, TRAIN_FILES
from distlion_lab.tasks.images import ImageTask
from distlion_lab.tasks.partition import ByClass, Even


@pytest.fixture(scope="module")
def digits():
    return ImageTask(data=None, model_config=None, batch_size=100)


def rows_of(batch):
    return {image.numpy().tobytes() for image in batch.inputs["pixel_values"]}


def epoch_of(task, rank, world_size):
    steps = range(1438 // world_size // 100)
    batches = [
        task.training_batch(seed=0, step=step, rank=rank, world_size=world_size) for step in steps
    ]
    return [image.numpy().tobytes() for batch in batches for image in batch.inputs["pixel_values"]]


def test_ranks_own_disjoint_images(digits):
    first, second = (set(epoch_of(digits, rank, 2)) for rank in range(2))
    assert first.isdisjoint(second)


def test_rank_sees_no_image_twice_in_an_epoch(digits):
    seen = epoch_of(digits, 1, 3)
    assert len(seen) == len(set(seen))


def test_batch_is_a_pure_function_of_seed_step_and_rank(digits):
    where = {"seed": 1, "step": 30, "rank": 2, "world_size": 3}
    first, again = digits.training_batch(**where), digits.training_batch(**where)
    assert torch.equal(first.inputs["pixel_values"], again.inputs["pixel_values"])


def test_batch_across_the_end_of_an_epoch_is_full(digits):
    # 1,438 images: batch 14 holds the last 38 of the first epoch and 62 of the second.
    batch = digits.training_batch(seed=0, step=14, rank=0, world_size=1)
    assert len(batch.targets) == 100


def test_batch_larger_than_the_shard_is_full():
    task = ImageTask(data=None, model_config=None, batch_size=300)
    assert len(task.training_batch(seed=0, step=1, rank=0, world_size=10).targets) == 300


def test_epochs_come_in_different_orders(digits):
    first = digits.training_batch(seed=0, step=0, rank=0, world_size=1)
    task = ImageTask(data=None, model_config=None, batch_size=1438)
    second_epoch = task.training_batch(seed=0, step=1, rank=0, world_size=1)
    assert not torch.equal(first.inputs["pixel_values"], second_epoch.inputs["pixel_values"][:100])


def plain_batch(task, *, seed, step, rank, world_size):
    """A batch of the even partition, from nothing remembered: what training used to see."""
    shard = torch.randperm(1438, generator=seeded_generator(seed))[rank::world_size]
    first = step * task.units_per_batch
    epochs = range(first // len(shard), (first + task.units_per_batch - 1) // len(shard) + 1)
    order = torch.cat(
        [
            torch.randperm(len(shard), generator=seeded_generator(seed, epoch, rank))
            for epoch in epochs
        ]
    )
    offset = first - epochs.start * len(shard)
    return shard[order[offset : offset + task.units_per_batch]]


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 32])
@pytest.mark.parametrize("batch_size", [7, 300])
def test_default_partition_is_every_nth_of_a_permutation(batch_size, world_size):
    task = ImageTask(data=None, model_config=None, batch_size=batch_size)
    images, labels = task._data.train_images, task._data.train_labels
    for step in (0, 1, 5, 250, 4):
        for rank in range(world_size):
            where = {"seed": 1, "step": step, "rank": rank, "world_size": world_size}
            batch = task.training_batch(**where)
            chosen = plain_batch(task, **where)
            assert torch.equal(batch.inputs["pixel_values"], images[chosen])
            assert torch.equal(batch.targets, labels[chosen])


@pytest.mark.parametrize("partition", [Even(), ByClass(0.3)], ids=repr)
def test_batch_does_not_depend_on_what_was_drawn_before(partition):
    used, fresh = (
        ImageTask(data=None, model_config=None, batch_size=32, partition=partition)
        for _ in range(2)
    )
    for seed in range(6):
        for step in (40, 0, 17):
            used.training_batch(seed=seed, step=step, rank=seed % 4, world_size=4)
    where = {"seed": 0, "step": 17, "rank": 2, "world_size": 4}
    first, again = used.training_batch(**where), fresh.training_batch(**where)
    assert torch.equal(first.inputs["pixel_values"], again.inputs["pixel_values"])


def test_ranks_own_disjoint_images_when_skewed_by_class():
    task = ImageTask(data=None, model_config=None, batch_size=16, partition=ByClass(0.3))
    seen = []
    for rank in range(4):
        batches = [
            task.training_batch(seed=0, step=step, rank=rank, world_size=4) for step in range(60)
        ]
        seen.append(set().union(*map(rows_of, batches)))
    # 960 draws for each rank: some ranks have gone through all that they own.
    assert sum(map(len, seen)) == len(set().union(*seen))


def test_rank_trains_on_the_classes_of_its_shard():
    task = ImageTask(data=None, model_config=None, batch_size=100, partition=ByClass(0.02))
    batch = task.training_batch(seed=0, step=0, rank=0, world_size=4)
    # At alpha 0.02 a class has 1.06 owners in effect, so that a rank has 2.6 of the 10 classes.
    assert len(batch.targets.unique()) <= 6


def test_skew_without_a_batch_for_each_worker_is_refused_with_the_source():
    task = ImageTask(data=None, model_config=None, batch_size=200, partition=ByClass(0.1))
    with pytest.raises(DataError, match=r"digits: none of 1000 draws with alpha 0\.1"):
        task.training_batch(seed=0, step=0, rank=0, world_size=8)


def test_facts_name_the_partition():
    task = ImageTask(data=None, model_config=None, batch_size=1, partition=ByClass(0.3))
    assert task.describe()["partition"] == "ByClass(alpha=0.3)"


def test_even_and_odd_heldout_batches_share_no_image(digits):
    batches = digits.heldout_batches()
    even, odd = (set().union(*map(rows_of, batches[first::2])) for first in (0, 1))
    assert even.isdisjoint(odd)
    assert (len(even), len(odd)) == (200, 159)


def test_heldout_digits_are_never_trained_on(digits):
    trained = set(epoch_of(digits, 0, 1))
    heldout = [image for batch in digits.heldout_batches() for image in rows_of(batch)]
    assert trained.isdisjoint(heldout)


def test_more_workers_than_images_are_refused(digits):
    with pytest.raises(DataError, match="1438 images for 2000 workers"):
        digits.training_batch(seed=0, step=0, rank=1999, world_size=2000)


def test_untrained_loss_is_near_that_of_guessing(digits):
    batch = digits.training_batch(seed=0, step=0, rank=0, world_size=1)
    loss = float(batch_loss(digits.build_model(seed=0), batch).detach())
    # Initial logits have a deviation far below 1, so the loss is within a few tenths of ln 10.
    assert loss == pytest.approx(np.log(10), abs=0.5)


def test_score_counts_every_heldout_image(digits):
    model = digits.build_model(seed=0)
    assert sum(score_batch(model, batch).count for batch in digits.heldout_batches()) == 359


def test_cifar_folder_trains_on_color_images(tmp_path):
    for name in (*TRAIN_FILES, TEST_FILE):
        content = {
            b"data": np.random.default_rng(0).integers(0, 256, (8, 3072), dtype=np.uint8),
            b"labels": list(range(8)),
        }
        (tmp_path / name).write_bytes(pickle.dumps(content, protocol=2))
    task = ImageTask(data=str(tmp_path), model_config=None, batch_size=4)
    batch = task.training_batch(seed=0, step=0, rank=0, world_size=2)
    assert batch.inputs["pixel_values"].shape == (4, 3, 32, 32)
    assert torch.isfinite(batch_loss(task.build_model(seed=0), batch))


def test_all_of_cifars_test_batch_is_held_out(tmp_path):
    for name in (*TRAIN_FILES, TEST_FILE):
        count = 2345 if name == TEST_FILE else 1
        content = {b"data": np.zeros((count, 3072), dtype=np.uint8), b"labels": [0] * count}
        (tmp_path / name).write_bytes(pickle.dumps(content, protocol=2))
    task = ImageTask(data=str(tmp_path), model_config=None, batch_size=1)
    assert sum(len(batch.targets) for batch in task.heldout_batches()) == 2345
    assert task.describe()["heldout_images"] == 2345


def test_model_config_for_other_images_is_refused(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "vit", "image_size": 32, "num_channels": 3}))
    with pytest.raises(DataError, match=r"\(8, 1, 10\)"):
        ImageTask(data=None, model_config=path, batch_size=1)


def test_model_config_sets_the_model(tmp_path):
    path = tmp_path / "config.json"
    fields = {"model_type": "vit", "image_size": 8, "num_channels": 1, "patch_size": 4}
    fields |= {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    fields |= {"id2label": {str(label): str(label) for label in range(10)}}
    path.write_text(json.dumps(fields))
    model = ImageTask(data=None, model_config=path, batch_size=1).build_model(seed=0)
    assert model.config.hidden_size == 16
