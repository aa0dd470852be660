"""A tiny model for thousands of epochs, started by benchmarks/soak.py: it trains, evaluates and saves for so long.

manyhands launch … benchmarks/soak_worker.py SECONDS
"""

import sys
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

import manyhands as mh

EVALUATE_EVERY, SAVE_EVERY = 20, 200  # epochs


def main() -> None:
    end_s = time.monotonic() + float(sys.argv[1])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.randn(256, 16))
    session = mh.session(model, optimizer, lambda model, batch: model(batch[0]).square().mean())
    epoch, goes_on = 0, True
    while goes_on:
        for batch in session.batches(data, batch_size=16):
            session.step(batch)
        session.log(epoch=epoch)
        epoch += 1
        if epoch % EVALUATE_EVERY == 0:
            session.evaluate(data, batch_size=64)
            goes_on = session.mean(float(time.monotonic() < end_s)) > 0.5  # all stop at the same place
        if epoch % SAVE_EVERY == 0:
            session.save()
    session.close()


if __name__ == "__main__":
    main()
