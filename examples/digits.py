"""A training script of one's own: model, optimizer, loop, evaluation, saving and going on.

python examples/digits.py                            one worker
manyhands launch --workers 2 examples/digits.py      the same script, two workers
python examples/digits.py --checkpoints somewhere    started again, it goes on where it stopped
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import manyhands as mh
from manyhands import data

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch", type=int, default=32, help="samples per worker and step")
parser.add_argument("--checkpoints", type=Path, help="save here after every epoch, and go on from here")
options = parser.parse_args()


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets)


torch.manual_seed(0)
digits = data.load("digits")
model = nn.Sequential(
    nn.Conv2d(1, 32, 3, padding=1),
    nn.ReLU(),
    nn.Conv2d(32, 32, 3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(32 * 4 * 4, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=100, gamma=0.5)

session = mh.session(model, optimizer, loss, scheduler=scheduler, clip_norm=5.0)
if options.checkpoints:
    session.resume(options.checkpoints)

while session.epoch < options.epochs:
    for batch in session.batches(digits.train, batch_size=options.batch):
        session.step(batch)
    result = session.evaluate(digits.test, measures={"accuracy": mh.accuracy})
    if session.is_main:
        print(f"epoch {session.epoch}  loss {result['loss']:.4f}  accuracy {result['accuracy']:.4f}")
    if options.checkpoints:
        session.save(options.checkpoints)
