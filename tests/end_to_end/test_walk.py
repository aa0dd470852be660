"""The way of a batch through the house stays short."""

import re
from pathlib import Path

import pytest

from tests import walking
from tests.end_to_end.commands import manyhands


@pytest.mark.parametrize(
    ("flags", "files", "returns"),
    [
        (["--workers", "2", "--strategy", "all-reduce"], 31, 88),
        (["--workers", "2", "--servers", "1", "--strategy", "parameter-server:async"], 33, 95),
        (["--workers", "2", "--strategy", "local-sgd"], 29, 60),
        (["--workers", "1"], 25, 58),
    ],
    ids=["all-reduce", "async-servers", "local-sgd", "alone"],
)
def test_a_step_visits_few_files(flags: list[str], files: int, returns: int, tmp_path: Path) -> None:
    done = manyhands("launch", *flags, str(Path(walking.__file__)), cwd=tmp_path)
    assert done.code == 0, done.err
    found = re.search(r"walk: (\d+) files, (\d+) returns", done.out)
    assert found, done.out
    assert int(found[1]) <= files
    assert int(found[2]) <= returns
