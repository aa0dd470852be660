"""The files of the page, all in memory: there is no path to lead out of a folder."""

import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

FOLDER = Path(__file__).with_name("static")
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
_REFUSED = '<p class="refused" role="alert">That did not open the page. An address opens it once: take a new one.</p>'
_FORM = (
    '<form method="post" action="/sign-in"><label>Password <input type="password" name="password" required '
    'autofocus autocomplete="current-password"></label><button>Sign in</button></form>'
)


class Assets:
    """What browsers load, with the type and a tag by which they know whether it has changed."""

    def __init__(self) -> None:
        self._files = {
            str(path.relative_to(FOLDER)): path.read_bytes()
            for path in sorted(FOLDER.rglob("*"))
            if path.suffix in TYPES
        }

    async def page(self, request: Request) -> Response:
        return Response(self._files["index.html"], media_type=TYPES[".html"])

    async def asset(self, request: Request) -> Response:
        path = request.path_params["path"]
        content = self._files.get(path)
        if content is None:
            return PlainTextResponse("there is no such file", 404)
        tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
        headers = {"ETag": tag, "Cache-Control": "no-cache"}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=TYPES[Path(path).suffix], headers=headers)

    def sign_in(self, *, has_password: bool, is_refused: bool = False) -> Response:
        text = self._files["sign-in.html"].decode()
        text = text.replace("<!--refused-->", _REFUSED if is_refused else "")
        text = text.replace("<!--form-->", _FORM if has_password else "")
        status = 401 if is_refused else 200
        return Response(text, status, media_type=TYPES[".html"], headers={"Connection": "close"})
