"""What a script still has when its session has ended, in several workers as in one."""

import json
from pathlib import Path

import pytest

from tests.end_to_end.commands import manyhands

TAKEN = """
import torch
import manyhands as mh

model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
session = mh.session(model, optimizer, lambda model, batch: model(batch).square().mean())
for batch in session.batches([torch.ones(3)] * 16, batch_size=4):
    session.step(batch)
session.barrier()
taken = [*model.state_dict().values(), model[0].weight.detach(), optimizer.state_dict()["state"][0]["exp_avg"]]
array = model[1].weight.detach().numpy()
before = [one.clone() for one in taken], array.copy()
assert all(one.any() for one in before[0])
session.close()
assert all(torch.equal(one, other) for one, other in zip(taken, before[0]))
assert (array == before[1]).all()
print("kept", flush=True)
"""


@pytest.mark.parametrize(
    "strategy", ["all-reduce", "all-reduce:topology=ring", "local-sgd", "hogwild", "ad-psgd"]
)
def test_what_a_script_has_taken_of_the_model_keeps_its_values_when_the_session_closes(
    strategy: str, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(TAKEN)
    done = manyhands("launch", "--strategy", strategy, "script.py", cwd=tmp_path)
    assert done.code == 0, done.err
    assert done.out.count("kept") == 2


IN_A_FUNCTION = """
import torch
import manyhands as mh


def main():
    model = torch.nn.Linear(3, 1)
    session = mh.session(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        lambda model, batch: model(batch).square().mean(),
        save_every="epoch",
    )
    for _, batch in zip(range(1), session.batches([torch.ones(3)] * 16, batch_size=4)):
        session.step(batch)


main()
"""


def test_a_session_that_only_a_function_has_held_is_finished_and_saved(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(IN_A_FUNCTION)
    done = manyhands("launch", "--out", "run", "script.py", cwd=tmp_path)
    assert done.code == 0, done.err
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 1
    assert (tmp_path / "run" / "checkpoints" / "step-00000001" / "tensors.safetensors").exists()
