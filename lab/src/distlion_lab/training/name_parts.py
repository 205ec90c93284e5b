"""Parts of a method's name after its base: mask, betas, and averaging of momenta."""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch

from distlion.step import MomentumSync

CAUTIOUS, ORTHOGONAL = "-cautious", "-orthogonal"
SYNC = re.compile(r"(?P<stem>.+)-sync-(?P<every>\d+)(?P<where>-attention)?(?P<dtype>-bf16)?")
"""Names of methods that average momenta."""
Betas = tuple[float, float]

# A third digit is never 0: each pair of betas has one name.
_DIGITS = r"\d\d[1-9]?"
_BETAS = re.compile(rf"(?P<base>.+)-betas-(?P<first>{_DIGITS})-(?P<second>{_DIGITS})")
_WHERE: dict[str | None, tuple[str | tuple[str, ...], str]] = {
    None: ("all", ""),
    # As transformers call them.
    "-attention": (("*attention*", "*attn*"), ", those of the attention"),
}
_DTYPES = {None: torch.float32, "-bf16": torch.bfloat16}


def split_betas(name: str) -> tuple[str, Betas | None]:
    """Take betas from the end of a name: ``majority-betas-90-95`` has (0.9, 0.95).

    The numbers are two or three digits after the decimal point.

    Returns:
        The rest of the name, and the betas; None where the name has none.
    """
    match = _BETAS.fullmatch(name)
    if match is None:
        return name, None
    return match["base"], (float(f"0.{match['first']}"), float(f"0.{match['second']}"))


def split_name(name: str) -> tuple[str, bool, Betas | None]:
    """Split ``majority-cautious-betas-90-95`` into its base, a flag for the mask, and betas."""
    rest, betas = split_betas(name)
    base = rest.removesuffix(CAUTIOUS)
    return base, base != rest, betas


def describe_variant(
    description: str, cautious: bool, betas: Betas | None, *, orthogonal: bool = False
) -> str:
    """Add the mask, orthogonalization and betas of a name to the description of its base."""
    if orthogonal:
        description += ", hidden matrices orthogonalized (arXiv:2605.16311), the rest cautious"
    if cautious:
        description += ", cautious (arXiv:2411.16085)"
    return description if betas is None else f"{description}, betas {betas}"


def describe_betas(name: str, *, of: Sequence[str]) -> str:
    """Return the format of betas, for the error of an unknown name that has some; or "".

    Args:
        name: The unknown name.
        of: Names, besides rules, that may have betas.
    """
    if "-betas-" not in name:
        return ""
    return (
        "; betas are digits behind the point, two or three of them, 90-95 for (0.9, 0.95); they "
        f"stand behind a rule, {' or '.join(of)} and before -sync-K"
    )


def describe_steps(name: str, *, of: Sequence[str]) -> str:
    """Return the names with local steps, for the error of an unknown name that has some; or "".

    Args:
        name: The unknown name.
        of: Patterns of the names with local steps.
    """
    if "diloco" not in name and "-every-" not in name:
        return ""
    return (
        f"; methods with local steps are {' and '.join(of)}; RULE is a rule for "
        "deltas and K a number of steps, 1 or more"
    )


def read_sync(match: re.Match[str]) -> tuple[MomentumSync, str]:
    """Return the ``MomentumSync`` of a match of ``SYNC``, and a phrase for the description.

    Raises:
        InvalidArgumentError: Momenta cannot be averaged in this way.
    """
    select, where = _WHERE[match["where"]]
    dtype = _DTYPES[match["dtype"]]
    sync = MomentumSync(every=int(match["every"]), select=select, dtype=dtype)
    how = f"; momenta averaged every {match['every']} steps{where}"
    if match["dtype"]:
        how += f", as {match['dtype'].removeprefix('-')}"
    return sync, how
