import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from cluster import run_workers
from distlion.errors import InvalidArgumentError, NonFiniteError, UnsupportedTypeError
from distlion_lab.baselines.dgc import DeepGradientCompression
from distlion_lab.baselines.graddrop import GradDrop
from distlion_lab.baselines.half import HalfPrecision
from distlion_lab.baselines.hook import CompressionState, compression_hook
from distlion_lab.baselines.power_sgd import PowerSGD
from distlion_lab.baselines.stock import CountedPowerSGD, power_sgd_hook
from distlion_lab.baselines.terngrad import TernGrad
from distlion_lab.baselines.virtual import VirtualBaseline

STEPS = 5
METHODS = [
    TernGrad(),
    GradDrop(),
    # With one full quarter of warm-up, then less.
    DeepGradientCompression(warmup_steps=8),
]


class Model(nn.Module):
    """Parameters with a prime number of elements, with one, and with more than a sample's."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.wide = nn.Linear(13, 97)
        self.deep = nn.Linear(97, 31)
        self.norm = nn.LayerNorm(31)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.gain * self.norm(self.deep(torch.tanh(self.wide(x))))


N_ELEMENTS = sum(p.numel() for p in Model().parameters())


def make_generator(rank):
    return torch.Generator().manual_seed(100 + rank)


def backward(model, generator):
    x, target = torch.randn(6, 13, generator=generator), torch.randn(6, 31, generator=generator)
    (model(x) - target).square().mean().backward()


def make_optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def take_steps(wrapped, rank):
    """Train a model in DDP; return its parameters."""
    optimizer, generator = make_optimizer(wrapped), make_generator(rank)
    for _ in range(STEPS):
        backward(wrapped, generator)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in wrapped.parameters()]


def train_really(rank, world_size, method):
    # Several buckets, which DDP cuts anew after the first step.
    wrapped = DistributedDataParallel(Model(), bucket_cap_mb=0.005)
    state = CompressionState(method, wrapped.parameters(), seed=3)
    wrapped.register_comm_hook(state, compression_hook)
    params = take_steps(wrapped, rank)
    return params, (state.sent_bytes, state.uplink_bytes, state.reply_bytes)


def train_really_in_half(rank, world_size):
    wrapped = DistributedDataParallel(Model())
    wrapped.register_comm_hook(None, fp16_compress_hook)
    return take_steps(wrapped, rank)


class Repeating(Model):
    """Two parameters of one shape with one of another shape between them."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.wide = nn.Sequential(nn.Linear(13, 48), nn.Linear(48, 32), nn.Linear(32, 48))
        self.deep = nn.Sequential(nn.Linear(48, 32), nn.Linear(32, 31))


def train_really_by_power_sgd(rank, world_size):
    wrapped = DistributedDataParallel(Repeating())
    state = CountedPowerSGD(wrapped.process_group, PowerSGD(), seed=3)
    wrapped.register_comm_hook(state, power_sgd_hook)
    return take_steps(wrapped, rank), state.sent_bytes


def train_virtually(workers, method, make_model=Model):
    """Return the parameters and the baseline."""
    model = make_model()
    baseline = VirtualBaseline(make_optimizer(model), workers=workers, compression=method, seed=3)
    generators = [make_generator(rank) for rank in range(workers)]
    for _ in range(STEPS):
        for worker, generator in enumerate(generators):
            backward(model, generator)
            baseline.collect(worker)
        baseline.step()
    return [p.detach() for p in model.parameters()], baseline


@pytest.mark.distributed
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_virtual_workers_equal_processes_to_the_bit_and_the_byte(method, workers):
    params, baseline = train_virtually(workers, method)
    down_bits = STEPS * baseline.down_bits_per_parameter
    up_bits = STEPS * baseline.up_bits_per_parameter
    results = run_workers(train_really, workers, method)
    for real, (sent_bytes, _, reply_bytes) in results:
        assert all(torch.equal(p, q) for p, q in zip(params, real, strict=True))
        assert sent_bytes == baseline.sent_bytes
        assert 8 * reply_bytes == pytest.approx(down_bits * N_ELEMENTS, rel=1e-12)
    uplink_bytes = sum(uplink for _, (_, uplink, _) in results)
    assert 8 * uplink_bytes == pytest.approx(up_bits * N_ELEMENTS * workers, rel=1e-12)


@pytest.mark.distributed
def test_two_virtual_workers_equal_pytorchs_fp16_hook():
    # Of two numbers, the order of addition does not matter.
    params, _ = train_virtually(2, HalfPrecision())
    for real in run_workers(train_really_in_half, 2):
        assert all(torch.equal(p, q) for p, q in zip(params, real, strict=True))


