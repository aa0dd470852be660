"""How many connections may be open, and for how long one may say nothing.

A connection that has not sent a whole request is worth nothing yet. Of those only the newest few stay, each for a few
seconds, so that thousands of silent ones cannot keep a person out. Those that have been served are counted by uvicorn.
"""

import asyncio
from collections import OrderedDict
from typing import Any, ClassVar

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_SILENT = 64
SILENT_S = 10.0
MOST_SERVED = 256
KEEP_ALIVE_S = 30


class LimitedProtocol(H11Protocol):
    """HTTP of uvicorn, whose silent connections are closed."""

    _silent: ClassVar["OrderedDict[LimitedProtocol, None]"] = OrderedDict()

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._silent[self] = None
        self._patience = self.loop.call_later(SILENT_S, self._is_too_silent)
        if len(self._silent) > MOST_SILENT:
            oldest = next(iter(self._silent))
            oldest._is_too_silent()

    def connection_lost(self, exc: Exception | None) -> None:
        self._has_spoken()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._has_spoken()

    def handle_websocket_upgrade(self, event: Any) -> None:
        self._has_spoken()
        super().handle_websocket_upgrade(event)

    def _has_spoken(self) -> None:
        self._silent.pop(self, None)
        self._patience.cancel()

    def _is_too_silent(self) -> None:
        self._has_spoken()
        transport = self.transport
        if isinstance(transport, asyncio.Transport):
            transport.abort()
