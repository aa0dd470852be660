"""The process of `manyhands serve`: its port, its model processes, its start and its end."""

import asyncio
import contextlib
import resource
import signal
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Callable

from manyhands.errors import UsageError
from manyhands.serving.batcher import Batcher
from manyhands.serving.core import ServingCore
from manyhands.serving.http_connection import ConnectionTable, HttpConnection
from manyhands.serving.loader import VersionLoader
from manyhands.serving.model_pool import ModelPool
from manyhands.serving.serve_settings import ServeSettings
from manyhands.serving.serving_app import ServingApp

DRAIN_S = 30.0
"""After SIGTERM: for the requests that are under way."""
_SWEEP_S = 0.5
_BACKLOG = 1024
_OTHER_DESCRIPTORS = 100

Say = Callable[[str], None]


class RunningServer:
    """What is there while a server runs."""

    def __init__(
        self,
        address: str,
        listener: asyncio.Server,
        core: ServingCore,
        pool: ModelPool,
        table: ConnectionTable,
    ) -> None:
        self.address = address
        self._listener = listener
        self.core = core
        self.pool = pool
        self.table = table

    async def drain(self) -> None:
        """Answer what has been asked, and nothing more."""
        self._listener.close()
        self.table.drain()
        until = asyncio.get_running_loop().time() + DRAIN_S
        while self.table.open and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def serving(settings: ServeSettings, say: Say = lambda line: None) -> AsyncIterator[RunningServer]:
    """A server from its start to its end; leaving the context ends all processes."""
    settings.check()
    models = {name: words.entry(name) for name, words in settings.models.items()}
    context = _tls(settings)
    rules, limits = settings.rules(), settings.limits
    _raise_descriptors(limits.connections)
    words = settings.batching
    batcher = Batcher(words.most_samples, words.most_waiting_samples, words.sizes)
    pool = ModelPool(
        batcher,
        count=settings.processes,
        threads=settings.threads_each(),
        allowed=settings.allow,
        say=say,
        unloadable=lambda handle, reason: core.lost(handle, reason),
    )
    core = ServingCore(models, VersionLoader(pool), batcher, policy=settings.policy, pump=pool.pump, say=say)
    app = ServingApp(core, pool, rules, limits, words.timeout_s)
    table = ConnectionTable(limits)
    loop = asyncio.get_running_loop()
    with _listening(settings.host, settings.port) as listener:
        server = await loop.create_server(
            lambda: HttpConnection(app, table), sock=listener, ssl=context, backlog=_BACKLOG
        )
        following = sweeping = None
        try:
            await pool.start()
            following = loop.create_task(core.run())
            sweeping = loop.create_task(_sweep(table))
            scheme = "https" if context else "http"
            port = listener.getsockname()[1]
            host = f"[{settings.host}]" if ":" in settings.host else settings.host
            yield RunningServer(f"{scheme}://{host}:{port}", server, core, pool, table)
        finally:
            server.close()
            for task in filter(None, (following, sweeping)):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            for connection in list(table.open):
                connection.close()
            await pool.stop()


async def serve(settings: ServeSettings, say: Say) -> int:
    """Serve until SIGTERM or Ctrl-C; a second one does not wait for requests under way."""
    ended: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.put_nowait, number)
    async with serving(settings, say) as server:
        say(f"serving {', '.join(settings.models)} at {server.address}")
        first = await ended.get()
        say("ends when the requests under way are answered; the same signal again ends it now")
        await asyncio.wait(
            [asyncio.ensure_future(server.drain()), asyncio.ensure_future(ended.get())],
            return_when=asyncio.FIRST_COMPLETED,
        )
    return 130 if first == signal.SIGINT else 0


async def _sweep(table: ConnectionTable) -> None:
    while True:
        await asyncio.sleep(_SWEEP_S)
        table.sweep()


def _listening(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UsageError(
            f"{host} is no address of this machine ({error.strerror}); give another --host"
        ) from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise UsageError(
            f"cannot listen at {host}:{port} ({error.strerror}); give another --port, or 0 for any free one"
        ) from None
    return listener


def _tls(settings: ServeSettings) -> ssl.SSLContext | None:
    if settings.certificate is None or settings.key is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(settings.certificate, settings.key)
    except (OSError, ssl.SSLError) as error:
        raise UsageError(
            f"the certificate {settings.certificate} and the key {settings.key} cannot be used ({error.strerror})"
        ) from None
    return context


def _raise_descriptors(connections: int) -> None:
    """As many as the connections need, where the system lets this process have them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _OTHER_DESCRIPTORS
    if soft < wanted:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        if limit < wanted:
            print(
                f"note: this process may have {limit:,} descriptors, fewer than its connections",
                file=sys.stderr,
            )
