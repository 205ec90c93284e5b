"""Lightning Fabric with workers that vote: no wrapper around the model, every momentum saved.

Tested with lightning 2.6; another major version is refused. For the Trainer there is
``distlion.integrations.lightning``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

from torch import nn
from torch.optim import Optimizer

from distlion.checkpoint import Check, WorldChange, load_together
from distlion.errors import CheckpointError
from distlion.integrations.companion import KEY, check_names, find_votes, saving_votes
from distlion.integrations.frameworks import (
    Voter,
    broadcast_rest,
    check_version,
    check_votes,
    hold_back,
    save_for_all,
    share_parameters,
    vote_on_deltas,
)
from distlion.local.local_steps import LocalSteps
from distlion.optim.distributed_lion import DistributedLion

check_version("lightning", major=2, extra="lightning")
from lightning.fabric.strategies import DDPStrategy  # noqa: E402, once its version is known

# The optimizers are included, so that a script needs one import line for its changes.
__all__ = ["DistributedLion", "LocalSteps", "VotingStrategy"]


class VotingStrategy(DDPStrategy):  # type: ignore[misc]
    """A strategy for workers that keep their gradients and momentum, and vote.

    Args:
        on_world_change: Momenta with which workers begin if a run is resumed on another number of
            them, as in ``distlion.load_checkpoint``. "raise" refuses.
        kwargs: Arguments of ``DDPStrategy``.

    Raises:
        MissingDependencyError: lightning has another major version.
        UnsupportedTypeError: An optimizer does not vote.
        CheckpointError: As in ``distlion.save_checkpoint`` and ``load_checkpoint``; on every rank.

    Notes:
        The module is not wrapped in DistributedDataParallel. ``no_backward_sync`` holds back votes
        under overlap; ``clip_gradients`` clips each worker by its own norm. The workers' momenta of
        a checkpoint ``NAME`` are in the folder ``NAME.distlion`` beside it; an optimizer does not
        load without them. Workers of ``LocalSteps`` vote before they are saved. Call the
        optimizer's ``vote()`` before an evaluation.

    Example:
        >>> fabric = lightning.Fabric(strategy=VotingStrategy(), devices=2)
        >>> optimizer = DistributedLion(model.parameters(), lr=1e-4)
        >>> model, optimizer = fabric.setup(model, optimizer)
    """

    def __init__(self, *, on_world_change: WorldChange = "raise", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._on_world_change = on_world_change
        self._voters: list[Voter] = []
        # Fabric reads this attribute; the one of its DDPStrategy needs a wrapped module.
        self._backward_sync_control = _HoldVotes(self._voters)

    def __deepcopy__(self, memo: dict[int, Any]) -> VotingStrategy:
        """Return the strategy itself: copies of a module, as for averages, refer to it too."""
        return self

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Leave a module unwrapped, but copy buffers and frozen parameters from rank 0."""
        broadcast_rest(module)
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Return an optimizer, which must vote, with its momenta on its parameters' devices."""
        voter = save_for_all(check_votes(optimizer, type(self).__name__))
        if isinstance(voter, DistributedLion):
            voter.load_state_dict(voter.state_dict())
        # In place: _HoldVotes has this list, too.
        self._voters[:] = [each for each in self._voters if not share_parameters(each, voter)]
        self._voters.append(voter)
        return optimizer

    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Save the momenta of all workers, then Fabric's file, which names them.

        Workers with local steps vote first, even if only the module is saved: Fabric saves one
        model for all.
        """
        modules, voters = _sort(state)
        if any(True for _ in modules.children()):
            vote_on_deltas(each for each in self._voters if each not in voters.values())
        votes: AbstractContextManager[None] = nullcontext()
        if voters:
            vote_on_deltas(voters.values())
            state = dict(state)
            votes = saving_votes(state, path, modules, voters, barrier=self.barrier)
        with votes:
            super().save_checkpoint(path, state, *args, **kwargs)

    def load_checkpoint(
        self, path: Any, state: Any = None, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Load Fabric's file and the momenta of all workers: all of it, or nothing.

        The file holds rank 0's momenta, which are not loaded.

        Raises:
            CheckpointError: A process cannot load; raised on every rank, with nothing changed.
        """
        if isinstance(state, Optimizer):
            raise CheckpointError(
                f"{path}: the momenta of all workers are loaded after the model; give both, as in "
                '{"model": model, "optimizer": optimizer}'
            )
        modules, voters = _sort(state if isinstance(state, dict) else {})
        load = super().load_checkpoint
        if not voters:
            rest: dict[str, Any] = load(path, state, *args, **kwargs)
            return rest
        others = {name: each for name, each in state.items() if name not in voters}

        def load_rest(check: Check) -> dict[str, Any]:
            # Fabric loads in this order, so our entry is first.
            ordered = {KEY: _CheckFirst(path, voters, check), **others}
            try:
                loaded: dict[str, Any] = load(path, ordered, *args, **kwargs)
            except KeyError as error:
                raise CheckpointError(
                    f"{path} does not hold all that is to be loaded: {error}. A VotingStrategy "
                    f"saves {KEY!r}, which says where the momenta of all workers are"
                ) from error
            others.update({name: ordered[name] for name in others})
            return loaded

        rest = load_together(
            modules,
            list(voters.values()),
            load_rest,
            *others.values(),
            on_world_change=self._on_world_change,
        )
        state.update(others)
        return {name: each for name, each in rest.items() if name not in voters}


class _CheckFirst:
    """An entry that Fabric loads: it gets the names of the folders, and checks them."""

    def __init__(self, path: Any, voters: dict[str, Voter], check: Check) -> None:
        self._path, self._voters, self._check = path, voters, check

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: there is no state to save."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Check the folders of all optimizers, with all processes."""
        folders = find_votes({KEY: state_dict}, self._path)
        check_names(folders, self._voters)
        self._check([folders[name] for name in self._voters])


class _HoldVotes:
    """Fabric's control for the accumulation of gradients."""

    def __init__(self, voters: list[Voter]) -> None:
        self._voters = voters

    @contextmanager
    def no_backward_sync(self, module: nn.Module, enabled: bool) -> Iterator[None]:
        """Hold back votes of all optimizers if ``enabled``."""
        with ExitStack() as stack:
            for voter in self._voters if enabled else ():
                stack.enter_context(hold_back(voter))
            yield


def _sort(state: dict[str, Any]) -> tuple[nn.Module, dict[str, Voter]]:
    """Return the modules and the optimizers of a state to save or load."""
    modules = [each for each in state.values() if isinstance(each, nn.Module)]
    optimizers = {name: each for name, each in state.items() if isinstance(each, Optimizer)}
    voters = {name: check_votes(each, "Fabric") for name, each in optimizers.items()}
    return nn.ModuleList(modules), voters
