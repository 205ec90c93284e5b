"""Bugs of several inner optimizers in one ``LocalSteps``."""

from __future__ import annotations

from planted import Mutation

ALONE = ("local/test_inner_optimizers_alone.py",)
WORKERS = ("distributed/test_inner_optimizers.py",)
SAVED = ("checkpoint/test_inner_optimizers_saved.py",)

SEVERAL_INNER = (
    Mutation(
        "virtual workers place elements in the order of the model",
        "virtual/local_steps.py",
        "order = [places[param] for param in held if param.requires_grad]",
        "order = sorted(places[param] for param in held if param.requires_grad)",
        WORKERS,
    ),
    Mutation(
        "a virtual common point is listed in the order of the inner optimizer",
        "virtual/local_steps.py",
        "sorted(zip(self._trained, self._common, strict=True), key=lambda pair: pair[0])",
        "zip(self._trained, self._common, strict=True)",
        WORKERS,
    ),
    Mutation(
        "a parameter is in two inner optimizers",
        "local/inner_optimizers.py",
        "if held.setdefault(id(param), owner) != owner:",
        "if False:",
        ALONE,
    ),
    Mutation(
        "an optimizer that needs a closure steps beside others",
        "local/inner_optimizers.py",
        "            _check_closure(each)\n",
        "            pass\n",
        ALONE,
    ),
    Mutation(
        "each inner optimizer's parameters are numbered from 0",
        "local/inner_optimizers.py",
        "state |= {n_params + key: entry",
        "state |= {key: entry",
        ALONE,
    ),
    Mutation(
        "a state of other inner optimizers loads",
        "local/inner_optimizers.py",
        "if found != expected and any((*found, *expected)):",
        "if False:",
        ALONE,
    ),
    Mutation(
        "a load that the second inner optimizer refuses changes the first",
        "local/inner_optimizers.py",
        "        with restoring(self):\n            for",
        "        if True:\n            for",
        ALONE,
    ),
    Mutation(
        "states of several inner optimizers are not put back",
        "local/inner_optimizers.py",
        "                each.state = own",
        "                pass",
        ALONE,
    ),
    Mutation(
        "a checkpoint that fails to load leaves inner optimizers changed",
        "checkpoint/contents.py",
        "kept += [vars(each) for each in local.inner.optimizers]",
        "pass",
        SAVED,
    ),
)
