"""Models as graphs: every model of the zoo, and code of other people that branches, loops and shares its layers."""

import copy
import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from manyhands import models
from manyhands.cli import main
from manyhands.models.layer_times import add_times
from manyhands.models.model_graph import INPUT, OUTPUT, ModelGraph, graph_of

PICTURE, TOKENS = (3, 32, 32), (16,)


def edges(graph: ModelGraph) -> set[tuple[str, str]]:
    return {(edge.source, edge.target) for edge in graph.edges}


def reached(graph: ModelGraph) -> set[str]:
    """What the input leads to."""
    known, new = {INPUT}, {INPUT}
    while new:
        new = {target for source, target in edges(graph) if source in new} - known
        known |= new
    return known


@pytest.mark.parametrize("name", models.MODELS)
def test_every_model_of_the_zoo_is_one_graph_from_input_to_output(name: str) -> None:
    shape, classes = (TOKENS, 50) if name in ("lstm", "transformer") else (PICTURE, 10)
    with torch.device("meta"):
        model = models.build(name, shape, classes)
    inputs = torch.zeros(2, *shape, dtype=torch.long if shape == TOKENS else torch.float32)
    graph = graph_of(model, inputs)
    assert not graph.note
    assert graph.parameters == sum(param.numel() for param in model.parameters())
    leaves = {node.id for node in graph.nodes if node.is_leaf and node.calls}
    assert reached(graph) >= leaves | {OUTPUT}
    by_id = {node.id: node for node in graph.nodes}
    assert all(node.parent in by_id or not node.parent for node in graph.nodes)
    assert all({edge.source, edge.target} <= by_id.keys() for edge in graph.edges)
    (last,) = [edge for edge in graph.edges if edge.target == OUTPUT]
    assert last.shape == [2, *((16,) if shape == TOKENS else ()), classes]
    assert sum(node.flops for node in graph.nodes if not node.parent) > graph.parameters
    assert json.loads(json.dumps(graph.plain()))["batch"] == 2


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.inner(x))


def test_functions_between_layers_are_nodes_of_the_module_that_calls_them() -> None:
    graph = graph_of(nn.Sequential(Residual()), torch.zeros(3, 4))
    assert edges(graph) == {
        (INPUT, "0.inner"),
        (INPUT, "0/add-1"),
        ("0.inner", "0/add-1"),
        ("0/add-1", "0/relu-1"),
        ("0/relu-1", OUTPUT),
    }
    inner = next(node for node in graph.nodes if node.id == "0.inner")
    assert (inner.parent, inner.input_shapes, inner.output_shapes) == ("0", [[3, 4]], [[3, 4]])
    assert (inner.parameters, inner.flops) == (20, 2 * 3 * 4 * 4)


class Branching(nn.Module):
    """It looks at numbers, loops as often as they say, and uses a layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.other, self.never = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        for _ in range(int(x.abs().sum() > -1) + 1):
            x = self.layer(x)
        return self.other(x) if x.sum() < 1e9 else self.never(x)


def test_control_flow_that_looks_at_numbers_is_followed_and_the_model_stays() -> None:
    model = Branching()
    before = copy.deepcopy(model.state_dict())
    graph = graph_of(model, torch.randn(5, 4))
    assert not graph.note
    calls = {node.id: node.calls for node in graph.nodes}
    assert (calls["layer"], calls["other"], calls["never"]) == (2, 1, 0)
    assert {(INPUT, "norm"), ("norm", "layer"), ("layer", "other"), ("other", OUTPUT)} <= edges(graph)
    assert all(before[name].equal(value) for name, value in model.state_dict().items())
    assert not model.layer._forward_hooks


class Refusing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("not such a batch\nat all")


def test_a_model_that_does_not_run_shows_its_modules_and_the_reason() -> None:
    graph = graph_of(nn.Sequential(Refusing()), torch.zeros(2, 4))
    assert [node.id for node in graph.nodes] == ["0", "0.layer"]
    assert not graph.edges
    assert graph.note == "the model does not run on such a batch (RuntimeError: not such a batch)"


def test_layers_are_timed_one_by_one_and_the_model_stays() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Sequential(nn.Linear(7200, 64))
    )
    inputs = torch.randn(4, 3, 32, 32)
    graph = graph_of(model, inputs)
    add_times(graph, model, inputs)
    found = {node.id: (node.forward_s, node.backward_s) for node in graph.nodes}
    assert found[INPUT] == (None, None)
    for name in ("0", "1", "2", "3.0"):
        assert all(seconds is not None and seconds > 0 for seconds in found[name])
    assert found["3"] == found["3.0"]
    assert all(param.grad is None for param in model.parameters())


def shown(capsys: Any, *words: str) -> str:
    assert main(["show", *words]) == 0
    return str(capsys.readouterr().out)


def test_the_command_prints_a_table_or_everything(capsys: Any) -> None:
    table = shown(capsys, "lenet", "--data", "digits")
    assert "lenet for digits, a batch of 2" in table
    assert "parameters, 0." in table.splitlines()[-1]
    everything = json.loads(shown(capsys, "transformer", "--json"))
    assert everything["model"] == "transformer"
    assert {"nodes", "edges", "batch", "parameters"} <= everything.keys()
    assert any(node["parent"].startswith("block1.") for node in everything["nodes"])


def own() -> nn.Module:
    return Branching()


def test_a_model_of_ones_own_that_does_not_fit_the_default_data(capsys: Any) -> None:
    """Its modules are shown, and why there is no more."""
    assert main(["show", "tests.unit.test_model_graph:own"]) == 0
    said = capsys.readouterr()
    assert "norm" in said.out
    assert "only the modules: the model does not run on such a batch" in said.err


def test_unknown_names_are_refused(capsys: Any) -> None:
    assert main(["show", "nosuch"]) == 2
    assert "unknown model 'nosuch'" in capsys.readouterr().err
