"""Streams of CUDA devices, where votes leave on one thread while backward goes on on another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


class VotingStreams:
    """The streams on which gradients were launched, and those on which votes are encoded.

    A gradient that a hook is told of is not computed yet: it was launched, on the stream that is
    current then. So that the votes of its bucket wait for it, and backward not for them, they are
    encoded on a stream of their own, behind events of those streams.

    Whatever is read there is held until the host has waited for it: gradients by their marks,
    copies by their segments. Their memory cannot be given to others before, so that nothing needs
    ``record_stream``, which would keep it for longer.

    Args:
        devices: Of each bucket.
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
        """Record events behind all that was launched so far for the gradients of a bucket."""
        self.note(bucket)  # gradients may be the caller's, whom no hook tells of
        return [stream.record_event() for stream in self._seen[bucket]]

    @contextmanager
    def behind(self, events: Sequence[torch.cuda.Event], bucket: int) -> Iterator[None]:
        """Launch what follows on this thread behind events, on a stream of its own."""
        device = self._devices[bucket]
        if device.type != "cuda":
            yield
            return
        own = self._own[device]
        for event in events:
            own.wait_event(event)
        with torch.cuda.device(device), torch.cuda.stream(own):
            yield
