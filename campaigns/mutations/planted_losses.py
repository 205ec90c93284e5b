"""Bugs to plant in what keeps a script from losing something without a word."""

from __future__ import annotations

from planted import Mutation

ABSENT = ("distributed/test_absent_gradients.py",)
COPIES = ("optim/test_copies.py",)
DDP = ("distributed/test_ddp.py",)
GROUPS = ("distributed/test_groups.py",)
PERIOD_START = ("local/test_write_check.py",)
INNER_STATE = ("distributed/test_inner_state.py",)
NONFINITE = ("distributed/test_nonfinite.py",)
TORCH_OPTIM = ("distributed/test_torch_optim.py",)

LOSSES = (
    Mutation(
        "loss: DDP keeps its synchronization",
        "integrations/ddp.py",
        "    model.require_backward_grad_sync = False\n",
        "",
        DDP,
    ),
    Mutation(
        "loss: buffers are no longer broadcast",
        "integrations/ddp.py",
        "    model.register_forward_hook(_keep_buffers_alike)\n",
        "",
        DDP,
    ),
    Mutation(
        "loss: DDP averages once a trainer turns it on again",
        "integrations/ddp.py",
        "    model.register_comm_hook(None, _keep_local)\n",
        "",
        DDP,
    ),
    Mutation(
        "loss: a step is compiled",
        "optim/base.py",
        "    @_disable_dynamo\n",
        "",
        TORCH_OPTIM,
    ),
    Mutation(
        "loss: a GradScaler is not told of another worker's overflow",
        "peers/session.py",
        "            note_overflow()\n",
        "            pass\n",
        NONFINITE,
    ),
    Mutation(
        "loss: an overflow under a GradScaler raises by default",
        "peers/session.py",
        "        if verdict.status is Status.OVERFLOW or (\n",
        "        if (\n",
        NONFINITE,
    ),
    Mutation(
        "loss: an overflow is taken for a value that is not finite",
        "step/bucket.py",
        "        elif inputs.found_inf:\n"
        "            header = with_error(header, Status.OVERFLOW, culprit=inputs.rank)\n",
        "",
        NONFINITE,
    ),
    Mutation(
        "loss: a NaN stays in the inner state of local steps",
        "local/votes.py",
        "            self._reset_broken(broken)",
        "            pass",
        INNER_STATE,
    ),
    Mutation(
        "loss: rows that a forward pass shortens stop local steps",
        "local/write_check.py",
        " or _is_shortened(param, start)",
        "",
        PERIOD_START,
    ),
    Mutation(
        "loss: local steps take longer rows for shortened ones",
        "local/write_check.py",
        "(after <= before * (1 + tolerance)) & (errors <= tolerance * after)",
        "errors <= tolerance * after",
        PERIOD_START,
    ),
    Mutation(
        "loss: a vote does not look at the inner state",
        "local/pairs.py",
        "    broken = find_broken(inner, [param for param, _ in pairs])\n",
        "    broken: list[Tensor] = []\n",
        INNER_STATE,
    ),
    Mutation(
        "loss: an overflow skips other optimizers of the scaler",
        "step/outcome.py",
        """    state = scaler._per_optimizer_states[id(optimizer)]
    for found_inf in state["found_inf_per_device"].values():
        found_inf.fill_(1.0)
""",
        """    for state in scaler._per_optimizer_states.values():
        for found_inf in state["found_inf_per_device"].values():
            found_inf.fill_(1.0)
""",
        NONFINITE,
    ),
    Mutation(
        "loss: absent gradients are not warned of",
        "peers/session.py",
        "wants_digest or not any(reply.present.any() for reply in replies)",
        "wants_digest",
        ABSENT,
    ),
    Mutation(
        "loss: abstentions are taken for absent gradients",
        "step/gradients.py",
        "if not has_votes and all(param.param.grad is None for param in params):",
        "if not has_votes:",
        ABSENT,
    ),
    Mutation(
        "loss: replaced parameters go unnoticed",
        "peers/fingerprint.py",
        "if is_other or not all(map(operator.is_, params, held)):",
        "if False:",
        GROUPS,
    ),
    Mutation(
        "loss: a voting optimizer is copied",
        "optim/base.py",
        "    def __reduce_ex__(self",
        "    def _refuse_copies(self",
        COPIES,
    ),
    Mutation(
        "loss: a copied Lion lacks what no state holds",
        "optim/lion.py",
        "        self._begin_life(pieces=OwnShards())\n",
        "",
        COPIES,
    ),
    Mutation(
        "loss: names of some groups are let through",
        "optim/arguments.py",
        "if number and is_named != has_names:",
        "if False:",
        GROUPS,
    ),
)
