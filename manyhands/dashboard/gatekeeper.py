"""Who may ask: the one place through which every request and every WebSocket of the page goes.

A page that starts training runs code, so a website or a user who gets through to it owns the machine. In this order:

1. The `Host` must be an address, or a name of this machine. A name that an attacker has pointed at 127.0.0.1 (DNS
   rebinding) is neither.
2. The `Origin`, which browsers add, must be this page. Whatever changes something, and a WebSocket, must have one.
3. A cookie proves that this browser has signed in. It is given once for each token, and no script can read it.

Nothing but the sign-in itself is answered without all three.
"""

import hmac
import ipaddress
import secrets
import socket
import time
from collections import deque
from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketClose

OPEN_PATHS = frozenset({"/sign-in", "/static/sign-in.css", "/static/icon.svg"})
"""What a browser that has not signed in may have: each path in full."""
SAFE = frozenset({"GET", "HEAD"})
MOST_TRIES = 10
TRIES_S = 60.0
LONGEST_BODY = 1 << 20
SESSION_S = 7 * 86_400

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
        "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    "Cache-Control": "no-store",
}


class Keys:
    """The tokens that have not been used, the cookies that were given, and the password if there is one."""

    def __init__(self, password: str | None = None) -> None:
        self._password = password
        self._tokens: set[str] = set()
        self._cookies: dict[str, float] = {}
        self._failed: deque[float] = deque()

    @property
    def has_password(self) -> bool:
        return self._password is not None

    def new_token(self) -> str:
        """What an address carries; it opens the page once."""
        token = secrets.token_urlsafe(24)
        self._tokens.add(token)
        return token

    def sign_in(self, *, token: str = "", password: str = "") -> str | None:
        """A cookie for a token or for the password; None where it is wrong, or after too many wrong ones."""
        now = time.monotonic()
        while self._failed and now - self._failed[0] > TRIES_S:
            self._failed.popleft()
        found = next((one for one in self._tokens if hmac.compare_digest(one.encode(), token.encode())), None)
        if found is not None:
            self._tokens.discard(found)
        elif len(self._failed) >= MOST_TRIES or not self._is_password(password):
            self._failed.append(now)
            if len(self._failed) > MOST_TRIES:
                self._failed.popleft()
            return None
        cookie = secrets.token_urlsafe(32)
        self._cookies[cookie] = now + SESSION_S
        return cookie

    def knows(self, cookie: str) -> bool:
        until = self._cookies.get(cookie)
        return until is not None and time.monotonic() < until

    def forget(self, cookie: str) -> None:
        """At a sign-out."""
        self._cookies.pop(cookie, None)

    def _is_password(self, given: str) -> bool:
        return self._password is not None and hmac.compare_digest(self._password.encode(), given.encode())


class Gatekeeper:
    """Wraps the whole application. `hosts` are names by which the page may be asked for, besides addresses."""

    def __init__(self, app: ASGIApp, *, keys: Keys, hosts: Iterable[str], cookie: str, is_tls: bool) -> None:
        self._app = app
        self._keys = keys
        self._hosts = frozenset(name.lower() for name in hosts)
        self._cookie = cookie
        self._scheme = "https" if is_tls else "http"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        refusal = self._refusal(scope, headers)
        cookie = cookie_of(headers, self._cookie)
        if scope["type"] == "http":
            # One that has not signed in keeps no connection: those that are kept are counted, and few.
            send = _with_headers(send, {} if self._keys.knows(cookie) else {"Connection": "close"})
        if refusal is None:
            scope["state"]["cookie"] = cookie
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await WebSocketClose(code=1008, reason="refused")(scope, receive, send)
        else:
            await refusal(scope, receive, send)

    def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        """What is said to one that may not; None to one that may."""
        host = headers.getlist("host")
        if len(host) != 1 or not self._is_ours(host[0]):
            return PlainTextResponse("this page does not answer to that Host", 421)
        origin = headers.getlist("origin")
        changes = scope["type"] == "websocket" or scope["method"] not in SAFE
        if (changes or origin) and origin != [f"{self._scheme}://{host[0]}"]:
            return PlainTextResponse("the request comes from another page", 403)
        if _body_bytes(headers) > LONGEST_BODY:
            return PlainTextResponse("the request is too long", 413)
        if scope["path"] in OPEN_PATHS or self._keys.knows(cookie_of(headers, self._cookie)):
            return None
        if scope["type"] == "http" and scope["path"] == "/" and scope["method"] in SAFE:
            return Response(status_code=303, headers={"Location": "/sign-in", "Connection": "close"})
        return PlainTextResponse(
            "sign in first: open the address that `manyhands dash` has printed", 401, {"Connection": "close"}
        )

    def _is_ours(self, host: str) -> bool:
        name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
        if name.lower() in self._hosts:
            return True
        try:
            address = ipaddress.ip_address(name.strip("[]"))
        except ValueError:
            return False
        return "*" in self._hosts or address.is_loopback


def hosts_of(bound: str) -> set[str]:
    """Names that a browser may use: on the loopback address its own, else those of this machine and any address."""
    names = {"localhost", bound}
    try:
        if ipaddress.ip_address(bound).is_loopback:
            return names
    except ValueError:
        if bound == "localhost":
            return names
    return names | {"*", socket.gethostname(), socket.getfqdn()}


def cookie_of(headers: Headers, name: str) -> str:
    """The value of our cookie, or nothing."""
    # Not SimpleCookie, which finds none where another program on this host has set one that it cannot read.
    return cookie_parser(headers.get("cookie", "")).get(name, "")


def _body_bytes(headers: Headers) -> int:
    """What is sent piece by piece has no length, and no request of ours is sent so."""
    if "transfer-encoding" in headers:
        return LONGEST_BODY + 1
    length = headers.get("content-length", "0")
    return int(length) if length.isdigit() and len(length) < 16 else LONGEST_BODY + 1


def _with_headers(send: Send, more: dict[str, str]) -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in (HEADERS | more).items():
                headers.setdefault(name, value)
        await send(message)

    return sending
