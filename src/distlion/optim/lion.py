"""Lion on one worker."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from distlion.errors import CheckpointError, InvalidArgumentError
from distlion.optim.base import LionBase
from distlion.optim.saved_state import (
    check_cuts,
    forget_worker,
    reading_state,
    restoring,
)
from distlion.optim.state_hooks import run_hooks_of_loading
from distlion.signals import deferred_signals
from distlion.step.alone import gather_alone, move_alone
from distlion.step.param import Records
from distlion.step.shard_pieces import OwnShards


class Lion(LionBase):
    """Train with Lion on one worker.

    Equation:
        c = beta1 * m + (1 - beta1) * g;  if cautious, 0 where c * g <= 0
        x = x - lr * (sign(c) + weight_decay * x)
        m = beta2 * m + (1 - beta2) * g        (Lion, arXiv:2302.06675, Algorithm 2)
        x parameter, g gradient, m ``exp_avg``; sign(0) = 0

    Args:
        params: Parameters, (name, parameter) pairs, or groups, as for every torch optimizer;
            float32, bfloat16 or float16, plain tensors or FSDP2's DTensors. Frozen ones are
            skipped. One that is frozen later moves while it has a gradient, as under torch's
            optimizers: clear it when you freeze. Groups of plain tensors may have
            ``orthogonalize=True``, see ``group_params``.
        lr: Learning rate, 0 or more; start at half of AdamW's.
        betas: (beta1, beta2), each in [0, 1). beta1 == beta2 is Signum, (0, 0) is signSGD. Lion's
            paper has (0.9, 0.99), which is worse in short runs and usually takes a lower ``lr``.
        weight_decay: Decoupled weight decay, 0 or more; start at twice AdamW's.
        cautious: Leave an element where it is if its direction and its gradient have different
            signs (Cautious Optimizers, arXiv:2411.16085); weight decay still applies.

    Raises:
        InvalidArgumentError: A value is out of range, or a parameter is given twice.
        UnsupportedTypeError: A parameter or argument is of a kind without support; in a step, a
            DTensor's gradient has other placements than the DTensor.

    Notes:
        Arithmetic is in float32, with one rounding to the parameter's dtype; ``exp_avg`` has that
        dtype too (float32 for float16 parameters). A GradScaler is honored: gradients are unscaled
        inside, and a step with an overflow is skipped. There is no other check for NaN, as in
        torch's optimizers: a NaN stays in ``exp_avg``, and its element moves no more, nor does an
        orthogonalized matrix that it is in. Skip steps with such gradients, or set ``exp_avg`` to
        0. ``LocalSteps`` does so by itself.

    Example:
        >>> optimizer = distlion.Lion(model.parameters(), lr=1e-4, weight_decay=0.1)
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        *,
        cautious: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "weight_decay": weight_decay,
            "cautious": cautious,
            "orthogonalize": False,
        }
        super().__init__(params, defaults, pieces=OwnShards())

    def _begin_life(self, *args: Any, **options: Any) -> None:
        super()._begin_life(*args, **options)
        self._seen: list[object] = []
        self._moving = Records()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copied or pickled optimizer from what torch keeps of it."""
        super().__setstate__(state)
        self._begin_life(pieces=OwnShards())

    def state_dict(self) -> dict[str, Any]:
        """Return the state. Momenta of DTensors are DTensors with the same placements.

        Raises:
            CheckpointError: Parameters were removed from the groups, and their momenta remain.
        """
        held = set(map(id, self._all_params()))
        if not all(id(param) in held for param in self.state):
            raise CheckpointError(
                "parameters were taken from the param groups, and their momenta are left in the "
                "state. Delete these from optimizer.state, or make a new optimizer. If a framework "
                "sharded the model after the optimizer was made, shard it first"
            )
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, also from another Lion; keys that it lacks keep their present values.

        For DTensor parameters, momenta are DTensors with the same mesh and placements, plain
        tensors of the whole parameter, or plain tensors that are this rank's shards.

        Raises:
            CheckpointError: Groups, shapes, placements, momenta or hyperparameters do not fit;
                nothing changed.
        """
        state_dict = run_hooks_of_loading(self, state_dict)
        with reading_state():
            copied = forget_worker(state_dict)
            check_cuts(self._describe_cuts(copied))
            filled = self._check_state(self._localize(copied))
        with restoring(self):
            self._load_state(filled)

    @deferred_signals("a step")
    def _do_step(self) -> None:
        numbers = self._reader.read(self)
        if numbers.found_inf:
            return
        params = self._list_moving()
        try:
            segments = gather_alone(params, numbers.coefficients)
        except InvalidArgumentError:  # a momentum may have been taken out of the state
            self._seen = []
            params = self._list_moving()
            segments = gather_alone(params, numbers.coefficients)
        move_alone(params, segments, rounding=None)

    def _list_moving(self) -> Records:
        """List the parameters that move in this step, anew only where one of them has changed."""
        held = self._all_params()
        # A frozen parameter may have lost its storage; it moves only where it has a gradient.
        seen: list[object] = [param.requires_grad or param.grad is not None for param in held]
        seen += map(id, held)  # the optimizer keeps those of the last step alive
        seen += map(type, held)  # torch can make another kind of tensor of a parameter in place
        for group in self.param_groups:
            seen += len(group["params"]), group.get("orthogonalize")
        seen += id(self.state), len(self.state)
        if seen != self._seen:
            self._moving = Records(
                each
                for each in self._list_trainable()
                if each.param.requires_grad or each.param.grad is not None
            )
            for param in self._moving:
                if "exp_avg" not in self.state[param.param]:  # it was frozen until now
                    self._create_momentum(param.param)
            self._seen = [*seen[:-1], len(self.state)]
        return self._moving
