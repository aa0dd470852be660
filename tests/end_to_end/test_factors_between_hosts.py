"""Large linear layers between hosts: factors in place of matrices, the result of one process, the same bits on all."""

import json
from pathlib import Path

import pytest

from manyhands.lab import emulated_hosts
from tests.end_to_end.on_hosts import places, run_on_hosts

WHY_NOT = emulated_hosts.available()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

CASES = """
import copy, json, zlib
import torch
import manyhands as mh
from manyhands import telemetry
from tests.contracts.test_factors import NETS, _loss

STEPS, SAMPLES, FEATURES = 4, 48, 600

def even(step, rank, size):
    return [torch.arange(SAMPLES)[rank::size]]

def accumulated(step, rank, size):
    return list(torch.arange(SAMPLES)[rank::size].split(7))

def uneven(step, rank, size):  # some more than in the last step, some fewer, one at times nothing
    cuts = ([40, 6, 2], [10, 30, 8], [10, 30, 8], [48, 0, 0])[step]
    part = torch.arange(SAMPLES).split(cuts)[rank]
    return [part] if len(part) else []

CASES = [("Net", uneven, {"clip_norm": 0.1}), ("Twice", accumulated, {}), ("Tied", even, {}), ("Long", even, {})]

def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

def plain(net, inputs, targets, clip_norm=None):
    optimizer = optimizer_of(net)
    for step in range(STEPS):
        optimizer.zero_grad()
        _loss(net, (inputs[step], targets[step])).backward()
        if clip_norm:
            torch.nn.utils.clip_grad_norm_(net.parameters(), clip_norm)
        optimizer.step()
    return net

generator = torch.Generator().manual_seed(3)
inputs = torch.randn(STEPS, SAMPLES, FEATURES, generator=generator)
targets = torch.randint(0, 10, (STEPS, SAMPLES), generator=generator)
for name, cut, settings in CASES:
    torch.manual_seed(1)
    net = NETS[name]()
    model = copy.deepcopy(net)
    session = mh.session(model, optimizer_of(model), _loss, **settings)
    before = telemetry.totals().get("bytes_sent", 0)
    for step in range(STEPS):
        session.step(*((inputs[step, part], targets[step, part]) for part in cut(step, session.rank, session.workers)))
    sent = telemetry.totals().get("bytes_sent", 0) - before
    session.close()
    theirs = plain(net, inputs, targets, **settings)
    off = max(
        float((a - b).norm() / b.norm()) for a, b in zip(model.parameters(), theirs.parameters(), strict=True)
    )
    bits = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    print(json.dumps({"case": f"{name} {cut.__name__} {settings}", "off": off, "bits": bits, "sent": sent}))
"""

MATRIX_BYTES = 4 * 600 * 1100
AS_FACTORS = ("Net", "Twice")  # gradients of the others are no product, or one of many rows


@pytest.mark.parametrize("layout", [(2, 1), (1, 1, 1)], ids=["2+1", "1+1+1"])
def test_factors_between_hosts_equal_one_process(layout: tuple[int, ...], tmp_path: Path) -> None:
    (tmp_path / "cases.py").write_text(CASES)
    said = run_on_hosts(["cases.py"], places(layout), tmp_path).said
    workers = [[json.loads(line) for line in one.splitlines()] for one in said]
    assert len(workers[0]) == 4
    for found in zip(*workers, strict=True):
        case = found[0]["case"]
        assert max(one["off"] for one in found) < 1e-6, case
        assert len({one["bits"] for one in found}) == 1, f"{case}: hosts have different bits"
        sent = sum(one["sent"] for one in found)
        dense = 4 * 2 * (len(layout) - 1) * MATRIX_BYTES  # the ring, in 4 steps
        assert (sent < dense / 5) == (case.split()[0] in AS_FACTORS), f"{case}: {sent} bytes, not {dense}"
