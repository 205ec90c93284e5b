"""Checks of an optimizer's arguments: every mistake raises its own message and changes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from distlion.errors import InvalidArgumentError, UnsupportedTypeError
from distlion.kernels.contract import PARAM_DTYPES
from distlion.kernels.orthogonal import matrix_shape
from distlion.step.param import (
    check_own_memory,
    check_shared_memory,
    is_dtensor,
    is_wrapper,
    local_tensor,
)
from distlion.votes.aggregation import Aggregation
from distlion.votes.masked import MaskedVote


def list_params(params: Any) -> list[Any]:
    """Turn an optimizer's ``params`` into a list that can be read twice.

    The ``params`` of its groups become lists too, as they are often generators.

    Raises:
        UnsupportedTypeError: A bare tensor, or a set, whose order differs between processes; or a
            group without a list of parameters.
        InvalidArgumentError: It is empty.
    """
    if isinstance(params, Tensor):
        raise UnsupportedTypeError(
            f"params is a tensor of shape {tuple(params.shape)}; expected an iterable: [tensor]"
        )
    _refuse_set(params)
    if isinstance(params, Mapping) or not isinstance(params, Iterable):
        raise UnsupportedTypeError(
            f"params is a {type(params).__name__}; expected model.parameters(), a list of tensors, "
            "or a list of groups"
        )
    listed = list(params)
    if not listed:
        raise InvalidArgumentError(
            "params is empty; expected at least one parameter (was the generator used up?)"
        )
    return [list_group(each) if isinstance(each, Mapping) else each for each in listed]


def list_group(group: Any) -> dict[str, Any]:
    """Copy one param group, its ``params`` as a list."""
    if not isinstance(group, Mapping) or "params" not in group:
        raise UnsupportedTypeError(
            f"a param group must be a dict with the key 'params'; got {type(group).__name__}"
        )
    params = group["params"]
    _refuse_set(params)
    if not isinstance(params, Iterable):
        raise UnsupportedTypeError(
            f"'params' of a group is a {type(params).__name__}; expected a list of tensors"
        )
    return {**group, "params": [params] if isinstance(params, Tensor) else list(params)}


def _refuse_set(params: Any) -> None:
    if isinstance(params, set | frozenset):
        raise UnsupportedTypeError(
            "params is a set, whose order differs between processes; expected a list, or "
            "model.parameters()"
        )


def split_names(group: Mapping[str, Any]) -> tuple[list[str | None], list[Any]]:
    """Split a group's parameters into names and tensors; the name is None where there is none.

    Args:
        group: Its ``params`` are tensors, or (name, tensor) pairs; the names of tensors may stand
            under ``param_names``, as another optimizer's group has them.

    Raises:
        UnsupportedTypeError: A tuple is no (name, tensor) pair.
        InvalidArgumentError: Only some have names, or ``param_names`` does not fit the parameters.
    """
    entries = group["params"]
    for index, entry in enumerate(entries):
        if isinstance(entry, tuple) and not (len(entry) == 2 and isinstance(entry[0], str)):
            kinds = ", ".join(type(each).__name__ for each in entry)
            raise UnsupportedTypeError(
                f"parameter {index} of a group is a tuple ({kinds}); expected a tensor, or a pair "
                "(name, tensor) as in model.named_parameters()"
            )
    pairs = [entry if isinstance(entry, tuple) else (None, entry) for entry in entries]
    names, params = [name for name, _ in pairs], [param for _, param in pairs]
    unnamed = names.count(None)
    if unnamed and unnamed < len(names):
        raise InvalidArgumentError(
            f"{unnamed} of the {len(names)} parameters of a group have no name; give names to all, "
            "or to none"
        )
    if unnamed and "param_names" in group:
        names = check_names(group["param_names"], len(params))
    return names, params


def resolve_names(
    group: dict[str, Any], number: int, *, has_names: bool
) -> tuple[list[str], list[Any]]:
    """Split the pairs of a group into the names that errors use and the parameters.

    Args:
        group: Its ``params`` become tensors, and ``param_names`` their names if they have some.
        number: Number of groups before it.
        has_names: Whether the parameters of those groups have names.

    Raises:
        InvalidArgumentError: Its parameters have names and the others' do not, or the reverse.
    """
    names, params = split_names(group)
    is_named = None not in names if names else has_names
    if number and is_named != has_names:
        raise InvalidArgumentError(
            f"group {number} has {'' if is_named else 'no '}names for its parameters, unlike "
            "the groups before it; give names to all, as model.named_parameters() does, or to "
            "none"
        )
    group.pop("param_names", None)
    if is_named:
        group |= {"params": params, "param_names": names}
    labels = [label_param(names[index], param, index, number) for index, param in enumerate(params)]
    return labels, params


def check_names(names: Any, n_params: int) -> list[str | None]:
    """Return the ``param_names`` of a group, after checking that each parameter has one.

    Raises:
        InvalidArgumentError: Some parameter has none, or there are too many.
    """
    is_list = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
    if not is_list or len(names) != n_params:
        what = f"{len(names)} names" if is_list else f"a {type(names).__name__} without names"
        raise InvalidArgumentError(
            f"'param_names' of a group holds {what}; expected a name for each of its {n_params} "
            "parameters"
        )
    return list(names)


def name_tensors(params: Sequence[Any]) -> dict[str, Tensor]:
    """Name all tensors of an optimizer's ``params``, as ``label_param`` does; no checks yet."""
    groups = params if isinstance(params[0], Mapping) else [{"params": params}]
    named: dict[str, Tensor] = {}
    for number, group in enumerate(groups):
        names, tensors = split_names(list_group(group))
        for index, tensor in enumerate(tensors):
            if isinstance(tensor, Tensor):
                named[label_param(names[index], tensor, index, number)] = tensor
    return named


