"""How fast the device goes through the bytes of a step, and how fast other optimizers do."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import distlion
from distlion.kernels import Coefficients, Coin, Kernels, ReplyFormat, Segment, choose_kernels
from distlion.layout import BLOCK_WORDS, BucketLayout, fill_buckets, place_parameters

HYPER = Coefficients(0.9, 0.99, 1e-4, 0.1)
COIN = Coin(1)
N_TENSORS = 150
REPETITIONS = 30
F32, BF16 = torch.float32, torch.bfloat16
BITS = 4
ALIGNED, ODD = "multiples of 16", "odd"
"""Addresses of tensors: torch aligns its allocations, and a view may begin anywhere."""
# Op, parameter's and momentum's dtype, addresses, bytes an element, share of the copy rate that is
# the aim; None for none.
OPS = (
    ("encode 1 bit", F32, F32, ALIGNED, 8.125, 0.85),
    (f"encode {BITS} bits", F32, F32, ALIGNED, 8 + BITS / 8, 0.60),
    ("commit", F32, F32, ALIGNED, 20.125, 0.90),
    ("digest", F32, F32, ALIGNED, 4.0, 0.40),
    ("encode 1 bit", F32, F32, ODD, 8.125, None),
    ("commit", F32, F32, ODD, 20.125, None),
    ("encode 1 bit", BF16, BF16, ALIGNED, 4.125, 0.65),
    ("commit", BF16, BF16, ALIGNED, 10.125, 0.85),
    ("commit", BF16, F32, ALIGNED, 14.125, 0.85),
)


class Bench:
    """Tensors of one pair of dtypes at one kind of addresses, and the ops over them."""

    def __init__(self, n: int, kind: tuple[torch.dtype, torch.dtype, str], device: str) -> None:
        dtype, exp_avg_dtype, addresses = kind
        self.device = torch.device(device)
        self.kernels: Kernels = choose_kernels(self.device)
        sizes = [n // N_TENSORS] * N_TENSORS
        slots = place_parameters([f"p{index}" for index in range(N_TENSORS)], sizes)
        (self.bucket,) = fill_buckets(slots, [0] * len(slots), n_shards=1, bucket_elements=1 << 40)
        self.n = sum(sizes)
        skipped = int(addresses == ODD)

        def draw(wanted: torch.dtype) -> list[Tensor]:
            return [
                torch.randn(size + skipped, device=device).to(wanted)[skipped:] for size in sizes
            ]

        params, grads, exp_avgs = draw(dtype), draw(dtype), draw(exp_avg_dtype)
        self.params = params
        self.segments = self.kernels.gather(
            [
                Segment(slot, params[index], grads[index], exp_avgs[index], HYPER)
                for index, slot in enumerate(self.bucket.slots)
            ]
        )

    def make_call(self, op: str) -> Callable[[], object]:
        if op == "digest":
            return lambda: self.kernels.digests(self.params)
        signs = make_output(self.bucket, 1, self.device)
        if op == "encode 1 bit":
            return lambda: self.kernels.encode_signs(self.segments, COIN, out=signs)
        if op == "commit":
            self.kernels.encode_signs(self.segments, COIN, out=signs)
            present, sign = [1] * N_TENSORS, ReplyFormat.SIGN
            return lambda: self.kernels.commit(
                self.segments, present, signs, reply_format=sign, rounding=None
            )
        levels = make_output(self.bucket, BITS, self.device)
        return lambda: self.kernels.encode_levels(
            self.segments, COIN, norm="l1", step=0.5, out=levels
        )


def make_output(bucket: BucketLayout, planes: int, device: torch.device) -> Tensor:
    return torch.empty((bucket.n_blocks, planes, BLOCK_WORDS), dtype=torch.int64, device=device)


def time_call(
    call: Callable[[], object], ahead: Callable[[], object] | None, *, on_gpu: bool
) -> tuple[float, float]:
    """Return the seconds of the device, and those after which the host could go on.

    Args:
        call: What is timed.
        ahead: Work of the device that is queued before, so that it does not wait for the host to
            launch the call; None to include that wait.
        on_gpu: Whether there is a device that has a clock.
    """
    if not on_gpu:
        started = time.perf_counter()
        call()
        seconds = time.perf_counter() - started
        return seconds, seconds
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    if ahead is not None:
        ahead()
    begin.record()
    started = time.perf_counter()
    call()
    host_s = time.perf_counter() - started
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3, host_s


def time_in_turn(
    calls: dict[str, Callable[[], object]],
    repetitions: int,
    *,
    on_gpu: bool,
    ahead: Callable[[], object] | None = None,
) -> dict[str, dict[str, float]]:
    """Time all calls once in each repetition, in random order; medians."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for call in calls.values():
        call()  # compiles
    order, shuffler = list(calls), random.Random(0)
    for _ in range(repetitions):
        shuffler.shuffle(order)
        for name in order:
            times[name].append(time_call(calls[name], ahead, on_gpu=on_gpu))
    return {
        name: {
            "device_s": median(each[0] for each in rows),
            "host_s": median(each[1] for each in rows),
        }
        for name, rows in times.items()
    }


