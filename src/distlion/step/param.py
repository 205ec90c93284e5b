"""The record of a parameter: the only place where a step touches torch's own tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from distlion.errors import InvalidArgumentError, UnsupportedTypeError
from distlion.kernels.contract import Coefficients, Segment
from distlion.kernels.dispatch import note_makes
from distlion.layout import Slot
from distlion.votes.aggregation import Aggregation
from distlion.votes.bucket_vote import WorkerState

if TYPE_CHECKING:
    from distlion.kernels.cpu import Makes


def check_own_memory(param: Tensor, name: str) -> None:
    """Raise InvalidArgumentError if elements of a parameter share memory."""
    if _overlaps_itself(param):
        raise InvalidArgumentError(
            f"{name} overlaps itself in memory (shape {tuple(param.shape)}, strides "
            f"{param.stride()}); call .clone() first"
        )


def check_shared_memory(params: Sequence[Tensor], names: Sequence[str]) -> None:
    """Raise InvalidArgumentError if elements of two parameters share memory."""
    placed = [
        (str(param.device), *_range_bytes(param), param, name)
        for param, name in zip(params, names, strict=True)
        if param.numel()
    ]
    placed.sort(key=lambda place: place[:3])
    reaching: list[tuple[str, int, int, Tensor, str]] = []
    for place in placed:
        device, start, _, param, name = place
        reaching = [earlier for earlier in reaching if earlier[0] == device and earlier[2] > start]
        for *_, other, other_name in reaching:
            if _overlap(other, param):
                raise InvalidArgumentError(
                    f"{other_name} and {name} overlap in memory, so that shared elements would be "
                    "voted on and moved twice; give one of them, or a .clone() to each"
                )
        reaching.append(place)


def _range_bytes(param: Tensor) -> tuple[int, int]:
    """Return the first address of a nonempty tensor, and the one after its last."""
    start = param.data_ptr()
    return start, start + _count_reached(param) * param.element_size()


def _count_reached(param: Tensor) -> int:
    """Count the elements from the first one in memory to the last one."""
    sizes = zip(param.shape, param.stride(), strict=True)
    return 1 + sum((size - 1) * stride for size, stride in sizes)


def _overlaps_itself(param: Tensor) -> bool:
    dims = sorted(
        (stride, size) for size, stride in zip(param.shape, param.stride(), strict=True) if size > 1
    )
    reached = 1
    is_nested = param.numel() > 0
    for stride, size in dims:
        is_nested &= stride >= reached
        reached += (size - 1) * stride
    if is_nested or not param.numel():
        return False
    if any(stride == 0 for stride, _ in dims):
        return True
    # Interleaved dims may still not overlap: shape (2, 3), strides (3, 2).
    return int(_mark(param, reached).sum()) < param.numel()


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors share an element, which columns of one matrix do not."""
    if one.element_size() != other.element_size():
        return True
    distance, rest = divmod(other.data_ptr() - one.data_ptr(), one.element_size())
    if rest:
        return True
    marks = _mark(one, max(_count_reached(one), distance + _count_reached(other)))
    return bool(marks.as_strided(other.shape, other.stride(), distance).any())


def _mark(param: Tensor, n_elements: int) -> Tensor:
    """Mark the places of a tensor's elements, from its first one on: (n_elements,) bool."""
    marks = torch.zeros(n_elements, dtype=torch.bool, device="cpu")
    marks.as_strided(param.shape, param.stride()).fill_(True)
    return marks


