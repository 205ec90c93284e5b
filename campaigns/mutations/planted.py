"""Bugs to plant: each is a change of a line or two that some test must notice."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

OTHERS = ("lab", "netlab", "flower")
"""Folders of the other distributions in this repository."""

CAMPAIGNS = ("bits", "formats", "fuzz", "simulation")

FOLDERS = {
    **dict.fromkeys(CAMPAIGNS, "campaigns/{0}"),
    **dict.fromkeys((*OTHERS, "benchmarks"), "{0}/tests"),
}
"""Folders of tests outside of ``tests``, by the first part of a path."""


@dataclass(frozen=True)
class Mutation:
    """One planted bug.

    Attributes:
        name: What it breaks, in words.
        file: Below src/distlion; with a name of ``OTHERS`` in front below that folder's package;
            with csrc in front a file of the endpoint, which is built again.
        old: Text that occurs once in the file.
        new: What stands there instead.
        tests: What must fail: paths below tests, or with the name of another folder in front as in
            ``FOLDERS``; with ``::`` and a test where one is enough.
        is_slow: Whether they are slow: what notices it takes too long for the quick tier.
        interprets: Whether Triton's kernels are interpreted; slow tests are left out then.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    interprets: bool = False
    is_slow: bool = False

    @property
    def path(self) -> Path:
        """The file, from the repository's top folder."""
        folders = {**dict.fromkeys(OTHERS, "{0}/src/distlion_{0}"), "csrc": "csrc"}
        return _place(self.file, "src/distlion", folders)

    @property
    def is_built(self) -> bool:
        """True if its file is compiled."""
        return self.path.parts[0] == "csrc"

    @property
    def test_paths(self) -> list[Path]:
        """The tests, from the repository's top folder."""
        return [_place(test, "tests", FOLDERS) for test in self.tests]


def _place(path: str, ours: str, theirs: dict[str, str]) -> Path:
    folder, _, below = path.partition("/")
    return Path(theirs[folder].format(folder), below) if folder in theirs else Path(ours, path)


BLAME = ("distributed/test_blame.py",)
LIFECYCLE = ("distributed/test_lifecycle.py",)
CLIPPING = ("step/test_clipping.py",)
VERDICT = ("wire/test_verdict.py",)
COLLECTION = ("virtual/test_collection.py",)
METHODS = ("lab/training/test_methods.py",)
FIRST_BIT = ("kernels/test_first_bit.py",)

