"""The files of data sets and models: CIFAR-10's batches, and configs of transformers."""

from __future__ import annotations

import json
import pickle
import random
from pathlib import Path

import numpy as np

from comparisons import TINY_GPT
from distlion_lab.tasks.cifar import TEST_FILE, TRAIN_FILES, read_cifar10
from formats.mutate import list_opcodes, mutate_bytes, mutate_json_text, mutate_pickle


class CifarBatches:
    """A folder of batches, one of which is damaged: its opcodes, or its bytes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        batch = {
            b"batch_label": b"training batch 1 of 5",
            b"labels": [3],
            b"data": np.arange(3072).astype(np.uint8).reshape(1, -1),
            b"filenames": [b"a.png"],
        }
        self._whole = [pickle.dumps(batch, protocol=protocol) for protocol in (0, 2, 4, 5)]
        self._opcodes = [list_opcodes(whole) for whole in self._whole]
        for name in (*TRAIN_FILES, TEST_FILE):
            (folder / name).write_bytes(self._whole[1])

    def attempt(self, chance: random.Random) -> None:
        """Damage a batch, and read the folder."""
        number = chance.randrange(len(self._whole))
        if chance.random() < 0.7:
            damaged = mutate_pickle(self._opcodes[number], chance)
        else:
            damaged = mutate_bytes(self._whole[number], chance)
        (self._folder / TRAIN_FILES[0]).write_bytes(damaged)
        read_cifar10(self._folder)


class ModelConfigs:
    """A config of transformers, of which a model could be built."""

    def __init__(self, folder: Path) -> None:
        from distlion_lab.tasks.models import read_model_config  # transformers takes seconds

        self._read = read_model_config
        self._path = folder / "config.json"
        self._whole = json.dumps(TINY_GPT).encode()

    def attempt(self, chance: random.Random) -> None:
        """Damage the config, and read it."""
        self._path.write_bytes(mutate_json_text(self._whole, chance))
        self._read(self._path)
