"""One process of a contender of adapters.py: the same training, written for the session, each adapter and each package.

Every contender loads the same samples by the same `DataLoader`. Its loop does not end by itself.
"""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from jobs import ADAPTED, CLASSES, Job
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset
from turns import Paced

import manyhands as mh
from manyhands import models

LIMIT = 1e6  # of the gradient's norm: it is looked at, and never reached
SAMPLES = 1 << 22  # of an epoch, which no run comes to the end of
DISTINCT = 256


class Samples(Dataset[dict[str, Tensor]]):
    """Random ones, of which a few come again and again."""

    def __init__(self, job: Job) -> None:
        generator = torch.Generator().manual_seed(1000)
        self._inputs = torch.randn(DISTINCT, *job.shape, generator=generator)
        self._labels = torch.randint(CLASSES, (DISTINCT,), generator=generator)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": self._inputs[index % DISTINCT], "labels": self._labels[index % DISTINCT]}


class Net(nn.Module):
    """A model of ours with the loss in it, as Hugging Face's are."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.inner = models.build(job.model, job.shape, CLASSES)

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": functional.cross_entropy(self.inner(inputs), labels)}


class Run:
    """What all contenders begin with."""

    def __init__(self, job: Job, batch: int, baton: str) -> None:
        torch.manual_seed(0)
        self.job, self.batch, self._baton = job, batch, baton
        self.model = Net(job)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.001, momentum=0.9)
        self.loader = DataLoader(Samples(job), batch_size=batch)

    def paced(self, rank: int) -> Paced:
        return Paced(self._baton, rank, {"batch": self.batch})

    def session(self, **settings: Any) -> Any:
        return mh.session(self.model, self.optimizer, lambda model, batch: model(**batch)["loss"], **settings)


def native(run: Run, **settings: Any) -> None:
    session = run.session(**settings)
    paced = run.paced(session.rank)
    for batch in session.batches(run.loader):
        paced.step(float(session.step(batch)))


def native_clipped(run: Run) -> None:
    native(run, clip_norm=LIMIT)


def halves(run: Run) -> None:
    session = run.session()
    paced = run.paced(session.rank)
    for batch in session.batches(run.loader):
        loss = session.backward(batch)
        session.update()
        paced.step(float(loss))


def prepared(run: Run, *, clips: bool = False) -> None:
    model, optimizer, loader = mh.prepare(run.model, run.optimizer, run.loader)
    _loop(model, optimizer, loader, run.paced(optimizer.session.rank), clips=clips)


def prepared_clipped(run: Run) -> None:
    prepared(run, clips=True)


def plain(run: Run) -> None:
    _loop(run.model, run.optimizer, run.loader, run.paced(0))


def _loop(model: nn.Module, optimizer: Any, loader: Any, paced: Paced, *, clips: bool = False) -> None:
    """The loop that PyTorch's tutorials teach."""
    for batch in loader:
        optimizer.zero_grad()
        loss = model(**batch)["loss"]
        loss.backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        optimizer.step()
        paced.step(loss.item())


def ddp(run: Run, *, clips: bool = False) -> None:
    """A script that is written for DDP, with another import."""
    from manyhands.adapters.ddp import DistributedDataParallel, DistributedSampler

    model = DistributedDataParallel(run.model)
    sampler = DistributedSampler(run.loader.dataset, shuffle=False)
    loader = DataLoader(run.loader.dataset, batch_size=run.batch, sampler=sampler)
    _loop(model, run.optimizer, loader, run.paced(mh.rank()), clips=clips)


def ddp_clipped(run: Run) -> None:
    ddp(run, clips=True)


