"""Lion on one worker, and what it shares with its distributed form."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, ParamsT

from distlion.errors import (
    CheckpointError,
    DistlionError,
    InvalidArgumentError,
    SparseGradientError,
)
from distlion.kernels import (
    Coefficients,
    Coin,
    Kernels,
    Segment,
    check_denormals,
    choose_kernels,
)
from distlion.layout import Slot, place_parameters
from distlion.optim.arguments import (
    check_hyperparameters,
    check_params,
    list_group,
    list_params,
    split_names,
)
from distlion.optim.saved_state import fill_absent_keys, restore_exp_avg
from distlion.voting.gradients import describe_sparse, is_sparse
from distlion.voting.segments import make_segment, write_back


class LionBase(Optimizer):
    """Parameters, momenta and hyperparameters of Lion: checked, flattened, saved and loaded.

    Momentum lives in ``state[param]["exp_avg"]``, created in the constructor.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self, params: ParamsT, defaults: dict[str, Any], *, exp_avg_dtype: torch.dtype | None
    ) -> None:
        self._check_group(defaults)
        check_denormals()
        self._exp_avg_dtype = exp_avg_dtype
        super().__init__(list_params(params), defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, checked as in the constructor; what is absent takes the defaults."""
        group = list_group(param_group)
        self._check_group({**self.defaults, **group})
        names, params = split_names(group["params"])
        number = len(self.param_groups)
        others = {"param_names" in known for known in self.param_groups}
        if len(others | {name is not None for name in names}) > 1:
            raise InvalidArgumentError("some parameters have names; give names to all, or to none")
        labels = [
            label_param(name, param, index, number)
            for index, (name, param) in enumerate(zip(names, params, strict=True))
        ]
        check_params(params, labels, known=self._param_names() if number else {})
        super().add_param_group(group)
        for param in self.param_groups[-1]["params"]:
            if param.requires_grad:
                self._create_momentum(param)

    def _create_momentum(self, param: Tensor) -> None:
        self.state[param]["exp_avg"] = self._make_momentum(param)

    def _make_momentum(self, param: Tensor) -> Tensor:
        return torch.zeros(
            self._momentum_shape(param), dtype=self._momentum_dtype(param), device=param.device
        )

    def _momentum_shape(self, param: Tensor) -> torch.Size:
        """Return the shape of the momentum that this process keeps."""
        return param.shape

    def _take_momentum(self, param: Tensor, exp_avg: Tensor) -> Tensor:
        """Return what is kept here of a saved momentum."""
        return exp_avg

    def _check_group(self, group: Mapping[str, Any]) -> None:
        """Check the hyperparameters of a group."""
        check_hyperparameters(group)

    def _momentum_dtype(self, param: Tensor) -> torch.dtype:
        """Choose the asked-for dtype, else the parameter's, or float32 for float16 parameters."""
        if self._exp_avg_dtype is not None:
            return self._exp_avg_dtype
        return torch.float32 if param.dtype == torch.float16 else param.dtype

    def _all_params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _param_names(self) -> dict[Tensor, str]:
        """Name each parameter for errors: as named by the caller, else by place and shape."""
        names: dict[Tensor, str] = {}
        for number, group in enumerate(self.param_groups):
            given = group.get("param_names", [None] * len(group["params"]))
            for index, (param, name) in enumerate(zip(group["params"], given, strict=True)):
                names[param] = label_param(name, param, index, number)
        return names

    def _place_trainable(self) -> tuple[list[Tensor], tuple[Slot, ...]]:
        """Place the parameters that require a gradient, in group order."""
        names = self._param_names()
        params = [param for param in self._all_params() if param.requires_grad]
        return params, place_parameters(
            [names[param] for param in params], [param.numel() for param in params]
        )

    def _coefficients(self) -> dict[Tensor, Coefficients]:
        """Read every parameter's hyperparameters from the groups, where schedulers write."""
        scale = getattr(self, "grad_scale", None)
        grad_scale = 1.0 if scale is None else 1.0 / float(scale)
        coefficients: dict[Tensor, Coefficients] = {}
        for group in self.param_groups:
            self._check_group(group)
            beta1, beta2 = (float(beta) for beta in group["betas"])
            hyper = Coefficients(
                beta1, beta2, float(group["lr"]), float(group["weight_decay"]), grad_scale
            )
            coefficients.update(dict.fromkeys(group["params"], hyper))
        return coefficients

    def _found_inf(self) -> bool:
        """Whether a GradScaler has seen an overflow on this worker."""
        found_inf = getattr(self, "found_inf", None)
        return found_inf is not None and bool(found_inf > 0)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do one step.

        Args:
            closure: Re-evaluates the model and returns the loss; run once, with gradients enabled.

        Returns:
            What ``closure`` returned, or None.

        Raises:
            InvalidArgumentError: A hyperparameter of a group has left its range.
            SparseGradientError: A gradient is sparse.
            StepError, ProcessGroupError: As the class says.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            self._do_step()
        except BaseException:
            # A GradScaler takes these back only from a step that returns.
            self.__dict__.pop("grad_scale", None)
            self.__dict__.pop("found_inf", None)
            raise
        return loss

    def _do_step(self) -> None:
        raise NotImplementedError

    def _make_segments(
        self, params: Sequence[Tensor], slots: Sequence[Slot], step: int | None = None
    ) -> list[Segment]:
        """Put together what the ops need; raise SparseGradientError where a gradient is sparse."""
        coefficients = self._coefficients()
        for param, slot in zip(params, slots, strict=True):
            if is_sparse(param):
                raise SparseGradientError(describe_sparse(slot.name), step=step)
        return [
            make_segment(param, self.state, slot, coefficients[param])
            for param, slot in zip(params, slots, strict=True)
        ]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, also one of another Lion; keys that it lacks keep their present values.

        Raises:
            CheckpointError: Groups, shapes, momenta or hyperparameters do not fit; nothing has been
                changed then.
        """
        self._load_state(self._check_state(state_dict))

    def _check_state(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state that fits, with absent keys filled in."""
        filled = fill_absent_keys(state_dict, self.param_groups, self._momentum_shape)
        for group in filled["param_groups"]:
            try:
                self._check_group(group)
            except DistlionError as error:
                raise CheckpointError(f"a saved group does not fit: {error}") from error
        return filled

    def _load_state(self, filled: dict[str, Any]) -> None:
        super().load_state_dict(filled)
        restore_exp_avg(self, filled, self._make_momentum, self._take_momentum)


def label_param(name: str | None, param: Any, index: int, group: int) -> str:
    """Name a parameter for errors: as named by the caller, else by place and shape."""
    shape = f", shape {tuple(param.shape)}" if isinstance(param, Tensor) else ""
    return name or f"parameter {index} of group {group}{shape}"


def step_alone(
    params: Sequence[Tensor], segments: Sequence[Segment], rounding: Coin | None
) -> None:
    """Move parameters by their own workers' directions alone."""
    for kernels, positions in _by_kernels(segments):
        kernels.step_alone([segments[position] for position in positions], rounding=rounding)
    for param, segment in zip(params, segments, strict=True):
        write_back(param, segment.param)


def check_finite(segments: Sequence[Segment]) -> list[bool]:
    """Tell for each segment whether all that a step would compute is finite."""
    finite = [True] * len(segments)
    for kernels, positions in _by_kernels(segments):
        told = kernels.check_finite([segments[position] for position in positions])
        for position, is_finite in zip(positions, told.tolist(), strict=True):
            finite[position] = is_finite
    return finite


def _by_kernels(segments: Sequence[Segment]) -> list[tuple[Kernels, list[int]]]:
    """Sort segments by device, so that each device's are one call."""
    by_device: dict[torch.device, list[int]] = {}
    for position, segment in enumerate(segments):
        by_device.setdefault(segment.param.device, []).append(position)
    return [(choose_kernels(device), positions) for device, positions in by_device.items()]


class Lion(LionBase):
    """Train with Lion on one worker.

    Equation:
        c = beta1 * m + (1 - beta1) * g
        x = x - lr * (sign(c) + weight_decay * x)
        m = beta2 * m + (1 - beta2) * g        (Lion, arXiv:2302.06675, Algorithm 2)
        x parameter, g gradient, m ``exp_avg``; sign(0) = 0

    Args:
        params: Parameters, (name, parameter) pairs, or groups, as for every torch optimizer;
            float32, bfloat16 or float16. Those that do not require a gradient are skipped.
        lr: Learning rate, 0 or more; usually 3 to 10 times below AdamW's.
        betas: (beta1, beta2), each in [0, 1). beta1 == beta2 is Signum, (0, 0) is signSGD.
        weight_decay: Decoupled weight decay, 0 or more; usually 3 to 10 times above AdamW's.

    Raises:
        InvalidArgumentError: A value is out of range, or a parameter is given twice.
        UnsupportedTypeError: A parameter or argument is of a kind without support.

    Notes:
        Arithmetic is in float32, with one rounding to the parameter's dtype; ``exp_avg`` has that
        dtype too (float32 for float16 parameters). A GradScaler is honoured: gradients are unscaled
        inside, and a step with an overflow is skipped. There is no other check for NaN, as in
        torch's optimizers.

    Example:
        >>> optimizer = distlion.Lion(model.parameters(), lr=1e-4, weight_decay=0.1)
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay}
        super().__init__(params, defaults, exp_avg_dtype=None)

    def _do_step(self) -> None:
        if self._found_inf():
            return
        params, slots = self._place_trainable()
        for param in params:
            if "exp_avg" not in self.state[param]:  # it was frozen until now
                self._create_momentum(param)
        step_alone(params, self._make_segments(params, slots), rounding=None)
