"""Frameworks whose Trainers are members of a crew: one is killed, and a newcomer comes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import distlion
from crews import await_members, make_crew, make_model
from distlion import faults
from distlion.crew import CrewLion

STRUCK_AT, CALLED_AT, COME_BY, GOAL = 8, 14, 20, 30
MEMBERS = 4
"""The first one is killed, and the last one comes later."""

Train = Callable[[distlion.Crew, nn.Module, CrewLion, Any, Callable[[], None], str], int]
"""Train to the goal with a scheduler, and call a function after each step.

It returns the steps that the framework has counted.
"""


def draw_data(member: int) -> list[tuple[Tensor, Tensor]]:
    """Return the examples of a member."""
    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(member))
    return list(zip(inputs, inputs[:, :4].argmax(1), strict=True))


def be_member(rank: int, size: int, port: int, train: Train, folder: str) -> dict[str, Any]:
    """Be one of the crew, trained by a framework."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)  # type: ignore[attr-defined]
    if rank == size - 1:
        store.wait(["come"])
    model, digests = make_model(rank), {}
    with make_crew(port, min_workers=2) as crew:
        optimizer = crew.optimizer(
            model.named_parameters(), lr=1e-2, timeouts=distlion.Timeouts(step_s=20), retry=True
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        crew.carry(scheduler=scheduler)
        if rank != size - 1:
            while crew.size < size - 1:
                await_members(crew, size - 1)
                optimizer.form(())

        let_in: list[str] = []
        admit = optimizer.admit

        def admit_and_note() -> bool:
            has_changed = admit()
            if has_changed:
                let_in.append(sys._getframe(1).f_code.co_name)
            return has_changed

        optimizer.admit = admit_and_note  # type: ignore[method-assign]

        def note() -> None:
            step = optimizer.committed_step
            digests[step] = b"".join(bytes(param.detach().numpy()) for param in model.parameters())
            if rank == 0 and step == STRUCK_AT:
                faults.arm(
                    rank=crew.rank,
                    step=STRUCK_AT,
                    point="before_commit",
                    action=lambda _: os.kill(os.getpid(), signal.SIGKILL),
                )
            if step == CALLED_AT:
                store.set("come", "")
            await_members(crew, size - 1 if step == COME_BY else 0)

        counted = train(crew, model, optimizer, scheduler, note, f"{folder}/{rank}")
        rate = optimizer.param_groups[0]["lr"]
        first = min(digests)
        return {
            "digests": digests,
            "rate": rate,
            "counted": counted,
            "first": first,
            "let_in": let_in,
        }


def train_with_trainer(
    crew: distlion.Crew,
    model: nn.Module,
    optimizer: CrewLion,
    scheduler: Any,
    note: Callable[[], None],
    folder: str,
) -> int:
    """Train with Hugging Face's Trainer."""
    from transformers import (
        PretrainedConfig,
        PreTrainedModel,
        Trainer,
        TrainerCallback,
    )

    from distlion.integrations.crew_trainer import CrewMixin

    class CrewTrainer(CrewMixin, Trainer): ...

    losses: list[float] = []
    begun = optimizer.committed_step

    class WithLoss(PreTrainedModel):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(PretrainedConfig())
            self.model = model
            self.post_init()

        def _init_weights(self, module: nn.Module) -> None:
            """Leave them as the crew has made them."""

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            loss = nn.functional.cross_entropy(self.model(x), labels)
            losses.append(loss.item())
            return {"loss": loss}

    class Noting(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            note()

    data = [{"x": x, "labels": label} for x, label in draw_data(0)]
    trainer = CrewTrainer(
        WithLoss(),
        make_arguments(folder, crew.id),
        train_dataset=data,
        optimizers=(optimizer, scheduler),
        callbacks=[Noting()],
    )
    trainer.train()
    check_trainer(trainer, losses, begun)
    steps: int = trainer.state.global_step
    return steps


def make_arguments(folder: str, member: int) -> Any:
    """Return the TrainingArguments of a member."""
    from transformers import TrainingArguments

    return TrainingArguments(
        folder,
        max_steps=GOAL,
        per_device_train_batch_size=4,
        data_seed=member,
        logging_steps=5,
        save_steps=GOAL // 2,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
    )


def check_trainer(trainer: Any, losses: list[float], begun: int) -> None:
    """Check the loss that was logged first, and the models that were saved."""
    first = trainer.state.log_history[0]
    n_first = first["step"] - begun
    assert first["loss"] == pytest.approx(sum(losses[:n_first]) / n_first, abs=1e-3)
    for step in (GOAL // 2, GOAL):  # each member saves its own, unless it came later
        saved = Path(trainer.args.output_dir, f"checkpoint-{step}", "model.safetensors")
        assert saved.is_file() == (step > begun)


def train_with_lightning(
    crew: distlion.Crew,
    model: nn.Module,
    optimizer: CrewLion,
    scheduler: Any,
    note: Callable[[], None],
    folder: str,
) -> int:
    """Train with Lightning's Trainer."""
    import lightning
    from torch.utils.data import DataLoader

    from distlion.integrations.lightning import CrewSteps

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model, self.counted = model, optimizer.committed_step

        def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

        def on_train_batch_end(self, *args: Any) -> None:
            if self.counted != optimizer.committed_step:  # else more micro-batches follow
                self.counted = optimizer.committed_step
                note()

        def configure_optimizers(self) -> Any:
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
            }

    order = torch.Generator().manual_seed(crew.id)
    loader = DataLoader(draw_data(0), batch_size=4, shuffle=True, generator=order)  # type: ignore[arg-type]
    module = Module()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=-1,
        callbacks=[CrewSteps(GOAL)],
        accumulate_grad_batches=2,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(module, loader)
    return module.counted


def train_with_accelerate(
    crew: distlion.Crew,
    model: nn.Module,
    optimizer: CrewLion,
    scheduler: Any,
    note: Callable[[], None],
    folder: str,
) -> int:
    """Train with a loop of Accelerate's, which prepares all but the optimizer."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    prepared = accelerator.prepare(model)
    while optimizer.committed_step < GOAL:
        optimizer.admit()
        generator = torch.Generator().manual_seed(100 * optimizer.committed_step + crew.id)
        inputs = torch.randn(4, 8, generator=generator)
        loss = nn.functional.cross_entropy(prepared(inputs), inputs[:, :4].argmax(1))
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        note()
    return optimizer.committed_step
