"""One script under one way of distributing it: run it, and say what became of it."""

import contextlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from line_edits import apply
from ported.data import write
from ported_scripts import DDP, OURS, PORTED, REFERENCE, Script
from processes import SCRIPTS, loopback

RUNNER = Path(__file__).with_name("porting_runner.py")
TIMEOUT_S = 600.0
LIMIT = 1e-5
RUNS, REFUSED, FAILED = "runs", "refused", "FAILED"


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way of distributing; `reference` says what the batch of the one process is beside that of a worker."""

    name: str
    options: tuple[str, ...]
    times: int = 0
    """0: not compared, because it is not synchronous."""
    parts: int = 1
    """In how many parts batch norm sees the batch of one process."""


WAYS = (
    Way(name="all-reduce", options=("--strategy", "all-reduce"), times=2, parts=2),
    Way(
        name="parameter-server:sync",
        options=("--strategy", "parameter-server:consistency=sync", "--servers", "1"),
        times=2,
        parts=2,
    ),
    Way(
        name="parameter-server:async",
        options=("--strategy", "parameter-server:consistency=async", "--servers", "1"),
    ),
    Way(name="local-sgd", options=("--strategy", "local-sgd")),
    Way(name="hogwild", options=("--strategy", "hogwild")),
    Way(name="sharded", options=("--placement", "sharded"), times=2, parts=2),
    Way(name="tensor", options=("--placement", "tensor:ways=2"), times=1),
    Way(name="pipeline", options=("--placement", "pipeline:stages=2"), times=1, parts=4),
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    kind: str
    says: str = ""
    steps: int = 0
    seconds: float = 0.0
    difference: float | None = None

    @property
    def is_good(self) -> bool:
        return self.kind == REFUSED or (
            self.kind == RUNS and (self.difference is None or self.difference <= LIMIT)
        )

    def cell(self) -> str:
        if self.kind == RUNS and self.difference is not None:
            return f"runs, {self.difference:.0e}" if self.difference else "runs, same bits"
        return self.kind


def classify(code: int, output: str, steps: int, losses: Sequence[float]) -> Outcome:
    """A run that ends well has made steps and has numbers for losses; a refusal has made none and says one sentence."""
    if code == 0:
        if not steps:
            return Outcome(kind=FAILED, says="ended well without a step")
        if not all(map(math.isfinite, losses)):
            return Outcome(kind=FAILED, says="a loss is not finite", steps=steps)
        return Outcome(kind=RUNS, steps=steps)
    said = re.findall(r"^(?:\S+ \| )?(?:manyhands: )?error: (.+)$", output, re.MULTILINE)
    if "Traceback" in output or not said:
        lines = [line for line in output.splitlines() if line.strip()]
        return Outcome(kind=FAILED, says=lines[-1] if lines else f"exit code {code}", steps=steps)
    if steps:
        return Outcome(kind=FAILED, says=f"after {steps} steps: {said[-1]}", steps=steps)
    return Outcome(kind=REFUSED, says=said[-1])


# Where a script runs


def lay_out(script: Script, form: str | None, sources: Mapping[str, bytes], folder: Path) -> Path:
    """Its files, with what stands in for others, in a folder of their own; returns the one to start."""
    folder.mkdir(parents=True)
    if script.own:
        shutil.copytree(PORTED / "own" / script.own, folder, dirs_exist_ok=True)
    for source in script.sources:
        inside = Path(source.path) if script.starts else Path(source.path).relative_to(script.folder)
        path = folder / inside
        path.parent.mkdir(parents=True, exist_ok=True)
        patch = script.patch(form) if form and source is script.changed else None
        content = sources[source.path]
        path.write_bytes(apply(content, patch, source.blob).encode() if patch else content)
    write(folder)
    changed = Path(script.changed.path).relative_to(script.folder)
    return folder / (script.starts or changed)


def environ(script: Script, folder: Path, **more: object) -> dict[str, str]:
    path = os.pathsep.join([str(PORTED / "stand_ins"), str(folder)])
    own = {
        "PYTHONPATH": path,
        "PYTHONWARNINGS": "ignore",
        "PORTING_SAMPLES": script.samples,
        "PORTING_EPOCHS": script.epochs,
        "PORTING_BATCH": script.batch,
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": 1,
        "OMP_NUM_THREADS": 1,
        **more,
    }
    return {**os.environ, **{name: str(value) for name, value in own.items()}}


def run_ported(
    script: Script, way: Way, sources: Mapping[str, bytes], folder: Path, state: Path | None = None
) -> Outcome:
    """The port under our launcher; with a folder for the state, comparable and with that state after some steps."""
    start = lay_out(script, OURS, sources, folder)
    keeps = (
        {"PORTING_STATE": state, "PORTING_SAME": 1, "PORTING_DOUBLE": int(not script.single)} if state else {}
    )
    around = [str(RUNNER)] if state or script.epochs else []
    words = [str(SCRIPTS / "manyhands"), "launch", "--workers", "2", "--threads", "1", *way.options]
    words += ["--out", str(folder / "run"), *around, str(start), *script.options]
    code, output = run(words, folder, environ(script, folder, PORTING_IS_OURS=1, **keeps))
    steps, losses = _recorded(folder / "run")
    return classify(code, output, steps, losses)


def run_ddp(script: Script, sources: Mapping[str, bytes], folder: Path) -> Outcome:
    """The DDP form under torchrun."""
    start = lay_out(script, DDP, sources, folder)
    meeting = loopback()
    around = [str(RUNNER)] if script.epochs else []
    words = [str(SCRIPTS / "torchrun"), "--nproc-per-node", "2", "--master-port", meeting["MASTER_PORT"]]
    words += [*around, str(start), *script.options]
    code, output = run(words, folder, environ(script, folder, GLOO_SOCKET_IFNAME="lo"))
    return classify(code, output, steps=int(code == 0), losses=())


def run_reference(
    script: Script, way: Way, sources: Mapping[str, bytes], folder: Path, state: Path
) -> Outcome:
    """The original in one process of plain PyTorch, on the samples that the workers have together."""
    start = lay_out(script, REFERENCE, sources, folder)
    times = 1 if script.whole else way.times
    settings = {
        "PORTING_STATE": state,
        "PORTING_SAME": 1,
        "PORTING_DOUBLE": int(not script.single),
        "PORTING_TIMES": 1 if script.batch else times,
        "PORTING_BATCH": script.batch * times,
        "PORTING_PARTS": 1 if script.whole else way.parts,
    }
    words = [sys.executable, str(RUNNER), str(start), *script.options]
    if script.batch_option:
        words += [script.batch_option, str(script.batch * times)]
    code, output = run(words, folder, environ(script, folder, **settings))
    return classify(code, output, steps=len(list(state.glob("*.pt"))), losses=())


def run(words: Sequence[str], folder: Path, settings: Mapping[str, str]) -> tuple[int, str]:
    """The exit code and all that was printed; a run that does not end is ended."""
    log = folder / "output"
    with log.open("wb") as output:
        process = subprocess.Popen(
            words,
            cwd=folder,
            env=settings,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            process_group=0,
        )
        try:
            code = process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            code = -signal.SIGTERM
        finally:
            _end(process)
    said = log.read_text(errors="replace")
    return code, said if code != -signal.SIGTERM else f"{said}\ndid not end within {TIMEOUT_S:.0f} s\n"


def _end(process: "subprocess.Popen[bytes]") -> None:
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10.0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _recorded(run_dir: Path) -> tuple[int, list[float]]:
    """The steps and the losses of all workers and sessions, from what they recorded."""
    losses, steps = [], 0
    for path in run_dir.glob("events/worker-*.jsonl"):
        for line in path.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                event = json.loads(line)
                if event.get("kind") == "step":
                    steps += 1
                    if isinstance(event.get("loss"), float):
                        losses.append(event["loss"])
    return steps, losses


# How far two states are from each other


def difference(one: Path, other: Path) -> float:
    """The largest difference of a tensor after the steps, relative to its norm. A tensor that is smaller than the
    rounding of all of them, as are biases of keys that begin at zero and have no gradient, is relative to that."""
    files = sorted(path.name for path in other.glob("*.pt"))
    if not files or files != sorted(path.name for path in one.glob("*.pt")):
        return math.nan
    largest = 0.0
    for name in files:
        ours, theirs = (torch.load(folder / name) for folder in (one, other))
        norms = [float(plain.norm()) for plain in theirs]
        rounding = max(math.hypot(*norms) * torch.finfo(torch.float32).eps, 1e-12)
        for mine, plain, norm in zip(ours, theirs, norms, strict=True):
            largest = max(largest, float((mine - plain).norm()) / max(norm, rounding))
    return largest
