"""Steps, and changes that all workers make alike."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import distlion
import matrix
from distlion.errors import DistlionError
from fuzz.players import N_FEATURES, Grads, Model, Player, Virtual, add_group
from fuzz.program import SIZES, Setup
from fuzz.table import Args, Promise, draw_key, operation

# --- steps


def make_gradient(param: Tensor, absent: float, *key: int) -> Tensor | None:
    """Return a gradient that depends on ``key``, or None; some elements are 0."""
    random = np.random.default_rng(key)
    if random.random() < absent:
        return None
    values = random.standard_normal(param.numel())
    values[random.random(param.numel()) < 0.1] = 0
    return torch.from_numpy(values).to(param.dtype).reshape(param.shape)


def list_passes(player: Player, args: Args, worker: int) -> list[Grads]:
    """Return the gradients of a worker, of one backward pass after the other."""
    key, n_passes, absent = args["key"], args.get("passes", 1), args.get("absent", 0.0)
    passes = [
        [
            make_gradient(param, absent, key, worker, number, index)
            for index, param in enumerate(player.model.params)
        ]
        for number in range(n_passes)
    ]
    if "bad" in args and args["bad"][0] == worker:
        _, index, value = args["bad"]
        passes[-1][index] = torch.full_like(player.model.params[index], float(value))
    return passes


def edit_gradient(player: Player, args: Args, worker: int) -> None:
    """Negate a gradient, in one of many ways."""
    rank, index, how = args["edit"]
    if rank not in (None, worker):
        return
    param = player.model.params[index]
    if param.grad is None:
        return
    match how:
        case "mul_":
            param.grad.mul_(-1)
        case "data":
            param.grad.data.mul_(-1)
        case "detach":
            param.grad.detach().mul_(-1)
        case "numpy":
            signs = torch.int32 if param.dtype == torch.float32 else torch.int16
            param.grad.view(signs).numpy()[...] ^= torch.iinfo(signs).min
        case "other":
            param.grad = -param.grad
        case "foreach":
            torch._foreach_mul_([param.grad], -1)
        case "none":
            param.grad = None


def _draw_step(random: Random, setup: Setup) -> Args:
    args: Args = {"key": draw_key(random), "absent": random.choice((0.0, 0.0, 0.3, 1.0))}
    if setup.is_real and random.random() < 0.3:
        args["passes"] = random.choice((2, 3))
    if random.random() < 0.2 and setup.trained:
        rank = random.randrange(setup.workers)
        if not setup.is_real and setup.nonfinite == "raise":
            rank = 0  # a later worker's gradient is found when momenta have moved, as documented
        args["bad"] = (rank, random.choice(setup.trained), random.choice(("nan", "inf", "-inf")))
    elif random.random() < 0.4:
        hows = ("mul_", "data", "detach", "numpy", "other", "foreach", "none")
        rank_or_all = random.choice((None, *range(setup.workers)))
        args["edit"] = (rank_or_all, random.choice(setup.trained), random.choice(hows))
    return args


def _promise_step(setup: Setup, args: Args) -> Promise:
    is_refused = "bad" in args and setup.nonfinite == "raise"
    return Promise.EITHER if is_refused or ("edit" in args and setup.overlap) else Promise.OK


@operation(_draw_step, _promise_step, is_modelled=True, weight=12)
def step(player: Player, args: Args) -> None:
    """Do a step whose gradients may be absent, not finite, or edited after backward."""
    player.step(
        lambda worker: list_passes(player, args, worker),
        (lambda worker: edit_gradient(player, args, worker)) if "edit" in args else None,
    )


def plain_step(player: Player, key: int) -> None:
    """Do a step with a gradient everywhere."""
    step(player, {"key": key})


@operation(lambda random, setup: {"key": draw_key(random)} if setup.is_real else None)
def give_up(player: Player, args: Args) -> None:
    """Let gradients arrive, and clear them on all workers."""
    assert hasattr(player, "accumulate")
    player.accumulate(lambda worker: list_passes(player, args, worker))
    player.optimizer.zero_grad()


@operation(lambda random, setup: {} if setup.is_real else None)
def verify(player: Player, args: Args) -> None:
    """Compare replicas."""
    assert isinstance(player.optimizer, distlion.DistributedLion)
    player.optimizer.verify_replicas()


# --- buffers, which every worker has of its own


def make_data(*key: int) -> Tensor:
    """Return a batch that depends on ``key``."""
    values = np.random.default_rng(key).standard_normal((5, N_FEATURES), dtype=np.float32)
    return torch.from_numpy(values)


def _draw_forward(random: Random, setup: Setup) -> Args | None:
    if not setup.is_real:
        return None
    return {"key": draw_key(random), "rank": random.choice((None, *range(setup.workers)))}


@operation(_draw_forward, is_modelled=True, weight=2)
def forward(player: Player, args: Args) -> None:
    """Let all workers, or one alone, see data in training: their buffers differ afterwards."""
    for worker in player.workers:
        if args["rank"] in (None, worker):
            player.forward(worker, make_data(args["key"], worker))


@operation(
    lambda random, setup: {} if setup.is_real else None,
    is_modelled=True,
    weight=2,
)
def average(player: Player, args: Args) -> None:
    """Make the buffers of all workers equal."""
    player.average()


# --- changes of settings, on all workers


@operation(lambda random, setup: {} if setup.scheduler else None, is_modelled=True, weight=3)
def schedule(player: Player, args: Args) -> None:
    """Let the scheduler change learning rates."""
    player.scheduler.step()


SETTINGS = (("lr", 2e-3), ("betas", (0.8, 0.95)), ("weight_decay", 0.05), ("lr", "tensor"))


def _draw_setting(random: Random, setup: Setup) -> Args:
    key, value = random.choice(SETTINGS)
    return {"group": random.randrange(len(setup.sizes)), "key": key, "value": value}


@operation(_draw_setting, is_modelled=True, weight=2)
def set_group(player: Player, args: Args) -> None:
    """Change a group in place."""
    is_tensor = args["value"] == "tensor"
    value = torch.tensor(4e-3, dtype=torch.float32, device="cpu") if is_tensor else args["value"]
    player.optimizer.param_groups[args["group"]][args["key"]] = value


def _draw_rule(random: Random, setup: Setup) -> Args:
    rule = random.choice([*matrix.LISTED, "text"])
    return {"group": random.randrange(len(setup.sizes)), "rule": rule, "key": draw_key(random)}


@operation(_draw_rule, Promise.EITHER, is_modelled=True)
def switch_rule(player: Player, args: Args) -> None:
    """Change the rule of a group in place, and do a step."""
    rule = matrix.LISTED.get(args["rule"], "majority")
    with kept_unless_refused(player, args["group"], aggregation=rule):
        plain_step(player, args["key"])


BAD_SETTINGS: tuple[tuple[str, Any], ...] = (
    *(("step", value) for value in ("abc", None, -3, 2.5, 2**70, True)),
    *(("lr", value) for value in (-1.0, float("nan"), "fast", None, 1e300)),
    *(("betas", value) for value in ((0.9,), (0.9, 1.0), 0.9, None, "ab")),
    *(("weight_decay", value) for value in (-0.1, "much", float("inf"))),
)


def _draw_bad_setting(random: Random, setup: Setup) -> Args:
    key, value = random.choice(BAD_SETTINGS)
    group = random.randrange(len(setup.sizes))
    return {"group": group, "key": draw_key(random), "bad": (key, value)}


@operation(_draw_bad_setting, Promise.REFUSED, weight=2)
def bad_setting(player: Player, args: Args) -> None:
    """Put into a group what no step can compute with, and do one."""
    key, value = args["bad"]
    with kept_unless_refused(player, args["group"], **{key: value}):
        plain_step(player, args["key"])


@contextmanager
def kept_unless_refused(player: Player, number: int, **changes: Any) -> Iterator[None]:
    """Change a group, and change it back where what follows is refused."""
    group = player.optimizer.param_groups[number]
    before = {key: group[key] for key in changes}
    group.update(changes)
    try:
        yield
    except DistlionError:
        group.update(before)
        player.optimizer.zero_grad()  # under overlap gradients may have arrived
        raise


# --- changes of parameters, on all workers


def _draw_trained(random: Random, setup: Setup) -> Args | None:
    return {"param": random.choice(setup.trained)} if len(setup.trained) > 1 else None


@operation(_draw_trained, is_modelled=True)
def freeze(player: Player, args: Args) -> None:
    """Freeze a parameter that is trained."""
    param = player.model.params[args["param"]]
    param.requires_grad_(False)
    param.grad = None


def _draw_trained_step(random: Random, setup: Setup) -> Args | None:
    args = _draw_trained(random, setup)
    return None if args is None else {**args, "key": draw_key(random)}


# Refused where a load, or a group that was added, has found it frozen.
@operation(_draw_trained_step, Promise.EITHER, is_modelled=True)
def unfreeze(player: Player, args: Args) -> None:
    """Train a parameter again that was trained when the optimizer was made, and do a step."""
    with unfrozen_unless_refused(player.model.params[args["param"]]):
        plain_step(player, args["key"])


@contextmanager
def unfrozen_unless_refused(param: nn.Parameter) -> Iterator[None]:
    """Unfreeze a parameter, and freeze it again where what follows is refused."""
    was_trained = param.requires_grad
    param.requires_grad_(True)
    try:
        yield
    except DistlionError:
        param.requires_grad_(was_trained)
        param.grad = None
        raise


def _draw_frozen(random: Random, setup: Setup) -> Args | None:
    return {"param": setup.frozen[0], "key": draw_key(random)} if setup.frozen else None


@operation(_draw_frozen, Promise.REFUSED)
def train_frozen(player: Player, args: Args) -> None:
    """Train a parameter that was frozen when the optimizer was made."""
    with unfrozen_unless_refused(player.model.params[args["param"]]):
        plain_step(player, args["key"])


def _draw_group(random: Random, setup: Setup) -> Args | None:
    if setup.scheduler:
        return None  # torch's schedulers know the groups that there were when they were made
    return {"size": random.choice(SIZES), "rule": random.choice(list(matrix.LISTED))}


@operation(_draw_group, is_modelled=True)
def add(player: Player, args: Args) -> None:
    """Add a group with one parameter."""
    add_group(player.model, player.optimizer, args["size"], args["rule"])
    player.added.append((args["size"], args["rule"]))


@operation(
    lambda random, setup: {"key": draw_key(random)},
    Promise.EITHER,
    is_modelled=True,
    is_last=True,  # an optimizer that is made for what is there now has other momenta
)
def cut(player: Player, args: Args) -> None:
    """Cut the precision of all parameters, and do a step."""
    with cut_unless_refused(player.model):
        plain_step(player, args["key"])


@contextmanager
def cut_unless_refused(model: Model) -> Iterator[None]:
    """Convert parameters as ``model.to`` does, and back where what follows is refused."""
    before = [param.data for param in model.params]
    dtype = torch.float32 if before[0].dtype == torch.bfloat16 else torch.bfloat16
    for param in model.params:
        param.grad, param.data = None, param.data.to(dtype)
    try:
        yield
    except BaseException:
        for param, data in zip(model.params, before, strict=True):
            param.grad, param.data = None, data
        raise


# --- copies, and optimizers that cannot be made


@operation(
    lambda random, setup: {"how": random.choice(("copy", "deepcopy", "pickle"))}, Promise.REFUSED
)
def duplicate(player: Player, args: Args) -> None:
    """Copy the optimizer."""
    calls: dict[str, Callable[[Any], Any]] = {
        "copy": copy.copy,
        "deepcopy": copy.deepcopy,
        "pickle": pickle.dumps,
    }
    calls[args["how"]](player.optimizer)


BAD_PARAMS = ("lazy", "twice", "double", "complex", "integer", "frozen", "none", "sparse", "meta")


def _promise_construction(setup: Setup, args: Args) -> Promise:
    # Virtual workers may be made before anything is unfrozen.
    may_succeed = args["params"] in ("frozen", "none") and not setup.is_real
    return Promise.EITHER if may_succeed else Promise.REFUSED


@operation(lambda random, setup: {"params": random.choice(BAD_PARAMS)}, _promise_construction)
def construct(player: Player, args: Args) -> None:
    """Make an optimizer of parameters that it cannot have."""
    zeros = partial(torch.zeros, 3, device="cpu")
    kinds: dict[str, Callable[[], list[Any]]] = {
        "lazy": lambda: list(nn.LazyLinear(3).parameters()),
        "twice": lambda: [player.model.params[0]] * 2,
        "double": lambda: [nn.Parameter(zeros(dtype=torch.float64))],
        "complex": lambda: [nn.Parameter(zeros(dtype=torch.complex64))],
        "integer": lambda: [nn.Parameter(zeros(dtype=torch.int32), requires_grad=False)],
        "frozen": lambda: [nn.Parameter(zeros(dtype=torch.float32), requires_grad=False)],
        "none": list,
        "sparse": lambda: [nn.Parameter(zeros(dtype=torch.float32).to_sparse())],
        "meta": lambda: [nn.Parameter(torch.zeros(3, device="meta"))],
    }
    player._make([{"params": kinds[args["params"]]()}])


WORKERS: tuple[Any, ...] = (1.0, True, "0", None, -1, 99)


@operation(
    lambda random, setup: None if setup.is_real else {"worker": random.choice(WORKERS)},
    Promise.REFUSED,
)
def collect(player: Player, args: Args) -> None:
    """Collect a worker that there is not."""
    assert isinstance(player, Virtual)
    player.cluster.collect(args["worker"])
