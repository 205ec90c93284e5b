"""One worker's end of TCP connections. Use distlion.wire.sockets."""

from collections.abc import Sequence


class Endpoint:
    """Connections to all other workers, and transfers over them."""

    def __init__(self, rank: int, sockets: Sequence[int], most_early_bytes: int) -> None: ...

    def begin(self, stream: int, sends: Sequence[tuple[int, int, int]], receives: Sequence[tuple[int, int, int]]) -> int:
        """
        Begin to send and receive (peer, address, bytes); return the transfer's number.
        """

    def wait(self, transfer: int, limit_s: float) -> bool:
        """Wait; return whether the transfer has ended."""

    def is_under_way(self, transfer: int) -> bool: ...

    def count_waiting(self) -> int:
        """Threads that wait now."""

    def cancel(self) -> None:
        """Close all connections; what is under way fails."""

    def abandon(self) -> None:
        """Close a fork's copies of the connections."""
