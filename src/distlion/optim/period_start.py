"""Parameters' values at the start of a period, and whether something wrote to them since."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distlion.step import local_tensor

_SAMPLE = 64


class PeriodStart:
    """Find parameters that something wrote to since their period began.

    If torch counted a write, or the memory is another, it compares all values. Writes through
    ``.data`` or numpy are not counted, so it also compares up to 64 neighboring elements of each
    tensor, and if one of these differs, all values.

    Args:
        params: The parameters.
        starts: Tensors that keep their values at the start, in any dtype or place.
    """

    def __init__(self, params: Sequence[Tensor], starts: Sequence[Tensor]) -> None:
        self._params, self._starts = list(params), list(starts)
        views = [_view_sample(local_tensor(param).detach()) for param in params]
        self._samples = [_Samples(alike) for alike in _split_by_kind(views)]
        self._places = self._find_places()

    @torch.no_grad()
    def list_written(self) -> list[Tensor]:
        """Return the parameters whose values are not those of the start, in order."""
        places = self._find_places()
        if places == self._places and not any(each.have_changed() for each in self._samples):
            return []
        pairs = zip(self._params, self._starts, strict=True)
        return [param for param, start in pairs if not _is_at(param, start)]

    def _find_places(self) -> list[tuple[int, int]]:
        locals_ = [local_tensor(param) for param in self._params]
        return [(local._version, local.data_ptr()) for local in locals_]


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


def _view_sample(local: Tensor) -> Tensor:
    """View up to 64 neighboring elements in the middle of a tensor."""
    if not local.numel():
        return local.reshape(0)
    row = local
    while row.dim() > 1:
        row = row[row.shape[0] // 2]
    row = row.reshape(-1)
    n_elements = min(_SAMPLE, row.numel())
    return row.narrow(0, (row.numel() - n_elements) // 2, n_elements)


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
