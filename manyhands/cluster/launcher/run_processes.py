"""Which processes of this host belong to a run, from what the kernel says of all processes.

Workers and servers write their records into the run's directory, and a launcher what they print: the kernel says which
process has these files open to write. Those that started them, and those that they started, belong to the run as well.
"""

import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from manyhands.cluster.launcher import invitation as invites
from manyhands.cluster.launcher.worker_logs import FOLDER
from manyhands.cluster.launchers import local
from manyhands.errors import UsageError

_PROC = Path("/proc")
_TORCHRUN = "TORCHELASTIC_RUN_ID"
# As the kernel shortens them: what stands between a person's shell and a worker that MPI or Slurm has started.
_FOREIGN = (
    "mpiexec",
    "mpirun",
    "mpiexec.hydra",
    "hydra_pmi_proxy",
    "prterun",
    "prted",
    "orted",
    "slurmstepd",
)

_File = tuple[int, int]  # device and inode


@dataclass(frozen=True, kw_only=True)
class RunProcess:
    """A process of this host, and what people call it."""

    pid: int
    name: str


def processes_of(run: Path) -> list[RunProcess]:
    """The processes of that run on this host; a network namespace is a host."""
    parents = {pid: _parent(pid) for pid in _all() if _is_here(pid)}
    names = _writers(run, parents)
    names |= _launchers(run, names, parents)
    children = defaultdict(list)
    for pid, parent in parents.items():
        children[parent].append(pid)
    # A foreign launcher may be a person's shell, or serve other runs: what it has started need not be the run's.
    pending = [pid for pid, name in names.items() if name.startswith(("worker", "server", "launcher"))]
    while pending:
        for child in children[pending.pop()]:
            if child not in names:
                names[child] = _command(child)
                pending.append(child)
    return [RunProcess(pid=pid, name=name) for pid, name in sorted(names.items())]


def _writers(run: Path, pids: dict[int, int]) -> dict[int, str]:
    """Who has files of the run open to write, by process id."""
    records, logs = (_identities((run / folder).glob(kind)) for folder, kind in _WRITTEN)
    names: dict[int, str] = {}
    for pid in pids:
        for descriptor, file in _open_files(pid):
            if file in records and _is_written(pid, descriptor):
                if records[file] != "launcher" or pid not in names:  # a worker may write for its host as well
                    names[pid] = records[file]
            elif file in logs and _is_written(pid, descriptor):
                names.setdefault(pid, "launcher")
    return names


_WRITTEN = (("events", "*.jsonl"), (FOLDER, "*.log"))


def _identities(paths: Iterator[Path]) -> dict[_File, str]:
    """`worker-3.jsonl` is of worker 3; what a host uses is written by its launcher, if it has one of ours."""
    found: dict[_File, str] = {}
    for path in paths:
        with suppress(OSError):
            status = path.stat()
            name = path.stem.replace("-", " ")
            found[status.st_dev, status.st_ino] = "launcher" if name.startswith("host ") else name
    return found


def _launchers(run: Path, names: dict[int, str], parents: dict[int, int]) -> dict[int, str]:
    """The processes that have started those."""
    found = {}
    with suppress(UsageError):
        invite = invites.read(str(run))
        if invite.is_here and not invite.is_over():
            found[invite.launcher] = "launcher"
    for pid in names:
        environ = _environ(pid)
        ours = environ.get(local.LAUNCHER_PID, "")
        if ours.isdecimal() and int(ours) in parents:
            found[int(ours)] = "launcher"
        elif _TORCHRUN in environ and parents[pid] in parents:
            found[parents[pid]] = "torchrun"
        above = parents[pid]
        while above in parents and _command(above) in _FOREIGN:
            found[above] = _command(above)
            above = parents[above]
    return {pid: name for pid, name in found.items() if names.get(pid, "launcher") == "launcher"}


# What the kernel says of a process; of one that ends meanwhile, or of another user, nothing


def _all() -> Iterator[int]:
    return (int(name) for name in os.listdir(_PROC) if name.isdecimal() and int(name) != os.getpid())


def _is_here(pid: int) -> bool:
    with suppress(OSError):
        return os.readlink(_PROC / str(pid) / "ns/net") == os.readlink(_PROC / "self/ns/net")
    return False


def _open_files(pid: int) -> Iterator[tuple[str, _File]]:
    folder = _PROC / str(pid) / "fd"
    with suppress(OSError):
        for descriptor in os.listdir(folder):
            with suppress(OSError):
                if os.readlink(folder / descriptor).endswith((".jsonl", ".log")):
                    status = os.stat(folder / descriptor)
                    yield descriptor, (status.st_dev, status.st_ino)


def _is_written(pid: int, descriptor: str) -> bool:
    for line in _text(pid, f"fdinfo/{descriptor}").splitlines():
        if line.startswith("flags:"):
            return int(line.split()[1], 8) & os.O_ACCMODE != os.O_RDONLY
    return False


def _parent(pid: int) -> int:
    words = _text(pid, "stat").rpartition(")")[2].split()
    return int(words[1]) if len(words) > 1 else 0


def _command(pid: int) -> str:
    return _text(pid, "comm").strip()


def _environ(pid: int) -> dict[str, str]:
    entries = (entry.partition("=") for entry in _text(pid, "environ").split("\0"))
    return {name: value for name, _, value in entries}


def _text(pid: int, name: str) -> str:
    with suppress(OSError):
        return (_PROC / str(pid) / name).read_text(errors="replace")
    return ""
