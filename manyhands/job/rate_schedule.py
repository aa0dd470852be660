"""How the learning rate changes from step to step, as a plan declares it."""

import math
from typing import TYPE_CHECKING

from manyhands.job.plan import Train

if TYPE_CHECKING:  # a page that shows the schedule does without torch
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LambdaLR


class RateSchedule:
    """Which part of its rate the optimizer gets in a step: warm-up from nothing (Goyal et al. 2017), and a cosine to
    nothing (Loshchilov & Hutter 2017), where asked for.

    A function of the step alone, unlike torch's own, which go on from the rate that they find. Its numbers are
    attributes, which `LambdaLR` saves: so a worker that comes later reckons with the same as the first ones.
    """

    def __init__(self, train: Train, total: int, steps_per_epoch: int) -> None:
        self.warm_up = round((train.warm_up or 0.0) * steps_per_epoch)
        self.is_cosine = train.schedule == "cosine"
        self.total = total

    def __call__(self, step: int) -> float:
        grown = min((step + 1) / self.warm_up, 1.0) if self.warm_up else 1.0
        done = min(step, self.total) / self.total
        return grown * ((1 + math.cos(math.pi * done)) / 2 if self.is_cosine else 1.0)


def scheduled(optimizer: "Optimizer", share: RateSchedule) -> "LambdaLR | None":
    """What changes the rate from step to step, if anything does."""
    from torch.optim.lr_scheduler import LambdaLR

    return LambdaLR(optimizer, share) if share.warm_up or share.is_cosine else None


def go_on(scheduler: "LambdaLR", share: RateSchedule, made: int) -> None:
    """The plan may be longer than the one that was interrupted, or have other workers, who need `made` steps to come
    as far as this: the rate is where this plan has it."""
    scheduler.last_epoch = made
    scheduler.lr_lambdas = [share] * len(scheduler.base_lrs)
    for group, rate in zip(scheduler.optimizer.param_groups, scheduler.base_lrs, strict=True):
        group["lr"] = rate * share(made)
