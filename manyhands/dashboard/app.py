"""What the page answers: one function for each question, behind the guard."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import msgspec
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from manyhands.dashboard.answers import run_picture, zoomed
from manyhands.dashboard.assets import Assets
from manyhands.dashboard.choices import choices, plan_of, preview
from manyhands.dashboard.gatekeeper import SESSION_S, Keys
from manyhands.dashboard.graph_of import graph_of
from manyhands.dashboard.own_runs import OwnRuns
from manyhands.dashboard.pushing import Pushing
from manyhands.dashboard.run_list import RunList, read_json, terminal
from manyhands.dashboard.torch_helper import TorchHelper
from manyhands.errors import ManyhandsError, UsageError

BODY_S = 10.0
MOST_COLUMNS = 4000

Answer = Callable[[Request], Awaitable[Response]]


class PageAnswers:
    """The state behind the page and its questions."""

    def __init__(self, runs: RunList, keys: Keys, *, cookie: str, is_tls: bool, allow_code: bool) -> None:
        self._runs = runs
        self._keys = keys
        self._cookie = cookie
        self._is_tls = is_tls
        self._allow_code = allow_code
        self._assets = Assets()
        self.own = OwnRuns(runs)
        self._helper = TorchHelper(allow_code=allow_code)
        self._catalogue: dict[str, Any] | None = None
        self._live: Pushing | None = None
        self.on_sign_in: Callable[[], None] = lambda: None

    def application(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/", self._assets.page),
                Route("/static/{path:path}", self._assets.asset),
                Route("/sign-in", self._sign_in, methods=["GET", "POST"]),
                Route("/sign-out", self._sign_out, methods=["POST"]),
                WebSocketRoute("/live", self._serve_live),
                Route("/runs", _told(self._start), methods=["POST"]),
                Route("/runs/{name}", _told(self._run), methods=["GET"]),
                Route("/runs/{name}", _told(self._delete), methods=["DELETE"]),
                Route("/runs/{name}/curve", _told(self._curve)),
                Route("/runs/{name}/workers", _told(self._workers)),
                Route("/runs/{name}/terminal", _told(self._terminal)),
                Route("/runs/{name}/plan", _told(self._plan)),
                Route("/runs/{name}/weights", _told(self._weights)),
                Route("/runs/{name}/graph", _told(self._graph)),
                Route("/runs/{name}/shape", _told(self._shape)),
                Route("/runs/{name}/taken", _told(self._taken)),
                Route("/runs/{name}/try", _told(self._try), methods=["POST"]),
                Route("/runs/{name}/stop", _told(self._stop), methods=["POST"]),
                Route("/runs/{name}/resume", _told(self._resume), methods=["POST"]),
                Route("/choices", _told(self._choices)),
                Route("/data", _told(self._data)),
                Route("/preview", _told(self._preview), methods=["POST"]),
            ],
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        # One thread looks at files for all who ask: more would only take turns.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1, "files"))
        await asyncio.to_thread(self.own.rows)
        self._live = Pushing(self._runs, self.own)
        try:
            yield
        finally:
            await self._live.close()
            await self._helper.close()

    async def _sign_in(self, request: Request) -> Response:
        """By the token of an address, or by the password."""
        if request.method == "POST":
            async with asyncio.timeout(BODY_S):
                fields = parse_qs((await request.body()).decode(errors="replace"))
            cookie = self._keys.sign_in(password=fields.get("password", [""])[0])
        elif "token" in request.query_params:
            cookie = self._keys.sign_in(token=request.query_params["token"])
        else:
            return self._assets.sign_in(has_password=self._keys.has_password)
        if cookie is None:
            return self._assets.sign_in(has_password=self._keys.has_password, is_refused=True)
        answer = RedirectResponse("/", 303)
        answer.set_cookie(
            self._cookie, cookie, max_age=SESSION_S, httponly=True, samesite="strict", secure=self._is_tls
        )
        self.on_sign_in()
        return answer

    async def _sign_out(self, request: Request) -> Response:
        self._keys.forget(request.state.cookie)
        answer = RedirectResponse("/sign-in", 303)
        answer.delete_cookie(self._cookie, httponly=True, samesite="strict", secure=self._is_tls)
        return answer

    async def _serve_live(self, socket: WebSocket) -> None:
        assert self._live is not None
        await self._live.serve(socket)

    async def _run(self, request: Request) -> Response:
        """All that is known of one run, as the WebSocket would give it first."""
        followed = await self._followed(request)
        _, message = await asyncio.to_thread(followed.message, 0)
        return Response(message, media_type="application/json")

    async def _curve(self, request: Request) -> Response:
        followed, asked = await self._followed(request), request.query_params
        most = min(max(_whole(asked.get("most")), 16), MOST_COLUMNS)
        first, last = _number(asked.get("first")), _number(asked.get("last"))
        return _json(await asyncio.to_thread(zoomed, followed, asked.get("name", ""), first, last, most))

    async def _workers(self, request: Request) -> Response:
        """A shade for each worker and column of time, as bytes; the shape is in the headers."""
        followed, asked = await self._followed(request), request.query_params
        shades, shape = run_picture(followed, asked.get("what", ""), _whole(asked.get("first", "0")))
        return Response(shades, media_type="application/octet-stream", headers=shape)

    async def _terminal(self, request: Request) -> Response:
        return PlainTextResponse(terminal(self._place(request)))

    async def _plan(self, request: Request) -> Response:
        place = self._place(request)
        plan = read_json(place / "plan.json")
        if plan is None:
            raise UsageError("this run has no plan: it is a script's, or it did not begin")
        return _download(msgspec.json.format(msgspec.json.encode(plan)), f"{_plain(place.name)}.json")

    async def _weights(self, request: Request) -> Response:
        place = self._place(request)
        folder = tempfile.TemporaryDirectory(prefix="manyhands-weights-")
        path = Path(folder.name) / "model.safetensors"
        try:
            await self._helper.ask("weights", run=str(place), to=str(path))
        except BaseException:
            folder.cleanup()
            raise
        return FileResponse(
            path, filename=f"{_plain(place.name)}.safetensors", background=BackgroundTask(folder.cleanup)
        )

    async def _graph(self, request: Request) -> Response:
        return _json(await graph_of(self._place(request), allow_code=self._allow_code))

    async def _shape(self, request: Request) -> Response:
        return _json(await self._helper.ask("shape", run=str(self._place(request))))

    async def _taken(self, request: Request) -> Response:
        """Pictures in a cell of the confusion matrix."""
        truth, taken = (_whole(request.query_params.get(name)) for name in ("truth", "taken"))
        return _json(await self._helper.ask("taken", run=str(self._place(request)), truth=truth, taken=taken))

    async def _try(self, request: Request) -> Response:
        asked = await _body(request)
        drawing, numbers = asked.get("drawing"), asked.get("numbers")
        return _json(
            await self._helper.ask("predict", run=str(self._place(request)), drawing=drawing, numbers=numbers)
        )

    async def _start(self, request: Request) -> Response:
        asked = await _body(request)
        plan = plan_of(asked.get("plan") or {}, allow_code=self._allow_code)
        name = self.own.start(plan, str(asked.get("name") or ""), fetch=asked.get("fetch") is True)
        return _json({"name": name})

    async def _stop(self, request: Request) -> Response:
        self.own.stop(self._place(request).name)
        return _json({})

    async def _resume(self, request: Request) -> Response:
        epochs = (await _body(request)).get("epochs")
        self.own.resume(self._place(request).name, epochs if isinstance(epochs, int) else None)
        return _json({})

    async def _delete(self, request: Request) -> Response:
        place = self._place(request)
        if (await _body(request)).get("confirm") != place.name:
            raise UsageError(f"say which run to delete: confirm must be {place.name!r}")
        assert self._live is not None
        self._live.follower.forget(await asyncio.to_thread(self.own.delete, place.name))
        return _json({})

    async def _choices(self, request: Request) -> Response:
        if self._catalogue is None:
            self._catalogue = choices() | await self._helper.ask("catalogue")
        return _json(
            self._catalogue | {"allow_code": self._allow_code, "directory": str(self._runs.directory)}
        )

    async def _data(self, request: Request) -> Response:
        return _json(await self._helper.ask("data", data=request.query_params.get("name", "")))

    async def _preview(self, request: Request) -> Response:
        """What the plan would do, or why it cannot."""
        asked = await _body(request)
        plan = plan_of(asked.get("plan") or {}, allow_code=self._allow_code)
        samples = asked.get("samples")
        return _json(preview(plan, samples if isinstance(samples, int) else None))

    def _place(self, request: Request) -> Path:
        place = self._runs.place(request.path_params["name"])
        if place is None:
            raise UsageError("there is no such run; it may have been deleted")
        return place

    async def _followed(self, request: Request) -> Any:
        """The run, once there is something of it."""
        assert self._live is not None
        followed = self._live.follower.follow(self._place(request))
        for _ in range(100):
            if followed.version:
                break
            await asyncio.sleep(0.02)
        return followed


def _told(answer: Answer) -> Answer:
    """Errors that a person can meet, as the command line says them."""

    async def answering(request: Request) -> Response:
        try:
            return await answer(request)
        except ManyhandsError as error:
            return _json({"error": str(error)}, 400)
        except TimeoutError:
            return _json({"error": "it took too long; try again"}, 504)
        except OSError as error:
            return _json({"error": f"{error.filename or 'a file'}: {error.strerror}"}, 500)

    return answering


async def _body(request: Request) -> dict[str, Any]:
    try:
        async with asyncio.timeout(BODY_S):
            found = msgspec.json.decode(await request.body() or b"{}")
    except (msgspec.MsgspecError, RecursionError) as error:
        raise UsageError(f"the request is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise UsageError("the request is no JSON object")
    return found


def _json(answer: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(answer), status, media_type="application/json")


def _download(content: bytes, name: str) -> Response:
    return Response(
        content,
        media_type="application/octet-stream",
        headers={"Content-Disposition": f'attachment; filename="{name}"'},
    )


def _plain(name: str) -> str:
    """A name for a file that a browser saves, and nothing that could end a header."""
    return "".join(
        letter if letter.isascii() and (letter.isalnum() or letter in "._-") else "-" for letter in name
    )


def _whole(text: str | None) -> int:
    found = _number(text or "nan", "whole number")
    if not abs(found) < 1 << 53:
        raise UsageError(f"{str(text)[:50]!r} is no whole number")
    return int(found)


def _number(text: str | None, what: str = "number") -> float:
    try:
        found = float(text or "nan")
    except ValueError:
        found = float("nan")
    if found != found:
        raise UsageError(f"{str(text)[:50]!r} is no {what}")
    return found
