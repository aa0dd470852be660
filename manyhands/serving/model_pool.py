"""The model processes, from the server's side: started, given batches, and replaced when they die.

All of them hold every version. A batch goes to a process that is free, and while it computes the next one may already
lie in its socket. A batch whose process dies is computed again: only a request that fails alone is refused.

One more process is a spare. It has loaded PyTorch, which takes seconds, and no model, which takes little.
"""

import asyncio
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from manyhands.errors import ManyhandsError
from manyhands.serving import model_frames as frames
from manyhands.serving.batcher import Batch, Batcher, ModelError
from manyhands.serving.description import Description
from manyhands.serving.loader import LoadFailed
from manyhands.serving.stream import ModelVersion

AHEAD = 2
"""Batches that a process may have: one that it computes, one that waits in its socket."""

_ROOT = str(Path(__file__).parents[2])
# Not `-m`, which would look for modules in whatever directory the server was started in.
_START = "import sys; sys.path.insert(0, sys.argv.pop(1)); from manyhands.serving.model_process import main; main()"
_LONG_LIFE_S = 10.0
_LONGEST_PAUSE_S = 30.0
_SOCKET_BYTES = 1 << 20

Loaded = tuple[int, Description, float | None, float]


class InvalidInput(ManyhandsError):
    """What a client has sent cannot be used."""


class PoolProcess(asyncio.Protocol):
    """One model process."""

    def __init__(self, pool: "ModelPool") -> None:
        self._pool = pool
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None
        self.batches: dict[int, Batch] = {}
        self.pictures: dict[int, asyncio.Future[memoryview]] = {}
        self.loads: dict[int, asyncio.Future[frames.VersionLoaded]] = {}
        self.handles: set[int] = set()
        self.begun_s = time.monotonic()
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
            end.setblocking(end is theirs)
        self._socket = ours
        environ = {**os.environ, "OMP_NUM_THREADS": str(pool.threads), "MKL_NUM_THREADS": str(pool.threads)}
        words = [_ROOT, str(theirs.fileno()), str(pool.threads), str(os.getpid()), os.getcwd()]
        with theirs:
            self.popen = subprocess.Popen(
                [sys.executable, "-P", "-c", _START, *words],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr.fileno(),
                pass_fds=[theirs.fileno()],
                env=environ,
            )
        self._pidfd = os.pidfd_open(self.popen.pid)
        asyncio.get_running_loop().add_reader(self._pidfd, self._exited)

    async def connect(self) -> None:
        await asyncio.get_running_loop().create_connection(lambda: self, sock=self._socket)

    @property
    def is_connected(self) -> bool:
        return self._transport is not None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def tell(self, message: frames.ToProcess, *tensor: bytes | memoryview) -> None:
        if self._transport is None or self._transport.is_closing():
            return  # it has died; `_exited` will be called, and sees what it was to do
        self._transport.writelines([frames.framed(message, sum(map(len, tensor))), *tensor])

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        place = 0
        while len(received) - place >= frames.HEAD.size:
            length, tensor_bytes = frames.HEAD.unpack_from(received, place)
            begin = place + frames.HEAD.size
            end = begin + length + tensor_bytes
            if len(received) < end:
                break
            with memoryview(received) as view:
                message = frames.decode_from_process(view[begin : begin + length])
                tensor = bytes(view[begin + length : end])
            place = end
            self._heard(message, memoryview(tensor))
        del received[:place]
        if place:
            self._pool.pump()

    def end(self) -> None:
        """Close its socket, at which it ends."""
        asyncio.get_running_loop().remove_reader(self._pidfd)
        os.close(self._pidfd)
        if self._transport is not None:
            self._transport.abort()
        else:
            self._socket.close()

    def _heard(self, message: frames.FromProcess, tensor: memoryview) -> None:
        if isinstance(message, frames.Computed):
            if (batch := self.batches.pop(message.number, None)) is not None:
                self._pool.computed(batch, message.took_s, tensor)
            elif not (picture := self.pictures.pop(message.number)).done():
                picture.set_result(tensor)
        elif isinstance(message, frames.NotComputed):
            if (batch := self.batches.pop(message.number, None)) is not None:
                self._pool.batcher.again(batch, ModelError(f"the model failed: {message.reason}"))
            elif not (picture := self.pictures.pop(message.number)).done():
                kind = InvalidInput if message.is_input else ModelError
                picture.set_exception(kind(message.reason))
        else:
            self._answer_load(message)

    def _answer_load(self, message: frames.VersionLoaded | frames.VersionFailed) -> None:
        future = self.loads.pop(message.handle, None)
        if future is None:
            if isinstance(message, frames.VersionLoaded):
                self.tell(frames.UnloadVersion(handle=message.handle))  # it was unloaded before it was there
            return
        if isinstance(message, frames.VersionLoaded):
            self.handles.add(message.handle)
        if future.done():
            return
        if isinstance(message, frames.VersionLoaded):
            future.set_result(message)
        else:
            future.set_exception(LoadFailed(message.reason, for_good=message.for_good))

    def _exited(self) -> None:
        code = self.popen.wait()
        self.end()
        known = {one.value: one.name for one in signal.Signals}  # not all of the real-time ones have names
        how = f"was killed by {known.get(-code, -code)}" if code < 0 else f"ended with code {code}"
        self._pool.lost(self, f"model process {self.popen.pid} {how}")


