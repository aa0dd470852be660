"""Training loads PyTorch's compiler only where somebody compiles."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes

SCRIPT = """
import sys
from manyhands.cluster.worker import compiler
compiler.leave_unloaded()

import torch
from torch import nn
import manyhands as mh

seen = []
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer.register_step_post_hook(lambda *_: seen.append(torch.is_grad_enabled()))
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
session = mh.session(model, optimizer, lambda m, b: m(b).square().mean(), scheduler=scheduler)
for _ in range(3):
    session.step(torch.ones(3, 4), torch.ones(1, 4))
assert seen == [True] * 3
print(*[name for name in ("torch._dynamo", "sympy") if name in sys.modules])

import torch._dynamo
breaks = []
torch._dynamo.graph_break = lambda *_: breaks.append(1)
optimizer.step()
print(len(breaks))
"""


def test_a_session_with_a_scheduler_hooks_and_weights_leaves_it_unloaded() -> None:
    """Once it is loaded, `step` is PyTorch's own again."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "\n2\n"
