"""Damage to bytes, to JSON and to pickles, drawn from a generator of chance."""

from __future__ import annotations

import copy
import json
import pickletools
import random
from typing import Any

NUMBERS = (0, 1, 2, 7, 8, 9, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 1 << 31, (1 << 32) - 1, 1 << 62)
ODD_NUMBERS = [0, -1, 1, 2.5, 1e308, -1e-308, 10**30, 10**400, 1 << 63, True, float("nan")]
ODD_TEXTS = [
    "",
    "x",
    "$\\frac$",
    "\ud800",
    "\0",
    "../../x",
    "O",
    "V8",
    "float32",
    "u1,O",
    "a" * 999,
]
DEEP: Any = json.loads("[" * 200 + "]" * 200)
ODD = [*ODD_NUMBERS, *ODD_TEXTS, None, [], {}, [[]], {"$": "tensor"}, {"x": 1}, DEEP]


def mutate_bytes(data: bytes, chance: random.Random) -> bytes:
    """Flip, overwrite, cut out, repeat, move or append, one to four times."""
    damaged = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        if not damaged:
            break
        # What is read first decides what is read at all.
        place = chance.randrange(len(damaged) if chance.random() < 0.5 else min(len(damaged), 400))
        size = min(chance.choice((1, 2, 4, 8, 30, 300)), len(damaged) - place)
        _KINDS[chance.randrange(len(_KINDS))](damaged, place, size, chance)
    return bytes(damaged)


def _flip(data: bytearray, place: int, size: int, chance: random.Random) -> None:
    data[place] ^= 1 << chance.randrange(8)


def _put(data: bytearray, place: int, size: int, chance: random.Random) -> None:
    data[place : place + size] = chance.randbytes(size)


def _count(data: bytearray, place: int, size: int, chance: random.Random) -> None:
    """Write a number, as one that says a length or an offset."""
    size = min(size, 8)
    number = chance.choice(NUMBERS) % (1 << 8 * size)
    data[place : place + size] = number.to_bytes(size, chance.choice(("little", "big")))


def _cut(data: bytearray, place: int, size: int, chance: random.Random) -> None:
    del data[place : place + size]


def _end(data: bytearray, place: int, size: int, chance: random.Random) -> None:
    del data[place:]


def _repeat(data: bytearray, place: int, size: int, chance: random.Random) -> None:
    data[place:place] = data[place : place + size] * chance.choice((1, 2, 50))


def _move(data: bytearray, place: int, size: int, chance: random.Random) -> None:
    start = chance.randrange(len(data))
    data[place : place + size] = data[start : start + size]


_KINDS = (_flip, _put, _count, _cut, _end, _repeat, _move)


def mutate_json(value: Any, chance: random.Random) -> Any:
    """Replace, remove, add or swap values anywhere in a copy, one to three times."""
    changed = copy.deepcopy(value)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        if not isinstance(changed, dict | list) or not changed:
            return changed
        _change_a_value(changed, chance)
    return changed


def _change_a_value(root: Any, chance: random.Random) -> None:
    """Walk down from the root, and change what is there."""
    holder, key = root, _draw_key(root, chance)
    while isinstance(holder[key], dict | list) and holder[key] and chance.random() < 0.8:
        holder, key = holder[key], _draw_key(holder[key], chance)
    kind = chance.randrange(5)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(chance.choice([holder[key], *ODD])))
    elif kind == 1:
        holder[chance.choice(["x", "", key + "x", "$"])] = holder[key]
    elif kind == 2:
        holder[key] = copy.deepcopy(holder[_draw_key(holder, chance)])
    elif kind == 3 and type(holder[key]) in (int, float):
        holder[key] = chance.choice((-1, 2, 1000, 10**9)) * holder[key] + chance.choice((-1, 0, 1))
    else:
        holder[key] = copy.deepcopy(chance.choice(ODD))


def _draw_key(holder: Any, chance: random.Random) -> Any:
    return (
        chance.choice(list(holder)) if isinstance(holder, dict) else chance.randrange(len(holder))
    )


def mutate_json_text(text: bytes, chance: random.Random) -> bytes:
    """Damage JSON: mostly its values, else its characters, rarely by brackets without an end."""
    if chance.random() < 0.01:
        place = chance.randrange(len(text))
        return text[:place] + chance.choice((b"[", b'{"a":')) * 100_000 + text[place:]
    if chance.random() < 0.25:
        return mutate_bytes(text, chance)
    return json.dumps(mutate_json(json.loads(text), chance), indent=1).encode()


_OPCODES = [ord(opcode.code) for opcode in pickletools.opcodes]
# What a pickle that wants more than data would say.
_EVIL = (
    b"cnumpy\nndarray\n",
    b"cnumpy\ndtype\n",
    b"cnumpy.core.multiarray\n_reconstruct\n",
    b"c_codecs\nencode\n",
    b"cbuiltins\neval\n",
    b"X\x01\x00\x00\x00O\x85R",
    b"X\x02\x00\x00\x00u1\x85R",
    b"\x96\x08\x00\x00\x00\x00\x00\x00\x00AAAAAAAA",
    b"K\x00Ns",
    b"K\x00N\x86b",
    b"(K\x01tR",
    b"r\xff\xff\xff\x7f",
    b"\x8b\xff\xff\xff\x7f",
    b"\x8e\xff\xff\xff\xff\xff\xff\x00\x00",
    b"\x85" * 1000,
)


def list_opcodes(data: bytes) -> list[bytes]:
    """Cut a valid pickle into its opcodes, each with what belongs to it."""
    starts = [place for _, _, place in pickletools.genops(data)]
    return [data[start:stop] for start, stop in zip(starts, [*starts[1:], len(data)], strict=True)]


def mutate_pickle(opcodes: list[bytes], chance: random.Random) -> bytes:
    """Remove, repeat, swap, replace and add opcodes, or damage the bytes of one."""
    ops = list(opcodes)
    for _ in range(chance.choice((1, 1, 2, 3, 6))):
        place = chance.randrange(len(ops))
        kind = chance.randrange(7)
        if kind == 0 and len(ops) > 1:
            del ops[place]
        elif kind == 1:
            ops.insert(place, ops[chance.randrange(len(ops))])
        elif kind == 2:
            other = chance.randrange(len(ops))
            ops[place], ops[other] = ops[other], ops[place]
        elif kind == 3:
            ops.insert(place, chance.choice(_EVIL))
        elif kind == 4:
            ops[place] = bytes([chance.choice(_OPCODES)]) + ops[place][1:]
        elif kind == 5:
            ops.insert(
                place, bytes([chance.choice(_OPCODES)]) + chance.randbytes(chance.randrange(9))
            )
        else:
            ops[place] = mutate_bytes(ops[place], chance)
    return b"".join(ops)
