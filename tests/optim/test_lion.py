"""`Lion` follows the reference implementation that users know, lion-pytorch 0.2.5."""

from __future__ import annotations

import math

import lion_pytorch
import numpy as np
import pytest
import torch

import distlion
import oracle

STEPS = 100
SIZES = (1, 2, 63, 64, 65, 5003, 30_011)
SEED = 42

# lion-pytorch rounds in another order (lerp-like addition, lr applied by alpha=), so fp32
# directions differ by a few ulps of what went in. Their signs may differ where the direction is
# closer to 0 than this fraction of it.
UNDECIDED = 2.0**-20
LARGEST_FRACTION_OF_OTHER_SIGNS = 1e-6
# Both momenta pass through the same 100 steps, each with at most three roundings of 2^-24 that fade
# by beta2 = 0.99: within 3 * 100 * 2^-24 of the largest gradient, and in practice within a few
# ulps.
MOMENTUM_TOLERANCE = 300 * 2.0**-24


def make_params(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    return [
        torch.nn.Parameter(torch.from_numpy(oracle.values(SEED, i, n=n)).to(dtype))
        for i, n in enumerate(SIZES)
    ]


def grads_of(step: int) -> list[torch.Tensor]:
    return [torch.from_numpy(oracle.values(SEED, 1000 + step, i, n=n)) for i, n in enumerate(SIZES)]


@pytest.mark.parametrize(
    ("betas", "weight_decay"), [((0.9, 0.99), 0.0), ((0.9, 0.99), 0.1), ((0.95, 0.98), 1.0)]
)
def test_lion_follows_lion_pytorch_within_rounding(
    betas: tuple[float, float], weight_decay: float
) -> None:
    lr = 1e-3
    ours, theirs = make_params(), make_params()
    lion = distlion.Lion(ours, lr=lr, betas=betas, weight_decay=weight_decay)
    reference = lion_pytorch.Lion(theirs, lr=lr, betas=betas, weight_decay=weight_decay)
    # Once two directions differ in sign at a coordinate, the parameters there are 2 lr apart for
    # good.
    parted = [np.zeros(n, dtype=bool) for n in SIZES]
    other_signs = 0
    for step in range(STEPS):
        grads = grads_of(step)
        for p, q, grad in zip(ours, theirs, grads, strict=True):
            p.grad, q.grad = grad.clone(), grad.clone()
        for index, (p, q, grad) in enumerate(zip(ours, theirs, grads, strict=True)):
            m = lion.state[p]["exp_avg"].numpy() if step else np.zeros(p.numel(), np.float32)
            m_theirs = (
                reference.state[q]["exp_avg"].numpy() if step else np.zeros(p.numel(), np.float32)
            )
            c = oracle.weighted_sum(betas[0], m, grad.numpy())
            c_theirs = (
                torch.from_numpy(m_theirs)
                .clone()
                .mul_(betas[0])
                .add(grad, alpha=1.0 - betas[0])
                .numpy()
            )
            differ = np.sign(c) != np.sign(c_theirs)
            assert (
                np.abs(c)[differ] < UNDECIDED * (np.abs(m) + np.abs(grad.numpy()))[differ]
            ).all()
            other_signs += np.count_nonzero(differ)
            parted[index] |= differ
        lion.step()
        reference.step()
    assert other_signs < LARGEST_FRACTION_OF_OTHER_SIGNS * STEPS * sum(SIZES)
    for p, q, apart in zip(ours, theirs, parted, strict=True):
        # Each step rounds a decay and a subtraction in both: at most 2 * 2 * 2^-24 of |x| and its
        # largest move.
        largest = float(q.detach().abs().max()) + lr * STEPS
        error = (p.detach() - q.detach()).abs().numpy()
        assert error[~apart].max(initial=0.0) <= STEPS * 4 * 2.0**-24 * largest
        momentum_error = (lion.state[p]["exp_avg"] - reference.state[q]["exp_avg"]).abs().max()
        assert float(momentum_error) <= MOMENTUM_TOLERANCE * 4.0


@pytest.mark.parametrize("cautious", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lion_equals_the_oracle_to_the_bit(dtype: str, cautious: bool) -> None:
    values = [oracle.values(SEED, i, n=n, dtype=dtype) for i, n in enumerate(SIZES)]
    group = oracle.Group(
        list(values), oracle.Rule("majority"), 1e-3, (0.9, 0.99), 0.1, dtype, cautious
    )
    cluster = oracle.OracleCluster([group], 1)
    params = [torch.nn.Parameter(torch.from_numpy(v).to(getattr(torch, dtype))) for v in values]
    lion = distlion.Lion(params, 1e-3, (0.9, 0.99), weight_decay=0.1, cautious=cautious)
    for step in range(20):
        grads = [oracle.gradient(SEED, step, 0, i, n, dtype) for i, n in enumerate(SIZES)]
        cluster.step([grads])
        for p, grad in zip(params, grads, strict=True):
            p.grad = torch.from_numpy(grad).to(p.dtype)
        lion.step()
    for p, expected, momentum in zip(params, cluster.params, cluster.exp_avgs[0], strict=True):
        assert np.array_equal(oracle.bits_of(p.detach().float().numpy()), oracle.bits_of(expected))
        found = lion.state[p]["exp_avg"].float().numpy()
        assert np.array_equal(oracle.bits_of(found), oracle.bits_of(momentum))


def test_direction_zero_moves_by_zero() -> None:
    p = torch.nn.Parameter(torch.ones(70))
    p.grad = torch.zeros(70)
    distlion.Lion([p], lr=0.1).step()
    assert torch.equal(p.detach(), torch.ones(70))


def test_parameter_without_gradient_is_left_alone() -> None:
    p, q = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    q.grad = torch.ones(3)
    distlion.Lion([p, q], lr=0.1, weight_decay=0.5).step()
    assert torch.equal(p.detach(), torch.ones(3))
    assert not torch.equal(q.detach(), torch.ones(3))


def test_lion_learns_a_quadratic() -> None:
    p = torch.nn.Parameter(torch.full((4,), 1.0))
    lion = distlion.Lion([p], lr=0.01)
    for _ in range(200):
        loss = lion.step(lambda: _backward(p))
    assert loss is not None and float(loss) < 0.01


def _backward(p: torch.nn.Parameter) -> torch.Tensor:
    p.grad = None
    loss = (p * p).sum()
    loss.backward()
    return loss.detach()


def test_state_of_lion_pytorch_loads() -> None:
    ours, theirs = make_params(), make_params()
    reference = lion_pytorch.Lion(theirs, lr=1e-3, weight_decay=0.1)
    for q, grad in zip(theirs, grads_of(0), strict=True):
        q.grad = grad
    reference.step()
    lion = distlion.Lion(ours, lr=5e-2)
    lion.load_state_dict(reference.state_dict())
    assert math.isclose(lion.param_groups[0]["lr"], 1e-3)
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(lion.state[p]["exp_avg"], reference.state[q]["exp_avg"])


@pytest.mark.parametrize("kind", [np.float32, float])
def test_a_schedule_may_be_a_table_of_numpy(kind: type) -> None:
    table = np.linspace(1, 0.25, 4, dtype=np.float32)  # a rate of Python times one is float32
    param = torch.nn.Parameter(torch.zeros(3))
    lion = distlion.Lion([param], lr=0.5)
    schedule = torch.optim.lr_scheduler.LambdaLR(lion, lambda step: kind(table[step]))
    for _ in range(3):
        param.grad = torch.tensor([1.0, -1.0, 2.0])
        lion.step()
        schedule.step()
    assert type(lion.param_groups[0]["lr"]) is kind
    assert param.detach().tolist() == [-1.125, 1.125, -1.125]


@pytest.mark.parametrize("lr", [np.float32("nan"), np.bool_(True), np.str_("0.1")])
def test_other_scalars_of_numpy_are_refused(lr: object) -> None:
    with pytest.raises(distlion.errors.DistlionError, match="lr="):
        distlion.Lion([torch.nn.Parameter(torch.zeros(3))], lr=lr)  # type: ignore[arg-type]
