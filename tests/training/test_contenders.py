import pytest
import torch

import distlion
from distlion.aggregation import Average, FullPrecision, MajorityVote, QuantizedVote, TernaryVote
from distlion.errors import InvalidArgumentError
from distlion.training.contenders import METHOD_NAMES, find_contender
from distlion.training.presets import PRESETS, Preset
from distlion.training.virtual_method import Entry

FIXED_NAMES = [name for name in METHOD_NAMES if not set(name) & set("PKR")]
SYNCED_NAMES = ["majority-sync-10", "quantized-2-sync-exp", "average-sync-3-auto-int8"]
QUANTIZED_NAMES = ["quantized-2", "quantized-4", "quantized-8", "quantized-2-linf"]


def enter(name, *, workers=3, lr=0.01):
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 4)
    params = list(model.named_parameters())
    entry = Entry(params=params, lr=lr, weight_decay=0.1, workers=workers, steps=10, seed=0)
    return model, find_contender(name).enter(entry)


def take_step(model, method, *, workers=3):
    for worker in range(workers):
        for param in model.parameters():
            param.grad = torch.full_like(param, float(worker + 1))
        method.collect(worker)
    method.step()


@pytest.mark.parametrize("name", [*FIXED_NAMES, *SYNCED_NAMES, *QUANTIZED_NAMES])
def test_every_method_steps_against_the_gradient_and_counts_its_bytes(name):
    model, method = enter(name)
    before = model.weight.detach().clone()
    take_step(model, method)
    # 0.2 * 3e-3 of weight decay at most; SGD and Lion move by 1e-2 or more.
    assert (model.weight < before + 1e-3).all()
    assert (model.weight < before).any()
    assert method.sent_bytes > 0
    assert method.up_bits_per_parameter > 0
    assert method.rounds >= 1
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("name", ["majority", "global-lion", "terngrad"])
def test_one_worker_waits_for_no_message(name):
    assert enter(name, workers=1)[1].rounds == 0


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("majority", MajorityVote()),
        ("majority-zero", MajorityVote(tie="zero")),
        ("ternary", TernaryVote()),
        ("average", Average()),
        ("full", FullPrecision()),
        ("quantized-4", QuantizedVote(bits=4)),
        ("quantized-2-linf", QuantizedVote(bits=2, norm="linf")),
        ("quantized-2-sync-100", QuantizedVote(bits=2)),
    ],
)
def test_name_says_the_rule(name, rule):
    assert enter(name)[1].optimizer.param_groups[0]["aggregation"] == rule


@pytest.mark.parametrize(
    ("name", "betas"),
    [("majority", (0.9, 0.99)), ("signum", (0.9, 0.9)), ("signsgd", (0.0, 0.0))],
)
def test_name_says_the_momenta(name, betas):
    assert enter(name)[1].optimizer.param_groups[0]["betas"] == betas


def test_lion_cub_has_the_settings_of_its_function():
    real = distlion.lion_cub([torch.nn.Parameter(torch.zeros(2))])
    optimizer = enter("lion-cub")[1].optimizer
    assert optimizer.param_groups[0]["aggregation"] == real.param_groups[0]["aggregation"]
    assert optimizer._settings.momentum_sync == real._settings.momentum_sync


def test_learning_rate_and_weight_decay_reach_the_optimizer():
    for name in ("majority", "global-lion", "global-adamw", "dgc", "terngrad"):
        group = enter(name, lr=0.025)[1].optimizer.param_groups[0]
        assert (group["lr"], group["weight_decay"]) == (0.025, 0.1)


def test_global_lion_and_full_precision_votes_are_the_same_method():
    # The mean of three equal momenta and directions: equal signs, whatever the rounding.
    moved = []
    for name in ("full", "global-lion"):
        model, method = enter(name)
        take_step(model, method)
        moved.append(model.weight.detach().clone())
    assert torch.equal(*moved)


@pytest.mark.parametrize(
    "name", ["", "majorty", "quantized-9", "quantized-4-l2", "majority-sync-", "terngrad-sync-10"]
)
def test_unknown_method_is_told_with_the_known_ones(name):
    with pytest.raises(InvalidArgumentError, match="global-adamw"):
        find_contender(name)


@pytest.mark.parametrize("part", ["attention.query", "attn.c_proj"])
def test_momenta_of_the_attention_are_found_by_name(part):
    params = [(f"{name}.weight", torch.nn.Parameter(torch.zeros(4, 6))) for name in (part, "mlp")]
    entry = Entry(params=params, lr=0.01, weight_decay=0.0, workers=2, steps=10, seed=0)
    cluster = find_contender("majority-sync-1-attention").enter(entry).optimizer
    for worker, sign in enumerate((1.0, -1.0)):
        for _, param in params:
            param.grad = torch.full_like(param, sign)
        cluster.collect(worker)
    cluster.step()
    attention, mlp = cluster.exp_avg(0)
    assert (attention == 0).all()
    assert (mlp != 0).all()


def test_momenta_cannot_be_averaged_every_0_steps():
    with pytest.raises(InvalidArgumentError, match="every"):
        find_contender("majority-sync-0")


@pytest.mark.parametrize("preset", list(Preset))
def test_presets_name_known_methods_once(preset):
    methods = PRESETS[preset]["methods"]
    assert [find_contender(name).name for name in methods] == list(methods)
    assert len(set(methods)) == len(methods)
