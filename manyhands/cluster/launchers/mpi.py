"""MPI: `mpiexec` of MPICH (and its relatives) or of Open MPI.

MPI names no meeting place for anything besides MPI itself, so rank 0 picks one and tells the others.
"""

import socket
from collections.abc import Mapping

from manyhands.cluster.launchers import slurm
from manyhands.cluster.launchers.addresses import hold_port, outward_address
from manyhands.cluster.launchers.host_identity import host_identity
from manyhands.cluster.launchers.rank_info import RankInfo, master, whole_number
from manyhands.errors import UsageError

_VARIABLES = (("PMI_RANK", "PMI_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"))


def detect(environ: Mapping[str, str]) -> RankInfo | None:
    """The rank info that mpiexec gave, if it did; with more than one worker all of them must ask."""
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
    world.Allgather(host_identity().encode()[:64].ljust(64), hosts)
    one_host = all(hosts[64 * other : 64 * other + 64] == hosts[:64] for other in range(size))
    place = bytearray(256)
    if rank == 0:
        address = "127.0.0.1" if one_host else _address()
        text = f"{address}:{hold_port(address if one_host else '')}".encode()
        place[: len(text)] = text
    world.Bcast(place, root=0)
    return place.rstrip(b"\0").decode()


def _address() -> str:
    """This host's address as others see it."""
    try:
        return outward_address()
    except UsageError:
        return socket.gethostname()
