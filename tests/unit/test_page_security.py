"""Who may ask the page: each rule of `gatekeeper.py`, with raw sockets."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from manyhands.dashboard import connection_limits, pushing
from manyhands.dashboard.gatekeeper import MOST_TRIES, OPEN_PATHS, Keys, hosts_of
from manyhands.dashboard.page_server import PageServer, PageSettings
from manyhands.errors import UsageError
from tests.page_server import Browser, hear, received, reply, say, serving, write_run

PATHS = (
    "/", "/runs", "/runs/a", "/runs/a/curve", "/runs/a/workers", "/runs/a/terminal", "/runs/a/plan", "/runs/a/weights",
    "/runs/a/graph", "/runs/a/shape", "/runs/a/taken",
    "/runs/a/try", "/runs/a/stop", "/runs/a/resume", "/choices", "/data", "/preview",
    "/static/main.js", "/sign-out", "/no-such-path",
)  # fmt: skip


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageServer]:
    directory = tmp_path_factory.mktemp("runs")
    write_run(directory / "a")
    (directory.parent / "secret").mkdir()
    (directory.parent / "secret" / "plan.json").write_text('{"model": "secret"}')
    (directory / "link").symlink_to(directory.parent / "secret")
    with serving(directory) as page:
        yield page


@pytest.fixture
def browser(page: PageServer) -> Browser:
    return Browser(page).sign_in()


def test_every_path_of_the_application_is_in_this_test(page: PageServer) -> None:
    routes = {route.path.replace("{name}", "a") for route in page.answers.application().routes}  # type: ignore[attr-defined]
    assert routes - {"/live", "/sign-in", "/static/{path:path}"} == set(PATHS) - {
        "/static/main.js",
        "/no-such-path",
    }


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
@pytest.mark.parametrize("path", PATHS)
def test_nothing_is_answered_without_the_cookie(page: PageServer, path: str, method: str) -> None:
    answer = Browser(page).ask(method, path)
    expected = (303, "/sign-in") if (path, method) == ("/", "GET") else (401, "")
    assert (answer.status, answer.header("location")) == expected
    assert Browser(page, cookie=f"manyhands_{page.port}=guessed").ask(method, path).status == answer.status


@pytest.mark.parametrize("path", [*PATHS, *sorted(OPEN_PATHS)])
@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1.evil.example", "8.8.8.8", "", None]
)
def test_a_name_that_was_pointed_here_is_refused(browser: Browser, path: str, host: str | None) -> None:
    answer = browser.ask("GET", path, Host=host and host.replace("{port}", str(browser.page.port)))
    assert answer.status in (400, 421)  # 400: HTTP wants a Host


@pytest.mark.parametrize(
    "host", ["127.0.0.1:{port}", "localhost:{port}", "LOCALHOST", "127.0.0.1", "localhost:9"]
)
def test_own_names_are_answered_through_any_forwarded_port(browser: Browser, host: str) -> None:
    assert browser.ask("GET", "/", Host=host.replace("{port}", str(browser.page.port))).status == 200


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "https://{host}", "http://127.0.0.1:1", "", None]
)
def test_another_page_cannot_change_anything(browser: Browser, origin: str | None) -> None:
    origin = origin and origin.replace("{host}", browser.host)
    for method, path in (
        ("POST", "/runs"),
        ("DELETE", "/runs/a"),
        ("POST", "/runs/a/stop"),
        ("POST", "/sign-in"),
    ):
        assert browser.ask(method, path, b"{}", Origin=origin).status == 403
    if origin:
        assert browser.ask("GET", "/runs/a", Origin=origin).status == 403


@pytest.mark.parametrize("given", ["cookie", "origin", "host", "no origin"])
def test_a_websocket_passes_the_same_door(browser: Browser, given: str) -> None:
    wrong = {
        "cookie": {"Cookie": "manyhands_1=no"},
        "origin": {"Origin": "http://evil.example"},
        "host": {"Host": "evil.example", "Origin": "http://evil.example"},
        "no origin": {"Origin": None},
    }[given]
    with browser.websocket(**wrong) as (_, head):
        assert head.startswith("HTTP/1.1 403")
    with browser.websocket() as (connection, head):
        assert head.startswith("HTTP/1.1 101")
        say(connection, '{"run": "a"}')
        assert any(hear(connection)["type"] == "whole" for _ in range(3))


def test_a_token_opens_the_page_once_and_the_cookie_is_out_of_reach(page: PageServer) -> None:
    path = page.address().partition(str(page.port))[2]
    first = Browser(page).ask("GET", path)
    flags = first.header("set-cookie").lower().split("; ")
    assert {"httponly", "samesite=strict", "path=/"} <= set(flags)
    assert "secure" not in flags, "the page is not encrypted"
    assert Browser(page).ask("GET", path).status == 401
    assert Browser(page).ask("GET", "/sign-in?token=").status == 401


def test_signing_out_ends_the_cookie(browser: Browser) -> None:
    assert browser.ask("POST", "/sign-out").status == 303
    assert browser.ask("GET", "/runs/a").status == 401


def test_a_password_cannot_be_guessed_for_long() -> None:
    keys = Keys("right")
    assert keys.sign_in(password="right") is not None
    assert [keys.sign_in(password=f"wrong{number}") for number in range(MOST_TRIES)] == [None] * MOST_TRIES
    assert keys.sign_in(password="right") is None, "too many were wrong"
    assert keys.sign_in(token=keys.new_token()) is not None, "the terminal's token still opens it"
    assert Keys().sign_in(password="") is None


NAMES = (
    "..",
    ".",
    "../secret",
    "..%2fsecret",
    "%2e%2e%2fsecret",
    "..%5csecret",
    "link",
    "a%00",
    "%ff",
    "a/../../secret",
)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rest", ["", "/plan", "/terminal", "/weights"])
def test_no_name_leads_out_of_the_folder(browser: Browser, name: str, rest: str) -> None:
    answer = browser.ask("GET", f"/runs/{name}{rest}")
    assert answer.status in (400, 404)
    assert b"secret" not in answer.body.replace(name.encode(), b"")


@pytest.mark.parametrize(
    "path", ["../app.py", "..%2fapp.py", "vendor/../../app.py", "//etc/passwd", "%2fetc%2fpasswd"]
)
def test_no_path_leads_out_of_the_static_files(browser: Browser, path: str) -> None:
    assert browser.ask("GET", f"/static/{path}").status == 404


def test_scripts_come_from_the_page_alone(browser: Browser) -> None:
    answer = browser.ask("GET", "/")
    policy = dict(part.strip().split(" ", 1) for part in answer.header("content-security-policy").split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert b"<script>" not in answer.body
    assert b"style=" not in answer.body
    for path in ("/", "/sign-in", "/runs/a", "/static/main.js", "/nothing"):
        assert browser.ask("GET", path).header("x-content-type-options") == "nosniff"


def test_files_name_no_other_host_and_make_no_markup_of_text() -> None:
    folder = Path(pushing.__file__).with_name("static")
    for path in (*folder.glob("*.js"), *folder.glob("*.html"), *folder.glob("*.css")):
        text = path.read_text()
        assert "://" not in text.replace("http://www.w3.org/", "").replace("${", "").replace(
            '"wss" : "ws"}://', ""
        ), path
        for word in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
        ):
            assert word not in text, f"{path} has {word}"


def test_markup_in_a_name_stays_text(browser: Browser, tmp_path: Path) -> None:
    """JSON has a type of its own, which no browser shows as a page."""
    answer = browser.ask("GET", "/runs/%3Cimg%20src=x%20onerror=alert(1)%3E")
    assert answer.status == 400
    assert answer.header("content-type") == "application/json"


@pytest.mark.parametrize(
    "body", [b"[]", b"{", b'"x"', b"\xff", b'{"plan": 3}', b'{"plan": {"model": 3}}', b"[" * 5000]
)
def test_a_body_that_is_no_plan_is_refused_in_words(browser: Browser, body: bytes) -> None:
    answer = browser.ask("POST", "/runs", body)
    assert answer.status == 400
    assert answer.json()["error"]


def test_code_of_others_is_not_run(browser: Browser) -> None:
    for plan in (
        {"model": "os:abort"},
        {"data": "os:abort"},
        {"model": "evil.module:build", "data": "digits"},
    ):
        answer = browser.ask("POST", "/runs", json.dumps({"plan": plan}).encode())
        assert "start it with --allow-code" in answer.json()["error"]
    assert "unknown model" in browser.ask("POST", "/runs", b'{"plan": {"model": "vgg99"}}').json()["error"]


@pytest.mark.parametrize("number", ["inf", "-inf", "nan", "1e400", "", "x", "<b>"])
def test_a_number_that_is_none_is_refused_in_words(browser: Browser, number: str) -> None:
    for path in (
        f"curve?name=step:loss&first=0&last=1&most={number}",
        f"workers?what=wait&first={number}",
        f"taken?truth={number}",
    ):
        answer = browser.ask("GET", f"/runs/a/{path}")
        assert answer.status == 400
        assert "is no whole number" in answer.json()["error"]


def test_long_requests_are_refused(browser: Browser) -> None:
    assert browser.ask("POST", "/runs", b"", Content_Length=str(1 << 30)).status == 413
    assert browser.ask("POST", "/runs", b"", Content_Length=None, Transfer_Encoding="chunked").status == 413
    assert browser.ask("GET", "/" + "a" * 100_000).status in (400, 404)


def test_silent_connections_do_not_keep_a_person_out(page: PageServer, browser: Browser) -> None:
    with ExitStack() as opened:
        silent = [opened.enter_context(browser.connect()) for _ in range(600)]
        for connection in silent[::7]:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: ")  # begun, and never ended
        assert browser.ask("GET", "/runs/a").status == 200
        closed = sum(is_closed(connection) for connection in silent)
        assert closed >= len(silent) - connection_limits.MOST_SILENT - 1


def is_closed(connection: socket.socket) -> bool:
    connection.settimeout(0.01)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


def test_a_silent_connection_is_closed(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limits, "SILENT_S", 0.2)
    with browser.connect() as connection:
        assert received(connection) == b""


def test_a_reader_that_reads_nothing_is_cut_off(
    tmp_path: Path, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It costs the server one message, and no one else anything."""
    monkeypatch.setattr(pushing, "SLOW_S", 0.5)
    monkeypatch.setattr(pushing.Pushing, "_send_list", _endless)
    with browser.websocket() as (connection, head):
        assert " 101 " in head
        say(connection, '{"run": null}')
        began_s = time.monotonic()
        time.sleep(0.2)
        assert browser.ask("GET", "/runs/a").status == 200
        assert not still_open(connection, began_s + 8)


