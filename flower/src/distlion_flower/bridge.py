"""Flower: a server strategy that counts votes, and the client's reply to it."""

from __future__ import annotations

import logging
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from distlion.errors import InvalidArgumentError
from distlion.integrations.frameworks import check_version
from distlion.kernels import Coins
from distlion.step import check_choice
from distlion_flower import (
    Call,
    Outcome,
    Places,
    ServerSettings,
    VoteServer,
    average_metrics,
    cast_ballot,
    find_deltas,
    find_equal,
    list_statistics,
    weigh,
)

check_version("flwr", major=1, extra="flower")
from flwr.app import (  # noqa: E402, once its version is known
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.serverapp import Grid  # noqa: E402
from flwr.serverapp.strategy import FedAvg, Result  # noqa: E402

from distlion_flower import records  # noqa: E402

logger = logging.getLogger("distlion")
# Flower shows its strategies' messages on this logger; on others it shows only warnings.
_shown = logging.getLogger("flwr")

MOST_OUTCOMES = 1000

_Aggregate = Callable[[list[RecordDict], str], MetricRecord]
_MOST_NODES = 1 << 63
"""Bound of a node's number: 63 bits of it key the coins."""


class Votes(FedAvg):  # type: ignore[misc]
    """Train by clients' votes: about one uplink bit for each parameter.

    The server keeps the parameters and a momentum. In each round it sends the parameters to some
    nodes, in full precision. They train on data of their own and answer with ``vote``.

    Equation:
        v <- momentum * v + u,  x <- x - lr * v,  u by the rule, from the replies taken
        "stochastic"  u = b * sum_i w_i s_i / sum_i w_i,  s_i = sign(d_i + noise), noise uniform in
                      (-b, b); b is ``spread`` times the median of the clients' mean |d| in the last
                      round, one for each parameter and for all clients
                      (z-SignFedAvg, arXiv:2302.02589, with z = infinity)
        "majority"    u = a * sign(sum_i w_i s_i),  s_i = sign(d_i), a the median mean |d|
        "residual"    u = sum_i w_i a_i s_i / sum_i w_i of d_i and the part of earlier deltas that
                      votes rounded away; each client keeps that part; for sites that take part in
                      most rounds

    Args:
        rule: One of the rules above.
        lr: Server rate, or a function of the round's number, from 0, that returns it.
        momentum: Momentum of the server, in [0, 1).
        spread: Spread of "stochastic", above 0. Larger values are noisier, smaller ones biased.
        weights: "examples" weights a client by its number of examples, up to ``max_weight`` times
            the median one; "equal" weights all alike.
        max_weight: Largest weight in units of the median, 1 or more; of an evaluation too.
        min_replies: Smallest number of replies taken. With fewer, a round is void: parameters and
            momentum stay.
        max_scale: Largest mean |d| of a reply that is taken.
        seed: Seed of ties.
        statistics: "raise" refuses arrays with the names of running statistics, ``running_mean``
            and ``running_var``, on which votes make no sense. "keep" leaves them as in
            ``initial_arrays``, for clients that keep or recompute their own.
        options: Options of ``flwr.serverapp.strategy.FedAvg``: ``fraction_train``,
            ``min_train_nodes``, ``fraction_evaluate`` and so on. ``weighted_by_key`` has to be
            "num-examples", which ``vote`` writes.

    Attributes:
        outcomes: Outcomes of the last 1,000 rounds, in order: counted nodes, and refused replies
            with their reasons.

    Raises:
        InvalidArgumentError: A number is out of range, or a key cannot be chosen; in ``start``,
            arrays have running statistics.
        MissingDependencyError: On import: flwr is missing, or has another major version.
        NonFiniteError: In ``start``: an array is not finite.
        UnsupportedTypeError: A value has a wrong type; in ``start``, an array is complex, or has a
            float dtype other than float32 and float16.

    Notes:
        Integer arrays, such as BatchNorm's counters, keep their ``initial_arrays``; with
        ``statistics="keep"``, running statistics too.

        Invalid replies are not taken: failed ones, second ones, replies of another round, rule,
        length, dtype or node, and replies with a scale that is too large or not finite. They are
        counted in ``outcomes`` and in Flower's log, and each is logged with its reason under
        "distlion". None of them raises.

        Metrics of training are averaged by votes, and metrics of evaluation by numbers of
        examples, up to ``max_weight`` times the median one, if all clients report a finite
        number. Lists need a ``train_metrics_aggr_fn`` or ``evaluate_metrics_aggr_fn``, which gets
        the replies taken.

        An array that half of the clients or more do not train does not move, and a warning names
        it: see ``VoteServer``.

    Example:
        >>> strategy = Votes(lr=0.3, momentum=0.9, fraction_train=0.1, min_replies=3)
        >>> result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=500)
    """

    def __init__(
        self,
        *,
        rule: Literal["stochastic", "majority", "residual"] = "stochastic",
        lr: float | Callable[[int], float] = 1.0,
        momentum: float = 0.9,
        spread: float = 3.0,
        weights: Literal["examples", "equal"] = "examples",
        max_weight: float = 10.0,
        min_replies: int = 1,
        max_scale: float = 1e3,
        seed: int = 0,
        statistics: Literal["raise", "keep"] = "raise",
        **options: Any,
    ) -> None:
        super().__init__(**options)
        _check_keys(self)
        check_choice("statistics", statistics, ("raise", "keep"))
        self._keeps_statistics = statistics == "keep"
        self._train_metrics = options.get("train_metrics_aggr_fn")
        self._evaluate_metrics = options.get("evaluate_metrics_aggr_fn")
        self.settings = ServerSettings(
            rule=rule,
            lr=lr,
            momentum=momentum,
            spread=spread,
            weights=weights,
            max_weight=max_weight,
            min_replies=min_replies,
            max_scale=max_scale,
            seed=seed,
        )
        self.outcomes: deque[Outcome] = deque(maxlen=MOST_OUTCOMES)
        self._server: VoteServer | None = None
        self._arrays: ArrayRecord | None = None
        self._loaded: Mapping[str, Any] | None = None

    def summary(self) -> None:
        """Log the settings, as Flower's strategies do."""
        super().summary()
        _shown.info("\t└──> Votes: %s", self.settings)

    def start(self, grid: Grid, initial_arrays: ArrayRecord, *args: Any, **options: Any) -> Result:
        """Train as Flower's strategies do; if every round is void, the result has the first arrays.

        Args:
            grid: Flower's connection with the nodes.
            initial_arrays: The parameters to begin with.
            *args: As for ``FedAvg.start``.
            **options: Likewise.
        """
        result = super().start(grid, initial_arrays, *args, **options)
        if not result.arrays:
            result.arrays = initial_arrays
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Begin a round: draw nodes, and send them the parameters and the call for a vote."""
        server = self._server
        if server is None or arrays is not self._arrays:
            server = self._server = self._make_server(arrays)
        elif server.in_progress:
            self.outcomes.append(server.finish())  # of an abandoned start()
        messages = list(super().configure_train(server_round, arrays, config, grid))
        call = server.begin(message.metadata.dst_node_id for message in messages)
        for message in messages:
            records.write_call(call, message)
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """End a round: count the valid replies; return None for the parameters of a void round.

        Raises:
            InvalidArgumentError: No round has begun.
        """
        server = self._server
        if server is None or self._arrays is None:
            raise InvalidArgumentError(
                "aggregate_train() before configure_train(). Use start(), or call both in turn"
            )
        arrived, contents = list(replies), {}
        self._check_and_log_replies(arrived, is_train=True, validate=False)
        for reply in arrived:
            node = reply.metadata.src_node_id
            if server.take(node, records.read_ballot(reply)) is None:
                contents[node] = reply.content
        outcome = server.finish()
        self.outcomes.append(outcome)
        _shown.info("\t└──> %s", _describe(outcome))
        if not outcome.committed:
            return None, None
        self._arrays = records.write_arrays(server.params, self._arrays)
        taken = [contents[node] for node in outcome.taken]
        return self._arrays, _average(taken, outcome.votes, self._train_metrics)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Average the metrics of the evaluating clients by their numbers of examples.

        A number counts up to ``max_weight`` times the median one, as in training.
        """
        arrived, taken, examples = list(replies), [], []
        self._check_and_log_replies(arrived, is_train=False, validate=False)
        for reply in arrived:
            _, n_examples = records.read_metrics(reply.content if reply.has_content() else None)
            if n_examples > 0:
                taken.append(reply.content)
                examples.append(n_examples)
            elif not reply.has_error():
                _shown.info(
                    "\t> An evaluation by node %s is not taken: it has no num-examples",
                    reply.metadata.src_node_id,
                )
        weights = weigh(examples, max_weight=self.settings.max_weight) if examples else []
        return _average(taken, weights, self._evaluate_metrics)

    def state_dict(self) -> dict[str, Any]:
        """Return the state with which a later run continues, besides the arrays.

        It has the momentum, the reach and the round.

        Raises:
            InvalidArgumentError: No round has begun.
        """
        if self._loaded is not None:
            return dict(self._loaded)
        if self._server is None:
            raise InvalidArgumentError("state_dict() before the first round. Call start() before")
        return self._server.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next ``start`` continue from a state; its ``initial_arrays`` are the saved ones.

        ``start`` raises CheckpointError if the state belongs to another model.
        """
        self._loaded, self._server = state, None

    def _make_server(self, arrays: ArrayRecord) -> VoteServer:
        """Make a server for arrays that differ from the last round's."""
        if not self._keeps_statistics:
            _refuse_statistics(list_statistics(arrays))
        params = records.read_arrays(arrays)
        server = VoteServer(params, self.settings)
        _warn_of_tied(find_equal(params))
        if self._loaded is not None:
            server.load_state_dict(self._loaded)
        elif self._server is not None:
            logger.warning("the arrays differ from the last round's: momentum begins with 0")
        self._arrays, self._loaded = arrays, None
        return server


def _warn_of_tied(pairs: Sequence[tuple[str, str]]) -> None:
    """Warn of arrays that are probably one weight under two names."""
    if pairs:
        more = f", and {len(pairs) - 1} more," if len(pairs) > 1 else ""
        logger.warning(
            "%s and %s%s have equal elements, as a tied weight has, or copies of a layer. Votes "
            "move each array by itself. Copies are fine. If both names are of one weight, leave "
            "%s out of initial_arrays, and load with strict=False on clients and in evaluations",
            *pairs[0],
            more,
            pairs[0][1],
        )


def _refuse_statistics(names: Sequence[str]) -> None:
    """Refuse running statistics.

    Raises:
        InvalidArgumentError: There are some.
    """
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise InvalidArgumentError(
            f"initial_arrays have running statistics: {names[0]}{more}. A vote moves all elements "
            "of an array by one size, so that a variance would become negative. Use GroupNorm or "
            "LayerNorm, or BatchNorm with track_running_stats=False. If clients evaluate with "
            'statistics of their own, give Votes(statistics="keep"): the server\'s then stay as '
            "they are"
        )


def _check_keys(strategy: FedAvg) -> None:
    """Refuse names of records that would be ignored, or that our record would overwrite."""
    if strategy.weighted_by_key != records.EXAMPLES:
        raise InvalidArgumentError(
            f"weighted_by_key={strategy.weighted_by_key!r}: expected {records.EXAMPLES!r}, which "
            "vote() writes. Omit it"
        )
    for name in ("arrayrecord_key", "configrecord_key"):
        if getattr(strategy, name) == records.KEY:
            raise InvalidArgumentError(
                f"{name}={records.KEY!r}: this record holds the call for a vote. Use another name"
            )


def _describe(outcome: Outcome) -> str:
    refused = "".join(f", {n} refused ({why.value})" for why, n in outcome.refused.items())
    state = "committed" if outcome.committed else "void"
    return f"Votes: {len(outcome.taken)} taken, {outcome.lost} lost{refused}; round {state}"


def _average(
    taken: Sequence[RecordDict], weights: Sequence[int], function: _Aggregate | None
) -> MetricRecord | None:
    """Average the clients' reports, by weight or by the user's function."""
    if function is not None:
        return function(list(taken), records.EXAMPLES) if taken else None
    numbers = [records.read_metrics(content)[0] for content in taken]
    means = average_metrics(list(zip(weights, numbers, strict=True)))
    return MetricRecord(dict(means)) if means else None


def vote(
    message: Message,
    before: ArrayRecord | Mapping[str, Any],
    after: ArrayRecord | Mapping[str, Any],
    num_examples: int,
    *,
    context: Context | None = None,
    metrics: Mapping[str, Any] | None = None,
    seed: int | None = None,
) -> Message:
    """Return a client's reply: one bit for each parameter, and a scale for each array.

    Args:
        message: The server's message.
        before: Arrays before local steps, from the message. Tensors and numpy arrays by name work
            too.
        after: Arrays after local steps, such as ``model.state_dict()``; names that the server did
            not send are left out.
        num_examples: Number of examples of this client, 1 or more.
        context: The client app's context, for rule "residual": its state keeps the part of deltas
            that votes have rounded away, in 32 bits.
        metrics: Numbers for the server to average, or lists of them for a function of its own.
        seed: Seed of the client's random bits, for experiments; None draws a secret one. A server
            that knows the seed knows the noise.

    Returns:
        The reply, to be returned by the client app.

    Raises:
        InvalidArgumentError: An array is missing, has another shape or is the same object before
            and after. Or the message has no call for a vote, or ``context`` is missing.
        NonFiniteError: A delta is not finite.
        UnsupportedTypeError: ``num_examples`` is no integer, or an array or a metric has a wrong
            type. Any error leaves the client's state unchanged.

    Example:
        >>> @app.train()
        ... def train(message, context):
        ...     model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        ...     num_examples = train_locally(model, context)
        ...     return vote(message, message.content["arrays"], model.state_dict(), num_examples)
    """
    call, sent = records.read_call(message)
    places = Places.of(sent)
    deltas = find_deltas(places, records.as_tensors(before, sent), records.as_tensors(after, sent))
    node = message.metadata.dst_node_id
    residuals = records.recall(_check_context(call, context), places)
    chance = secrets.randbits(63) if seed is None else seed
    ballot = cast_ballot(
        call,
        places,
        deltas,
        num_examples,
        node=node,
        coins=Coins(chance, call.round, node % _MOST_NODES),
        residuals=residuals,
    )
    reply = records.write_reply(message, ballot, metrics or {})
    if context is not None and residuals:
        records.keep(context, places, residuals)
    return reply


def _check_context(call: Call, context: Context | None) -> Context | None:
    """Return the context if the rule keeps something in it, else None.

    Raises:
        InvalidArgumentError: It is missing.
    """
    if call.rule != "residual":
        return None
    if context is None:
        raise InvalidArgumentError(
            "rule 'residual' keeps the rounding residual of votes in the state of the client. "
            "Expected context=. Pass the context of the client app to vote()"
        )
    return context
