"""What every codec keeps: nothing is lost but for a while, all read the same, and garbage is refused."""

import math

import pytest
import torch
from torch import Tensor

from manyhands.comm import codecs
from manyhands.comm.codecs import CODECS, Codec, GarbledMessage

LENGTHS = (0, 1, 7, 255, 4096, 10_001)
MESSAGES = [name for name, kind in CODECS.items() if not kind.is_low_rank]
NAMES = [*MESSAGES, "top-k:density=0.001,warm_up=20", "one-bit:block=64"]


@pytest.fixture(params=NAMES)
def codec(request: pytest.FixtureRequest) -> Codec:
    return codecs.parse(request.param)


def values(length: int, seed: int = 0) -> Tensor:
    """Of very different sizes, some of them zero."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(length, generator=generator) * torch.logspace(-3, 1, length)
    found[::5] = 0.0
    return found


def coded(codec: Codec, vector: Tensor) -> Tensor:
    message = torch.empty(codec.size_bytes(vector.numel()), dtype=torch.uint8)
    codec.encode(vector, message)
    found = torch.full_like(vector, math.nan)
    codec.decode(message, found)
    return found


@pytest.mark.parametrize("length", LENGTHS)
def test_what_is_decoded_and_what_is_left_out_are_the_vector(codec: Codec, length: int) -> None:
    vector = values(length)
    before = vector.clone()
    found = coded(codec, vector)
    assert torch.equal(vector, before), "an encoder leaves the vector alone"
    error = vector - found
    assert bool((error.abs() <= vector.abs().max() if length else error == 0).all())
    if length and codec.keeps_error:
        assert torch.allclose(found + error, vector, rtol=1e-6, atol=1e-6)


def test_zeros_are_exact(codec: Codec) -> None:
    vector = torch.zeros(5000)
    vector[4500] = 3.0  # another block
    assert torch.equal(coded(codec, vector)[:4096], vector[:4096])
    assert torch.equal(coded(codec, torch.zeros(5000)), torch.zeros(5000))


def test_what_is_sent_over_many_steps_adds_up_to_what_was_meant(codec: Codec) -> None:
    meant, sent, error = torch.zeros(3000), torch.zeros(3000), torch.zeros(3000)
    for step in range(60):
        gradient = values(3000, seed=step)
        meant += gradient
        now = codec.at(step)
        found = coded(now, gradient + error)
        if codec.keeps_error:
            error = gradient + error - found
        sent += found
    if codec.keeps_error:  # only what the last step has left is missing
        assert torch.allclose(sent + error, meant, rtol=1e-4, atol=1e-4)
        # The error does not grow with the steps: without it, as much would be lost again and again.
        assert error.norm() < 60 * values(3000).norm() / 2
    else:
        assert float((sent - meant).norm() / meant.norm()) < 1e-2


def test_the_same_message_is_read_alike(codec: Codec) -> None:
    vector = values(9000)
    assert torch.equal(coded(codec, vector), coded(codec, vector.clone()))


def test_infinities_and_nans_are_not_hidden(codec: Codec) -> None:
    for bad in (math.inf, math.nan):
        vector = values(1000)
        vector[500] = bad
        assert not torch.isfinite(coded(codec, vector)).all()


GARBAGE = {
    "fp8": lambda message: message[:4].copy_(torch.tensor([-1.0]).view(torch.uint8)),
    "int8": lambda message: message[-1:].fill_(128),
    "int4": lambda message: message[-1:].fill_(0),
    "one-bit": lambda message: message[:4].copy_(torch.tensor([-1.0]).view(torch.uint8)),
    "top-k": lambda message: message[:4].copy_(torch.tensor([1 << 20], dtype=torch.int32).view(torch.uint8)),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_is_refused(name: str) -> None:
    codec, vector = codecs.parse(name), values(1001)
    message = torch.empty(codec.size_bytes(1001), dtype=torch.uint8)
    codec.encode(vector, message)
    GARBAGE[name](message)
    with pytest.raises(GarbledMessage, match=name):
        codec.decode(message, vector)


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("fp16", 16),
        ("bf16", 16),
        ("fp8", 8),
        ("int8", 8.125),
        ("int4", 4.125),
        ("one-bit", 1.016),
        ("top-k", 0.64),
    ],
)
def test_bits_per_element(name: str, bits: float) -> None:
    assert codecs.parse(name).size_bytes(1 << 20) * 8 / (1 << 20) == pytest.approx(bits, rel=0.01)


def test_names_are_read_and_written(codec: Codec) -> None:
    assert codecs.parse(codecs.describe(codec)) == codec
