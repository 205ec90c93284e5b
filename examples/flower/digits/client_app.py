"""A client: local steps on data of its own, then one bit for each parameter."""

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from digits import task
from distlion_flower import bridge as flower

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train from the server's parameters, and vote on the result."""
    config, node = context.run_config, context.node_config
    arrays = message.content["arrays"]
    model = task.make_model()
    model.load_state_dict(arrays.to_torch_state_dict())
    part = task.load_part(node["partition-id"], node["num-partitions"], config["skew"])
    server_round = message.content["config"]["server-round"]
    loss = task.train(model, part, config["local-steps"], config["local-lr"], seed=server_round)
    return flower.vote(
        message,
        arrays,
        model.state_dict(),
        num_examples=len(part[1]),
        context=context,
        metrics={"train-loss": loss},
    )
