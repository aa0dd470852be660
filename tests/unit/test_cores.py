"""Cores are divided as the machine allows, and control-group limits are found wherever they are set."""

import os
from pathlib import Path

import pytest

from manyhands.cluster.launcher import cores
from manyhands.errors import UsageError


@pytest.mark.parametrize(
    ("workers", "threads", "usable", "shares"),
    [
        (2, None, [0, 1], ((0,), (1,))),
        (1, None, [0, 1], ((0, 1),)),
        (2, None, [2, 3, 6, 7, 9], ((2, 3), (6, 7))),
        (2, 1, [0, 1, 2, 3], ((0,), (1,))),
    ],
)
def test_enough_cores_are_divided_without_overlap(
    workers: int, threads: int | None, usable: list[int], shares: tuple[tuple[int, ...], ...]
) -> None:
    assert cores.divide(workers, threads, usable, None).cores == shares


@pytest.mark.parametrize(("workers", "threads", "expected"), [(3, None, 1), (2, 2, 2)])
def test_too_few_cores_pin_nobody(workers: int, threads: int | None, expected: int) -> None:
    layout = cores.divide(workers, threads, [0, 1], None)
    assert layout.cores == ((),) * workers
    assert layout.threads == expected


def test_a_quota_below_the_cores_sets_the_threads_and_pins_nobody() -> None:
    layout = cores.divide(2, None, list(range(16)), 5.5)
    assert layout.threads == 2
    assert layout.cores == ((), ())
    assert "5.5 of 16 cores" in cores.text(layout)


def test_a_quota_above_the_cores_changes_nothing() -> None:
    assert cores.divide(2, None, [0, 1], 8.0) == cores.divide(2, None, [0, 1], None)


def test_text() -> None:
    text = [
        cores.text(cores.divide(workers, None, usable, None))
        for workers, usable in [(2, [0, 1]), (1, [0, 1, 2, 5]), (3, [0, 1]), (1, [4])]
    ]
    assert text == [
        "2 workers × 1 thread, pinned to cores 0 | 1",
        "1 worker × 4 threads, pinned to cores 0-2,5",
        "3 workers × 1 thread, not pinned (3 threads share 2 cores)",
        "1 worker × 1 thread, pinned to core 4",
    ]


@pytest.mark.parametrize(("workers", "threads"), [(0, None), (-1, None), (1, 0)])
def test_nonsense_is_refused(workers: int, threads: int | None) -> None:
    with pytest.raises(UsageError, match="at least 1"):
        cores.layout(workers, threads)


def test_this_machine_gives_only_cores_that_it_may_use() -> None:
    layout = cores.layout(1)
    assert set(layout.cores[0]) <= os.sched_getaffinity(0)
    assert 1 <= layout.threads <= len(os.sched_getaffinity(0))


def test_version_2_limit_of_a_group_or_any_above_it(tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("0::/pod/container\n")
    inner = tmp_path / "fs" / "pod" / "container"
    inner.mkdir(parents=True)
    (inner / "cpu.max").write_text("max 100000\n")
    assert cores.quota_cores(tmp_path / "cgroup", tmp_path / "fs") is None
    (inner.parent / "cpu.max").write_text("150000 100000\n")
    assert cores.quota_cores(tmp_path / "cgroup", tmp_path / "fs") == 1.5


def test_version_1_limit(tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("5:devices:/\n3:cpu,cpuacct:/job\n0::/\n")
    group = tmp_path / "fs" / "cpu" / "job"
    group.mkdir(parents=True)
    (group / "cpu.cfs_quota_us").write_text("300000\n")
    (group / "cpu.cfs_period_us").write_text("100000\n")
    assert cores.quota_cores(tmp_path / "cgroup", tmp_path / "fs") == 3.0
    (group / "cpu.cfs_quota_us").write_text("-1\n")
    assert cores.quota_cores(tmp_path / "cgroup", tmp_path / "fs") is None


def test_a_path_that_leads_nowhere_falls_back_to_the_root(tmp_path: Path) -> None:
    (tmp_path / "cgroup").write_text("0::/docker/abc\n")
    (tmp_path / "cpu.max").write_text("200000 100000\n")
    assert cores.quota_cores(tmp_path / "cgroup", tmp_path) == 2.0
    assert cores.quota_cores(tmp_path / "missing", tmp_path) is None
