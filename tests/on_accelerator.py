"""What `tests/contracts/test_devices.py` runs in processes that have the made-up accelerator."""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import manyhands as mh
from manyhands.job import declared
from manyhands.job import plan as plans
from manyhands.job.plan import Plan
from tests import accelerator

INPUTS = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
DATA = torch.utils.data.TensorDataset(INPUTS, INPUTS.argmax(1))


def loss(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets)


def made(device: str, strategy: str) -> mh.Session:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return mh.session(model, optimizer, loss, clip_norm=1.0, strategy=strategy)


def epoch(session: mh.Session) -> None:
    for batch in session.batches(DATA, batch_size=8):
        assert batch[0].device.type == "cpu"
        session.step(batch)


def trained(device: str, strategy: str, place: Path) -> list[Any]:
    """Train, evaluate, save; resume in another session and do the same; everything that came out of it."""
    results: list[Any] = []
    for _ in range(2):
        session = made(device, strategy)
        resumed = session.resume(place) is not None
        epoch(session)
        measured = session.evaluate(DATA, batch_size=16, measures={"accuracy": mh.accuracy})
        session.save(place, wait=True)
        assert session.engine.replica.params.device.type == device
        session.close()
        assert {value.device.type for value in session.model.state_dict().values()} == {device}
        state = [value.cpu().tolist() for value in session.model.state_dict().values()]
        results += [resumed, session.steps, measured, state]
    return results


def session_is_the_same(folder: Path, strategy: str) -> None:
    assert trained("cpu", strategy, folder / "cpu") == trained(accelerator.NAME, strategy, folder / "there")


def job_is_the_same(folder: Path, strategy: str) -> None:
    plans.DEVICES = (*plans.DEVICES, accelerator.NAME)  # type: ignore[assignment]
    results = []
    for device in ("cpu", accelerator.NAME):
        text = f'{{"data": "digits", "model": "mlp", "strategy": "{strategy}", "train": {{"steps": 3}}, '
        plan: Plan = plans.decode(text + f'"cluster": {{"workers": 1, "device": "{device}"}}}}')
        done = declared.run(plan)
        results.append((done.steps, done.measured))
        done.close()
    assert results[0] == results[1]


if __name__ == "__main__":
    accelerator.install()
    with accelerator.Accelerator():
        globals()[sys.argv[1]](Path(sys.argv[2]), sys.argv[3])
