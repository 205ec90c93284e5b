"""The key-value store through which a group meets, and later agrees on who failed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simulation.network import Machine, Network

STORE_TIMEOUT_S = 300.0


class TCPStore:
    """One worker's connection to the store; its name is what the package looks at.

    Args:
        network: Where it is.
        machine: The worker.
        host: The worker that keeps it; None for an agent, which never fails.
    """

    def __init__(self, network: Network, machine: Machine, host: Machine | None) -> None:
        self._network, self._machine, self._host = network, machine, host

    def check(self, keys: Sequence[str]) -> bool:
        found = bool(self._ask(lambda data: all(key in data for key in keys)))
        self._tell(f"finds {', '.join(keys)}: {found}")
        return found

    def set(self, key: str, value: str) -> None:
        self._tell(f"sets {key} = {value!r}")
        self._ask(lambda data: data.__setitem__(key, value.encode()))

    def get(self, key: str) -> bytes:
        found: bytes = self._ask(lambda data: data[key])
        return found

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        def change(data: dict[str, bytes]) -> bytes:
            if data.get(key, b"") == expected.encode():
                data[key] = value.encode()
            return data[key]

        found: bytes = self._ask(change)
        return found

    def delete_key(self, key: str) -> bool:
        return bool(self._ask(lambda data: data.pop(key, None)))

    def _tell(self, text: str) -> None:
        self._network.kernel.tell(self._machine, f"store: {text}")

    def meet(self, timeout_s: float) -> None:
        """Ask for nothing, to see whether the store is there.

        Raises:
            RuntimeError: It is not, or does not answer in time.
        """
        self._ask(lambda data: None, timeout_s)

    def _ask(
        self, action: Callable[[dict[str, bytes]], Any], timeout_s: float = STORE_TIMEOUT_S
    ) -> Any:
        """Ask and wait for the answer, as long as the host neither answers nor closes.

        Raises:
            RuntimeError: The host is gone, or silent for very long.
        """
        kernel, network, host = self._network.kernel, self._network, self._host
        deadline_s = kernel.now_s + timeout_s
        kernel.sleep(network.draw_store_delay_s())
        if host is not None and host is not self._machine:
            silent_until_s = max(
                host.stopped_until_s,
                network.silent_until_s(self._machine, host, is_store=True),
                network.silent_until_s(host, self._machine, is_store=True),
            )
            if silent_until_s > kernel.now_s:
                self._sleep_unless_gone(min(silent_until_s, deadline_s))
                if silent_until_s > deadline_s:
                    raise RuntimeError("Socket Timeout")
            if host.is_gone:
                self._tell("is gone")
                raise RuntimeError("failed to recv, got 0 bytes: connection was closed")
        answer = action(network.store)
        kernel.sleep(network.draw_store_delay_s())
        return answer

    def _sleep_unless_gone(self, until_s: float) -> None:
        kernel, host = self._network.kernel, self._host
        assert host is not None
        while kernel.now_s < until_s and not host.is_gone:
            kernel.sleep(min(0.05, until_s - kernel.now_s))


class AgentStore(TCPStore):
    """A store that no worker keeps."""
