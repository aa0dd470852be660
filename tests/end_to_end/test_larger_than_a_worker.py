"""A model whose parameters, gradients and momentum do not fit the memory that a worker may have."""

import json
from pathlib import Path

import pytest
import torch

from tests.end_to_end.commands import manyhands

WORKERS = 4
LAYERS, WIDTH = 24, 1024
PARAMETERS_BYTES = LAYERS * WIDTH**2 * 4
BUDGET = 2.6  # times the parameters: less than parameters, gradients and momentum together
PEAK = 0.35  # of parameters, gradients and momentum of a whole replica

SCRIPT = f"""
import json
import resource
import torch
import torch.nn.functional as F
from pathlib import Path
from torch import nn
import manyhands as mh

def loss(model, batch):
    return F.mse_loss(model(batch), batch)

def make(layers, width):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

def train(layers, width, steps):
    session = mh.session(*make(layers, width), loss)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for step in range(steps):
        batch = torch.randn({WORKERS}, width, generator=generator)
        losses.append(float(session.step(batch[session.engine.placed.feed :: session.engine.placed.mesh.feeds])))
        if step == 0:
            Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    return losses

def memory_bytes(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

train(2, 512, 2)  # what any model needs is there
empty_bytes = memory_bytes("VmRSS")
limit = memory_bytes("VmSize") + int({BUDGET} * {PARAMETERS_BYTES})
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
losses = train({LAYERS}, {WIDTH}, 3)
print(json.dumps([losses, memory_bytes("VmHWM") - empty_bytes]))
"""


def launch(folder: Path, placement: str) -> tuple[int, list[tuple[list[float], int]], str]:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    options = ["--workers", str(WORKERS), "--threads", "1", "--placement", placement, "--out", placement]
    done = manyhands("launch", *options, str(script), cwd=folder)
    lines = [line.partition("] ")[2] for line in done.out.splitlines()]
    return done.code, [json.loads(line) for line in lines if line.startswith("[")], done.err


def alone() -> list[float]:
    """The same in one process without a limit."""
    scope: dict[str, object] = {}
    exec(SCRIPT.partition("def train")[0], scope)
    model, optimizer = scope["make"](LAYERS, WIDTH)  # type: ignore[operator]
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        value = scope["loss"](model, torch.randn(WORKERS, WIDTH, generator=generator))  # type: ignore[operator]
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return losses


def test_it_trains_in_shards_where_it_does_not_fit_whole(tmp_path: Path) -> None:
    code, found, errors = launch(tmp_path, "sharded")
    assert code == 0, errors
    assert len(found) == WORKERS
    means = [sum(step) / WORKERS for step in zip(*(losses for losses, _ in found), strict=True)]
    assert means == pytest.approx(alone(), rel=1e-4)
    for _, peak_bytes in found:
        assert peak_bytes <= PEAK * 3 * PARAMETERS_BYTES
    code, found, errors = launch(tmp_path, "single")
    assert code != 0, "the limit must be one that a whole replica does not keep"
    assert not found
    assert "memory" in errors.lower()
