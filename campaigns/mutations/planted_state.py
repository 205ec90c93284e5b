"""Bugs to plant in what loads and saves state: groups, identities, frozen parameters, sums."""

from __future__ import annotations

from planted import Mutation

FOREIGN = ("optim/test_foreign_state.py",)
DIVISION = ("optim/test_saved_division.py",)
IDENTITY = ("checkpoint/test_identity.py",)
FOUND = "fuzz/test_fuzz.py::test_a_program_that_found_something_ends_as_it_must"
FROZEN = ("checkpoint/test_frozen.py",)
AGAIN = ("optim/test_added_again.py",)
REPLACED = ("peers/test_fixed_groups.py",)
TWICE = ("checkpoint/test_said_twice.py",)
ALL = "distributed/test_state_of_all.py::test_"

STATES = (
    Mutation(
        "shares rounded to float32 before they are added",
        "checkpoint/remap.py",
        "total += momentum.double() * float(weight)",
        "total += momentum * float(weight)",
        (
            "checkpoint/test_resume_virtual.py::test_momenta_are_averaged_without_a_rounding_of_each_share",
            f"{FOUND}[three workers' momenta for two]",
        ),
    ),
    Mutation(
        "groups of other sizes are loaded from a checkpoint",
        "checkpoint/reader.py",
        "if moved or then != present or",
        "if",
        DIVISION,
    ),
    Mutation(
        "names that stand elsewhere are loaded by place",
        "optim/saved_groups.py",
        "if (number, index) not in there:",
        "if False:",
        DIVISION,
    ),
    Mutation(
        "a state of an optimizer that never stepped is taken for a Lion's",
        "optim/saved_groups.py",
        "    if on:\n",
        "    if False:\n",
        FOREIGN,
    ),
    Mutation(
        "groups may lack what every Lion has",
        "optim/saved_groups.py",
        "    if missing:\n",
        "    if False:\n",
        FOREIGN,
    ),
    Mutation(
        "ids of a state are not looked at",
        "optim/saved_state.py",
        'check_ids(groups, state_dict["state"])',
        "pass",
        FOREIGN,
    ),
    Mutation(
        "whatever a malformed state raises leaves an optimizer dead",
        "optim/base.py",
        "    @reading_state()\n",
        "",
        FOREIGN,
    ),
    Mutation(
        "a folder of another optimizer is saved into",
        "checkpoint/identity.py",
        "is_own = earlier.identity in identities if earlier.identity else earlier.layout == layout",
        "is_own = True",
        IDENTITY,
    ),
    Mutation(
        "a tensor of a checkpoint is copied as often as it is named",
        "checkpoint/tensor_file.py",
        "        if name in self._taken:",
        "        if False:",
        ("checkpoint/test_hostile.py",),
    ),
    Mutation(
        "an optimizer keeps its identity where it loads that of another",
        "checkpoint/load.py",
        "note_loaded(self._optimizer, list_loaded(self._optimizer) | loaded)",
        "pass",
        IDENTITY,
    ),
    Mutation(
        "every process saves with an identity of its own",
        "checkpoint/identity.py",
        'barrier.share(None, identity=identify(optimizer))[0]["identity"]',
        "identify(optimizer)",
        (f"{ALL}the_folder_of_another_optimizer_is_refused_on_every_rank_until_it_is_loaded",),
    ),
    Mutation(
        "a frozen parameter is saved as one without a momentum",
        "checkpoint/contents.py",
        'optimizer.state.get(param, {}).get("exp_avg")',
        'optimizer.state.get(param, {}).get("exp_avg") if param.requires_grad else None',
        FROZEN,
    ),
    Mutation(
        "a state may withhold the momentum of a frozen parameter",
        "optim/saved_state.py",
        "if param.requires_grad or is_kept or is_saved:",
        "if param.requires_grad or is_saved:",
        FROZEN,
    ),
    Mutation(
        "a parameter that is added again begins with a momentum of 0",
        "optim/base.py",
        'if self.keeps_momenta and not self.momentum_make(param).fits(kept.get("exp_avg")):',
        "if self.keeps_momenta:",
        AGAIN,
    ),
    Mutation(
        "a refused group takes momenta with it",
        "optim/base.py",
        "                self.state[param] = entries[param]\n",
        "                pass\n",
        AGAIN,
    ),
    Mutation(
        "a load in a closure replaces the lock that its step holds",
        "optim/base.py",
        'self.__dict__.get("_step_lock") or threading.Lock()',
        "threading.Lock()",
        ("optim/test_copies.py",),
    ),
    Mutation(
        "a state that was replaced is stepped past",
        "optim/distributed_lion.py",
        "if self.state is not self._fixed.state:",
        "if False:",
        REPLACED,
    ),
    Mutation(
        "a state that was replaced is saved",
        "optim/base.py",
        "            self._fixed.check_state(self.state)\n",
        "",
        REPLACED,
    ),
    Mutation(
        "a cluster steps past a state that was replaced",
        "virtual/cluster.py",
        "        self._fixed.check_state(self.state)\n",
        "",
        REPLACED,
    ),
    Mutation(
        "a look at the state of a frozen parameter makes states unloadable",
        "optim/saved_state.py",
        "return isinstance(entry, Mapping) and not entry",
        "return False",
        ("optim/test_frozen.py",),
    ),
    Mutation(
        "the momentum of a parameter that was always frozen is not cut to a node's ranks",
        "optim/base.py",
        "        self._pieces.cut(param)\n        make",
        "        if param.requires_grad:\n            self._pieces.cut(param)\n        make",
        (f"{ALL}what_a_frozen_parameter_had_comes_back_on_every_rank",),
    ),
    Mutation(
        "estimates that a worker's file lacks begin with 0",
        "checkpoint/reader.py",
        "dtypes |= dict.fromkeys(rules[index].worker_state, str(torch.float32))",
        "kept = rules[index].worker_state[: self._has(f'estimate.{index}')]\n"
        "            dtypes |= dict.fromkeys(kept, str(torch.float32))",
        (f"{ALL}an_estimate_that_one_workers_file_lacks_is_refused_on_every_rank",),
    ),
    Mutation(
        "a manifest may be at another step than its groups",
        "checkpoint/reader.py",
        'if any(group["step"] != self.manifest.step for group in groups):',
        "if False:",
        TWICE,
    ),
    Mutation(
        "a manifest may list other parameters",
        "checkpoint/reader.py",
        'if digest_layout(tree["layout"]) != self.manifest.layout:',
        "if False:",
        TWICE,
    ),
    Mutation(
        "a call on one rank is not said to be every rank's",
        "step/lifecycle.py",
        'error.args = (f"{error}. {what} must be called by every rank",)',
        "pass",
        (f"{ALL}a_call_on_one_rank_alone_is_said_to_be_every_ranks",),
    ),
)