class Make(NamedTuple):
    """Shape, dtype and device of a dense tensor.

    Attributes:
        shape: Its sizes.
        dtype: Dtype of its elements.
        device: Its device.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Make:
        """Return the make of a tensor."""
        return cls(tensor.shape, tensor.dtype, tensor.device)

    def of_momentum(self, shape: torch.Size, asked: torch.dtype | None) -> Make:
        """Return the make of the part of a parameter's momentum that is kept.

        Args:
            shape: Shape of that part.
            asked: Its dtype; None for the parameter's, or float32 for float16, which would lose
                small gradients.
        """
        chosen = torch.float32 if self.dtype == torch.float16 else self.dtype
        return Make(shape, asked or chosen, self.device)

    def fits(self, tensor: object) -> bool:
        """Return whether a tensor is of this make."""
        return (
            isinstance(tensor, Tensor)
            and tensor.dtype is self.dtype
            and tensor.shape == self.shape
            and tensor.device == self.device
            and tensor.layout is torch.strided
        )

    def __str__(self) -> str:
        return describe_make(self)


def describe_make(found: object) -> str:
    """Describe a tensor or another object: "float32 of shape (3, 4) on cpu"."""
    if found is None:
        return "missing"
    if not isinstance(found, Tensor | Make):
        return f"a {type(found).__name__}"
    layout = torch.strided if isinstance(found, Make) else found.layout
    prefix = "" if layout is torch.strided else f"{layout}, "
    dtype = str(found.dtype).removeprefix("torch.")
    return f"{prefix}{dtype} of shape {tuple(found.shape)} on {found.device}"


SPARSE = -1
"""Version of a sparse gradient, which has no address to compare."""
UNCOUNTED = -2
"""Version of a gradient made under ``torch.inference_mode()``, of which torch counts no writes."""


def is_dtensor(tensor: object) -> bool:
    """Return whether a tensor may be a shard of a larger one."""
    return hasattr(tensor, "to_local")


def is_wrapper(tensor: object) -> bool:
    """Return whether a tensor has no memory but that of tensors inside, as quantized ones."""
    return hasattr(tensor, "__tensor_flatten__") and not is_dtensor(tensor)


def list_plain(tensor: Tensor) -> list[Tensor]:
    """List the tensors that hold a tensor's values: itself, or those that it wraps.

    Only frozen parameters may be wrappers, as quantized weights are.
    """
    if not is_wrapper(tensor):
        return [tensor]
    wrapped, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return [plain for name in wrapped for plain in list_plain(getattr(tensor, name))]


def view_row(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """View a contiguous tensor as a row of another dtype."""
    # torch calls one element contiguous whatever its stride is, and then refuses to view it.
    return tensor.as_strided((tensor.numel(),), (1,)).view(dtype)


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor: the local shard of a DTensor, else all of it."""
    if is_dtensor(tensor):
        with torch.no_grad():  # without a graph this is the shard itself and not a new view of it
            tensor = tensor.to_local()  # type: ignore[attr-defined]
    # torch's asynchronous collectives leave a wrapper, which has no memory of its own.
    wait: Callable[[], Tensor] | None = getattr(tensor, "wait", None)
    return tensor if wait is None else wait()


class Copies(NamedTuple):
    """The ranks of one worker that hold the same shard of a parameter, as in tensor parallelism.

    Attributes:
        n: Number of these ranks.
        is_first: Whether this rank is the one that counts it in norms.
    """

    n: int = 1
    is_first: bool = True


ALONE = Copies()
"""A shard without copies."""


