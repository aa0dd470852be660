"""One worker that trains on the digits at a stated pace, for a stated number of steps."""

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from paced import Pace, Sleep
from processes import leave_result
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import default_collate

import manyhands as mh
from manyhands import data, models, strategies
from manyhands.cluster.launchers.detect import own_rank_info
from manyhands.job import learning_rate, optimizers

MODEL = "cnn:width=8"  # small: the time of a step is the stated one
BATCH = 32


def batches(samples: data.Data, rank: int, workers: int) -> Iterator[tuple[Tensor, Tensor]]:
    """This worker's share of the samples, again and again: nobody waits at the end of an epoch."""
    generator = torch.Generator().manual_seed(rank)
    mine = torch.arange(rank, len(samples.train), workers)
    while True:
        for part in mine[torch.randperm(len(mine), generator=generator)].split(BATCH):
            yield default_collate([samples.train[int(index)] for index in part])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--strategy", required=True)
    parser.add_argument("--steps", type=int, nargs="+", required=True, help="of each worker")
    parser.add_argument("--step-s", type=float, required=True)
    parser.add_argument("--chance", type=float, default=0.0)
    parser.add_argument("--times", type=float, default=1.0)
    parser.add_argument("--slow-worker", type=int)
    options = parser.parse_args()
    pace = Pace(
        step_s=options.step_s, chance=options.chance, times=options.times, slow_worker=options.slow_worker
    )
    rank_info = own_rank_info()
    workers = len(options.steps)
    samples = data.load("digits")
    torch.manual_seed(0)
    model = models.build(MODEL, samples.shape, samples.classes)
    terms = learning_rate.terms(MODEL, strategies.parse(options.strategy), workers)
    optimizer = optimizers.make_optimizer(terms.optimizer, model)
    now_s = 0.0

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        value = functional.cross_entropy(model(inputs), targets)
        return Sleep.apply(value, now_s) if model.training else value

    # Without the warm-up that goes with its rate, sync stays below what it can reach, and is no baseline.
    growing = max(1, round(terms.warm_up_epochs * len(samples.train) / (workers * BATCH)))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / growing, 1.0))
    session = mh.session(model, optimizer, loss, strategy=options.strategy, scheduler=scheduler)
    source = batches(samples, rank_info.rank, workers)
    session.step(next(source))  # what happens only once is over
    began = time.monotonic()
    for step in range(options.steps[rank_info.rank]):
        now_s = pace.seconds(rank_info.rank, step)
        session.step(next(source))
    ended = time.monotonic()
    result = session.evaluate(samples.test, measures={"accuracy": mh.accuracy})
    session.finish()
    leave_result(
        options.folder,
        rank_info.rank,
        {
            "began": began,
            "ended": ended,
            "samples": options.steps[rank_info.rank] * BATCH,
            "accuracy": result["accuracy"],
            "staleness": session.summary().get("staleness"),
        },
    )


if __name__ == "__main__":
    main()
