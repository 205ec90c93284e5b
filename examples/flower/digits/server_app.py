"""The server: it counts votes, and evaluates the model on digits that no client has."""

import json
from pathlib import Path

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from digits import task
from distlion_flower import bridge as flower

app = ServerApp()


def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    model = task.make_model()
    model.load_state_dict(arrays.to_torch_state_dict())
    return MetricRecord({"accuracy": task.measure_accuracy(model)})


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    strategy = flower.Votes(
        rule=config["rule"],
        lr=config["lr"],
        momentum=0.9,
        weights="examples",
        min_replies=2,
        fraction_train=config["fraction-train"],
        fraction_evaluate=0.0,
    )
    result = strategy.start(
        grid,
        ArrayRecord(task.make_model().state_dict()),
        num_rounds=config["num-server-rounds"],
        evaluate_fn=evaluate,
    )
    accuracy = [found["accuracy"] for found in result.evaluate_metrics_serverapp.values()]
    votes = [outcome for outcome in strategy.outcomes if outcome.committed]
    n_votes = sum(len(outcome.taken) for outcome in votes)
    summary = {
        "accuracy": accuracy[-1],
        "rounds": len(votes),
        "votes": n_votes,
        "bytes-up": sum(outcome.counted_bytes for outcome in votes) / max(1, n_votes),
        "bytes-up-float32": 4 * sum(each.numel() for each in task.make_model().parameters()),
    }
    print(json.dumps(summary))
    if config["result"]:
        Path(config["result"]).write_text(json.dumps(summary))
