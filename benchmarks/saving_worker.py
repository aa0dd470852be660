"""One worker that saves now and then: how long training stands still, beside a plain copy and a plain `torch.save`."""

import argparse
import mmap
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch
from jobs import JOBS, build, loss, make_batches
from processes import leave_result
from torch import Tensor

import manyhands as mh

POINTER = "latest"  # the last thing that a save writes
PATIENCE_S = 120.0


def seconds(work: Callable[[], object]) -> float:
    start = time.monotonic()
    work()
    return time.monotonic() - start


def copy(state: list[Tensor]) -> None:
    """Into memory that nobody has used before: what any save without waiting for the disk must do."""
    with mmap.mmap(-1, sum(tensor.nbytes for tensor in state)) as room:
        memory = torch.frombuffer(room, dtype=torch.uint8)
        at = 0
        for tensor in state:
            memory[at : at + tensor.nbytes].copy_(tensor.view(-1).view(torch.uint8))
            at += tensor.nbytes
        del memory


def save_plainly(state: list[Tensor], path: Path) -> None:
    """As scripts do: training goes on when the file is on the disk."""
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def await_pointer(folder: Path, before: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while said(folder) == before:
        if time.monotonic() > deadline:
            raise SystemExit(f"no checkpoint came within {PATIENCE_S:.0f} s")
        time.sleep(0.01)


def said(folder: Path) -> str:
    pointer = folder / POINTER
    return pointer.read_text() if pointer.exists() else ""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--job", choices=JOBS, required=True)
    parser.add_argument("--saves", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    options = parser.parse_args()
    job = JOBS[options.job]
    model, optimizer = build(job)
    session = mh.session(model, optimizer, loss)
    rank = session.rank
    batches = make_batches(job, 32, rank)
    checkpoints = options.folder / "checkpoints"
    # Parameters, and as much momentum.
    state = [torch.randn_like(param) for param in model.parameters() for _ in range(2)]
    found: dict[str, list[float]] = {
        "stopped_s": [],
        "copy_s": [],
        "plain_s": [],
        "step_s": [],
        "meanwhile_s": [],
    }

    def train(name: str) -> None:
        for number in range(options.steps):
            found[name].append(seconds(lambda number=number: session.step(batches[number % len(batches)])))

    for _ in range(options.saves):
        train("step_s")
        if rank == 0:
            found["copy_s"].append(seconds(lambda: copy(state)))
            found["plain_s"].append(seconds(lambda: save_plainly(state, options.folder / "plain.pt")))
            (options.folder / "plain.pt").unlink()
        session.step(batches[0])  # the others have waited
        before = said(checkpoints)
        found["stopped_s"].append(seconds(lambda: session.save(checkpoints, keep=1)))
        train("meanwhile_s")
        await_pointer(checkpoints, before)
    session.close()
    if rank == 0:
        shutil.rmtree(checkpoints)
    leave_result(options.folder, rank, {**found, "state_bytes": sum(tensor.nbytes for tensor in state)})


if __name__ == "__main__":
    main()
