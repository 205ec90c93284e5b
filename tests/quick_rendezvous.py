"""Keep torch's rendezvous from spending most of the time of tests that form crews.

For each of its events it tells a recorder, which does nothing, the name of the calling method. It
finds the name by ``inspect.stack()``, which looks at every imported module for each frame: 0.1 s of
a processor an event in a process with all that tests import, and joining a crew has dozens.
"""

from __future__ import annotations

import sys


def install() -> None:
    """Let torch find the names of its methods in the frames alone."""
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous

    dynamic_rendezvous.get_method_name = _name_caller


def _name_caller(depth: int = 2) -> str:
    return sys._getframe(depth).f_code.co_name
