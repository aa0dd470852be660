"""Trains without end, by `ours` or by DDP under torchrun, and notes every step; DDP saves now and then and goes on from
there, as its tutorial does."""

import os
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

SAVE_EVERY = 50  # steps
WIDTH = 256


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)
    )


def loss(net: nn.Module, batch: Tensor) -> Tensor:
    value: Tensor = net(batch).square().mean()
    return value


def ours(folder: Path) -> None:
    import manyhands as mh

    net = model()
    session = mh.session(net, torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9), loss)
    batch = torch.randn(32, WIDTH)
    with (folder / f"steps-{os.getpid()}").open("a", buffering=1) as log:
        while True:
            session.step(batch)
            log.write(f"{time.monotonic()} {session.steps}\n")


def ddp(folder: Path) -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    net = model()
    steps, saved = 0, folder / "checkpoint.pt"
    wrapped = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        steps = state["steps"]
    batch = torch.randn(32, WIDTH)
    with (folder / f"steps-{os.getpid()}").open("a", buffering=1) as log:
        while True:
            optimizer.zero_grad()
            loss(wrapped, batch).backward()
            optimizer.step()
            steps += 1
            log.write(f"{time.monotonic()} {steps}\n")
            if steps % SAVE_EVERY == 0 and dist.get_rank() == 0:
                beside = saved.with_suffix(".new")
                torch.save(
                    {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "steps": steps}, beside
                )
                beside.replace(saved)


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"ours": ours, "ddp": ddp}[sys.argv[1]](Path(sys.argv[2]))
