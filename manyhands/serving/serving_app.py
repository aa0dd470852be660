"""Which request goes where, and what every kind of error is in HTTP."""

import asyncio
import math
import traceback
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from manyhands import __version__
from manyhands.errors import ManyhandsError, UsageError
from manyhands.serving import inference_protocol, picture_upload, serving_metrics, tensorflow_rest, try_page
from manyhands.serving.access_rules import AccessRules, Needed
from manyhands.serving.batcher import Answer, DeadlinePassed, QueueFull
from manyhands.serving.core import NoSuchModel, NotReady, ServingCore
from manyhands.serving.http_connection import Abandon, HttpLimits, HttpReply, HttpRequest
from manyhands.serving.model_pool import InvalidInput, ModelPool
from manyhands.serving.servable import Servable
from manyhands.serving.server_status import gauges, status
from manyhands.serving.tensor_input import InputRows, outputs_of
from manyhands.serving.version_folder import is_version

Reply = Callable[[HttpReply], None]

_STATUS: tuple[tuple[type[ManyhandsError], int], ...] = (
    (InvalidInput, 400),
    (UsageError, 400),
    (NoSuchModel, 404),
    (NotReady, 503),
    (QueueFull, 429),
    (DeadlinePassed, 504),
)


class LabelChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    labels: dict[str, int | str] = {}
    traffic: dict[str, float] = {}