@pytest.mark.distributed
@pytest.mark.parametrize("workers", [2, 3])
def test_virtual_power_sgd_equals_pytorchs_hook_but_for_rounding(workers):
    params, baseline = train_virtually(workers, PowerSGD(), Repeating)
    started = Repeating()
    for real, sent_bytes in run_workers(train_really_by_power_sgd, workers):
        for p, q, first in zip(params, real, started.parameters(), strict=True):
            # Float32 sums in another order, after 5 steps of Adam; the parameters moved by 0.05.
            torch.testing.assert_close(p, q, rtol=0, atol=2e-4)
            assert (p - first).abs().max() > 0.01
        assert sent_bytes == baseline.sent_bytes


def test_power_sgd_gives_back_in_time_what_it_has_lost():
    # A constant mean gradient of full rank: what rank 1 leaves out is sent in later steps.
    target = torch.randn(9, 11, generator=torch.Generator().manual_seed(0))
    p = nn.Parameter(torch.zeros(9, 11))
    baseline = VirtualBaseline(
        torch.optim.SGD([p], lr=1.0), workers=2, compression=PowerSGD(rank=1, start_step=0)
    )
    gaps = []
    for step in range(1, 61):
        for worker, share in enumerate((0.5, 1.5)):
            p.grad = share * target
            baseline.collect(worker)
        baseline.step()
        gaps.append(float((p.detach() + step * target).norm() / (step * target).norm()))
    assert gaps[0] > 0.5
    assert gaps[-1] < 0.1


def test_power_sgd_sends_whole_what_would_not_shrink_to_half_and_before_its_start():
    params = [nn.Parameter(torch.zeros(shape)) for shape in ((20, 4, 5), (8, 8), (7,), ())]
    baseline = VirtualBaseline(
        torch.optim.SGD(params, lr=1.0), workers=4, compression=PowerSGD(rank=4, start_step=1)
    )
    n_all = 400 + 64 + 7 + 1
    for n_sent in (n_all, 4 * (20 + 20) + 64 + 7 + 1):
        before = baseline.sent_bytes
        for worker in range(4):
            for p in params:
                p.grad = torch.ones_like(p)
            baseline.collect(worker)
        baseline.step()
        # A ring of 4 sends 2 * 3 / 4 of the bytes.
        assert baseline.sent_bytes - before == 6 * n_sent
    assert [float(p.detach().flatten()[0]) for p in params[1:]] == [-2.0] * 3


@pytest.mark.parametrize("bad", [{"rank": 0}, {"start_step": -1}])
def test_power_sgd_refuses_numbers_out_of_range(bad):
    with pytest.raises(InvalidArgumentError, match=rf"PowerSGD\({next(iter(bad))}="):
        PowerSGD(**bad)


def test_pytorchs_hook_cannot_start_at_once():
    with pytest.raises(InvalidArgumentError, match="step 2 or later"):
        CountedPowerSGD(None, PowerSGD(start_step=1), seed=0)


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_plain_gradients_are_added_in_rank_order(workers):
    p = nn.Parameter(torch.zeros(7))
    baseline = VirtualBaseline(torch.optim.SGD([p], lr=1.0), workers=workers)
    grads = torch.randn(workers, 7, generator=torch.Generator().manual_seed(0))
    for worker, grad in enumerate(grads):
        p.grad = grad.clone()
        baseline.collect(worker)
        assert p.grad is None
    baseline.step()
    total = grads[0]
    for grad in grads[1:]:
        total = total + grad
    assert torch.equal(p.detach(), -(total / workers))
    assert p.grad is None


@pytest.mark.parametrize(
    ("method", "bits", "sent_bytes"),
    # A ring of 4 sends 2 * 3 / 4 of the bytes.
    [(None, 32, 2 * 6 * 7), (HalfPrecision(), 16, 2 * 3 * 7)],
)
def test_what_the_network_adds_is_counted_as_a_ring(method, bits, sent_bytes):
    p = nn.Parameter(torch.zeros(7))
    baseline = VirtualBaseline(torch.optim.SGD([p], lr=1.0), workers=4, compression=method)
    for _ in range(2):
        for worker in range(4):
            p.grad = torch.ones(7)
            baseline.collect(worker)
        baseline.step()
    assert baseline.up_bits_per_parameter == bits
    assert baseline.down_bits_per_parameter == bits
    assert baseline.sent_bytes == sent_bytes


