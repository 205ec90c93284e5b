import pytest
import torch
from torch.nn.functional import cross_entropy

import distlion
from distlion.errors import InvalidArgumentError
from distlion.votes import Average, MajorityVote, MaskedVote, QuantizedVote
from distlion.votes.full_precision import FullPrecision
from distlion.votes.ternary import TernaryVote
from distlion_lab.training.methods import MEANS, METHOD_NAMES, RULE_NAMES, find_method, find_rule
from distlion_lab.training.presets import PRESETS, Preset
from distlion_lab.training.workers import MethodRun
from drawn import set_grads

FIXED_NAMES = [name for name in METHOD_NAMES if not set(name) & set("PKRA")]
SYNCED_NAMES = ["majority-sync-10", "quantized-2-sync-2", "average-sync-3-bf16"]
PERIODIC_NAMES = ["diloco-1", "diloco-1-lion", "scaled-every-1", "residual-1-every-1-lion"]
QUANTIZED_NAMES = ["quantized-2", "quantized-4", "quantized-8", "quantized-2-linf"]


def enter(name, *, workers=3, lr=0.01):
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 4)
    params = list(model.named_parameters())
    run = MethodRun(params=params, lr=lr, weight_decay=0.1, workers=workers, steps=10, seed=0)
    return model, find_method(name).enter(run)


def take_step(model, method, *, workers=3):
    for worker in range(workers):
        for param in model.parameters():
            param.grad = torch.full_like(param, float(worker + 1))
        method.collect(worker)
    method.step()


@pytest.mark.parametrize("name", [*FIXED_NAMES, *SYNCED_NAMES, *PERIODIC_NAMES, *QUANTIZED_NAMES])
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
        ("masked", MaskedVote()),
        ("masked-random", MaskedVote(tie="random")),
        ("average", Average()),
        ("full", FullPrecision()),
        ("quantized-4", QuantizedVote(bits=4)),
        ("quantized-2-linf", QuantizedVote(bits=2, norm="linf")),
        ("quantized-2-sync-100", QuantizedVote(bits=2)),
    ],
)
def test_name_says_the_rule(name, rule):
    assert enter(name)[1].optimizer.param_groups[0]["aggregation"] == rule


def test_masked_votes_train_at_twice_the_rate_of_plain_ones():
    plain, *masked = [
        find_method(name).train_lr
        for name in ("majority", "majority-cautious", "masked", "masked-random-betas-90-95")
    ]
    assert masked == [2 * plain] * 3


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


def count_kept(name, *, steps, of_steps):
    """Return how many of 1,000 elements one worker sends in each step, 8 bytes for each."""
    params = [("w", torch.nn.Parameter(torch.zeros(1000)))]
    run = MethodRun(params=params, lr=0.01, weight_decay=0.0, workers=2, steps=of_steps, seed=0)
    method = find_method(name).enter(run)
    kept, before = [], 0
    for step in range(steps):
        for worker in range(2):
            set_grads([params[0][1]], worker, step)
            method.collect(worker)
        method.step()
        kept.append((method.sent_bytes - before) / 8)
        before = method.sent_bytes
    return kept


@pytest.mark.parametrize("name", ["graddrop", "graddrop-adamw"])
def test_graddrop_sends_4_percent_as_in_the_comparison_of_the_first_paper(name):
    # The threshold is exact for parameters of up to 1,000 elements.
    # One more is the length of what is sent.
    assert count_kept(name, steps=2, of_steps=2) == [41, 41]


def test_dgc_warms_up_in_a_twentieth_of_the_run_and_then_sends_4_percent():
    # A quarter, a sixteenth, then what the paper would make less than 4 %.
    kept = count_kept("dgc", steps=5, of_steps=80)
    assert kept == [250, 62, 40, 40, 40]
    assert count_kept("dgc", steps=3, of_steps=160) == [250, 250, 62]