def label_param(name: str | None, param: Any, index: int, group: int) -> str:
    """Name a parameter for errors: by the caller's name, else by place and shape."""
    has_shape = isinstance(param, Tensor) and not is_lazy(param)
    shape = f", shape {tuple(param.shape)}" if has_shape else ""
    return name or f"parameter {index} of group {group}{shape}"


def label_params(groups: Sequence[Mapping[str, Any]]) -> dict[Tensor, str]:
    """Name all parameters of param groups, as ``label_param`` does."""
    labels: dict[Tensor, str] = {}
    for number, group in enumerate(groups):
        params = group["params"]
        given = [*group.get("param_names", ()), *[None] * len(params)]  # it may have been cut
        for index, param in enumerate(params):
            labels[param] = label_param(given[index], param, index, number)
    return labels


def check_params(
    params: Sequence[Any], names: Sequence[str], *, known: Mapping[Tensor, str]
) -> None:
    """Check that every parameter can be voted on and is not among the ``known`` ones.

    Raises:
        UnsupportedTypeError: Not a tensor, or of a kind, dtype or device without support.
        InvalidArgumentError: Not a leaf, given twice, or with memory that overlaps itself or
            another parameter.
    """
    seen = {id(param): name for param, name in known.items()}
    for param, name in zip(params, names, strict=True):
        _check_kind(param, name)
        if not (param.is_leaf or param.retains_grad):
            raise InvalidArgumentError(
                f"{name} is not a leaf: an optimizer moves parameters, not results of a graph"
            )
        if id(param) in seen:
            raise InvalidArgumentError(
                f"{name} is {seen[id(param)]} once more; give each parameter once"
            )
        check_own_memory(local_tensor(param), name)
        if local_tensor(param).is_neg():
            raise InvalidArgumentError(
                f"{name} is a negated view, whose memory holds the opposite values. Expected a "
                "plain tensor. Call .resolve_neg() first"
            )
        seen[id(param)] = name
    everything = {**known, **dict(zip(params, names, strict=True))}
    trained = {param: name for param, name in everything.items() if param.requires_grad}
    check_shared_memory([local_tensor(param) for param in trained], list(trained.values()))


