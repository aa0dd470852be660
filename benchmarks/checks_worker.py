"""One worker of checks.py: how long `mh.session` and the first step take, also at an earlier commit.

So it imports nothing of this folder but names that are as old as that commit.
"""

import argparse
import importlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

OBJECTS = 300_000
# What looks at a script before and in the first step: where it is called from, and its name there.
STARTING = (
    ("manyhands.engine.session", "admit"),
    ("manyhands.replica.optimizer.abilities", "try_out"),
    ("manyhands.engine.outside", "watch"),
    ("manyhands.engine.habits", "watch"),
    ("manyhands.engine.script_state", "ScriptState.enter"),
    ("manyhands.engine.same_data", "_plain_loader"),
    ("manyhands.engine.same_data", "digest_of_data"),
    ("manyhands.engine.same_data", "digest"),
    ("manyhands.engine.habits", "_look_at_loss"),
)


class OwnOptimizer(torch.optim.SGD):
    """One that nothing is known of."""


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def watch(spent: dict[str, float]) -> None:
    """Count the seconds of every check that there is; one inside of another counts for both."""
    for place, name in STARTING:
        try:
            owner: Any = importlib.import_module(place)
            *above, last = name.split(".")
            for part in above:
                owner = getattr(owner, part)
            setattr(owner, last, _timed(getattr(owner, last), name, spent))
        except (ImportError, AttributeError):
            continue


def _timed(call: Callable[..., Any], name: str, spent: dict[str, float]) -> Callable[..., Any]:
    def timed(*arguments: Any, **settings: Any) -> Any:
        began_s = time.perf_counter()
        try:
            return call(*arguments, **settings)
        finally:
            spent[name] = spent.get(name, 0.0) + time.perf_counter() - began_s

    return timed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--case", required=True)
    parser.add_argument("--counted", action="store_true")
    options = parser.parse_args()
    import manyhands as mh

    kept = [[number] for number in range(OBJECTS)] if options.case == "objects" else []
    if options.case == "transformers":
        importlib.import_module("transformers").Trainer  # noqa: B018  # imports what it stands for
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
    kind = OwnOptimizer if options.case == "optimizer" else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=0.01, momentum=0.9)
    data = TensorDataset(torch.randn(64, 784), torch.randint(10, (64,)))
    spent: dict[str, float] = {}
    if options.counted:
        watch(spent)
    batches = iter(DataLoader(data, batch_size=32))  # a loop that is not the session's is looked at most
    batch = next(batches)
    began_s = time.perf_counter()
    session = mh.session(model, optimizer, loss)
    made_s = time.perf_counter()
    session.step(batch)
    stepped_s = time.perf_counter()
    result = {
        "session_s": made_s - began_s,
        "step_s": stepped_s - made_s,
        "spent": spent,
        "objects": len(kept),
    }
    (options.folder / f"rank-{session.rank}.json").write_text(json.dumps(result))
    session.close()


if __name__ == "__main__":
    main()
