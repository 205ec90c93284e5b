"""Programs that have found something, each by what it does, cut down to what it takes."""

from __future__ import annotations

from dataclasses import replace

from fuzz.program import Op, Program, Setup

STEP = Op("step", {"key": 5})
RANKS = Setup(network={"exchange": "all-reduce", "check_every": 1000})
VIRTUAL = Setup(is_real=False)
OVERLAP = replace(RANKS, network={"overlap": True, "exchange": "all-reduce", "check_every": 1000})
GATHER = replace(RANKS, network={"exchange": "all-gather"})
FEEDBACK = replace(RANKS, rules=("feedback-1", "majority"))


def both(name: str, *ops: Op, setup: Setup = RANKS) -> dict[str, Program]:
    """Return a program for ranks and the same for virtual workers."""
    virtual = replace(setup, is_real=False, network={})
    return {
        name: Program(0, setup, ops),
        f"{name}, virtual": Program(0, virtual, ops),
    }


def ranks(name: str, *ops: Op, setup: Setup = RANKS) -> dict[str, Program]:
    """Return a program for ranks."""
    return {name: Program(0, setup, ops)}


def lopsided(*changes: str, setup: Setup = RANKS) -> dict[str, Program]:
    """Return a program for each change that one rank makes before a step of all."""
    return {
        f"one rank changes: {change}": Program(
            0,
            setup,
            (STEP, Op("lopsided", {"rank": 1, "change": change, "param": 1, "key": 7})),
        )
        for change in changes
    }


def edits(*hows: str) -> dict[str, Program]:
    """Return programs that edit a gradient after backward, where votes may have left."""
    ops = {
        how: tuple(Op("step", {"key": 3, "edit": (None, index, how)}) for index in range(3))
        for how in hows
    }
    return {
        f"a gradient edited after backward under overlap: {how}": Program(0, OVERLAP, steps)
        for how, steps in ops.items()
    }


def load_foreign(*kinds: str) -> dict[str, Program]:
    """Return programs that load states of others."""
    found: dict[str, Program] = {}
    for kind in kinds:
        op = Op("load_foreign", {"kind": kind, "rank": None})
        found |= both(f"load a state that does not fit: {kind}", STEP, op, STEP)
    return found


def load_damaged(*kinds: str, setup: Setup = RANKS) -> dict[str, Program]:
    """Return programs that load damaged checkpoints."""
    found: dict[str, Program] = {}
    for kind in kinds:
        op = Op("load_damaged", {"kind": kind, "key": 4, "worker": 1})
        found |= both(f"load a damaged checkpoint: {kind}", STEP, op, STEP, setup=setup)
    return found


def bad_steps(*values: object) -> dict[str, Program]:
    """Return programs that put into a group what is no number of a step."""
    found: dict[str, Program] = {}
    for value in values:
        op = Op("bad_setting", {"group": 0, "key": 4, "bad": ("step", value)})
        found |= both(f"step = {value!r} in a group", STEP, op)
    return found


def switch_rule(rule: str) -> tuple[Op, ...]:
    """Return operations that change a rule in place, and go on from what was saved."""
    resume = Op("resume", {"how": "state_dict", "into": "fresh", "key": 4})
    return (STEP, Op("switch_rule", {"group": 0, "rule": rule, "key": 8}), resume, STEP)


def freeze_and_load(how: str) -> tuple[Op, ...]:
    """Return operations that save and load while a parameter is frozen."""
    frozen, trained = Op("freeze", {"param": 0}), Op("unfreeze", {"param": 0, "key": 9})
    resume = Op("resume", {"how": how, "into": "same", "key": 4})
    return (STEP, frozen, STEP, resume, trained, STEP)


DIVIDED = replace(RANKS, sizes=((3, 65), (65, 3)))
SCHEDULED = replace(RANKS, scheduler="lambda")
SEQUENTIAL = replace(RANKS, scheduler="sequential")
ODD = replace(FEEDBACK, defaults=("float64", "meta"))
PAUSE = Op("pause", {"rank": 0, "key": 4})

