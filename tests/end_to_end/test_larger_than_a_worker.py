"""A model whose parameters, gradients and momentum do not fit the memory that a worker may have."""

import json
from pathlib import Path

import pytest
import torch

from tests.end_to_end.commands import manyhands

WORKERS = 4
LAYERS, WIDTH = 16, 1536
BUDGET = 2.8  # times the parameters: less than parameters, gradients and momentum together

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
    with_memory = mh.session(*make(layers, width), loss)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        batch = torch.randn({WORKERS}, width, generator=generator)
        losses.append(with_memory.step(batch[with_memory.feed :: with_memory.mesh.feeds]))
    return losses

train(2, 8, 1)  # what is needed once is loaded
pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * resource.getpagesize() + int({BUDGET} * {LAYERS} * {WIDTH}**2 * 4)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
print(json.dumps(train({LAYERS}, {WIDTH}, 3)))
"""


def launch(folder: Path, placement: str) -> tuple[int, list[list[float]], str]:
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
    code, losses, errors = launch(tmp_path, "sharded")
    assert code == 0, errors
    assert len(losses) == WORKERS
    means = [sum(step) / WORKERS for step in zip(*losses, strict=True)]
    assert means == pytest.approx(alone(), rel=1e-4)
    code, losses, errors = launch(tmp_path, "single")
    assert code != 0, "the limit must be one that a whole replica does not keep"
    assert not losses
    assert "memory" in errors.lower()
