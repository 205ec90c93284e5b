"""What differs between descriptions is found by what lines are about, not by where they stand."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

import distlion
from distlion.peers import handshake
from distlion.peers.handshake import find_difference
from distlion.peers.weights import encode_weight
from distlion.wire.frame import PROTOCOL_VERSION

SETTINGS = ["distlion version: 1", "world size: 3", "lr of group 0: 0.1"]


def test_equal_descriptions_differ_in_nothing() -> None:
    assert find_difference([SETTINGS] * 3) is None


def test_a_call_is_compared_with_a_call_and_never_with_a_setting() -> None:
    step, verify = ["call: step()", *SETTINGS], ["call: verify_replicas()", *SETTINGS]
    told = "call: step() on ranks 0, 2, but call: verify_replicas() on rank 1"
    assert find_difference([step, verify, step]) == (told, (1,))


def test_a_line_that_a_rank_has_not_is_told_as_missing() -> None:
    more = [*SETTINGS, "parameter 1 of group 0: second"]
    told = "parameter 1 of group 0: second on rank 1, but not on ranks 0, 2"
    assert find_difference([SETTINGS, more, SETTINGS]) == (told, (1,))


def test_lines_after_one_that_is_missing_are_still_compared_with_their_like() -> None:
    other = ["world size: 3", "lr of group 0: 0.2", "distlion version: 1"]
    told = "lr of group 0: 0.1 on rank 0, but lr of group 0: 0.2 on rank 1"
    assert find_difference([SETTINGS, other]) == (told, ())


def test_lines_of_one_kind_are_told_together() -> None:
    unfrozen = ["no longer frozen: a", "no longer frozen: b"]
    told = "no longer frozen: a, no longer frozen: b on rank 0, but no longer frozen: a on rank 1"
    assert find_difference([unfrozen, unfrozen[:1]]) == (told, ())


@dataclass
class Gathering:
    """All ranks of which one speaks; the others have said their records before."""

    others: list[bytes]
    said: list[bytes] = field(default_factory=list)

    def check_present(self, *, step: int) -> None: ...


def shake(monkeypatch: pytest.MonkeyPatch, others: list[bytes], **told: int) -> Any:
    """Return what one rank said, and what it heard of weights."""
    link = Gathering(others)

    def gather(link: Any, record: bytes, *, step: int) -> list[bytes]:
        link.said.append(record)
        return [record, *link.others]

    monkeypatch.setattr(handshake, "gather_bytes", gather)
    heard = handshake.shake_hands(link, SETTINGS, step=0, **told)  # type: ignore[arg-type]
    return link.said, heard


def test_a_record_without_a_weight_is_what_it_was_before_there_were_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = "\n".join(SETTINGS).encode()
    expected = struct.pack("<QQ", PROTOCOL_VERSION, len(text)) + hashlib.sha256(text).digest()
    assert shake(monkeypatch, []) == ([expected], [0])


def test_weights_differ_between_records_that_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    (plain,), _ = shake(monkeypatch, [])
    (heavy,), _ = shake(monkeypatch, [], weight=255)
    assert heavy == plain[:4] + struct.pack("<I", 255) + plain[8:]
    said, heard = shake(monkeypatch, [heavy, plain], weight=3)
    assert len(said) == 1 and heard == [3, 255, 0]


@pytest.mark.parametrize("at", [0, 3, 8, 15, 16, 47])
def test_any_other_byte_that_differs_is_a_disagreement(
    monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    (plain,), _ = shake(monkeypatch, [])
    other = bytearray(plain)
    other[at] ^= 1

    def stop(*_: Any, **__: Any) -> None:
        raise LookupError

    monkeypatch.setattr(handshake, "raise_difference", stop)
    with pytest.raises(LookupError):
        shake(monkeypatch, [bytes(other)], weight=2)


@pytest.mark.parametrize(("weight", "told"), [(1, 0), (2, 2), (255, 255), (0, 1), (256, 1)])
def test_a_weight_of_one_is_told_as_nothing(weight: int, told: int) -> None:
    settings = distlion.DistributedLion([torch.nn.Parameter(torch.ones(1))]).settings
    assert encode_weight(replace(settings, weight=weight)) == told
