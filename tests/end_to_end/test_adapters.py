"""Each adapter with the real package that it adapts to: equal to one worker, and saved as that package saves.

`make test` puts Lightning and Hugging Face into an environment of their own, on top of this one.
"""

import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.end_to_end.commands import Done, assert_close, clean_environment, run
from tests.pages import ROOT

pytestmark = pytest.mark.processes

EXAMPLES = ROOT / "examples"
SCRIPT = Path(__file__).with_name("adapted.py")
FOREIGN = ROOT / ".adapters" / "bin" / "python"
LAUNCH = "import sys; from manyhands.cli import main; sys.exit(main(sys.argv[1:]))"

needs_packages = pytest.mark.skipif(
    not (FOREIGN.parents[1] / ".ready").exists(), reason="`make test` installs Lightning and Hugging Face"
)


def launch(python: Path | str, folder: Path, script: Path, *arguments: str, workers: int) -> Done:
    command = ["-c", LAUNCH, "launch", "--workers", str(workers), "--out", str(folder / "out"), str(script)]
    below = Path(torch.__file__).parents[3]  # where packages of the environment below find their libraries
    environ = clean_environment(HF_HUB_OFFLINE="1", LD_LIBRARY_PATH=str(below))
    done = run([str(python), *command, *arguments], folder, environ)
    assert done.code == 0, done.err
    return done


def accuracy(python: Path | str, name: str, folder: Path, *, workers: int) -> float:
    """The last accuracy that an example prints."""
    done = launch(python, folder, EXAMPLES / f"{name}_digits.py", workers=workers)
    found = re.findall(r"accuracy'?:? \[?([\d., ]+)", done.out + done.err)
    assert found, done.out + done.err
    return float(found[-1].split(",")[-1].strip(" ]"))


def trained(python: Path | str, how: str, folder: Path, *, workers: int) -> dict[str, Tensor]:
    """The parameters after the same training, written for one adapter, by so many workers."""
    folder.mkdir()
    kept = folder / "parameters.safetensors"
    launch(python, folder, SCRIPT, how, str(16 // workers), str(kept), workers=workers)
    return load_file(kept)


@pytest.mark.parametrize("name", ["prepared", "fit"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_loop_of_ones_own(name: str, workers: int, tmp_path: Path) -> None:
    assert accuracy(sys.executable, name, tmp_path, workers=workers) > 0.85


@needs_packages
@pytest.mark.parametrize("name", ["lightning", "trainer"])
def test_the_loops_of_others(name: str, tmp_path: Path) -> None:
    assert accuracy(FOREIGN, name, tmp_path, workers=2) > 0.85


def test_loops_of_ones_own_compute_what_the_session_does(tmp_path: Path) -> None:
    native = trained(sys.executable, "native", tmp_path / "native", workers=1)
    for how in ("prepared", "wrapped"):
        assert_close(trained(sys.executable, how, tmp_path / how, workers=2), native)


def test_a_prepared_loop_may_accumulate(tmp_path: Path) -> None:
    one = trained(sys.executable, "accumulated", tmp_path / "one", workers=1)
    assert_close(trained(sys.executable, "accumulated", tmp_path / "two", workers=2), one)


@needs_packages
@pytest.mark.parametrize("how", ["lightning", "trainer"])
def test_two_workers_compute_what_one_does(how: str, tmp_path: Path) -> None:
    one = trained(FOREIGN, how, tmp_path / "one", workers=1)
    assert_close(trained(FOREIGN, how, tmp_path / "two", workers=2), one)
