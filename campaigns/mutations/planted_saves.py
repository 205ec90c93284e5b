"""Bugs in saves, and in what else is done once: trained weights' names, slow disks, first steps."""

from __future__ import annotations

from planted import Mutation

WRAPPED = ("checkpoint/test_wrapped_models.py",)
BEHIND = ("distributed/test_checkpoints_behind.py",)
JOINING = ("crew/test_joining.py::test_a_newcomer_catches_up_while_the_others_train",)

SAVES = (
    Mutation(
        "a trained weight is known by its name alone",
        "checkpoint/contents.py",
        "if place >= 0 and _lies_inside(entry, placed[place]):",
        "if False:",
        WRAPPED,
    ),
    Mutation(
        "half of a weight in a model's state is taken for all of it",
        "checkpoint/contents.py",
        "called |= {param for param, marks in found.items() if bool(marks.all())}",
        "called |= found.keys()",
        WRAPPED,
    ),
    Mutation(
        "a part of the common point is taken from its beginning",
        "checkpoint/contents.py",
        "return like.as_strided(entry.shape, entry.stride(), like.storage_offset() + offset)",
        "return like.as_strided(entry.shape, entry.stride(), like.storage_offset())",
        WRAPPED,
    ),
    Mutation(
        "what a hook computes from trained weights is left out",
        "checkpoint/save.py",
        "shared.keys() & contents.untrained if only_trained",
        "shared.keys() - contents.replicated if only_trained",
        WRAPPED,
    ),
    Mutation(
        "what is sent to a peer that is held back and leaves waits for its limit",
        "csrc/endpoint.cpp",
        "            write(number);\n            ::epoll_ctl",
        "            ::epoll_ctl",
        ("wire/test_endpoint.py",),
    ),
    Mutation(
        "a checkpoint forgets whose work its optimizer went on from",
        "checkpoint/writer.py",
        "continues=sorted(self._loaded),",
        "",
        ("checkpoint/test_identity.py",),
    ),
    Mutation(
        "what a killed save left stays until another one succeeds",
        "checkpoint/writer.py",
        "                remove_leftovers(self._root, under_way=_under_way)\n",
        "                pass\n",
        (
            "checkpoint/test_crash.py::test_what_a_killed_save_left_is_gone_before_the_next_one_writes",
        ),
    ),
    Mutation(
        "connections that a save in the background has lost are used again",
        "peers/meetings.py",
        "if any(row[2] for row in told):",
        "if False:",
        BEHIND,
    ),
    Mutation(
        "a rank reconnects for checkpoints only where it has lost them itself",
        "peers/meetings.py",
        "if any(row[2] for row in told):",
        "if lost:",
        BEHIND,
    ),
    Mutation(
        "a save in the background waits no longer for slow disks than a handshake",
        "peers/connections.py",
        "timeout_s=timeouts.group_s)",
        "timeout_s=timeouts.connect_s)",
        BEHIND,
    ),
    Mutation(
        "a save in the background looks at the count of steps",
        "peers/ownership.py",
        "return ask(link, record, step=now)",
        "return ask(link, record, step=step())",
        BEHIND,
    ),
    Mutation(
        "a rank without memory for a load leaves the others waiting",
        "checkpoint/load.py",
        "_, problem = attempt(lambda: stack.enter_context(undo))",
        "problem = stack.enter_context(undo)",
        BEHIND,
    ),
    Mutation(
        "swaps of some members count as transfers of all",
        "wire/gloo.py",
        "what=what, is_common=False)",
        "what=what)",
        ("wire/test_gloo.py", "wire/test_transports.py"),
    ),
    Mutation(
        "all members of an epoch look at their gradients, and wait for a newcomer's look",
        "peers/session.py",
        "            self.gradients.steps_left = 0\n",
        "            pass\n",
        JOINING,
    ),
    Mutation(
        "numbers of numpy stay in records",
        "numpy_numbers.py",
        "object.__setattr__(record, name, as_python(getattr(record, name)))",
        "as_python(getattr(record, name))",
        ("step/test_records.py",),
    ),
)
