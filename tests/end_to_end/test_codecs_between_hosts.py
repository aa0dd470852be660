"""Every codec between real hosts: the same bits on all, the bytes of its formula, and a resumed run is the same run."""

import json
from pathlib import Path

import pytest

from manyhands.comm import codecs
from manyhands.comm.codecs import CODECS
from manyhands.lab import emulated_hosts
from tests.end_to_end.commands import manyhands
from tests.end_to_end.on_hosts import places, run_on_hosts

WHY_NOT = emulated_hosts.available()
on_hosts = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

STEPS, WIDTH = 8, 700

CASES = """
import json, sys, zlib
import torch
from torch import nn
from torch.nn import functional
import manyhands as mh
from manyhands import telemetry

folder, width, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
inputs = torch.randn(steps, 64, 32, generator=torch.Generator().manual_seed(1))
targets = inputs[:, :, :10].argmax(2)

def loss(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])

def session_of(codec):
    torch.manual_seed(0)
    # One tensor of three dimensions has most of the parameters: it does not travel as factors.
    model = nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Unflatten(1, (width, 1)), nn.Conv1d(width, 300, 1),
                          nn.Flatten(), nn.Linear(300, 10))
    return model, mh.session(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, codec=codec)

def train(session, first, last):
    found = []
    for step in range(first, last):
        mine = slice(session.rank, None, session.workers)
        found.append(float(session.step((inputs[step, mine], targets[step, mine]))))
    return found

def bits(model):
    return zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))

for codec in sys.argv[4:]:
    model, session = session_of(codec)
    sent = [telemetry.totals().get("bytes_sent", 0)]
    losses = train(session, 0, steps // 2)
    sent.append(telemetry.totals().get("bytes_sent", 0))
    session.save(f"{folder}/{codec}")
    losses += train(session, steps // 2, steps)
    session.close()
    again, other = session_of(codec)
    other.resume(f"{folder}/{codec}")
    train(other, steps // 2, steps)
    other.close()
    print(json.dumps({"codec": codec, "bits": bits(model), "resumed": bits(again), "losses": losses,
                      "sent": (sent[1] - sent[0]) / (steps // 2)}))
"""


@on_hosts
def test_codecs_between_hosts(tmp_path: Path) -> None:
    (tmp_path / "cases.py").write_text(CASES)
    words = ["cases.py", str(tmp_path / "saved"), str(WIDTH), str(STEPS), *CODECS]
    said = run_on_hosts(words, places((2, 1)), tmp_path).said
    workers = [[json.loads(line) for line in one.splitlines()] for one in said]
    assert [one["codec"] for one in workers[0]] == list(CODECS)
    coded = 32 * WIDTH + WIDTH * 300 + 300 * 10
    plain = WIDTH + 300 + 10
    for found in zip(*workers, strict=True):
        codec = found[0]["codec"]
        assert len({one["bits"] for one in found}) == 1, f"{codec}: hosts have different bits"
        assert {one["resumed"] for one in found} == {found[0]["bits"]}, f"{codec}: what it left out is saved"
        assert found[0]["losses"][-1] < found[0]["losses"][0], codec
        if CODECS[codec].is_low_rank:
            assert sum(one["sent"] for one in found) < 2 * 4 * (coded + plain) / 10, codec
            continue
        # Two hosts send half of it twice; the numbers of the handshake come on top.
        formula = 2 * (codecs.parse(codec).size_bytes(coded) + 4 * plain)
        assert sum(one["sent"] for one in found) == pytest.approx(formula, rel=0.03, abs=4000), codec


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--codec", "top-k", "--optimizer", "sgd:lr=0.1,momentum=0.9"], "with momentum"),
        (["--codec", "int8", "--strategy", "local-sgd"], "no such sum"),
        (["--codec", "int8", "--placement", "pipeline"], "divides a replica"),
        (["--codec", "int7"], "unknown codec 'int7'"),
        (["--codec", "top-k:density=2"], "density=2"),
    ],
)
def test_what_cannot_be_coded_is_refused_before_any_process_starts(
    words: list[str], reason: str, tmp_path: Path
) -> None:
    done = manyhands("train", *words, "--out", "run", cwd=tmp_path)
    assert done.code == 2
    assert reason in done.err
    assert not (tmp_path / "run").exists()


def test_codecs_are_listed(tmp_path: Path) -> None:
    done = manyhands("list", "codecs", cwd=tmp_path)
    assert [line.split()[0] for line in done.out.splitlines()] == list(CODECS)
