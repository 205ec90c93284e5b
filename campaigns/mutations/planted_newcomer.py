"""Bugs to plant in what a newcomer meets: units, names, exit statuses, norms and buffers."""

from __future__ import annotations

from planted import Mutation

BUFFERS = ("distributed/test_buffers.py",)

NEWCOMER = (
    Mutation(
        "crew: a second run begins beside the first",
        "crew/membership.py",
        "if found and found not in self._known_begun:",
        "if False:",
        ("simulation/test_found_in_crews.py::test_no_second_run_begins_beside_the_first",),
    ),
    Mutation(
        "crew: newcomers begin anew where those that have trained do not come to an epoch",
        "crew/membership.py",
        'may_decide = any(each["epoch"] >= before.members[0].epoch for each in there)',
        "may_decide = True",
        ("crew/test_admission.py",),
    ),
    Mutation(
        "crew: who could not begin a run with others waits for a donor",
        "crew/membership.py",
        "not (self.has_epoch or begins)",
        "not self.has_epoch",
        (
            "simulation/test_found_in_crews.py"
            "::test_those_who_could_not_begin_a_run_try_again_with_all_who_did",
        ),
    ),
    Mutation(
        "newcomer: the mean of buffers is every worker's own",
        "step/buffers.py",
        "    for row in rows:\n",
        "    for row in rows[link.rank :]:\n",
        BUFFERS,
    ),
    Mutation(
        "newcomer: buffers without a mean are averaged",
        "step/buffers.py",
        "if not own.has_mean or torch.equal(",
        "if torch.equal(",
        BUFFERS,
    ),
    Mutation(
        "newcomer: one running statistic of two is averaged",
        "step/buffers.py",
        "own.keys() <= _OF_STATISTICS",
        "bool(own.keys() & _OF_STATISTICS)",
        BUFFERS,
    ),
    Mutation(
        "newcomer: workers need not agree which buffers are averaged",
        "step/buffers.py",
        'kind = "; mean" if self.has_mean else ""',
        'kind = ""',
        BUFFERS,
    ),
    Mutation(
        "newcomer: buffers are averaged in float32",
        "step/buffers.py",
        "else torch.float64",
        "else torch.float32",
        BUFFERS,
    ),
    Mutation(
        "newcomer: the norm is noted after the gradients were scaled to it",
        "step/clipping.py",
        "        return header, math.sqrt(square)\n",
        "        return header, min(math.sqrt(square), self._clip.max_norm)\n",
        ("distributed/test_clipping.py",),
    ),
    Mutation(
        "newcomer: bytes a second are taken for bits",
        "lab/planning/quantity.py",
        'noun.startswith("B") and',
        "False and",
        ("lab/planning/test_quantity.py",),
    ),
    Mutation(
        "newcomer: a wrong command line is a failure",
        "lab/cli/failure.py",
        "        raise typer.Exit(MISUSED) from None",
        "        raise typer.Exit(FAILED) from None",
        ("lab/cli/test_failure.py",),
    ),
    Mutation(
        "newcomer: a full disk is no failure of own commands",
        "command_line.py",
        "            raise\n        sys.exit(FAILED)",
        "            raise\n        sys.exit(0)",
        ("test_command_line.py",),
    ),
    Mutation(
        "newcomer: a command of another package is not told its name",
        "__main__.py",
        "([name, *arguments])",
        "(arguments)",
        ("test_command_line.py",),
    ),
    Mutation(
        "newcomer: a full disk is no failure",
        "lab/cli/command.py",
        "                raise\n            sys.exit(FAILED)",
        "                raise\n            sys.exit(0)",
        ("lab/cli/test_unwritten.py",),
    ),
    Mutation(
        "newcomer: an old validation loss looks new",
        "lab/cli/progress.py",
        "if validation and progress.step != self._validated_step:",
        "if validation and False:",
        ("lab/cli/test_progress.py",),
    ),
    Mutation(
        "newcomer: a small comparison is not warned of",
        "lab/report/comparison_warnings.py",
        "if seeds >= LEAST_SEEDS and steps >= LEAST_STEPS:",
        "if seeds >= LEAST_SEEDS or steps >= LEAST_STEPS:",
        ("lab/report/test_comparison_warnings.py",),
    ),
)
