"""A Grid in this process: it hands messages to clients, and their replies to a test."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

from flwr.app import Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

# Private; a SuperLink would set them in the process of a server app.
TaskIdentity.run_id = TaskIdentity.task_id = 1
TaskIdentity.node_id = 0

Train = Callable[[Message, Context], Message]
Deliver = Callable[[list[Message]], list[Message]]


class InProcessGrid:
    """The part of a Grid that ``Strategy.start`` needs.

    Args:
        train: The client app.
        n_nodes: Number of clients, from 1 on.
        deliver: What happens to the replies of a round.
    """

    def __init__(self, train: Train, n_nodes: int, deliver: Deliver = list) -> None:
        self._train, self._deliver = train, deliver
        self.contexts = {
            node: Context(
                run_id=1,
                node_id=node,
                node_config={"partition-id": node - 1, "num-partitions": n_nodes},
                state=RecordDict(),
                run_config={},
            )
            for node in range(1, n_nodes + 1)
        }

    def get_node_ids(self) -> list[int]:
        return list(self.contexts)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        replies = []
        for message in messages:
            assert message.metadata.message_type == "train"
            node = message.metadata.dst_node_id
            replies.append(self._train(copy.copy(message), self.contexts[node]))
        # Nobody is asked to evaluate.
        return self._deliver(replies) if replies else []
