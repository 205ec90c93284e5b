"""Instructions, registers and widths of every Triton kernel, from code compiled without a device.

    python benchmarks/gpu_instructions.py [--capability 80 90] [--records FILE]

Writes benchmarks/results/gpu_instructions.json and .md. Compiling is exact: the records depend on
the versions of Triton and of its ptxas only, not on the machine.

Instructions an element are those that one thread issues on the shortest way through a full tile,
all branches for rare cases left out, over the elements of the tile that it has.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import triton
from gpu_variants import Variant, list_variants

from distlion.kernels.gpu.launch import N_WARPS

RESULTS = Path(__file__).parent / "results"
BINARIES = Path(triton.__file__).parent / "backends/nvidia/bin"
INEXACT = (r"\bfma\.", r"\.ftz", r"\.approx", r"\bdiv\.full")
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(.*?);")
LABEL = re.compile(r"^(\.L_x_\d+):")
NO_WAY = (1 << 40, 0)
TARGET = re.compile(r"(\.L_x_\d+)")


@dataclass(frozen=True)
class Record:
    """What the code of one variant is.

    Attributes:
        name, capability: Which.
        registers, spilled_bytes, shared_bytes: Of a thread, a thread, a program.
        loads_16, stores_16: Instructions that move 16 bytes of global memory.
        inexact: Instructions of PTX that would round otherwise; none may be there.
        per_element: Instructions an element; 0 where there is no tile.
    """

    name: str
    capability: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    loads_16: int
    stores_16: int
    inexact: tuple[str, ...]
    per_element: float


def run_tool(name: str, *arguments: str) -> str:
    command = [str(BINARIES / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def measure(variant: Variant, capability: int) -> Record:
    """Compile a variant and look at it."""
    compiled = variant.compile(capability)
    ptx = compiled.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = run_tool("cuobjdump", "-res-usage", file.name)
        blocks = split_blocks(run_tool("nvdisasm", "-c", file.name))
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", usage)
    assert found, usage
    registers, stack, shared = map(int, found.groups())
    instructions = [instruction for block in blocks for instruction in block.instructions]
    issued = count_issued(blocks) if variant.tile else 0
    return Record(
        variant.name,
        capability,
        registers,
        stack,
        shared,
        sum(is_wide(instruction, "LDG") for instruction in instructions),
        sum(is_wide(instruction, "STG") for instruction in instructions),
        tuple(pattern for pattern in INEXACT if re.search(pattern, ptx)),
        round(issued * 32 * N_WARPS / variant.tile, 1) if variant.tile else 0.0,
    )


@dataclass
class Block:
    """Instructions that are issued one after the other, and where control may go then."""

    instructions: list[str]
    following: list[int]

    @property
    def is_end(self) -> bool:
        """Whether the program may end here."""
        return bool(self.instructions) and name_operation(self.instructions[-1]) == "EXIT"


def is_wide(instruction: str, kind: str) -> bool:
    operation = name_operation(instruction)
    return operation.startswith(kind) and ".128" in operation


def name_operation(instruction: str) -> str:
    """Name the operation, without the predicate before it."""
    return re.sub(r"^@!?U?P\w+\s+", "", instruction).split()[0]


def split_blocks(listing: str) -> list[Block]:
    """Cut a listing of nvdisasm into basic blocks."""
    texts: list[list[str]] = [[]]
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if label := LABEL.match(line):
            if texts[-1]:
                texts.append([])
            labels[label[1]] = len(texts) - 1
        elif instruction := INSTRUCTION.match(line):
            texts[-1].append(instruction[1])
            if name_operation(instruction[1]).split(".")[0] in ("BRA", "EXIT", "RET", "CALL"):
                texts.append([])
    return [Block(text, list(_follow(text, index, labels))) for index, text in enumerate(texts)]


def _follow(text: Sequence[str], index: int, labels: dict[str, int]) -> Iterator[int]:
    last = text[-1] if text else ""
    operation = name_operation(last).split(".")[0] if text else ""
    if operation == "BRA":
        target = TARGET.search(last)
        assert target, last
        yield labels[target[1]]
    # A call returns to what comes after it; what is called is not counted.
    if operation not in ("BRA", "EXIT", "RET") or last.startswith("@"):
        yield index + 1


def count_issued(blocks: Sequence[Block]) -> int:
    """Count the instructions on the shortest of the ways that move most of 16 bytes at once.

    These are those through the whole of a full tile. Loops are not gone through again.
    """

    @functools.cache
    def go_on(index: int) -> tuple[int, int]:
        """Return minus the wide instructions from a block on, and all of them."""
        if index >= len(blocks) or index in entered:
            return NO_WAY
        block = blocks[index]
        wide = sum(is_wide(one, kind) for one in block.instructions for kind in ("LDG", "STG"))
        entered.add(index)
        ways = [go_on(one) for one in block.following]
        if block.is_end:
            ways.append((0, 0))
        onward = min(ways, default=NO_WAY)
        entered.remove(index)
        return onward[0] - wide, onward[1] + len(block.instructions)

    entered: set[int] = set()
    return go_on(0)[1]


def tabulate(records: Sequence[Record]) -> str:
    """Write a table in Markdown: one line a variant, capabilities side by side."""
    capabilities = sorted({record.capability for record in records})
    by_name: dict[str, dict[int, Record]] = {}
    for record in records:
        by_name.setdefault(record.name, {})[record.capability] = record
    heads = "".join(f" sm_{one}: instructions an element | registers |" for one in capabilities)
    lines = [f"| kernel |{heads}", "|---|" + "---:|---:|" * len(capabilities)]
    for name, found in by_name.items():
        cells = [
            f" {found[one].per_element or '-'} | {found[one].registers} |" for one in capabilities
        ]
        lines.append(f"| {name} |{''.join(cells)}")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--capability", type=int, nargs="+", default=[80, 90])
    parser.add_argument("--records", type=Path, default=RESULTS / "gpu_instructions.json")
    arguments = parser.parse_args()
    variants = list(list_variants())
    records = [measure(one, capability) for capability in arguments.capability for one in variants]
    result = {
        "triton": triton.__version__,
        "ptxas": run_tool("ptxas", "--version").strip().splitlines()[-2],
        "records": [asdict(record) for record in records],
    }
    arguments.records.write_text(json.dumps(result, indent=1) + "\n")
    table = f"Triton {triton.__version__}, {N_WARPS} warps a program.\n\n{tabulate(records)}"
    arguments.records.with_suffix(".md").write_text(table)
    print(table)


if __name__ == "__main__":
    main()
