"""Training, exporting and serving as a person does it: real model processes, real deaths, a foreign client."""

import asyncio
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
import torch
from PIL import Image

from manyhands import checkpoint, cli, data, models
from manyhands.checkpoint import index, manifest, tensor_file
from manyhands.errors import UsageError
from manyhands.job.plan import Plan
from manyhands.serving.exporting import export
from manyhands.serving.http_server import RunningServer, serving
from manyhands.serving.serve_settings import BatchingWords, ModelWords, ServeSettings
from tests.end_to_end.commands import BIN, clean_environment, manyhands, run
from tests.serving_conformance import CASES, differences

PATIENCE_S = 90.0


def until(holds: Callable[[], Any], what: str = "") -> Any:
    end_s = time.monotonic() + PATIENCE_S
    while not (found := holds()):
        assert time.monotonic() < end_s, f"it did not come about: {what}"
        time.sleep(0.02)
    return found


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a good checkpoint and an earlier, worse one, and the version that was exported from the good one."""
    folder = tmp_path_factory.mktemp("home")
    torch.manual_seed(0)
    module = models.build("cnn", (1, 8, 8), 10)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    train = data.load("digits").train
    plan = msgspec.to_builtins(Plan())
    for step in range(41):
        if step in (0, 40):
            tensors = {f"model/{name}": value for name, value in module.state_dict().items()}
            checkpoint.save(
                folder / "run" / "checkpoints",
                step=step + 1,
                tensors=tensors,
                record={"plan": plan, "steps": step + 1},
            )
        inputs, targets = train.batch(torch.randperm(len(train))[:128], epoch=0)  # type: ignore[attr-defined]
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(module(inputs), targets).backward()
        optimizer.step()
    assert cli.main(["export", str(folder / "run"), str(folder / "models" / "digits")]) == 0
    return folder


class InBackground:
    """A server in a thread, with what it has said."""

    def __init__(self, settings: ServeSettings) -> None:
        self.said: list[str] = []
        self._ready, self._over = threading.Event(), asyncio.Event()
        self._settings = settings
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    async def _run(self) -> None:
        self.loop = asyncio.get_running_loop()
        async with serving(self._settings, self.said.append) as found:
            self.server: RunningServer = found
            self._ready.set()
            await self._over.wait()

    def __enter__(self) -> "InBackground":
        self._thread.start()
        assert self._ready.wait(PATIENCE_S)
        until(lambda: self.get("/v2/health/ready").status_code == 200, str(self.said))
        until(lambda: self.server.pool.has_spare)
        return self

    def __exit__(self, *exception: object) -> None:
        self.loop.call_soon_threadsafe(self._over.set)
        self._thread.join(PATIENCE_S)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.server.address + path, timeout=PATIENCE_S)

    def versions(self, model: str = "digits") -> dict[int, dict[str, Any]]:
        models = {one["name"]: one for one in self.get("/status").json()["models"]}
        return {one["version"]: one for one in models[model]["versions"]}


def settings_of(home: Path) -> ServeSettings:
    return ServeSettings(
        models={"digits": ModelWords(source=str(home / "models" / "digits"))},
        port=0,
        batching=BatchingWords(most_samples=16, timeout_s=PATIENCE_S),
    )


@pytest.fixture(scope="module")
def server(home: Path) -> Iterator[InBackground]:
    with InBackground(settings_of(home)) as found:
        yield found


def samples(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Held-out digits."""
    test = data.load("digits").test
    inputs, targets = test.batch(torch.arange(count), epoch=0)  # type: ignore[attr-defined]
    return inputs.numpy(), targets.numpy()


def expected(home: Path, inputs: np.ndarray) -> np.ndarray:
    """What the weights of the export give, computed by a model of the zoo."""
    model = models.build("cnn", (1, 8, 8), 10)
    model.load_state_dict(tensor_file.decode(home / "models" / "digits" / "1" / "weights.safetensors"))
    with torch.inference_mode():
        return model.eval()(torch.from_numpy(inputs)).numpy()


# Exporting, and training on


def test_a_version_is_data_alone(home: Path) -> None:
    place = home / "models" / "digits" / "1"
    names = {"weights.safetensors", "description.json", "sample.safetensors", "manifest.json"}
    assert {path.name for path in place.iterdir()} == names
    words = json.loads((place / "description.json").read_text())
    assert words["plan"]["model"] == words["model"] == "cnn"
    assert words["class_names"] == list("0123456789")
    assert words["accuracy"] > 0.5
    tensors, _ = checkpoint.load(home / "run" / "checkpoints")
    for name, value in tensor_file.decode(place / "weights.safetensors").items():
        assert torch.equal(value, tensors[f"model/{name}"])


def test_an_export_says_what_is_wrong(home: Path) -> None:
    wrong: dict[str, dict[str, Any]] = {
        "it has 1, 41": {"run": home / "run", "out": home / "out", "step": 3},
        "no checkpoint": {"run": home / "nowhere", "out": home / "out"},
        "never changes": {"run": home / "run", "out": home / "models" / "digits", "version": 1},
    }
    for reason, arguments in wrong.items():
        with pytest.raises(UsageError, match=reason):
            export(**arguments)
    assert not (home / "out").exists()


