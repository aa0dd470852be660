"""HTTP/1.1 for one connection: parsed by httptools, with a limit on everything that a client decides.

Requests of a connection are answered one after the other. What must be refused by its head is refused before its body
is read, and a connection on which something was malformed is closed: what follows could mean anything.
"""

import asyncio
import contextlib
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Protocol
from urllib.parse import parse_qs, unquote

import httptools
import msgspec

MOST_HEAD_BYTES = 32 << 10
MOST_HEADERS = 100
_MOST_PIPELINED = 8
_HIGH_WATER_BYTES = 256 << 10
BODY_METHODS = ("POST", "PUT")

JSON = "application/json"
JSON_ENCODER = msgspec.json.Encoder()


class HttpLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a client may take."""

    body_bytes: int = 64 << 20
    all_bodies_bytes: int = 1 << 30  # of all requests that are under way
    connections: int = 1024
    head_s: float = 10.0  # until the head of a request is complete
    body_s: float = 60.0
    idle_s: float = 75.0
    write_s: float = 30.0  # until a client has read an answer


@dataclass(kw_only=True)
class HttpRequest:
    """What a client asks."""

    method: str
    path: tuple[str, ...]  # segments, without escapes
    query: str
    headers: dict[str, str]
    body: bytearray = field(default_factory=bytearray)
    reserved_bytes: int = 0  # for its body, among those of all requests

    def asked(self, name: str) -> str | None:
        """A word of the query."""
        return parse_qs(self.query).get(name, [None])[-1]  # type: ignore[list-item]


@dataclass(kw_only=True)
class HttpReply:
    """What it is told."""

    status: int = 200
    parts: list[bytes | memoryview] = field(default_factory=list)
    content_type: str = JSON
    headers: tuple[tuple[str, str], ...] = ()

    @classmethod
    def json(cls, value: object, status: int = 200, headers: tuple[tuple[str, str], ...] = ()) -> "HttpReply":
        return cls(status=status, parts=[JSON_ENCODER.encode(value)], headers=headers)

    @classmethod
    def error(cls, status: int, message: str, headers: tuple[tuple[str, str], ...] = ()) -> "HttpReply":
        return cls.json({"error": message}, status, headers)


Abandon = Callable[[], None]
"""Called when the client has gone before its answer."""


class Application(Protocol):
    limits: HttpLimits

    def refusal(self, request: HttpRequest) -> HttpReply | None:
        """By the head alone."""
        ...

    def handle(self, request: HttpRequest, reply: Callable[[HttpReply], None]) -> Abandon | None:
        """Answer by one call of `reply`, now or later."""
        ...


class ConnectionTable:
    """All connections of a server, and what they hold together."""

    def __init__(self, limits: HttpLimits) -> None:
        self.limits = limits
        self.open: set[HttpConnection] = set()
        self.body_bytes = 0
        self.is_draining = False

    def admit(self, connection: "HttpConnection") -> bool:
        """Whether there is room for one more; the longest idle one makes room for it."""
        if len(self.open) >= self.limits.connections:
            idle = [one for one in self.open if one.is_idle]
            if not idle:
                return False
            min(idle, key=lambda one: one.deadline_s).close()
        self.open.add(connection)
        return True

    def sweep(self) -> None:
        """Close what takes too long; to be called every second or so."""
        now_s = time.monotonic()
        for connection in [one for one in self.open if one.deadline_s < now_s]:
            connection.too_late()

    def drain(self) -> None:
        """From now on connections end with the answer that they wait for."""
        self.is_draining = True
        for connection in [one for one in self.open if one.is_idle]:
            connection.close()


class HttpConnection(asyncio.Protocol):
    """The callbacks named `on_…` are those of httptools."""

    def __init__(self, application: Application, table: ConnectionTable) -> None:
        self._application, self._table = application, table
        self._limits = application.limits
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._waiting: deque[tuple[HttpRequest, HttpReply | None, bool]] = deque()
        self._abandon: Abandon | None = None
        self._is_answering = self._is_paused = self._is_busy = self._is_refused = self._in_message = (
            self._in_body
        ) = False
        self._url, self._headers = b"", dict[str, str]()
        self._head_bytes = self._header_count = 0
        self._request: HttpRequest | None = None
        self._reserved = self._complete = 0
        self.deadline_s = time.monotonic() + self._limits.head_s

    @property
    def is_idle(self) -> bool:
        return not (self._is_busy or self._is_paused or self._waiting or self._in_message)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(_HIGH_WATER_BYTES)
        if not self._table.admit(self):
            self._refuse(503, "there are too many connections; try again later")

    def connection_lost(self, error: Exception | None) -> None:
        self._table.open.discard(self)
        self._release(self._reserved)
        self._waiting.clear()
        self._transport = None
        if self._abandon is not None:
            self._abandon()

    def eof_received(self) -> bool:
        # A client that has closed its half may still read; an unfinished request will not be finished.
        if self._in_message or self.is_idle:
            return False
        self._is_refused = True
        return True

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if not self._in_message:
            self._begin()
        before, body_bytes = self._complete, len(self._request.body) if self._request else 0
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(400, "this server changes to no other protocol")
        except (httptools.HttpParserError, ValueError) as error:
            if not self._is_refused:
                self._refuse(400, f"this is not HTTP/1.1: {error}")
        is_body = self._in_body and self._request is not None and len(self._request.body) > body_bytes
        if self._in_message and not is_body:
            # What came with the end of another request is at most one packet, and is not counted. What comes after a
            # body in pieces counts as well: the parser keeps a header there, too, until it is complete.
            self._head_bytes += len(data) if self._complete == before else 0
            if self._head_bytes > MOST_HEAD_BYTES:
                self._refuse(431, f"the head of a request may have {MOST_HEAD_BYTES:,} bytes")

    def pause_writing(self) -> None:
        """The client reads more slowly than it is answered: it gets no further answer meanwhile."""
        self._is_paused = True
        self.deadline_s = time.monotonic() + self._limits.write_s

    def resume_writing(self) -> None:
        self._is_paused = False
        self._may_take(self._limits.idle_s)
        self._next()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def too_late(self) -> None:
        """It has had its time for what it is doing."""
        if self._transport is None:
            return
        if self._transport.get_write_buffer_size() or self._is_refused:
            self._transport.abort()
        elif self._in_message and not self._is_busy:
            self._refuse(408, "the request was not complete in time")
        elif self.is_idle:
            self._transport.close()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        key = name.decode("latin-1").lower()
        if key in self._headers and key in ("host", "content-length", "authorization", "transfer-encoding"):
            raise ValueError(f"{key} comes twice")
        self._header_count += 1
        if self._header_count > MOST_HEADERS:
            raise ValueError(f"more than {MOST_HEADERS} headers")
        self._headers[key] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        path, _, query = self._url.decode("latin-1").partition("?")
        segments = tuple(unquote(part) for part in path.split("/") if part)
        request = HttpRequest(
            method=self._parser.get_method().decode("latin-1"),
            path=segments,
            query=query,
            headers=self._headers,
        )
        self._request, self._in_body = request, True
        refusal = self._application.refusal(request) or self._body_refusal(request)
        if refusal is not None:
            self._is_refused = True
            self._waiting.append((request, refusal, False))
            self._next()
            return
        self._may_take(self._limits.body_s)
        if request.headers.get("expect", "").lower() == "100-continue" and not self._is_busy:
            assert self._transport is not None
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        if self._is_refused or self._request is None:
            return
        self._request.body += body
        self._head_bytes = 0
        if (
            len(self._request.body) > self._limits.body_bytes
        ):  # in pieces, so that its length was not told before
            self._refuse(413, f"a body may have {self._limits.body_bytes:,} bytes")

    def on_message_complete(self) -> None:
        if self._is_refused or self._request is None:
            return
        self._waiting.append((self._request, None, self._parser.should_keep_alive()))
        self._in_message = self._in_body = False
        self._complete += 1
        if len(self._waiting) >= _MOST_PIPELINED and self._transport is not None:
            self._transport.pause_reading()
        self._next()
        self._url, self._headers, self._request = b"", {}, None
        self._head_bytes = self._header_count = 0

    def on_message_begin(self) -> None:
        self._begin()

    def _may_take(self, limit_s: float) -> None:
        """The time for what the client does next; one that does not read its answers has that of reading them."""
        if not self._is_paused:
            self.deadline_s = time.monotonic() + limit_s

    def _begin(self) -> None:
        self._in_message, self._in_body = True, False
        if not self._is_busy:
            self._may_take(self._limits.head_s)

    def _body_refusal(self, request: HttpRequest) -> HttpReply | None:
        """By what the head says of the body, and of what is to come after it."""
        if "upgrade" in request.headers:
            return HttpReply.error(400, "this server changes to no other protocol; leave out Upgrade")
        if request.headers.get("content-encoding", "identity") != "identity":
            return HttpReply.error(415, "compressed bodies are not read; send it as it is")
        if "transfer-encoding" in request.headers and "content-length" in request.headers:
            return HttpReply.error(400, "a body has either a Content-Length or a Transfer-Encoding")
        length = int(request.headers.get("content-length", "0"))
        if request.method not in BODY_METHODS and (length or "transfer-encoding" in request.headers):
            # Bytes are set aside for a body, and some of these requests need no token.
            return HttpReply.error(400, f"{request.method} has no body here; leave it out")
        if length > self._limits.body_bytes:
            return HttpReply.error(
                413, f"the body has {length:,} bytes, and may have {self._limits.body_bytes:,}"
            )
        if "transfer-encoding" in request.headers:
            length = self._limits.body_bytes
        if self._table.body_bytes + length > self._limits.all_bodies_bytes:
            return HttpReply.error(
                503, "too many bytes are under way; try again later", (("Retry-After", "1"),)
            )
        request.reserved_bytes = length
        self._reserved += length
        self._table.body_bytes += length
        return None

    def _release(self, length: int) -> None:
        self._reserved -= length
        self._table.body_bytes -= length

    def _refuse(self, status: int, message: str) -> None:
        """After the answers that are due before; then the connection ends."""
        self._is_refused = True
        nothing = HttpRequest(method="GET", path=(), query="", headers={})
        self._waiting.append((nothing, HttpReply.error(status, message), False))
        self._next()

    def _next(self) -> None:
        """Answer the requests in line, until one takes longer. Not by recursion: a packet may have a thousand."""
        if self._is_answering:
            return
        self._is_answering = True
        while not (self._is_busy or self._is_paused) and self._waiting and self._transport is not None:
            self._answer_first()
        self._is_answering = False

    def _answer_first(self) -> None:
        assert self._transport is not None
        request, refusal, keep = self._waiting.popleft()
        self._is_busy = True
        if len(self._waiting) < _MOST_PIPELINED and not self._is_refused:
            self._transport.resume_reading()
        if refusal is not None:
            self._answer(request, refusal, keep=False)
            return
        is_answered = False

        def reply(found: HttpReply) -> None:
            nonlocal is_answered
            is_answered = True
            self._answer(request, found, keep=keep)

        try:
            abandon = self._application.handle(request, reply)
        except Exception:  # a fault of ours: of one request, and not of the server
            traceback.print_exc()
            if not is_answered:
                reply(HttpReply.error(500, "this server has failed at this request; its log says how"))
            return
        if not is_answered:
            self._abandon = abandon

    def _answer(self, request: HttpRequest, reply: HttpReply, *, keep: bool) -> None:
        self._abandon = None
        if self._transport is None:
            return
        keep = keep and not self._table.is_draining
        self._transport.writelines(_written(request, reply, keep=keep))
        self._is_busy = False
        self._release(request.reserved_bytes)
        if not keep:
            self._is_refused = True
            self._waiting.clear()
            self._may_take(self._limits.write_s)
            self._finish()
            return
        self._may_take(self._limits.body_s if self._in_message else self._limits.idle_s)
        self._next()

    def _finish(self) -> None:
        """Close such that the client finds the answer, also if it still sends what is not read any more."""
        assert self._transport is not None
        if self._transport.can_write_eof():
            with contextlib.suppress(OSError):  # the client has ended the connection already
                self._transport.write_eof()
            asyncio.get_running_loop().call_later(_LINGER_S, self.close)
        else:
            self._transport.close()


_LINGER_S = 0.5
_HEADS = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: ".encode()
    for status in HTTPStatus
}


def _written(request: HttpRequest, reply: HttpReply, *, keep: bool) -> list[bytes | memoryview]:
    length = sum(map(len, reply.parts))
    more = "".join(f"{name}: {value}\r\n" for name, value in reply.headers)
    end = "\r\n" if keep else "Connection: close\r\n\r\n"
    head = f"{reply.content_type}\r\nContent-Length: {length}\r\n{more}{end}".encode("latin-1")
    return [_HEADS[reply.status] + head, *([] if request.method == "HEAD" else reply.parts)]
