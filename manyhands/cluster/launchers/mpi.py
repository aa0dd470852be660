"""MPI: `mpiexec` of MPICH (and its relatives) or of Open MPI.

MPI names no meeting place for anything besides MPI itself, so rank 0 picks one and tells the others.
"""

import os
import socket
from collections.abc import Mapping
from pathlib import Path

from manyhands.cluster.launchers import slurm
from manyhands.cluster.worker.addresses import hold_port
from manyhands.cluster.worker.rank_info import RankInfo, master, whole_number
from manyhands.errors import UsageError

_VARIABLES = (("PMI_RANK", "PMI_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"))


def detect(environ: Mapping[str, str]) -> RankInfo | None:
    """The seat that mpiexec gave, if it did; with more than one worker all of them must ask."""
    names = next((names for names in _VARIABLES if names[0] in environ), None)
    if names is None:
        return None
    rank, size = (whole_number(environ, name) for name in names)
    # Many clusters have srun set MPI's variables for every step; then Slurm knows all that we need.
    if slurm.in_step(environ) and environ.get("SLURM_NTASKS") == str(size):
        return None
    rank_info = RankInfo(rank=rank, size=size, launcher="mpi")
    if size == 1:
        return rank_info
    store = master(environ) or _agree(rank, size)
    return RankInfo(rank=rank, size=size, launcher="mpi", store=store, serves=rank == 0)


def _agree(rank: int, size: int) -> str:
    """Rank 0's address and a free port of its host, by a broadcast of bytes."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # mpi4py raises RuntimeError if no MPI library can be loaded
        raise UsageError(
            f"mpiexec started {size} workers, which need mpi4py to agree where to meet ({error}); "
            "install manyhands[mpi], or set MASTER_ADDR and MASTER_PORT."
        ) from None
    world = MPI.COMM_WORLD
    if world.Get_size() != size:
        raise UsageError(
            f"mpiexec started {size} workers but mpi4py sees {world.Get_size()}: it uses another MPI "
            "than this mpiexec. Use the mpiexec of that MPI, or set MASTER_ADDR and MASTER_PORT."
        )
    hosts = bytearray(64 * size)
    world.Allgather(_host_mark(), hosts)
    one_host = all(hosts[64 * other : 64 * other + 64] == hosts[:64] for other in range(size))
    place = bytearray(256)
    if rank == 0:
        text = f"{'127.0.0.1' if one_host else _address()}:{hold_port('')}".encode()
        place[: len(text)] = text
    world.Bcast(place, root=0)
    return place.rstrip(b"\0").decode()


def _host_mark() -> bytes:
    """64 bytes that are equal exactly where 127.0.0.1 leads to the same place."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/net')}".encode()[:64].ljust(64)


def _address() -> str:
    """This host's address as others see it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Connecting a datagram socket sends nothing; it only asks which address the route out uses.
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return socket.gethostname()
        return str(probe.getsockname()[0])
