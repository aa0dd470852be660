"""One worker of a contender in network.py, on an emulated host: its steps, with the bytes that the kernel counted."""

import argparse
import os
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from jobs import ALL, build, make_batches
from processes import leave_result
from torch import nn
from torch.optim import Optimizer
from train_worker import Step, ours, plain

from manyhands.cluster.launchers import local
from manyhands.lab.emulated_hosts import INTERFACE

SENT = Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes")


def ddp(model: nn.Module, optimizer: Optimizer, hook: str | None) -> tuple[int, Step]:
    """PyTorch's own, with one of its hooks for fewer bytes."""
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel
    from train_worker import _loop

    dist.init_process_group("gloo")
    # PowerSGD with several buckets ends in a mismatch of collectives on Gloo.
    bucket_mb = 100_000 if hook == "power-sgd" else 25
    replica = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb)
    if hook == "fp16":
        replica.register_comm_hook(None, default_hooks.fp16_compress_hook)
    if hook == "power-sgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        replica.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return dist.get_rank(), _loop(replica, optimizer)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("contender", choices=["ours", "ddp", "plain"])
    parser.add_argument("--hook", help="of DDP")
    parser.add_argument("--codec", help="of ours")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--job", choices=ALL, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--warm-up", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    options = parser.parse_args()
    meeting, _, port = os.environ[local.STORE].rpartition(":")
    theirs = {
        "RANK": os.environ[local.RANK],
        "WORLD_SIZE": os.environ[local.SIZE],
        "MASTER_ADDR": meeting,
        "MASTER_PORT": port,
        "GLOO_SOCKET_IFNAME": INTERFACE,
    }
    if options.contender != "ours":
        os.environ.update(theirs)
    elif options.codec:
        os.environ[local.CODEC] = options.codec
    torch.set_num_threads(1)
    job = ALL[options.job]
    model, optimizer = build(job)
    if options.contender == "ours":
        rank, step = ours(model, optimizer, None)
    elif options.contender == "ddp":
        rank, step = ddp(model, optimizer, options.hook)
    else:
        rank, step = plain(model, optimizer)
    leave_result(options.folder, rank, measured(step, make_batches(job, options.batch, rank), options))
    # Taking DDP's Gloo group down can wait for ever: it joins a thread that needs the interpreter's lock.
    sys.stdout.flush()
    os._exit(0)


def measured(step: Step, batches: list[Any], options: argparse.Namespace) -> dict[str, Any]:
    for number in range(options.warm_up):
        step(batches[number % len(batches)])
    ends, losses = [time.monotonic()], []
    sent, processor_s = int(SENT.read_text()), time.process_time()
    for number in range(options.steps):
        losses.append(float(step(batches[number % len(batches)])))
        ends.append(time.monotonic())
    return {
        "step_s": [end - begin for begin, end in pairwise(ends)],
        "sent_bytes": int(SENT.read_text()) - sent,
        "processor_s": time.process_time() - processor_s,
        "losses": losses,
    }


if __name__ == "__main__":
    main()
