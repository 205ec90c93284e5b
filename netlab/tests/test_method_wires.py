"""A method of a sweep may name the transport of its votes."""

import os

import pytest

from distlion.wire.tcp import WIRE_VARIABLE
from distlion_netlab.lab_run import _over
from distlion_netlab.method_names import find_wire, parse_vote


@pytest.mark.parametrize("before", [None, "tcp"])
def test_a_method_that_cannot_be_built_leaves_the_next_one_its_own_transport(monkeypatch, before):
    monkeypatch.delenv(WIRE_VARIABLE, raising=False)
    if before is not None:
        monkeypatch.setenv(WIRE_VARIABLE, before)
    seen = []

    def fail():
        with _over("gloo"):
            seen.append(os.environ[WIRE_VARIABLE])
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert seen == ["gloo"]
    assert os.environ.get(WIRE_VARIABLE) == before


def test_a_transport_may_follow_a_methods_name():
    assert find_wire("majority-auto-overlap") is None
    assert find_wire("majority-auto-overlap-gloo") == "gloo"
    assert parse_vote("majority-auto-overlap-gloo") == parse_vote("majority-auto-overlap")
