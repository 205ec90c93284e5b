"""A name server that does not answer: torch asks it for each address, on both ends of a store."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

WAIT_S = 9
"""Longer than a store may be silent."""

SCRIPT = r"""
import logging, socket, subprocess, sys, threading
logging.basicConfig(level="WARNING", stream=sys.stdout, format="%(message)s")
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("127.0.0.1", 53))
asked, is_silent = [], threading.Event()
def answer():
    while True:
        question, address = server.recvfrom(512)
        asked.append(is_silent.is_set())
        if not is_silent.is_set():  # there is no such name
            server.sendto(question[:2] + b"\x81\x83" + question[4:], address)
threading.Thread(target=answer, daemon=True).start()
command = [sys.executable, "-m", "distlion", "crew", "--port", "29400"]
keeper = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
assert "listens" in keeper.stdout.readline()
from functools import partial
from distlion.crew.admission import ask
from distlion.crew.membership import decide_among, read_decision
from distlion.crew.epoch import take_id
from distlion.crew.epoch import Member
from distlion.crew.store import Rendezvous
def connect():
    numbers = {"min_workers": 2, "max_workers": 2}
    return Rendezvous("127.0.0.1:29400", run_id="run", secret="secret", **numbers)
ends, places = [connect(), connect()], []
def join(end):
    member = Member(take_id(end.store), 0, 0, 0, "host", 0)
    decide = partial(decide_among, end, min_workers=2)
    found = ask(end, member, min_workers=2, limit_s=60, decide=decide)
    places.append(read_decision(end, found, member).place)
is_silent.set()
late = connect()
threads = [threading.Thread(target=join, args=(end,)) for end in ends]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
for end in (*ends, late):
    end.end()
keeper.kill()
print("asked", asked.count(False), asked.count(True), "places", sorted(places))
"""


def test_a_name_server_that_falls_silent_does_not_end_a_crew(tmp_path: Path) -> None:
    if subprocess.run(["unshare", "--net", "--mount", "true"], check=False).returncode:
        pytest.skip("needs the right to make namespaces, as root has")
    script, names = tmp_path / "meet.py", tmp_path / "resolv.conf"
    script.write_text(SCRIPT)
    names.write_text(f"nameserver 127.0.0.1\noptions timeout:{WAIT_S} attempts:1\n")
    run = f"exec {sys.executable} {script}"
    mount = f"mount --bind {names} /etc/resolv.conf"
    done = subprocess.run(
        [
            "env",
            "-u",
            "RES_OPTIONS",
            "unshare",
            "--net",
            "--mount",
            "sh",
            "-c",
            f"ip link set lo up && {mount} && {run}",
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    _, answered, unanswered, _, *places = done.stdout.splitlines()[-1].split(" ", 4)
    assert places == ["[0, 1]"], said
    assert int(answered) >= 9, said  # the store's own, and both ends of two workers' connections
    # Both ends of the late one: a worker that gives up its store would have asked too.
    assert int(unanswered) == 2, said
    assert "a name server of this host seems not to answer" in said
    assert "does not answer (" not in said
