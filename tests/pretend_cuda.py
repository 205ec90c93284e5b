"""A CUDA device that isn't there: tensors of the CPU that say they are on it, and are watched.

    with pretend_cuda() as device:
        param = nn.Parameter(device.place(values))    # param.device is cuda:0
        ...                                           # optimizer steps
    device.waits                                      # where the host waited, oldest first

Triton's kernels work on them interpreted, so that a process needs TRITON_INTERPRET=1. Everything
that a step does for a GPU, its streams, its pinned memory and its copies, runs as it would there:

- tensors of the device and others do not mix, as on a GPU;
- whatever makes the host wait (a read, a copy into memory that is not pinned, an event) is noted;
- so is what was launched, on which stream and behind which events.

What this cannot show is time, and a race: all that is launched is done at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import wraps
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from distlion.kernels import dispatch

CUDA = torch.device("cuda", 0)
CPU = torch.device("cpu")

READS = {
    Tensor.item,
    Tensor.tolist,
    Tensor.__bool__,
    Tensor.__int__,
    Tensor.__float__,
    Tensor.__index__,
    Tensor.numpy,
    Tensor.cpu,
    Tensor.nonzero,
    torch.equal,
    torch.nonzero,
}
"""What makes the host wait for the device."""
FACTORIES = ("empty", "zeros", "ones", "full", "arange", "tensor")
MAY_MIX = {Tensor.__getitem__, Tensor.as_subclass}
"""What takes tensors of the CPU beside those of a device."""


@dataclass
class PretendStream:
    """A stream, and the streams whose work it has been put behind."""

    name: str
    behind: set[str] = field(default_factory=set)
    device: torch.device = CUDA

    def __hash__(self) -> int:
        return hash(self.name)

    def record_event(self) -> PretendEvent:
        event = PretendEvent()
        event.record(self)
        return event

    def wait_event(self, event: PretendEvent) -> None:
        assert event.stream is not None, "an event that nobody recorded"
        self.behind |= {event.stream.name, *event.behind}


class PretendEvent:
    """An event; whoever waits for it on the host is noted."""

    def __init__(self, *, blocking: bool = False) -> None:
        self.is_blocking = blocking
        self.stream: PretendStream | None = None
        self.behind: set[str] = set()

    def record(self, stream: PretendStream) -> None:
        self.stream, self.behind = stream, set(stream.behind)

    def synchronize(self) -> None:
        assert self.stream is not None, "an event that nobody recorded"
        assert self.is_blocking, "the host would spin"
        _device().note_wait("event")


@dataclass(frozen=True)
class Launch:
    """A kernel that was launched.

    Attributes:
        kernel: Its name.
        constants: Of its compilation.
        stream: Where.
        behind: The streams whose work so far comes before it.
    """

    kernel: str
    constants: tuple[tuple[str, Any], ...]
    stream: str
    behind: frozenset[str]


class PretendDevice:
    """What was done on the device.

    Attributes:
        waits: What made the host wait.
        launches: Kernels of ours.
        copies: "down" and "up", each one between the host and the device.
        fail_at: Raise at this wait for an event, as a device does that failed; None never.
    """

    def __init__(self) -> None:
        self.waits: list[str] = []
        self.launches: list[Launch] = []
        self.copies: list[str] = []
        self.fail_at: int | None = None
        self.pinned: set[int] = set()
        self._local = threading.local()
        self._n_streams = 0

    def place(self, values: Tensor) -> Tensor:
        """Return a tensor of these values on the device."""
        return OnDevice.wrap(values.clone())

    def forget(self) -> None:
        """Begin to watch anew."""
        self.waits, self.launches, self.copies = [], [], []

    def note_wait(self, what: str) -> None:
        if self.is_quiet:
            return
        self.waits.append(what)
        if self.fail_at is not None and len(self.waits) == self.fail_at:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    @property
    def is_quiet(self) -> bool:
        """Whether a kernel is interpreted, which reads what it works on."""
        return getattr(self._local, "is_quiet", False)

    @contextmanager
    def quietly(self) -> Iterator[None]:
        before, self._local.is_quiet = self.is_quiet, True
        try:
            with np.errstate(all="ignore"):
                yield
        finally:
            self._local.is_quiet = before

    @property
    def stream(self) -> PretendStream:
        """The current stream of this thread; the default one is that of backward."""
        found = getattr(self._local, "stream", None)
        if found is None:
            found = self._local.stream = PretendStream("default")
        return found

    def find_stream(self, device: torch.device | None = None) -> PretendStream:
        """Stand in for ``torch.cuda.current_stream``."""
        return self.stream

    @contextmanager
    def enter(self, stream: PretendStream) -> Iterator[None]:
        before, self._local.stream = self.stream, stream
        try:
            yield
        finally:
            self._local.stream = before

    def make_stream(self, device: torch.device) -> PretendStream:
        self._n_streams += 1
        return PretendStream(f"stream {self._n_streams}", device=device)

    def note_launch(self, kernel: Any, constants: dict[str, Any]) -> None:
        name = getattr(kernel, "__name__", None) or kernel.fn.__name__
        stream = self.stream
        self.launches.append(
            Launch(name, tuple(sorted(constants.items())), stream.name, frozenset(stream.behind))
        )


_present: PretendDevice | None = None


def _device() -> PretendDevice:
    assert _present is not None, "there is no pretended device"
    return _present


class OnDevice(Tensor):
    """A tensor of the CPU that says it is on the device."""

    @staticmethod
    def wrap(raw: Tensor) -> OnDevice:
        if isinstance(raw, OnDevice):
            return raw
        wrapped = Tensor._make_subclass(OnDevice, raw.detach(), raw.requires_grad)  # type: ignore[attr-defined]
        return wrapped

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        owner = getattr(func, "__self__", None)
        if owner is Tensor.device:
            return CUDA
        if owner is Tensor.is_cuda:
            return True
        if func is Tensor.backward:  # whose hooks are to see what is on the device
            return Tensor.backward(args[0].as_subclass(Tensor), *args[1:], **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            if owner is Tensor.grad and name == "__get__":
                return _wrap_grad(args[0], func(*args))
            if name in ("__get__", "__set__", "untyped_storage", "data_ptr"):
                return _convert(func(*args, **kwargs))
            if func is Tensor.copy_:
                return _copy(*args, **kwargs)
            device = _device()
            if not device.is_quiet:
                if func in READS:
                    device.note_wait(name)
                elif func not in MAY_MIX:
                    _refuse_mixture(name, args, kwargs)
            if kwargs.get("device") is not None:
                kwargs["device"] = "cpu"
            result = func(*args, **kwargs)
        if func is Tensor.cpu or func is Tensor.numpy:
            return result.as_subclass(Tensor) if isinstance(result, Tensor) else result
        return _convert(result)


def _convert(result: Any) -> Any:
    if isinstance(result, Tensor) and not isinstance(result, OnDevice):
        return result.as_subclass(OnDevice)
    if type(result) in (tuple, list):
        return type(result)(map(_convert, result))
    return result


def _refuse_mixture(name: str, args: Any, kwargs: Any) -> None:
    for leaf in tree_leaves((args, kwargs)):
        if isinstance(leaf, Tensor) and not isinstance(leaf, OnDevice) and leaf.dim():
            raise RuntimeError(
                f"{name}: expected all tensors to be on the same device, but found at least two "
                "devices, cuda:0 and cpu!"
            )


def _wrap_grad(owner: Tensor, raw: Tensor | None) -> Tensor | None:
    """Return the gradient that backward made as one of the device; the same object each time."""
    if raw is None or isinstance(raw, OnDevice):
        return raw
    kept = owner.__dict__.get("_pretended_grad")
    if kept is None or kept[0] is not raw:
        kept = owner.__dict__["_pretended_grad"] = (raw, raw.as_subclass(OnDevice))
    return kept[1]


def _copy(own: Tensor, other: Tensor, non_blocking: bool = False) -> Tensor:
    if isinstance(own, OnDevice) != isinstance(other, OnDevice):
        device, is_down = _device(), isinstance(other, OnDevice)
        host = own if is_down else other
        if not device.is_quiet:
            device.copies.append("down" if is_down else "up")
            is_pinned = host.untyped_storage().data_ptr() in device.pinned
            if not non_blocking or not is_pinned:
                device.note_wait(f"copy {'down' if is_down else 'up'}")
    Tensor.copy_(own.as_subclass(Tensor), other.as_subclass(Tensor))
    return own


_real_to: Callable[..., Tensor] = Tensor.to


def _find_target(args: Any, kwargs: Any) -> torch.device | None:
    for value in (*args, kwargs.get("device")):
        if isinstance(value, torch.device):
            return value
        if isinstance(value, str):
            return torch.device(value)
        if isinstance(value, Tensor):
            return value.device
    return None


def _move(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Stand in for ``Tensor.to``."""
    target = _find_target(args, kwargs)
    is_here = isinstance(tensor, OnDevice)
    device = _device()
    if target is None or (target.type == "cuda") == is_here:
        kwargs = {key: value for key, value in kwargs.items() if key != "device"}
        rest = [value for value in args if not isinstance(value, torch.device | str)]
        with torch._C.DisableTorchFunctionSubclass():
            moved = _real_to(tensor, *rest, **kwargs) if rest or kwargs else tensor
        return _convert(moved) if is_here else moved
    is_pinned = tensor.untyped_storage().data_ptr() in device.pinned
    if not device.is_quiet:
        device.copies.append("down" if is_here else "up")
        if is_here or not (kwargs.get("non_blocking") and is_pinned):
            device.note_wait(f"to {target.type}")
    with torch._C.DisableTorchFunctionSubclass():
        moved = tensor.detach().as_subclass(Tensor).clone()
    return moved if is_here else OnDevice.wrap(moved)


