"""The server's port, through raw sockets: what clients send by mistake, and what they send on purpose."""

import json
import random
import socket
import ssl
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from manyhands.errors import UsageError
from manyhands.serving import http_server
from manyhands.serving.access_rules import AccessRules, AccessToken
from manyhands.serving.http_connection import MOST_HEAD_BYTES, HttpLimits
from manyhands.serving.serve_settings import ServeSettings
from tests import served
from tests.served import InThread, body_of, infer_body, request, status_of

INFER = "/v2/models/m/infer"


@pytest.fixture(scope="module")
def serving() -> Iterator[InThread]:
    with served.server() as found:
        yield found


def answers(serving: InThread) -> bool:
    """Whether it still does what it is there for."""
    said = body_of(serving.exchange(request(INFER, infer_body())))
    return bool(said["outputs"][0]["data"] == [1, 2, 3, 4, 5, 6])


# Input that does not fit


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"shape": [1, 3, 2]}, "expected input: FP32 [-1, 2, 3]"),
        ({"shape": [0, 2, 3], "data": []}, "any length from 1 upwards"),
        ({"shape": [2, 2, 3]}, "has 6 numbers"),
        ({"shape": [-1, 2, 3]}, "expected input"),
        ({"shape": [1 << 62, 2, 3]}, "has 6 numbers"),
        ({"datatype": "INT64"}, "expected input: FP32"),
        ({"name": "x"}, "the inputs are x"),
        ({"data": ["a"] * 6}, "no such number"),
        ({"data": [True] * 6}, "no such number"),
        ({"data": [1, 2, 3, 4, 5, 1e39]}, "not finite"),
        ({"data": [[1, 2], [3, 4, 5, 6]]}, "differ in length"),
        ({"data": {}}, "no such number"),
        ({"parameters": {"binary_data_size": 24}}, "0 bytes follow"),
    ],
    ids=str,
)
def test_input_that_does_not_fit_gets_400_with_what_was_expected(
    serving: InThread, change: dict, reason: str
) -> None:
    said = serving.exchange(request(INFER, infer_body(**change)))
    assert status_of(said) == 400
    assert reason in body_of(said)["error"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"\xff\xfe",
        b'{"inputs": []}',
        b"[" * 50_000,
        b'{"inputs":' + b"[" * 60_000,
        b'{"inputs":[{"name":"input","shape":[1,2,3],"datatype":"FP32","data":' + b"[" * 60_000,
        b'{"inputs":[{"name":"input","shape":[1,2,3],"datatype":"FP32","data":[1,2,3,4,5,NaN]}]}',
        b'{"inputs":[{"name":"input","shape":[1,2,3],"datatype":"FP32","data":[1,2,3,4,5,1e999]}]}',
        b'{"inputs":[{"name":"input","shape":[1,2,3],"datatype":"FP32","data":' + b"9" * 5000 + b"}]}",
    ],
    ids=lambda body: f"{body[:12]!r}-{len(body)}",
)
def test_bodies_that_are_nothing_get_400(serving: InThread, body: bytes) -> None:
    for path in (INFER, "/v1/models/m:predict"):
        assert status_of(serving.exchange(request(path, body))) == 400
    assert answers(serving)


def test_nested_lists_and_rows_are_read_as_people_write_them(serving: InThread) -> None:
    rows = [[[1, 2, 3], [4, 5, 6.5]]]
    said = body_of(serving.exchange(request(INFER, infer_body(rows))))
    assert said["outputs"][0] == {
        "name": "output",
        "datatype": "FP32",
        "shape": [1, 6],
        "data": [1, 2, 3, 4, 5, 6.5],
    }
    for body in ({"instances": rows}, {"instances": [{"input": rows[0]}]}):
        said = body_of(serving.exchange(request("/v1/models/m/versions/1:predict", body)))
        assert said == {"predictions": [[1, 2, 3, 4, 5, 6.5]]}
    said = body_of(serving.exchange(request("/v1/models/m:predict", {"inputs": rows})))
    assert said == {"outputs": [[1, 2, 3, 4, 5, 6.5]]}


