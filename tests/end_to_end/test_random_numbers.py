"""Every worker draws random numbers of its own; those that compute the same samples draw the same."""

import json
import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from tests.end_to_end.commands import BIN, run

SCRIPT = """
import json, os, random, signal, sys
import numpy, torch
import manyhands as mh

torch.manual_seed(3); random.seed(3); numpy.random.seed(3)
model = torch.nn.Linear(4, 4)
first = model.weight.detach().sum().item()
example = torch.zeros(8, 4)
session = mh.session(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, b: m(b).square().mean(),
                     example=example, **json.loads(sys.argv[1]))
if len(sys.argv) > 2:
    session.resume(sys.argv[2])


def drawn():
    return [torch.rand(1).item(), random.random(), numpy.random.rand(), first]


numbers = drawn()
for batch in session.batches(torch.ones(64, 4), batch_size=8):
    session.step(batch)
    if len(sys.argv) > 2:
        session.save(sys.argv[2])
        numbers = drawn()
        break
print("drawn", session.rank, json.dumps(numbers), flush=True)
"""


def drawn(
    folder: Path, *words: str, workers: int = 2, arguments: tuple[str, ...] = (), **settings: Any
) -> Any:
    """What each worker drew from torch, random and numpy, and the sum of the model before the session."""
    (folder / "script.py").write_text(SCRIPT)
    command = [str(BIN / "manyhands"), "launch", "--workers", str(workers), *words, "script.py"]
    done = run([*command, json.dumps(settings), *arguments], folder)
    assert done.code == 0, done.err
    rows = sorted(line.partition("drawn ")[2] for line in done.out.splitlines() if "drawn" in line)
    return [json.loads(row.split(" ", 1)[1]) for row in rows]


def as_plain() -> list[float]:
    torch.manual_seed(3)
    random.seed(3)
    numpy.random.seed(3)
    first = torch.nn.Linear(4, 4).weight.detach().sum().item()
    return [torch.rand(1).item(), random.random(), numpy.random.rand(), first]


@pytest.mark.parametrize("strategy", ["all-reduce", "hogwild"])
def test_each_worker_draws_its_own_and_the_first_those_of_plain_pytorch(
    strategy: str, tmp_path: Path
) -> None:
    zero, one = drawn(tmp_path, "--strategy", strategy)
    assert zero == as_plain()
    assert zero[3] == one[3], "before the session all are alike"
    assert all(a != b for a, b in zip(zero[:3], one[:3], strict=True))
    assert drawn(tmp_path, "--strategy", strategy) == [zero, one], "the same in the next run"


def test_the_old_way_for_those_who_want_it(tmp_path: Path) -> None:
    assert drawn(tmp_path, same_random=True) == [as_plain()] * 2


def test_workers_that_compute_the_same_samples_draw_the_same(tmp_path: Path) -> None:
    zero, one, two, three = drawn(tmp_path, "--placement", "tensor:ways=2", workers=4)
    assert zero == one == as_plain()
    assert two == three
    assert zero[0] != two[0]


def test_a_resumed_run_draws_what_it_would_have_drawn(tmp_path: Path) -> None:
    saves = ("saves",)
    first = drawn(tmp_path, arguments=saves)
    second = drawn(tmp_path, arguments=saves)
    third = drawn(tmp_path, arguments=saves, workers=3)
    assert len({numbers[0] for numbers in (*first, *second, *third)}) == 7, "none is drawn twice"