def train_blobs(name, *, steps=40, workers=3):
    """Train a small network at the center of a method's grid; return the losses at both ends."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(600, 20, generator=generator)
    targets = (inputs @ torch.randn(20, 8, generator=generator)).argmax(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
    found = find_method(name)
    run = MethodRun(
        params=list(model.named_parameters()),
        lr=found.base_lr,
        weight_decay=found.weight_decay,
        workers=workers,
        steps=steps,
        seed=0,
    )
    method = found.enter(run)
    losses = [float(cross_entropy(model(inputs), targets).detach())]
    for _ in range(steps):
        for worker in range(workers):
            batch = torch.randint(600, (32,), generator=generator)
            cross_entropy(model(inputs[batch]), targets[batch]).backward()
            method.collect(worker)
        method.step()
    return losses[0], float(cross_entropy(model(inputs), targets).detach())


@pytest.mark.parametrize("name", MEANS)
def test_every_baseline_learns_at_the_center_of_its_grid(name):
    """With a hundred times as much, SGD diverges; the study's records hold the other rates."""
    first, last = train_blobs(name)
    assert last < 0.96 * first


@pytest.mark.parametrize("name", ["ddp-fp16", "ddp-powersgd"])
def test_other_means_of_the_gradient_are_tuned_as_the_exact_one(name):
    assert find_method(name).base_lr == find_method("global-lion").base_lr


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
    "name",
    [
        "",
        "majorty",
        "quantized-9",
        "quantized-4-l2",
        "majority-sync-",
        "terngrad-sync-10",
        "dgc-betas-90-95",
        "majority-betas-90",
        "majority-betas-9-95",
        "majority-betas-100-95",
        "majority-betas-900-95",
        "majority-betas-0.9-0.95",
        "signum-betas-90-95",
        "majority-sync-10-betas-90-95",
    ],
)
def test_unknown_method_is_reported_with_the_place_where_all_are_listed(name):
    with pytest.raises(
        InvalidArgumentError, match="'distlion compare --help' lists all"
    ) as refused:
        find_method(name)
    assert ("90-95 for (0.9, 0.95)" in str(refused.value)) is ("-betas-" in name)


@pytest.mark.parametrize("part", ["attention.query", "attn.c_proj"])
def test_momenta_of_the_attention_are_found_by_name(part):
    params = [(f"{name}.weight", torch.nn.Parameter(torch.zeros(4, 6))) for name in (part, "mlp")]
    run = MethodRun(params=params, lr=0.01, weight_decay=0.0, workers=2, steps=10, seed=0)
    cluster = find_method("majority-sync-1-attention").enter(run).optimizer
    for worker, sign in enumerate((1.0, -1.0)):
        for _, param in params:
            param.grad = torch.full_like(param, sign)
        cluster.collect(worker)
    cluster.step()
    attention, mlp = cluster.exp_avg(0)
    assert (attention == 0).all()
    assert (mlp != 0).all()


@pytest.mark.parametrize("base", ["majority", "quantized-2-linf", "global-lion", "global-adamw"])
def test_betas_are_those_at_the_end_of_the_name(base):
    found, plain = find_method(f"{base}-betas-90-95"), find_method(base)
    assert found.description == f"{plain.description}, betas (0.9, 0.95)"
    assert found.definition != plain.definition
    assert "betas=(0.9, 0.95)" in found.definition
    assert found.kind is plain.kind
    (group,) = enter(found.name)[1].optimizer.param_groups
    assert group["betas"] == (0.9, 0.95)


def test_momenta_with_other_betas_are_averaged_too():
    found = find_method("majority-betas-90-98-sync-10")
    assert "betas=(0.9, 0.98), MomentumSync(every=10" in found.definition


def test_momenta_cannot_be_averaged_every_0_steps():
    with pytest.raises(InvalidArgumentError, match="every"):
        find_method("majority-sync-0")


@pytest.mark.smoke
@pytest.mark.parametrize("preset", list(Preset))
def test_presets_name_known_methods_once(preset):
    methods = PRESETS[preset]["methods"]
    assert [find_method(name).name for name in methods] == list(methods)
    assert len(set(methods)) == len(methods)


@pytest.mark.parametrize("name", [name for name in RULE_NAMES if not set(name) & set("PRA")])
def test_every_rule_of_train_is_the_method_of_compare(name):
    rule, method = find_rule(name), find_method(name)
    assert rule.start is not None
    assert rule.definition == method.definition


@pytest.mark.parametrize(
    "name",
    ["global-sgd", "terngrad-adamw", "lion-cub", "majority-sync-10", "majority-sync-0", "diloco-4"],
)
def test_train_refuses_methods_that_only_a_comparison_knows(name):
    with pytest.raises(InvalidArgumentError, match=f"rule '{name}' is unknown"):
        find_rule(name)