FOUND: dict[str, Program] = {
    **{
        f"{name}, overlap": program
        for name, program in lopsided("betas, no pair", setup=OVERLAP).items()
    },
    **lopsided("precision", "gradient", "lr, meta", "step, text", "aggregation, text"),
    **lopsided("momentum, longer", "momentum, double", "momentum, meta", "momentum, lost"),
    **both(
        "load a checkpoint into groups that divide the parameters otherwise",
        STEP,
        Op("load_divided", {"group": 1, "key": 4}),
        setup=DIVIDED,
    ),
    **edits("mul_", "data", "detach", "numpy", "other", "foreach", "none"),
    **load_foreign("adamw, 0", "adam, 0", "sgd, 0", "sgd, 1", "rmsprop, 0", "unhashable ids"),
    **both("a rule changed in place", *switch_rule("ternary")),
    **both("text for a rule, in place", *switch_rule("text")),
    **both("two optimizers save into one folder", STEP, Op("share_folder", {"key": 4}), STEP),
    **both(
        "a load with a schedule that does not fit: lambda",
        STEP,
        Op("load_damaged", {"kind": "schedule", "key": 4, "worker": 0}),
        setup=SCHEDULED,
    ),
    **both(
        "a load with a schedule that does not fit: sequential",
        STEP,
        Op("load_damaged", {"kind": "schedule", "key": 4, "worker": 0}),
        setup=SEQUENTIAL,
    ),
    **both(
        "a load refused after the schedule was loaded",
        STEP,
        Op("load_damaged", {"kind": "group lr", "key": 4, "worker": 0}),
        setup=SEQUENTIAL,
    ),
    **ranks(
        "a rank interrupted while it waits: all-gather",
        STEP,
        Op("interrupt", {"victim": 1, "key": 4}),
        setup=GATHER,
    ),
    **ranks(
        "a rank interrupted while it waits: overlap",
        STEP,
        Op("interrupt", {"victim": 1, "key": 4}),
        setup=OVERLAP,
    ),
    **ranks(
        "a rank interrupted while it waits: all-reduce",
        STEP,
        Op("interrupt", {"victim": 1, "key": 4}),
    ),
    **both("a checkpoint while a parameter is frozen", *freeze_and_load("checkpoint")),
    **both("a state while a parameter is frozen", *freeze_and_load("state_dict")),
    **bad_steps("abc", None, -3, 2.5, 2**70),
    **both("a lazy parameter", Op("construct", {"params": "lazy"}), STEP),
    "a worker that is a float": Program(0, VIRTUAL, (Op("collect", {"worker": 1.0}), STEP)),
    "no worker": Program(0, VIRTUAL, (Op("collect", {"worker": None}), STEP)),
    **load_damaged("no estimate", setup=FEEDBACK),
    **load_damaged("manifest step", "group step", "momentum dtype"),
    **both("torch's default dtype and device", STEP, STEP, setup=ODD),
    **ranks("a rank that is late", STEP, PAUSE, STEP),
    **ranks("a rank that is late, overlap", STEP, PAUSE, STEP, setup=OVERLAP),
    **ranks(
        "buffers without a mean",
        Op("forward", {"key": 4, "rank": None}),
        Op("forward", {"key": 5, "rank": 1}),
        Op("average"),
        STEP,
    ),
    **ranks(
        "no_sync within no_sync",
        Op("step", {"key": 3, "passes": 3}),
        Op("step", {"key": 4, "passes": 3}),
        setup=OVERLAP,
    ),
    **both(
        "three workers' momenta for two",
        STEP,
        Op("change_world", {"workers": 2, "rule": "map", "key": 4}),
        setup=replace(RANKS, workers=3),
    ),
}
