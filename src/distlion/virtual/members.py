"""The state of virtual workers when some of them leave and others join."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from distlion.options import Newcomers, begin_momentum


def reseat(
    state: Mapping[Tensor, dict[str, Tensor]],
    before: Sequence[int],
    after: Sequence[int],
    newcomers: Newcomers,
) -> None:
    """Move the state of each remaining worker to its new place, and give newcomers a momentum.

    Args:
        state: The optimizer's state: by parameter, tensors of shape (workers, *param.shape).
        before: Ids of the workers so far, by place.
        after: Ids of the workers from now on, by place.
        newcomers: The momentum that they begin with; a rule's state begins with zeros.
    """
    stay = [worker for worker in after if worker in before]
    for kept in state.values():
        for key, rows in kept.items():
            seated = rows.new_zeros(len(after), *rows.shape[1:])
            if key == "exp_avg" and stay:
                seated[:] = begin_momentum((rows[before.index(each)] for each in stay), newcomers)
            for worker in stay:
                seated[after.index(worker)] = rows[before.index(worker)]
            kept[key] = seated
