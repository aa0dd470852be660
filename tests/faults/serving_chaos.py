"""Kills model processes and damages, deletes, adds and replaces versions at random, while clients ask all the time.

    python -m tests.faults.serving_chaos --seconds 120 [--seed 0]

A fault begins when the one before is dealt with: two at once (the files of a version are gone, and every process
that had loaded it dies) leave nothing that could answer. No request may fail, the newest good version must answer after
every fault, and nothing may be left behind.
"""

import argparse
import asyncio
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx
import torch

from manyhands import models
from manyhands.checkpoint import tensor_file
from manyhands.serving import version_folder
from manyhands.serving.description import Description, TensorForm
from manyhands.serving.http_server import RunningServer, serving
from manyhands.serving.serve_settings import ModelWords, ServeSettings

FORM = Description(
    model="mlp",
    task="classify",
    input=TensorForm(name="input", type="FP32", shape=(-1, 1, 8, 8)),
    output=TensorForm(name="output", type="FP32", shape=(-1, 10)),
    classes=10,
)
BODY = {"instances": [[[[0.5] * 8] * 8]]}
SETTLE_S = 120.0


class Versions:
    """The folder that is served; at any time at least one version in it is good."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.newest = 0
        self.good: list[int] = []

    def add(self) -> None:
        self.newest += 1
        module = models.build("mlp", (1, 8, 8), 10)
        files = {
            "weights.safetensors": tensor_file.encode(module.state_dict()),
            "description.json": [FORM.encode()],
        }
        version_folder.write(self.folder, self.newest, 0, files)
        self.good.append(self.newest)

    def add_damaged(self) -> None:
        """A copy that has come only in part, as `cp -r` makes it."""
        self.newest += 1
        beside = self.folder / f".{self.newest}"
        shutil.copytree(self.folder / str(self.good[-1]), beside)
        os.truncate(beside / "weights.safetensors", random.randrange(1000))
        beside.rename(self.folder / str(self.newest))

    def remove_old(self) -> None:
        if len(self.good) > 1:
            shutil.rmtree(self.folder / str(self.good.pop(0)))

    def replace(self) -> None:
        """Another model under the number of the newest good one; damaged ones above it would be wanted in its place."""
        number = self.good[-1]
        for damaged in range(number + 1, self.newest + 1):
            shutil.rmtree(self.folder / str(damaged), ignore_errors=True)
        place = self.folder / str(number)
        shutil.rmtree(place)
        module = models.build("mlp:hidden=32", (1, 8, 8), 10)
        form = Description(
            **{name: getattr(FORM, name) for name in FORM.__struct_fields__} | {"model": "mlp:hidden=32"}
        )
        files = {
            "weights.safetensors": tensor_file.encode(module.state_dict()),
            "description.json": [form.encode()],
        }
        version_folder.write(self.folder, number, 0, files)


async def settled(server: RunningServer, versions: Versions) -> bool:
    """Whether the newest good version comes to answer in all processes, with a spare beside them."""
    until_s = time.monotonic() + SETTLE_S
    while time.monotonic() < until_s:
        await asyncio.sleep(0.05)
        found = {one.version: one for one in server.core.models["m"].source.look(time.monotonic())}
        ready = server.core.ready("m")
        processes = server.pool._processes
        if (
            [one.version for one in ready] == [found.get(versions.good[-1])]
            and len(processes) == server.pool.count
            and all(ready[0].handle in process.handles for process in processes)
            and server.pool.has_spare
        ):
            return True
    print(f"version {versions.good[-1]} does not answer everywhere")
    return False


async def chaos(seconds: float, seed: int, folder: Path) -> int:
    random.seed(seed)
    torch.manual_seed(seed)
    versions = Versions(folder)
    versions.add()
    settings = ServeSettings(models={"m": ModelWords(source=str(folder))}, port=0, processes=2, threads=1)
    outcomes: Counter[int] = Counter()
    over = threading.Event()
    done: Counter[str] = Counter()
    async with serving(settings, lambda line: print(line, flush=True)) as server:
        while not server.core.is_ready():
            await asyncio.sleep(0.05)

        def client() -> None:
            with httpx.Client(base_url=server.address, timeout=60) as session:
                while not over.is_set():
                    outcomes[session.post("/v1/models/m:predict", json=BODY).status_code] += 1

        def kill() -> None:
            if server.pool.living:
                os.kill(random.choice(server.pool.living), signal.SIGKILL)

        faults: list[Callable[[], None]] = [
            kill,
            versions.add,
            versions.add_damaged,
            versions.remove_old,
            versions.replace,
        ]
        clients = [threading.Thread(target=client) for _ in range(4)]
        for one in clients:
            one.start()
        end_s = time.monotonic() + seconds
        is_settled = True
        while time.monotonic() < end_s and is_settled:
            fault = random.choice(faults)
            done[fault.__name__] += 1
            await asyncio.to_thread(fault)
            await asyncio.sleep(random.uniform(0.05, 0.5))
            is_settled = await settled(server, versions)
        over.set()
        for one in clients:
            await asyncio.to_thread(one.join)
        processes = server.pool.living
        crashes = server.pool.crashes
    left = [pid for pid in processes if Path(f"/proc/{pid}").exists()]
    print(f"{dict(outcomes)} answers, {dict(done)}, {crashes} deaths, left behind: {left or 'nothing'}")
    return int(not is_settled or set(outcomes) != {200} or bool(left) or crashes != done["kill"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(chaos(options.seconds, options.seed, Path(folder)))


if __name__ == "__main__":
    sys.exit(main())
