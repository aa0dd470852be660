"""Requests per second and latencies, ours beside FastAPI by hand and LitServe; how soon a new version answers.

python benchmarks/serving.py

All servers are there from the beginning and have one model (MLP 784-1024-1024-10, one thread). One client with 1 or 32
connections gives each of them turns of a second or two. `make serving-peers` brings the others; without them ours is
measured alone. The client takes a share of the same cores, alike for all.
"""

import asyncio
import json
import os
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
from common import arguments, interleave, say, show, write
from summaries import Findings, Measured, ratio

from manyhands import models
from manyhands.checkpoint import tensor_file
from manyhands.serving import version_folder
from manyhands.serving.description import Description, TensorForm

HERE = Path(__file__).parent
PEERS = HERE.parent / ".servers" / "bin" / "python"
FORM = Description(
    model="mlp:hidden=1024-1024",
    task="classify",
    input=TensorForm(name="input", type="FP32", shape=(-1, 1, 28, 28)),
    output=TensorForm(name="output", type="FP32", shape=(-1, 10)),
    classes=10,
)
START_S = 120.0


@dataclass
class Turn:
    """What one turn came to."""

    seconds: float
    latencies_s: list[float] = field(default_factory=list)
    failed: int = 0

    @property
    def rate(self) -> float:
        return len(self.latencies_s) / self.seconds

    def at(self, share: float) -> float:
        ordered = sorted(self.latencies_s)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class ClientConnection(asyncio.Protocol):
    """Asks the same again as soon as it is answered."""

    def __init__(self, request: bytes, turn: Turn, heard: Callable[[bytes], None] | None = None) -> None:
        self._request, self._turn, self._heard = request, turn, heard
        self._received = b""
        self._asked_s = 0.0
        self.is_over = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self._ask()

    def _ask(self) -> None:
        self._asked_s = time.perf_counter()
        self.transport.write(self._request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        if not end:
            return
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        if len(body) < length:
            return
        self._turn.latencies_s.append(time.perf_counter() - self._asked_s)
        self._turn.failed += b" 200 " not in head[:20]
        if self._heard is not None:
            self._heard(body)
        self._received = b""
        if not self.is_over:
            self._ask()


async def load(port: int, request: bytes, connections: int, seconds: float) -> Turn:
    turn = Turn(seconds)
    loop = asyncio.get_running_loop()
    clients = [
        (await loop.create_connection(lambda: ClientConnection(request, turn), "127.0.0.1", port))[1]
        for _ in range(connections)
    ]
    await asyncio.sleep(0.2)
    turn.latencies_s.clear()
    begun_s = time.perf_counter()
    await asyncio.sleep(seconds)
    turn.seconds = time.perf_counter() - begun_s
    found = Turn(turn.seconds, list(turn.latencies_s), turn.failed)
    for client in clients:
        client.is_over = True
        client.transport.close()
    return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


class Contender:
    """A server in a process of its own."""

    def __init__(self, name: str, command: list[str], port: int, request: bytes) -> None:
        self.name, self.port, self.request = name, port, request
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, env=environ, process_group=0, stdout=sys.stderr)

    def wait(self) -> None:
        """Until it answers well."""
        until_s = time.monotonic() + START_S
        while time.monotonic() < until_s:
            try:
                turn = asyncio.run(load(self.port, self.request, 1, 0.1))
                if turn.latencies_s and not turn.failed:
                    return
            except OSError:
                pass
            time.sleep(0.2)
        raise SystemExit(f"{self.name} did not answer within {START_S:g} s")

    def end(self) -> None:
        os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def requests() -> dict[str, bytes]:
    """The same sample in each form."""
    values = [round(0.001 * number, 3) for number in range(784)]

    def posted(path: str, body: bytes, more: str = "") -> bytes:
        head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n"
        return f"{head}Content-Type: application/json\r\n{more}\r\n".encode() + body

    given = {"name": "input", "shape": [1, 1, 28, 28], "datatype": "FP32"}
    head = json.dumps(
        {
            "inputs": [{**given, "parameters": {"binary_data_size": 3136}}],
            "parameters": {"binary_data_output": True},
        }
    ).encode()
    return {
        "json": posted("/v2/models/mlp/infer", json.dumps({"inputs": [{**given, "data": values}]}).encode()),
        "binary": posted(
            "/v2/models/mlp/infer",
            head + struct.pack("<784f", *values),
            f"Inference-Header-Content-Length: {len(head)}\r\n",
        ),
        "peer": posted("/predict", json.dumps({"instances": [values]}).encode()),
    }


def weights(place: Path, version: int) -> Path:
    torch.manual_seed(version)
    module = models.build(FORM.model, (1, 28, 28), 10)
    files = {
        "weights.safetensors": tensor_file.encode(module.state_dict()),
        "description.json": [FORM.encode()],
    }
    return version_folder.write(place, version, version, files)


async def until_answered(port: int, request: bytes, place: Path, beside: Path) -> float:
    """Seconds from the rename of a version to the first answer from it, at one connection."""
    version = int(beside.name)
    loop, seen = asyncio.get_running_loop(), asyncio.Event()

    def heard(body: bytes) -> None:
        if msgspec.json.decode(body)["model_version"] == str(version):
            seen.set()

    _, client = await loop.create_connection(
        lambda: ClientConnection(request, Turn(0), heard), "127.0.0.1", port
    )
    await asyncio.sleep(0.1)
    begun_s = time.perf_counter()
    beside.rename(place / str(version))
    await asyncio.wait_for(seen.wait(), 60)
    took_s = time.perf_counter() - begun_s
    client.is_over = True
    client.transport.close()
    return took_s