def measure_ops(*, rehearses: bool) -> dict[str, Any]:
    """Measure every op beside a copy, in one interleaved run for each kind of tensors."""
    n, repetitions = (N_TENSORS * 65, 2) if rehearses else (256 << 20, REPETITIONS)
    device = "cpu" if rehearses else "cuda"
    rows = []
    for kind in dict.fromkeys(row[1:4] for row in OPS):
        bench = Bench(n, kind, device)
        ops = [row for row in OPS if row[1:4] == kind]
        source = torch.ones(bench.n, device=device)
        target = torch.empty_like(source)
        calls = {row[0]: bench.make_call(row[0]) for row in ops}
        calls["copy"] = lambda t=target, s=source: t.copy_(s)
        # Two gigabytes of copies outlast what the host does before it launches an op.
        times = time_in_turn(calls, repetitions, on_gpu=not rehearses, ahead=calls["copy"])
        copy_rate = 2 * source.nbytes / times["copy"]["device_s"]
        for op, param, exp_avg, addresses, n_bytes, aim in ops:
            rate = n_bytes * bench.n / times[op]["device_s"]
            share = rate / copy_rate
            rows.append(
                {
                    "op": op,
                    "param": name_dtype(param),
                    "exp_avg": name_dtype(exp_avg),
                    "addresses": addresses,
                    "bytes_each": n_bytes,
                    "gb_per_s": rate / 1e9,
                    "copy_gb_per_s": copy_rate / 1e9,
                    "share": share,
                    "aim": aim,
                    "host_ms": times[op]["host_s"] * 1e3,
                    "met": None if aim is None else share >= aim,
                }
            )
    return {"ok": True, "n_params": n, "rows": rows}


def name_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def list_gpt2_shapes(layers: int, width: int, vocabulary: int) -> list[tuple[int, ...]]:
    """List the shapes of GPT-2's parameters; 12, 768 and 50,257 are its smallest, 124 M."""
    block = [(width,), (width,), (width, 3 * width), (3 * width,), (width, width), (width,)]
    block += [(width,), (width,), (width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return [(vocabulary, width), (1024, width), *(block * layers), (width,), (width,)]


def measure_steps(*, rehearses: bool) -> dict[str, Any]:
    """Measure ``step()`` of Lion beside that of other optimizers, over GPT-2's 148 tensors."""
    device, on_gpu = ("cpu", False) if rehearses else ("cuda", True)
    shapes = list_gpt2_shapes(1, 8, 16) if rehearses else list_gpt2_shapes(12, 768, 50257)
    calls: dict[str, Callable[[], object]] = {}
    missing: dict[str, str] = {}
    for name, make in OPTIMIZERS.items():
        params = [nn.Parameter(torch.randn(shape, device=device)) for shape in shapes]
        for param in params:
            param.grad = torch.randn_like(param)
        try:
            step = make(params)
            step()
        except Exception as error:  # noqa: BLE001 - of other people's packages, whatever it is
            missing[name] = f"{type(error).__name__}: {error}".splitlines()[0]
        else:
            calls[name] = step
    times = time_in_turn(calls, 2 if rehearses else REPETITIONS, on_gpu=on_gpu)
    own_s = times["distlion.Lion"]["device_s"]
    rows = [
        {"optimizer": name, **row, "times_of_ours": row["device_s"] / own_s}
        for name, row in times.items()
    ]
    n_params = sum(param.numel() for param in params)
    return {"ok": True, "n_params": n_params, "rows": rows, "missing": missing}


def make_lion_pytorch(params: list[nn.Parameter]) -> Callable[[], object]:
    from lion_pytorch import Lion

    return Lion(params, lr=1e-4, weight_decay=0.1).step


def make_bitsandbytes(params: list[nn.Parameter]) -> Callable[[], object]:
    from bitsandbytes.optim import Lion32bit

    return Lion32bit(params, lr=1e-4, weight_decay=0.1).step


def make_compiled(params: list[nn.Parameter]) -> Callable[[], object]:
    """Compile the equation itself, over all tensors at once."""
    exp_avgs = [torch.zeros_like(param) for param in params]

    @torch.no_grad()
    def step() -> None:
        for param, m in zip(params, exp_avgs, strict=True):
            update = (0.9 * m + 0.1 * param.grad).sign_()
            param.mul_(1 - 1e-5).add_(update, alpha=-1e-4)
            m.mul_(0.99).add_(param.grad, alpha=0.01)

    return torch.compile(step)


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Callable[[], object]]] = {
    "distlion.Lion": lambda params: distlion.Lion(params, lr=1e-4, weight_decay=0.1).step,
    "distlion.DistributedLion, alone": lambda params: (
        distlion.DistributedLion(params, lr=1e-4, weight_decay=0.1).step
    ),
    "lion-pytorch": make_lion_pytorch,
    "torch.compile of the equation": make_compiled,
    "bitsandbytes Lion32bit": make_bitsandbytes,
    "torch AdamW, fused": lambda params: torch.optim.AdamW(params, lr=1e-4, fused=True).step,
}
