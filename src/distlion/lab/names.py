"""Names that users type, and what to say where nothing has such a name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

# More than these, and a reader searches a list instead of reading it.
_MOST_LISTED = 8
_MOST_MEANT = 2


def suggest(name: str, known: Iterable[str], *, all_in: str) -> str:
    """Say which known name was probably meant, and where all of them are listed.

    Args:
        name: The one that is unknown.
        known: All names of its kind.
        all_in: What lists them, such as ``distlion train --help``.

    Returns:
        ``did you mean majority? 'distlion train --help' lists all``. Where nothing is near, a few
        names are listed.
    """
    names = list(dict.fromkeys(known))
    folded = {each.lower(): each for each in names}
    near = difflib.get_close_matches(name.strip().lower(), folded, n=_MOST_MEANT)
    rest = f"'{all_in}' lists all"
    if near:
        return f"did you mean {' or '.join(folded[each] for each in near)}? {rest}"
    if len(names) <= _MOST_LISTED:
        return f"expected one of {', '.join(names)}"
    return rest


def name_rule(settings: dict[str, Any]) -> str:
    """Name the rule of a record's settings, and the steps from vote to vote where it says so."""
    rule, every = str(settings["rule"]), settings.get("every")
    if every is None:
        return rule
    late = f", taken {settings['delay']} later" if settings.get("delay") else ""
    return f"{rule} every {every} steps{late}"
