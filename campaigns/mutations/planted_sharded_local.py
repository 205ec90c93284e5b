"""Bugs of the state of local steps whose parameters are sharded."""

from __future__ import annotations

from planted import Mutation

SAVES = ("distributed/test_sharded_local_saves.py",)
LION = ("distributed/test_sharded_lion.py",)
REFUSED = ("distributed/test_sharded_local_refused.py",)

SHARDED_LOCAL = (
    Mutation(
        "one worker's inner state of sharded parameters is saved for all",
        "local/inner_shards.py",
        "        if kind in (_SHARDED, _LOCAL):\n            return self._pieces.export",
        "        if kind == _SHARDED:\n            return value\n        if kind == _LOCAL:\n"
        "            return self._pieces.export",
        SAVES,
    ),
    Mutation(
        "workers begin with the parameters of the model's own file",
        "local/sharded_state.py",
        "            local_tensor(param).copy_(taken[_OWN][param])\n",
        "",
        SAVES,
    ),
    Mutation(
        "a load into a saved state's tensors changes the model",
        "local/sharded_state.py",
        "local_tensor(param).detach().clone()),\n            **",
        "local_tensor(param).detach()),\n            **",
        SAVES,
    ),
    Mutation(
        "a worker without inner state gets zeros for one",
        "local/inner_shards.py",
        "return loaded if is_present else {}",
        "return loaded",
        SAVES,
    ),
    Mutation(
        "writes to sharded parameters between two periods are not seen",
        "local/period.py",
        "in check.list_written()]",
        "in check.list_written() if not hasattr(each, 'to_local')]",
        REFUSED,
    ),
    Mutation(
        "writes to a DTensor are looked for at its shard alone",
        "local/write_check.py",
        "                param._version,\n",
        "",
        REFUSED,
    ),
    Mutation(
        "a step by which torch creates state is a local step",
        "local/inner_state.py",
        "    return frame is not None",
        "    return False",
        REFUSED,
    ),
    Mutation(
        "a state that has lost its key is an inner optimizer's",
        "local/state.py",
        "    if own is None and marks:",
        "    if own is None and not marks and False:",
        ("distributed/test_local_steps_refused.py",),
    ),
    Mutation(
        "every rank takes the first shard of a whole momentum",
        "step/shard_pieces.py",
        "min(offset[dim], whole.shape[dim] - size)",
        "0",
        LION,
    ),
    Mutation(
        "Lion saves one rank's momenta for those of all",
        "step/shard_pieces.py",
        "self.wrap(param, exp_avg) if is_dtensor(param) else exp_avg",
        "exp_avg",
        LION,
    ),
    Mutation(
        "Lion gives a state its saved form once more with each save",
        "optim/saved_state.py",
        "    if not ours:\n",
        "    if True:\n",
        LION,
    ),
    Mutation(
        "a hook of saving that is prepended sees momenta before their saved form",
        "optim/saved_state.py",
        "        hooks.move_to_end(ours[0], last=False)\n",
        "        pass\n",
        ("optim/test_saved_state.py",),
    ),
    Mutation(
        "hooks before loading run after the state was checked",
        "optim/base.py",
        "        state_dict = run_hooks_or_refuse(self, state_dict)\n",
        "",
        ("optim/test_saved_state.py",),
    ),
    Mutation(
        "hooks before loading change the state that was given",
        "optim/state_hooks.py",
        "        state_dict = state_dict.copy()\n",
        "        pass\n",
        ("optim/test_saved_state.py",),
    ),
    Mutation(
        "Lion checks a state before its hooks saw it",
        "optim/lion.py",
        "        state_dict = run_hooks_of_loading(self, state_dict)\n",
        "",
        ("optim/test_saved_state.py",),
    ),
    Mutation(
        "a hook that raises on one rank is heard by no other",
        "local/local_steps.py",
        "            self._votes.agree(CALL, error)\n",
        "",
        ("distributed/test_local_steps_refused.py",),
    ),
    Mutation(
        "hooks before loading run twice",
        "optim/state_hooks.py",
        "    optimizer._optimizer_load_state_dict_pre_hooks = OrderedDict({0: restore})\n",
        "",
        ("optim/test_saved_state.py",),
    ),
    Mutation(
        "a momentum that is sharded otherwise is taken for this rank's",
        "optim/lion.py",
        "            check_cuts(self._describe_cuts(copied))\n",
        "",
        LION,
    ),
    Mutation(
        "a shard is taken for a whole momentum",
        "optim/saved_state.py",
        "    if is_dtensor(found):\n",
        "    if False:\n",
        LION,
    ),
    Mutation(
        "a copied Lion does not know that it is sharded",
        "optim/lion.py",
        "        self._begin_life(pieces=OwnShards())\n",
        "        self._begin_life()\n",
        LION,
    ),
)
