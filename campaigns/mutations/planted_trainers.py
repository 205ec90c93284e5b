"""Bugs of loads under frameworks, and of loads that are refused."""

from __future__ import annotations

from planted import Mutation

COMPANION, ACCELERATE = "integrations/companion.py", "integrations/accelerate.py"
UNDO, TOGETHER = "checkpoint/undo.py", "checkpoint/load.py"
CREW = "integrations/crew_trainer.py"
MEMBERS = ("integrations/test_crew_trainers.py",)
BESIDE = ("integrations/test_companion.py",)
UNDER = ("integrations/test_refused_loads.py",)
REFUSED = ("checkpoint/test_refused_loads.py",)

TRAINERS = (
    Mutation(
        "trainers: the Trainer's members give a backward pass up for a newcomer",
        CREW,
        "        self._optimizer.admit()\n",
        "        pass\n",
        ("integrations/test_crew_trainers.py::test_a_member_is_killed_and_a_newcomer_comes",),
    ),
    Mutation(
        "trainers: Lightning's members give a backward pass up for a newcomer",
        "integrations/lightning.py",
        "            check_retries(each).admit()\n",
        "            check_retries(each)\n",
        ("integrations/test_crew_trainers.py::test_a_member_is_killed_and_a_newcomer_comes",),
    ),
    Mutation(
        "trainers: a file that is written later has no momenta until then",
        COMPANION,
        "_KEPT = 2",
        "_KEPT = 1",
        BESIDE,
    ),
    Mutation(
        "trainers: momenta are removed before the file is written",
        COMPANION,
        "optimizer, only_trained=True, overwrite=True",
        "optimizer, keep_last=_KEPT, only_trained=True, overwrite=True",
        BESIDE,
    ),
    Mutation("trainers: ranks do not wait for the file", COMPANION, "    barrier()\n", "", BESIDE),
    Mutation(
        "trainers: a check of a load that failed stays for the next one",
        ACCELERATE,
        "            hook.remove()\n",
        "",
        UNDER,
    ),
    Mutation(
        "trainers: Accelerate loads rank 0's momentum",
        ACCELERATE,
        "optimizers, self._optimizers = self._optimizers, []",
        "optimizers = self._optimizers",
        UNDER,
    ),
    Mutation(
        "trainers: other hooks go before the check",
        ACCELERATE,
        "last=False",
        "last=True",
        UNDER,
    ),
    Mutation(
        "trainers: Accelerate's count of micro-steps is not put back",
        ACCELERATE,
        "            self.step = step\n",
        "",
        UNDER,
    ),
    Mutation(
        "refused loads: random numbers are not put back",
        UNDO,
        "[*_keep_random_numbers()]",
        "[]",
        REFUSED,
    ),
    Mutation(
        "refused loads: callable objects are not put back",
        UNDO,
        "            return [vars(value)]\n",
        "            return []\n",
        REFUSED,
    ),
    Mutation(
        "refused loads: data are copied",
        UNDO,
        "self._seen[id(value.dataset)] = value.dataset",
        "pass",
        ("checkpoint/test_undo.py",),
    ),
    Mutation(
        "refused loads: tensors are written without a change",
        UNDO,
        "if not torch.equal(tensor, values):",
        "if True:",
        ("checkpoint/test_undo.py",),
    ),
    Mutation(
        "refused loads: the first of two optimizers keeps what it has loaded",
        TOGETHER,
        "            loading.take_back(error)\n",
        "            pass\n",
        ("checkpoint/test_together.py",),
    ),
    Mutation(
        "refused loads: a framework may load without a check",
        TOGETHER,
        "        gate.close(problem)\n",
        "",
        ("checkpoint/test_together.py",),
    ),
    Mutation(
        "refused loads: nothing is put back",
        "checkpoint/load.py",
        "undo = all_or_nothing(model, *list_changing(*take_apart(optimizer)), scheduler)",
        "undo = all_or_nothing()",
        REFUSED,
    ),
    Mutation(
        "trainers: a step of a crew is not tried again",
        "crew/retry.py",
        "        while not super().step(run_once if left else None):\n            pass\n",
        "        super().step(run_once if left else None)\n",
        ("crew/test_replay.py",),
    ),
    Mutation(
        "trainers: a newcomer of a crew counts from 0",
        CREW,
        "        state.global_step = self._optimizer.committed_step\n",
        "        pass\n",
        MEMBERS,
    ),
    Mutation(
        "trainers: a newcomer of a crew takes its first loss for that of all steps",
        CREW,
        "_globalstep_last_logged += self._optimizer.committed_step - state.global_step",
        "_globalstep_last_logged += 0",
        MEMBERS,
    ),
    Mutation(
        "trainers: a member of a crew loads its optimizer's state",
        CREW,
        "prepare(optimizer, device_placement=False)",
        "prepare(optimizer)",
        MEMBERS,
    ),
    Mutation(
        "trainers: a newcomer of a crew goes on when the others end",
        "integrations/lightning.py",
        "            trainer.should_stop = True\n",
        "            pass\n",
        (f"{MEMBERS[0]}::test_a_member_is_killed_and_a_newcomer_comes[train_with_lightning]",),
        is_slow=True,
    ),
    Mutation(
        "trainers: one member of a crew saves the model",
        CREW,
        "        with _saved_by_all(self.accelerator.unwrap_model(self.model)):\n",
        "        if True:\n",
        MEMBERS,
    ),
    Mutation(
        "trainers: a closure of a crew runs in each try",
        "crew/retry.py",
        "return left.pop()()",
        "return left[0]()",
        MEMBERS,
    ),
)
