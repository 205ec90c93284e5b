"""A player that computes by the numpy oracle: the model of virtual workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import matrix
import oracle
from distlion.errors import NonFiniteError
from fuzz.players import Grads, Player
from fuzz.program import Setup


class UnknownError(Exception):
    """The equations have no word for this."""


class Equations(Player):
    """All workers, by the equations.

    A plain SGD stands for the optimizer: it holds the groups, which schedulers write to, and is
    never stepped.
    """

    def __init__(self, setup: Setup, folder: Path) -> None:
        super().__init__(setup, folder, self._make_groups, workers=list(range(setup.workers)))
        options = self.setup.options
        self._oracle = oracle.OracleCluster(
            [],
            setup.workers,
            seed=options.get("seed", 0),
            stochastic=options.get("rounding") == "stochastic",
            exp_avg_dtype=options.get("exp_avg_dtype"),
            nonfinite="abstain",
        )
        self._places: dict[int, int] = {}
        for group in self.optimizer.param_groups:
            self._place(group)

    def _make_groups(self, groups: Any, **options: Any) -> Any:
        taken = {key: options[key] for key in ("lr", "weight_decay") if key in options}
        optimizer = torch.optim.SGD(groups, **taken)
        for group in optimizer.param_groups:
            group.update(betas=options.get("betas", (0.9, 0.95)), step=0)
        return optimizer

    def _place(self, group: dict[str, Any]) -> None:
        """Give the oracle those parameters of a group that are trained."""
        numbers = {id(param): index for index, param in enumerate(self.model.params)}
        trained = [param for param in group["params"] if param.requires_grad]
        for param in trained:
            self._places[numbers[id(param)]] = len(self._places)
        values = [param.detach().float().numpy().copy() for param in trained]
        rule = matrix.describe_for_oracle(group["aggregation"])
        dtype = str(group["params"][0].dtype).removeprefix("torch.")
        self._oracle.add_group(oracle.Group(values, rule, 0.0, dtype=dtype))

    def step(
        self, passes: Callable[[int], list[Grads]], edit: Callable[[int], None] | None
    ) -> None:
        if self.model.params[0].dtype != getattr(torch, self.setup.find_dtype(0)):
            raise UnknownError("another precision")
        for _ in range(len(self._oracle.groups), len(self.optimizer.param_groups)):
            added = self.optimizer.param_groups[len(self._oracle.groups)]
            added.update(betas=self.setup.options["betas"], step=self._oracle.step_number)
            self._place(added)
        for group, own in zip(self.optimizer.param_groups, self._oracle.groups, strict=True):
            own.lr, own.betas = float(group["lr"]), group["betas"]
            own.weight_decay = group["weight_decay"]
            own.rule = matrix.describe_for_oracle(group["aggregation"])
        grads = [self._list_grads(passes(worker), edit, worker) for worker in self.workers]
        given = [grad for row in grads for grad in row if grad is not None]
        if self.setup.nonfinite != "abstain" and not all(np.isfinite(each).all() for each in given):
            if self.setup.nonfinite == "raise":
                raise NonFiniteError("a gradient is not finite")
            return
        self._oracle.step(grads)
        for group in self.optimizer.param_groups:
            group["step"] = self._oracle.step_number
        for index, place in self._places.items():
            param = self.model.params[index]
            param.data = torch.from_numpy(self._oracle.params[place].copy()).to(param.dtype)

    def _list_grads(
        self, passes: list[Grads], edit: Callable[[int], None] | None, worker: int
    ) -> list[oracle.F32 | None]:
        self.optimizer.zero_grad()
        for grads in passes:
            self.backward(grads)
        if edit is not None:
            edit(worker)
        found = [self.model.params[index].grad for index in self._places]
        return [None if grad is None else grad.float().numpy().copy() for grad in found]

    def kept(self, param: Tensor, worker: int) -> dict[str, Tensor]:
        (index,) = (i for i, each in enumerate(self.model.params) if each is param)
        if index not in self._places:
            return {}
        kind = self.setup.options.get("exp_avg_dtype") or self.setup.find_dtype(index)
        dtype = getattr(torch, kind)
        exp_avg = self._oracle.exp_avgs[worker][self._places[index]]
        return {"exp_avg": torch.from_numpy(exp_avg.copy()).to(dtype)}
