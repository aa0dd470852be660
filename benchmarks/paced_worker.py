"""One worker with paced compute, under whatever strategy it is started with; counts what its host sends."""

import argparse
import time
from itertools import pairwise
from pathlib import Path

import torch
from paced import Bulk, Pace
from processes import leave_result

import manyhands as mh
from manyhands.cluster.launchers.detect import own_rank_info

COUNTERS = Path("/sys/class/net/eth0/statistics")
"""Those of the kernel, for what has left and reached this host; an emulated host has one interface."""


def counted_bytes() -> tuple[int, int]:
    if not COUNTERS.exists():
        return 0, 0
    sent, received = ((COUNTERS / name).read_text() for name in ("tx_bytes", "rx_bytes"))
    return int(sent), int(received)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--bytes", type=int, required=True, help="of the model's parameters")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--chance", type=float, default=0.0)
    parser.add_argument("--times", type=float, default=1.0)
    parser.add_argument("--slow-worker", type=int)
    options = parser.parse_args()
    pace = Pace(
        step_s=options.step_s, chance=options.chance, times=options.times, slow_worker=options.slow_worker
    )
    rank = own_rank_info().rank
    model = Bulk(options.bytes)
    session = mh.session(
        model, torch.optim.SGD(model.parameters(), lr=1e-3), lambda model, batch: model(batch)
    )
    ends: list[float] = []
    counted: list[tuple[int, int]] = []
    batch = torch.ones(1, 1)
    for step in range(options.warm_up + options.steps):
        model.step_s = pace.seconds(rank, step)
        session.step(batch)
        ends.append(time.monotonic())
        counted.append(counted_bytes())
    timed = ends[options.warm_up - 1 :]
    first, last = counted[options.warm_up - 1], counted[-1]
    leave_result(
        options.folder,
        rank,
        {
            "step_s": [end - begin for begin, end in pairwise(timed)],
            "sent_bytes": last[0] - first[0],
            "received_bytes": last[1] - first[1],
            "own_bytes": session.summary()["bytes_sent"],
        },
    )


if __name__ == "__main__":
    main()