class ServingApp:
    """Everything that a client can ask."""

    def __init__(
        self, core: ServingCore, pool: ModelPool, rules: AccessRules, limits: HttpLimits, timeout_s: float
    ) -> None:
        self.limits = limits
        self._core, self._pool, self._rules = core, pool, rules
        self._timeout_s = timeout_s
        self._tasks: set[asyncio.Task[None]] = set()

    def refusal(self, request: HttpRequest) -> HttpReply | None:
        """What needs no body to be refused."""
        denied = self._rules.refusal(needed(request), request.headers)
        if denied is not None:
            more = (("WWW-Authenticate", "Bearer"),) if denied[0] == 401 else ()
            return self._counted(HttpReply.error(*denied, more))
        allowed = methods(request.path)
        if request.method not in allowed:
            if not allowed:
                return self._counted(HttpReply.error(404, "there is nothing here; GET / has a page to try"))
            return self._counted(
                HttpReply.error(405, f"use {' or '.join(allowed)}", (("Allow", ", ".join(allowed)),))
            )
        return None

    def handle(self, request: HttpRequest, reply: Reply) -> Abandon | None:
        def counted(found: HttpReply) -> None:
            reply(self._counted(found))

        try:
            found = self._handle(request, counted)
        except ManyhandsError as error:
            found = refused(error)
        if isinstance(found, HttpReply):
            counted(found)
            return None
        return found

    def _counted(self, reply: HttpReply) -> HttpReply:
        self._core.metrics.responses[reply.status] += 1
        return reply

    def _handle(self, request: HttpRequest, reply: Reply) -> HttpReply | Abandon:
        """The answer, or how to abandon what `reply` will be called for."""
        path = request.path
        if path[:2] == ("v2", "models") and len(path) > 2:
            return self._v2_model(request, reply)
        if path[:2] == ("v1", "models"):
            return self._v1_model(request, reply)
        if path == ("predict",):
            return self._predict(request, reply)
        if path[:2] == ("admin", "models"):
            return self._change_labels(path[2], request)
        return self._plain(path)

    def _plain(self, path: tuple[str, ...]) -> HttpReply:
        """What is answered at once, without a model."""
        if path == ("v2",):
            return HttpReply.json(inference_protocol.server_metadata(__version__))
        if path == ("v2", "health", "live"):
            return HttpReply()
        if path == ("v2", "health", "ready"):
            return HttpReply(status=200 if self._core.is_ready() and self._pool.living else 503)
        if path == ("v2", "repository", "index"):
            return HttpReply.json(_index(self._core))
        if path == ("metrics",):
            text = self._core.metrics.text(gauges(self._core, self._pool))
            return HttpReply(parts=[text.encode()], content_type=serving_metrics.CONTENT_TYPE)
        if path == ("status",):
            return HttpReply.json(status(self._core, self._pool))
        return try_page.reply(path)

    def _v2_model(self, request: HttpRequest, reply: Reply) -> HttpReply | Abandon:
        model, version, label, (what, *_) = _named(request.path[2:], default="")
        if what == "ready":
            self._core.entry(model)
            try:
                self._core.choose(model, version, label, divide=False)
            except (NotReady, NoSuchModel):
                return HttpReply(status=503)
            return HttpReply()
        servable = self._core.choose(model, version, label, divide=what == "infer")
        if what == "":
            return HttpReply.json(inference_protocol.model_metadata(model, self._core.ready(model), servable))
        header = request.headers.get(inference_protocol.HEADER_LENGTH.lower())
        call, rows = inference_protocol.parsed(servable.form, request.body, header)
        return self._ask(
            servable,
            rows,
            reply,
            lambda outputs: inference_protocol.reply(servable, call, outputs),
            call.timeout_s,
        )

    def _v1_model(self, request: HttpRequest, reply: Reply) -> HttpReply | Abandon:
        *path, last = request.path[2:]
        name, _, verb = last.partition(":")
        model, version, label, (what, *_) = _named((*path, name), default="")
        if verb == "predict":
            servable = self._core.choose(model, version, label)
            call, rows = tensorflow_rest.parsed(servable.form, request.body)
            return self._ask(servable, rows, reply, lambda found: tensorflow_rest.reply(call, found))
        if what == "metadata":
            servable = self._core.choose(model, version, label, divide=False)
            number = servable.version.version
            return HttpReply.json(tensorflow_rest.metadata(model, number, servable.form))
        self._core.entry(model)
        known = self._core.manager.states(model)
        if version is not None:
            known = [pair for pair in known if pair[0].version == version]
            if not known:
                raise NoSuchModel(f"version {version} of {model} is not known")
        return HttpReply.json(tensorflow_rest.status(known))

    def _predict(self, request: HttpRequest, reply: Reply) -> HttpReply | Abandon:
        """A picture: read where a broken one can do no harm, then queued like any other input."""
        model = self._default_model(request.asked("model"))
        if denied := self._rules.refusal(Needed(model=model), request.headers):
            return HttpReply.error(*denied)  # the head did not say which model it is
        version = request.asked("version")
        if version is not None and not (version.isascii() and version.isdigit() and len(version) < 16):
            raise InvalidInput(f"version={version[:20]!r}: a number is expected")
        servable = self._core.choose(model, int(version) if version else None, request.asked("label"))
        picture_upload.refuse_pictureless(servable)
        top = picture_upload.top_of(request.asked("top"))
        picture = picture_upload.file_in(request.body, request.headers.get("content-type", ""))
        abandon: list[Abandon] = []
        servable.in_flight += 1  # so that it stays until the picture is read

        async def read() -> None:
            try:
                content = await asyncio.wait_for(
                    self._pool.decoded(servable.handle, picture), self._timeout_s
                )
                rows = InputRows(count=1, shape=servable.form.row_shape, content=content)
                abandon.append(
                    self._ask(servable, rows, reply, lambda found: picture_upload.reply(servable, found, top))
                )
            except TimeoutError:
                reply(refused(DeadlinePassed("the time for this request passed before its picture was read")))
            except ManyhandsError as error:
                reply(refused(error))
            finally:
                servable.in_flight -= 1

        task = asyncio.get_running_loop().create_task(read())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

        def gone() -> None:
            for stop in abandon:
                stop()
            task.cancel()

        return gone

    def _ask(
        self,
        servable: Servable,
        rows: InputRows,
        reply: Reply,
        written: Callable[["np.ndarray[Any, Any]"], HttpReply],
        timeout_s: float | None = None,
    ) -> Abandon:
        def answer(found: Answer) -> None:
            if isinstance(found, ManyhandsError):
                reply(refused(found))
                return
            try:
                reply(written(outputs_of(servable.form, rows, found)))
            except ManyhandsError as error:
                reply(refused(error))
            except Exception:
                traceback.print_exc()  # here speaks a model process, whose connection it would end
                reply(HttpReply.error(500, "this server has failed at this answer; its log says how"))

        timeout_s = min(timeout_s or self._timeout_s, self._timeout_s)
        work = self._core.ask(servable, rows.count, rows.shape, rows.content, timeout_s, answer)
        return lambda: self._core.abandon(servable, work)

    def _change_labels(self, model: str, request: HttpRequest) -> HttpReply:
        try:
            change = msgspec.json.decode(request.body, type=LabelChange)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InvalidInput(f"this is no change of labels ({error})") from None
        self._core.set_labels(model, change.labels, change.traffic)
        return HttpReply.json({"labels": change.labels, "traffic": change.traffic})

    def _default_model(self, asked: str | None) -> str:
        if asked is not None:
            return asked
        if len(self._core.models) > 1:
            raise InvalidInput(f"which model? add ?model= and one of {', '.join(self._core.models)}")
        return next(iter(self._core.models))