async def _endless(self: pushing.Pushing, socket: object, wish: object) -> None:
    while True:
        await pushing._send_soon(socket, b"x" * (1 << 20))  # type: ignore[arg-type]


def still_open(connection: socket.socket, until_s: float) -> bool:
    """Reads only when the server has given up: what is in the buffers ends, and then the connection."""
    time.sleep(1.5)
    connection.settimeout(2)
    try:
        while time.monotonic() < until_s:
            if not connection.recv(1 << 20):
                return False
    except TimeoutError:
        return True
    except OSError:
        return False
    return True


def test_names_of_the_machine_are_known_only_where_the_network_can_ask() -> None:
    assert hosts_of("127.0.0.1") == {"localhost", "127.0.0.1"}
    assert "*" in hosts_of("0.0.0.0")


def test_open_to_the_network_a_password_signs_in_and_rebinding_is_still_refused(tmp_path: Path) -> None:
    with serving(tmp_path, host="0.0.0.0", password="a secret") as page:
        browser = Browser(page)
        assert b'name="password"' in browser.ask("GET", "/sign-in").body
        assert browser.ask("POST", "/sign-in", b"password=wrong").status == 401
        answer = browser.ask("POST", "/sign-in", b"password=a+secret")
        assert answer.status == 303
        browser.cookie = answer.header("set-cookie").partition(";")[0]
        assert browser.ask("GET", "/").status == 200
        assert browser.ask("GET", "/", Host="evil.example").status == 421


def test_two_requests_in_one_are_two(browser: Browser) -> None:
    """No smuggling: a body that was not announced is the next request, and that needs a cookie, too."""
    with browser.connect() as connection:
        head = f"Host: {browser.host}\r\n"
        connection.sendall(
            f"GET /sign-in HTTP/1.1\r\n{head}\r\nGET /runs/a HTTP/1.1\r\n{head}Connection: close\r\n\r\n".encode()
        )
        assert b'"head"' not in received(connection)
    assert reply(b"").status == 0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"port": 99999}, "--port 99999: a port is a number from 0 to 65535"),
        ({"host": "192.0.2.1"}, "cannot open the page at 192.0.2.1, port"),
        ({"tls": (Path("no.pem"), Path("no.key"))}, "--tls no.pem no.key: No such file"),
        ({"directory": Path("nowhere")}, "there is no folder nowhere"),
    ],
)
def test_a_page_that_cannot_open_says_why(tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        PageServer(PageSettings(**{"directory": tmp_path, "port": 0} | settings))