def _check_kind(param: Any, name: str) -> None:
    if not isinstance(param, Tensor):
        raise UnsupportedTypeError(f"{name} is a {type(param).__name__}; expected a torch.Tensor")
    if is_lazy(param):
        raise UnsupportedTypeError(
            f"{name} belongs to a lazy module and has no shape yet; run a batch through the model "
            "before the optimizer is made"
        )
    if param.device.type == "meta":
        raise UnsupportedTypeError(
            f"{name} is on the meta device; materialize the model first (model.to_empty)"
        )
    if param.dtype.is_complex or not param.dtype.is_floating_point:
        raise UnsupportedTypeError(
            f"{name} has dtype {param.dtype}; expected {_list_dtypes()}; leave out what needs no "
            "gradient"
        )
    if param.layout is not torch.strided:
        raise UnsupportedTypeError(
            f"{name} has the layout {param.layout}; expected a dense tensor; leave out what needs "
            "no gradient"
        )
    if not param.requires_grad:
        return
    if is_wrapper(local_tensor(param)):
        raise UnsupportedTypeError(
            f"{name} is a {type(param.detach()).__name__}, which wraps other tensors; expected a "
            "tensor with memory of its own. Freeze it, or train a plain tensor in its place"
        )
    if param.dtype not in PARAM_DTYPES:
        raise UnsupportedTypeError(f"{name} has dtype {param.dtype}; expected {_list_dtypes()}")


def _list_dtypes() -> str:
    return "one of " + ", ".join(str(dtype) for dtype in PARAM_DTYPES)


def check_whole(params: Sequence[Tensor], names: Mapping[Tensor, str]) -> None:
    """Check that no trained parameter is a DTensor.

    Raises:
        UnsupportedTypeError: One is.
    """
    for param in params:
        if param.requires_grad and is_dtensor(param):
            raise UnsupportedTypeError(
                f"{names[param]} is a DTensor, and this optimizer takes whole parameters alone. "
                "Expected a plain tensor. Make a DistributedLion of all DTensors"
            )


def check_matrices(
    group: Mapping[str, Any], names: Mapping[Tensor, str], *, takes_shards: bool
) -> None:
    """Check that an orthogonalized param group holds weight matrices.

    Args:
        group: The param group.
        names: Names of its parameters.
        takes_shards: Whether DTensors can be made whole in a step.

    Raises:
        InvalidArgumentError: A parameter has fewer than two dims, or one row or column.
        UnsupportedTypeError: One is a DTensor, and those cannot be made whole.
    """
    if not group.get("orthogonalize", False):
        return
    for param in group["params"]:
        if is_dtensor(param) and not takes_shards:
            raise UnsupportedTypeError(
                f"orthogonalize=True and {names[param]}, a DTensor, of which this rank holds a "
                "shard. Expected whole matrices here. Use DistributedLion, which makes matrices of "
                'shards whole, on a mesh of ("replicate", "shard"); replicate is 1 for one worker'
            )
        if matrix_shape(param.shape) is None:
            raise InvalidArgumentError(
                f"orthogonalize=True and {names[param]}, a tensor of {tuple(param.shape)}. "
                "Expected two dims or more, and at least two rows and columns; a convolution "
                "counts as (out, rest). Put biases, norms and scalars into another param group"
            )


def check_rule(rule: Any, *, takes_scales: bool, orthogonalizes: bool) -> None:
    """Check a group's aggregation.

    Args:
        rule: The given aggregation.
        takes_scales: Whether its reply may carry a step length.
        orthogonalizes: Whether the group's directions are orthogonalized.

    Raises:
        UnsupportedTypeError: It is not a rule.
        InvalidArgumentError: Its replies carry a step length, which this optimizer does not take;
            or it masks votes by gradients, which have no orthogonalized form.
    """
    if not isinstance(rule, Aggregation):
        raise UnsupportedTypeError(
            f"aggregation={rule!r}: expected a rule such as distlion.MajorityVote()"
        )
    if rule.n_reply_scales and not takes_scales:
        raise InvalidArgumentError(
            f"aggregation={rule!r}: its replies carry a step length, and Lion moves every "
            "element by lr. Give it to LocalSteps, or choose a rule such as "
            "distlion.MajorityVote() here"
        )
    if orthogonalizes and isinstance(rule, MaskedVote):
        raise InvalidArgumentError(
            f"orthogonalize=True and aggregation={rule!r}, which masks votes by the signs of "
            "gradients. Expected a rule of directions alone. Choose distlion.MajorityVote() for "
            "this param group"
        )
