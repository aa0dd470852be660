"""Walk through the house as a batch: which files of the package one step visits, and how often it comes
back to a file that it has left. Run under the launcher; worker 0 prints the shortest of its steps."""

import os
import sys
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import manyhands as mh

HOME = os.path.dirname(mh.__file__) + os.sep
FIRST, LAST = 54, 62  # in the first steps more is looked at


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets)


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    data = TensorDataset(torch.randn(4096, 32), torch.randint(0, 4, (4096,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    session = mh.session(model, optimizer, loss)
    ways: list[list[str]] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(HOME):
            way = ways[-1]
            if not way or way[-1] != name:
                way.append(name)

    for number, batch in enumerate(session.batches(data, batch_size=32)):
        if FIRST <= number < LAST:
            ways.append([])
            sys.setprofile(note)
        session.step(batch)
        sys.setprofile(None)
        if number == LAST:
            break
    if session.is_main:
        way = min(ways, key=len)  # waiting for the other worker makes a way longer
        print(f"walk: {len(set(way))} files, {len(way) - len(set(way))} returns", flush=True)


if __name__ == "__main__":
    main()
