"""Every command on a page runs: block by block, line after line, as a person types them in this directory.

What makes a line short is added to it: a few steps, one epoch, large batches. `NOT_HERE` has the lines that do not run
here, with the reason and, where there is one, the test that runs them; every other line runs.
"""

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.end_to_end.commands import BIN, clean_environment, manyhands
from tests.end_to_end.made_up_data import cifar10
from tests.pages import PAGES, ROOT, Block, blocks

pytestmark = pytest.mark.processes

PATIENCE_S = 240  # a few seconds on an idle machine; a large model on a busy one takes minutes
ALL = [block for page in PAGES for block in blocks(page)]
SHELL = [block for block in ALL if block.language == "sh"]
SPECS = [block for block in ALL if block.language == "toml"]

# The beginning of a line: why it does not run here, and which file of tests runs it instead.
NOT_HERE = {
    "make train": ("installs from the network", "end_to_end/test_wheel.py"),
    "make docs": ("has tests of its own", "end_to_end/test_docs_site.py"),
    "make bench-check": ("takes minutes", "end_to_end/test_benchmarks.py"),
    "make numbers": ("writes into the checkout", "unit/test_numbers.py"),
    "make help": ("only prints", "unit/test_readme.py"),
    "make chaos": ("takes an hour", "faults/test_chaos.py"),
    "make soak": ("takes half an hour", "end_to_end/test_benchmarks.py"),
    "make test": ("is what runs this", "end_to_end/test_page_commands.py"),
    "make test-fast": ("is a part of `make test`", "end_to_end/test_page_commands.py"),
    "make lint": ("is for the checkout, not for a behaviour", None),
    "make bench": ("takes half an hour", "end_to_end/test_benchmarks.py"),
    ".venv/bin/pre-commit install": ("changes the checkout", None),
    "manyhands launch --workers 2 examples/lightning_digits.py": (
        "needs Lightning",
        "end_to_end/test_adapters.py",
    ),
    "manyhands launch --workers 2 examples/trainer_digits.py": (
        "needs Hugging Face",
        "end_to_end/test_adapters.py",
    ),
    "manyhands launch --workers 2:6 --out runs/mine examples/digits.py": (
        "waits for the next line",
        "faults/test_loading.py",
    ),
    "manyhands launch --join runs/mine  ": ("joins in the middle of a run", "faults/test_loading.py"),
    "manyhands probe": ("measures for twenty seconds", "end_to_end/test_probing.py"),
    "manyhands train --strategy auto": ("measures for twenty seconds", "end_to_end/test_probing.py"),
    "manyhands launch --join runs/links": ("joins in the middle of a run", "end_to_end/test_probing.py"),
}


# A page that shows one of them has the other in another block, or on another page.
HOST = "manyhands launch --hosts 2@10.0.0.1 --workers 1 --out runs/mine examples/digits.py"
JOIN = "manyhands launch --join runs/mine --workers 1"


def elsewhere(line: str) -> bool:
    return any(line == start or line.startswith(f"{start} ") for start in NOT_HERE)


def lines(block: Block) -> list[str]:
    return [line for line in block.text.splitlines() if line and not elsewhere(line)]


RUN_HERE = [block for block in SHELL if lines(block)]


def shortened(line: str, number: int) -> list[str]:
    """The words, and what makes the run short; each line of a block may go on where the one before has stopped."""
    words = shlex.split(line.replace("10.0.0.1", "127.0.0.1"), comments=True)
    if "train" in words:
        words += ["--steps", str(2 * number + 2)]
        if any(
            word.startswith("synthetic:") for word in words
        ):  # large models: few samples, and nothing saved
            words = [f"{word},samples=64" if word.startswith("synthetic:") else word for word in words]
            words += ["--batch", "8", "--save-every", "never"]
    elif "examples/digits.py" in words or "examples.digits" in words:
        is_long = "--epochs" not in words or int(words[words.index("--epochs") + 1]) > 10
        words += ["--batch", "256", *(["--epochs", "1"] if is_long else [])]
    return words


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A directory that looks like the checkout, in which runs may leave what they like."""
    for name in ("README.md", "docs", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    cifar10(tmp_path / "data")
    return tmp_path


def start(words: list[str], home: Path, said: Path) -> subprocess.Popen[bytes]:
    """A command of ours, in a group of its own, so that nothing of it stays."""
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    environ = clean_environment(
        PATH=path, MANYHANDS_DATA=str(home / "data"), XDG_CACHE_HOME=str(home / "cache")
    )
    with said.open("w") as file:
        return subprocess.Popen(
            words, cwd=home, env=environ, stdin=subprocess.DEVNULL, stdout=file, stderr=file, process_group=0
        )


def run_together(commands: list[list[str]], home: Path) -> None:
    """Each on what is a host of its own to it; the second when the first has said how to join."""
    started: list[tuple[subprocess.Popen[bytes], Path]] = []
    until = time.monotonic() + PATIENCE_S
    try:
        for number, words in enumerate(commands):
            if "--join" in words:
                while not (home / "runs" / "mine" / "join.json").exists():
                    assert time.monotonic() < until, started[0][1].read_text()
                    time.sleep(0.05)
            said = home / f"said-{number}"
            started.append((start(words, home, said), said))
        for command, said in started:
            code = command.wait(max(1.0, until - time.monotonic()))
            assert code == 0, said.read_text()
    finally:
        for command, _ in started:
            if command.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(command.pid, signal.SIGKILL)
                command.wait()


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def sets(words: list[list[str]]) -> list[list[list[str]]]:
    """Commands that belong together run at once: a run on several hosts is one command on each."""
    if any("--hosts" in one or "--join" in one for one in words):
        first = [one for one in words if "--hosts" in one] or [shortened(HOST, 0)]
        joining = [one for one in words if "--join" in one] or [shortened(JOIN, 1)]
        return [[*first, *joining]]
    if any("--node-rank" in one for one in words):
        port = ["--master-port", free_port()]
        ranks = [one for one in words if "--node-rank" in one]
        rest = [[one] for one in words if one not in ranks]
        return [[[one[0], *port, *one[1:]] for one in ranks], *rest]
    return [[one] for one in words]


@pytest.mark.timeout(900)  # a block may have ten lines
@pytest.mark.parametrize("block", RUN_HERE, ids=str)
def test_the_commands_of_a_block_run(block: Block, home: Path) -> None:
    words = [shortened(line, number) for number, line in enumerate(lines(block))]
    if "--resume" in words[0]:
        done = manyhands("train", "--out", "runs/mine", "--steps", "1", cwd=home)
        assert done.code == 0, done.err
    for together in sets(words):
        run_together(together, home)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("block", SPECS, ids=str)
def test_a_spec_file_runs(block: Block, home: Path) -> None:
    (home / "job.toml").write_text(block.text)
    run_together([["manyhands", "train", "job.toml", "--steps", "2", "--out", "run"]], home)


def test_what_does_not_run_here_runs_where_it_says() -> None:
    typed = [line for block in SHELL for line in block.text.splitlines()]
    for beginning, (reason, file) in NOT_HERE.items():
        assert any(line.startswith(beginning) for line in typed), f"no page has {beginning!r} any more"
        assert reason
        assert file is None or (ROOT / "tests" / file).exists()
