"""Trains on a host that benchmarks/attacks.py and a test attack.

manyhands launch … benchmarks/attacked_worker.py FOLDER [STEPS]

Without a number of steps it goes on until the launcher is told to end; with one, worker 0 writes what it has trained.
"""

import itertools
import sys
import time
from pathlib import Path

import torch
from torch import nn

import manyhands as mh

PAUSE_S = 0.02
"""After each of a number of steps, so that they last for a while."""


def main() -> None:
    folder, steps = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    session = mh.session(model, optimizer, lambda model, batch: model(batch).square().mean())
    draw = torch.Generator()
    for step in itertools.count() if steps is None else range(steps):
        draw.manual_seed(1000 * step + session.rank)
        session.step(torch.randn(128 if steps is None else 16, 256, generator=draw))
        time.sleep(PAUSE_S if steps else 0)
    session.close()
    if session.is_main:
        torch.save(model.state_dict(), folder / "trained.pt")


if __name__ == "__main__":
    main()
