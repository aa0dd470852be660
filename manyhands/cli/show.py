"""`manyhands show`: a model's layers, shapes, parameters and costs."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from manyhands.errors import ManyhandsError, UsageError

if TYPE_CHECKING:
    from manyhands.models.model_graph import GraphNode, ModelGraph

BATCH = 2
PICTURES, TOKENS = ("synthetic:3x32x32:10", (3, 32, 32), 10), ("64 tokens of 256", (64,), 256)

EXAMPLES = """\
examples:
  manyhands show cnn                                the layers of a small network, for pictures of 3×32×32
  manyhands show resnet20 --data cifar10            for the samples and the classes of that data
  manyhands show vgg16 --data synthetic:3x224x224:1000
  manyhands show transformer --time                 with the time of each layer on this machine
  manyhands show mymodule:build --json              everything, with the tensors between layers, for a program
"""


def add_to(verbs: Any) -> None:
    parser = verbs.add_parser(
        "show",
        help="a model's layers: shapes, parameters, costs",
        description="Show the layers of a model of the zoo, or of your own: the shapes that go in and out,\n"
        "parameters, floating-point operations of a forward pass, and with --time how long each takes here.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="a name of `list models`, or package.module:callable")
    parser.add_argument(
        "--data",
        metavar="D",
        help="for samples of this data (default: pictures of 3×32×32 in 10 classes, or 64 tokens)",
    )
    parser.add_argument(
        "--time", action="store_true", help="measure the forward and backward pass of each layer"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the whole graph as JSON and nothing else on stdout"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from manyhands.models import MODELS
    from manyhands.models.layer_times import add_times
    from manyhands.models.model_graph import graph_of

    # Shapes need no numbers, and initial weights of a large model take seconds; a person's own code may want them.
    is_own = options.model.partition(":")[0] not in MODELS
    said, model, inputs = _built(options.model, options.data, "cpu" if options.time or is_own else "meta")
    graph = graph_of(model, inputs)
    if options.time and not graph.note:
        add_times(graph, model, inputs)
    if options.json:
        print(json.dumps({"model": options.model, "data": said, **graph.plain()}))
        return 0
    print(f"{options.model} for {said}, a batch of {graph.batch}")
    for line in _aligned(list(_rows(graph, has_times=options.time))):
        print(line)
    print(f"{graph.parameters:,} parameters, {graph.parameter_bytes / 1e6:,.1f} MB")
    if graph.note:
        print(f"only the modules: {graph.note}", file=sys.stderr)
    return 0


def _built(name: str, data: str | None, device: str) -> tuple[str, Any, Any]:
    """What it is built for, the model, and a batch of inputs for it."""
    import torch

    from manyhands import models
    from manyhands.data import load
    from manyhands.data.loading import gather

    torch.manual_seed(0)
    if data is not None:
        samples = load(data)
        with torch.device(device):
            model = models.build(name, samples.shape, samples.classes)
        inputs, _ = gather(samples.test, torch.arange(min(BATCH, len(samples.test))), 0)
        return data, model, inputs
    refused: ManyhandsError | None = None
    for said, shape, classes in (PICTURES, TOKENS):
        try:
            with torch.device(device):
                model = models.build(name, shape, classes)
        except UsageError as error:
            refused = refused or error
            continue
        is_text = len(shape) == 1
        inputs = torch.randint(classes, (BATCH, *shape)) if is_text else torch.randn(BATCH, *shape)
        return said, model, inputs
    assert refused is not None
    raise refused


def _rows(graph: "ModelGraph", *, has_times: bool) -> Iterator[list[str]]:
    yield ["layer", "kind", "output", "parameters", "MFLOP", *(["forward", "backward"] if has_times else [])]
    inside: dict[str, list[GraphNode]] = {}
    for node in graph.nodes:
        inside.setdefault(node.parent, []).append(node)

    def below(parent: str, depth: int) -> Iterator[list[str]]:
        for node in inside.get(parent, ()):
            if node.kind in ("input", "output", "function"):
                continue
            yield [
                "  " * depth + node.name,
                node.kind,
                ", ".join("×".join(map(str, shape)) for shape in node.output_shapes),
                f"{node.parameters:,}" if node.parameters else "",
                f"{node.flops / 1e6:,.2f}" if node.flops else "",
                *((_ms(node.forward_s), _ms(node.backward_s)) if has_times else ()),
            ]
            yield from below(node.id, depth + 1)

    yield from below("", 0)


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1000:.3f} ms"


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Names and shapes to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.ljust(width) if place < 3 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
