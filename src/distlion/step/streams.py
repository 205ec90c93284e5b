"""CUDA streams for votes that are sent on one thread while backward runs on another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


class VotingStreams:
    """The streams on which gradients were launched, and the streams for encoding votes.

    When a hook reports a gradient, it is launched on the current stream but not computed yet. The
    votes of its bucket must wait for it, and backward must not wait for the votes. So votes are
    encoded on a stream of their own, after events of those streams.

    All tensors read there are held until the host has waited for them: gradients by their marks,
    copies by their segments. Their memory cannot be reused before that, so that nothing needs
    ``record_stream``, which would keep it longer.

    Args:
        devices: The device of each bucket.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices
        cuda = {device for device in devices if device.type == "cuda"}
        self._own = {device: torch.cuda.Stream(device) for device in cuda}  # type: ignore[no-untyped-call]
        self.forget()

    def forget(self) -> None:
        """Begin another step."""
        self._seen: list[set[torch.cuda.Stream]] = [set() for _ in self._devices]

    def note(self, bucket: int) -> None:
        """Note that a gradient of a bucket was launched on the current stream of its device."""
        device = self._devices[bucket]
        if device.type == "cuda":
            self._seen[bucket].add(torch.cuda.current_stream(device))

    def mark(self, bucket: int) -> list[torch.cuda.Event]:
        """Record events after all work launched so far for the gradients of a bucket."""
        self.note(bucket)  # gradients may be set by the caller, without a hook
        return [stream.record_event() for stream in self._seen[bucket]]

    @contextmanager
    def behind(self, events: Sequence[torch.cuda.Event], bucket: int) -> Iterator[None]:
        """Launch the block's work on this thread after events, on a stream of its own."""
        device = self._devices[bucket]
        if device.type != "cuda":
            yield
            return
        own = self._own[device]
        for event in events:
            own.wait_event(event)
        with torch.cuda.device(device), torch.cuda.stream(own):
            yield
