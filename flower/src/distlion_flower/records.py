"""Conversion between votes and the records of Flower's messages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from torch import Tensor

from distlion.errors import InvalidArgumentError, UnsupportedTypeError
from distlion_flower import Ballot, Call, Places, Refusal, list_statistics

KEY = "distlion"
"""Key of our records in messages and in a client's state."""
PAYLOAD, METRICS, EXAMPLES = "vote", "metrics", "num-examples"
STYPE = "distlion.vote"
"""Type of an array with packed votes as its bytes, so that nobody parses them as numpy's."""
_MOST = 1 << 63
_FLOATS = (np.float16, np.float32, np.float64)  # of float64, the error names the way out


def write_call(call: Call, message: Message) -> None:
    """Write the call for a vote into a message."""
    message.content[KEY] = ConfigRecord(
        {
            "round": call.round,
            "rule": call.rule,
            "spread": float(call.spread),
            "reach": list(call.reach),
        }
    )


def read_call(message: Message) -> tuple[Call, dict[str, Tensor]]:
    """Return a message's call for a vote, and the parameters in it.

    Raises:
        InvalidArgumentError: The message has no call for a vote, or not exactly one record of
            arrays.
    """
    content = message.content if message.has_content() else RecordDict()
    asked = content.get(KEY)
    if not isinstance(asked, ConfigRecord):
        raise InvalidArgumentError(
            "the message does not ask for a vote. Expected the message of a server with strategy "
            "distlion_flower.bridge.Votes. Use this strategy there"
        )
    found = list(content.array_records.values())
    if len(found) != 1:
        raise InvalidArgumentError(
            f"the message has {len(found)} records of arrays. Expected one, with the parameters"
        )
    given: Any = asked
    reach = given.get("reach")
    call = Call(
        given.get("round"),
        given.get("rule"),
        given.get("spread"),
        tuple(reach) if isinstance(reach, list) else (math.nan,),
    )
    return call, read_arrays(found[0])


def read_arrays(arrays: ArrayRecord) -> dict[str, Tensor]:
    """Read the arrays that are voted on: all but integers, booleans and running statistics.

    Raises:
        UnsupportedTypeError: An array has another type, such as complex numbers.
    """
    values = {name: array.numpy() for name, array in arrays.items()}
    for name, value in values.items():
        # Floats of another length, or of another byte order, are none of torch's.
        if value.dtype.kind not in "iub" and value.dtype not in _FLOATS:
            raise UnsupportedTypeError(
                f"{name} is {value.dtype}; expected floats to vote on, or integers that stay as "
                "they are. Send complex numbers as pairs of floats (torch.view_as_real), and "
                "other floats as float32"
            )
    statistics = list_statistics(values)
    return {
        name: torch.from_numpy(value)
        for name, value in values.items()
        if value.dtype.kind == "f" and name not in statistics
    }


def write_arrays(params: Mapping[str, Tensor], before: ArrayRecord) -> ArrayRecord:
    """Return a record of the parameters, with all other arrays unchanged."""
    return ArrayRecord(
        {
            name: Array(params[name].numpy()) if name in params else array
            for name, array in before.items()
        }
    )


