"""What every method must do, whatever it sends."""

import math

import pytest
import torch

from distlion_lab.baselines.base import CompressionStep, gathered_bytes
from distlion_lab.baselines.dgc import DeepGradientCompression
from distlion_lab.baselines.graddrop import GradDrop
from distlion_lab.baselines.half import HalfPrecision
from distlion_lab.baselines.terngrad import TernGrad
from distlion_lab.baselines.top_bits import TopBits
from distlion_lab.baselines.worker import Worker

METHODS = [
    TernGrad(),
    GradDrop(keep=0.3),
    DeepGradientCompression(keep=0.2, warmup_steps=4),
    HalfPrecision(),
    TopBits(),
]
LENGTHS = [1, 2, 3, 7, 8, 9, 1009, 1023, 4096]
REBUILT = {type(method).__name__: type(method) for method in METHODS}

every_method = pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)


def draw(n, *, seed=0):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def make_workers(method, n_workers, *, seed=0):
    return [Worker(method, rank=rank, n_workers=n_workers, seed=seed) for rank in range(n_workers)]


def compress_all(method, workers, grads, *, step=0):
    scalar = torch.stack([method.measure(grad) for grad in grads]).amax()
    return [
        worker.compress(0, grad, step=step, scalar=scalar)
        for worker, grad in zip(workers, grads, strict=True)
    ]


@every_method
def test_repr_rebuilds_the_method(method):
    assert eval(repr(method), REBUILT) == method


@every_method
@pytest.mark.parametrize("n", LENGTHS)
def test_payload_comes_back_from_its_bytes(method, n):
    grads = [draw(n, seed=seed) for seed in range(3)]
    payloads = compress_all(method, make_workers(method, 3), grads)
    scalar = torch.stack([method.measure(grad) for grad in grads]).amax()
    wires = [payload.to_wire() for payload in payloads]
    assert [wire.numel() for wire in wires] == [payload.n_bytes for payload in payloads]
    # Cut out of a longer row, at an odd address, as the hook cuts them.
    cut = [torch.cat([wire.new_zeros(1), wire])[1:] for wire in wires]
    read = [method.read(wire, n, scalar=scalar) for wire in cut]
    for found, sent in zip(read, payloads, strict=True):
        assert vars(found).keys() == vars(sent).keys()
        for name, tensor in vars(sent).items():
            assert torch.equal(vars(found)[name], tensor), name
            assert vars(found)[name].dtype == tensor.dtype, name
    assert torch.equal(method.aggregate(read, n), method.aggregate(payloads, n))


@every_method
def test_compression_writes_to_no_argument(method):
    grad = draw(1009)
    state = {name: draw(1009, seed=1) for name in method.create_state(1009, grad.device)}
    before = grad.clone(), {name: tensor.clone() for name, tensor in state.items()}
    method.compress(
        grad,
        state,
        CompressionStep(0, 2, torch.Generator().manual_seed(0), method.measure(grad)),
    )
    assert torch.equal(grad, before[0])
    assert all(torch.equal(state[name], before[1][name]) for name in state)


@every_method
@pytest.mark.parametrize("n", [1, 7, 1009])
def test_gradients_of_zeros_have_a_mean_of_zeros(method, n):
    payloads = compress_all(method, make_workers(method, 2), [torch.zeros(n)] * 2)
    assert torch.equal(method.aggregate(payloads, n), torch.zeros(n))


@every_method
def test_single_element_moves_in_the_direction_of_its_gradient(method):
    payloads = compress_all(method, make_workers(method, 2), [torch.tensor([-0.25])] * 2)
    assert method.aggregate(payloads, 1).item() == pytest.approx(-0.25)


@every_method
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_on_one_worker_reaches_the_mean(method, bad):
    grads = [draw(1009, seed=seed) for seed in range(3)]
    grads[1][500] = bad
    payloads = compress_all(method, make_workers(method, 3), grads)
    assert not method.aggregate(payloads, 1009).isfinite().all()


@every_method
def test_same_seed_gives_the_same_payloads(method):
    grads = [draw(4096, seed=seed) for seed in range(2)]
    means = []
    for _ in range(2):
        workers = make_workers(method, 2, seed=5)
        payloads = [compress_all(method, workers, grads, step=step) for step in range(3)]
        means.append(torch.stack([method.aggregate(each, 4096) for each in payloads]))
    assert torch.equal(*means)


@pytest.mark.parametrize("changed", ["seed", "rank", "step", "index"])
def test_levels_are_drawn_anew_for_every_seed_rank_step_and_parameter(changed):
    grad = torch.full((64,), 0.5)
    settings = {"seed": 0, "rank": 0, "step": 0, "index": 0}

    def compress(*, seed, rank, step, index):
        worker = Worker(TernGrad(), rank=rank, n_workers=2, seed=seed)
        return worker.compress(index, grad, step=step, scalar=torch.tensor(1.0)).levels

    # Two draws of 64 fair bits are equal with probability 2^-64.
    assert not torch.equal(compress(**settings), compress(**settings | {changed: 1}))


@every_method
def test_state_of_one_parameter_is_none_of_another(method):
    grad, other = draw(1009), draw(1009, seed=1)
    together, alone = make_workers(method, 1)[0], make_workers(method, 1)[0]
    for step in range(3):
        scalar = method.measure(grad)
        together.compress(1, other, step=step, scalar=method.measure(other))
        expected = alone.compress(0, grad, step=step, scalar=scalar)
        payload = together.compress(0, grad, step=step, scalar=scalar)
        assert torch.equal(payload.to_wire(), expected.to_wire())


def test_gathered_bytes_hold_scalars_lengths_and_padding():
    dense, empty = torch.ones(10), torch.zeros(10)
    graddrop, terngrad = GradDrop(keep=1.0), TernGrad()
    sparse = compress_all(graddrop, make_workers(graddrop, 3), [dense, empty, empty])
    assert gathered_bytes(graddrop, sparse) == 2 * (8 + 10 * 8)
    ternary = compress_all(terngrad, make_workers(terngrad, 3), [dense, empty, empty])
    assert gathered_bytes(terngrad, ternary) == 2 * (4 + 3)
