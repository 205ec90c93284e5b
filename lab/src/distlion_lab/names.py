"""Names that users type, and suggestions for unknown ones."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

# A longer list is searched, not read.
_MOST_LISTED = 8
_MOST_MEANT = 2


def suggest(name: str, known: Iterable[str], *, all_in: str) -> str:
    """Suggest the known name that was probably meant, and a command that lists all names.

    Args:
        name: The unknown name.
        known: All names of its kind.
        all_in: Command that lists them, such as ``distlion train --help``.

    Returns:
        ``did you mean majority? 'distlion train --help' lists all``. If names hold it between
        hyphens, only these are proposed. If no name is near but few are known, the text lists them.
    """
    names = list(dict.fromkeys(known))
    folded = {each.lower(): each for each in names}
    given = name.strip().lower()
    holding = [each for each in folded if given in each.split("-")]
    near = (holding or difflib.get_close_matches(given, folded, n=_MOST_MEANT))[:_MOST_MEANT]
    rest = f"'{all_in}' lists all"
    if near:
        return f"did you mean {' or '.join(folded[each] for each in near)}? {rest}"
    if len(names) <= _MOST_LISTED:
        return f"expected one of {', '.join(names)}"
    return rest


def name_rule(settings: dict[str, Any]) -> str:
    """Name the rule of a record's settings, with the steps between votes if they are set."""
    rule, every = str(settings["rule"]), settings.get("every")
    if every is None:
        return rule
    late = f", taken {settings['delay']} later" if settings.get("delay") else ""
    return f"{rule} every {every} steps{late}"


def name_runs(settings: Sequence[dict[str, Any]]) -> list[str]:
    """Name runs side by side by their rules; runs of one rule by unlike learning rates, too."""
    names = [name_rule(each) for each in settings]
    if len(set(names)) == len(names) or len({each["lr"] for each in settings}) == 1:
        return names
    return [f"{name}, lr {each['lr']:g}" for name, each in zip(names, settings, strict=True)]
