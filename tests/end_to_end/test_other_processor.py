"""On a processor other than x86-64, one worker per host trains, with servers too, and two are refused."""

import json
from pathlib import Path

import pytest

from tests.end_to_end.commands import BIN, Done, clean_environment, run

pytestmark = pytest.mark.processes


def on_arm(folder: Path, *options: str) -> Done:
    """Every process of the run takes its processor for another one, from its start."""
    (folder / "sitecustomize.py").write_text("import platform\nplatform.machine = lambda: 'aarch64'\n")
    command = [str(BIN / "manyhands"), "train", "--steps", "3", "--json", "--out", "run", *options]
    return run(command, folder, clean_environment(PYTHONPATH=str(folder)))


@pytest.mark.parametrize("options", ["", "--servers 1 --strategy parameter-server"])
def test_one_worker_trains(options: str, tmp_path: Path) -> None:
    done = on_arm(tmp_path, "--workers", "1", *options.split())
    assert done.code == 0, done.err
    assert json.loads(done.out)["steps"] == 3


def test_two_are_refused_with_the_way_out(tmp_path: Path) -> None:
    assert (
        on_arm(tmp_path)
        .refusal()
        .endswith("use 1 worker per host here (--workers 1), whose threads use all cores")
    )
