"""The C++ core as Python sees it: what it writes, threads, the GIL, its stub, and its absence.

What it computes is compared with the plain kernels in test_conformance*.py, what it refuses stands
in test_core_refusals.py.
"""

from __future__ import annotations

import importlib.util
import itertools
import mmap
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from core_calls import HYPER, KERNELS, N, make_segments, words
from distlion.errors import KernelBackendError
from distlion.kernels import ReplyFormat, Segment, cpu
from distlion.kernels.cpu import INSTRUCTION_SETS, Core, CpuKernels
from distlion.layout import Slot
from forked_programs import Programs

core = KERNELS._core


def test_autograd_is_told_of_what_an_op_writes() -> None:
    segments = make_segments(grad=None)
    reply = words(1, 1, 8)
    absent = [segment._replace(grad=None) for segment in segments]
    KERNELS.commit(absent, (1, 0), reply, reply_format=ReplyFormat.SIGN, rounding=None)
    versions = [(segment.param._version, segment.exp_avg._version) for segment in segments]
    assert versions == [(1, 0), (0, 0)]
    KERNELS.commit(segments, (1, 1), reply, reply_format=ReplyFormat.SIGN, rounding=None)
    versions = [(segment.param._version, segment.exp_avg._version) for segment in segments]
    assert versions == [(2, 1), (1, 0)]
    KERNELS.step_alone(segments, rounding=None)
    KERNELS.update_momentum(segments, (1, 1))
    versions = [(segment.param._version, segment.exp_avg._version) for segment in segments]
    assert versions == [(3, 3), (1, 0)]


def test_a_commit_without_a_gradient_does_not_touch_the_momentum(tmp_path: Path) -> None:
    """Memory that may only be read would end the process."""
    file = tmp_path / "momentum"
    file.write_bytes(bytes(4 * N))
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as memory:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that the memory cannot be written
            exp_avg = torch.frombuffer(memory, dtype=torch.float32)
        segments = [segment._replace(grad=None) for segment in make_segments(exp_avg=exp_avg)]
        before = [segment.param.clone() for segment in segments]
        KERNELS.commit(
            segments, (1, 1), words(1, 1, 8), reply_format=ReplyFormat.SIGN, rounding=None
        )
        assert not any(
            torch.equal(segment.param, param)
            for segment, param in zip(segments, before, strict=True)
        )
        del segments, exp_avg


def test_where_no_thread_may_be_had_the_work_is_done_all_the_same(
    programs: Programs, tmp_path: Path
) -> None:
    program = """
import resource, torch
from distlion.kernels.cpu import CpuKernels
data = torch.arange(1 << 22, dtype=torch.int32)
kernels = CpuKernels()
torch.set_num_threads(1)
expected = int(kernels.digests([data]))
torch.set_num_threads(16)
with open("/proc/self/statm") as statm:
    used = int(statm.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (20 << 20),) * 2)
print(int(kernels.digests([data])) == expected)
"""
    ended = programs.run(program, tmp_path)
    assert (ended.status, ended.text.strip()) == (0, "True")


def test_no_thread_counts_as_one() -> None:
    found = torch.zeros(2, dtype=torch.int64)
    for threads in (0, 1):
        core.digests([torch.ones(N)], found[threads : threads + 1], threads)
    assert found[0] == found[1] != 0


def test_gathered_segments_keep_their_tensors() -> None:
    """The core has read addresses, which must stay good when the caller's own list is gone."""
    segments = make_segments()
    gathered = KERNELS.gather(segments)
    assert list(gathered) == segments
    before = [sys.getrefcount(segment.grad) for segment in gathered]
    del segments
    assert [sys.getrefcount(segment.grad) for segment in gathered] == before
    assert KERNELS.check_finite(gathered).tolist() == [True, True]


def test_the_last_instruction_set_is_the_default() -> None:
    assert KERNELS.instruction_set == INSTRUCTION_SETS[-1]
    assert INSTRUCTION_SETS[0] == "baseline"


def test_the_stub_is_the_one_that_nanobind_generates() -> None:
    stubgen = pytest.importorskip("nanobind.stubgen")
    module = importlib.import_module("distlion.kernels._cpu")
    generator = stubgen.StubGen(module)
    generator.put(module)
    stub = Path(__file__).parents[2] / "src" / "distlion" / "kernels" / "_cpu.pyi"
    assert stub.read_text() == generator.get(), (
        "csrc/bindings.cpp has changed; write the stub anew with 'python -m nanobind.stubgen -m "
        f"distlion.kernels._cpu -o {stub}'"
    )


