"""Processes on the hosts of a lab: environment, output, ends."""

import os
import select
import signal
import subprocess
import sys

import pytest

from distlion.errors import InvalidArgumentError
from distlion_netlab import run_command
from distlion_netlab.launch import place_ranks


def collect(lab, command, **options):
    """Run a command; return its status, and the lines of each rank."""
    lines = {}
    status = run_command(
        lab,
        command,
        show=lambda rank, is_error, line: lines.setdefault(rank, []).append(line.decode()),
        **options,
    )
    return status, lines


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_ranks_of_a_host_are_neighbors():
    places = [(place.rank, place.host, place.local_rank) for place in place_ranks(2, 3)]
    assert places == [(0, 0, 0), (1, 0, 1), (2, 0, 2), (3, 1, 0), (4, 1, 1), (5, 1, 2)]


def test_environment_is_that_of_torchrun():
    environment = place_ranks(2, 3)[4].environment("10.77.0.1", 29500)
    assert environment == {
        "RANK": "4",
        "WORLD_SIZE": "6",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "3",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "MASTER_ADDR": "10.77.0.1",
        "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
    }


def test_a_host_without_process_is_an_error():
    with pytest.raises(InvalidArgumentError, match="per_host is 0"):
        place_ranks(2, 0)


def outlives_its_signal(pid):
    """Wait until a process that is about to die has died, at most 10 s."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    ended, _, _ = select.select([descriptor], [], [], 10)
    os.close(descriptor)
    return not ended


@pytest.mark.root
@pytest.mark.usefixtures("namespaces_work")
class TestInALab:
    def test_every_rank_runs_on_its_host(self, shared_lab):
        script = "echo $RANK $LOCAL_RANK; ip -4 -oneline address show eth0 | cut -d' ' -f7"
        status, lines = collect(shared_lab, ["sh", "-c", script], per_host=2)
        assert status == 0
        assert lines == {
            rank: [f"{rank} {rank % 2}", f"10.77.0.{rank // 2 + 1}/24"] for rank in range(6)
        }

    def test_output_without_a_last_newline_is_not_lost(self, shared_lab):
        _, lines = collect(shared_lab, ["printf", "one\\ntwo"])
        assert lines == {rank: ["one", "two"] for rank in range(3)}

    def test_output_shows_the_rank(self, shared_lab, capfd):
        run_command(shared_lab, ["sh", "-c", "echo out; echo err >&2"])
        shown = capfd.readouterr()
        assert sorted(shown.out.splitlines()) == ["[0] out", "[1] out", "[2] out"]
        assert sorted(shown.err.splitlines()) == ["[0] err", "[1] err", "[2] err"]

    def test_a_rank_that_fails_ends_the_others_and_names_the_status(self, shared_lab):
        # The others would read for ever: nobody writes into their fifo.
        script = "test $RANK = 1 && exit 7; exec tail -f /dev/null"
        status, _ = collect(shared_lab, ["sh", "-c", script])
        assert status == 7

    def test_a_rank_that_ignores_sigterm_is_killed(self, shared_lab):
        # What is ignored stays ignored in the program that takes the shell's place.
        script = 'test $RANK = 1 && exit 7; trap "" TERM; exec tail -f /dev/null'
        assert collect(shared_lab, ["sh", "-c", script])[0] == 7

    def test_a_rank_that_a_signal_killed_counts_as_128_and_the_signal(self, shared_lab):
        status, _ = collect(shared_lab, ["sh", "-c", "test $RANK != 2 || kill -KILL $$"])
        assert status == 128 + signal.SIGKILL

    @pytest.mark.parametrize(
        ("end", "how"),
        [("kill -SEGV $$", "was killed by SIGSEGV"), ("exit 7", "ended with exit code 7")],
    )
    def test_the_rank_that_failed_first_is_blamed(self, shared_lab, end, how):
        blamed = []
        script = f"test $RANK != 2 || {end}; exec tail -f /dev/null"
        run_command(
            shared_lab, ["sh", "-c", script], blame=lambda rank, how: blamed.append((rank, how))
        )
        assert blamed == [(2, how)]

    def test_nobody_is_blamed_where_all_end_well(self, shared_lab):
        blamed = []
        run_command(shared_lab, ["true"], blame=lambda *culprit: blamed.append(culprit))
        assert blamed == []

    def test_a_command_that_does_not_exist_is_127(self, shared_lab):
        status, lines = collect(shared_lab, ["no-such-command"])
        assert status == 127
        assert "no-such-command: No such file" in lines[0][0]

    def test_no_command_is_an_error(self, shared_lab):
        with pytest.raises(InvalidArgumentError, match="no command"):
            run_command(shared_lab, [])

    def test_grandchildren_end_with_their_rank(self, shared_lab):
        _, lines = collect(shared_lab, ["sh", "-c", "tail -f /dev/null >&- 2>&- & echo $!"])
        assert not any(outlives_its_signal(int(pid)) for (pid,) in lines.values())

    def test_no_process_is_left_when_showing_fails(self, shared_lab):
        pids = []

        def fail(rank, is_error, line):
            pids.append(int(line))
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            run_command(shared_lab, ["sh", "-c", "echo $$; exec tail -f /dev/null"], show=fail)
        assert not is_running(pids[0])

    def test_processes_die_with_the_one_that_started_them(self, namespaces_work):
        code = (
            "import os, signal\n"
            "from distlion_netlab import Lab, run_command\n"
            "def show(rank, is_error, line):\n"
            "    print(line.decode(), flush=True)\n"
            "    os.kill(os.getpid(), signal.SIGKILL)\n"
            "with Lab(1) as lab:\n"
            "    run_command(lab, ['sh', '-c', 'echo $$; exec tail -f /dev/null'], show=show)\n"
        )
        owner = subprocess.run(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=False
        )
        assert owner.returncode == -signal.SIGKILL
        assert not outlives_its_signal(int(owner.stdout))
