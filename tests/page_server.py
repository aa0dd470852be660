"""The page on a port of its own, in a thread of the tests, and raw sockets that talk to it."""

import asyncio
import base64
import json
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manyhands.dashboard.page_server import PageServer, PageSettings
from manyhands.telemetry import lines


@dataclass
class Reply:
    """What came back."""

    status: int
    head: str
    body: bytes

    def header(self, name: str) -> str:
        found = re.search(rf"^{re.escape(name)}: (.*?)\r?$", self.head, re.IGNORECASE | re.MULTILINE)
        return found[1] if found else ""

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Browser:
    """Says exactly what it is told to, on a new connection each time."""

    page: PageServer
    cookie: str = ""
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.page.port}"

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.page.port), timeout=10)

    def ask(self, method: str, path: str, body: bytes = b"", **headers: str | None) -> Reply:
        given: dict[str, str | None] = {"Host": self.host, "Connection": "close", **self.headers}
        if method != "GET":
            given |= {"Origin": f"http://{self.host}", "Content-Length": str(len(body))}
        if self.cookie:
            given["Cookie"] = self.cookie
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        said = "".join(f"{name}: {value}\r\n" for name, value in given.items() if value is not None)
        with self.connect() as connection:
            connection.sendall(f"{method} {path} HTTP/1.1\r\n{said}\r\n".encode("latin-1") + body)
            return reply(received(connection))

    def sign_in(self) -> "Browser":
        """With a token of the terminal."""
        answer = self.ask("GET", self.page.address().partition(str(self.page.port))[2])
        assert answer.status == 303, answer
        self.cookie = answer.header("set-cookie").partition(";")[0]
        return self

    @contextmanager
    def websocket(self, **headers: str | None) -> Iterator[tuple[socket.socket, str]]:
        """A connection, and what the server has said to the upgrade."""
        given: dict[str, str | None] = {
            "Host": self.host,
            "Origin": f"http://{self.host}",
            "Upgrade": "websocket",
            "Connection": "Upgrade",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": base64.b64encode(os.urandom(16)).decode(),
            "Cookie": self.cookie,
            **headers,
        }
        said = "".join(f"{name}: {value}\r\n" for name, value in given.items() if value)
        with self.connect() as connection:
            connection.sendall(f"GET /live HTTP/1.1\r\n{said}\r\n".encode())
            head = b""
            while b"\r\n\r\n" not in head and (byte := connection.recv(1)):
                head += byte
            yield connection, head.decode()


def say(connection: socket.socket, text: str) -> None:
    """A masked text frame, as browsers send them."""
    data = text.encode()
    mask = os.urandom(4)
    masked = bytes(byte ^ mask[place % 4] for place, byte in enumerate(data))
    assert len(data) < 126
    connection.sendall(bytes([0x81, 0x80 | len(data)]) + mask + masked)


def hear(connection: socket.socket) -> Any:
    """The next text frame as JSON; pings are passed over."""
    while True:
        first, second = exactly(connection, 2)
        length = second & 127
        if length >= 126:
            length = int.from_bytes(exactly(connection, 2 if length == 126 else 8), "big")
        content = exactly(connection, length)
        if first & 15 == 1:
            return json.loads(content)


def exactly(connection: socket.socket, length: int) -> bytes:
    found = b""
    while len(found) < length:
        piece = connection.recv(length - len(found))
        assert piece, "the server has closed the connection"
        found += piece
    return found


def received(connection: socket.socket) -> bytes:
    found = b""
    try:
        while piece := connection.recv(1 << 16):
            found += piece
    except ConnectionResetError:
        pass
    return found


def reply(raw: bytes) -> Reply:
    head, _, body = raw.partition(b"\r\n\r\n")
    text = head.decode("latin-1")
    return Reply(int(text.split()[1]) if text else 0, text, body)


@contextmanager
def serving(directory: Path, **settings: Any) -> Iterator[PageServer]:
    """The page, until the context ends."""
    page = PageServer(PageSettings(directory=directory, port=0, **settings))
    thread = threading.Thread(target=lambda: asyncio.run(page.serve()))
    thread.start()
    try:
        until_s = time.monotonic() + 20
        while not page.server.started:
            assert time.monotonic() < until_s
            time.sleep(0.01)
        yield page
    finally:
        page.server.should_exit = True
        thread.join(20)
        page.answers.own.close()
        assert not thread.is_alive()


def write_run(place: Path, *, workers: int = 2, steps: int = 50, **start: Any) -> Path:
    """A run as its recorders would have written it."""
    (place / "events").mkdir(parents=True)
    began_t = time.time() - steps * 0.01 - 60
    for rank in range(workers):
        records = [
            {"kind": "start", "t": began_t, "rank": rank, "workers": workers, "total_steps": steps, **start}
        ]
        records += [step_record(rank, step, began_t + step * 0.01) for step in range(1, steps + 1)]
        append(place, rank, *records)
    return place


def step_record(rank: int, step: int, t: float, loss: float = 1.0) -> dict[str, Any]:
    spent = {"compute_s": 0.006, "wait_s": 0.002, "update_s": 0.001}
    return {
        "kind": "step",
        "t": t,
        "rank": rank,
        "step": step,
        "epoch": 0,
        "loss": loss,
        "samples": 32,
        **spent,
    }


def append(place: Path, rank: int, *records: dict[str, Any]) -> None:
    with open(place / "events" / f"worker-{rank}.jsonl", "ab") as file:
        file.write(b"".join(map(lines.encode, records)))
