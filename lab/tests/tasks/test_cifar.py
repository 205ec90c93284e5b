import os
import pickle

import numpy as np
import pytest

from cluster import run_workers
from distlion_lab.errors import DataError
from distlion_lab.tasks.cifar import TEST_FILE, TRAIN_FILES, read_cifar10

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


# An object array over 8 bytes of the file, whose first item is then replaced: an unpickler that
# calls numpy.ndarray lets go of whatever object lies at the address 0x4141414141414141.
OBJECTS_OVER_BYTES = (
    b"\x80\x05cnumpy\nndarray\n(K\x01\x85cnumpy\ndtype\nX\x01\x00\x00\x00O\x85R"
    b"\x96\x08\x00\x00\x00\x00\x00\x00\x00AAAAAAAAtRK\x00Ns."
)


def read_in_a_process(rank, world_size, folder):
    try:
        read_cifar10(folder)
    except DataError as error:
        return str(error)
    return "read"


def test_an_object_array_over_bytes_of_the_file_is_refused_and_touches_no_memory(folder):
    (folder / TRAIN_FILES[0]).write_bytes(OBJECTS_OVER_BYTES)
    (said,) = run_workers(read_in_a_process, 1, folder, process_group=False)
    assert TRAIN_FILES[0] in said


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