def as_tensors(
    given: ArrayRecord | Mapping[str, Any], wanted: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the wanted ones of some arrays, as tensors.

    Raises:
        UnsupportedTypeError: The arrays have no names, or a wanted one is no tensor, numpy array or
            Flower array, or has no floats.
    """
    if not isinstance(given, Mapping):
        raise UnsupportedTypeError(
            f"arrays are given as {type(given).__name__}; expected them by name, such as "
            "model.state_dict()"
        )
    tensors = {}
    for name in wanted:
        if name not in given:
            continue  # the code that needs it reports it missing
        value = given[name]
        if isinstance(value, Array):
            value = value.numpy()
        if isinstance(value, np.ndarray | np.generic):  # arithmetic makes scalars of 0-dim arrays
            value = torch.from_numpy(np.ascontiguousarray(value).reshape(value.shape))
        if not isinstance(value, Tensor) or not value.is_floating_point():
            kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise UnsupportedTypeError(
                f"{name} is {kind}; expected a tensor or an array of floats, as the server sent it"
            )
        tensors[name] = value
    return tensors


def write_reply(message: Message, ballot: Ballot, metrics: Mapping[str, Any]) -> Message:
    """Return the reply with a ballot, and with numbers to average.

    Raises:
        InvalidArgumentError: The metrics name another number of examples.
        UnsupportedTypeError: A metric is no number.
    """
    data = ballot.payload
    payload = Array(dtype="uint8", shape=(len(data),), stype=STYPE, data=data)
    content = RecordDict(
        {
            PAYLOAD: ArrayRecord({PAYLOAD: payload}),
            KEY: ConfigRecord(
                {"round": ballot.round, "rule": ballot.rule, "checksum": ballot.checksum}
            ),
            METRICS: _write_metrics(metrics, ballot.n_examples),
        }
    )
    return Message(content=content, reply_to=message)


def _write_metrics(metrics: Mapping[str, Any], n_examples: int) -> MetricRecord:
    if not isinstance(metrics, Mapping):
        raise UnsupportedTypeError(
            f"metrics is {type(metrics).__name__}; expected names with a number, or a list of "
            "numbers"
        )
    numbers = {
        name: value.item() if isinstance(value, Tensor | np.generic) and value.ndim == 0 else value
        for name, value in metrics.items()
    }
    if numbers.get(EXAMPLES, n_examples) != n_examples:
        raise InvalidArgumentError(
            f"metrics have {EXAMPLES}={numbers[EXAMPLES]!r}; expected num_examples={n_examples}. "
            "Omit it from metrics"
        )
    try:
        return MetricRecord({**numbers, EXAMPLES: n_examples})
    except TypeError as error:
        kinds = ", ".join(f"{name}: {type(value).__name__}" for name, value in numbers.items())
        raise UnsupportedTypeError(
            f"metrics have the types {kinds}; expected names with a number, or a list of numbers"
        ) from error


def read_ballot(reply: Message) -> Ballot | Refusal:
    """Read a reply of any content; raise nothing, and trust nothing."""
    if reply.has_error():
        return Refusal.ERROR
    if not reply.has_content():
        return Refusal.MALFORMED
    content = reply.content
    arrays, said, metrics = content.get(PAYLOAD), content.get(KEY), content.get(METRICS)
    if (
        not isinstance(arrays, ArrayRecord)
        or not isinstance(said, ConfigRecord)
        or not isinstance(metrics, MetricRecord)
    ):
        return Refusal.MALFORMED
    payload = arrays.get(PAYLOAD)
    if not isinstance(payload, Array):
        return Refusal.MALFORMED
    if (payload.dtype, payload.stype) != ("uint8", STYPE):
        return Refusal.DTYPE
    if payload.shape != (len(payload.data),):
        return Refusal.LENGTH
    return Ballot(
        said.get("round"),
        said.get("rule"),
        reply.metadata.src_node_id,
        metrics.get(EXAMPLES),
        payload.data,
        said.get("checksum"),
    )


def read_metrics(content: RecordDict | None) -> tuple[dict[str, float], int]:
    """Read the single numbers that a reply reports, and its number of examples; 0 for none.

    As in Flower, the first record of metrics counts, whatever its name.
    """
    found = [] if content is None else list(content.metric_records.values())
    if not found:
        return {}, 0
    record = found[0]
    numbers: dict[str, float] = {
        name: value
        for name, value in record.items()
        if isinstance(value, float) or (isinstance(value, int) and -_MOST < value < _MOST)
    }
    n_examples = numbers.pop(EXAMPLES, 0)
    return numbers, n_examples if isinstance(n_examples, int) else 0


def recall(context: Context | None, places: Places) -> list[Tensor]:
    """Return the residuals of a client's votes so far; nothing without a context.

    Raises:
        InvalidArgumentError: The client's state belongs to another model.
    """
    if context is None:
        return []
    kept = context.state.get(KEY)
    residuals = []
    for number in places.bucket.members:
        name, shape = places.names[number], places.shapes[number]
        if kept is None:
            residuals.append(torch.zeros(shape, dtype=torch.float32, device="cpu"))
            continue
        array = kept.get(name) if isinstance(kept, ArrayRecord) else None
        value = None if array is None else torch.from_numpy(array.numpy())
        if value is None or value.shape != shape or value.dtype is not torch.float32:
            raise InvalidArgumentError(
                f"the state of this client has no residual for {name} of shape {tuple(shape)}: it "
                f"belongs to another model. Delete context.state[{KEY!r}] to begin anew"
            )
        residuals.append(value)
    return residuals


def keep(context: Context, places: Places, residuals: Sequence[Tensor]) -> None:
    """Keep the residuals of votes in a client's state, in 32 bits."""
    names = [places.names[number] for number in places.bucket.members]
    kept = {name: Array(each.numpy()) for name, each in zip(names, residuals, strict=True)}
    context.state[KEY] = ArrayRecord(kept)
