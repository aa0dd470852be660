"""A page to try the models: three files of ours, nothing from another host, no script inside of the page."""

from functools import cache
from pathlib import Path

from manyhands.serving.http_connection import HttpReply

_FOLDER = Path(__file__).parent / "page"
_FILES = {
    (): ("try.html", "text/html; charset=utf-8"),
    ("assets", "try.js"): ("try.js", "text/javascript; charset=utf-8"),
    ("assets", "try.css"): ("try.css", "text/css; charset=utf-8"),
}
_HEADERS = (
    (
        "Content-Security-Policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' blob: data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cache-Control", "no-cache"),
)


def has(path: tuple[str, ...]) -> bool:
    return path in _FILES


def reply(path: tuple[str, ...]) -> HttpReply:
    name, content_type = _FILES[path]
    return HttpReply(parts=[_content(name)], content_type=content_type, headers=_HEADERS)


@cache
def _content(name: str) -> bytes:
    return (_FOLDER / name).read_bytes()
