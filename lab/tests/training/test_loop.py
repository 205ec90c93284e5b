import itertools
import math

import pytest
import torch

import matrix
from cluster import run_workers
from distlion.errors import NonFiniteError
from distlion_lab.tasks.base import Batch
from distlion_lab.tasks.text import TextTask, Tokenizer
from distlion_lab.training.loop import TrainingLoop, lr_factor
from distlion_lab.training.methods import BASELINE_NAMES
from distlion_lab.training.train_settings import Schedule, TrainSettings

CONFIG = (
    '{"model_type": "gpt2", "vocab_size": 256, "n_positions": 16, "n_embd": 16, "n_layer": 1, '
    '"n_head": 2, "resid_pdrop": %s, "embd_pdrop": 0, "attn_pdrop": 0}'
)
RULES = (*matrix.first_of_each_class(), "signsgd", *BASELINE_NAMES)
SECONDS_PER_RULE = 10


def ignore(progress):
    pass


def train_tiny(rank, world_size, folder, dropout=0.0, observe=ignore, **given):
    path = folder / f"config-{rank}.json"
    path.write_text(CONFIG % dropout)
    settings = TrainSettings.with_defaults(workers=world_size, steps=6, eval_every=4, **given)
    task = TextTask(data=None, tokenizer=Tokenizer.BYTE, model_config=path, batch_size=2)
    return TrainingLoop(settings, task, observe).run()


def train_all_rules(rank, world_size, folder):
    return {rule: train_tiny(rank, world_size, folder, rule=rule) for rule in RULES}


def train_tiny_dropout(rank, world_size, folder, start):
    torch.manual_seed(start)
    record = train_tiny(rank, world_size, folder, dropout=0.5)
    return record.losses["loss"]


def evaluate_untrained(rank, world_size, folder):
    return train_tiny(rank, world_size, folder).evaluations["loss"][0]


def observe_tiny(rank, world_size, folder):
    seen = []
    train_tiny(rank, world_size, folder, observe=seen.append)
    return seen


class BrokenTask:
    """One parameter, and a loss that is not finite from step 2 on, although its gradient is."""

    name = unit = "broken"
    units_per_batch = 1

    def build_model(self, *, seed):
        return BrokenModel()

    def training_batch(self, *, seed, step, rank, world_size):
        return Batch({"factor": torch.tensor(math.inf if step >= 2 else 1.0)}, torch.tensor([0]))

    def heldout_batches(self):
        return [Batch({"factor": torch.tensor(1.0)}, torch.tensor([0]))]


class BrokenModel(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, factor):
        class Output:
            logits = torch.stack([self.weight * 0, self.weight * 0 + factor.clamp(max=0)], dim=-1)

        if math.isinf(float(factor)):
            Output.logits = Output.logits - torch.tensor([math.inf, 0.0])
        return Output


def train_broken(rank, world_size):
    settings = TrainSettings.with_defaults(workers=world_size, rule="global-lion", steps=4)
    with pytest.raises(NonFiniteError, match="smaller lr") as raised:
        TrainingLoop(settings, BrokenTask(), ignore).run()
    return raised.value.step


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    return run_workers(train_tiny, 2, tmp_path_factory.mktemp("record"))[0]


@pytest.fixture(scope="module")
def records_of_all(tmp_path_factory):
    folder, timeout_s = tmp_path_factory.mktemp("records"), 60 + SECONDS_PER_RULE * len(RULES)
    return run_workers(train_all_rules, 2, folder, timeout_s=timeout_s)[0]


def make_schedule(**given):
    settings = TrainSettings.with_defaults(steps=100, warmup_steps=10, **given)
    return [lr_factor(step, settings=settings) for step in range(100)]


def test_warm_up_rises_in_equal_parts_to_the_full_rate():
    assert make_schedule()[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])


def test_cosine_falls_to_a_tenth():
    factors = make_schedule()
    assert factors[10] == 1.0
    # One step before the end of the half wave: above a tenth by 0.9 (1 - cos(pi / 90)) / 2 = 3e-4.
    assert factors[-1] == pytest.approx(0.1, abs=4e-4)
    assert all(later < earlier for earlier, later in itertools.pairwise(factors[10:]))


def test_constant_schedule_stays_after_the_warm_up():
    assert set(make_schedule(schedule=Schedule.CONSTANT)[9:]) == {1.0}


@pytest.mark.distributed
def test_evaluations_come_first_now_and_then_and_last(record):
    assert record.evaluations["step"] == [0, 4, 6]


@pytest.mark.distributed
def test_initial_and_final_validation_loss_are_those_of_the_series(record):
    ends = (record.evaluations["loss"][0], record.evaluations["loss"][-1])
    assert (record.initial_validation_loss, record.final_validation_loss) == ends


@pytest.mark.distributed
def test_training_lowers_the_validation_loss(record):
    assert record.final_validation_loss < record.initial_validation_loss


@pytest.mark.distributed
def test_every_step_has_a_loss_and_a_time(record):
    assert record.losses["step"] == list(range(6))
    assert len(record.losses["loss"]) == len(record.losses["seconds"]) == 6


@pytest.mark.distributed
def test_full_precision_bytes_are_those_of_a_ring_all_reduce(record):
    # Two workers: each sends 2 (2 - 1) / 2 = 1 times 4 bytes of every parameter in each of 6 steps.
    assert record.full_precision_bytes_per_worker == 4 * record.trainable_parameters * 6


@pytest.mark.distributed
@pytest.mark.parametrize("rule", RULES)
def test_replicas_end_equal_under_every_rule(rule, records_of_all):
    assert records_of_all[rule].replicas_equal


@pytest.mark.distributed
def test_evaluation_is_bitwise_identical_for_any_number_of_workers(tmp_path):
    losses = {
        loss
        for world_size in (1, 2, 3)
        for loss in run_workers(evaluate_untrained, world_size, tmp_path)
    }
    assert len(losses) == 1


@pytest.mark.distributed
def test_dropout_depends_on_the_seed_and_not_on_the_global_generator(tmp_path):
    first = run_workers(train_tiny_dropout, 2, tmp_path, 1)
    second = run_workers(train_tiny_dropout, 2, tmp_path, 2)
    assert first == second


@pytest.mark.distributed
def test_progress_is_observed_on_rank_0_alone(tmp_path):
    first, second = run_workers(observe_tiny, 2, tmp_path)
    assert [progress.step for progress in first] == list(range(7))
    assert second == []


@pytest.mark.distributed
def test_loss_that_is_not_finite_ends_the_run_at_its_step():
    assert run_workers(train_broken, 1) == [2]