MUTATIONS = (
    Mutation(
        "a word of coins that begins within two is shifted by one bit too many",
        "kernels/words.py",
        "_shift_right(words[:-1], n_bits)",
        "_shift_right(words[:-1], n_bits + 1)",
        FIRST_BIT,
    ),
    Mutation(
        "stochastic rounding ignores where in a word a shard begins",
        "kernels/words.py",
        "divmod(slot.first_word * WORD_ELEMENTS + slot.first_bit, 4)",
        "divmod(slot.first_word * WORD_ELEMENTS, 4)",
        FIRST_BIT,
    ),
    Mutation(
        "a part of a bucket forgets where in a word its parameters begin",
        "layout.py",
        "slot._replace(n_elements=stop - start, first_word=word)",
        "slot._replace(n_elements=stop - start, first_word=word, first_bit=0)",
        ("test_layout.py",),
    ),
    Mutation(
        "small gradients are scaled up",
        "step/clipping.py",
        "return min(1.0, clip.max_norm / (norm + NORM_EPSILON)) if",
        "return clip.max_norm / (norm + NORM_EPSILON) if",
        CLIPPING,
    ),
    Mutation(
        "a mean norm counts a worker that is not finite as 0",
        "step/clipping.py",
        "finite = [square for square in squares if math.isfinite(square)]",
        "finite = [square if math.isfinite(square) else 0.0 for square in squares]",
        CLIPPING,
    ),
    Mutation(
        "the default level width of the neighboring p",
        "votes/quantized.py",
        "DEFAULT_STEPS[self.norm][self.bits - 1]",
        "DEFAULT_STEPS[self.norm][self.bits - 2]",
        ("benchmarks/test_quantized_step.py",),
    ),
    Mutation(
        "DGC without a warm-up, virtual workers",
        "lab/training/means.py",
        "share = round(_WARM_UP_SHARE * run.steps)",
        "share = 0",
        METHODS,
    ),
    Mutation(
        "DGC without a warm-up, real workers",
        "lab/training/loop.py",
        "warmup_steps=settings.warmup_steps",
        "warmup_steps=0",
        ("lab/training/test_workers.py",),
    ),
    Mutation(
        "GradDrop keeps 0.1 %, virtual workers",
        "lab/training/means.py",
        "GradDrop(keep=_KEPT)",
        "GradDrop(keep=0.001)",
        METHODS,
    ),
    Mutation(
        "GradDrop keeps 0.1 %, real workers",
        "lab/training/means.py",
        "GradDrop(keep=_KEPT)",
        "GradDrop(keep=0.001)",
        ("lab/training/test_workers.py",),
    ),
    Mutation(
        "learning rates of baselines times 100",
        "lab/training/means.py",
        "base_lr=inner.base_lr,\n        weight_decay=inner.weight_decay,\n"
        "        enter=partial(enter_mean",
        "base_lr=100 * inner.base_lr,\n        weight_decay=inner.weight_decay,\n"
        "        enter=partial(enter_mean",
        METHODS,
    ),
    Mutation(
        "TernGrad's odds of the unclipped gradient",
        "lab/baselines/terngrad.py",
        "levels = clipped.sign().mul_(draws.mul_(at.scalar) < clipped.abs())",
        "levels = clipped.sign().mul_(draws.mul_(at.scalar) < grad.abs())",
        ("lab/baselines/test_terngrad.py",),
    ),
    Mutation(
        "advice compares with the slow ring only",
        "lab/planning/planner.py",
        "next(forecast for forecast in self.ranked if not forecast.votes)",
        'next(each for each in self.ranked if not each.votes and each.pattern == "ring")',
        ("lab/planning/test_advice.py",),
    ),
    Mutation(
        "regimes end where the slow ring does",
        "lab/planning/planner.py",
        "for baseline in BASELINES\n        if",
        "for baseline in BASELINES[::2]\n        if",
        ("lab/planning/test_advice.py",),
    ),
    Mutation(
        "groups at different steps are accepted",
        "optim/saved_state.py",
        "if len(set(steps)) > 1:",
        "if len(set(steps)) > 2:",
        ("optim/test_saved_state.py",),
    ),
    Mutation(
        "owners that disagree on presence are believed",
        "wire/all_reduce.py",
        "bool((read.present != present).any())",
        "False",
        ("wire/test_pattern_contract.py",),
    ),
    Mutation(
        "a later error of equal rank overrides the first",
        "wire/verdict.py",
        "if status <= header.status:",
        "if status < header.status:",
        VERDICT,
    ),
    Mutation(
        "another parameter named, not finite",
        "step/bucket.py",
        "self.own[finite.index(False)]",
        "self.own[0]",
        BLAME,
    ),
    Mutation(
        "another parameter named, sparse",
        "step/bucket.py",
        "position=sparse.position",
        "position=0",
        BLAME,
    ),
    Mutation(
        "another parameter named, changed",
        "step/bucket.py",
        "self._report(Status.GRADIENT_CHANGED, inputs, changed)",
        "self._report(Status.GRADIENT_CHANGED, inputs, self.params[0])",
        BLAME,
    ),
    Mutation(
        "diagnostics read local rank 0",
        "step/nodes.py",
        "self._read_part(self.inside.rank)",
        "self._read_part(0)",
        ("distributed/test_node_parts.py",),
    ),
    Mutation(
        "a second arrival of a gradient is ignored",
        "step/arrivals.py",
        "            self._twice.add(position)",
        "            pass",
        (
            "distributed/test_overlap.py::test_a_gradient_that_arrives_twice_is_an_error_although_it_looks_the_same",
        ),
    ),
    Mutation(
        "gradients that changed after encoding are not noticed",
        "step/param.py",
        "if is_written or own.data_ptr() != mark.address:",
        "if False:",
        BLAME,
    ),
    Mutation(
        "a parameter that is not contiguous is not written back",
        "step/param.py",
        "own.detach().copy_(local)",
        "pass",
        ("distributed/test_parameter_kinds.py",),
    ),
    Mutation(
        "an optimizer is dead after every error",
        "step/lifecycle.py",
        "if not (isinstance(error, DistlionError) and error.is_recoverable):",
        "if True:",
        BLAME,
    ),
    Mutation(
        "no error leaves an optimizer dead",
        "step/lifecycle.py",
        "if not (isinstance(error, DistlionError) and error.is_recoverable):",
        "if False:",
        LIFECYCLE,
    ),
    Mutation(
        "a commit that was cut short leaves no trace",
        "optim/distributed_lion.py",
        "session.lifecycle.is_torn = True",
        "pass",
        LIFECYCLE,
    ),
    Mutation(
        "headers do not carry this step's hyperparameters",
        "peers/fingerprint.py",
        "[self._digest, *changing, *toggled, *self.passing]",
        "[self._digest, *toggled, *self.passing]",
        ("peers/test_fingerprint.py",),
    ),
    Mutation(
        "the digest of the raw gradients is not sent",
        "step/bucket.py",
        "        if seen:",
        "        if False:",
        ("distributed/test_identical_gradients.py",),
    ),
    Mutation(
        "momenta of absent parameters move",
        "step/nodes.py",
        "means.append(mean.to(param.device) if voters else None)",
        "means.append(mean.to(param.device))",
        ("distributed/test_nodes.py",),
    ),
    Mutation(
        "votes leave a dead optimizer during backward",
        "step/overlap.py",
        "        if self._lifecycle.is_dead:\n            return\n        param",
        "        param",
        LIFECYCLE,
    ),
    Mutation(
        "hooks of an optimizer that is let go of stay",
        "step/overlap.py",
        "weakref.finalize(self, _end, self._hooks, self._tasks)",
        "pass",
        LIFECYCLE,
    ),
    Mutation(
        "a parameter gets another hook with every layout",
        "step/overlap.py",
        "            if key not in self._hooks:\n",
        "            if True:\n",
        LIFECYCLE,
    ),
    Mutation(
        "pieces of a parameter that is not contiguous are not written back",
        "step/nodes.py",
        "param.write_back(moved[index].param)",
        "pass",
        ("distributed/test_node_parts.py",),
    ),
    Mutation(
        "virtual: a parameter that is not contiguous is not written back",
        "step/bucket.py",
        "param.write_back(self.segments[index].param)",
        "pass",
        COLLECTION,
    ),
    Mutation(
        "virtual: who was not collected is no worker of the global norm",
        "virtual/collection.py",
        "clip_together(segments, absent, clip, self._note_global_norm)",
        "clip_together(segments, 0, clip, self._note_global_norm)",
        COLLECTION,
    ),
    Mutation(
        "virtual: a torn cluster takes no state",
        "virtual/collection.py",
        "if self._workers and not self.is_torn:",
        "if self._workers:",
        ("virtual/test_cluster.py",),
    ),
    Mutation(
        "virtual: diagnoses are forgotten with a new line-up",
        "virtual/cluster.py",
        "params, earlier=self._examiner",
        "params, earlier=None",
        COLLECTION,
    ),
    Mutation(
        "virtual: momenta of a step that was skipped count",
        "virtual/cluster.py",
        "averaged = rows if is_committed else ()",
        "averaged = rows",
        ("virtual/test_accounting.py",),
    ),
    Mutation(
        "virtual: a lone worker is not clipped",
        "virtual/collection.py",
        "inputs, self._settings.clip_norm)",
        "inputs, None)",
        COLLECTION,
    ),
    Mutation(
        "virtual: worker 0 is named for whoever was not finite",
        "virtual/collection.py",
        "worker = verdict.culprits[0]",
        "worker = 0",
        COLLECTION,
    ),
    Mutation(
        "virtual: workers are looked at in the order in which they came",
        "virtual/collection.py",
        "dict(sorted(self._held.items()))",
        "dict(self._held.items())",
        COLLECTION,
    ),
)
