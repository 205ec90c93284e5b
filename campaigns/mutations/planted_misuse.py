"""Bugs to plant in what refuses misuse, and in what keeps several optimizers apart."""

from __future__ import annotations

from planted import LIFECYCLE, Mutation

ARGUMENTS = ("distributed/test_arguments.py",)
RECORDS = ("step/test_records.py",)
CULPRITS = ("distributed/test_culprits.py",)
MISUSE = ("distributed/test_misuse_rows.py", "distributed/test_misuse_steps.py")
STATES = (
    "distributed/test_checkpoints_of_what_is_trained.py"
    "::test_a_state_of_one_worker_says_so_once_and_checkpoints_do_not",
)
USE = (
    "distributed/test_absent_gradients.py"
    "::test_parameters_that_no_worker_uses_in_the_first_steps_are_named_once",
)
REPLICAS = (
    "distributed/test_replicas.py"
    "::test_a_change_after_the_first_step_is_found_10_or_100_steps_after_the_first",
)
TWO = "distributed/test_two_optimizers.py::test_"
DIFFERENCES = ("wire/test_differences.py",)
ASK = ("wire/test_ask.py",)
CALLS = (
    "simulation/test_schedules.py::test_a_call_in_place_of_a_step_is_one_error_on_all_workers",
)
OUT_OF_TURN = ("distributed/test_out_of_turn.py",)
SWAPPED = (f"{TWO}two_swapped_steps_of_two_workers_are_one_error_that_blames_nobody",)

