"""The check that nothing wrote to parameters between two periods of local steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distlion.step.param import local_tensor

SAMPLE_ELEMENTS = 64
"""Lower limit on the sampled elements of a tensor; smaller tensors are compared in full."""
_GOLDEN = 0.618
"""Elements so far apart, in parts of the largest gap, are not all in a few columns of a matrix."""


class WriteCheck:
    """Find parameters that something wrote to since their period began.

    All values of a parameter are compared if torch counted a write to it, or if its memory is
    another. Many writes are not counted, such as those through ``.data``, so a sample of each
    tensor is compared too, and if an element differs, all values of all parameters. Rows that were
    only shortened are no such write: a forward pass of ``nn.Embedding(max_norm=)`` does that, and
    the delta holds it like a step. Keeps the parameters' memory alive.

    Args:
        params: The parameters.
        starts: Tensors that keep their values at the start, in any dtype and on any device.
    """

    def __init__(self, params: Sequence[Tensor], starts: Sequence[Tensor]) -> None:
        self._params, self._starts = list(params), list(starts)
        views = [_view_sample(local_tensor(param).detach()) for param in params]
        known = [view for view in views if view is not None]
        self._samples = [_Samples(alike) for alike in _split_by_kind(known)]
        # None: a tensor without a sample is always compared.
        found = zip(self._find_layouts(), views, strict=True)
        self._layouts = [None if view is None else layout for layout, view in found]

    @torch.no_grad()
    def list_written(self) -> list[Tensor]:
        """Return the parameters that are not at the start, nor shortened from it, in order."""
        is_any = any(each.have_changed() for each in self._samples)
        now = self._find_layouts()
        everything = zip(self._params, self._starts, self._layouts, now, strict=True)
        return [
            param
            for param, start, before, after in everything
            if (is_any or before != after) and _has_moved(param, start)
        ]

    def _find_layouts(self) -> list[tuple[object, ...]]:
        """List each parameter's version counters and memory layout."""
        both = [(param, local_tensor(param)) for param in self._params]
        return [  # torch counts writes to a DTensor apart from those to its shard
            (
                param._version,
                local._version,
                local.data_ptr(),
                local.dtype,
                local.shape,
                local.stride(),
            )
            for param, local in both
        ]


@torch.no_grad()
def list_moved(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """List parameters that are not at the tensors beside them, nor shortened from there."""
    return [param for param, start in pairs if _has_moved(param, start)]


def _has_moved(param: Tensor, start: Tensor) -> bool:
    return not (_is_at(param, start) or _is_shortened(param, start))


class _Samples:
    """Views of parameters of one device and dtype, and a copy of their values.

    Args:
        views: Of the parameters' own memory, one axis each.
    """

    def __init__(self, views: Sequence[Tensor]) -> None:
        self._views, self._before = views, torch.cat(list(views))

    def have_changed(self) -> bool:
        now = torch.cat(list(self._views))
        # As bytes, so that NaNs equal themselves.
        return not torch.equal(now.view(torch.uint8), self._before.view(torch.uint8))


def _view_sample(local: Tensor) -> Tensor | None:
    """View elements that are equally far apart in memory; None if a tensor has gaps there."""
    n_elements = local.numel()
    steps = zip(local.shape, local.stride(), strict=True)
    if not n_elements:
        return local.reshape(0)
    if n_elements != 1 + sum((size - 1) * step for size, step in steps):
        return None
    gap = max(1, int(_GOLDEN * (n_elements // SAMPLE_ELEMENTS)))
    return local.as_strided(((n_elements - 1) // gap + 1,), (gap,), local.storage_offset())


def _split_by_kind(views: Sequence[Tensor]) -> list[list[Tensor]]:
    kinds: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for view in views:
        kinds.setdefault((view.device, view.dtype), []).append(view)
    return list(kinds.values())


def _is_at(param: Tensor, start: Tensor) -> bool:
    """Return whether a parameter has these values, NaN being equal to itself."""
    expected = local_tensor(start).detach().to(param.dtype)
    # Where the start is: a GPU may have no memory for it.
    present = local_tensor(param).detach().to(expected.device)
    # The first comparison needs no memory, and is enough for finite values.
    return torch.equal(present, expected) or (
        present.shape == expected.shape
        and torch.allclose(present, expected, rtol=0, atol=0, equal_nan=True)
    )


def _is_shortened(param: Tensor, start: Tensor) -> bool:
    """Return whether rows of a matrix differ from the start by factors from 0 to 1 alone."""
    expected = local_tensor(start).detach().to(param.dtype).float()
    present = local_tensor(param).detach().to(expected.device).float()
    if present.dim() != 2 or present.shape != expected.shape:
        return False
    before, after = (each.norm(dim=1) for each in (expected, present))
    # Each element is rounded once after it is scaled, and norms are sums of rounded squares.
    tolerance = 4 * torch.finfo(param.dtype).eps
    factors = torch.where(before > 0, after / before, 0.0)
    errors = (present - expected * factors[:, None]).norm(dim=1)
    return bool(((after <= before * (1 + tolerance)) & (errors <= tolerance * after)).all())
