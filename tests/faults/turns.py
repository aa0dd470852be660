"""What runs with several sessions train: a discriminator and a generator, each stepped once for every batch, and on
request a session that is over before. It says what it does, and kills itself where it is told to."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import manyhands as mh

LENGTH, BATCH, LR = 240, 8, 0.02
NAMES = ("d", "g")


class Numbered:
    """Real samples and noise that know their number."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.real = torch.randn(LENGTH, 6, generator=generator).double() * 0.3 + 1.0
        self.noise = torch.randn(LENGTH, 4, generator=generator).double()

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        raise NotImplementedError("taken by the batch")

    def batch(self, indices: Tensor, epoch: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.real[indices], self.noise[indices], indices


def nets() -> tuple[nn.Module, nn.Module]:
    """The discriminator and the generator."""
    torch.manual_seed(0)
    discriminator = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)).double()
    return discriminator, nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 6)).double()


def losses(
    discriminator: nn.Module, generator: nn.Module
) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    def of_discriminator(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        real, fake = model(batch[0]), model(generator(batch[1]).detach())
        return F.softplus(-real).mean() + F.softplus(fake).mean()

    def of_generator(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return F.softplus(-discriminator(model(batch[1]))).mean()

    return of_discriminator, of_generator


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)


def main() -> None:
    folder, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
    number = int(os.environ.get("MANYHANDS_NUMBER") or os.environ["MANYHANDS_RANK"])
    path = folder / f"log-{number}.jsonl"
    is_first = not path.exists()
    log = path.open("a", buffering=1)

    def note(**row: Any) -> None:
        log.write(json.dumps(row) + "\n")

    note(kind="start", pid=os.getpid())
    todo = [(when, kind) for who, when, kind in settings["faults"] if who == number and is_first]
    sessions: dict[str, Any] = {}

    def watched(name: str, loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def disturbed(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
            value = loss(model, batch)
            session = sessions.get(name)
            if session is None or not model.training:
                return value
            is_early = session.workers < settings.get("until", 0)
            time.sleep(0.5 if is_early else settings.get("pause_s", 0.0))
            for when, kind in list(todo):
                if kind == name and session.steps + 1 == when:
                    note(kind="fault", step=when, fault=kind)
                    os.kill(os.getpid(), signal.SIGKILL)
            return value

        return disturbed

    torch.set_num_threads(1)
    models, data = nets(), Numbered()
    before: dict[str, Any] = {}
    if settings.get("before"):  # what a session trained that is over when the others begin
        warm = nn.Linear(6, 6).double()
        with mh.session(warm, optimizer(warm), lambda model, batch: model(batch[0]).square().mean()) as first:
            for batch in first.batches(data, batch_size=BATCH):
                first.step(batch)
            before["loss"] = first.evaluate(data)["loss"]
        before["sum"] = sum(float(param.detach().sum()) for param in warm.parameters())
    for name, model, loss in zip(NAMES, models, losses(*models), strict=True):
        sessions[name] = mh.session(model, optimizer(model), watched(name, loss))
    d = sessions["d"]
    for _ in range(settings.get("epochs", 2)):
        for batch in d.batches(data, batch_size=BATCH):
            for name, session in sessions.items():
                note(kind="step", of=name, step=session.steps + 1, ids=batch[2].tolist())
                takeovers = session.engine.progress.takeovers
                session.step(batch)
                if session.engine.progress.takeovers == takeovers:
                    note(kind="made", of=name, step=session.steps, samples=session.samples, epoch=d.epoch)
    found = [session.evaluate(data)["loss"] for session in sessions.values()]
    for session in sessions.values():
        session.close()
    every = [param for model in models for param in model.parameters()]
    torch.save(nn.utils.parameters_to_vector(every).detach(), folder / f"params-{number}.pt")
    note(
        kind="end",
        pid=os.getpid(),
        steps=[session.steps for session in sessions.values()],
        tally=dict(d.engine.feeds.tally),
        loss=found,
        before=before,
    )


if __name__ == "__main__":
    main()
