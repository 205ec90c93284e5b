"""All variants in which kernels are launched, and their compilation without a device."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from distlion.kernels.contract import EXP_AVG_DTYPES, PARAM_DTYPES
from distlion.kernels.gpu import checks, commit, count, encode
from distlion.kernels.gpu.launch import OPTIONS
from distlion.kernels.gpu.table import KINDS

POINTERS = {
    "table": "*i64",
    "numbers": "*fp32",
    "tiles": "*i32",
    "out": "*i32",
    "finite": "*i8",
    "reply": "*i32",
    "voters": "*i32",
    "votes": "*i32",
    "totals": "*i64",
    "rows": "*u8",
    "powers": "*u32",
    "starts": "*i64",
    "sums": "*i64",
}
"""Pointer types of kernel arguments, aligned to 16 bytes, as torch allocates."""
UNALIGNED = {"rows"}
NUMBERS = ("n_workers", "worker_stride", "row_stride", "n_bytes", "n_elements")


@dataclass(frozen=True)
class Variant:
    """A kernel with its constants.

    Attributes:
        name: Op and dtypes.
        kernel: The compiled form of a kernel of this package.
        constants: Its constexpr arguments.
        types: Types of pointers that differ from ``POINTERS``.
        tile: Elements that one program works on; 0 where this has no meaning.
    """

    name: str
    kernel: Any
    constants: dict[str, Any]
    types: dict[str, str]
    tile: int = 4096

    def compile(self, capability: int, *, is_exact: bool = True) -> Any:
        """Compile for devices of a compute capability (90 is sm_90), as a launch would.

        With ``is_exact=False``, products and sums are fused, so that tests can check for it.
        """
        signature, attributes = {}, {}
        for place, name in enumerate(self.kernel.arg_names):
            if name in self.constants:
                signature[name] = "constexpr"
            elif name in NUMBERS:
                signature[name] = "i64"
            else:
                signature[name] = self.types.get(name, POINTERS.get(name, ""))
                if name not in UNALIGNED:
                    attributes[(place,)] = [["tt.divisibility", 16]]
        source = ASTSource(
            fn=self.kernel, signature=signature, constexprs=self.constants, attrs=attributes
        )
        return triton.compile(
            source,
            target=GPUTarget("cuda", capability, 32),
            options=OPTIONS | ({} if is_exact else {"enable_fp_fusion": True}),
        )


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _list_kinds() -> Iterator[tuple[str, dict[str, int]]]:
    for param in PARAM_DTYPES:
        for exp_avg in EXP_AVG_DTYPES:
            kinds = {"KIND": KINDS[param], "M_KIND": KINDS[exp_avg]}
            yield f"{_name(param)}, momentum {_name(exp_avg)}", kinds


VOTES = {
    "check": (encode.NONE, 1, False, 0),
    "signs": (encode.SIGNS, 1, False, 0),
    "ternary": (encode.TERNARY, 2, False, 0),
    "pairs": (encode.PAIRS, 2, False, 0),
    "levels of 4 bits, l1": (encode.LEVELS, 4, True, 0),
    "levels of 4 bits, linf": (encode.LEVELS, 4, False, 0),
    "directions in float32": (encode.DIRECTIONS, 32, False, 0),
    "directions in bfloat16": (encode.DIRECTIONS, 16, False, 1),
}
MOVES = {
    "commit signs": (commit.SIGN, 1),
    "commit ternary": (commit.TERNARY, 2),
    "commit counts of 3 bits": (commit.COUNT, 3),
    "update momentum": (commit.NO_REPLY, 1),
    "step alone": (commit.OWN, 1),
}
COUNTS = {
    "count signs": (encode.LEVELS, 1, 0, commit.SIGN, 1),
    "count signs, 0 on a tie": (encode.LEVELS, 1, 0, commit.TERNARY, 2),
    "count ternary": (encode.TERNARY, 2, 0, commit.TERNARY, 2),
    "count pairs": (encode.PAIRS, 2, 0, commit.SIGN, 1),
    "count pairs, else 0": (encode.PAIRS, 2, 0, commit.TERNARY, 2),
    "count ones": (encode.LEVELS, 1, 0, commit.COUNT, 3),
    "count levels of 4 bits": (encode.LEVELS, 4, 0, commit.SIGN, 1),
    "sum directions in float32": (encode.DIRECTIONS, 32, 0, commit.TERNARY, 2),
    "sum directions in bfloat16": (encode.DIRECTIONS, 16, 1, commit.TERNARY, 2),
}


def list_variants() -> Iterator[Variant]:
    """List all variants, with one number of planes for formats that have several."""
    for kind_name, kind in _list_kinds():
        for name, (vote, planes, is_l1, direction) in VOTES.items():
            votes = {"VOTE": vote.value, "PLANES": planes, "L1": is_l1, "DIRECTION": direction}
            types = {"out": _pointer(direction)} if vote is encode.DIRECTIONS else {}
            yield Variant(f"encode {name}, {kind_name}", encode.encode_kernel, votes | kind, types)
        for name, (reply, planes) in MOVES.items():
            for is_random in (False, True) if kind["KIND"] == 1 and reply.value != 4 else (False,):
                moves = {"FORMAT": reply.value, "PLANES": planes, "STOCHASTIC": is_random}
                rounding = ", stochastic rounding" if is_random else ""
                yield Variant(
                    f"{name}, {kind_name}{rounding}", commit.commit_kernel, moves | kind, {}
                )
    for (name, count_of), is_weighted in itertools.product(COUNTS.items(), (False, True)):
        vote, planes, direction, reply, reply_planes = count_of
        is_linear = vote is encode.DIRECTIONS
        constants = {
            "VOTE": vote.value,
            "PLANES": planes,
            "DIRECTION": direction,
            "REPLY": reply.value,
            "REPLY_PLANES": reply_planes,
            "WEIGHTED": is_weighted,
        }
        types = {"votes": _pointer(direction)} if is_linear else {}
        weights = ", weighted" if is_weighted else ""
        yield Variant(f"{name}{weights}", count.count_kernel, constants, types, 0)
    for is_linear in (False, True):
        constants = {"PLANES": 16, "LINEAR": is_linear}
        yield Variant(f"blank, linear={is_linear}", encode.blank_kernel, constants, {}, 0)
    for size in (1, 2, 4):
        yield Variant(f"digest of {size} bytes", checks.digest_kernel, {"BYTES": size}, {})
    for dtype, elements in zip(PARAM_DTYPES, ("*fp32", "*u16", "*fp16"), strict=True):
        types = {"elements": elements, "out": "*fp64"}
        constants = {"KIND": KINDS[dtype]}
        yield Variant(f"square sums, {_name(dtype)}", checks.square_sums_kernel, constants, types)


def _pointer(direction: int) -> str:
    return "*u16" if direction else "*fp32"