@dataclass(frozen=True, eq=False)
class VotingParam:
    """A trainable parameter, or a piece of one, in the form that all of a step uses.

    torch's tensors differ: strided or not, whole, a shard of a DTensor, or cut into the pieces of a
    node's ranks. ``local``, ``grad`` and ``exp_avg`` hide that, and return contiguous tensors of
    this process only.

    Attributes:
        param: The parameter that the user gave to the optimizer.
        position: Its number among the trainable parameters, which errors carry between workers.
        group: The number of its param group.
        slot: Name, size and place of the parameter, of its piece, or of a DTensor's shard.
        rule: The rule of its votes.
        state: The optimizer's state, which holds ``exp_avg`` and the rule's state.
        pieces: (start, stop) of each node rank's piece of the momentum; one piece without nodes.
        make: The make of ``param`` at construction, which its gradients must have.
        kept: The make of ``exp_avg``; the rule's state has the same in float32.
        part: The number of this rank's piece.
        piece: (start, stop) for the record of a piece; None for one of the whole local part.
        is_sharded: Whether ``param`` is a DTensor.
        copies: The ranks of this worker that hold the same shard.
        orthogonalizes: Whether it is a matrix whose direction is orthogonalized.
        keeps_momentum: Whether it has a momentum. One that has none, at betas of 0, is its gradient
            for the ops, which read 0 times it and write the same value.
    """

    param: Tensor
    position: int
    group: int
    slot: Slot
    rule: Aggregation
    state: Mapping[Tensor, Mapping[str, Any]]
    pieces: tuple[tuple[int, int], ...]
    make: Make
    kept: Make
    part: int = 0
    piece: tuple[int, int] | None = None
    is_sharded: bool = False
    copies: Copies = ALONE
    orthogonalizes: bool = False
    keeps_momentum: bool = True

    @property
    def name(self) -> str:
        """The parameter's name in errors."""
        return self.slot.name

    @property
    def device(self) -> torch.device:
        """The device of the parameter."""
        return self.make.device

    @property
    def kind(self) -> tuple[Aggregation, torch.dtype, torch.device]:
        """The properties that all parameters of a bucket share."""
        return self.rule, self.make.dtype, self.make.device

    @property
    def n_kept(self) -> int:
        """Elements of the momentum that this process keeps."""
        start, stop = self.pieces[self.part]
        return stop - start

    @property
    def whole_slot(self) -> Slot:
        """The place of the whole parameter, of which a DTensor's shard is a part."""
        return self.slot._replace(n_elements=self.param.numel())

    @property
    def exp_avg(self) -> Tensor:
        """The momentum that this process keeps."""
        exp_avg: Tensor = self.state[self.param]["exp_avg"]
        return exp_avg

    @property
    def worker_state(self) -> WorkerState:
        """The tensors that this process keeps of it for its rule."""
        entry = self.state[self.param]
        return {key: entry[key] for key in self.rule.worker_state}

    def check(self) -> None:
        """Check that all its tensors are as construction laid them out.

        Raises:
            InvalidArgumentError: Parameter, gradient, momentum or rule's state is of another make,
                or lacks memory.
            UnsupportedTypeError: The gradient is sharded differently from the parameter.
        """
        self.check_make()
        grad, kept = self.param.grad, self.state.get(self.param, {})
        own = local_tensor(self.param) if self.is_sharded else self.param
        if not own.is_contiguous():
            check_own_memory(own, self.name)
        if grad is not None and grad.layout is torch.strided:
            self._check_grad(grad)
        if self.keeps_momentum:
            self._check_kept("momentum", kept.get("exp_avg"), self.kept)
        for key in self.rule.worker_state:
            self._check_kept(key, kept.get(key), self.kept._replace(dtype=torch.float32))
        _check_memory(own, self.name)

    @cached_property
    def n_kept_tensors(self) -> int:
        """Number of entries of its state: a momentum, and the rule's state."""
        return 1 + len(self.rule.worker_state)

    def check_make(self) -> None:
        """Check that the parameter's make is unchanged.

        Raises:
            InvalidArgumentError: It was cast, moved or resized.
        """
        if not self.make.fits(self.param):
            raise InvalidArgumentError(
                f"{self.name} is {describe_make(self.param)}, and was {self.make} when this "
                "optimizer was made. Make the optimizer after the model is cast, moved or resized"
            )

    def find_addresses(self) -> tuple[int, int]:
        """Return the addresses of parameter and momentum."""
        own = local_tensor(self.param) if self.is_sharded else self.param
        exp_avg = self.state.get(self.param, {}).get("exp_avg")
        return own.data_ptr(), exp_avg.data_ptr() if isinstance(exp_avg, Tensor) else 0

    def _check_grad(self, grad: Tensor) -> None:
        what = f"the gradient of {self.name}"
        if not self.make.fits(grad):
            raise InvalidArgumentError(
                f"{what} is {describe_make(grad)}; expected {self.make}, as the parameter. Assign "
                "a new gradient in place of a change to .grad.data"
            )
        if is_dtensor(grad) != self.is_sharded:
            kinds = ("a plain tensor", "a DTensor")
            raise UnsupportedTypeError(
                f"{what} is {kinds[is_dtensor(grad)]}, and the parameter is "
                f"{kinds[self.is_sharded]}. Expected the same kind. Assign a gradient with the "
                "mesh and placements of its parameter"
            )
        if self.is_sharded:
            self._check_place(grad)
        _check_memory(local_tensor(grad), what)

    def _check_place(self, grad: Any) -> None:
        """Check that a DTensor's gradient lies where the DTensor lies."""
        param: Any = self.param
        if grad.placements != param.placements:
            raise UnsupportedTypeError(
                f"{self.name} has the placements {param.placements}, its gradient "
                f"{grad.placements}; redistribute the gradient before step()"
            )
        if grad.device_mesh != param.device_mesh:
            raise UnsupportedTypeError(
                f"{self.name} lies on {param.device_mesh}, its gradient on {grad.device_mesh}. "
                "Expected the same mesh. Assign a gradient with the parameter's mesh"
            )

    def _check_kept(self, key: str, found: Any, expected: Make) -> None:
        what = f"the {key} of {self.name}"
        if not expected.fits(found):
            raise InvalidArgumentError(
                f"{what} is {describe_make(found)}; expected {expected}. Change the state of an "
                "optimizer by load_state_dict() alone"
            )
        _check_memory(found, what)

    def local(self) -> Tensor:
        """Return the values, contiguous; a piece is flat.

        Pass written values to ``write_back``, which knows whether this was a copy.
        """
        whole = local_tensor(self.param) if self.is_sharded else self.param
        whole = whole.contiguous()  # a contiguous tensor is its own contiguous copy
        return whole if self.piece is None else whole.view(-1)[slice(*self.piece)]

    def write_back(self, local: Tensor) -> None:
        """Copy values written to ``local()`` into a parameter that is not contiguous."""
        own = local_tensor(self.param)
        if own.is_contiguous():
            return
        if self.piece is not None:
            piece, local = local, own.contiguous()
            local.view(-1)[slice(*self.piece)] = piece
        own.detach().copy_(local)

    def grad(self) -> Tensor | None:
        """Return the local gradient, contiguous; None for none, or a sparse one.

        ``check`` must have accepted it before.
        """
        grad = self.param.grad
        if grad is None or grad.layout is not torch.strided:
            return None
        return local_tensor(grad).resolve_neg().contiguous()

    def has_sparse_grad(self) -> bool:
        """Return whether the gradient is sparse, which cannot be voted on element by element."""
        grad = self.param.grad
        return grad is not None and grad.layout is not torch.strided

    def segment(self, coefficients: Coefficients, grad: Tensor | None) -> Segment:
        """Make the segment for the ops.

        Args:
            coefficients: Its hyperparameters.
            grad: The gradient to vote with, in the form of ``local()``; None to abstain.
        """
        is_plain = self.piece is None and not self.is_sharded and self.param.is_contiguous()
        local = self.param if is_plain else self.local()
        stand_in = local if grad is None else grad  # without a gradient no op reads it
        momentum = self.exp_avg if self.keeps_momentum else stand_in
        return Segment(self.slot, local, grad, momentum, coefficients)

    def at(self, slot: Slot, *, part: int | None = None) -> VotingParam:
        """Return the record of this parameter, or of a part's piece of it, in a bucket."""
        piece = self.piece if part is None else self.pieces[part]
        return replace(self, slot=slot, piece=piece)

    def mark(self) -> GradientMark:
        """Remember the present gradient."""
        return mark_gradients([self])[0]


