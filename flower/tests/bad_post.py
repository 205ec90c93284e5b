"""Replies that are lost, late, doubled or damaged, and which of them must count."""

from __future__ import annotations

import copy
import random
from collections import Counter

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord

from client_oracle import Sent


def as_sent(reply: Message) -> Sent:
    return Sent(
        reply.metadata.src_node_id,
        reply.content["metrics"]["num-examples"],
        reply.content["vote"]["vote"].data,
    )


def copy_reply(reply: Message) -> Message:
    return Message(content=copy.deepcopy(reply.content), metadata=copy.copy(reply.metadata))


def spoil(reply: Message, rng: random.Random) -> Message:
    """Damage one thing in a reply."""
    spoiled = copy_reply(reply)
    content, kind = spoiled.content, rng.randrange(9)
    data = bytearray(content["vote"]["vote"].data)
    if kind == 0:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        content["vote"]["vote"].data = bytes(data)
    elif kind == 1:
        content["vote"]["vote"].data = bytes(data[: rng.randrange(len(data))])
    elif kind == 2:
        content["vote"] = ArrayRecord({"vote": Array(np.frombuffer(data, np.uint8))})
    elif kind == 3:
        content["vote"]["vote"].dtype = "float32"
    elif kind == 4:
        del content[rng.choice(["vote", "distlion", "metrics"])]
    elif kind == 5:
        name = rng.choice(["round", "rule", "checksum"])
        content["distlion"][name] = rng.choice([-1, 1.5, "x", b"", [1], True])
    elif kind == 6:
        content["metrics"]["num-examples"] = rng.choice([0, -5, 1.5, [3], 2**60, 10**400])
    elif kind == 7:
        content[rng.choice(["vote", "distlion", "metrics"])] = rng.choice(
            [ConfigRecord(), MetricRecord(), ArrayRecord()]
        )
    else:
        return Message(error=Error(code=1, reason="it failed"), reply_to=reply)
    return spoiled


class Post:
    """Loses, holds back, doubles and damages replies, and keeps those that must count.

    Args:
        n_damaged: Damaged copies beside each reply that arrives.
    """

    def __init__(self, n_damaged: int = 0) -> None:
        self.rng, self.n_damaged = random.Random(3), n_damaged
        self.late: list[Message] = []
        self.rounds: list[list[Sent]] = []
        self.happened: Counter[str] = Counter()

    def __call__(self, replies: list[Message]) -> list[Message]:
        arriving, self.late = self.late, []
        valid = []
        for reply in replies:
            fate = self.rng.choice(["fine", "fine", "lost", "late", "doubled", "damaged"])
            self.happened[fate] += 1
            if fate == "late":
                self.late.append(copy_reply(reply))
            elif fate == "damaged":
                arriving.append(spoil(reply, self.rng))
            elif fate != "lost":
                valid.append(as_sent(reply))
                arriving += [reply] * (1 + (fate == "doubled"))
            for _ in range(self.n_damaged):
                self.happened["damaged"] += 1
                arriving.append(spoil(reply, self.rng))
        self.rounds.append(valid)
        self.rng.shuffle(arriving)
        return arriving