class Big:
    """Arguments that keep an op busy for a millisecond or more."""

    n_elements = 1 << 21

    def __init__(self) -> None:
        n, n_blocks = self.n_elements, self.n_elements // 512
        slot = Slot("big", n, 0, 0)
        self.slots = (slot,)
        segment = Segment(slot, torch.zeros(n), torch.ones(n), torch.zeros(n), HYPER)
        self.segments = [segment]  # kept for the table, which has addresses only
        self.table = core.read_segments(self.segments)
        self.row = words(n)
        # Made here, since torch's own ops let other threads run.
        self.octets = self.row.view(torch.uint8).unsqueeze(0)
        self.front = bytes(64)
        self.frames = torch.zeros(1, 64 + self.octets.shape[1], dtype=torch.uint8)
        core.write_frames(self.frames, self.front, self.octets, 60, 1)
        self.flag = torch.zeros(1, dtype=torch.bool)
        self.number = torch.zeros(1, dtype=torch.int64)
        self.sums = torch.zeros(n // 4096, dtype=torch.float64)
        self.votes = words(4, n_blocks, 2, 8)
        self.present = torch.ones(4, 1, dtype=torch.bool)
        self.sign = words(n_blocks, 1, 8)
        self.ternary = words(n_blocks, 2, 8)
        self.scale, self.total = torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.float64)
        self.said = (words(4, n_blocks, 1, 8), torch.ones(4, 1, 1), self.present, self.slots, 0)


LONG_CALLS: dict[str, Callable[[Big], object]] = {
    "encode_signs": lambda big: core.encode_signs(big.table, 1, False, big.sign, big.flag, 1),
    "check_finite": lambda big: core.check_finite(big.table, big.flag, 1),
    "count_ternary": lambda big: core.count_ternary(
        big.votes, big.present, big.slots, 0, big.ternary, 1
    ),
    "commit": lambda big: core.commit(big.table, [1], big.sign, "sign", None, 1),
    "encode_lots": lambda big: core.encode_lots(
        big.table, [], None, 1, False, big.sign, big.scale, big.flag, 1
    ),
    "move_residuals": lambda big: core.move_residuals(
        big.table, big.segments, [big.segments[0].param], big.sign, big.scale, big.flag, 1
    ),
    "count_steps": lambda big: core.count_steps(
        *big.said, [1] * 4, None, 1, False, big.sign, big.total, 1
    ),
    "add_outer_momentum": lambda big: core.add_outer_momentum(
        *(
            [each]
            for each in (big.segments[0].param, big.segments[0].grad, big.segments[0].exp_avg)
        ),
        *(0.9, True, 0.1, 1),
    ),
    "update_momentum": lambda big: core.update_momentum(big.table, [1], 1),
    "step_alone": lambda big: core.step_alone(big.table, None, 1),
    "digests": lambda big: core.digests([big.segments[0].param], big.number, 1),
    "square_sums": lambda big: core.square_sums(big.segments[0].param, big.sums, 1),
    "write_frames": lambda big: core.write_frames(big.frames, big.front, big.octets, 60, 1),
    "read_frames": lambda big: core.read_frames(
        big.frames, big.front, big.front, 60, 64, False, big.flag, big.number, 1
    ),
}


@pytest.mark.parametrize("op", LONG_CALLS)
def test_other_threads_run_during_a_call(op: str) -> None:
    """No thread is made to hand over the GIL here: another one runs if a call releases it."""
    big = Big()
    gate = threading.Lock()
    passed: list[bool] = []

    def pass_gate() -> None:
        with gate:
            passed.append(True)

    gate.acquire()
    other = threading.Thread(target=pass_gate)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    try:
        # It runs until it waits at the gate.
        other.start()
        gate.release()
        ran_without_call = [bool(passed) for _ in range(1000)]
        deadline = time.monotonic() + 30
        while not passed and time.monotonic() < deadline:
            LONG_CALLS[op](big)
        ran = bool(passed)
    finally:
        sys.setswitchinterval(interval)
        other.join()
    assert not any(ran_without_call), "the other thread could run anyway"
    assert ran


def test_without_the_extension_the_error_says_how_to_build_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "distlion.kernels._cpu", None)
    spec = importlib.util.spec_from_file_location("cpu_without_extension", cpu.__file__)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(KernelBackendError, match=r"pip install.*DISTLION_KERNELS=reference"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_many_threads_may_call_at_once() -> None:
    """Calls share nothing but their arguments."""
    data = [torch.rand(10_000, generator=torch.Generator().manual_seed(k)) for k in range(8)]
    expected = KERNELS.digests(data).tolist()
    found: list[list[int]] = [[] for _ in data]

    def work(k: int) -> None:
        found[k].extend(int(KERNELS.digests([data[k]])) for _ in range(50))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(len(data))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(set(numbers) == {one} for numbers, one in zip(found, expected, strict=True))


def test_every_instruction_set_is_found_by_its_name() -> None:
    for one, other in itertools.permutations(INSTRUCTION_SETS, 2):
        assert CpuKernels(one).instruction_set != CpuKernels(other).instruction_set
    with pytest.raises(TypeError):
        Core(3, None)  # type: ignore[arg-type]