class Records(tuple[VotingParam, ...]):
    """Records of parameters that every step reads.

    Attributes:
        makes: Makes of all parameters and momenta, and of all gradients, once a step has found
            nothing odd; None before, and where ``take_gradients`` looks at each parameter.
    """

    makes: tuple[Makes, Makes] | None = None


def take_gradients(params: Sequence[VotingParam]) -> list[Tensor | None]:
    """Check parameters, and return the gradient of each as ``VotingParam.grad`` does.

    Every step checks every parameter: one call for all of them, if they are the ``Records`` of an
    earlier step. If something is odd, ``VotingParam.check`` looks closer, and raises the error.
    """
    records = params if isinstance(params, Records) else None
    if records is not None and records.makes is not None:
        alike = _take_alike(records, *records.makes)
        if alike is not None:
            return alike
    grads, are_plain = _take_each(params)
    if records is not None and records.makes is None and are_plain:
        momenta = [param.exp_avg for param in params]
        tensors = note_makes([*(param.param for param in params), *momenta])
        of_grads = note_makes([param.param for param in params])
        if tensors is not None and of_grads is not None:
            records.makes = tensors, of_grads
    return grads


def _take_alike(
    params: Sequence[VotingParam], tensors: Makes, of_grads: Makes
) -> list[Tensor | None] | None:
    """Return the gradients, if nothing at all is odd; else None."""
    found: list[object] = []
    momenta: list[object] = []
    grads: list[Tensor | None] = []
    for param in params:
        tensor = param.param
        grad = tensor.grad
        if grad is not None and grad.is_neg():
            return None
        found.append(tensor)
        momenta.append(param.state.get(tensor, {}).get("exp_avg"))
        grads.append(grad)
    found += momenta
    given: list[object] = list(grads)
    is_alike = tensors.fit(found, may_be_none=False) and of_grads.fit(given, may_be_none=True)
    return grads if is_alike else None


