"""Base classes of all forms of Lion: parameters and momenta, checked, placed, saved, loaded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex

import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim.optimizer import Optimizer, ParamsT

from distlion.errors import (
    CheckpointError,
    ConcurrentCallError,
    InvalidArgumentError,
    UnsupportedTypeError,
)
from distlion.kernels.dispatch import check_denormals
from distlion.layout import place_parameters
from distlion.optim.arguments import (
    check_matrices,
    check_params,
    check_rule,
    check_whole,
    label_params,
    list_group,
    list_params,
    resolve_names,
)
from distlion.optim.saved_groups import WORKER_KEY
from distlion.optim.saved_state import (
    describe_cuts,
    export_first,
    fill_absent_keys,
    find_rule,
    map_momenta,
    parse_groups,
    reading_state,
    restore_kept,
)
from distlion.optim.state_hooks import after_hooks_of_loading, run_hooks_or_refuse
from distlion.peers.fingerprint import FixedGroups
from distlion.peers.ownership import MomentumOwnership
from distlion.step.agreement import AGREEMENT_KEY
from distlion.step.hyperparameters import GroupReader, check_hyperparameters, check_step, read_step
from distlion.step.nodes import NodePieces
from distlion.step.param import Make, VotingParam, is_dtensor
from distlion.step.precision import Precision, warn_of_lost_updates
from distlion.step.settings import Settings
from distlion.step.shard_pieces import OwnShards, ShardPieces
from distlion.step.stage import Stage
from distlion.votes.aggregation import Aggregation
from distlion.votes.majority import MajorityVote

if TYPE_CHECKING:
    from typing_extensions import Self


class LionBase(Optimizer):
    """Parameters, momenta and hyperparameters of Lion: checked, flattened, saved and loaded.

    Momentum lives in ``state[param]["exp_avg"]``. A rule's own state lives beside it, under other
    names. The constructor creates both.
    """

    _step_supports_amp_scaling = True
    keeps_momenta = True
    """True if parameters have momenta. Votes on deltas have betas of 0 and need none."""

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        *,
        precision: Precision = Precision(),
        pieces: NodePieces | OwnShards | None = None,
    ) -> None:
        self._check_group(defaults)
        self._begin_life(precision, pieces)
        super().__init__(list_params(params), defaults)
        warn_of_lost_updates(self.param_groups, precision)

    def _begin_life(
        self,
        precision: Precision = Precision(),
        pieces: NodePieces | OwnShards | None = None,
    ) -> None:
        """Set up the attributes that no state holds."""
        self._precision = precision
        self._pieces: NodePieces | OwnShards = pieces or NodePieces(1, 0)
        self._makes: dict[Tensor, Make] = {}
        # torch unpickles into an optimizer to load a state, which a closure may do in a step.
        self._step_lock: threading.Lock = self.__dict__.get("_step_lock") or threading.Lock()
        self._reader = GroupReader()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, checked as in the constructor; absent settings take the defaults."""
        group = list_group(param_group)
        self._check_group({**self.defaults, **group})
        labels, params = resolve_names(group, len(self.param_groups), has_names=self._has_names)
        check_params(params, labels, known=self._param_names())
        names = dict(zip(params, labels, strict=True))
        self._check_tensors({**self.defaults, **group, "params": params}, names)
        check_denormals({param.device for param in params})
        super().add_param_group(group)
        for param in self.param_groups[-1]["params"]:
            self._makes[param] = Make.of(param)
            if param.requires_grad:
                self._create_momentum(param)

    def _remove_last_group(
        self, makes: Mapping[Tensor, Make], entries: Mapping[Tensor, dict[str, Any]]
    ) -> None:
        """Undo the last ``add_param_group``, which other workers refused.

        Args:
            makes: The makes of all parameters that were known before.
            entries: Copies of their entries in the state.
        """
        params = self.param_groups.pop()["params"]
        self._makes = dict(makes)
        self._pieces.forget([param for param in params if param not in makes])
        for param in params:
            self.state.pop(param, None)
            if param in entries:
                self.state[param] = entries[param]

    def _create_momentum(self, param: Tensor) -> None:
        """Give a parameter a momentum of 0, unless it has one that fits, as when added again."""
        self._pieces.cut(param)
        kept = self.state[param]
        if self.keeps_momenta and not self.momentum_make(param).fits(kept.get("exp_avg")):
            kept["exp_avg"] = self._make_kept(param, "exp_avg")

    def _make_kept(self, param: Tensor, key: str) -> Tensor:
        self._pieces.cut(param)
        make = self.momentum_make(param)
        dtype = make.dtype if key == "exp_avg" else torch.float32
        # Written now: the first step would pay for each page of zeros that nobody has touched.
        return torch.empty(make.shape, dtype=dtype, device=make.device).zero_()

    def momentum_make(self, param: Tensor) -> Make:
        """Return shape, dtype and device of this process's part of a parameter's momentum."""
        return Make.of(param).of_momentum(self._momentum_shape(param), self._precision.exp_avg)

    def _momentum_shape(self, param: Tensor) -> torch.Size:
        """Return the shape of this process's part of the momentum."""
        return self._pieces.momentum_shape(param)

    def _take_momentum(self, param: Tensor, exp_avg: Tensor) -> Tensor:
        """Return this process's part of a saved momentum."""
        return self._pieces.take_momentum(param, exp_avg)

    def _check_group(self, group: Mapping[str, Any]) -> None:
        """Check the hyperparameters of a group."""
        check_hyperparameters(group)

    def _check_tensors(self, group: Mapping[str, Any], names: Mapping[Tensor, str]) -> None:
        if not self._pieces.holds_shards:
            check_whole(group["params"], names)
        check_matrices(group, names, takes_shards=self._pieces.makes_whole)

    def _all_params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    @property
    def _has_names(self) -> bool:
        return any("param_names" in group for group in self.param_groups)

    def _param_names(self) -> dict[Tensor, str]:
        """Name each parameter for errors: by the caller's name, else by place and shape."""
        return label_params(self.param_groups)

    def _list_trainable(self) -> list[VotingParam]:
        """Place trained parameters in group order; one frozen since keeps its place and coins."""
        names = self._param_names()
        for group in self.param_groups:
            self._check_tensors(group, names)
        found = [
            (param, number, self._makes.setdefault(param, Make.of(param)))
            for number, group in enumerate(self.param_groups)
            for param in group["params"]
            if param.requires_grad or "exp_avg" in self.state.get(param, {})
        ]
        for param, number, _ in found:
            for key in find_rule(self.param_groups[number]).worker_state:
                if key not in self.state[param]:
                    self.state[param][key] = self._make_kept(param, key)
        slots = place_parameters(
            [names[param] for param, *_ in found], [make.shape.numel() for *_, make in found]
        )
        return [
            VotingParam(
                param,
                position,
                number,
                self._pieces.place(slots[position], param),
                find_rule(self.param_groups[number]),
                self.state,
                self._pieces.of(param),
                make,
                make.of_momentum(self._momentum_shape(param), self._precision.exp_avg),
                self._pieces.part,
                is_sharded=is_dtensor(param),
                copies=self._pieces.find_copies(param),
                orthogonalizes=self.param_groups[number].get("orthogonalize", False),
                keeps_momentum=self.keeps_momenta,
            )
            for position, (param, number, make) in enumerate(found)
        ]

    # The same as torch.compiler.disable, without its two seconds of import.
    @_disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do one step; ``torch.compile`` leaves it uncompiled.

        Args:
            closure: Re-evaluates the model and returns the loss; run once, with gradients enabled.

        Returns:
            The result of ``closure``, or None.

        Raises:
            InvalidArgumentError: A hyperparameter of a group has left its range.
            SparseGradientError: A gradient is sparse.
            StepError, ProcessGroupError: As for the class.
            ConcurrentCallError: A step is under way, on another thread or in the closure's caller.
        """
        if not self._step_lock.acquire(blocking=False):
            raise ConcurrentCallError(
                "step() of this optimizer is under way, on another thread or as the caller of the "
                "closure; make one call at a time"
            )
        loss = None
        try:
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self._do_step()
        except BaseException:
            # A GradScaler removes these only after a step that returns.
            self.__dict__.pop("grad_scale", None)
            self.__dict__.pop("found_inf", None)
            raise
        finally:
            self._step_lock.release()
        return loss

    # torch wraps ``step`` of each class that was instantiated with its hooks: a subclass that has a
    # step of its own calls this one, or its hooks would run twice.
    _run_step = step

    def _do_step(self) -> None:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return the state in its saved form, which hooks of saving see too."""
        export_first(self, self._pieces.export)
        return super().state_dict()

    def _describe_cuts(self, filled: Mapping[str, Any]) -> list[str]:
        """Describe the momenta that ``_localize`` asks other ranks for; equal on all ranks."""
        return describe_cuts(filled, self.param_groups, self._pieces.describe_cut)

    def _localize(self, filled: Mapping[str, Any]) -> dict[str, Any]:
        """Cut saved momenta of many ranks down to this rank's part."""
        return map_momenta(filled, self.param_groups, self._pieces.localize)

    def _check_state(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Return a state that fits, with absent keys filled in."""
        filled = fill_absent_keys(state_dict, self)
        names = self._param_names()
        for group, saved in zip(self.param_groups, filled["param_groups"], strict=True):
            try:
                self._check_tensors({**saved, "params": group["params"]}, names)
            except (InvalidArgumentError, UnsupportedTypeError) as error:
                raise CheckpointError(f"the saved state does not fit: {error}") from error
        return filled

    def _load_state(self, filled: dict[str, Any]) -> None:
        with after_hooks_of_loading(self):
            super().load_state_dict(filled)
        restore_kept(self, filled)


class VotingBase(LionBase):
    """A Lion whose param groups carry a rule and the number of the next step.

    Args:
        params: As for every torch optimizer.
        lr, betas, weight_decay, cautious: Lion's hyperparameters.
        aggregation: The rule; None for ``MajorityVote()``.
        pieces: This process's part of each parameter's momentum.
        worker: Name of the worker that owns these momenta, from ``name_worker``.
    """

    _pieces: NodePieces | ShardPieces
    _settings: Settings
    _known_step = 0
    _own_stages: tuple[Stage, ...] = ()
    """Stages that no setting asks for: the outer step of local steps."""
    _has_told_of_state = False
    """Whether ``state_dict()`` has warned that it holds one worker's state, or need not."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        betas: tuple[float, float],
        *,
        weight_decay: float,
        cautious: bool,
        aggregation: Aggregation | None,
        pieces: NodePieces | ShardPieces | None = None,
        worker: str | None = None,
    ) -> None:
        defaults: dict[str, Any] = {
            "lr": lr,
            "betas": betas,
            "weight_decay": weight_decay,
            "cautious": cautious,
            "orthogonalize": False,
            "aggregation": MajorityVote() if aggregation is None else aggregation,
            # In the groups, where every checkpoint format keeps it.
            "step": 0,
        }
        if worker is not None:
            defaults[WORKER_KEY] = worker
        self._fixed = FixedGroups()
        precision = self._settings.precision
        super().__init__(params, defaults, precision=precision, pieces=pieces)
        precision.check_suits({param.dtype for param in self._all_params()})

    @property
    def committed_step(self) -> int:
        """Number of steps committed so far; also the number, counted from 0, of the next one.

        Raises:
            InvalidArgumentError: ``step`` of the param groups, which holds it, was overwritten.
        """
        return read_step(self.param_groups)

    def _find_step(self) -> int:
        """Return the number of the next step, or the last known one if the groups lack it."""
        with suppress(InvalidArgumentError):
            self._known_step = self.committed_step
        return self._known_step

    @property
    def known_step(self) -> int:
        """Number of the next step, or the last known one if ``step`` of a group was overwritten."""
        return self._find_step()

    @property
    def shard_pieces(self) -> ShardPieces | None:
        """The form of sharded tensors in states; None where parameters are whole."""
        return self._pieces if isinstance(self._pieces, ShardPieces) else None

    @property
    def settings(self) -> Settings:
        """Settings for all steps, chosen at construction: overlap, clipping, policies, timeouts."""
        return self._settings

    @property
    def weight(self) -> int:
        """Number of times that this worker's vote counts, as agreed at construction."""
        return self._settings.weight

    @property
    def momentum_ownership(self) -> MomentumOwnership:
        """The momenta that this process keeps, for checkpoints."""
        raise NotImplementedError

    @classmethod
    def with_stages(cls, stages: Sequence[Stage], *args: Any, **options: Any) -> Self:
        """Make an optimizer with stages of its own; other arguments as for the class."""
        optimizer = cls.__new__(cls)
        optimizer._own_stages = tuple(stages)
        optimizer.keeps_momenta = all(stage.keeps_momenta for stage in stages)
        optimizer.__init__(*args, **options)  # type: ignore[misc]
        return optimizer

    def _advance(self) -> None:
        self._known_step += 1  # inputs of a step have read it
        for group in self.param_groups:
            group["step"] = self._known_step

    def _check_group(self, group: Mapping[str, Any]) -> None:
        super()._check_group(group)
        check_rule(
            group["aggregation"],
            takes_scales=any(stage.takes_scales for stage in self._own_stages),
            orthogonalizes=group.get("orthogonalize", False),
        )
        self._settings.check_rule(group["aggregation"])
        check_step(group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, checked as in the constructor; they join at the next step."""
        group = list_group(param_group)
        if self.param_groups:
            group["step"] = self.committed_step
        super().add_param_group(group)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse copies, by ``copy`` and ``pickle`` alike: one worker cannot vote twice.

        Raises:
            UnsupportedTypeError: Always.
        """
        raise UnsupportedTypeError(
            f"{type(self).__name__} cannot be copied or pickled: its connections, hooks and votes "
            "belong to this process. Save state_dict(), or every worker's momentum by "
            "distlion.save_checkpoint, and load it into a new optimizer"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state: tensors, numbers and strings only; rules as their ``repr``.

        Raises:
            CheckpointError: Param groups or the state differ from what steps use.
        """
        try:
            self._fixed.check(self.param_groups)
            self._fixed.check_state(self.state)
            read_step(self.param_groups)
        except InvalidArgumentError as error:
            raise CheckpointError(f"steps do not use this state: {error}") from error
        return super().state_dict()

    def _check_tensors(self, group: Mapping[str, Any], names: Mapping[Tensor, str]) -> None:
        super()._check_tensors(group, names)
        self._settings.check_leaves(group["params"], names)
        self._settings.precision.check_rounds({param.dtype for param in group["params"]})

    @reading_state()
    def _parse_state(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Return a checked state with rules rebuilt and absent keys filled in; purely local."""
        state_dict = run_hooks_or_refuse(self, state_dict)
        parsed = parse_groups(
            state_dict, step=self.committed_step, worker=self.defaults.get(WORKER_KEY)
        )
        parsed["param_groups"][0].setdefault(AGREEMENT_KEY, [])
        sketched = map_momenta(parsed, self.param_groups, self._pieces.sketch)
        return {**self._check_state(sketched), "state": parsed["state"]}


def read_state(optimizer: VotingBase) -> dict[str, Any]:
    """Return ``state_dict()`` to a caller that saves or restores every worker's: without a warning.

    Raises:
        CheckpointError: As ``state_dict()``.
    """
    has_told, optimizer._has_told_of_state = optimizer._has_told_of_state, True
    try:
        return optimizer.state_dict()
    finally:
        optimizer._has_told_of_state = has_told


def expect_all_saved(optimizer: VotingBase) -> None:
    """Note that a trainer saves every worker's state, so that ``state_dict()`` does not warn."""
    optimizer._has_told_of_state = True