def test_training_goes_on_from_an_exported_version(home: Path) -> None:
    """In a run as a person starts it; the rest is in unit/test_initial_weights.py."""
    train = ("train", "--workers", "1", "--threads", "1", "--steps", "1", "--save-every", "never", "--json")
    done = manyhands(*train, "--weights", "models/digits", cwd=home)
    assert json.loads(done.out)["accuracy"] > 0.5


# Clients


FOREIGN = """
import sys
import numpy as np
from tritonclient import http
client = http.InferenceServerClient(sys.argv[1])
inputs = np.load(sys.argv[2])
assert client.is_server_live() and client.is_model_ready("digits", "1")
assert client.get_model_metadata("digits")["versions"] == ["1"]
answers = []
for binary_in in (True, False):
    for binary_out in (True, False):
        given = http.InferInput("input", list(inputs.shape), "FP32")
        given.set_data_from_numpy(inputs, binary_data=binary_in)
        wanted = http.InferRequestedOutput("output", binary_data=binary_out)
        found = client.infer("digits", [given], outputs=[wanted], request_id="7")
        assert found.get_response()["id"] == "7"
        answers.append(found.as_numpy("output"))
given = http.InferInput("input", [1, 8], "FP32")
given.set_data_from_numpy(inputs[0, 0, :1])
try:
    client.infer("digits", [given])
    raise SystemExit("a wrong shape was taken")
except http.InferenceServerException as error:
    assert "expected input: FP32" in str(error), error
np.save(sys.argv[3], np.stack(answers))
"""


def test_a_foreign_client_gets_what_the_model_computes(home: Path, server: InBackground) -> None:
    """tritonclient, in a process of its own: it leaves descriptors open."""
    inputs, targets = samples(40)  # more than a batch
    np.save(home / "inputs.npy", inputs)
    address = server.server.address.removeprefix("http://")
    words = [sys.executable, "-c", FOREIGN, address, str(home / "inputs.npy"), str(home / "answers.npy")]
    done = run(words, home)
    assert done.code == 0, done.err
    answers = np.load(home / "answers.npy")
    for answer in answers:
        np.testing.assert_allclose(answer, expected(home, inputs), atol=1e-5)
    assert (answers[0].argmax(1) == targets).mean() > 0.5


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_our_server_answers_as_the_protocol_says(server: InBackground, case: Any) -> None:
    assert differences(case, server.server.address) == []


def test_an_uploaded_picture_is_seen_as_training_saw_it(home: Path, server: InBackground) -> None:
    inputs, _ = samples(1)
    file = io.BytesIO()
    Image.fromarray((inputs[0, 0] * 255).round().astype(np.uint8)).save(file, "PNG")
    url = server.server.address + "/predict"
    plain = httpx.post(url, content=file.getvalue(), params={"top": 3}).json()
    form = httpx.post(url, files={"file": ("7.png", file.getvalue())}, params={"top": 3}).json()
    assert plain == form
    assert len(plain["classes"]) == 3
    scores = torch.from_numpy(expected(home, inputs)).softmax(1)[0]
    assert plain["classes"][0]["class"] == str(int(scores.argmax()))
    assert plain["classes"][0]["probability"] == pytest.approx(float(scores.max()), abs=0.02)
    for wrong in (b"", b"no picture", file.getvalue()[:100]):
        assert "not a picture" in httpx.post(url, content=wrong).json()["error"]


# Deaths


def test_a_killed_model_process_is_replaced_and_no_request_fails(home: Path) -> None:
    inputs, _ = samples(1)
    with InBackground(settings_of(home)) as server:
        body = {
            "inputs": [
                {"name": "input", "shape": [1, 1, 8, 8], "datatype": "FP32", "data": inputs.ravel().tolist()}
            ]
        }
        outcomes: Counter[int] = Counter()
        over = threading.Event()

        def client() -> None:
            with httpx.Client(base_url=server.server.address, timeout=PATIENCE_S) as session:
                while not over.is_set():
                    outcomes[session.post("/v2/models/digits/infer", json=body).status_code] += 1

        clients = [threading.Thread(target=client) for _ in range(4)]
        for one in clients:
            one.start()
        until(lambda: outcomes[200] > 20)
        before = server.server.pool.living
        os.kill(before[0], signal.SIGKILL)
        until(lambda: server.server.pool.crashes == 1 and server.server.pool.living)
        seen = outcomes[200]
        until(lambda: outcomes[200] > seen + 20, str(server.said))
        over.set()
        for one in clients:
            one.join()
        assert set(outcomes) == {200}
        assert server.server.pool.living != before
        assert any("was killed by SIGKILL; another one takes its place" in line for line in server.said)


# Folders that are wrong


