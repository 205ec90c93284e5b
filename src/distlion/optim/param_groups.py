"""Param groups by the kind of a parameter: hidden weight matrices, and all others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from distlion.errors import InvalidArgumentError, UnsupportedTypeError
from distlion.kernels.orthogonal import matrix_shape

MATRICES = "matrices"
OTHERS = "others"

_MATRIX_NAMES: dict[type[nn.Module], tuple[str, ...]] = {
    nn.Linear: ("weight",),
    nn.modules.conv._ConvNd: ("weight",),
    nn.MultiheadAttention: (
        "in_proj_weight",
        "q_proj_weight",
        "k_proj_weight",
        "v_proj_weight",
    ),
}
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_ADAPTERS = ("*lora_*",)


def group_params(
    model: nn.Module,
    *,
    weight_decay: float | None = None,
    head: str | None = None,
    exclude: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Return a model's param groups: hidden weight matrices orthogonalized, all others cautious.

    Args:
        model: The model; read only. Frozen parameters are left out.
        weight_decay: Decay of matrices and embeddings; None: that of the optimizer. Norms, biases
            and other parameters with one dim have none.
        head: Name of the output module, which is not hidden. None: the module that the model's
            ``get_output_embeddings()`` returns, else the last ``nn.Linear``, see Notes.
        exclude: Names of parameters that are not to be orthogonalized either, as patterns for
            ``fnmatch``, such as ``"*.patch_embed.*"``.

    Returns:
        Up to three groups for ``DistributedLion``, ``Lion`` or ``VirtualCluster``, without empty
        ones. Each has "params", a list of (name, parameter); "orthogonalize" and "cautious", one
        of them True; and "weight_decay", unless it is the optimizer's.

    Raises:
        InvalidArgumentError: There is no such head, or a pattern matches nothing.
        UnsupportedTypeError: The model is no ``nn.Module``, or has a lazy module without shapes.

    Notes:
        Call it after ``fully_shard``, which replaces parameters.

        A hidden matrix is a weight of a linear layer or convolution with at least two rows and
        columns. Embeddings, a head, weights that are tied to one of them, low-rank adapters (LoRA),
        convolutions that are transposed or have groups of channels, and raw parameters, such as a
        table of positions or a stack of experts, are not. Where nothing tells the head, as in a
        model that returns hidden states, the last ``nn.Linear`` is taken for it.

        In a model with embeddings, the last ``nn.Linear`` is no head if another one has its shape
        and no embedding has. Such a model computes its outputs by the embedding itself, as in
        ``F.linear(x, embedding.weight)``, and all its linear layers are hidden. A network of one
        block may have no two of one shape: give ``head`` the name of the embedding there, and look
        at ``describe_groups``.

    Example:
        >>> groups = distlion.group_params(model, weight_decay=0.1)
        >>> optimizer = distlion.DistributedLion(groups, lr=1.5e-4)  # half of AdamW's
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedTypeError(f"model={type(model).__name__}: expected a torch.nn.Module")
    named = {name: param for name, param in model.named_parameters() if param.requires_grad}
    for name, param in named.items():
        if is_lazy(param):
            raise UnsupportedTypeError(
                f"{name} belongs to a lazy module and has no shape yet. Expected shapes, by which "
                "matrices are found. Run a batch through the model first"
            )
    outside = _list_outside(model, head) | _match(named, exclude)
    hidden = _list_hidden(model)
    groups: dict[tuple[str, float | None], list[tuple[str, Tensor]]] = {}
    for name, param in named.items():
        is_matrix = id(param) in hidden and id(param) not in outside
        decay = weight_decay if param.ndim > 1 else 0.0
        groups.setdefault((MATRICES if is_matrix else OTHERS, decay), []).append((name, param))
    return [
        {
            "params": params,
            "orthogonalize": kind == MATRICES,
            "cautious": kind == OTHERS,
            **({} if decay is None else {"weight_decay": decay}),
        }
        for (kind, decay), params in sorted(groups.items(), key=lambda item: item[0][0])
    ]


def describe_groups(groups: Sequence[dict[str, Any]]) -> str:
    """Return a table of param groups: settings, and each parameter with its shape.

    Args:
        groups: Groups as ``group_params`` returns them, or an optimizer's ``param_groups``.
    """
    lines = []
    for number, group in enumerate(groups):
        settings = {key: value for key, value in group.items() if key not in _LISTS}
        lines.append(f"group {number}: {', '.join(f'{k}={v!r}' for k, v in settings.items())}")
        names = group.get("param_names")
        for index, entry in enumerate(group["params"]):
            name, param = entry if isinstance(entry, tuple) else (None, entry)
            name = name or (names[index] if names else f"parameter {index}")
            lines.append(f"    {name}  {tuple(param.shape)}")
    return "\n".join(lines)


_LISTS = ("params", "param_names")


def _list_hidden(model: nn.Module) -> set[int]:
    """List the ids of weight matrices by the types of their modules."""
    found = set()
    for module in model.modules():
        names = [
            name for kind, of in _MATRIX_NAMES.items() if isinstance(module, kind) for name in of
        ]
        # transformers has a linear layer of its own, with transposed weights.
        if type(module).__name__ == "Conv1D":
            names.append("weight")
        if isinstance(module, nn.modules.conv._ConvNd) and (module.groups > 1 or module.transposed):
            continue  # its weight is no matrix from all inputs to all outputs
        for name in names:
            param = getattr(module, name, None)
            if isinstance(param, Tensor) and matrix_shape(param.shape) is not None:
                found.add(id(param))
    return found


def _list_outside(model: nn.Module, head: str | None) -> set[int]:
    """List the ids of parameters that are never hidden: those of embeddings, heads, adapters."""
    embeddings = (module for module in model.modules() if isinstance(module, _EMBEDDINGS))
    modules: list[nn.Module] = [*embeddings, *_find_heads(model, head)]
    outside = {id(param) for module in modules for param in module.parameters()}
    return outside | {
        id(param)
        for name, param in model.named_parameters()
        if any(fnmatchcase(name, pattern) for pattern in _ADAPTERS)
    }


def _find_heads(model: nn.Module, head: str | None) -> list[nn.Module]:
    if head is not None:
        modules = dict(model.named_modules())
        if head not in modules:
            raise InvalidArgumentError(
                f"head={head!r}: the model has no such module. Expected a name as "
                "model.named_modules() gives it"
            )
        return [modules[head]]
    ask = getattr(model, "get_output_embeddings", None)
    told = ask() if callable(ask) else None
    if isinstance(told, nn.Module):
        return [told]
    linear = _list_linear(model)
    if not linear:
        return []
    shapes = [each.weight.shape for each in linear]
    embedded = [each.weight.shape for each in model.modules() if isinstance(each, _EMBEDDINGS)]
    is_hidden = embedded and shapes.count(shapes[-1]) > 1 and shapes[-1] not in embedded
    return [] if is_hidden else [linear[-1]]


def _list_linear(model: nn.Module) -> list[nn.Linear]:
    """List the linear layers of a model, in order, without adapters."""
    return [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        if not any(fnmatchcase(f"{name}.weight", pattern) for pattern in _ADAPTERS)
    ]


def _match(named: Mapping[str, Tensor], patterns: Sequence[str]) -> set[int]:
    if isinstance(patterns, str):
        raise UnsupportedTypeError(f"exclude={patterns!r}: expected a list of patterns")
    found: set[int] = set()
    for pattern in patterns:
        matched = {id(param) for name, param in named.items() if fnmatchcase(name, pattern)}
        if not matched:
            raise InvalidArgumentError(
                f"exclude: no trainable parameter's name matches {pattern!r}. Expected patterns "
                "such as '*.patch_embed.*'"
            )
        found |= matched
    return found