MISUSES = (
    Mutation(
        "optimizers send over one process group",
        "peers/connections.py",
        'self._between = self._make(f"between {ranks.between[0]}", ranks.between)',
        "self._between = self._everybody = ranks.process_group",
        SWAPPED,
    ),
    Mutation(
        "turns are not compared",
        "wire/turns.py",
        'return bool(self._store.compare_set(_key(own.number), "", value).decode() != value)',
        "return False",
        SWAPPED,
    ),
    Mutation(
        "a turn stays in the store for ever",
        "wire/turns.py",
        "self._store.delete_key(_key(self._posted))",
        "pass",
        (f"{TWO}slow_steps_in_order_are_no_mismatch_and_leave_one_key_in_the_store",),
    ),
    Mutation(
        "frames do not carry the number of the optimizer",
        "peers/session.py",
        "optimizer: number {self.lifecycle.number} of",
        "optimizer: number of",
        (f"{TWO}optimizers_of_different_numbers_are_refused_on_every_rank",),
    ),
    Mutation(
        "another optimizer of a group that failed goes on",
        "step/lifecycle.py",
        "if self._watch is not None and self._watch.turns.failure is not None:",
        "if False:",
        (f"{TWO}an_optimizer_beside_one_that_failed_is_dead_too",),
    ),
    Mutation(
        "calls may be made while another one is under way",
        "step/lifecycle.py",
        "if self._under_way is not None:",
        "if False:",
        MISUSE,
    ),
    Mutation(
        "lines of descriptions are compared by place",
        "wire/ask.py",
        'key = line.split(": ", 1)[0]',
        "key = str(len(said))",
        DIFFERENCES,
    ),
    Mutation(
        "words of a question are sent though all say the same",
        "wire/ask.py",
        "    if len(set(told)) == 1:\n",
        "    if not said:\n",
        ASK,
    ),
    Mutation(
        "an announcement may be damaged unseen",
        "wire/ask.py",
        "    _refuse(link, list(map(bytes.startswith, announced, heads)), step)\n",
        "",
        ASK,
    ),
    Mutation(
        "words of a question may be damaged unseen",
        "wire/ask.py",
        "    _refuse(link, intact, step)\n",
        "",
        ASK,
    ),
    Mutation(
        "a question at another step is another call",
        "peers/meetings.py",
        "        if len(set(steps)) > 1:\n",
        "        if False:\n",
        ("distributed/test_disagreement.py",),
    ),
    Mutation(
        "a call in place of a step is waited for",
        "wire/turns.py",
        "        value = own.place\n",
        "        value = str(own.optimizer)\n",
        (
            "simulation/test_schedules.py::test_a_call_in_place_of_a_step_is_one_error_on_all_workers",
        ),
    ),
    Mutation(
        "who has read what all found does not let others read it",
        "wire/watch.py",
        "            within(SETTLE_S, lambda: self._settle(kind))\n",
        "            self._finding or within(SETTLE_S, lambda: self._settle(kind))\n",
        CALLS,
    ),
    Mutation(
        "a call in place of a step is a step of another optimizer",
        "wire/finding.py",
        "if len({turn.optimizer for turn in waiting.values()}) > 1:",
        "if True:",
        OUT_OF_TURN,
    ),
    Mutation(
        "votes and questions share connections",
        "peers/connections.py",
        "        return self._link(self._between, timeout_s, self._ranks.between, shares=shares)\n",
        "        return self.link_all(timeout_s)\n",
        OUT_OF_TURN,
    ),
    Mutation(
        "a problem of another worker is not heard",
        "peers/meetings.py",
        "        culprits, first = find_problem([row[0] for row in told])\n",
        '        culprits, first = find_problem(["" if problem is None else str(problem)])\n',
        (
            "distributed/test_resume.py::test_a_state_that_fits_everywhere_but_on_one_rank_is_refused_on_all",
        ),
    ),
    Mutation(
        "a parameter frozen later is not described",
        "peers/fingerprint.py",
        'lines.append(f"no longer trained: {name}")',
        "pass",
        MISUSE,
    ),
    Mutation(
        "replicas are compared early after a start alone, not after a load",
        "peers/replicas.py",
        "            self._first_step = step\n",
        "            self._first_step = 0\n",
        REPLICAS,
    ),
    Mutation(
        "replicas are never compared early",
        "peers/replicas.py",
        "EARLY_CHECKS = (10, 100)",
        "EARLY_CHECKS = ()",
        REPLICAS,
    ),
    Mutation(
        "parameters that one worker uses count as unused",
        "peers/session.py",
        "voted = [bucket.list_voted() for bucket in buckets]",
        "voted = [[p.position for p in self.params if p.param.grad is not None]]",
        USE,
    ),
    Mutation(
        "unused parameters are looked for in every step",
        "step/gradients.py",
        "        self.is_over, self._used = True, set()\n",
        "        self._steps, self._used = 0, set()\n",
        USE,
    ),
    Mutation(
        "the state of one worker is saved without a word",
        "optim/distributed_lion.py",
        "is_of_one = not session.ranks.is_alone and session.sharding is None",
        "is_of_one = False",
        STATES,
    ),
    Mutation(
        "every save warns of the state of one worker",
        "optim/base.py",
        "has_told, optimizer._has_told_of_state = optimizer._has_told_of_state, True",
        "has_told = optimizer._has_told_of_state",
        STATES,
    ),
    Mutation(
        "a save of differing buffers does not warn",
        "checkpoint/save.py",
        "    if not names or optimizer in _warned:",
        "    if True:",
        ("distributed/test_checkpoints_of_what_is_trained.py",),
    ),
    Mutation(
        "values tell nothing of the order of parameters",
        "peers/replicas.py",
        "    if not others:\n",
        "    if True:\n",
        MISUSE,
    ),
    Mutation(
        "a rank without anything to vote on does not shake hands",
        "peers/session.py",
        "        if not self.ranks.is_alone:\n            self.connections.approach()",
        "        if not self.ranks.is_alone and params:\n            self.connections.approach()",
        MISUSE,
    ),
    Mutation(
        "who keeps the store is blamed whenever it is gone",
        "wire/watch.py",
        "self._has_host_left_first = time.monotonic() - self._looked_s < CALM_S",
        "self._has_host_left_first = True",
        CULPRITS,
    ),
    Mutation(
        "a timeout tells the limit in place of the time that passed",
        "wire/gloo.py",
        "passed_s = time.monotonic() - self._start_s",
        "passed_s = link.timeout_s",
        CULPRITS,
    ),
    Mutation(
        "errors tell the source path of Gloo",
        "wire/groups.py",
        "return re.sub(",
        "return sentence or re.sub(",
        CULPRITS,
    ),
    Mutation(
        "who let its optimizer go is not named",
        "wire/finding.py",
        "    if gone and not silent:\n",
        "    if False:\n",
        ("distributed/test_disagreement.py",),
    ),
    Mutation(
        "stochastic rounding is warned of too",
        "step/precision.py",
        "if precision.is_stochastic:",
        "if False:",
        MISUSE,
    ),
    Mutation(
        "a lost update is one below a whole spacing",
        "step/precision.py",
        "(spacing := _find_spacing(median, dtype)) / 2:",
        "(spacing := _find_spacing(median, dtype)):",
        ("optim/test_precision.py",),
    ),
    Mutation(
        "a former argument is passed on",
        "step/arguments.py",
        "for name in FORMER.keys() & options.keys():",
        "for name in ():",
        RECORDS,
    ),
    Mutation(
        "a former argument in a group is ignored",
        "step/hyperparameters.py",
        "for key in sorted(OF_THE_WHOLE & group.keys()):",
        "for key in sorted(OF_THE_WHOLE.difference(FORMER) & group.keys()):",
        ("peers/test_fixed_groups.py",),
    ),
    Mutation(
        "workers are excluded without measurements",
        "step/agreement.py",
        "if self.excludes and self.every is None:",
        "if False:",
        RECORDS,
    ),
    Mutation(
        "votes on deltas leave workers out",
        "local/arguments.py",
        "if agreement.excludes:",
        "if False:",
        RECORDS,
    ),
    Mutation(
        "a crew waits five minutes for each silent member",
        "crew/options.py",
        "return timeouts if timeouts.init_s is not None else",
        "return timeouts if True else",
        RECORDS,
    ),
    Mutation(
        "workers with other momenta's dtypes meet",
        "step/settings.py",
        'apart = ("timeouts", "momentum_sync", "weight")',
        'apart = ("timeouts", "momentum_sync", "weight", "precision")',
        ("distributed/test_disagreement.py",),
    ),
    Mutation(
        "numbers beyond float32 are taken",
        "step/arguments.py",
        "if not -FLOAT32_MAX <= value <= FLOAT32_MAX:",
        "if not abs(value) <= 1e308:",
        ARGUMENTS,
    ),
    Mutation(
        "columns of one matrix count as overlapping",
        "step/param.py",
        "if _overlap(other, param):",
        "if True:",
        ARGUMENTS,
    ),
    Mutation(
        "parameters may share memory",
        "step/param.py",
        "if _overlap(other, param):",
        "if False:",
        ARGUMENTS,
    ),
    Mutation(
        "a parameter may be strided onto itself",
        "step/param.py",
        "return int(_mark(param, reached).sum()) < param.numel()",
        "return False",
        ARGUMENTS,
    ),
    Mutation(
        "a group ends while something is under way on it",
        "wire/gloo.py",
        "_under_way.add(self)",
        "pass",
        LIFECYCLE,
    ),
    Mutation(
        "a restarted worker hears the alarm of an earlier start",
        "wire/groups.py",
        'return store if start is None else PrefixStore(f"start {start}", store)',
        "return store",
        ("wire/test_store.py",),
    ),
    Mutation(
        "a worker whose lr is out of range leaves the others waiting",
        "optim/distributed_lion.py",
        "numbers, problem = GroupNumbers(lines, (), found_inf=False), error",
        "raise",
        (
            "distributed/test_disagreement.py::test_a_setting_out_of_range_at_one_step_is_an_error_on_every_rank",
        ),
    ),
    Mutation(
        "an lr out of range on all workers kills their optimizers",
        "failures.py",
        'who} cannot vote: {problem}",\n        is_recoverable=True,',
        'who} cannot vote: {problem}",',
        (
            "distributed/test_disagreement.py::test_a_setting_out_of_range_on_all_ranks_is_told_as_such_and_they_go_on",
        ),
    ),
    Mutation(
        "an lr out of range that follows the first votes ends the step on one worker",
        "step/overlap.py",
        "settings_changed = inputs.header.settings != now.header.settings",
        "settings_changed = False",
        (
            "distributed/test_overlap.py::test_what_changes_between_backward_and_step_is_an_error_on_all",
        ),
    ),
)
