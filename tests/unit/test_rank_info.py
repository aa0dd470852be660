"""Every launcher's variables lead to the same kind of rank info; two launchers are asked for real."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from manyhands.cluster.launchers import slurm
from manyhands.cluster.launchers.detect import find_rank_info
from manyhands.cluster.launchers.rank_info import RankInfo
from manyhands.errors import UsageError

SLURM = {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "2",
    "SLURM_NTASKS": "4",
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_NODELIST": "gpu[07-09],login",
}
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}


def test_alone() -> None:
    assert find_rank_info({}) == RankInfo(rank=0, size=1, launcher="alone")


def test_our_own_supervisor() -> None:
    environ = {"MANYHANDS_RANK": "1", "MANYHANDS_SIZE": "2", "MANYHANDS_ARENA_FD": "7"}
    assert find_rank_info(environ) == RankInfo(
        rank=1, size=2, number=1, most_workers=2, launcher="manyhands", arena_fd=7
    )
    spread = {"MANYHANDS_RANK": "0", "MANYHANDS_SIZE": "2", "MANYHANDS_STORE": "10.77.0.1:4000"}
    assert find_rank_info(spread) == RankInfo(
        rank=0,
        size=2,
        number=0,
        most_workers=2,
        launcher="manyhands",
        store="10.77.0.1:4000",
        serves=True,
    )
    assert not find_rank_info({**spread, "MANYHANDS_RANK": "1"}).serves


def test_ours_wins_over_the_cluster_it_runs_in() -> None:
    assert find_rank_info({**SLURM, "MANYHANDS_RANK": "0", "MANYHANDS_SIZE": "1"}).launcher == "manyhands"


def test_torchrun_agent_serves_the_store() -> None:
    agent = {"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert find_rank_info({**TORCHRUN, **agent}) == RankInfo(
        rank=0, size=2, launcher="torchrun", store="node1:29500"
    )


def test_plain_variables_make_rank_0_serve() -> None:
    assert find_rank_info(TORCHRUN).serves
    assert not find_rank_info({**TORCHRUN, "RANK": "1"}).serves
    assert find_rank_info({"RANK": "0", "WORLD_SIZE": "1"}) == RankInfo(rank=0, size=1, launcher="torchrun")


def test_a_lone_rank_variable_is_nobody() -> None:
    assert find_rank_info({"RANK": "3"}).launcher == "alone"


def test_slurm_step() -> None:
    rank_info = find_rank_info(SLURM)
    assert (rank_info.rank, rank_info.size, rank_info.launcher, rank_info.serves) == (2, 4, "slurm", False)
    assert rank_info.store is not None
    host, _, port = rank_info.store.rpartition(":")
    assert host == "gpu07"
    assert 20000 <= int(port) < 32000
    first = find_rank_info({**SLURM, "SLURM_PROCID": "0"})
    assert first.serves
    assert first.store == rank_info.store
    assert find_rank_info({**SLURM, "SLURM_STEP_ID": "1"}).store != rank_info.store


def test_a_slurm_allocation_is_not_a_step() -> None:
    shell = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"}
    assert find_rank_info(shell).launcher == "alone"
    assert find_rank_info({**SLURM, "SLURM_STEP_ID": str(0xFFFFFFFA)}).launcher == "alone"


def test_srun_that_also_sets_the_variables_of_mpi_is_slurm() -> None:
    assert find_rank_info({**SLURM, "PMI_RANK": "2", "PMI_SIZE": "4"}).launcher == "slurm"


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("one", ["one"]),
        ("node[01-03,7],other", ["node01", "node02", "node03", "node7", "other"]),
        ("a[1-2]b[3-4],c-9", ["a1b3", "a1b4", "a2b3", "a2b4", "c-9"]),
        ("n[099-101]-ib", ["n099-ib", "n100-ib", "n101-ib"]),
    ],
)
def test_host_lists(text: str, hosts: list[str]) -> None:
    assert slurm.expand(text) == hosts


@pytest.mark.parametrize("text", ["", "a[1-", "a]1[", "a[x-y]", "a,,b", "a[]", "a[3-1]"])
def test_unreadable_host_lists_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="host list"):
        slurm.expand(text)


@pytest.mark.parametrize("prefix", ["PMI_", "OMPI_COMM_WORLD_"])
def test_mpi_with_a_named_meeting_place(prefix: str) -> None:
    environ = {f"{prefix}RANK": "0", f"{prefix}SIZE": "2", "MASTER_ADDR": "head", "MASTER_PORT": "4000"}
    assert find_rank_info(environ) == RankInfo(rank=0, size=2, launcher="mpi", store="head:4000", serves=True)


def test_mpi_alone_needs_nothing() -> None:
    assert find_rank_info({"PMI_RANK": "0", "PMI_SIZE": "1"}) == RankInfo(rank=0, size=1, launcher="mpi")


@pytest.mark.parametrize(
    ("environ", "numbers"),
    [
        ({"MANYHANDS_RANK": "2", "MANYHANDS_SIZE": "2"}, "rank 2 of 2"),
        ({"MANYHANDS_RANK": "0"}, "MANYHANDS_SIZE is not set"),
        ({"MANYHANDS_RANK": "zero", "MANYHANDS_SIZE": "2"}, "MANYHANDS_RANK='zero'"),
        ({**TORCHRUN, "RANK": "5"}, "rank 5 of 2"),
        ({**TORCHRUN, "MASTER_PORT": "99999"}, "99999"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "WORLD_SIZE=2 .* MASTER_ADDR"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, "MASTER_ADDR is not"),
        ({"PMI_RANK": "-1", "PMI_SIZE": "2"}, "rank -1 of 2"),
        ({**SLURM, "SLURM_PROCID": "4"}, "rank 4 of 4"),
        ({**SLURM, "SLURM_NTASKS": "many"}, "SLURM_NTASKS='many'"),
    ],
)
def test_inconsistent_variables_are_refused_with_the_numbers(environ: dict[str, str], numbers: str) -> None:
    with pytest.raises(UsageError, match=numbers):
        find_rank_info(environ)


@pytest.mark.processes
def test_finding_rank_info_does_not_import_torch() -> None:
    code = (
        "import sys; from manyhands.cluster.worker import entry;"
        "from manyhands.cluster.launchers import detect;"
        "from manyhands.cluster.launcher import cores, supervisor;"
        "from manyhands.lab import emulated_hosts;"
        "detect.find_rank_info({}); sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# Each rank says in one write which one it is, and the others' lines must agree with it.
SAY = """
import os, sys
from manyhands.cluster.launchers.detect import find_rank_info
info = find_rank_info()
os.write(1, f"{info.rank} {info.size} {info.launcher} {info.serves} {info.store}\\n".encode())
"""


def _say(tmp_path: Path, *launcher: str) -> list[list[str]]:
    script = tmp_path / "say.py"
    script.write_text(SAY)
    ours = ("MANYHANDS_", "PMI_", "OMPI_", "SLURM_", "TORCHELASTIC_", "RANK", "WORLD_SIZE", "MASTER_")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    done = subprocess.run(
        [*launcher, str(script)], env=environ, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return [line.split() for line in sorted(done.stdout.splitlines())]


def _tool(name: str) -> str:
    path = Path(sys.executable).parent / name
    if not path.exists():
        pytest.skip(f"{name} is not installed beside this Python")
    return str(path)


@pytest.mark.processes
def test_real_mpiexec(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    first, second = _say(tmp_path, _tool("mpiexec"), "-n", "2", sys.executable)
    assert first[:4] == ["0", "2", "mpi", "True"]
    assert second[:4] == ["1", "2", "mpi", "False"]
    assert first[4] == second[4]
    assert first[4].startswith("127.0.0.1:")


@pytest.mark.processes
def test_real_torchrun(tmp_path: Path) -> None:
    first, second = _say(tmp_path, _tool("torchrun"), "--standalone", "--nproc-per-node=2")
    assert first[:4] == ["0", "2", "torchrun", "False"]
    assert second[:4] == ["1", "2", "torchrun", "False"]
    assert first[4] == second[4]
    assert int(first[4].rpartition(":")[2]) > 0
