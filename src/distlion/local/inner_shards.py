"""The inner optimizer's state of sharded parameters, saved with a first dim for the workers."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from distlion.errors import CheckpointError, UnsupportedTypeError
from distlion.step.param import is_dtensor, local_tensor
from distlion.step.shard_pieces import ShardPieces

KINDS_KEY = "inner_state"
"""Key of a parameter's saved entry: the kind of each tensor of its inner state, as JSON."""

PRESENT_KEY = "has_inner_state"
"""Key of a parameter's saved entry: for each worker, 1 if its inner optimizer had state, else 0."""

_SHARDED, _LOCAL = "sharded", "local shard"
_NUMBER, _NUMBER_HERE = "number", "number on the parameter's device"
_PYTHON = {"bool": bool, "int": int, "float": float}


class InnerShards:
    """Save and load the inner state of one parameter, which differs between workers.

    A tensor of the parameter's shape becomes (workers, *shape), a number becomes (workers,).

    Args:
        pieces: The form of sharded tensors in states.
        param: The parameter.
        name: Its name for errors.
    """

    def __init__(self, pieces: ShardPieces, param: Tensor, name: str) -> None:
        self._pieces, self._param, self._name = pieces, param, name

    def export(self, entry: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
        """Return the saved form of this worker's inner state.

        Args:
            entry: The inner state.
            like: The state of another parameter of the group, for the keys that other workers may
                have where this one has no state.

        Raises:
            UnsupportedTypeError: A value has no saved form.
        """
        kinds = {key: self._find_kind(key, value) for key, value in entry.items()}
        if entry:
            saved = {key: self._stack(value, kinds[key]) for key, value in entry.items()}
        else:
            kinds, saved = self._fill(like)
        present = torch.tensor(int(bool(entry)), dtype=torch.int64, device="cpu")
        return {
            **saved,
            KINDS_KEY: json.dumps(kinds),
            PRESENT_KEY: self._pieces.export_number(self._param, present),
        }

    def _find_kind(self, key: object, value: Any) -> str:
        """Return the kind of a value, by which it is saved and loaded."""
        shape = tuple(value.shape) if isinstance(value, Tensor) else None
        if not isinstance(key, str):
            raise UnsupportedTypeError(
                f"{self._name}: the inner optimizer has state under {key!r}; expected a string"
            )
        if is_dtensor(value):
            is_like = value.device_mesh == self._param.device_mesh  # type: ignore[attr-defined]
            if is_like and shape == self._param.shape and value.placements == self._placements:
                return _SHARDED
        elif shape == ():
            return _NUMBER if value.device.type == "cpu" else _NUMBER_HERE
        elif shape == tuple(self._pieces.momentum_shape(self._param)):
            return _LOCAL
        elif type(value).__name__ in _PYTHON:
            return type(value).__name__
        what = type(value).__name__ if shape is None else f"tensor of shape {shape}"
        raise UnsupportedTypeError(
            f"{self._name}: the inner optimizer's state {key!r} is a {what}, which differs between "
            "workers and has no place in a state of sharded parameters. Expected numbers, and "
            f"tensors cut like the parameter, {tuple(self._param.shape)}. Use another inner "
            "optimizer, such as AdamW"
        )

    @property
    def _placements(self) -> tuple[Any, ...]:
        return tuple(self._param.placements)  # type: ignore[attr-defined]

    def _stack(self, value: Any, kind: str) -> Tensor:
        if kind in (_SHARDED, _LOCAL):
            return self._pieces.export(self._param, local_tensor(value).detach())
        return self._pieces.export_number(self._param, _as_tensor(value))

    def _fill(self, like: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, Tensor]]:
        """Return zeros where this worker has no state; formats keep one list of keys for all."""
        kinds, saved = {}, {}
        device, shape = local_tensor(self._param).device, self._pieces.momentum_shape(self._param)
        for key, value in like.items():
            # Another parameter's local shard has another shape, so it is no number here.
            if isinstance(value, Tensor) and value.ndim:
                kinds[key] = _SHARDED if is_dtensor(value) else _LOCAL
                zeros = torch.zeros(shape, dtype=value.dtype, device=device)
                saved[key] = self._pieces.export(self._param, zeros)
            else:
                kinds[key] = self._find_kind(key, value)
                saved[key] = self._stack(torch.zeros_like(_as_tensor(value)), kinds[key])
        return kinds, saved

    def check(self, entry: Mapping[str, Any], known: Collection[str]) -> list[str]:
        """Check a saved entry without other ranks.

        Args:
            entry: The entry.
            known: Keys that are not the inner optimizer's.

        Returns:
            Lines about the cuts of its tensors, which must be equal on all ranks.

        Raises:
            CheckpointError: A tensor is missing, has another shape, or is of an unknown kind.
        """
        self.check_shape(entry, PRESENT_KEY, (self._pieces.n_workers,))
        lines = [self._pieces.describe_number(self._param, entry[PRESENT_KEY])]
        kinds = json.loads(entry[KINDS_KEY])
        unknown = sorted(entry.keys() - kinds.keys() - {*known, KINDS_KEY, PRESENT_KEY})
        if unknown:
            raise self._lacks_kinds(f"does not describe {', '.join(unknown)}")
        for key, kind in kinds.items():
            if key not in entry:
                raise CheckpointError(
                    f"{self._name}: the inner state {key!r} was saved, and is not in the state to "
                    "load. Expected all of it. torch.distributed.checkpoint loads only keys that "
                    "the optimizer's present state has: call zero_grad() before "
                    "get_optimizer_state_dict, which then creates them"
                )
            if kind in (_SHARDED, _LOCAL):
                self.check_shape(entry, key, self._pieces.stacked_shape(self._param))
                lines.append(self._pieces.describe_cut(self._param, entry[key]))
            else:
                self.check_shape(entry, key, (self._pieces.n_workers,))
                lines.append(self._pieces.describe_number(self._param, entry[key]))
        return lines

    def check_shape(self, entry: Mapping[str, Any], key: str, expected: tuple[int, ...]) -> None:
        """Check that an entry has a tensor of this shape under a key.

        Raises:
            CheckpointError: It has not.
        """
        found = entry.get(key)
        if not isinstance(found, Tensor) or tuple(found.shape) != tuple(expected):
            shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise CheckpointError(
                f"{self._name}: {key!r} was saved with the shape {shape}, and this optimizer needs "
                f"{tuple(expected)}. Expected the same parameters and number of workers. Load it "
                "into as many workers as have saved it"
            )

    def load(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        """Return this worker's inner state, in new tensors; {} where it had none.

        If ``check`` returned text, all ranks must call this.

        Raises:
            CheckpointError: This worker had some, and the state does not describe it.
        """
        pieces, param = self._pieces, self._param
        loaded: dict[str, Any] = {}
        is_present = bool(pieces.localize_number(param, entry[PRESENT_KEY]))
        for key, kind in json.loads(entry[KINDS_KEY]).items():
            if kind in (_SHARDED, _LOCAL):
                shard = pieces.localize(param, entry[key]).clone()
                loaded[key] = pieces.wrap(param, shard) if kind == _SHARDED else shard
                continue
            number = pieces.localize_number(param, entry[key])
            if kind in _PYTHON:
                loaded[key] = _PYTHON[kind](number.item())
            else:
                device = local_tensor(param).device if kind == _NUMBER_HERE else "cpu"
                loaded[key] = number.to(device, copy=True)
        if is_present and not loaded:
            raise self._lacks_kinds("describes none")
        return loaded if is_present else {}

    def _lacks_kinds(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self._name}: some worker had inner state when this was saved, and the state {what}: "
            "it comes from a worker that had none in the whole param group. Expected state on all "
            "workers, or on none. Save after every group has had a gradient on each worker"
        )


def _as_tensor(value: Any) -> Tensor:
    """Return a number as a tensor that holds it exactly."""
    return torch.as_tensor(
        value, dtype=torch.float64 if isinstance(value, float) else None, device="cpu"
    )