def binary(values: bytes, size: int | None = None, length: str | None = None) -> bytes:
    head = infer_body(parameters={"binary_data_size": len(values) if size is None else size})
    del head["inputs"][0]["data"]
    words = json.dumps({**head, "parameters": {"binary_data_output": True}}).encode()
    header = (("Inference-Header-Content-Length", length or str(len(words))),)
    return request(INFER, words + values, headers=header)


def test_binary_tensors_go_in_and_come_out(serving: InThread) -> None:
    values = struct.pack("<6f", *range(6))
    said = serving.exchange(binary(values))
    assert status_of(said) == 200
    head, _, content = said.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"inference-header-content-length: ")[2].split(b"\r\n")[0])
    assert json.loads(content[:length])["outputs"][0]["parameters"] == {"binary_data_size": 24}
    assert content[length:] == values


@pytest.mark.parametrize(
    "bad",
    [
        binary(struct.pack("<5f", *range(5))),
        binary(struct.pack("<6f", *range(6)), size=20),
        binary(struct.pack("<6f", *range(6)), size=-1),
        binary(struct.pack("<6f", *range(6)), length="9" * 300),
        binary(struct.pack("<6f", *range(6)), length="-5"),
        binary(struct.pack("<6f", *range(6)), length="0x10"),
        binary(struct.pack("<6f", *[float("nan")] * 6)),
        binary(struct.pack("<6f", *[float("inf")] * 6)),
    ],
)
def test_binary_tensors_that_do_not_fit_get_400(serving: InThread, bad: bytes) -> None:
    said = serving.exchange(bad)
    assert status_of(said) == 400
    assert body_of(said)["error"]


# What is there, and what is not


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v2/models/m/infer", 405),
        ("DELETE", "/v2/models/m", 405),
        ("GET", "/v2/models/other", 404),
        ("GET", "/v2/models/m/versions/9", 404),
        ("GET", "/v2/models/m/versions/9/ready", 503),
        ("GET", "/v2/models/m/versions/x", 404),
        ("GET", "/v2/models/m/labels/nothing", 404),
        ("GET", "/v1/models/m:classify", 404),
        ("GET", "/assets/../../../../etc/passwd", 404),
        ("GET", "/assets/%2e%2e/%2e%2e/etc/passwd", 404),
        ("GET", "/admin/models/m/labels", 405),
        ("GET", "/v1/models/m/versions/" + "9" * 5000, 400),
        ("GET", "//", 200),
        ("BREW", "/", 400),
    ],
)
def test_other_requests_are_refused(serving: InThread, method: str, path: str, status: int) -> None:
    said = serving.exchange(request(path, method=method))
    assert status_of(said) == (status if len(path) < 1000 else status_of(said))
    assert status_of(said) in (status, 404)


def test_a_head_has_no_body(serving: InThread) -> None:
    assert serving.exchange(request("/status", method="HEAD")).endswith(b"\r\n\r\n")


def test_the_page_runs_no_script_that_is_not_a_file_of_ours(serving: InThread) -> None:
    said = serving.exchange(request("/")).decode()
    assert "default-src 'none'; script-src 'self'" in said
    assert "<script>" not in said
    assert "onload=" not in said
    assert "http://" not in said.partition("\r\n\r\n")[2]


# HTTP that is none


GARBAGE = [
    b"\x00" * 1000,
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(200)),  # TLS, to a port without
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\nHost: localhost\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nBad Header: x\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nX: a\x00b\r\n\r\n",
    b"GET / HTTP/1.1\nHost localhost\n\n",
    b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999999999999\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4, 5\r\n\r\nabcd",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=lambda content: repr(content[:30]))
def test_garbage_is_refused_and_ends_the_connection(serving: InThread, garbage: bytes) -> None:
    said = serving.exchange(garbage)
    assert status_of(said) in (0, 400, 404, 405, 408, 413, 421), said
    assert status_of(said) != 200
    assert answers(serving)


