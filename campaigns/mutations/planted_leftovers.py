"""Bugs to plant in inputs of a step, norms, frozen parameters and averaged buffers."""

from __future__ import annotations

from planted import Mutation

PROBE = ("wire/test_probe.py",)

INPUTS = ("step/test_inputs_of_a_step.py",)
BUFFERS = ("distributed/test_buffers.py",)
CLIPPING = ("distributed/test_clipping.py::test_a_refused_step_leaves_the_norm_of_the_last_commit",)

SHARED = (
    *(
        Mutation(
            f"a step in a hurry does not look at: {line}",
            "step/param.py",
            f"            and {line}\n",
            "",
            INPUTS,
        )
        for line in (
            "tensor.shape == make.shape",
            "tensor.is_contiguous()",
            "tensor.data_ptr()",
            "exp_avg.shape == kept.shape",
            "exp_avg.layout is torch.strided",
            "exp_avg.data_ptr()",
            "len(entry) == 1 == param.n_kept_tensors",
        )
    ),
    *(
        Mutation(
            f"a step in a hurry does not look at: {line}",
            "step/param.py",
            f"                and {line}\n",
            "",
            INPUTS,
        )
        for line in (
            "grad.shape == make.shape",
            "grad.layout is torch.strided",
            "grad.data_ptr()",
        )
    ),
    *(
        Mutation(
            f"one call for all parameters does not see: {what}", "step/param.py", *texts, INPUTS
        )
        for what, texts in {
            "a negative bit": ("grad is not None and grad.is_neg()", "False"),
            "a momentum": ("    found += momenta\n", "    found += found\n"),
            "gradients": (" and of_grads.fit(given, may_be_none=True)", ""),
        }.items()
    ),
    Mutation(
        "check looks at no estimate",
        "step/param.py",
        "        for key in self.rule.worker_state:\n            self._check",
        "        for key in ():\n            self._check",
        INPUTS,
    ),
    Mutation(
        "a worker alone notes the norm of a step that it refuses",
        "step/alone.py",
        "clip_alone(segments, clip, norms.append)",
        "clip_alone(segments, clip, inputs.note_norm)",
        (f"{CLIPPING[0]}[1-worker]",),
    ),
    Mutation(
        "virtual workers have the norms of a step that was skipped",
        "virtual/cluster.py",
        "        if is_committed:\n            self._average_momenta(step)\n",
        "        self._grad_norms = collection.grad_norms\n"
        "        if is_committed:\n            self._average_momenta(step)\n",
        ("virtual/test_collection.py",),
    ),
    Mutation(
        "Lion leaves a frozen parameter that has a gradient",
        "optim/lion.py",
        "each.param.requires_grad or each.param.grad is not None",
        "each.param.requires_grad",
        ("optim/test_frozen.py",),
    ),
    Mutation(
        "average_buffers() takes no turn",
        "step/buffers.py",
        "    turns.now = Turn(turns.now.number + 1, NO_OPTIMIZER, _CALL)\n",
        "",
        (f"{BUFFERS[0]}::test_one_rank_that_averages_while_another_one_steps_is_an_error_on_both",),
    ),
    Mutation(
        "buffers travel one by one",
        "step/buffers.py",
        "if bucket and n_bytes + own.nbytes > _BYTES_AT_ONCE:",
        "if bucket:",
        (f"{BUFFERS[0]}::test_buffers_travel_together_up_to_a_limit",),
    ),
    Mutation(
        "buffers travel together without a limit",
        "step/buffers.py",
        "if bucket and n_bytes + own.nbytes > _BYTES_AT_ONCE:",
        "if False:",
        (f"{BUFFERS[0]}::test_buffers_travel_together_up_to_a_limit",),
    ),
    Mutation(
        "Ctrl-C cuts average_buffers() short on one rank",
        "step/buffers.py",
        "    with deferred_signals(_CALL):\n",
        "    if True:\n",
        (f"{BUFFERS[0]}::test_calls_are_counted_by_group_and_an_interrupt_waits_for_the_end",),
    ),
    Mutation(
        "a refused worker fixes the hyperparameters of a virtual step",
        "virtual/cluster.py",
        "for before, now in zip(self._said or said, said, strict=True):",
        "self._said = self._said or said\n"
        "        for before, now in zip(self._said, said, strict=True):",
        ("virtual/test_collection.py",),
    ),
    Mutation(
        "a death reported after its connection closed is blamed on a peer",
        "lab/training/local_workers.py",
        "while waiting and (left_s :=",
        "while self._inboxes and (left_s :=",
        ("lab/training/test_local_workers.py",),
    ),
    Mutation(
        "the probe of a link ends before TCP is up to speed",
        "wire/probe.py",
        "while not models or 4 * wanted_bytes >= 5 * chunk_bytes:",
        "while not models:",
        PROBE,
    ),
    Mutation(
        "the probe of a link takes no longer where latency is high",
        "wire/probe.py",
        "TARGET_ROUNDS = 4",
        "TARGET_ROUNDS = 0",
        PROBE,
    ),
    Mutation(
        "the probe of a rank alone is short where latency is high",
        "lab/planning/link_probe.py",
        "target_s = max(_TARGET_S, TARGET_ROUNDS * combined.latency_s)",
        "target_s = _TARGET_S",
        ("lab/planning/test_link_probe.py",),
    ),
    Mutation(
        "whoever lost a peer says so two seconds later",
        "wire/watch.py",
        "within(SETTLE_S, lambda: self._settle(kind))",
        "within(9.0, lambda: (time.sleep(2.5), self._settle(kind)))",
        ("simulation/test_schedules.py::test_some_schedules_keep_all_rules",),
    ),
    Mutation(
        "a worker after a long pause gives up a store that answers slowly",
        "wire/watch.py",
        "within(limit_s, self.look)",
        "within(ANSWER_S, self.look)",
        ("wire/test_store.py",),
    ),
)
