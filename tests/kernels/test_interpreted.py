"""Triton's kernels, interpreted on the CPU: every op, and whole runs of virtual workers.

In a process of their own: ``TRITON_INTERPRET=1 pytest tests/kernels -k "triton or interpreted"``.
The tests of this module stand for the conformance suite in the quick tier.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from backends import CPU, INTERPRETS, REFERENCE, Backend
from conformance import DTYPES, conform
from distlion.errors import InvalidArgumentError, KernelBackendError
from distlion.kernels import Coefficients, Segment, choose_kernels
from distlion.layout import Slot
from distlion.step.precision import Precision
from distlion.virtual import VirtualCluster
from distlion.votes import Aggregation, Average, MajorityVote, MaskedVote, QuantizedVote
from distlion.votes.full_precision import FullPrecision
from distlion.votes.ternary import TernaryVote
from kernel_cases import ENCODERS, MOVES, REPLIES, ROUNDING, ZERO, all_ops, committing, encoding
from tiers import in_tiers

pytestmark = pytest.mark.skipif(not INTERPRETS, reason="runs where TRITON_INTERPRET=1")

# Whole tiles of 4,096, where tensors are aligned, and parts of one; the fifth of five abstains.
SIZES = {False: (1, 4161, 65, 3, 64), True: (4161, 64, 4096)}
RULES: list[Aggregation] = [
    MajorityVote(),
    MajorityVote(tie="zero"),
    TernaryVote(),
    MaskedVote(),
    MaskedVote(tie="random"),
    Average(),
    QuantizedVote(bits=4, norm="l1"),
    QuantizedVote(bits=3, norm="linf"),
    FullPrecision(torch.float32),
    FullPrecision(torch.bfloat16),
]


@pytest.fixture(scope="module")
def triton() -> Backend:
    from distlion.kernels.gpu import TritonKernels

    return Backend("triton", CPU, TritonKernels())


@pytest.mark.parametrize("part", in_tiers(["third", "rest"], lambda part: part == "third"))
@pytest.mark.parametrize("is_aligned", [False, True])
def test_every_op_is_that_of_the_reference(is_aligned: bool, part: str, triton: Backend) -> None:
    """Aligned tensors take the way of whole tiles, which loads 16 bytes at once."""
    for number, (name, run) in enumerate(all_ops(SIZES[is_aligned])):
        if (part == "third") == (number % 3 == 2 * is_aligned):
            conform(triton, name, run, is_aligned=is_aligned)


@pytest.mark.parametrize(
    ("param_dtype", "exp_avg_dtype"),
    in_tiers(DTYPES, lambda pair: pair == (torch.float16, torch.bfloat16)),
)
def test_whole_tiles_of_every_dtype_are_those_of_the_reference(
    param_dtype: torch.dtype, exp_avg_dtype: torch.dtype, triton: Backend
) -> None:
    dtypes = (param_dtype, exp_avg_dtype)
    for encoder in ENCODERS:
        case = encoding(encoder, (8192,), dtypes, wild=exp_avg_dtype == torch.float32)
        conform(triton, *case, is_aligned=True)
    for op in MOVES:
        for reply_format, planes in REPLIES:
            for rounding in (None, ROUNDING):
                moving = committing(op, (8192,), dtypes, reply_format, planes, rounding=rounding)
                conform(triton, *moving, is_aligned=True)


def test_sums_of_blocks_are_added_by_the_fixed_tree(triton: Backend) -> None:
    """The one by which levels take their mean; in double, where another order shows."""
    numbers = torch.randn(2 * 4096 + 5, generator=torch.Generator().manual_seed(3)).exp()
    expected = REFERENCE.square_sums(numbers)
    neighbors = numbers[:4096].double().square()
    while len(neighbors) > 1:
        neighbors = neighbors[::2] + neighbors[1::2]
    assert neighbors[0] != expected[0], "these numbers are to tell orders apart"
    assert torch.equal(triton.kernels.square_sums(numbers), expected)


def test_parameters_of_several_dtypes_are_encoded_in_one_call(triton: Backend) -> None:
    """As a step without workers has them."""
    slots = [Slot("a", 100, 0, 0), Slot("b", 70, 2, 2), Slot("c", 5000, 4, 4)]
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    results = []
    for kernels in (triton.kernels, choose_kernels(CPU)):
        generator = torch.Generator().manual_seed(0)
        segments = [
            Segment(
                slot,
                torch.randn(slot.n_elements, generator=generator).to(dtype),
                torch.randn(slot.n_elements, generator=generator).to(dtype),
                torch.randn(slot.n_elements, generator=generator),
                Coefficients(0.9, 0.99, 1e-2, 0.1),
            )
            for slot, dtype in zip(slots, dtypes, strict=True)
        ]
        kernels.step_alone(segments, rounding=ROUNDING)
        results.append([(segment.param, segment.exp_avg) for segment in segments])
    for ours, theirs in zip(*results, strict=True):
        assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("spoil", ["dtype", "size", "strides", "gradient"])
def test_tensors_that_do_not_fit_are_refused_by_name(spoil: str, triton: Backend) -> None:
    param, grad, exp_avg = torch.zeros(6), torch.zeros(6), torch.zeros(6)
    if spoil == "dtype":
        exp_avg = exp_avg.double()
    elif spoil == "size":
        grad = torch.zeros(7)
    elif spoil == "strides":
        param = torch.zeros(2, 3).T
    else:
        grad = grad.bfloat16()
    coefficients = Coefficients(0.9, 0.99, 1e-2, 0.1)
    segment = Segment(Slot("layer.weight", 6, 0, 0), param, grad, exp_avg, coefficients)
    out = torch.zeros(1, 1, 8, dtype=torch.int64)
    with pytest.raises(InvalidArgumentError, match=r"layer\.weight"):
        triton.kernels.encode_signs([segment], ZERO, out=out)


def test_a_packed_tensor_without_room_is_refused(triton: Backend) -> None:
    segment = Segment(
        Slot("w", 600, 0, 0),
        torch.zeros(600),
        torch.zeros(600),
        torch.zeros(600),
        Coefficients(0.9, 0.99, 1e-2, 0.1),
    )
    with pytest.raises(InvalidArgumentError, match="1 blocks, but the segments need 10 words"):
        triton.kernels.encode_signs([segment], ZERO, out=torch.zeros(1, 1, 8, dtype=torch.int64))


def test_interpreted_kernels_are_refused_for_a_gpu() -> None:
    with pytest.raises(KernelBackendError, match="TRITON_INTERPRET=1 is set"):
        choose_kernels(torch.device("cuda"))


def run_cluster(rule: Aggregation, dtype: torch.dtype, n_steps: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    params = [
        nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in (70, 4200, 1)
    ]
    cluster = VirtualCluster(
        params,
        workers=4,
        lr=1e-2,
        weight_decay=0.1,
        aggregation=rule,
        precision=Precision(rounding="stochastic" if dtype == torch.bfloat16 else "nearest"),
    )
    for _ in range(n_steps):
        for worker in range(4):
            for index, param in enumerate(params):
                # Half of the gradients are zeros, so that coins count; some are absent.
                drawn = torch.randn(param.shape, generator=generator)
                drawn[::2] = 0
                param.grad = None if (worker, index) == (3, 1) else drawn.to(dtype)
            cluster.collect(worker)
        cluster.step()
    momenta = [momentum for worker in range(4) for momentum in cluster.exp_avg(worker)]
    return [*(param.detach() for param in params), *momenta]


@pytest.mark.parametrize(
    ("rule", "dtype"),
    in_tiers(
        [(rule, dtype) for rule in RULES for dtype in (torch.float32, torch.bfloat16)],
        lambda case: case == (MajorityVote(), torch.bfloat16),
    ),
)
def test_virtual_workers_end_with_the_bits_of_the_core(
    rule: Aggregation, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from distlion.kernels.gpu import TritonKernels

    monkeypatch.setenv("DISTLION_KERNELS", "cpu")
    expected = run_cluster(rule, dtype, 3)
    monkeypatch.setenv("DISTLION_KERNELS", "triton")
    assert isinstance(choose_kernels(CPU), TritonKernels)
    found = run_cluster(rule, dtype, 3)
    assert len(expected) == len(found) == 3 + 4 * 3
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)
