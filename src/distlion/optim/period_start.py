"""Parameters' values at the start of a period, and whether something wrote to them since."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distlion.step import local_tensor

SAMPLE_ELEMENTS = 64
"""At least so many of each tensor are compared without a counted write; less than 3 times so."""


class PeriodStart:
    """Find parameters that something wrote to since their period began.

    If torch counted a write, or the memory is another, it compares all values. Writes through
    ``.data`` or numpy are not counted, so it also compares a sample of each tensor, spread over all
    of it, and if an element differs, all values.

    Args:
        params: The parameters.
        starts: Tensors that keep their values at the start, in any dtype or place.
    """

    def __init__(self, params: Sequence[Tensor], starts: Sequence[Tensor]) -> None:
        self._params, self._starts = list(params), list(starts)
        views = [_view_sample(local_tensor(param).detach()) for param in params]
        self._has_all = all(view is not None for view in views)
        known = [view for view in views if view is not None]
        self._samples = [_Samples(alike) for alike in _split_by_kind(known)]
        self._places = self._find_places()

    @torch.no_grad()
    def list_written(self) -> list[Tensor]:
        """Return the parameters whose values are not those of the start, in order."""
        if self._seem_untouched():
            return []
        pairs = zip(self._params, self._starts, strict=True)
        return [param for param, start in pairs if not _is_at(param, start)]

    def _seem_untouched(self) -> bool:
        if not self._has_all or self._find_places() != self._places:
            return False
        return not any(each.have_changed() for each in self._samples)

    def _find_places(self) -> list[tuple[object, ...]]:
        """List what shows a write that torch counts, or other memory."""
        both = [(param, local_tensor(param)) for param in self._params]
        return [  # torch counts writes to a DTensor apart from those to its shard
            (param._version, local._version, local.data_ptr(), local.shape, local.stride())
            for param, local in both
        ]


class _Samples:
    """Views of parameters of one device and dtype, and what they held.

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
    # Odd, so that they are not all in one column.
    gap = max(1, (n_elements // SAMPLE_ELEMENTS - 1) | 1)
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