def test_bits_are_the_mean_of_all_steps_and_workers():
    p = nn.Parameter(torch.zeros(8))
    baseline = VirtualBaseline(
        torch.optim.SGD([p], lr=1.0), workers=2, compression=GradDrop(keep=1.0)
    )
    assert baseline.up_bits_per_parameter == 0
    sent_bytes = 0
    for counts in ((8, 8), (1, 2)):
        for worker, count in enumerate(counts):
            p.grad = torch.cat([torch.ones(count), torch.zeros(8 - count)])
            baseline.collect(worker)
        baseline.step()
        sent_bytes += 8 + 8 * max(counts)
    assert baseline.up_bits_per_parameter == 64 * (8 + 1.5) / 8 / 2
    # Dense, then two entries, which are less than dense.
    assert baseline.down_bits_per_parameter == (32 * 8 + 32 * 4) / 8 / 2
    assert baseline.sent_bytes == sent_bytes


@pytest.mark.parametrize("method", [None, HalfPrecision(), TernGrad(), GradDrop(keep=1.0)])
def test_absent_gradients_count_as_zero_and_leave_a_parameter_alone_if_all_are(method):
    params = [nn.Parameter(torch.ones(1)) for _ in range(2)]
    optimizer = torch.optim.SGD(params, lr=1.0, weight_decay=0.5)
    baseline = VirtualBaseline(optimizer, workers=2, compression=method)
    baseline.collect(0)
    params[1].grad = torch.full((1,), 4.0)
    baseline.collect(1)
    baseline.step()
    # Neither a step nor weight decay; and 1 - (4 / 2 + 0.5).
    assert [p.item() for p in params] == [1.0, -1.5]


def test_frozen_parameters_are_neither_collected_nor_counted():
    frozen = nn.Parameter(torch.ones(100), requires_grad=False)
    p = nn.Parameter(torch.ones(1))
    baseline = VirtualBaseline(torch.optim.SGD([frozen, p], lr=1.0), workers=1)
    p.grad = torch.ones(1)
    baseline.collect(0)
    baseline.step()
    assert baseline.up_bits_per_parameter == 32


def test_bfloat16_gradients_are_added_in_float32():
    p = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    baseline = VirtualBaseline(torch.optim.SGD([p], lr=1.0), workers=3)
    # 256 + 1 is a tie in bfloat16 and would round to 256, twice; 258 / 3 is 86.
    for worker, value in enumerate([256.0, 1.0, 1.0]):
        p.grad = torch.full((1,), value, dtype=torch.bfloat16)
        baseline.collect(worker)
    baseline.step()
    assert p.item() == -86.0


def test_worker_out_of_turn_is_refused_and_keeps_its_gradient():
    p = nn.Parameter(torch.zeros(1))
    baseline = VirtualBaseline(torch.optim.SGD([p], lr=1.0), workers=2)
    p.grad = torch.ones(1)
    with pytest.raises(InvalidArgumentError, match="worker 1 is collected; expected worker 0"):
        baseline.collect(1)
    assert p.grad is not None
    baseline.collect(0)
    with pytest.raises(InvalidArgumentError, match="1 of 2 workers"):
        baseline.step()
    baseline.collect(1)
    with pytest.raises(InvalidArgumentError, match=r"expected step\(\)"):
        baseline.collect(2)
    baseline.step()
    assert p.item() == -0.5


def test_sparse_gradient_is_refused():
    embedding = nn.Embedding(5, 2, sparse=True)
    baseline = VirtualBaseline(torch.optim.SGD(embedding.parameters(), lr=1.0), workers=1)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(UnsupportedTypeError, match=r"\(5, 2\) is sparse"):
        baseline.collect(0)


def test_no_workers_are_refused():
    p = nn.Parameter(torch.zeros(1))
    with pytest.raises(InvalidArgumentError, match="workers is 0"):
        VirtualBaseline(torch.optim.SGD([p], lr=1.0), workers=0)


@pytest.mark.parametrize(
    "method", [None, HalfPrecision(), GradDrop(keep=1.0), PowerSGD(rank=1, start_step=0)]
)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("shape", [(64,), (8, 8)])
def test_mean_that_is_not_finite_is_an_error_and_moves_nothing(method, bad, shape):
    p = nn.Parameter(torch.ones(shape))
    baseline = VirtualBaseline(torch.optim.SGD([p], lr=1.0), workers=2, compression=method)
    for worker in range(2):
        p.grad = torch.ones(shape)
        p.grad.view(-1)[1] = bad if worker else 1.0
        baseline.collect(worker)

    with pytest.raises(NonFiniteError, match="mean gradient of parameter 0 is not finite"):
        baseline.step()

    assert torch.equal(p, torch.ones(shape))
