"""A server in a thread of the test, whose models are arithmetic: everything but the model processes is real."""

import asyncio
import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from manyhands.serving.access_rules import AccessRules
from manyhands.serving.batcher import Batcher, ModelError
from manyhands.serving.core import ModelEntry, ServingCore
from manyhands.serving.description import Description, TensorForm
from manyhands.serving.http_connection import ConnectionTable, HttpConnection, HttpLimits
from manyhands.serving.loader import LoadFailed
from manyhands.serving.servable import Servable
from manyhands.serving.serving_app import ServingApp
from manyhands.serving.stream import ModelVersion, TrafficShares, VersionPolicy

FORM = Description(
    model="mlp",
    task="classify",
    input=TensorForm(name="input", type="FP32", shape=(-1, 2, 3)),
    output=TensorForm(name="output", type="FP32", shape=(-1, 6)),
    classes=6,
)
LIMITS = HttpLimits(body_bytes=1 << 16, head_s=0.6, body_s=0.6, idle_s=30.0)
SWEEP_S = 0.05


def version(number: int, model: str = "m") -> ModelVersion:
    return ModelVersion(model=model, version=number, mark="", place=Path("/nowhere"))


@dataclass
class ListedSource:
    """The versions that a test says are there."""

    versions: list[ModelVersion] = field(default_factory=lambda: [version(1)])

    def look(self, now_s: float) -> list[ModelVersion]:
        return self.versions


class ArithmeticPool:
    """Version n answers n × input. What it is to do wrong is said by `fault`."""

    def __init__(self, batcher: Batcher) -> None:
        self.batcher = batcher
        self.living, self.crashes, self.threads, self.batches, self.count = [1], 0, 1, 0, 1
        self.factors: dict[int, float] = {}
        self.fault: Callable[[int], Exception | None] = lambda version: None
        self.is_held = False
        self.delay_s = 0.0

    async def load(self, found: ModelVersion, least_accuracy: float) -> Servable:
        await asyncio.sleep(self.delay_s)
        if (error := self.fault(found.version)) is not None:
            raise error
        handle = len(self.factors)
        self.factors[handle] = found.version
        self.batcher.open(handle)
        return Servable(version=found, handle=handle, form=FORM, accuracy=0.5)

    def unload(self, servable: Servable) -> None:
        del self.factors[servable.handle]
        self.factors[-1 - servable.handle] = 0.0  # handles are not used again
        self.batcher.close(servable.handle)

    async def decoded(self, handle: int, picture: bytes) -> memoryview:
        raise ModelError("no pictures here")

    def pump(self) -> None:
        if not self.is_held:
            asyncio.get_running_loop().call_soon(self._compute)

    def _compute(self) -> None:
        while (batch := self.batcher.take()) is not None:
            self.batches += 1
            factor = self.factors[batch.handle]
            rows = np.frombuffer(b"".join(batch.contents()), "<f4")
            outputs = rows * np.float32(factor)
            self.batcher.finished(batch, 0.001)
            batch.complete(memoryview(outputs.astype("<f4")).cast("B"))


@dataclass
class InThread:
    """What a test has of a server."""

    port: int
    core: ServingCore
    pool: ArithmeticPool
    source: ListedSource
    table: ConnectionTable
    loop: asyncio.AbstractEventLoop

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)

    def call(self, function: Callable[[], Any]) -> Any:
        """Run it in the server's thread."""

        async def called() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(called(), self.loop).result(10)

    def exchange(self, content: bytes) -> bytes:
        """All that the server says to these bytes until it closes the connection."""
        with self.connect() as connection:
            with suppress(OSError):
                connection.sendall(content)
            return drained(connection)


def drained(connection: socket.socket) -> bytes:
    said = b""
    with suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            said += piece
    return said


def request(
    path: str,
    body: Any = None,
    *,
    method: str | None = None,
    headers: tuple[tuple[str, str], ...] = (),
    close: bool = True,
) -> bytes:
    """The bytes of a request."""
    content = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    given = [("Host", "localhost"), *headers]
    if body is not None:
        given.append(("Content-Length", str(len(content))))
    if close:
        given.append(("Connection", "close"))
    head = "".join(f"{name}: {value}\r\n" for name, value in given)
    return f"{method or ('GET' if body is None else 'POST')} {path} HTTP/1.1\r\n{head}\r\n".encode() + content


def status_of(said: bytes) -> int:
    return int(said.split(b" ", 2)[1]) if said.startswith(b"HTTP/1.1 ") else 0


def body_of(said: bytes) -> Any:
    content = said.partition(b"\r\n\r\n")[2]
    return json.loads(content) if content else None


def infer_body(values: Any = None, **changes: Any) -> dict[str, Any]:
    """A good inference request for a sample, or one with something else in its input."""
    data = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0] if values is None else values
    return {"inputs": [{"name": "input", "shape": [1, 2, 3], "datatype": "FP32", "data": data} | changes]}


@contextmanager
def server(
    *,
    limits: HttpLimits = LIMITS,
    rules: AccessRules | None = None,
    policy: VersionPolicy | None = None,
    labels: dict[str, Any] | None = None,
    shares: dict[str, float] | None = None,
    most_waiting: int = 4096,
    timeout_s: float = 5.0,
    tls: ssl.SSLContext | None = None,
) -> Iterator[InThread]:
    """One model, m, of version 1."""
    source, ready, over = ListedSource(), threading.Event(), asyncio.Event()
    found: list[InThread] = []

    async def run() -> None:
        batcher = Batcher(8, most_waiting)
        pool = ArithmeticPool(batcher)
        entry = ModelEntry(
            source=source,
            policy=policy or VersionPolicy(),
            labels=labels or {},
            shares=TrafficShares(shares or {}),
        )
        core = ServingCore({"m": entry}, pool, batcher, pump=pool.pump)
        app = ServingApp(core, pool, rules or AccessRules(), limits, timeout_s)  # type: ignore[arg-type]
        table = ConnectionTable(limits)
        loop = asyncio.get_running_loop()
        listening = await loop.create_server(
            lambda: HttpConnection(app, table), "127.0.0.1", 0, backlog=1024, ssl=tls
        )
        following = loop.create_task(core.run())
        port = listening.sockets[0].getsockname()[1]
        while not core.is_ready():
            await asyncio.sleep(0.01)
        found.append(InThread(port, core, pool, source, table, loop))
        ready.set()
        while not over.is_set():
            table.sweep()
            with suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), SWEEP_S)
        listening.close()
        following.cancel()
        for connection in list(table.open):
            connection.close()
        with suppress(asyncio.CancelledError):
            await following

    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    try:
        assert ready.wait(10)
        yield found[0]
    finally:
        found[0].loop.call_soon_threadsafe(over.set)
        thread.join(10)


FAILS = LoadFailed("it is half written")
REJECTED = LoadFailed("it is worse", for_good=True)
