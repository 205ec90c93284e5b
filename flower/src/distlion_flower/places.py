"""Places of a model's elements in a client's vote: one bucket, counted by one server."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from distlion.errors import InvalidArgumentError, UnsupportedTypeError
from distlion.layout import BucketLayout, fill_buckets, place_parameters

STATISTICS = ("running_mean", "running_var", "moving_mean", "moving_variance")
"""Last parts of the names of running statistics, in torch's norms and in Keras'."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Places:
    """The parameters that are voted on, in an order that server and clients share.

    Attributes:
        names: Names of the parameters.
        shapes, dtypes: Shape and dtype of each.
        bucket: Layout of the parameters with elements; its ``members`` holds their numbers.
    """

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    dtypes: tuple[torch.dtype, ...]
    bucket: BucketLayout

    @classmethod
    def of(cls, params: Mapping[str, Tensor]) -> Places:
        """Place parameters in the order of the mapping.

        Raises:
            InvalidArgumentError: There is no element to vote on, or a parameter has the name of a
                running statistic.
            UnsupportedTypeError: Votes do not support a dtype.
        """
        if statistics := list_statistics(params):
            raise InvalidArgumentError(
                f"{statistics[0]} is a running statistic. A vote moves all elements of an array by "
                "one size, so that a variance would become negative. Expected parameters. Leave "
                "it out of the vote"
            )
        for name, param in params.items():
            if param.dtype not in DTYPES:
                raise UnsupportedTypeError(
                    f"{name} is {param.dtype}; expected float32, bfloat16 or float16. Convert it, "
                    "or leave it out of the vote"
                )
        slots = place_parameters(list(params), [param.numel() for param in params.values()])
        kinds = [None] * len(slots)
        n_elements = sum(slot.n_elements for slot in slots)
        # A bucket that no parameter exceeds, with the padding of words.
        most = n_elements + 64 * len(slots)
        buckets = fill_buckets(slots, kinds, n_shards=1, bucket_elements=most)
        if not buckets:
            raise InvalidArgumentError(
                f"{len(params)} parameters have no elements; expected some to vote on"
            )
        return cls(
            tuple(params),
            tuple(param.shape for param in params.values()),
            tuple(param.dtype for param in params.values()),
            buckets[0],
        )

    @property
    def n_elements(self) -> int:
        """Number of elements that are voted on."""
        return sum(slot.n_elements for slot in self.bucket.slots)


def list_statistics(names: Iterable[str]) -> list[str]:
    """List the names of running statistics, on which no vote makes sense."""
    return [name for name in names if name.rpartition(".")[2] in STATISTICS]


def find_equal(params: Mapping[str, Tensor]) -> list[tuple[str, str]]:
    """Find pairs of parameters with equal elements, such as tied weights."""
    firsts: dict[tuple[torch.dtype, torch.Size, bytes], str] = {}
    pairs = []
    for name, param in params.items():
        flat = param.detach().cpu().reshape(-1)
        if not len(flat) or bool((flat == flat[0]).all()):  # as zeros and ones at the start
            continue
        digest = hashlib.sha256(flat.contiguous().view(torch.uint8).numpy().data).digest()
        first = firsts.setdefault((param.dtype, param.shape, digest), name)
        if first != name:
            pairs.append((first, name))
    return pairs


def find_deltas(
    places: Places, before: Mapping[str, Tensor], after: Mapping[str, Tensor]
) -> list[Tensor]:
    """Return each parameter's delta, as a step of descent: before - after, in float32.

    Args:
        places: Places of the parameters.
        before: Parameters from the server.
        after: Parameters after local steps, on any device.

    Returns:
        The delta of each of ``places.bucket.members``, on the device of ``after``.

    Raises:
        InvalidArgumentError: A parameter is missing, has another shape, or is the same tensor
            before and after.
    """
    deltas = []
    for number in places.bucket.members:
        name, shape = places.names[number], places.shapes[number]
        for label, given in (("before", before), ("after", after)):
            if name not in given:
                raise InvalidArgumentError(
                    f"{label} lacks {name}, which the server has sent. Expected all of "
                    f"{len(places.names)} names. Use the server's model"
                )
            if given[name].shape != shape:
                raise InvalidArgumentError(
                    f"{name} has the shape {tuple(given[name].shape)} in {label}; expected "
                    f"{tuple(shape)}, as the server has sent it"
                )
        if before[name].data_ptr() == after[name].data_ptr():
            raise InvalidArgumentError(
                f"{name} is one tensor before and after, so its delta is 0. Pass the server's "
                "arrays as before, or clones made before the local steps"
            )
        end = after[name].detach()
        deltas.append(before[name].detach().to(end.device).float() - end.float())
    return deltas
