"""One process of a contender in training: how each of them does a step, and one loop that times all alike."""

import argparse
import os
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from jobs import ALL, build, loss, make_batches
from processes import leave_result
from torch import nn
from torch.optim import Optimizer
from turns import follow

Step = Callable[[Any], float]


def ours(model: nn.Module, optimizer: Optimizer, strategy: str | None) -> tuple[int, Step]:
    import manyhands as mh

    session = mh.session(model, optimizer, loss, strategy=strategy)
    return session.rank, session.step


def ddp(model: nn.Module, optimizer: Optimizer) -> tuple[int, Step]:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    replica = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return dist.get_rank(), _loop(replica, optimizer)


def rpc(model: nn.Module, optimizer: Optimizer) -> tuple[int, Step]:
    import rpc_peer

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank == size - 1:
        rpc_peer.serve(model, optimizer, rank, size)
        sys.exit()
    return rank, rpc_peer.join(loss, rank, size)


def plain(model: nn.Module, optimizer: Optimizer) -> tuple[int, Step]:
    return int(os.environ["RANK"]), _loop(model, optimizer)


def _loop(model: nn.Module, optimizer: Optimizer) -> Step:
    """The step that PyTorch's tutorials teach."""

    def step(batch: Any) -> float:
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        return value.item()

    return step


PEERS = {"ddp": ddp, "rpc": rpc, "plain": plain}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("contender", choices=["ours", *PEERS])
    parser.add_argument("--strategy", help="for ours; the default where not given")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--job", choices=ALL, required=True)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=1, help="where it has no turns")
    parser.add_argument("--baton", help="where it hears that it is its turn")
    parser.add_argument("--keep-memory", action="store_true")
    options = parser.parse_args()
    if options.keep_memory:
        from manyhands.cluster.worker.heap import keep_freed_memory

        keep_freed_memory()
    job = ALL[options.job]
    model, optimizer = build(job)
    if options.contender == "ours":
        rank, step = ours(model, optimizer, options.strategy)
    else:
        rank, step = PEERS[options.contender](model, optimizer)
    batches = make_batches(job, options.batch, rank)
    losses: list[float] = []

    def run(steps: int) -> dict[str, Any]:
        ends: list[float] = [time.monotonic()]  # the same clock in all processes
        processor_s = time.process_time()
        for _ in range(steps):
            losses.append(float(step(batches[len(losses) % len(batches)])))
            ends.append(time.monotonic())
        return {
            "batch": options.batch,
            "step_s": [end - begin for begin, end in pairwise(ends)],
            "losses": losses[-steps:],
            "processor_s": time.process_time() - processor_s,
            "at": ends,  # the start, and the end of every step
        }

    if options.baton:
        follow(options.baton, rank, run)
    else:
        leave_result(options.folder, rank, run(options.steps))
    if options.contender == "ddp":
        # Taking DDP's Gloo group down can wait for ever: it joins a thread that needs the interpreter's lock.
        os._exit(0)
    if options.contender == "rpc":
        import torch.distributed.rpc

        torch.distributed.rpc.shutdown()


if __name__ == "__main__":
    main()