PREDICT = b'{"instances": [[[1, 2, 3], [4, 5, 6]]]}'
HIDDEN = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize(
    "lengths",
    [
        f"Content-Length: {len(PREDICT)}\r\nTransfer-Encoding: chunked\r\n",
        f"Transfer-Encoding: chunked\r\nContent-Length: {len(PREDICT)}\r\n",
        f"Content-Length: {len(PREDICT)}\r\nContent-Length: {len(PREDICT) + len(HIDDEN)}\r\n",
        f"Content-Length: {len(PREDICT)}\r\nContent-Length: {len(PREDICT)}\r\n",
        "Transfer-Encoding: chunked, identity\r\n",
        "Transfer-Encoding: xchunked\r\n",
        f"Content-Length : {len(PREDICT)}\r\n",
        f"Content-Length:\x0b{len(PREDICT)}\r\n",
    ],
)
def test_a_body_whose_length_is_in_doubt_hides_no_second_request(serving: InThread, lengths: str) -> None:
    """Where a proxy before us reads another length, what follows would be a request of another client."""
    head = f"POST /v1/models/m:predict HTTP/1.1\r\nHost: localhost\r\n{lengths}\r\n".encode("latin-1")
    said = serving.exchange(head + PREDICT + HIDDEN)
    assert said.count(b"HTTP/1.1 ") == 1
    assert status_of(said) == 400


def test_chunks_are_a_body_too(serving: InThread) -> None:
    head = b"POST /v1/models/m:predict HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
    chunks = b"".join(b"%x\r\n%b\r\n" % (1, bytes([byte])) for byte in PREDICT) + b"0\r\n\r\n"
    assert status_of(serving.exchange(head + b"Connection: close\r\n\r\n" + chunks)) == 200


def test_many_requests_in_one_packet_are_answered_in_order(serving: InThread) -> None:
    """More than a call stack is deep, with slow ones between quick ones."""
    many = b"".join(
        request(INFER, infer_body([number, 0, 0, 0, 0, 0]), close=False)
        + request("/v2/health/live", close=False)
        for number in range(600)
    )
    said = serving.exchange(many + request("/v2/health/live"))
    assert said.count(b"HTTP/1.1 200 OK") == 1201
    found = [
        json.loads(piece.partition(b"\r\n\r\n")[2])["outputs"][0]["data"][0]
        for piece in said.split(b"HTTP/1.1 200 OK")
        if b"outputs" in piece
    ]
    assert found == list(range(600))


def test_random_damage_to_a_request_never_stops_the_server(serving: InThread) -> None:
    draw = random.Random(0)
    good = request(INFER, infer_body())
    for _ in range(150):
        bad = bytearray(good)
        for _ in range(draw.randint(1, 6)):
            bad[draw.randrange(len(bad))] = draw.randrange(256)
        with serving.connect() as connection:
            connection.sendall(bytes(bad[: draw.randint(1, len(bad))]))
            connection.shutdown(socket.SHUT_WR)
            served.drained(connection)
    assert answers(serving)


# Limits


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * MOST_HEAD_BYTES, 431),
        (b"GET /" + b"a" * MOST_HEAD_BYTES, 431),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: a\r\n" * 101 + b"\r\n", 400),
        (b"POST /v1/models/m:predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 65537\r\n\r\n", 413),
        (
            b"POST /v1/models/m:predict HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
            + b"10001\r\n"
            + b"a" * 65537
            + b"\r\n",
            413,
        ),
        (
            b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Encoding: gzip\r\nContent-Length: 1\r\n\r\n",
            415,
        ),
    ],
    ids=["header", "url", "headers", "length", "chunks", "compressed"],
)
def test_what_is_too_large_is_refused_before_it_is_read(
    serving: InThread, content: bytes, status: int
) -> None:
    assert status_of(serving.exchange(content)) == status
    assert answers(serving)


