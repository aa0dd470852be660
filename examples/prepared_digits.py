"""A loop that stays as it was: its own loss.backward(), its own clipping, its own optimizer.step().

python examples/prepared_digits.py                            one worker
manyhands launch --workers 2 examples/prepared_digits.py      two
"""

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import manyhands as mh
from manyhands import data

torch.manual_seed(0)
digits = data.load("digits")
model = torch.nn.Sequential(
    torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=50, gamma=0.7)
loader = DataLoader(digits.train, batch_size=32, shuffle=True)


def evaluated(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


model, optimizer, loader = mh.prepare(model, optimizer, loader, loss=evaluated)

for _ in range(3):
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()  # param.grad is now that of all workers
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        scheduler.step()
    result = optimizer.session.evaluate(digits.test, measures={"accuracy": mh.accuracy})
    if optimizer.session.is_main:
        print(f"accuracy {result['accuracy']:.4f}")
