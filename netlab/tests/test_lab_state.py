import json
import os
import subprocess
import sys

import pytest

from distlion_lab.errors import NetlabError
from distlion_netlab import LabPlan, LabState, list_states, read_state, state


@pytest.fixture(autouse=True)
def state_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(state, "STATE_FOLDER", tmp_path / "labs")
    return tmp_path / "labs"


def test_a_lab_that_was_claimed_is_found():
    LabState.of(LabPlan("abc", 3), stays=True).claim()
    assert read_state("abc").plan == LabPlan("abc", 3)


def test_a_name_can_be_claimed_once():
    mine = LabState.of(LabPlan("abc", 3), stays=True)
    mine.claim()
    with pytest.raises(NetlabError, match="netlab down --name abc"):
        mine.claim()


def test_a_file_that_describes_no_lab_is_named_where_it_takes_the_place_of_one(state_folder):
    state_folder.mkdir()
    path = state_folder / "abc.json"
    path.write_text("")
    with pytest.raises(NetlabError, match=f"{path} describes no lab .* remove this file"):
        LabState.of(LabPlan("abc", 3), stays=True).claim()


def test_a_claim_that_cannot_be_written_leaves_no_file(state_folder, monkeypatch):
    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(state.json, "dump", fail)
    with pytest.raises(NetlabError, match=r"abc\.json cannot be written: No space left"):
        LabState.of(LabPlan("abc", 3), stays=True).claim()
    assert list(state_folder.iterdir()) == []


def test_a_forgotten_lab_is_not_found():
    mine = LabState.of(LabPlan("abc", 3), stays=True)
    mine.claim()
    mine.forget()
    with pytest.raises(NetlabError, match="no lab named 'abc'; labs on this machine: none"):
        read_state("abc")


def test_unknown_lab_is_an_error_that_lists_the_known():
    LabState.of(LabPlan("abc", 3), stays=True).claim()
    with pytest.raises(NetlabError, match="labs on this machine: abc"):
        read_state("xyz")


def test_files_that_are_no_labs_are_passed_over(state_folder):
    state_folder.mkdir()
    (state_folder / "a.json").write_text("{")
    (state_folder / "b.json").write_text('{"name": "b"}')
    other = {"name": "other", "n_hosts": 2, "owner_pid": None, "owner_start": None}
    (state_folder / "c.json").write_text(json.dumps(other))
    assert list_states() == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_lab_of_a_running_process_is_not_abandoned():
    assert not LabState.of(LabPlan("abc", 3), stays=False).is_abandoned


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_lab_of_an_ended_process_is_abandoned():
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert LabState("abc", 3, ended.pid, 1).is_abandoned


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_lab_whose_process_number_came_back_is_abandoned():
    mine = LabState.of(LabPlan("abc", 3), stays=False)
    assert mine.owner_start is not None
    assert LabState("abc", 3, os.getpid(), mine.owner_start - 1).is_abandoned


def test_a_lab_that_stays_is_never_abandoned():
    assert not LabState.of(LabPlan("abc", 3), stays=True).is_abandoned
