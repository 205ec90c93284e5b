import contextlib
import io
import os
import pickle
import random

import numpy as np
import pytest

from distlion.errors import DataError
from distlion.tasks.cifar import TEST_FILE, TRAIN_FILES, load_arrays, read_cifar10

PER_FILE = 6


def make_batch(seed, count=PER_FILE):
    generator = np.random.default_rng(seed)
    return {
        b"data": generator.integers(0, 256, (count, 3072), dtype=np.uint8),
        b"labels": [index % 10 for index in range(count)],
        b"filenames": [b"x.png"] * count,
    }


def write_folder(folder):
    folder.mkdir()
    for seed, name in enumerate((*TRAIN_FILES, TEST_FILE)):
        (folder / name).write_bytes(pickle.dumps(make_batch(seed), protocol=2))
    return folder


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "cifar-10-batches-py")


def test_standard_folder_gives_images_by_channel_row_and_column(folder):
    images, _, _, _ = read_cifar10(folder)
    assert np.array_equal(images[0], make_batch(0)[b"data"][0].reshape(3, 32, 32))


def test_standard_folder_joins_five_training_files(folder):
    images, labels, test_images, test_labels = read_cifar10(folder)
    assert (len(images), len(labels)) == (5 * PER_FILE, 5 * PER_FILE)
    assert (len(test_images), len(test_labels)) == (PER_FILE, PER_FILE)


def test_missing_file_is_named(folder):
    (folder / "data_batch_3").unlink()
    with pytest.raises(DataError, match="data_batch_3"):
        read_cifar10(folder)


class CallsSystem:
    def __reduce__(self):
        return os.system, ("true",)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickle_that_calls_the_shell_is_refused(protocol):
    with pytest.raises(pickle.UnpicklingError, match="system"):
        load_arrays(io.BytesIO(pickle.dumps({b"data": CallsSystem()}, protocol=protocol)))


class CallsEval:
    def __reduce__(self):
        return eval, ("1",)


def test_pickle_that_evaluates_code_is_refused():
    with pytest.raises(pickle.UnpicklingError, match="eval"):
        load_arrays(io.BytesIO(pickle.dumps(CallsEval(), protocol=2)))


def test_file_with_a_refused_pickle_is_a_data_error(folder):
    (folder / TEST_FILE).write_bytes(pickle.dumps(CallsSystem(), protocol=2))
    with pytest.raises(DataError, match="test_batch"):
        read_cifar10(folder)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no pickle",
        pickle.dumps([1, 2]),
        pickle.dumps({b"data": make_batch(0)[b"data"].astype(np.float32), b"labels": [0] * 6}),
        pickle.dumps(make_batch(0) | {b"labels": [0]}),
        pickle.dumps(make_batch(0) | {b"labels": [10] * PER_FILE}),
        pickle.dumps({b"data": np.zeros((2, 5), dtype=np.uint8), b"labels": [0, 1]}),
    ],
)
def test_file_of_another_layout_is_a_data_error(folder, content):
    (folder / TEST_FILE).write_bytes(content)
    with pytest.raises(DataError, match="test_batch"):
        read_cifar10(folder)


def test_damaged_pickles_are_read_or_refused_and_nothing_else(folder):
    path = folder / TRAIN_FILES[0]
    whole = pickle.dumps(make_batch(0, count=1) | {b"data": np.zeros((1, 3072), np.uint8)})
    chance = random.Random(0)
    accepted = 0
    for _ in range(1000):
        damaged = bytearray(whole)
        for _ in range(chance.randrange(1, 4)):
            # The zeros in the middle are pixels; what matters stands around them.
            place = chance.choice([chance.randrange(200), -1 - chance.randrange(100)])
            damaged[place] = chance.randrange(256)
        path.write_bytes(damaged[: chance.choice([len(damaged), chance.randrange(len(damaged))])])
        # Any other error ends the test.
        with contextlib.suppress(DataError):
            read_cifar10(folder)
            accepted += 1
    assert 0 < accepted < 500
