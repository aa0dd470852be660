"""The page's side of the helper with torch: started when it is first needed, ended when it has been idle."""

import asyncio
import sys
from contextlib import suppress
from typing import Any

import msgspec

from manyhands.errors import ManyhandsError

ANSWER_S = 120.0
IDLE_S = 300.0
LONGEST_ANSWER = 64 << 20


class TorchHelper:
    """One process, one request at a time. `allow_code`: whether models and data of the person's own may be imported."""

    def __init__(self, *, allow_code: bool) -> None:
        self._allow_code = allow_code
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._idle: asyncio.TimerHandle | None = None
        self._ending: asyncio.Task[None] | None = None

    async def ask(self, what: str, **fields: Any) -> dict[str, Any]:
        """The answer; an error of the helper is raised here."""
        async with self._turn:
            if self._idle is not None:
                self._idle.cancel()
            try:
                async with asyncio.timeout(ANSWER_S):
                    answer = await self._exchange({"what": what, "allow_code": self._allow_code, **fields})
            except BaseException:
                await self._end()  # its answer would be taken for that of the next request
                raise
            self._idle = asyncio.get_running_loop().call_later(IDLE_S, self._end_later)
        if "error" in answer:
            raise ManyhandsError(str(answer["error"]))
        return answer

    async def close(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
        await self._end()

    async def _exchange(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._process is None or self._process.returncode is not None:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # without the folder in which the page was started, unless code of the person's own may run
                "-m",
                "manyhands.dashboard.torch_child",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                limit=LONGEST_ANSWER,
                start_new_session=True,
            )
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            stdin.write(msgspec.json.encode(request) + b"\n")
            await stdin.drain()
            line = await stdout.readline()
        except (OSError, ValueError):
            line = b""
        if not line:
            raise ManyhandsError("the process that was asked has ended without an answer; try again")
        answer: dict[str, Any] = msgspec.json.decode(line)
        return answer

    def _end_later(self) -> None:
        self._ending = asyncio.get_running_loop().create_task(self._end())

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
        await process.communicate()
