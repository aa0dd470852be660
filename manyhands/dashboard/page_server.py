"""`manyhands dash`, from the address that is printed to the end that leaves nothing behind."""

import asyncio
import os
import socket
import sys
import webbrowser
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from manyhands.dashboard.app import PageAnswers
from manyhands.dashboard.connection_limits import KEEP_ALIVE_S, MOST_SERVED, LimitedProtocol
from manyhands.dashboard.gatekeeper import Gatekeeper, Keys, hosts_of
from manyhands.dashboard.run_list import RunList
from manyhands.errors import UsageError

PORT = 8765
BACKLOG = 128
NICE = 5
"""The runs come first: what the page does may wait a little for a core."""
_LIMITS = {
    "http": LimitedProtocol,
    "lifespan": "on",
    "log_config": None,
    "access_log": False,
    "server_header": False,
    "proxy_headers": False,
    "limit_concurrency": MOST_SERVED,
    "timeout_keep_alive": KEEP_ALIVE_S,
    "timeout_graceful_shutdown": 2,
    "h11_max_incomplete_event_size": 1 << 14,
    "ws_max_size": 1 << 16,
    "ws_per_message_deflate": False,  # five who watch would cost the run five compressions
    "backlog": BACKLOG,
}


@dataclass(frozen=True, kw_only=True)
class PageSettings:
    """Where the page is and what it may do."""

    directory: Path
    host: str = "127.0.0.1"
    port: int | None = None
    """The usual one where it is free, if none is given."""
    tls: tuple[Path, Path] | None = None
    """Certificate and key."""
    allow_code: bool = False
    password: str | None = None
    opens_browser: bool = False


class PageServer:
    """The page on a socket of its own."""

    def __init__(self, settings: PageSettings) -> None:
        self._settings = settings
        if not settings.directory.is_dir():
            raise UsageError(
                f"there is no folder {settings.directory}; give one that runs are in, or make it"
            )
        self._socket = (
            _usual(settings.host) if settings.port is None else _bound(settings.host, settings.port)
        )
        self.port: int = self._socket.getsockname()[1]
        self.keys = Keys(settings.password)
        cookie = f"manyhands_{self.port}"  # browsers keep cookies by host, whatever the port is
        is_tls = settings.tls is not None
        self.answers = PageAnswers(
            RunList(settings.directory),
            self.keys,
            cookie=cookie,
            is_tls=is_tls,
            allow_code=settings.allow_code,
        )
        app = Gatekeeper(
            self.answers.application(),
            keys=self.keys,
            hosts=hosts_of(settings.host),
            cookie=cookie,
            is_tls=is_tls,
        )
        certificate, key = settings.tls or (None, None)
        self.server = uvicorn.Server(
            uvicorn.Config(app, ssl_certfile=certificate, ssl_keyfile=key, **_LIMITS)  # type: ignore[arg-type]
        )
        try:
            self.server.config.load()
        except OSError as error:
            self._socket.close()
            raise UsageError(f"--tls {certificate} {key}: {error.strerror or error}") from None

    def address(self) -> str:
        """Where a browser finds the page, with a token that opens it once."""
        scheme = "https" if self._settings.tls else "http"
        host = self._settings.host
        host = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
        return f"{scheme}://{host}:{self.port}/sign-in?token={self.keys.new_token()}"

    async def serve(self) -> None:
        """Until it is told to end."""
        try:
            await self.server.serve(sockets=[self._socket])
        finally:
            self._socket.close()


def serve(settings: PageSettings) -> int:
    """Print the address and serve the page until Ctrl-C."""
    page = PageServer(settings)
    address = page.address()
    print(f"the runs in {settings.directory} are at\n  {address}", flush=True)
    print("The address opens one browser, once; after that this terminal has another. Ctrl-C ends the page.")
    if "*" in hosts_of(settings.host):
        _warn(settings)
    page.answers.on_sign_in = lambda: print(
        f"signed in; for another browser:\n  {page.address()}", flush=True
    )
    os.nice(NICE)
    if settings.opens_browser:
        webbrowser.open(address)
    try:
        asyncio.run(page.serve())
    except KeyboardInterrupt:
        pass
    finally:
        for name in page.answers.own.close():
            print(
                f"stopped {name}, with a checkpoint: manyhands train --out {settings.directory / name} --resume"
            )
    return 0


def _warn(settings: PageSettings) -> None:
    """Of what everyone on the network can see and do."""
    if settings.tls is None:
        print(
            f"warning: the page is open to the network at {settings.host}, and its traffic is in clear: who can read "
            "along can take over the page, and it starts programs here; use --tls CERT KEY, or ssh -L",
            file=sys.stderr,
        )


def _usual(host: str) -> socket.socket:
    try:
        return _bound(host, PORT)
    except UsageError:
        return _bound(host, 0)


def _bound(host: str, port: int) -> socket.socket:
    if not 0 <= port < 1 << 16:
        raise UsageError(f"--port {port}: a port is a number from 0 to {(1 << 16) - 1}; 0 takes any")
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind, protocol)
    except (OSError, OverflowError) as error:
        raise UsageError(f"--host {host} --port {port}: {getattr(error, 'strerror', error)}") from None
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(place)
        found.listen(BACKLOG)  # a browser that opens the address at once waits until the page is ready
    except OSError as error:
        found.close()
        raise UsageError(
            f"cannot open the page at {host}, port {port} ({error.strerror}); choose an address of this machine "
            "with --host, or another --port, 0 for any"
        ) from None
    return found
