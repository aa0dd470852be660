"""What holds for all tests: one thread per worker, and a test leaves the machine as it found it."""

import gc
import os
from collections.abc import Iterator

import pytest

# Sums of several threads round otherwise. Set before torch is imported, it holds for all threads of this process.
os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
# Hundreds of processes load the same modules; compiling ours each time would be a tenth of their start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

from tests import hygiene

FAILED = pytest.StashKey[bool]()
PROCESSES = pytest.StashKey[hygiene.Processes]()
THREADS_ONLY = ("unit", "contracts")  # whose tests say so if they start processes


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Faults and commands need processes; a unit or a contract that does is marked by hand."""
    for item in items:
        if item.path.parent.name not in THREADS_ONLY:
            item.add_marker("processes")


def pytest_collection_finish() -> None:
    """Modules stay for good: a collection that does not look at them is short."""
    hygiene.open_what_stays()
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before all fixtures: those of a module may start processes, too."""
    item.stash[PROCESSES] = hygiene.Processes.so_far()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed  # type: ignore[attr-defined]
    return report  # type: ignore[return-value]


@pytest.fixture(scope="module", autouse=True)
def module_leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """The fixtures of a module close what they open, too."""
    before, failed = hygiene.look(), request.session.testsfailed
    yield
    if request.session.testsfailed > failed:
        return
    left = hygiene.leftovers(before)
    assert not left, f"the fixtures of this module left behind: {'; '.join(left)}"


@pytest.fixture(autouse=True)
def leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """No process, thread, descriptor, socket, variable, segment or temporary file outlives its test."""
    before = hygiene.look()
    yield
    if request.node.stash.get(FAILED, False):
        return  # the traceback holds what the test had open, and the failure comes first
    left = hygiene.leftovers(before)
    assert not left, f"left behind: {'; '.join(left)}"
    if request.node.get_closest_marker("processes") is None:
        started = hygiene.started_since(request.node.stash[PROCESSES])
        assert not started, f"a test that starts processes is marked `processes`; this one ran {started}"
