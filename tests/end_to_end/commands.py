"""The installed command as a person runs it, in a process of its own."""

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from manyhands import checkpoint

BIN = Path(sys.executable).parent
TIMEOUT_S = 100

# What launchers leave behind must not leak from the environment of the tests into the worlds that they start.
_OTHERS = ("MANYHANDS_", "MASTER_", "TORCHELASTIC_", "PMI_", "OMPI_", "SLURM_")
_OTHER = {"RANK", "WORLD_SIZE", "LOCAL_RANK"}


@dataclass(frozen=True, kw_only=True)
class Done:
    """How a command ended and what it said."""

    code: int
    out: str
    err: str

    def refusal(self) -> str:
        """The one line that says what was wrong; anything else than that is a failure."""
        assert self.code != 0, self.out
        assert self.out == ""
        assert "Traceback" not in self.err
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, self.err
        return lines[0]


def last_error(said: str) -> str:
    """The line that says why a run failed; where its directory is follows."""
    return [line for line in said.splitlines() if line.startswith("error: ")][-1]


def clean_environment(**more: str) -> dict[str, str]:
    """This process's variables without any launcher's; one thread per worker unless told otherwise."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_OTHERS) and name not in _OTHER
    }
    return {**kept, "OMP_NUM_THREADS": "1", **more}


def run(command: list[str], cwd: Path, environ: Mapping[str, str] | None = None) -> Done:
    done = subprocess.run(
        command,
        cwd=cwd,
        env=dict(environ) if environ is not None else clean_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    return Done(code=done.returncode, out=done.stdout, err=done.stderr)


def manyhands(*arguments: str, cwd: Path) -> Done:
    return run([str(BIN / "manyhands"), *arguments], cwd)


def parameters(out: Path) -> dict[str, Tensor]:
    """The model's tensors in the newest checkpoint of a run."""
    tensors, _ = checkpoint.load(out / "checkpoints")
    return {name: value for name, value in tensors.items() if name.startswith("model/")}


@functools.cache
def on_one_host(*words: str, workers: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The parameters and the summary of a run with so many workers here; what several tests compare with runs once."""
    with tempfile.TemporaryDirectory() as folder:
        asked = ["--workers", str(workers), "--threads", "1", "--json", "--out", "run"]
        done = manyhands(*words, *asked, cwd=Path(folder))
        assert done.code == 0, done.err
        return parameters(Path(folder, "run")), json.loads(done.out)


def assert_close(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    """The same but for rounding, tensor by tensor."""
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.isfinite(value).all(), name
        assert (value - theirs[name]).norm() <= 1e-5 * theirs[name].norm(), name


def same_bits(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
