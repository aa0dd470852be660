"""One worker of a model laid over several: times its steps, counts what it waited, and looks at its memory."""

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from processes import leave_result
from torch import nn

import manyhands as mh
from manyhands import models, telemetry
from manyhands.job import declared

BATCHES = 4


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model, the shape of one sample, the classes (or the vocabulary), and samples per step."""

    title: str
    model: str
    shape: tuple[int, ...]
    classes: int = 10
    batch: int = 32


JOBS = {
    "vgg16": Job(title="VGG16 (one linear layer), 3×32×32", model="vgg16:head=linear", shape=(3, 32, 32)),
    "resnet50": Job(title="ResNet50, 3×32×32", model="resnet50", shape=(3, 32, 32)),
    "lstm": Job(title="LSTM, 4 layers of 256, 64 tokens", model="lstm:layers=4", shape=(64,), classes=256),
    "transformer": Job(
        title="transformer, 8 layers of 256, 64 tokens",
        model="transformer:layers=8,width=256",
        shape=(64,),
        classes=256,
    ),
    "mlp": Job(title="MLP, 12 layers of 2048", model=f"mlp:hidden={'-'.join(['2048'] * 12)}", shape=(2048,)),
    "small": Job(title="MLP 64-64-64", model="mlp:hidden=64-64-64", shape=(64,)),
}


def make_batches(work: Job, samples: int) -> list[Any]:
    generator = torch.Generator().manual_seed(1)

    def batch() -> Any:
        if len(work.shape) == 1 and work.classes > 10:
            tokens = torch.randint(0, work.classes, (samples, work.shape[0] + 1), generator=generator)
            return tokens[:, :-1], tokens[:, 1:]
        inputs = torch.randn(samples, *work.shape, generator=generator)
        return inputs, torch.randint(0, work.classes, (samples,), generator=generator)

    return [batch() for _ in range(BATCHES)]


def build(work: Job) -> nn.Module:
    torch.manual_seed(0)
    return models.build(work.model, work.shape, work.classes)


def memory_bytes(name: str) -> int:
    """A line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def _without_a_model(placement: str) -> int:
    """The memory of a worker in the same placement whose model is too small to count."""
    work = JOBS["small"]
    batch = make_batches(work, work.batch)[0]
    model = build(work)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    session = mh.session(model, optimizer, declared.loss, placement=placement, example=batch)
    session.step(batch)
    session.close()
    return memory_bytes("VmRSS")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--job", choices=JOBS, required=True)
    parser.add_argument("--batch", type=int, help="samples of a batch; those of the job where not given")
    parser.add_argument("--placement", default="single")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warm-up", type=int, default=0)
    options = parser.parse_args()
    work = JOBS[options.job]
    torch.set_num_threads(1)
    samples = options.batch or work.batch
    batches = make_batches(work, samples)
    empty_bytes = _without_a_model(options.placement)
    model = build(work)
    weights_bytes = sum(param.nbytes for param in model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    session = mh.session(model, optimizer, declared.loss, placement=options.placement, example=batches[0])
    for number in range(options.warm_up):
        session.step(batches[number % BATCHES])
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before, start = telemetry.totals(), time.monotonic()
    for number in range(options.steps):
        session.step(batches[number % BATCHES])
    wall_s = time.monotonic() - start
    after = telemetry.totals()
    leave_result(
        options.folder,
        session.rank,
        {
            "wall_s": wall_s,
            "samples_per_s": options.steps * samples * session.engine.placed.mesh.feeds / wall_s,
            **{
                name: after.get(name, 0) - before.get(name, 0) for name in ("wait_s", "compute_s", "update_s")
            },
            "peak_bytes": memory_bytes("VmHWM") - empty_bytes,
            "weights_bytes": weights_bytes,
        },
    )
    sys.stdout.flush()


if __name__ == "__main__":
    main()
