"""Trainers log what voting was like by their own means."""

import pytest
import torch

from cluster import run_workers
from distlion import Agreement
from integrations.exam import tell_place

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def log_with_trainer(rank, world_size, folder):
    from integrations.hf_job import make_trainer

    tell_place(rank, world_size)
    trainer = make_trainer(folder, rank, optimizer={"agreement": Agreement(every=1)})
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def test_hugging_face_trainer_logs_votes_with_its_loss(tmp_path):
    for entries in run_workers(log_with_trainer, 2, str(tmp_path), timeout_s=200):
        assert len(entries) == 4
        for entry in entries:
            assert entry["votes/sent_bytes"] > 0
            assert 0 < entry["votes/margin"] <= 1


def log_with_lightning(rank, world_size, folder):
    import lightning
    from lightning.pytorch.loggers import CSVLogger

    from distlion.integrations.lightning import DistributedLion, VoteMonitor, VotingStrategy

    tell_place(rank, world_size)

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(2, 1)

        def configure_optimizers(self):
            return DistributedLion(self.parameters(), lr=1e-3)

        def training_step(self, batch, number):
            return self.net(batch).square().sum()

    logger = CSVLogger(folder)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=VotingStrategy(),
        max_steps=4,
        log_every_n_steps=2,
        callbacks=[VoteMonitor()],
        logger=logger,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.ones(16, 2)))
    return [dict(row) for row in logger.experiment.metrics] if rank == 0 else []


def test_lightning_logs_votes_every_n_steps(tmp_path):
    pytest.importorskip("lightning")
    rows, _ = run_workers(log_with_lightning, 2, str(tmp_path), timeout_s=200)
    voted = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text().splitlines()
    assert "votes/sent_bytes" in voted[0]
    assert len(voted) == 3, rows


def log_with_accelerate(rank, world_size, folder):
    from accelerate.tracking import GeneralTracker

    from distlion.integrations.accelerate import DistributedLion, VotingAccelerator

    tell_place(rank, world_size)

    class Tracker(GeneralTracker):
        name = "list"
        requires_logging_directory = False
        tracker = None

        def __init__(self):
            super().__init__()
            self.logged = []

        def store_init_configuration(self, values):
            pass

        def log(self, values, step=None, **more):
            self.logged.append((step, values))

    tracker = Tracker()
    accelerator = VotingAccelerator(cpu=True, log_with=tracker)
    accelerator.init_trackers("test")
    model = torch.nn.Linear(2, 1)
    optimizer = DistributedLion(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    for step in range(2):
        accelerator.backward(model(torch.ones(3, 2)).square().sum())
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log_votes(step=step)
    return tracker.logged


def test_accelerate_logs_votes_to_its_trackers(tmp_path):
    pytest.importorskip("accelerate")
    logged, _ = run_workers(log_with_accelerate, 2, str(tmp_path), timeout_s=200)
    assert [step for step, _ in logged] == [0, 1]
    assert all(values["votes/sent_bytes"] > 0 for _, values in logged)
