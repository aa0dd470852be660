"""One worker of PyTorch's own pipelining over Gloo, with the model cut where we cut it."""

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from placement_worker import BATCHES, JOBS, build, make_batches
from processes import leave_result
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional

from manyhands.placement.pipeline.balance import balanced
from manyhands.placement.pipeline.cutting import costs_of
from manyhands.placement.pipeline.microbatches import microbatches
from manyhands.placement.pipeline.tracer import record


class _Dense(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.view_as(value) if value.is_contiguous() else value.contiguous()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].contiguous()


class Dense(nn.Module):
    """Gloo sends only what lies in one piece, activations and their gradients."""

    def forward(self, value: Tensor) -> Tensor:
        dense: Tensor = _Dense.apply(value)
        return dense


SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--job", choices=JOBS, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--schedule", choices=SCHEDULES, required=True)
    parser.add_argument("--microbatches", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warm-up", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, stages = dist.get_rank(), dist.get_world_size()
    work = JOBS[options.job]
    batches = make_batches(work, options.batch)
    module = own_layers(build(work), batches[0], options.microbatches, rank, stages)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.001, momentum=0.9)
    stage = PipelineStage(module, rank, stages, torch.device("cpu"))
    schedule = SCHEDULES[options.schedule](stage, options.microbatches, loss_fn=loss)

    def step(number: int) -> None:
        inputs, targets = batches[number % BATCHES]
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(inputs)
        elif rank == stages - 1:
            schedule.step(target=targets, losses=[])
        else:
            schedule.step()
        optimizer.step()

    for number in range(options.warm_up):
        step(number)
    dist.barrier()
    start, computed_before_s = time.monotonic(), time.thread_time()
    for number in range(options.steps):
        step(number)
    # With one thread per worker, it waits when it does not compute: nobody else counts that for us.
    computed_s = time.thread_time() - computed_before_s
    dist.barrier()
    wall_s = time.monotonic() - start
    leave_result(
        options.folder,
        rank,
        {
            "wall_s": wall_s,
            "samples_per_s": options.steps * options.batch / wall_s,
            "wait_s": wall_s - computed_s,
        },
    )
    os._exit(0)  # taking Gloo's group down can wait for ever


def own_layers(
    model: nn.Module, batch: tuple[Tensor, Tensor], micros: int, rank: int, stages: int
) -> nn.Module:
    """This stage's layers; the first worker measures and tells the others."""
    row = [(name, module) for name, module in model.named_modules() if type(module) is not nn.Sequential]
    edges = torch.zeros(stages - 1, dtype=torch.int64)
    if rank == 0:
        (inputs, targets), _ = microbatches(batch, len(batch[0]), micros)[0]
        recording = record(model, lambda: loss(model(inputs), targets))
        cuts = balanced(costs_of(recording, micros), stages) or []
        names = [name for name, _ in row]
        edges = torch.tensor([names.index(recording.segments[cut].name) for cut in cuts])
    dist.broadcast(edges, 0)
    limits = [0, *edges.tolist(), len(row)]
    layers = [module for _, module in row[limits[rank] : limits[rank + 1]]]
    if getattr(layers[0], "inplace", False):  # what comes from another stage cannot be changed here
        layers[0].inplace = False
    return nn.Sequential(Dense(), *layers, Dense())


if __name__ == "__main__":
    main()
