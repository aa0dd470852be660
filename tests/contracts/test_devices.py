"""A model on an accelerator: it trains, is evaluated, saved and resumed there, as on the CPU."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from manyhands.data.structure import moved
from tests.pages import ROOT

META = torch.device("meta")


@pytest.mark.processes
@pytest.mark.parametrize("strategy", ["single", "all-reduce", "local-sgd"])
@pytest.mark.parametrize("what", ["session_is_the_same", "job_is_the_same"])
def test_an_accelerator_computes_what_the_cpu_does(what: str, strategy: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.on_accelerator", what, str(tmp_path), strategy]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr


def test_every_tensor_of_a_batch_moves_and_nothing_else_changes() -> None:
    batch = {"pixels": torch.ones(2), "more": [torch.ones(1), ("name", 3)]}
    result = moved(batch, META)
    assert result["pixels"].device == result["more"][0].device == META
    assert result["more"][1] == ("name", 3)
    assert moved(batch["pixels"], torch.device("cpu")) is batch["pixels"]


def test_a_packed_sequence_and_a_named_tuple_keep_their_types() -> None:
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    result = moved(packed, META)
    assert type(result) is type(packed)
    assert result.data.device == META