class ModelPool:
    """So many model processes, of so many threads each."""

    def __init__(
        self,
        batcher: Batcher,
        *,
        count: int = 1,
        threads: int = 1,
        allowed: tuple[str, ...] = (),
        say: Callable[[str], None],
        unloadable: Callable[[int, str], None] = lambda handle, reason: None,
    ) -> None:
        self.batcher = batcher
        self.count = count
        self.threads = threads
        self.crashes = 0
        self.batches = 0
        self._allowed = allowed
        self._say = say
        self._unloadable = unloadable
        self._processes: list[PoolProcess] = []
        self._versions: dict[int, ModelVersion] = {}
        self._numbers = itertools.count()
        self._pauses_s: deque[float] = deque(maxlen=1)
        self._spare: PoolProcess | None = None
        self._restarts: set[asyncio.Task[None]] = set()
        self._is_over = False

    @property
    def living(self) -> list[int]:
        """The process ids."""
        return [process.popen.pid for process in self._processes]

    @property
    def has_spare(self) -> bool:
        return self._spare is not None

    async def start(self) -> None:
        for _ in range(self.count):
            await self._begin()

    async def stop(self) -> None:
        """End all processes; what they compute is lost."""
        self._is_over = True
        for task in self._restarts:
            task.cancel()
        await asyncio.gather(*self._restarts, return_exceptions=True)
        processes = [*self._processes, *([self._spare] if self._spare else [])]
        for process in processes:
            process.end()
        for process in processes:
            process.popen.kill()  # it computes nothing that any client waits for
            process.popen.wait()
        self._processes.clear()

    async def load(self, version: ModelVersion) -> Loaded:
        """Load a version into all processes, from the first on."""
        handle = next(self._numbers)
        try:
            able = [one for one in self._processes if one.is_connected]
            found = await asyncio.gather(*(self._load(one, handle, version) for one in able))
        except BaseException:
            self.unload(handle)
            raise
        if not found:
            raise LoadFailed("no model process is alive; one is being started")
        self._versions[handle] = version
        self.batcher.open(handle)
        for process in self._processes:  # one that was started meanwhile
            if process.is_connected and handle not in process.handles and handle not in process.loads:
                self._later(self._catch_up(process))
        if self._spare is None and not self._restarts:
            self._later(self._begin_spare())  # only now: it takes as much of the cores as the first one
        first = found[0]
        return handle, first.form, first.accuracy, max(one.took_s for one in found)

    def unload(self, handle: int) -> None:
        if self._versions.pop(handle, None) is not None:
            self.batcher.close(handle)
        for process in self._processes:
            process.handles.discard(handle)
            if (load := process.loads.pop(handle, None)) is not None and not load.done():
                load.set_exception(LoadFailed("it was unloaded before it was loaded"))
            process.tell(frames.UnloadVersion(handle=handle))

    async def decoded(self, handle: int, picture: bytes) -> memoryview:
        """A picture as a row of a model's input."""
        able = [process for process in self._processes if handle in process.handles]
        if not able:
            raise ModelError("no model process is ready; one is being started")
        process = min(able, key=lambda process: len(process.pictures))
        number = next(self._numbers)
        future = process.pictures[number] = asyncio.get_running_loop().create_future()
        process.tell(frames.DecodePicture(number=number, handle=handle), picture)
        found: memoryview = await future
        return found

    def pump(self) -> None:
        """Give the processes what waits, as far as they have room."""
        for process in sorted(self._processes, key=lambda process: len(process.batches)):
            while len(process.batches) < AHEAD:
                batch = self.batcher.take(process.handles)
                if batch is None:
                    break
                number = next(self._numbers)
                process.batches[number] = batch
                process.tell(
                    frames.RunBatch(
                        number=number, handle=batch.handle, rows=batch.size, row_shape=batch.row_shape
                    ),
                    *batch.contents(),
                )

    def computed(self, batch: Batch, took_s: float, outputs: memoryview) -> None:
        self.batches += 1
        self.batcher.finished(batch, took_s)
        batch.complete(outputs)

    def lost(self, process: PoolProcess, how: str) -> None:
        """A process has ended: what it had is computed again, by others or by its replacement."""
        self.crashes += 1
        if process is self._spare:
            self._spare = None  # the next one comes with the next version, or with the next death
            return
        self._processes.remove(process)
        # In their order: it computed the first, and the others lay in its socket.
        for place, batch in reversed([*enumerate(process.batches.values())]):
            self.batcher.again(batch, ModelError(f"{how} while it computed this"), was_begun=place == 0)
        for picture in process.pictures.values():
            if not picture.done():
                picture.set_exception(ModelError(f"{how} while it read this picture"))
        for load in process.loads.values():
            if not load.done():
                load.set_exception(LoadFailed(f"{how} while it loaded this"))
        if self._is_over:
            return
        lived_s = time.monotonic() - process.begun_s
        before_s = self._pauses_s[0] if self._pauses_s else 0.0
        pause_s = 0.0 if lived_s > _LONG_LIFE_S else min(_LONGEST_PAUSE_S, 2 * before_s or 0.5)
        self._pauses_s.append(pause_s)
        pause = f" in {pause_s:.1f} s" if pause_s and self._spare is None else ""
        self._say(f"{how}; another one takes its place{pause}")
        self._later(self._replace(pause_s))
        self.pump()

    def _later(self, doing: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(doing)
        self._restarts.add(task)
        task.add_done_callback(self._restarts.discard)

    async def _begin_spare(self) -> None:
        spare = self._spare = PoolProcess(self)
        await spare.connect()

    async def _replace(self, pause_s: float) -> None:
        if self._spare is not None:
            process, self._spare = self._spare, None
            self._processes.append(process)
        else:
            await asyncio.sleep(pause_s)
            process = await self._begin()
        await self._catch_up(process)
        if self._spare is None and process in self._processes:
            await self._begin_spare()

    async def _catch_up(self, process: PoolProcess) -> None:
        """Load what it lacks, the newest first; versions come and go meanwhile."""
        tried: set[int] = set()
        while missing := self._versions.keys() - process.handles - process.loads.keys() - tried:
            handle = max(missing)
            tried.add(handle)
            try:
                await self._load(process, handle, self._versions[handle])
            except LoadFailed as error:
                if process not in self._processes:
                    return  # it has died again, and its own replacement goes on
                if not any(handle in other.handles for other in self._processes):
                    self._unloadable(handle, str(error))
            self.pump()

    async def _begin(self) -> PoolProcess:
        process = PoolProcess(self)
        self._processes.append(process)
        await process.connect()
        return process

    async def _load(self, process: PoolProcess, handle: int, version: ModelVersion) -> frames.VersionLoaded:
        future = process.loads[handle] = asyncio.get_running_loop().create_future()
        sizes = sorted({1, *self.batcher.sizes, self.batcher.most_rows})
        process.tell(
            frames.LoadVersion(
                handle=handle, place=str(version.place), warm_up=tuple(sizes), allowed=self._allowed
            )
        )
        found: frames.VersionLoaded = await future
        return found