def fit(run: Run) -> None:
    """It wants pairs, and tells of epochs alone: the loss function ends a step where the next one begins."""
    paced: list[Paced] = []
    last: list[float] = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if not paced:
            paced.append(run.paced(mh.rank()))
        if last:
            paced[0].step(last.pop())
        found = functional.cross_entropy(outputs, targets)
        last.append(found.item())
        return found

    pairs = DataLoader(_Pairs(run.job), batch_size=run.batch)
    optimizer = torch.optim.SGD(run.model.inner.parameters(), lr=0.001, momentum=0.9)
    mh.fit(run.model.inner, pairs, optimizer=optimizer, loss=loss, batch_size=None)


class _Pairs(Samples):
    def __getitem__(self, index: int) -> Any:
        return self._inputs[index % DISTINCT], self._labels[index % DISTINCT]


def lightning(run: Run) -> None:
    from manyhands.adapters.lightning import ManyhandsStrategy

    _train_by_lightning(run, {"strategy": ManyhandsStrategy()}, lambda: mh.rank())


def lightning_alone(run: Run) -> None:
    _train_by_lightning(run, {}, lambda: 0)


def _train_by_lightning(run: Run, settings: dict[str, Any], rank: Callable[[], int]) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = run.model

        def training_step(self, batch: dict[str, Tensor], number: int) -> Tensor:
            return self.net(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return run.optimizer

    class EndOfStep(lightning.Callback):
        def on_train_start(self, *arguments: Any) -> None:
            self.paced = run.paced(rank())

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *rest: Any) -> None:
            self.paced.step(float(outputs["loss"]))

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[EndOfStep()],
        **settings,
    )
    trainer.fit(Module(), run.loader)


def trainer(run: Run, *, limit: float = 0.0) -> None:
    from manyhands.adapters.hugging_face import ManyhandsTrainer  # before TrainingArguments

    _train_by_hugging_face(run, ManyhandsTrainer, limit, lambda: mh.rank())


def trainer_clipped(run: Run) -> None:
    """As the Trainer is without a word: it limits the norm."""
    trainer(run, limit=LIMIT)


def trainer_alone(run: Run) -> None:
    from transformers import Trainer

    _train_by_hugging_face(run, Trainer, 0.0, lambda: 0)


def _train_by_hugging_face(run: Run, made: Any, limit: float, rank: Callable[[], int]) -> None:
    from transformers import TrainerCallback, TrainingArguments

    class EndOfStep(TrainerCallback):
        def on_train_begin(self, *arguments: Any, **settings: Any) -> None:
            self.paced = run.paced(rank())

        def on_step_end(self, *arguments: Any, **settings: Any) -> None:
            self.paced.step(0.0)  # it tells no loss

    with TemporaryDirectory() as folder:
        settings = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=run.batch,
            max_steps=SAMPLES // run.batch,
            lr_scheduler_type="constant",
            max_grad_norm=limit,
            train_sampling_strategy="sequential",
            report_to="none",
            logging_strategy="no",
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = made(
            model=run.model,
            args=settings,
            train_dataset=Samples(run.job),
            optimizers=(run.optimizer, None),
            callbacks=[EndOfStep()],
        )
        trainer.train()


CONTENDERS = {
    "native": native,
    "native-clipped": native_clipped,
    "halves": halves,
    "prepared": prepared,
    "ddp": ddp,
    "ddp-clipped": ddp_clipped,
    "prepared-clipped": prepared_clipped,
    "fit": fit,
    "lightning": lightning,
    "trainer": trainer,
    "trainer-clipped": trainer_clipped,
    "plain-alone": plain,
    "lightning-alone": lightning_alone,
    "trainer-alone": trainer_alone,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--job", choices=ADAPTED, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--baton", required=True)
    options = parser.parse_args()
    if options.contender.endswith("-alone"):
        from manyhands.cluster.worker.heap import keep_freed_memory

        keep_freed_memory()  # as our workers do
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):  # accelerate would make a group of one
            os.environ.pop(name, None)
    run = Run(ADAPTED[options.job], options.batch, options.baton)
    CONTENDERS[options.contender](run)


if __name__ == "__main__":
    main()
