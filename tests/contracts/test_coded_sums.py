"""Coded sums over hosts, here threads: the same bits on all, nothing lost over many steps, and training converges."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from manyhands.comm import codecs
from manyhands.comm.codecs import CODECS, Codec
from manyhands.comm.codecs.power_sgd import PowerSGD
from manyhands.comm.coded import SHOTS
from manyhands.comm.low_rank import LowRankSum, low_rank_cut
from manyhands.comm.two_shots import CodedLane, CodedPart, CodedSum, coded_parts
from manyhands.data import load
from manyhands.replica.gradients.error_memory import ErrorMemory
from manyhands.replica.layout import Layout, Shape, coded_pieces, coded_widths, lay_out
from manyhands.replica.memory import Alone
from tests.worlds import ThreadTransport, run_threads

SHAPES = [Shape(name="bias", shape=(77,), group=0), Shape(name="matrix", shape=(60, 50), group=0)]


def layout_of(shapes: Sequence[Shape]) -> Layout:
    return lay_out(shapes, span_elements=1 << 18, lanes=1)


def sum_coded(
    transport: ThreadTransport,
    codec: Codec,
    layout: Layout,
    vector: Tensor,
    errors: ErrorMemory | None,
    made: int,
) -> None:
    """The sum of a vector over all threads, in place."""
    lane = CodedLane(range(transport.size), transport.rank, [transport] * len(SHOTS))
    for span in layout.spans:
        before, after = errors.of(span, made) if errors else (None, None)
        length, pieces = span.stop - span.start, coded_pieces(layout, span)
        if isinstance(codec, PowerSGD):
            assert after is not None
            cut = low_rank_cut(length, pieces, coded_widths(layout, span), codec.rank)
            assert cut.matrices, "there is something to make thin"
            first = cut.start(codec.rank, made)
            one: CodedSum | LowRankSum = LowRankSum(lane, cut, first, vector[span.slice], before, after, 1)
        else:
            parts = coded_parts(length, transport.size, pieces)
            one = CodedSum(lane, codec, vector[span.slice], parts, before, after)
        one.send()
        one.answer()
        one.reply()
        one.finish()


def memory_of(codec: Codec, layout: Layout) -> ErrorMemory | None:
    return ErrorMemory(layout, Alone()) if codec.keeps_error else None


def _many_sums(transport: ThreadTransport, name: str, steps: int) -> tuple[Tensor, Tensor, Tensor, bool]:
    """What the sums add up to, what is still owed, what was meant, and whether biases were exact."""
    codec, layout = codecs.parse(name), layout_of(SHAPES)
    errors = memory_of(codec, layout)
    found, meant = torch.zeros(layout.length), torch.zeros(layout.length)
    exact = True
    bias = next(place for place in layout.places if place.name == "bias")
    for step in range(steps):
        gradients = []
        for rank in range(transport.size):
            generator = torch.Generator().manual_seed(1000 * step + rank)
            gradient = torch.zeros(layout.length)
            for place in layout.places:
                gradient[place.start : place.stop] = torch.randn(
                    place.stop - place.start, generator=generator
                )
            gradients.append(gradient)
        total = torch.stack(gradients).sum(0)
        vector = gradients[transport.rank].clone()
        sum_coded(transport, codec.at(step), layout, vector, errors, step)
        exact &= torch.allclose(
            vector[bias.start : bias.stop], total[bias.start : bias.stop], rtol=1e-5, atol=1e-5
        )
        found += vector
        meant += total
    owed = errors.whole(steps) if errors else torch.zeros(layout.length)
    return found, owed, meant, exact


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("hosts", [2, 3])
def test_sums_over_many_steps_add_up_on_all_hosts_alike(name: str, hosts: int) -> None:
    results = run_threads(hosts, _many_sums, name, 12)
    for found, _, _, exact in results:
        assert torch.equal(found, results[0][0]), "hosts have different bits"
        assert exact, "biases travel as they are"
    owed, meant = sum(owed for _, owed, _, _ in results), results[0][2]
    tolerance = 1e-4 if codecs.parse(name).keeps_error or name == "none" else 1e-2
    assert float((results[0][0] + owed - meant).norm() / meant.norm()) < tolerance


def test_a_step_that_is_made_again_begins_with_what_was_left_before_it() -> None:
    layout = layout_of(SHAPES)
    errors = ErrorMemory(layout, Alone())
    (span,) = layout.spans
    before, after = errors.of(span, 0)
    assert before is None, "a new host begins with nothing"
    after.fill_(1.0)
    before, after = errors.of(span, 1)
    assert before is not None
    assert bool((before == 1.0).all())
    after.fill_(2.0)  # and then a worker dies: the second step does not count
    new = ErrorMemory(layout, Alone())
    new.inherit(errors, 1)
    assert bool((new.whole(0)[span.slice] == 1.0).all())
    also = ErrorMemory(layout, Alone())
    also.inherit(errors, 2)  # it counts after all
    assert bool((also.whole(0)[span.slice] == 2.0).all())


def test_each_element_of_a_span_is_in_one_part() -> None:
    for hosts in (2, 3, 5):
        parts = coded_parts(1000, hosts, [slice(100, 700), slice(705, 990)])
        seen = torch.zeros(1000)
        for part in parts:
            assert isinstance(part, CodedPart)
            for piece in (*part.coded, *part.plain):
                seen[piece] += 1
        assert bool((seen == 1).all())


def _train(transport: ThreadTransport, name: str, keeps: bool, steps: int) -> float:
    """The loss on digits after some steps of plain descent, every thread with its part of the samples."""
    codec = codecs.parse(name)
    samples = load("digits", seed=0).train
    inputs, targets = samples.batch(torch.arange(len(samples)), 0)
    inputs = inputs.flatten(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
    params = list(model.parameters())
    shapes = [Shape(name=str(number), shape=tuple(p.shape), group=0) for number, p in enumerate(params)]
    layout = layout_of(shapes)
    errors = memory_of(codec, layout) if keeps else None
    mine = slice(transport.rank, None, transport.size)
    for step in range(steps):
        loss = functional.cross_entropy(model(inputs[mine]), targets[mine]) / transport.size
        gradients = torch.autograd.grad(loss, params)
        vector = torch.zeros(layout.length)
        for place in layout.places:
            vector[place.start : place.stop] = gradients[int(place.name)].reshape(-1)
        sum_coded(transport, codec.at(step), layout, vector, errors, step)
        with torch.no_grad():
            for place in layout.places:
                params[int(place.name)].sub_(vector[place.start : place.stop].view(place.shape), alpha=0.5)
    with torch.no_grad():
        return float(functional.cross_entropy(model(inputs), targets))


def test_one_bit_converges_with_error_feedback_and_visibly_worse_without() -> None:
    dense, coded, forgetful = (
        run_threads(2, _train, name, keeps, 80)[0]
        for name, keeps in (("none", True), ("one-bit", True), ("one-bit", False))
    )
    assert coded < 1.3 * dense + 0.02
    assert forgetful > 1.3 * coded


@pytest.mark.parametrize("first", [0.0, float("nan")])
def test_low_rank_finds_its_directions_again(first: float) -> None:
    """After a step whose gradient is zero, as behind a head that begins at zero, or not finite."""
    size, rank = 32, 4
    cut = low_rank_cut(size * size, [slice(0, size * size)], [size], rank)
    directions, errors = cut.start(rank, 0), [torch.zeros(size * size) for _ in range(2)]
    torch.manual_seed(0)
    for step in range(8):
        vector = torch.full((size * size,), first) if step == 0 else torch.randn(size * size)
        before = errors[step % 2] if step > 1 else None  # a step that is not finite counts nowhere
        one = LowRankSum(
            CodedLane([0], 0, [None] * len(SHOTS)), cut, directions, vector, before, errors[1 - step % 2], 0
        )
        one.send()
        one.answer()
        one.reply()
        one.finish()
    assert int(torch.linalg.matrix_rank(vector.view(size, size))) == rank


def test_a_step_that_is_left_out_keeps_what_is_still_to_come() -> None:
    layout = layout_of(SHAPES)
    errors = ErrorMemory(layout, Alone())
    for made, value in ((0, 1.0), (1, 2.0)):
        for span in layout.spans:
            _, after = errors.of(span, made)
            after.fill_(value)
    errors.leave_out(layout.spans, 1)
    assert errors.whole(1).unique().tolist() == [1.0]
