"""Records of runs that never ran."""

from distlion_lab.training.record import Record, describe_versions


def make_record(**changes):
    """Return a record of two workers; changes replace what it says."""
    fields = {
        "settings": {"steps": 1},
        "versions": describe_versions(),
        "task": {"name": "text"},
        "trainable_parameters": 10,
        "world_size": 2,
        "initial_validation_loss": 5.0,
        "final_validation_loss": 4.0,
        "final_validation_accuracy": 0.25,
        "final_train_loss": 4.5,
        "wall_s": 1.0,
        "sent_bytes_per_worker": 100,
        "full_precision_bytes_per_worker": 3200,
        "bits_per_parameter": 1.5,
        "replicas_equal": True,
        "traffic": {"steps": 1},
        "losses": {"step": [0], "loss": [4.5]},
        "evaluations": {"step": [0], "loss": [5.0]},
        "diagnostics": [],
    }
    return Record(**fields | changes)
