"""What is pushed: the list of runs, or one run as it goes on. Each browser is sent the newest state, never a backlog.

A browser that reads slowly gets fewer and larger steps, because nothing is encoded for it before it has taken what was
sent before; one that reads nothing at all is cut off.
"""

import asyncio
import time
from contextlib import suppress
from pathlib import Path

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect

from manyhands.dashboard.answers import papers
from manyhands.dashboard.followed import Follower
from manyhands.dashboard.own_runs import OwnRuns
from manyhands.dashboard.run_list import RunList

SLOW_S = 20.0
LIST_S = 1.0
MOST_WATCHING = 64


class Pushing:
    """All open WebSockets of the page. Made and used in its event loop; `tell` may be called from any thread."""

    def __init__(self, runs: RunList, own: OwnRuns) -> None:
        self._runs = runs
        self._own = own
        self._loop = asyncio.get_running_loop()
        self._bells: set[asyncio.Event] = set()
        self.follower = Follower(self.tell)

    def tell(self) -> None:
        """Something has been read."""
        self._loop.call_soon_threadsafe(self._ring)

    async def close(self) -> None:
        await asyncio.to_thread(self.follower.close)

    async def serve(self, socket: WebSocket) -> None:
        """One browser, until it goes away."""
        if len(self._bells) >= MOST_WATCHING:
            await socket.close(1013, f"{MOST_WATCHING} pages are open; close one of them")
            return
        await socket.accept()
        bell, wish = asyncio.Event(), _Wish()
        self._bells.add(bell)
        sending = asyncio.create_task(self._send(socket, bell, wish))
        hearing = asyncio.create_task(_hear(socket, bell, wish))
        try:
            await asyncio.wait((sending, hearing), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._bells.discard(bell)
            for task in (sending, hearing):
                task.cancel()
            await asyncio.gather(sending, hearing, return_exceptions=True)

    def _ring(self) -> None:
        for bell in self._bells:
            bell.set()

    async def _send(self, socket: WebSocket, bell: asyncio.Event, wish: "_Wish") -> None:
        while True:
            if wish.run is not None:
                await self._send_run(socket, wish, wish.run)
            elif wish.is_heard:
                await self._send_list(socket, wish)
            with suppress(TimeoutError):
                async with asyncio.timeout(LIST_S):
                    await bell.wait()
                    if wish.run is None and wish.is_heard and wish.said:
                        await asyncio.sleep(LIST_S)  # a list is not worth more than one message a second
            bell.clear()

    async def _send_run(self, socket: WebSocket, wish: "_Wish", name: str) -> None:
        place = self._runs.place(name)
        if place is None:
            await _send_soon(socket, msgspec.json.encode({"type": "gone", "run": name}))
            wish.want(None)
            wish.is_heard = False
            return
        followed = self.follower.follow(place)
        since = wish.version
        version, message = await asyncio.to_thread(followed.message, since)
        if version != since and version > 0:
            await _send_soon(socket, message)
            if wish.run == name and wish.version == since:
                wish.version = version
        if time.monotonic() - wish.told_s > LIST_S / 2:
            wish.told_s = time.monotonic()
            row = await asyncio.to_thread(self._row, name, place)
            if row != wish.said:
                await _send_soon(socket, row)
                wish.said = row

    def _row(self, name: str, place: Path) -> bytes:
        return msgspec.json.encode({"type": "row", "row": self._own.row(name)} | papers(place))

    async def _send_list(self, socket: WebSocket, wish: "_Wish") -> None:
        message = msgspec.json.encode({"type": "runs", "rows": await asyncio.to_thread(self._own.rows)})
        if message != wish.said:
            await _send_soon(socket, message)
            wish.said = message


class _Wish:
    """What a browser wants to see, and what it has been told last."""

    def __init__(self) -> None:
        self.is_heard = False
        self.want(None)

    def want(self, run: str | None) -> None:
        self.run = run
        self.version = 0
        self.said = b""
        self.told_s = 0.0


async def _hear(socket: WebSocket, bell: asyncio.Event, wish: _Wish) -> None:
    """`{"run": "name"}`, or `{"run": null}` for the list; anything else ends the connection."""
    try:
        while True:
            wanted = msgspec.json.decode(await socket.receive_text(), type=dict[str, str | None])
            wish.want(wanted.get("run"))
            wish.is_heard = True
            bell.set()
    except (WebSocketDisconnect, msgspec.MsgspecError, RecursionError, KeyError):
        return


async def _send_soon(socket: WebSocket, message: bytes) -> None:
    async with asyncio.timeout(SLOW_S):
        await socket.send_text(message.decode())
