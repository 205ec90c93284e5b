"""What the kernels for GPUs are compiled to: exact, wide, not too many instructions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from backends import INTERPRETS
from programs import BENCHMARKS, imported_modules

if INTERPRETS:
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)
triton = pytest.importorskip("triton", minversion="3.7")  # older ones make other code
launch = pytest.importorskip("distlion.kernels.gpu.launch")

with imported_modules(BENCHMARKS, "gpu_variants") as (variants,):
    VARIANTS = list(variants.list_variants())
QUICK = ("encode signs, float32, momentum float32", "commit signs, bfloat16, momentum bfloat16")
MOST_INSTRUCTIONS = 26
# Of 32 elements that a thread works on: a fourth program on each multiprocessor is worth more.
MOST_SPILLED_BYTES = 216
# Two sign planes with coins. Not yet timed on a device.
MOST_SPILLED_BYTES_OF_PAIRS = 376
# Parameters and momenta that are both rounded by integers: see studies/kernels.md.
ROUNDED_TWICE = {"bfloat16, momentum bfloat16": 33}


def is_quick(case: tuple[Any, int]) -> bool:
    variant, capability = case
    return variant.name in QUICK and capability == 90


CASES = [
    pytest.param(
        variant,
        capability,
        id=f"{variant.name}, sm_{capability}",
        marks=() if is_quick((variant, capability)) else pytest.mark.slow,
    )
    for variant in VARIANTS
    for capability in (80, 90)
]


@pytest.fixture(scope="module")
def program() -> Iterator[ModuleType]:
    with imported_modules(BENCHMARKS, "gpu_instructions") as (module,):
        yield module


@pytest.fixture(scope="module")
def records(program: ModuleType) -> dict[tuple[str, int], Any]:
    """Those that are checked in."""
    result = json.loads((BENCHMARKS / "results/gpu_instructions.json").read_text())
    assert result["triton"] == triton.__version__
    return {(one["name"], one["capability"]): one for one in result["records"]}


def test_every_variant_has_a_name_of_its_own() -> None:
    assert len({variant.name for variant in VARIANTS}) == len(VARIANTS) > 80
    assert set(QUICK) <= {variant.name for variant in VARIANTS}


@pytest.mark.parametrize(("variant", "capability"), CASES)
def test_code_is_exact_and_wide_and_as_recorded(
    variant: Any, capability: int, program: ModuleType, records: dict[tuple[str, int], Any]
) -> None:
    record = program.measure(variant, capability)
    assert record.inexact == ()
    assert record.registers <= launch.MOST_REGISTERS
    has_pairs = variant.name.startswith("encode pairs")
    most_spilled = MOST_SPILLED_BYTES_OF_PAIRS if has_pairs else MOST_SPILLED_BYTES
    assert record.spilled_bytes <= most_spilled
    assert json.loads(json.dumps(vars(record))) == records[variant.name, capability]
    kind, moves = (variant.constants.get(name) for name in ("KIND", "M_KIND"))
    if moves is None:
        return
    # Bytes of a thread's part of a tile, 16 at a time.
    size, momentum_size = (4 if one == 0 else 2 for one in (kind, moves))
    n_elements = variant.tile // (32 * program.N_WARPS)
    grads, momenta = (n_elements * one // 16 for one in (size, momentum_size))
    constants = variant.constants
    if "VOTE" in constants:
        loads, stores = grads + momenta, 0
        if constants["VOTE"] == 4:
            stores = n_elements * (2 if constants["DIRECTION"] else 4) // 16
    else:
        moves_param = constants["FORMAT"] != 4
        loads = grads * moves_param + grads + momenta
        stores = grads * moves_param + momenta
    assert (record.loads_16, record.stores_16) == (loads, stores)


@pytest.mark.parametrize("op", ["encode signs", "commit signs"])
def test_a_vote_takes_no_more_instructions_than_memory_takes_time(
    op: str, records: dict[tuple[str, int], Any]
) -> None:
    found = {
        name.removeprefix(f"{op}, "): record["per_element"]
        for (name, capability), record in records.items()
        if name.startswith(f"{op}, ") and "stochastic" not in name and capability == 90
    }
    assert len(found) == 6
    for kinds, per_element in found.items():
        most = ROUNDED_TWICE.get(kinds, MOST_INSTRUCTIONS) if "commit" in op else MOST_INSTRUCTIONS
        assert 0 < per_element <= most, kinds


def test_a_fused_product_is_noticed(program: ModuleType) -> None:
    """What `enable_fp_fusion=False` is for."""
    variant = next(one for one in VARIANTS if one.name == QUICK[0])
    compiled = variant.compile(90, is_exact=False)
    assert any(program.re.search(pattern, compiled.asm["ptx"]) for pattern in program.INEXACT)
