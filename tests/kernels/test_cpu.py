"""The C++ core as Python sees it: what it refuses, the GIL, its stub, and its absence.

What it computes is compared with the plain kernels in test_conformance.py.
"""

from __future__ import annotations

import importlib.util
import itertools
import mmap
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from distlion.errors import InvalidArgumentError, KernelBackendError
from distlion.kernels import Coefficients, Coin, ReplyFormat, Segment, cpu
from distlion.kernels.cpu import INSTRUCTION_SETS, Core, CpuKernels
from distlion.layout import Bucket, Slot

KERNELS = CpuKernels()
COIN = Coin(1)
HYPER = Coefficients(0.9, 0.99, 0.1, 0.0)
N = 100
API = "__dlpack_c_exchange_api__"
SLOTS = (Slot("first", N, 0, 0), Slot("second", N, 2, 2))
BUCKET = Bucket(0, (0, 1), SLOTS, 1)


def make_segments(**changes: object) -> list[Segment]:
    """Make two segments; `changes` are those of the second."""
    segments = [
        Segment(slot, torch.zeros(N), torch.ones(N), torch.zeros(N), HYPER) for slot in SLOTS
    ]
    return [segments[0], segments[1]._replace(**changes)]


def words(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def encode(out: Tensor | None = None, **changes: object) -> None:
    out = words(1, 1, 8) if out is None else out
    KERNELS.encode_signs(make_segments(**changes), COIN, out=out)


def commit(
    present: tuple[int, ...] = (1, 1),
    reply: Tensor | None = None,
    reply_format: ReplyFormat = ReplyFormat.SIGN,
    **changes: object,
) -> None:
    KERNELS.commit(
        make_segments(**changes),
        present,
        words(1, 1, 8) if reply is None else reply,
        reply_format=reply_format,
        rounding=None,
    )


def count(
    votes: Tensor | None = None,
    out: Tensor | None = None,
    present: Tensor | None = None,
    op: str = "count_signs",
) -> None:
    votes = words(3, 1, 1, 8) if votes is None else votes
    out = words(1, 1, 8) if out is None else out
    if present is None:
        present = torch.ones(votes.shape[0], 2, dtype=torch.bool)
    coin = (COIN,) if op in ("count_signs", "count_levels") else ()
    getattr(KERNELS, op)(votes, present, BUCKET, 0, *coin, out=out)


def apart(n: int) -> Tensor:
    """Every other element."""
    return torch.zeros(2 * n)[::2]


core = KERNELS._core
many = words(1, 1, 8).expand(4097, 1, 1, 8)
REFUSALS: dict[str, tuple[Callable[[], object], str]] = {
    # Tensors of segments.
    "gradient, size": (
        lambda: encode(grad=torch.ones(N - 1)),
        "gradient of second: given 99 elements, expected 100",
    ),
    "gradient, dtype": (lambda: encode(grad=torch.ones(N).double()), "gradient of second.*dtype"),
    "gradient, strides": (lambda: encode(grad=apart(N)), "gradient of second.*not contiguous"),
    "exp_avg, size": (lambda: encode(exp_avg=torch.ones(2 * N)), "exp_avg of second: given 200"),
    "exp_avg, dtype": (lambda: encode(exp_avg=torch.ones(N).half()), "exp_avg of second.*float32"),
    "exp_avg, strides": (lambda: encode(exp_avg=apart(N)), "exp_avg of second.*not contiguous"),
    "parameter, size": (lambda: commit(param=torch.ones(0)), "parameter of second: given 0"),
    "parameter, dtype": (
        lambda: commit(param=torch.ones(N).long(), grad=None),
        "parameter of second.*dtype",
    ),
    "parameter, strides": (lambda: commit(param=apart(N)), "parameter of second.*not contiguous"),
    "parameter, memory format": (
        lambda: commit(
            param=torch.zeros(1, 2, 5, 10).contiguous(memory_format=torch.channels_last)
        ),
        "parameter of second.*not contiguous",
    ),
    "gradient of another dtype": (
        lambda: commit(grad=torch.ones(N).bfloat16()),
        "gradient of second.*parameter's",
    ),
    "momentum alone, dtype": (
        lambda: KERNELS.update_momentum(make_segments(exp_avg=torch.ones(N).half()), [1, 1]),
        "exp_avg of second",
    ),
    "step alone, size": (
        lambda: KERNELS.step_alone(make_segments(param=torch.ones(1)), rounding=None),
        "parameter of second",
    ),
    "check, dtype": (
        lambda: KERNELS.check_finite(make_segments(grad=torch.ones(N).int())),
        "gradient of second",
    ),
    # Places of segments.
    "segments that overlap": (lambda: encode(slot=Slot("second", N, 2, 1)), "segments overlap"),
    "segments out of order": (
        lambda: KERNELS.encode_signs(make_segments()[::-1], COIN, out=words(1, 1, 8)),
        "segments overlap, or are not in the order",
    ),
    "replies that overlap": (lambda: commit(slot=Slot("second", N, 2, 0)), "segments overlap"),
    "out of too few blocks": (
        lambda: encode(slot=Slot("second", N, 2, 7)),
        "1 blocks.*need 9 words",
    ),
    "reply of too few blocks": (lambda: commit(reply=words(0, 1, 8)), "0 blocks.*need 4 words"),
    # What encoders write.
    "out, dtype": (lambda: encode(words(1, 1, 8, dtype=torch.int32)), "out: expected int64"),
    "out, dims": (lambda: encode(words(1, 8)), r"out: .*\(blocks, planes, 8\)"),
    "out, block": (lambda: encode(words(1, 1, 9)), r"out: .*\(blocks, planes, 8\)"),
    "out, strides": (lambda: encode(words(1, 2, 8)[:, ::2].expand(3, 1, 8)), "out.*not contiguous"),
    "out, planes of signs": (lambda: encode(words(1, 2, 8)), "out: 2 planes given, expected 1"),
    "out, planes of ternary": (
        lambda: KERNELS.encode_ternary(make_segments(), out=words(1, 1, 8)),
        "out: 1 planes given, expected 2",
    ),
    "out, no planes of levels": (
        lambda: KERNELS.encode_levels(make_segments(), COIN, norm="l1", step=1, out=words(1, 0, 8)),
        "out: 0 planes given, expected 1 to 8",
    ),
    "out, planes of levels": (
        lambda: KERNELS.encode_levels(make_segments(), COIN, norm="l1", step=1, out=words(1, 9, 8)),
        "out: 9 planes given, expected 1 to 8",
    ),
    "out, planes of directions": (
        lambda: KERNELS.encode_directions(
            make_segments(), dtype=torch.bfloat16, out=words(1, 32, 8)
        ),
        "out: 32 planes given, expected 16",
    ),
    "directions of another dtype": (
        lambda: KERNELS.encode_directions(
            make_segments(), dtype=torch.float16, out=words(1, 16, 8)
        ),
        "dtype is torch.float16",
    ),
    # Replies.
    "reply, dtype": (lambda: commit(reply=words(1, 1, 8).double()), "reply: expected int64"),
    "reply, dims": (lambda: commit(reply=words(1, 1, 1, 8)), "reply: expected int64 of shape"),
    "reply, planes of signs": (lambda: commit(reply=words(1, 2, 8)), "reply: 2 planes.*sign"),
    "reply, planes of ternary": (
        lambda: commit(reply_format=ReplyFormat.TERNARY),
        "reply: 1 planes.*ternary",
    ),
    "reply, no planes of a count": (
        lambda: commit(reply=words(1, 0, 8), reply_format=ReplyFormat.COUNT),
        "reply: 0 planes.*count",
    ),
    "reply, planes of a count": (
        lambda: commit(reply=words(1, 21, 8), reply_format=ReplyFormat.COUNT),
        "reply: 21 planes.*count",
    ),
    "reply format": (
        lambda: core.commit(
            core.read_segments(make_segments()), [1, 1], words(1, 1, 8), "own", None, True, 1
        ),
        "reply_format is 'own', expected 'sign', 'ternary' or 'count'",
    ),
    "too few present": (lambda: commit(present=(1,)), "present: fewer numbers than segments"),
    "too many present": (lambda: commit(present=(1, 1, 1)), "present: more numbers than segments"),
    # Counting.
    "votes, dtype": (lambda: count(words(3, 1, 1, 8, dtype=torch.int32)), "votes: expected int64"),
    "votes, dims": (lambda: count(words(3, 1, 8)), r"votes: .*\(workers, blocks, planes, 8\)"),
    "votes, strides": (
        lambda: core.count_signs(
            words(3, 1, 2, 8)[:, :, ::2], words(3, 2).bool(), SLOTS, 0, 1, False, words(1, 1, 8), 1
        ),
        "votes.*not contiguous",
    ),
    "votes, planes of signs": (lambda: count(words(3, 1, 2, 8)), "votes: they have 2 planes"),
    "votes, planes of ternary": (
        lambda: count(words(3, 1, 1, 8), words(1, 2, 8), op="count_ternary"),
        "votes: they have 1 planes",
    ),
    "votes, planes of levels": (
        lambda: count(words(3, 1, 9, 8), op="count_levels"),
        "votes: they have 9 planes",
    ),
    "votes, planes of directions": (
        lambda: KERNELS.sum_directions(
            words(1, 1, 16, 8),
            words(1, 2).bool(),
            BUCKET,
            0,
            dtype=torch.float32,
            out=words(1, 2, 8),
        ),
        "votes: they have 16 planes",
    ),
    "sum of another dtype": (
        lambda: KERNELS.sum_directions(
            words(1, 1, 16, 8),
            words(1, 2).bool(),
            BUCKET,
            0,
            dtype=torch.float16,
            out=words(1, 2, 8),
        ),
        "dtype is torch.float16",
    ),
    "no workers": (lambda: count(words(0, 1, 1, 8)), "those of 0 workers, expected 1 to 4096"),
    "too many workers": (lambda: count(many), "those of 4097 workers, expected 1 to 4096"),
    "counts, blocks": (lambda: count(out=words(2, 1, 8)), "out: given 2 blocks.*expected 1 of 1"),
    "counts, planes": (
        lambda: count(out=words(1, 3, 8), op="count_ones"),
        "out: given 1 blocks of 3 planes, expected 1 of 2",
    ),
    "counts, strides": (
        lambda: count(words(3, 2, 1, 8), words(2, 2, 8)[:, :1]),
        "out.*not contiguous",
    ),
    "present, dtype": (lambda: count(present=words(3, 2)), r"present: .* bool of shape \(3, 2\)"),
    "present, size": (lambda: count(present=words(3, 1).bool()), r"present: .*shape \(3, 2\)"),
    "present, dims": (lambda: count(present=words(6).bool()), r"present: .*shape \(3, 2\)"),
    # The rest.
    "instruction set": (lambda: CpuKernels("sse9"), "instruction_set is 'sse9'"),
    "coin, dtype": (lambda: core.coin(1, False, 0, torch.zeros(3)), "out: expected int64"),
    "digest, dtype": (lambda: KERNELS.digest(words(3)), "tensor: expected elements of 1, 2 or 4"),
    "square sums, dtype": (
        lambda: KERNELS.square_sums(torch.ones(3).double()),
        "tensor: .*dtype.*float32, bfloat16 or float16",
    ),
    "square sums, strides": (
        lambda: core.square_sums(apart(N), torch.zeros(1).double(), 1),
        "tensor: .*not contiguous",
    ),
    "square sums, size of out": (
        lambda: core.square_sums(torch.ones(4097), torch.zeros(1).double(), 1),
        "out: expected float64, one element for 4096",
    ),
    "square sums, dtype of out": (
        lambda: core.square_sums(torch.ones(N), torch.zeros(1), 1),
        "out: expected float64, one element for 4096",
    ),
    "square sums, strides of out": (
        lambda: core.square_sums(torch.ones(4097), torch.zeros(4).double()[::2], 1),
        "out: .*not contiguous",
    ),
    "checksum, dtype": (lambda: KERNELS.checksum(words(3)), "data: expected uint8"),
    "stream, dtype": (
        lambda: core.stream_encode(torch.ones(64).int(), torch.ones(64), words(1), 1),
        "expected float32, 64 elements for a word",
    ),
    "stream, size": (
        lambda: core.stream_encode(torch.ones(65), torch.ones(64), words(1), 1),
        "expected float32, 64 elements for a word",
    ),
    "stream, momentum": (
        lambda: core.stream_commit(torch.ones(64), torch.ones(63), torch.ones(64), None, 1),
        "expected float32, 64 elements for a word",
    ),
    "stream, reply": (
        lambda: core.stream_commit(torch.ones(64), torch.ones(64), torch.ones(64), words(2), 1),
        "reply: expected int64, one word for 64 elements",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_does_not_fit_is_refused_and_named(case: str) -> None:
    call, message = REFUSALS[case]
    with pytest.raises(InvalidArgumentError, match=message):
        call()


def test_the_transpose_of_present_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="present"):
        count(present=torch.ones(2, 3, dtype=torch.bool))


def test_places_whose_sum_would_overflow_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="at most 2\\^56"):
        encode(slot=Slot("second", N, 2, 2**64 - 1))
    with pytest.raises(InvalidArgumentError, match="at most 2\\^56"):
        encode(slot=Slot("second", 2**64 - 1, 2, 2))


@pytest.mark.parametrize("by_table", [True, False])
def test_tensors_without_memory_of_their_own_are_refused(by_table: bool) -> None:
    emptied = torch.ones(N)
    emptied.untyped_storage().resize_(0)
    api = Tensor.__dlpack_c_exchange_api__ if by_table and hasattr(Tensor, API) else None
    with pytest.raises(InvalidArgumentError, match="memory of its own"):
        Core(KERNELS.instruction_set, api).digest(emptied, 1)


def test_autograd_is_told_of_what_an_op_writes() -> None:
    segments = make_segments(grad=None)
    reply = words(1, 1, 8)
    KERNELS.apply_reply(segments, (1, 0), reply, reply_format=ReplyFormat.SIGN, rounding=None)
    versions = [(segment.param._version, segment.exp_avg._version) for segment in segments]
    assert versions == [(1, 0), (0, 0)]
    KERNELS.commit(segments, (1, 1), reply, reply_format=ReplyFormat.SIGN, rounding=None)
    versions = [(segment.param._version, segment.exp_avg._version) for segment in segments]
    assert versions == [(2, 1), (1, 0)]
    KERNELS.step_alone(segments, rounding=None)
    KERNELS.update_momentum(segments, (1, 1))
    versions = [(segment.param._version, segment.exp_avg._version) for segment in segments]
    assert versions == [(3, 3), (1, 0)]


def test_apply_reply_does_not_touch_the_momentum(tmp_path: Path) -> None:
    """Nor the gradient: memory that may only be read, or not even that, would end the process."""
    file = tmp_path / "momentum"
    file.write_bytes(bytes(4 * N))
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as memory:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that the memory cannot be written
            exp_avg = torch.frombuffer(memory, dtype=torch.float32)
        segments = make_segments(exp_avg=exp_avg)
        before = [segment.param.clone() for segment in segments]
        KERNELS.apply_reply(
            segments, (1, 1), words(1, 1, 8), reply_format=ReplyFormat.SIGN, rounding=None
        )
        assert not any(
            torch.equal(segment.param, param)
            for segment, param in zip(segments, before, strict=True)
        )
        del segments, exp_avg


def test_where_no_thread_may_be_had_the_work_is_done_all_the_same() -> None:
    program = """
import resource, torch
from distlion.kernels.cpu import CpuKernels
data = torch.arange(1 << 22, dtype=torch.int32)
kernels = CpuKernels()
torch.set_num_threads(1)
expected = kernels.digest(data)
torch.set_num_threads(16)
with open("/proc/self/statm") as statm:
    used = int(statm.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (20 << 20),) * 2)
print(kernels.digest(data) == expected)
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False
    )
    assert (ended.returncode, ended.stdout.strip()) == (0, "True"), ended.stderr


def test_fewer_than_no_voters_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="-1"):
        commit(present=(1, -1))


def test_no_thread_counts_as_one() -> None:
    core = Core(KERNELS.instruction_set, None)
    assert core.digest(torch.ones(N), 0) == core.digest(torch.ones(N), 1)


def test_tensors_of_another_device_are_refused() -> None:
    """Torch has a say of its own where tensors are read by its exchange table."""
    elsewhere = torch.ones(N, device="meta")
    with pytest.raises((InvalidArgumentError, RuntimeError)):
        encode(grad=elsewhere)
    by_attributes = Core(KERNELS.instruction_set, None)
    with pytest.raises(InvalidArgumentError, match=r"tensor: .* not on the CPU"):
        by_attributes.digest(elsewhere, 1)
    with pytest.raises(InvalidArgumentError, match=r"tensor: .* not contiguous"):
        by_attributes.digest(apart(N), 1)


def test_tensors_that_are_read_by_their_attributes_are_named_too() -> None:
    by_attributes = Core(KERNELS.instruction_set, None)
    for wrong, message in (
        (torch.ones(N, device="meta"), "gradient of second: .* not on the CPU"),
        (apart(N), "gradient of second: .* not contiguous"),
        (torch.ones(N).double(), "gradient of second: .*dtype"),
        (torch.ones(N - 1), "gradient of second: given 99 elements, expected 100"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            by_attributes.read_segments(make_segments(grad=wrong))


def test_what_is_no_tensor_is_refused() -> None:
    for junk in ("junk", 3, [1.0] * N, object()):
        with pytest.raises((AttributeError, RuntimeError, TypeError)):
            encode(grad=junk)


def test_what_is_no_exchange_table_is_refused() -> None:
    for junk in ("junk", 3, object()):
        with pytest.raises(ValueError, match="PyCapsule"):
            Core(KERNELS.instruction_set, junk)


def test_a_segment_of_too_few_fields_is_refused() -> None:
    with pytest.raises(IndexError):
        KERNELS.encode_signs([make_segments()[0][:2]], COIN, out=words(1, 1, 8))  # type: ignore[list-item]


def test_coefficients_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(TypeError):
        encode(coefficients=("fast", 0.9, 0.1, 0.0, 1.0))


def test_what_does_not_fit_is_refused_when_it_is_gathered() -> None:
    with pytest.raises(InvalidArgumentError, match="exp_avg of second: given 1"):
        KERNELS.gather(make_segments(exp_avg=torch.ones(1)))


def test_gathered_segments_keep_their_tensors() -> None:
    """The core has read addresses, which must stay good when the caller's own list is gone."""
    segments = make_segments()
    gathered = KERNELS.gather(segments)
    assert list(gathered) == segments
    before = [sys.getrefcount(segment.grad) for segment in gathered]
    del segments
    assert [sys.getrefcount(segment.grad) for segment in gathered] == before
    assert KERNELS.check_finite(gathered) == [True, True]


def test_an_error_leaves_everything_as_it_was() -> None:
    segments = make_segments(param=torch.ones(N - 1))
    with pytest.raises(InvalidArgumentError):
        KERNELS.step_alone(segments, rounding=None)
    assert not segments[0].param.any()
    out = torch.full((1, 1, 8), -1)
    with pytest.raises(InvalidArgumentError):
        encode(out, grad=torch.ones(N - 1))
    assert bool((out == -1).all())


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
        self.sums = torch.zeros(n // 4096, dtype=torch.float64)
        self.votes = words(4, n_blocks, 2, 8)
        self.present = torch.ones(4, 1, dtype=torch.bool)
        self.sign = words(n_blocks, 1, 8)
        self.ternary = words(n_blocks, 2, 8)


LONG_CALLS: dict[str, Callable[[Big], object]] = {
    "coin": lambda big: core.coin(1, False, 0, big.row),
    "encode_signs": lambda big: core.encode_signs(big.table, 1, False, big.sign, 1),
    "check_finite": lambda big: core.check_finite(big.table, 1),
    "count_ternary": lambda big: core.count_ternary(
        big.votes, big.present, big.slots, 0, big.ternary, 1
    ),
    "commit": lambda big: core.commit(big.table, [1], big.sign, "sign", None, True, 1),
    "update_momentum": lambda big: core.update_momentum(big.table, [1], 1),
    "step_alone": lambda big: core.step_alone(big.table, None, 1),
    "digest": lambda big: core.digest(big.segments[0].param, 1),
    "square_sums": lambda big: core.square_sums(big.segments[0].param, big.sums, 1),
    "checksum": lambda big: core.checksum(big.row.view(torch.uint8), 0),
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
    other.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    try:
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
    expected = [KERNELS.digest(tensor) for tensor in data]
    found: list[list[int]] = [[] for _ in data]

    def work(k: int) -> None:
        found[k].extend(KERNELS.digest(data[k]) for _ in range(50))

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