def test_versions_that_are_damaged_worse_or_of_foreign_code_are_reported_and_not_served(
    home: Path, server: InBackground
) -> None:
    folder = home / "models" / "digits"

    def changed(number: int, change: Callable[[Path], None]) -> None:
        place = folder / f".{number}"
        shutil.copytree(folder / "1", place)
        change(place)
        place.rename(folder / str(number))
        until(lambda: server.versions().get(number, {}).get("state") in ("failed", "rejected"))

    def cut(place: Path) -> None:
        os.truncate(place / "weights.safetensors", 1000)

    changed(2, cut)
    assert "bytes instead of" in server.versions()[2]["reason"]
    shutil.rmtree(folder / "2")
    export(home / "run", folder, step=1, version=3)
    until(lambda: server.versions().get(3, {}).get("state") == "rejected")
    assert "the least that may follow" in server.versions()[3]["reason"]

    def renamed(place: Path) -> None:
        text = (
            (place / "description.json").read_text().replace('"model": "cnn"', '"model": "antigravity:x"', 1)
        )
        (place / "description.json").write_text(text)
        found = manifest.read(place)
        marking = manifest.Marking()
        list(marking.through([text.encode()]))
        files = {**found.files, "description.json": marking.mark()}
        (place / "manifest.json").write_bytes(
            manifest.encode(msgspec.structs.replace(found, files=files, sha256=""))
        )

    changed(4, renamed)
    assert "add --allow antigravity:x" in server.versions()[4]["reason"]
    assert server.versions()[1]["state"] == "ready", "the good one answers all the while"
    for number in (3, 4):
        shutil.rmtree(folder / str(number))


# Serving what is trained meanwhile


def test_a_run_is_served_while_it_trains(tmp_path: Path) -> None:
    """The command, versions as they are saved, requests all the while, and an orderly end."""
    words = (
        "train",
        "--workers",
        "1",
        "--threads",
        "1",
        "--model",
        "mlp",
        "--save-every",
        "20steps",
        "--out",
        "run",
    )
    assert manyhands(*words, "--epochs", "1", cwd=tmp_path).code == 0
    started: list[subprocess.Popen[bytes]] = []

    def start(*arguments: str) -> subprocess.Popen[bytes]:
        with (tmp_path / "said").open("a") as said:
            process = subprocess.Popen(
                [str(BIN / "manyhands"), *arguments],
                cwd=tmp_path,
                env=clean_environment(),
                stdin=subprocess.DEVNULL,
                stderr=said,
                stdout=said,
            )
        started.append(process)
        return process

    try:
        serve = start("serve", "digits=run", "--port", "0")
        url = until(lambda: address_in(tmp_path / "said"), "the server's address")
        until(lambda: status(url, "/v2/health/ready") == 200)
        inputs, _ = samples(4)
        body = json.dumps({"instances": inputs.tolist()}).encode()
        versions = {newest(url)}
        train = start(*words, "--resume", "--epochs", "8")
        while train.poll() is None or newest(url) != saved(tmp_path):
            assert status(url, "/v1/models/digits:predict", body) == 200, (tmp_path / "said").read_text()
            versions.add(newest(url))
        assert train.returncode == 0
        assert 0 not in versions
        assert len(versions) >= 2
        children = subprocess.run(
            ["ps", "--ppid", str(serve.pid), "-o", "pid="], capture_output=True, text=True, check=True
        ).stdout.split()
        serve.send_signal(signal.SIGTERM)
        assert serve.wait(PATIENCE_S) == 0
        assert children
        assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]
    finally:
        for process in started:
            process.kill()
            process.wait()


def address_in(said: Path) -> str:
    return said.read_text().partition(" at http://")[2].split("\n")[0].strip()


def status(address: str, path: str, body: bytes | None = None) -> int:
    try:
        with urllib.request.urlopen(f"http://{address}{path}", body, timeout=PATIENCE_S) as found:
            found.read()
            return int(found.status)
    except urllib.error.HTTPError as error:
        return error.code


def newest(address: str) -> int:
    with urllib.request.urlopen(f"http://{address}/status", timeout=PATIENCE_S) as found:
        versions = json.load(found)["models"][0]["versions"]
    return max((one["version"] for one in versions if one["state"] == "ready"), default=0)


def saved(folder: Path) -> int:
    place = index.latest(folder / "run" / "checkpoints")
    return manifest.read(place).sequence if place else -1


def test_a_killed_server_leaves_no_process(home: Path) -> None:
    """After kill -9 of the server the model processes end by themselves."""
    with (home / "said").open("w") as said:
        serve = subprocess.Popen(
            [str(BIN / "manyhands"), "serve", "digits=models/digits", "--port", "0"],
            cwd=home,
            env=clean_environment(),
            stdin=subprocess.DEVNULL,
            stderr=said,
        )
    url = until(lambda: address_in(home / "said"))
    until(lambda: status(url, "/v2/health/ready") == 200)
    with urllib.request.urlopen(f"http://{url}/status") as found:
        (child,) = json.load(found)["processes"]["living"]
    serve.kill()
    serve.wait()
    until(lambda: not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text())
