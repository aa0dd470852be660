"""Training in one call, with a history, as Keras users know it.

python examples/fit_digits.py                            one worker
manyhands launch --workers 2 examples/fit_digits.py      two
"""

import torch

import manyhands as mh
from manyhands import data

torch.manual_seed(0)
digits = data.load("digits")
model = torch.nn.Sequential(
    torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
)
found = mh.fit(model, digits.train, epochs=3, validation=digits.test, measures={"accuracy": mh.accuracy})
if mh.rank() == 0:
    print({name: [round(value, 4) for value in values] for name, values in found.history.items()})
