"""One worker, or server, of a small job into which a fault is put; the fault is data.

A step's compute is paced: it sleeps, so that several workers on few cores do not disturb each other and the fault alone
makes the difference.
"""

import argparse
import time
from typing import Any

import torch
from paced import Bulk, Sleep
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

import manyhands as mh
from manyhands.cluster.launchers.detect import own_rank_info
from manyhands.servers.process.server import Server
from manyhands.servers.protocol.messages import Push

FEATURES, CLASSES, SAMPLES, BATCH = 32, 4, 4096, 16
OPTIMIZERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}


class Stalling(Dataset[tuple[Tensor, Tensor]]):
    """Samples that take so long to load, a batch at a time."""

    def __init__(self, seconds: float) -> None:
        generator = torch.Generator().manual_seed(1)
        self._inputs = torch.randn(SAMPLES, FEATURES, generator=generator)
        self._targets = self._inputs[:, :CLASSES].argmax(-1)
        self._seconds = seconds

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._inputs[index], self._targets[index]

    def __getitems__(self, indices: list[int]) -> list[tuple[Tensor, Tensor]]:
        time.sleep(self._seconds)
        return [self[index] for index in indices]


class SlowBackward(torch.autograd.Function):
    """Passes on what it is given, and sleeps on the way back."""

    @staticmethod
    def forward(context: object, value: Tensor, seconds: float) -> Tensor:
        context.seconds = seconds  # type: ignore[attr-defined]
        return value.view_as(value)

    @staticmethod
    def backward(context: object, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(context.seconds)  # type: ignore[attr-defined]
        return gradient, None


def slow_down_server(seconds: float) -> None:
    """It takes so much longer for each gradient that comes in."""
    handle = Server._handle

    def slowly(self: Server, port: Any, number: int, message: Any, payload: Any) -> None:
        if isinstance(message, Push):
            time.sleep(seconds)
        handle(self, port, number, message, payload)

    Server._handle = slowly  # type: ignore[method-assign]


def made(options: argparse.Namespace) -> nn.Module:
    """A small net; or gradients to exchange, without computation."""
    if options.bulk_mb:
        bulk = Bulk(int(options.bulk_mb * 1e6))
        bulk.step_s = options.step_s
        return bulk
    return nn.Sequential(nn.Linear(FEATURES, options.width), nn.ReLU(), nn.Linear(options.width, CLASSES))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--step-s", type=float, default=0.02)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--bulk-mb", type=float, default=0.0, help="a model of so much, without compute")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd")
    parser.add_argument("--rate", type=float, default=0.01)
    parser.add_argument("--fault", choices=("none", "backward", "forward", "input", "server"))
    parser.add_argument("--at", type=int, default=-1, help="the worker or server; -1: all of them")
    parser.add_argument("--seconds", type=float, default=0.0)
    options = parser.parse_args()
    rank_info = own_rank_info()
    is_server = rank_info.server is not None
    number = rank_info.server if is_server else rank_info.known_as
    is_hit = options.at in (-1, number) and is_server == (options.fault == "server")
    faulty_s: dict[str, float] = {options.fault: options.seconds} if is_hit else {}
    if seconds := faulty_s.get("server", 0.0):
        slow_down_server(seconds)

    torch.manual_seed(0)
    model = made(options)
    optimizer = OPTIMIZERS[options.optimizer](model.parameters(), lr=options.rate)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        inputs, targets = batch
        if isinstance(model, Bulk):
            return model(inputs).square()
        if late_s := faulty_s.get("forward", 0.0):
            time.sleep(late_s)
        value = functional.cross_entropy(model(inputs), targets)
        return SlowBackward.apply(Sleep.apply(value, options.step_s), faulty_s.get("backward", 0.0))

    session = mh.session(model, optimizer, loss)
    while session.steps < options.steps:
        for batch in session.batches(Stalling(faulty_s.get("input", 0.0)), batch_size=BATCH):
            session.step(batch)
            if session.steps >= options.steps:
                break
    session.finish()


if __name__ == "__main__":
    main()
