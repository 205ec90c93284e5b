"""Cost of a step's arithmetic on a machine, in bytes a second."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from distlion.errors import InvalidArgumentError

READ_TO_ENCODE_BYTES = 8
"""Gradient and momentum of an element, both float32."""

MOMENTUM_BYTES = 12
"""Gradient and momentum read, momentum written."""

APPLY_BYTES = 8
"""Parameter read and written."""

STATE_BYTES = 24
"""State of an element, for a rule with state: its float32 value is read twice to encode, drafted,
and copied from the draft."""

COUNTED_STATE_BYTES = 24
"""State of each worker's element that is counted: its value is read, added up through a row of its
own, and written in the end."""

ORTHOGONALIZE_OPERATIONS = 24
"""Operations to orthogonalize an element, for each unit of a transformer's width: five iterations
on an m x n matrix, m <= n, take 5 (4 m^2 n + 2 m^3), which is 23.3 m for each element of a layer
with matrices of m x 3m, m x m and two of m x 4m."""

_RATE = "_per_s"


@dataclass(frozen=True)
class Machine:
    """Rates at which one worker processes the bytes of a step.

    Args:
        encode_bytes_per_s: Rate of gradient, momentum and vote, while encoding one bit.
        commit_bytes_per_s: Rate of gradient, momentum, parameter and reply, while committing.
        count_bytes_per_s: Rate of votes, while counting them.
        frame_bytes_per_s: Rate of chunks, while copying them and computing their checksums.
        write_frame_s: Seconds to write the header of a chunk.
        read_frame_s: Seconds to check the header of a chunk.
        vote_wire_s_per_byte: Seconds that the compute cores spend on the network for each byte of
            votes that a worker sends and the byte that it receives meanwhile. They are spent in
            the network stack and the process group's threads. 0 where other cores do that, as with
            a GPU.
        gradient_wire_s_per_byte: The same for gradients in an all-reduce, which are longer
            messages.
        bucket_s: Seconds that the compute cores spend on one more bucket of votes.
        operations_per_s: Rate of additions and multiplications in matrix products, for votes on
            orthogonalized directions.

    Raises:
        InvalidArgumentError: A value is out of range.
    """

    encode_bytes_per_s: float
    commit_bytes_per_s: float
    count_bytes_per_s: float
    frame_bytes_per_s: float
    write_frame_s: float
    read_frame_s: float
    vote_wire_s_per_byte: float = 0.0
    gradient_wire_s_per_byte: float = 0.0
    bucket_s: float = 0.0
    operations_per_s: float = 80e9

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            is_rate = field.name.endswith(_RATE)
            if not (math.ulp(0.0) if is_rate else 0.0) <= value < math.inf:
                expected = "a finite number above 0" if is_rate else "0 s or more"
                raise InvalidArgumentError(f"Machine({field.name}={value!r}): expected {expected}")

    def slowed(self, factor: float) -> Machine:
        """Return a machine that is ``factor`` times slower in everything, as on shared cores."""
        return Machine(
            **{
                field.name: getattr(self, field.name)
                * (1 / factor if field.name.endswith(_RATE) else factor)
                for field in fields(self)
            }
        )

    def encode_s(self, n_elements: float, vote_planes: int) -> float:
        """Return the seconds to encode votes; more bits take more arithmetic, up to 1.6 times.

        The factor was measured at p = 2, 4 and 8: benchmarks/results/kernels.md, 2026-11-21.
        """
        slowdown = 1.0 if vote_planes in (1, 16, 32) else min(1.6, 1.34 + 0.035 * vote_planes)
        n_bytes = n_elements * (READ_TO_ENCODE_BYTES + vote_planes / 8)
        return slowdown * n_bytes / self.encode_bytes_per_s

    def orthogonalize_s(self, n_elements: float, width: int) -> float:
        """Return the seconds to orthogonalize the directions of matrices of a width."""
        return ORTHOGONALIZE_OPERATIONS * width * n_elements / self.operations_per_s

    def commit_s(self, n_elements: float, n_own: float, reply_planes: int) -> float:
        """Return the seconds to move ``n_elements`` parameters and the momenta of ``n_own``."""
        n_bytes = n_elements * (APPLY_BYTES + reply_planes / 8) + n_own * MOMENTUM_BYTES
        return n_bytes / self.commit_bytes_per_s

    def pass_s(self, n_bytes: float) -> float:
        """Return the seconds of a plain pass over memory, such as a cast or an addition."""
        return n_bytes / self.commit_bytes_per_s


CPU = Machine(
    encode_bytes_per_s=11.3e9,
    commit_bytes_per_s=18e9,
    count_bytes_per_s=4e9,
    frame_bytes_per_s=2.5e9,
    write_frame_s=60e-6,
    read_frame_s=17e-6,
    vote_wire_s_per_byte=15e-9,
    gradient_wire_s_per_byte=12e-9,
    bucket_s=4e-3,
)
"""One thread of a 2.5 GHz Xeon with AVX-512: benchmarks/results/kernels.md, 2026-11-21.

``count_bytes_per_s`` is the rate of one-bit votes, the slowest; frames were timed in the same run.
The network's cost was measured for a worker with one core, in the network lab, and includes its
virtual links. At 1 Gbit/s it is 11 to 16 ns a byte of votes and 8 to 12 of gradients. Slower links
cost more, faster ones less (studies/lab-notebook.md, 2026-11-23). ``bucket_s`` is what one more
bucket takes from a core that computes; between two hosts with free cores it is 0.25 ms.
``operations_per_s`` is by processor time: matrices of 168 to 768 rows were orthogonalized at 79 to
91e9 a second in float32, those of 64 rows at 48e9 (2026-11-28).
"""

_SHEET_SHARE = 0.7
"""Share of a data sheet's rate that alternating reads and writes reach: assumed, not measured."""

_PRODUCT_SHARE = 0.4
"""Share of a data sheet's rate of dense bfloat16 products that batches of matrices reach: assumed,
not measured."""

_PCIE_BYTES_PER_S = 25e9
"""Rate that PCIe 4.0 x16 delivers of its 31.5 GB/s: assumed, not measured."""


def beside_host(memory_bytes_per_s: float, operations_per_s: float) -> Machine:
    """Return a worker whose GPU encodes and commits, and whose host frames, checks and counts.

    Args:
        memory_bytes_per_s: Rate of the GPU's memory in its data sheet.
        operations_per_s: Its rate of dense products of bfloat16 there.
    """
    rate = _SHEET_SHARE * memory_bytes_per_s
    return Machine(
        encode_bytes_per_s=rate,
        commit_bytes_per_s=rate,
        count_bytes_per_s=CPU.count_bytes_per_s,
        frame_bytes_per_s=1 / (1 / CPU.frame_bytes_per_s + 1 / _PCIE_BYTES_PER_S),
        write_frame_s=CPU.write_frame_s,
        read_frame_s=CPU.read_frame_s,
        operations_per_s=_PRODUCT_SHARE * operations_per_s,
    )


GPUS: dict[str, Machine] = {
    "a100": beside_host(2.039e12, 312e12),
    "h100": beside_host(3.35e12, 989e12),
    "h200": beside_host(4.8e12, 989e12),
    "l40s": beside_host(0.864e12, 362e12),
    "l4": beside_host(0.3e12, 121e12),
    "rtx4090": beside_host(1.008e12, 165e12),
}
"""GPUs by name, at the rates of NVIDIA's data sheets: A100 with 80 GB, and Hopper as SXM."""

GPU = GPUS["a100"]
"""The default GPU of a plan. The host is one thread of ``CPU``."""