async def swapping(port: int, request: bytes, place: Path, versions: range) -> tuple[Turn, Turn]:
    """32 connections before, and while versions are swapped as fast as they come into service."""
    prepared = [weights(place.parent / "prepared", version) for version in versions]
    before = await load(port, request, 32, 2.0)
    meanwhile = Turn(0)
    loop = asyncio.get_running_loop()
    clients = [
        (await loop.create_connection(lambda: ClientConnection(request, meanwhile), "127.0.0.1", port))[1]
        for _ in range(32)
    ]
    asking = requests()["json"]
    for beside in prepared:
        await until_answered(port, asking, place, beside)
    for client in clients:
        client.is_over = True
        client.transport.close()
    return before, meanwhile


def main() -> None:
    parser = arguments("Ours beside other servers.", rounds=7)
    parser.add_argument("--seconds", type=float, default=1.5, help="of a turn (default 1.5)")
    parser.add_argument("--swaps", type=int, default=100, help="under load (default 100)")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.seconds, options.swaps = 1, 0.3, 2
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "mlp"
        first = weights(place, 1)
        contenders = begun(first, options.quick)
        try:
            for one in contenders:
                say(f"{one.name} starts")
                one.wait()
            findings, results = measured(contenders, place, options)
        finally:
            for one in {id(one.process): one for one in contenders}.values():
                one.end()
            shutil.rmtree(place.parent / "prepared", ignore_errors=True)
    show(findings)
    write(options, benchmark="serving", results=results, summaries={"serving": findings})


def begun(first: Path, quick: bool) -> list[Contender]:
    asked, port = requests(), free_port()
    command = [sys.executable, "-m", "manyhands", "serve", f"mlp={first.parent}", "--port", str(port)]
    ours = Contender("ours, binary", [*command, "--threads", "1"], port, asked["binary"])
    also = Contender.__new__(Contender)
    also.name, also.port, also.request, also.process = "ours, JSON", port, asked["json"], ours.process
    found = [ours, also]
    if quick or not PEERS.exists():
        say("no peers: `make serving-peers` brings FastAPI and LitServe")
        return found
    for name in ("fastapi", "litserve"):
        port = free_port()
        script = str(HERE / f"{name}_peer.py")
        words = [str(PEERS), script, str(first / "weights.safetensors"), str(port)]
        found.append(Contender(f"{name}, JSON", words, port, asked["peer"]))
    return found


def measured(contenders: list[Contender], place: Path, options) -> tuple[Findings, dict]:
    turns: dict[int, dict[str, list[Turn]]] = {}
    for connections in (1, 32):
        turns[connections] = interleave(
            {
                one.name: lambda one=one, connections=connections: asyncio.run(
                    load(one.port, one.request, connections, options.seconds)
                )
                for one in contenders
            },
            options.rounds,
            f"{connections} connections",
        )
    ours = contenders[0]
    soon_s = [
        asyncio.run(
            until_answered(
                ours.port, contenders[1].request, place, weights(place.parent / "prepared", version)
            )
        )
        for version in range(2, 2 + options.rounds)
    ]
    start = 2 + options.rounds
    before, meanwhile = asyncio.run(
        swapping(ours.port, ours.request, place, range(start, start + options.swaps))
    )
    found = Findings(title="one MLP 784-1024-1024-10, one thread, samples of one client")
    for connections, each in turns.items():
        of = f"{connections} connections" if connections > 1 else "one connection"
        for what, unit, value in (
            ("requests", "1/s", lambda turn: turn.rate),
            ("p50", "ms", lambda turn: 1e3 * turn.at(0.5)),
            ("p99", "ms", lambda turn: 1e3 * turn.at(0.99)),
        ):
            found.measured.append(
                Measured(
                    of=f"{what}, {of}",
                    unit=unit,
                    values={name: [value(turn) for turn in some] for name, some in each.items()},
                )
            )
        rates = {name: [turn.rate for turn in some] for name, some in each.items()}
        for name, target in (("fastapi, JSON", 2.0), ("litserve, JSON", 3.0)):
            if name in rates:
                found.ratios.append(
                    ratio(
                        f"ours, JSON ÷ {name}",
                        rates["ours, JSON"],
                        rates[name],
                        target if connections > 1 else None,
                        of=f"requests/s, {of}",
                    )
                )
    found.measured.append(Measured(of="renamed → first answer", unit="s", values={"ours": soon_s}))
    found.counts.update(
        {
            "swaps": options.swaps,
            "requests during the swaps": len(meanwhile.latencies_s),
            "failed": meanwhile.failed + sum(turn.failed for each in turns[32].values() for turn in each),
            "p99 during ÷ before": round(meanwhile.at(0.99) / before.at(0.99), 2),
        }
    )
    results = {
        "rates": {
            connections: {name: [turn.rate for turn in some] for name, some in each.items()}
            for connections, each in turns.items()
        },
        "renamed_to_answer_s": soon_s,
        "median_s": statistics.median(soon_s),
        "counts": found.counts,
    }
    return found, results


if __name__ == "__main__":
    main()
