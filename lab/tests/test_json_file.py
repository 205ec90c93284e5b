"""JSON files are read within limits, and checked for what they must hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distlion_lab import json_file
from distlion_lab.errors import DataError
from distlion_lab.json_file import columns, fields, number, optional, read_json, row, text, whole


def write(folder: Path, content: bytes) -> Path:
    path = folder / "x.json"
    path.write_bytes(content)
    return path


def test_a_file_is_read_as_json(tmp_path: Path) -> None:
    content = '{"a": [1, 2.5, null, true], "\u2192": "\U0001f600"}'.encode()
    expected = {"a": [1, 2.5, None, True], "\u2192": "\U0001f600"}
    assert read_json(write(tmp_path, content)) == expected


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "Expecting value"),
        (b"{", "Expecting"),
        (b"\xff", "decode"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[" * 65 + b"]" * 65, "nested too deeply"),
        (b'{"a": ["\\ud800"]}', "half of a character"),
        (b'{"\\udc00": 1}', "half of a character"),
        (b"9" * 5000, "digits"),
    ],
)
def test_what_is_no_json_or_beyond_a_limit_is_refused(
    tmp_path: Path, content: bytes, said: str
) -> None:
    with pytest.raises(DataError, match=said):
        read_json(write(tmp_path, content))


def test_a_file_that_is_too_large_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_file, "_MOST_BYTES", 10)
    assert read_json(write(tmp_path, b"[1,2,3,45]")) == [1, 2, 3, 45]
    with pytest.raises(DataError, match="more than 10 bytes"):
        read_json(write(tmp_path, b"[1,2,3,456]"))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        read_json(tmp_path / "x.json")


SHAPE = fields(
    name=text,
    size=whole,
    rate=optional(number),
    rows=row(whole, least=1),
    series=columns(step=whole, loss=number),
)
VALID = {"name": "a", "size": 3, "rate": None, "rows": [1], "series": {"step": [1], "loss": [0.5]}}


def test_a_value_of_the_shape_is_accepted_with_fields_of_its_own() -> None:
    SHAPE({**VALID, "more": {}}, "x")
    SHAPE({**VALID, "rate": -1e38}, "x")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": 1}, "x.name is '1'; expected a string"),
        ({"size": -1}, "x.size"),
        ({"size": True}, "x.size"),
        ({"size": 1.0}, "x.size"),
        ({"size": 1 << 63}, "x.size"),
        ({"rate": float("nan")}, "x.rate"),
        ({"rate": float("inf")}, "x.rate"),
        ({"rate": 10**39}, "x.rate"),
        ({"rate": False}, "x.rate"),
        ({"rate": "1"}, "x.rate"),
        ({"rows": []}, "x.rows is .*a list of 1 or more"),
        ({"rows": {}}, "x.rows"),
        ({"rows": [1, None]}, "x.rows.1. is"),
        ({"series": {"step": [1]}}, "x.series lacks 'loss'"),
        ({"series": {"step": [1], "loss": []}}, "unequal lengths"),
        ({"series": []}, "an object"),
    ],
)
def test_another_value_is_refused_and_its_place_named(change: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        SHAPE({**VALID, **change}, "x")
