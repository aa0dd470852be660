"""Versions come, fail, are worse, take traffic and go, while requests go on; the models are arithmetic."""

import threading
import time
from collections import Counter
from collections.abc import Callable

import pytest

from manyhands.serving.batcher import Batcher, ModelError
from manyhands.serving.core import NoSuchModel
from manyhands.serving.servable import FAILURES_IN_A_ROW
from manyhands.serving.stream import VersionPolicy
from tests import served
from tests.served import InThread, body_of, infer_body, request, status_of, version

INFER = "/v2/models/m/infer"
PATIENCE_S = 10.0


def until(holds: Callable[[], bool]) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < end_s, "it did not come about"
        time.sleep(0.005)


def answering(serving: InThread, path: str = INFER) -> int:
    """Which version answered."""
    return int(body_of(serving.exchange(request(path, infer_body())))["model_version"])


def states(serving: InThread) -> dict[int, str]:
    said = body_of(serving.exchange(request("/status")))["models"][0]["versions"]
    return {one["version"]: one["state"] for one in said}


def test_a_new_version_answers_soon_and_no_request_fails_meanwhile() -> None:
    with served.server() as found:
        failed, seen, over = [], Counter[str](), threading.Event()

        def client() -> None:
            with found.connect() as connection:
                while not over.is_set():
                    connection.sendall(request(INFER, infer_body(), close=False))
                    said = connection.recv(65536)
                    if status_of(said) == 200:
                        seen[body_of(said)["model_version"]] += 1
                    else:
                        failed.append(said)

        clients = [threading.Thread(target=client) for _ in range(4)]
        for one in clients:
            one.start()
        for number in range(2, 30):
            found.source.versions = [version(number)]
            until(lambda number=number: seen[str(number)] > 0)  # type: ignore[misc]
        over.set()
        for one in clients:
            one.join()
        assert not failed
        assert set(seen) == {str(number) for number in range(1, 30)}
        until(lambda: states(found) == {29: "ready"})


def test_a_failed_load_is_reported_retried_and_the_old_version_goes_on() -> None:
    with served.server() as found:
        found.pool.fault = lambda number: served.FAILS if number == 2 else None
        found.source.versions = [version(2)]
        until(lambda: states(found) == {1: "ready", 2: "failed"})
        assert answering(found) == 1
        said = body_of(found.exchange(request("/v1/models/m")))["model_version_status"]
        assert said[0]["status"]["error_message"] == "it is half written"
        found.pool.fault = lambda number: None
        until(lambda: states(found) == {2: "ready"})
        assert answering(found) == 2


def test_a_rejected_version_is_never_served() -> None:
    with served.server() as found:
        found.pool.fault = lambda number: served.REJECTED if number == 2 else None
        found.source.versions = [version(2)]
        until(lambda: states(found) == {1: "ready", 2: "rejected"})
        assert answering(found) == 1
        assert b'outcome="rejected"} 1' in found.exchange(request("/metrics"))


def test_a_version_whose_answers_fail_is_withdrawn() -> None:
    with served.server(policy=VersionPolicy(latest=2)) as found:
        found.source.versions = [version(1), version(2)]
        until(lambda: states(found) == {1: "ready", 2: "ready"})
        take = Batcher.take

        def failing() -> None:
            """In the place of the pool's own."""
            while (batch := take(found.pool.batcher)) is not None:
                if found.pool.factors[batch.handle] == 2:
                    found.pool.batcher.again(batch, ModelError("it breaks"))
                else:
                    content = b"".join(batch.contents())
                    batch.complete(memoryview(content))

        found.pool._compute = failing  # type: ignore[method-assign]
        for _ in range(FAILURES_IN_A_ROW):
            assert status_of(found.exchange(request(INFER, infer_body()))) == 500
        until(lambda: answering(found) == 1)
        until(lambda: states(found)[2] == "rejected")


def test_labels_divide_the_traffic_and_an_admin_moves_them() -> None:
    labels, shares = {"stable": "previous", "canary": "newest"}, {"stable": 0.75, "canary": 0.25}
    with served.server(policy=VersionPolicy(latest=2), labels=labels, shares=shares) as found:
        found.source.versions = [version(1), version(2)]
        until(lambda: states(found) == {1: "ready", 2: "ready"})
        seen = Counter[int]()
        for _ in range(40):
            assert status_of(found.exchange(request("/v2/models/m"))) == 200  # which is no traffic
            seen[answering(found)] += 1
        assert seen[2] == pytest.approx(10, abs=1)
        assert answering(found, "/v2/models/m/labels/canary/infer") == 2
        assert answering(found, "/v2/models/m/versions/1/infer") == 1
        change = {"labels": {"stable": "newest"}, "traffic": {"stable": 1}}
        said = found.exchange(request("/admin/models/m/labels", change, method="PUT"))
        assert status_of(said) == 200
        assert {answering(found) for _ in range(5)} == {2}
        assert status_of(found.exchange(request("/v2/models/m/labels/canary"))) == 404
        wrong = {"labels": {}, "traffic": {"unknown": 1}}
        assert status_of(found.exchange(request("/admin/models/m/labels", wrong, method="PUT"))) == 400


def test_a_version_that_goes_answers_first_what_it_was_asked() -> None:
    with served.server() as found:
        found.pool.is_held = True
        with found.connect() as waiting:
            waiting.sendall(request(INFER, infer_body()))
            until(lambda: found.call(lambda: found.core.ready("m")[0].in_flight) == 1)
            found.source.versions = [version(2)]
            until(lambda: states(found) == {1: "unloading", 2: "ready"})
            found.pool.is_held = False
            found.call(found.pool.pump)
            said = served.drained(waiting)
        assert body_of(said)["model_version"] == "1"
        until(lambda: states(found) == {2: "ready"})


def test_a_version_without_files_or_process_is_loaded_again_when_it_can_be() -> None:
    with served.server() as found:
        handle = found.call(lambda: found.core.ready("m")[0].handle)
        found.call(lambda: found.core.lost(handle, "its files have gone"))
        until(lambda: states(found) == {1: "ready"})
        assert found.call(lambda: found.core.ready("m")[0].handle) != handle
        assert answering(found) == 1
        with pytest.raises(NoSuchModel, match="there are m"):
            found.core.entry("n")