def needed(request: HttpRequest) -> Needed:
    """What a request needs to be allowed; whatever is not listed here needs most."""
    path = request.path
    if path in ((), ("v2", "health", "live"), ("v2", "health", "ready")) or path[:1] == ("assets",):
        return Needed(role="none")
    if path[:2] in (("v1", "models"), ("v2", "models")) and len(path) > 2:
        return Needed(role="infer", model=path[2].partition(":")[0])
    if path == ("predict",):
        return Needed(role="infer", model=request.asked("model"))
    if path in (("v2",), ("v2", "repository", "index"), ("status",), ("v2", "models")):
        return Needed(role="infer")
    return Needed(role="admin")


def methods(path: tuple[str, ...]) -> tuple[str, ...]:
    """How a path may be asked; nothing where there is none."""
    read = ("GET", "HEAD")
    if path in ((), ("v2",), ("metrics",), ("status",), ("v2", "health", "live"), ("v2", "health", "ready")):
        return read
    if path in (("predict",), ("v2", "repository", "index")):
        return ("POST",)
    if path[:1] == ("assets",):
        return read if try_page.has(path) else ()
    if path[:2] == ("admin", "models"):
        return ("PUT",) if len(path) == 4 and path[3] == "labels" else ()
    if path[:2] == ("v2", "models") and len(path) > 2:
        rest = _rest(path[3:])
        return read if rest in ((), ("ready",)) else ("POST",) if rest == ("infer",) else ()
    if path[:2] == ("v1", "models") and len(path) > 2:
        *before, last = path[2:]
        name, colon, verb = last.partition(":")
        rest = _rest((*before, name)[1:])
        if colon:
            return ("POST",) if verb == "predict" and rest == () else ()
        return read if rest in ((), ("metadata",)) else ()
    return ()


def _rest(path: tuple[str, ...]) -> tuple[str, ...]:
    """Behind the version or the label, if one is named."""
    named = len(path) >= 2 and (path[0] == "labels" or (path[0] == "versions" and is_version(path[1])))
    return path[2:] if named else path


def _named(path: tuple[str, ...], default: str) -> tuple[str, int | None, str | None, tuple[str, ...]]:
    """Model, version, label, and what is asked of it."""
    model, *rest = path
    version = label = None
    if len(rest) >= 2 and rest[0] == "versions":
        version, rest = int(rest[1]), rest[2:]
    elif len(rest) >= 2 and rest[0] == "labels":
        label, rest = rest[1], rest[2:]
    return model, version, label, tuple(rest) or (default,)


def refused(error: ManyhandsError) -> HttpReply:
    """An error as an answer."""
    status_code = next((code for kind, code in _STATUS if isinstance(error, kind)), 500)
    more: tuple[tuple[str, str], ...] = ()
    if isinstance(error, QueueFull):
        more = (("Retry-After", str(max(1, math.ceil(error.retry_after_s)))),)
    elif isinstance(error, NotReady):
        more = (("Retry-After", "1"),)
    return HttpReply.error(status_code, str(error), more)


def _index(core: ServingCore) -> list[dict[str, str]]:
    """Triton's list of what its repository has."""
    return [
        {
            "name": name,
            "version": str(version.version),
            "state": "READY" if state.phase == "ready" else "UNAVAILABLE",
            "reason": state.reason,
        }
        for name in core.models
        for version, state in core.manager.states(name)
    ]
