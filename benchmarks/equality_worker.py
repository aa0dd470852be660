"""One worker of a placement that trains what one process trains as well; leaves the parameters."""

import argparse
from pathlib import Path

import torch
from placement_worker import BATCHES, JOBS, build, make_batches
from processes import leave_result
from section_equality import STEPS

import manyhands as mh
from manyhands.job import declared
from manyhands.placement.pipeline.microbatches import microbatches


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--job", choices=JOBS, required=True)
    parser.add_argument("--placement", required=True)
    options = parser.parse_args()
    work = JOBS[options.job]
    model = build(work)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    batches = make_batches(work, work.batch)
    session = mh.session(model, optimizer, declared.loss, placement=options.placement, example=batches[0])
    for number in range(STEPS):
        shares = microbatches(batches[number % BATCHES], work.batch, session.engine.placed.mesh.feeds)
        session.step(shares[session.engine.placed.feed][0])
    rank = session.rank
    session.close()
    params = {key: value.tolist() for key, value in model.named_parameters()} if rank == 0 else {}
    leave_result(options.folder, rank, {"params": params})


if __name__ == "__main__":
    main()
