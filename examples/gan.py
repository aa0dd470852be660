"""Two sessions in one script: a GAN that learns to draw digits.

python examples/gan.py                            one worker
manyhands launch --workers 2 examples/gan.py      the same script, two workers
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import manyhands as mh
from manyhands import data

NOISE = 16

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch", type=int, default=32, help="samples per worker and step")
options = parser.parse_args()

torch.manual_seed(0)
digits = data.load("digits")
generator = nn.Sequential(nn.Linear(NOISE, 128), nn.ReLU(), nn.Linear(128, 64), nn.Tanh())
discriminator = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))


def drawn(count: int) -> Tensor:
    made: Tensor = generator(torch.randn(count, NOISE))
    return made


def discriminator_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    real, fake = model(batch[0]), model(drawn(len(batch[0])).detach())
    return F.softplus(-real).mean() + F.softplus(fake).mean()


def generator_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.softplus(-discriminator(drawn(len(batch[0])))).mean()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=2e-3, betas=(0.5, 0.999))


d = mh.session(discriminator, adam(discriminator), discriminator_loss)
g = mh.session(generator, adam(generator), generator_loss)

for _ in range(options.epochs):
    for batch in d.batches(digits.train, batch_size=options.batch):
        d.step(batch)
        g.step(batch)
    found = d.evaluate(digits.test)["loss"], g.evaluate(digits.test)["loss"]
    if d.is_main:
        print(f"epoch {d.epoch}  discriminator {found[0]:.3f}  generator {found[1]:.3f}")
