"""Whole runs in the lab, beside what is computed and beside the runs of virtual workers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import target_path  # noqa: F401
from archive import Records
from arrivals import SHARES, find_pace, find_targets, read_blocks
from claims_made import DECIDING_SHARE
from contest import DDP, SETTINGS, make_cell, read_local
from crossing import cross
from runs import RunConfig

from distlion_lab.report.document import Block, Heading, Paragraph, Table

_NONE = "-"
_OF_PLACE = ("cpu", "cpu_capability", "threads")
"""Fields of a record on which bits depend, besides the version of torch."""
Found = Mapping[str, Any]
"""The record of a whole run."""


def lay_out_whole(records: Records, link_titles: Mapping[str, str]) -> Iterator[Block]:
    """Yield the table of all whole runs; nothing where there are none."""
    paths = sorted(records.folder.glob("whole_*.json"))
    everything = [json.loads(path.read_text()) for path in paths]
    if not everything:
        return
    yield Heading("Whole runs in the lab")
    yield Paragraph(
        "All 8 hosts share the cores of one machine. Computing takes longer there than the c of "
        "the tables above, for every method, so ratios of whole runs are smaller than computed "
        "ones. Targets are the losses of DDP's virtual run with the same seed; the ratio is that "
        "of DDP's whole run on the same link, with the same seed, at the target after "
        f"{DECIDING_SHARE:.0%} of DDP's steps. The last columns compare with the virtual run of "
        "the same configuration: its loss, and whether all parameters are bitwise identical. They "
        "are compared only where version of torch and CPU are the same. DDP's virtual run is one "
        "worker with all examples, so its bits differ. DiLoCo's may differ too: hosts and virtual "
        "workers add floats in different orders. Counts of votes do not depend on order."
    )
    head = ["method", "link", "seed", "seconds", "computed"]
    head += [f"to the loss after {share:.0%}" for share in SHARES]
    head += ["DDP takes", "last test loss", "virtual", "identical"]
    yield Table(head, [_describe(found, everything, records, link_titles) for found in everything])
    for found in everything:
        if "note" in found:
            yield Paragraph(f"`{found['config']['method']}`: {found['note']}")


def _describe(
    found: Found, everything: Sequence[Found], records: Records, link_titles: Mapping[str, str]
) -> list[str]:
    config, link = found["config"], found["link"]
    blocks = read_blocks(records.folder, found["task"], link)
    pace = find_pace(config["method"], config["steps"], blocks)
    steps, seconds, loss = found["test_curve"][-1]
    is_local = read_local(config["method"]) is not None
    return [
        config["method"] + " (local steps)" * is_local + ", long" * _is_long(found),
        link_titles[link],
        str(config["seed"]),
        f"{seconds:.1f}",
        "missing" if pace is None else f"{pace.seconds(steps):.1f}",
        *_describe_targets(found, records),
        _compare_with_ddp(found, everything, records),
        f"{loss:.4f}",
        *_compare_with_virtual(found, records),
    ]


def _is_long(found: Found) -> bool:
    steps: int = found["config"]["steps"]
    return steps > SETTINGS[found["task"]].steps


def seconds_to(found: Found, share: float, records: Records) -> float | None:
    """Return the seconds to DDP's loss after a share of its steps, on straight lines.

    Returns:
        None where the run does not get there.

    Raises:
        KeyError: DDP's virtual runs are not all there.
    """
    target = find_targets(found["task"], records.read)[share][found["config"]["seed"]]
    rows = [(seconds, loss) for _, seconds, loss in found["test_curve"]]
    return cross(rows, "text", target)


def _describe_targets(found: Found, records: Records) -> list[str]:
    if not find_targets(found["task"], records.read):
        return [_NONE for _ in SHARES]
    seconds = [seconds_to(found, share, records) for share in SHARES]
    return ["not reached" if each is None else f"{each:.1f}" for each in seconds]


def _compare_with_ddp(found: Found, everything: Sequence[Found], records: Records) -> str:
    """Describe how many times as long DDP's whole run takes to the target that decides."""
    place = _name_place(found)
    alike = [
        each
        for each in everything
        if each["config"]["method"] == DDP and _name_place(each) == place and not _is_long(each)
    ]
    if not alike or not find_targets(found["task"], records.read):
        return _NONE
    own, ddp = (seconds_to(each, DECIDING_SHARE, records) for each in (found, alike[0]))
    return _NONE if own is None or ddp is None else f"{ddp / own:.1f}x"


def _name_place(found: Found) -> tuple[str, str, int]:
    return found["task"], found["link"], found["config"]["seed"]


def _compare_with_virtual(found: Found, records: Records) -> tuple[str, str]:
    """Return the last loss of the virtual run, and whether its parameters are the same."""
    config = RunConfig(**found["config"])
    workers = make_cell(config.task, config.method).workers
    virtual = records.read(RunConfig(**asdict(config) | {"workers": workers}).name)
    if virtual is None or not virtual.get("test_curve"):
        return _NONE, _NONE
    loss = f"{virtual['test_curve'][-1][1]:.4f}"
    digest = virtual.get("parameters_sha256")
    if digest is None or workers != config.workers or not _is_same_place(found, virtual):
        return loss, _NONE
    return loss, "yes" if digest == found["parameters_sha256"] else "no"


def _is_same_place(found: Found, other: Found) -> bool:
    places = [
        [each.get(field) for field in _OF_PLACE] + [each.get("versions", {}).get("torch")]
        for each in (found, other)
    ]
    return places[0] == places[1]
