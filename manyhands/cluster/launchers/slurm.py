"""Slurm: `srun` starts one process per task and names the hosts of the step."""

from collections.abc import Mapping

from manyhands.cluster.launchers.rank_info import RankInfo, master, whole_number
from manyhands.errors import UsageError

# Real steps count from 0; numbers from here up stand for batch scripts, interactive shells and the like.
_FIRST_RESERVED_STEP = 0xFFFFFFF0

# Below the range from which Linux hands out ports by itself.
_FIRST_PORT, _PORTS = 20000, 12000


def in_step(environ: Mapping[str, str]) -> bool:
    """Whether `srun` started this process; the shell that `salloc` or `sbatch` opens is not a step."""
    if not {"SLURM_STEP_ID", "SLURM_PROCID"} <= environ.keys():
        return False
    return whole_number(environ, "SLURM_STEP_ID") < _FIRST_RESERVED_STEP


def detect(environ: Mapping[str, str]) -> RankInfo | None:
    """The rank info of a task of a Slurm step, if this is one."""
    if not in_step(environ):
        return None
    rank, size = whole_number(environ, "SLURM_PROCID"), whole_number(environ, "SLURM_NTASKS")
    store = (master(environ) or _meeting_place(environ)) if size > 1 else None
    return RankInfo(rank=rank, size=size, launcher="slurm", store=store, serves=size > 1 and rank == 0)


def _meeting_place(environ: Mapping[str, str]) -> str:
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST")
    if not nodes:
        raise UsageError(
            "neither SLURM_STEP_NODELIST nor SLURM_JOB_NODELIST is set, so rank 0 cannot be found; "
            "set MASTER_ADDR and MASTER_PORT."
        )
    # Every task computes the same port; steps of one job that run side by side get different ones.
    job, step = whole_number(environ, "SLURM_JOB_ID"), whole_number(environ, "SLURM_STEP_ID")
    return f"{expand(nodes)[0]}:{_FIRST_PORT + (job * 10 + step) % _PORTS}"


def expand(nodes: str) -> list[str]:
    """Slurm's short form of host names, written out.

    >>> expand("node[01-03,7],other")
    ['node01', 'node02', 'node03', 'node7', 'other']
    """
    try:
        return [host for item in _split_outside_brackets(nodes) for host in _expand_item(item)]
    except ValueError:
        raise UsageError(
            f"cannot read the Slurm host list {nodes!r}; expected a form like node[01-03,7],other. "
            "Set MASTER_ADDR and MASTER_PORT instead."
        ) from None


def _split_outside_brackets(text: str) -> list[str]:
    items, depth = [""], 0
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            raise ValueError(text)
        if letter == "," and depth == 0:
            items.append("")
        else:
            items[-1] += letter
    if depth or not all(items):
        raise ValueError(text)
    return items


def _expand_item(item: str) -> list[str]:
    head, bracket, rest = item.partition("[")
    if not bracket:
        return [item]
    inside, _, tail = rest.partition("]")
    tails = _expand_item(tail)
    return [head + number + end for number in _numbers(inside) for end in tails]


def _numbers(inside: str) -> list[str]:
    numbers: list[str] = []
    for piece in inside.split(","):
        first, dash, last = piece.partition("-")
        last = last if dash else first
        # The width of the first number is the width of all: 01-03 is 01, 02, 03.
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    if not numbers:
        raise ValueError(inside)
    return numbers