def _take_each(params: Sequence[VotingParam]) -> tuple[list[Tensor | None], bool]:
    """Return the gradients, and whether each parameter is an ordinary one, with nothing odd.

    One loop without calls takes half the time of ``VotingParam.check``.
    """
    grads: list[Tensor | None] = []
    are_plain = True
    for param in params:
        tensor, make, kept = param.param, param.make, param.kept
        grad, entry = tensor.grad, param.state.get(tensor, {})
        exp_avg = entry.get("exp_avg")
        is_sound = bool(
            tensor.dtype is make.dtype
            and tensor.shape == make.shape
            and tensor.device == make.device
            and tensor.is_contiguous()
            and tensor.data_ptr()
            and isinstance(exp_avg, Tensor)
            and exp_avg.dtype is kept.dtype
            and exp_avg.shape == kept.shape
            and exp_avg.device == kept.device
            and exp_avg.layout is torch.strided
            and exp_avg.data_ptr()
            and len(entry) == 1 == param.n_kept_tensors
        )
        if is_sound and grad is not None:
            is_sound = bool(
                grad.dtype is make.dtype
                and grad.shape == make.shape
                and grad.device == make.device
                and grad.layout is torch.strided
                and grad.data_ptr()
            )
        if is_sound and not param.is_sharded:
            # Kernels read memory, which a negative bit inverts.
            grads.append(None if grad is None else grad.resolve_neg().contiguous())
        else:
            are_plain = False
            param.check()
            grads.append(param.grad())
    return grads, are_plain


def _check_memory(tensor: Tensor, what: str) -> None:
    """Raise InvalidArgumentError if elements have no memory, as after ``resize_(0)``."""
    if not tensor.data_ptr() and tensor.numel():
        raise InvalidArgumentError(
            f"{what} has no memory: its storage was freed. Give it back before step(). Under "
            "FSDP2, make the optimizer while the model is sharded: call model.reshard() before"
        )


def make_segments(
    params: Sequence[VotingParam],
    grads: Sequence[Tensor | None],
    coefficients: Sequence[Coefficients],
    grad_scale: float,
) -> list[Segment]:
    """Make the segments of parameters, as ``VotingParam.segment`` does for one.

    Args:
        params: The parameters.
        grads: The gradients to vote with; None to abstain.
        coefficients: Hyperparameters of every param group.
        grad_scale: Factor for gradients; a node takes its first rank's.
    """
    scaled = [
        each if each.grad_scale == grad_scale else each._replace(grad_scale=grad_scale)
        for each in coefficients
    ]
    segments = []
    for param, grad in zip(params, grads, strict=True):
        tensor, slot = param.param, param.slot
        is_plain = param.piece is None and not param.is_sharded and param.keeps_momentum
        if is_plain and tensor.is_contiguous():
            momentum = param.state[tensor]["exp_avg"]
            segments.append(Segment(slot, tensor, grad, momentum, scaled[param.group]))
        else:
            segments.append(param.segment(scaled[param.group], grad))
    return segments


class GradientMark(NamedTuple):
    """The identity of a gradient when it was encoded.

    Attributes:
        owner: Its parameter.
        grad: The tensor.
        version: Its version counter, or ``SPARSE`` or ``UNCOUNTED``. A DTensor's counter does not
            count changes to its shard: see ``Arrivals``.
        address: Its address.
    """

    owner: VotingParam
    grad: Tensor | None
    version: int
    address: int

    def has_changed(self) -> bool:
        """Return whether the parameter has a new gradient, or the same one was written to."""
        return find_changed([self]) is not None


def mark_gradients(params: Sequence[VotingParam]) -> list[GradientMark]:
    """Remember the present gradients."""
    marks = []
    for param in params:
        grad, version, address = param.param.grad, 0, 0
        if grad is not None and grad.layout is not torch.strided:
            version = SPARSE
        elif grad is not None:
            own = local_tensor(grad) if param.is_sharded else grad
            address = own.data_ptr()
            try:
                version = grad._version
            except RuntimeError:
                version = UNCOUNTED
        marks.append(GradientMark(param, grad, version, address))
    return marks


def find_sparse(marks: Sequence[GradientMark]) -> VotingParam | None:
    """Find the first parameter whose gradient is sparse."""
    for mark in marks:
        if mark.version == SPARSE:
            return mark.owner
    return None


def find_changed(marks: Sequence[GradientMark]) -> VotingParam | None:
    """Find the first parameter that has a new gradient, or whose gradient was written to."""
    for mark in marks:
        owner, version = mark.owner, mark.version
        grad = owner.param.grad
        if grad is not mark.grad:
            return owner
        if grad is not None and version != SPARSE:
            own = local_tensor(grad) if owner.is_sharded else grad
            is_written = version != UNCOUNTED and grad._version != version
            if is_written or own.data_ptr() != mark.address:
                return owner
    return None
