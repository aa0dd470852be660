"""How many samples a batch has, whatever a script makes its batches of."""

from collections import UserDict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from manyhands.data.structure import emptied, moved, parts_of, samples_in, split, tensors_in
from manyhands.errors import UsageError

FIVE = torch.arange(10.0).view(5, 2)
Pair = namedtuple("Pair", ["inputs", "targets"])


@dataclass
class Batch:
    inputs: Any
    targets: Any
    name: str = "five"


class Encoding(UserDict[str, Any]):
    """As tokenizers of Hugging Face give: a mapping that can be moved."""

    def to(self, device: torch.device) -> "Encoding":
        return Encoding({name: value.to(device) for name, value in self.items()})


class Graphs:
    def __init__(self) -> None:
        self.x, self.num_graphs = torch.zeros(40, 3), 5


BATCHES: dict[str, tuple[Any, int]] = {
    "tensor": (FIVE, 5),
    "one number": (torch.tensor(1.0), 1),
    "nothing": (None, 1),
    "tuple": ((FIVE, FIVE), 5),
    "named tuple": (Pair(FIVE, FIVE), 5),
    "dictionary": ({"text": ["a"] * 5, "x": FIVE}, 5),
    "dataclass": (Batch(FIVE, FIVE), 5),
    "dataclass of a dictionary": (Batch({"x": FIVE}, None), 5),
    "encoding": (Encoding({"input_ids": FIVE, "labels": FIVE}), 5),
    "object": (SimpleNamespace(x=FIVE, y=FIVE), 5),
    "nested tuples": (((FIVE, FIVE), (FIVE, FIVE)), 5),
    "nested dictionaries": ({"a": {"b": FIVE}}, 5),
    "pictures of many sizes": (([torch.zeros(3, 4, s) for s in range(5)], [{"box": FIVE}] * 5), 5),
    "texts": (["one", "two", "three", "four", "five"], 5),
    "packed sequences": (pack_sequence([torch.zeros(n, 2) for n in (4, 3, 2, 2, 1)]), 5),
    "packed sequences and targets": ((pack_sequence([torch.zeros(2)] * 5), FIVE), 5),
    "graphs": (Graphs(), 5),
    "empty": ((), 0),
    "empty tensor": ((FIVE[:0], FIVE[:0]), 0),
}


@pytest.mark.parametrize("name", BATCHES)
def test_samples_are_counted(name: str) -> None:
    batch, count = BATCHES[name]
    assert samples_in(batch) == count


class Closed:
    __slots__ = ()


@pytest.mark.parametrize("batch", [Closed(), Batch("a", None), SimpleNamespace(), {"what": "a text"}])
def test_a_batch_that_cannot_be_counted_is_refused(batch: Any) -> None:
    with pytest.raises(UsageError, match="cannot tell how many samples a batch of type"):
        samples_in(batch)


@pytest.mark.parametrize("name", ["tuple", "named tuple", "dictionary", "dataclass"])
def test_a_batch_without_samples_has_the_same_structure(name: str) -> None:
    batch = BATCHES[name][0]
    empty = emptied(batch)
    assert samples_in(empty) == 0
    assert type(empty) is type(batch)


def test_what_cannot_be_empty_is_not_handed_out() -> None:
    assert emptied(Graphs()) is None


def test_tensors_are_found_and_moved_in_any_structure() -> None:
    batch = Batch({"x": FIVE}, Pair(FIVE, [FIVE]))
    assert len(list(tensors_in(batch))) == 3
    there = moved(batch, torch.device("meta"))
    assert type(there) is Batch
    assert type(there.targets) is Pair
    assert all(tensor.is_meta for tensor in tensors_in(there))


def test_a_batch_is_cut_only_where_every_tensor_has_an_entry_for_each_sample() -> None:
    """Weights of classes would be cut, too, and the pieces would have other ones."""
    weights = torch.ones(2)
    assert split((FIVE, weights), 3) == [(FIVE, weights)]
    first, second = split((FIVE, FIVE), 3)
    assert (len(first[0]), len(second[0])) == (2, 3)
    parts, total = parts_of([(FIVE, FIVE), (FIVE[:0], FIVE[:0])], 3, None)
    assert ([samples for _, samples in parts], total) == ([2, 3], 5)
    assert isinstance(parts[0][0][0], Tensor)


def test_sparse_batches_are_emptied_and_split() -> None:
    sparse = FIVE.to_sparse()
    empty = emptied((sparse, FIVE))
    assert empty is not None
    assert empty[0].shape == (0, 2)
    pieces = split((sparse, FIVE), 2)
    assert [samples_in(piece) for piece in pieces] == [1, 2, 2]
    assert torch.equal(torch.cat([piece[0].to_dense() for piece in pieces]), FIVE)


@pytest.mark.parametrize("layout", ["csr", "jagged"])
def test_layouts_without_rows_stay_whole(layout: str) -> None:
    batch = (
        FIVE.to_sparse_csr() if layout == "csr" else torch.nested.nested_tensor([*FIVE], layout=torch.jagged)
    )
    assert emptied((batch, FIVE)) is None
    assert split((FIVE, batch), 2) == [(FIVE, batch)]