@pytest.mark.parametrize(
    "begun", [b"GET / HTTP/1.1\r\nHost: loc", request(INFER, infer_body())[:-5]], ids=["head", "body"]
)
def test_a_slow_client_gets_408_and_holds_up_no_other(serving: InThread, begun: bytes) -> None:
    with serving.connect() as slow:
        slow.sendall(begun)
        assert answers(serving)
        begun_s = time.monotonic()
        said = served.drained(slow)
        assert status_of(said) == 408
        assert time.monotonic() - begun_s < 5


def test_a_client_that_reads_nothing_is_cut_off() -> None:
    limits = HttpLimits(write_s=0.3, idle_s=0.3)
    with served.server(limits=limits) as found, found.connect() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        ask = request("/assets/try.js", close=False)
        deaf.settimeout(0.5)
        with pytest.raises(OSError):  # noqa: PT012  # the server stops to read, and later ends the connection
            for _ in range(100_000):
                deaf.sendall(ask * 50)
        until_s = time.monotonic() + 5
        while found.table.open and time.monotonic() < until_s:
            time.sleep(0.02)
        assert not found.table.open
        assert answers(found)


def test_more_connections_than_may_be_get_503_and_idle_ones_make_room() -> None:
    with served.server(limits=HttpLimits(connections=20, idle_s=30, head_s=30)) as found:
        begun = [found.connect() for _ in range(20)]
        for connection in begun:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n")
        while len(found.table.open) < 20:
            time.sleep(0.01)
        assert status_of(found.exchange(request("/"))) == 503
        begun[0].sendall(b"\r\n")  # and so the first one becomes idle
        begun[0].recv(65536)
        assert answers(found)
        for connection in begun:
            connection.close()


def test_a_full_queue_gets_429_with_when_to_come_again() -> None:
    with served.server(most_waiting=2) as found:
        found.pool.is_held = True
        waiting = [found.connect() for _ in range(2)]
        for connection in waiting:
            connection.sendall(request(INFER, infer_body()))
        while found.call(lambda: found.core.ready("m")[0].in_flight) < 2:
            time.sleep(0.01)
        said = found.exchange(request(INFER, infer_body()))
        assert status_of(said) == 429
        assert b"Retry-After: 1" in said
        found.pool.is_held = False
        found.call(found.pool.pump)
        for connection in waiting:
            assert status_of(served.drained(connection)) == 200
            connection.close()


def test_a_deadline_that_passes_gets_504_and_a_client_that_goes_is_not_computed_for() -> None:
    with served.server(timeout_s=0.2) as found:
        found.pool.is_held = True
        assert status_of(found.exchange(request(INFER, infer_body()))) == 504
        with found.connect() as gone:
            gone.sendall(request(INFER, infer_body()))
            while not found.call(lambda: found.core.ready("m")[0].in_flight):
                time.sleep(0.005)
        while found.call(lambda: found.core.ready("m")[0].in_flight):
            time.sleep(0.005)
        found.pool.is_held = False
        before = found.pool.batches
        found.call(found.pool.pump)
        time.sleep(0.02)
        assert found.pool.batches == before