def _make(real: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Stand in for a function that makes a tensor."""

    @wraps(real)
    def make(*args: Any, **kwargs: Any) -> Tensor:
        target = kwargs.get("device")
        is_pinned = kwargs.pop("pin_memory", False)
        if target is not None and torch.device(target).type == "cuda":
            kwargs["device"] = "cpu"
            return OnDevice.wrap(real(*args, **kwargs))
        made = real(*args, **kwargs)
        if is_pinned:
            _device().pinned.add(made.untyped_storage().data_ptr())
        return made

    return make


def _pin(tensor: Tensor) -> Tensor:
    pinned = tensor.clone()
    _device().pinned.add(pinned.untyped_storage().data_ptr())
    return pinned


@contextmanager
def pretend_cuda() -> Iterator[PretendDevice]:
    """Let this process have a CUDA device, all of whose threads may use it."""
    global _present
    from distlion.kernels.gpu import IS_INTERPRETED, TritonKernels, backend
    from distlion.kernels.gpu import launch as launching

    assert IS_INTERPRETED, "TRITON_INTERPRET=1 must be set"
    device = _present = PretendDevice()
    real_load, real_launch = dispatch._load_triton, launching.launch

    def launch(kernel: Any, grid: Any, *arguments: Any, **constants: Any) -> None:
        device.note_launch(kernel, constants)
        plain = tree_map_only(OnDevice, lambda each: each.as_subclass(Tensor), arguments)
        with device.quietly():
            real_launch(kernel, grid, *plain, **constants)

    changes: list[Any] = [
        *(mock.patch.object(torch, name, _make(getattr(torch, name))) for name in FACTORIES),
        mock.patch.object(Tensor, "to", _move),
        mock.patch.object(Tensor, "pin_memory", _pin),
        mock.patch.object(torch.cuda, "Stream", device.make_stream),
        mock.patch.object(torch.cuda, "Event", PretendEvent),
        mock.patch.object(torch.cuda, "current_stream", device.find_stream),
        mock.patch.object(torch.cuda, "stream", device.enter),
        mock.patch.object(torch.cuda, "device", nullcontext),
        mock.patch.object(launching, "launch", launch),
        mock.patch.object(backend, "launch", launch),
        mock.patch.object(
            dispatch,
            "_load_triton",
            lambda kind: TritonKernels() if kind == "cuda" else real_load(kind),
        ),
    ]
    for change in changes:
        change.start()
    try:
        yield device
    finally:
        for change in reversed(changes):
            change.stop()
        _present = None
