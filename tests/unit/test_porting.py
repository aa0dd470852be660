"""Patches of public scripts: applied, counted and judged. The scripts here are written for the test."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from line_edits import apply, blob_hash, count, parse, readable
from ported_scripts import DDP, OURS, SCRIPTS
from porting_cells import FAILED, REFUSED, RUNS, classify

# The source has no newline at its end, as some of the real ones.
SOURCE = "import torch\n\nmodel = make()\nfor batch in loader:\n    step(batch)\n    show()\ndone()"
PORTED = (
    "import torch\nimport ours\n\nmodel = make()\nfor batch in share(loader):\n    show()\ndone()\nend()\n"
)


# As `diff -e` prints it.
PATCH = """7a
end()
.
5d
4c
for batch in share(loader):
.
1a
import ours
.
"""


def test_a_patch_makes_what_it_was_made_of() -> None:
    source = SOURCE.encode()
    assert apply(source, PATCH, blob_hash(source)) == PORTED
    assert "+import ours" in readable(source, PORTED, "train.py")


def test_a_patch_has_no_line_of_the_source() -> None:
    added = [line for edit in parse(PATCH) for line in edit.added]
    assert not set(added) & set(SOURCE.splitlines())


def test_a_changed_line_counts_once() -> None:
    found = count(PATCH)
    assert (found.removed, found.added, found.lines) == (2, 3, 3)


def test_another_source_is_refused() -> None:
    other = SOURCE.replace("make()", "load()").encode()
    with pytest.raises(ValueError, match="the source has the hash"):
        apply(other, PATCH, blob_hash(SOURCE.encode()))


@pytest.mark.parametrize("patch", ["3d\n4d\n", "99d\n", "what\n"])
def test_a_wrong_patch_is_refused(patch: str) -> None:
    source = SOURCE.encode()
    with pytest.raises(ValueError):
        apply(source, patch, blob_hash(source))


def test_the_hash_is_that_of_git() -> None:
    assert blob_hash(b"hello\n") == "ce013625030ba8dba906f756967f9e9ca394464a"


@pytest.mark.parametrize("entry", SCRIPTS, ids=lambda entry: entry.name)
def test_a_port_is_short_and_no_longer_than_the_ddp_form(entry: object) -> None:
    ours, ddp = (count(entry.patch(form) or "") for form in (OURS, DDP))  # type: ignore[attr-defined]
    assert 0 < ours.lines <= 12
    assert entry.is_for_ddp or ours.lines <= ddp.lines  # type: ignore[attr-defined]


REFUSAL = "[worker 0] starts\nerror: train.py, line 3: this needs the whole model; use session.step\n"


def test_what_became_of_a_run() -> None:
    assert classify(0, "", 20, [1.0]).kind == RUNS
    assert classify(2, REFUSAL, 0, []).kind == REFUSED
    assert classify(2, REFUSAL, 0, []).says.startswith("train.py, line 3")


@pytest.mark.parametrize(
    ("code", "output", "steps", "losses"),
    [
        (0, "", 0, []),
        (0, "", 20, [1.0, float("nan")]),
        (2, REFUSAL, 3, [1.0]),
        (1, "Traceback (most recent call last):\nKeyError: 'outputs'\n" + REFUSAL, 0, []),
        (-15, "did not end within 240 s\n", 9, [1.0]),
    ],
)
def test_what_is_neither_a_run_nor_a_refusal_has_failed(
    code: int, output: str, steps: int, losses: list[float]
) -> None:
    assert classify(code, output, steps, losses).kind == FAILED
