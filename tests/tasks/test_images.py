import json
import pickle

import numpy as np
import pytest
import torch

from distlion.errors import DataError
from distlion.tasks import ImageTask, batch_loss, score_batch
from distlion.tasks.cifar import TEST_FILE, TRAIN_FILES


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


def test_cifar_folder_trains_on_colour_images(tmp_path):
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