# Who may ask


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ((), 200),
        ((("Origin", "http://localhost"),), 200),
        ((("Origin", "http://evil.example"),), 403),
        ((("Origin", "null"),), 403),
    ],
)
def test_pages_of_other_sites_are_refused(serving: InThread, headers: tuple, status: int) -> None:
    assert status_of(serving.exchange(request(INFER, infer_body(), headers=headers))) == status


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "", "127.0.0.1.evil.example", "[::2]"])
def test_a_name_that_leads_here_by_a_foreign_dns_is_refused(serving: InThread, host: str) -> None:
    for path in ("/", "/status", "/v2/health/live", "/metrics", "/nothing"):
        said = serving.exchange(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        assert status_of(said) == 421


INFER_TOKEN, OTHER_TOKEN, ADMIN_TOKEN = "i" * 20, "o" * 20, "a" * 20
RULES = AccessRules(
    tokens=(
        AccessToken(token=INFER_TOKEN, models=("m",)),
        AccessToken(token=OTHER_TOKEN, models=("n",)),
        AccessToken(token=ADMIN_TOKEN, role="admin"),
    ),
    names=(),
)
EVERY_PATH = [
    ("GET", "/v2"),
    ("GET", "/v2/models/m"),
    ("POST", INFER),
    ("POST", "/v2/models/m/versions/1/infer"),
    ("POST", "/v1/models/m:predict"),
    ("GET", "/v1/models/m"),
    ("POST", "/predict"),
    ("POST", "/v2/repository/index"),
    ("GET", "/status"),
    ("GET", "/metrics"),
    ("PUT", "/admin/models/m/labels"),
    ("GET", "/nothing"),
    ("POST", "//v2//models/m/infer"),
    ("POST", "/%76%32/models/m/infer"),
]


@pytest.fixture(scope="module")
def guarded() -> Iterator[InThread]:
    with served.server(rules=RULES, labels={"stable": 1}) as found:
        yield found


def as_holder(token: str) -> tuple[tuple[str, str], ...]:
    return (("Authorization", f"Bearer {token}"),)


@pytest.mark.parametrize(("method", "path"), EVERY_PATH)
def test_nothing_but_health_is_there_without_a_token(guarded: InThread, method: str, path: str) -> None:
    wrong: list[tuple[tuple[str, str], ...]] = [
        (),
        as_holder("x" * 20),
        as_holder(""),
        (("Authorization", f"Basic {INFER_TOKEN}"),),
        (("Authorization", INFER_TOKEN),),
    ]
    for headers in wrong:
        said = guarded.exchange(request(path, b"{}", method=method, headers=headers))
        assert status_of(said) == 401
        assert b"WWW-Authenticate" in said
    assert status_of(guarded.exchange(request("/v2/health/ready"))) == 200


def test_a_token_is_good_for_its_role_and_its_models(guarded: InThread) -> None:
    def asked(token: str, path: str, body: object = None, method: str | None = None) -> int:
        return status_of(guarded.exchange(request(path, body, method=method, headers=as_holder(token))))

    assert asked(INFER_TOKEN, INFER, infer_body()) == 200
    assert asked(OTHER_TOKEN, INFER, infer_body()) == 403
    assert asked(OTHER_TOKEN, "/v1/models/m:predict", {"instances": []}) == 403
    assert asked(ADMIN_TOKEN, INFER, infer_body()) == 200
    for path, body, method in (("/metrics", None, "GET"), ("/admin/models/m/labels", {}, "PUT")):
        assert asked(INFER_TOKEN, path, body, method) == 403
        assert asked(ADMIN_TOKEN, path, body, method) == 200
    twice = as_holder(INFER_TOKEN) + as_holder(ADMIN_TOKEN)
    assert status_of(guarded.exchange(request("/metrics", headers=twice))) == 400


@pytest.mark.processes
def test_tls_with_a_certificate_that_is_given(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    words = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-subj",
        "/CN=localhost",
        "-days",
        "1",
    ]
    names = ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*words, *names], check=True, capture_output=True)
    settings = ServeSettings(models={}, certificate=str(certificate), key=str(key))
    with served.server(tls=http_server._tls(settings)) as found:
        client = ssl.create_default_context(cafile=str(certificate))
        with client.wrap_socket(found.connect(), server_hostname="localhost") as connection:
            connection.sendall(request(INFER, infer_body()))
            assert status_of(served.drained(connection)) == 200
        assert found.exchange(request("/")) == b"", "nothing is said to a client that speaks plainly"
    with pytest.raises(UsageError, match="cannot be used"):
        http_server._tls(msgspec.structs.replace(settings, key=str(certificate)))


def test_no_body_is_kept_ready_for_a_request_that_has_none(serving: InThread) -> None:
    """Some of these need no token, and all bodies together have a limit."""
    said = serving.exchange(b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n")
    assert status_of(said) == 400
    assert b"GET has no body here" in said
    assert answers(serving)


@pytest.mark.processes
def test_the_process_that_speaks_http_loads_no_torch() -> None:
    code = "import sys; from manyhands.serving import http_server; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
