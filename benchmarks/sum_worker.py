"""One process of a contender in summing: how each of them sums a vector, and one loop that times all alike."""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from processes import leave_result
from torch import Tensor

LEAST, MOST, ABOUT_S = 5, 500, 0.3  # repetitions per size: at least, at most, and until about so long


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A world of processes that can sum a vector in place."""

    rank: int
    size: int
    sum_: Callable[[Tensor], object]
    barrier: Callable[[], object]
    leave: Callable[[], object]
    vector: Callable[[int], Tensor] = torch.empty


def ours() -> Contender:
    """Vectors where our replicas have theirs: in the host's memory."""
    from manyhands.cluster.worker.world import join

    world = join()
    return Contender(
        rank=world.rank,
        size=world.size,
        sum_=world.comm.sum_,
        barrier=world.host.barrier,
        leave=world.close,
        vector=lambda length: world.comm.vector(length, torch.float32),
    )


def ours_ordinary() -> Contender:
    """Vectors in ordinary memory, which have to be copied in and out."""
    return replace(ours(), vector=torch.empty)


def gloo() -> Contender:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return Contender(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        sum_=dist.all_reduce,
        barrier=dist.barrier,
        leave=dist.destroy_process_group,
    )


def mpich() -> Contender:
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    return Contender(
        rank=comm.Get_rank(),
        size=comm.Get_size(),
        sum_=lambda vector: comm.Allreduce(MPI.IN_PLACE, vector.numpy(), MPI.SUM),
        barrier=comm.Barrier,
        leave=lambda: None,
    )


CONTENDERS = {"ours": ours, "ours-ordinary": ours_ordinary, "gloo": gloo, "mpich": mpich}


def measure(contender: Contender, size_bytes: int, quick: bool) -> dict[str, float]:
    """The median time of a sum of this size, as this process sees it."""
    vector = contender.vector(size_bytes // 4)
    check(contender, vector)
    trial = _timed(contender, vector)
    # All must repeat as often, so they agree: the mean of what each would do (whole numbers sum exactly).
    votes = torch.tensor([float(min(MOST, max(LEAST, int(ABOUT_S / trial))))])
    contender.sum_(votes)
    repetitions = 2 if quick else int(votes) // contender.size
    seconds = [_timed(contender, vector) for _ in range(repetitions)]
    total = contender.size * (contender.size + 1) / 2
    assert bool((vector == total).all()), f"wrong sum of {size_bytes} bytes after {repetitions} repetitions"
    return {"seconds": statistics.median(seconds), "repetitions": repetitions}


def check(contender: Contender, vector: Tensor) -> None:
    """A sum whose every element is known: part of it varies along the vector, part of it from rank to rank."""
    pattern = torch.arange(vector.numel(), dtype=torch.int32).remainder_(1021).float()
    torch.add(pattern, contender.rank, out=vector)
    contender.sum_(vector)
    pattern.mul_(contender.size).add_(sum(range(contender.size)))
    assert torch.equal(vector, pattern), f"wrong sum of {vector.nbytes} bytes"


def _timed(contender: Contender, vector: Tensor) -> float:
    vector.fill_(contender.rank + 1)  # as gradients are: just written, and finite
    contender.barrier()
    start = time.perf_counter()
    contender.sum_(vector)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--sizes", type=int, nargs="+", required=True, help="bytes")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    contender = CONTENDERS[options.contender]()
    found = {str(size): measure(contender, size, options.quick) for size in options.sizes}
    leave_result(options.folder, contender.rank, found)
    contender.leave()


if __name__ == "__main__":
    main()
