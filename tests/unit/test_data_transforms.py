"""A sample looks the same in any batch and any order, and different in another epoch."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhands.data.randomness import Randomness, draw, splitmix64
from manyhands.data.sets import ArrayStore, StoredSet, hold_out
from manyhands.data.transforms import Crop, Flip, Normalize, Resize, Scale

SAMPLES = 40
CHAIN = (
    Crop(padding=3),
    Flip(),
    Scale(),
    Resize(size=9),
    Normalize(mean=(0.1, 0.2, 0.3), deviation=(0.5, 0.6, 0.7)),
)


def dataset(seed: int = 5) -> StoredSet:
    images = torch.randint(0, 256, (SAMPLES, 3, 8, 12), generator=torch.Generator().manual_seed(1))
    store = ArrayStore(inputs=images.to(torch.uint8), targets=torch.arange(SAMPLES) % 7)
    return StoredSet(store, CHAIN, seed=seed)


def python_splitmix64(counter: int) -> int:
    word = (1 << 64) - 1
    value = (counter + 0x9E3779B97F4A7C15) & word
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & word
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & word
    return value ^ (value >> 31)


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20))
def test_splitmix64_is_the_published_one(counters: list[int]) -> None:
    found = [value % 2**64 for value in splitmix64(torch.tensor(counters)).tolist()]
    assert found == [python_splitmix64(counter % 2**64) for counter in counters]


def test_splitmix64_known_value() -> None:
    assert int(splitmix64(torch.tensor(0))) % 2**64 == 0xE220A8397B1DCDAF


@settings(max_examples=30, deadline=None)
@given(st.permutations(range(SAMPLES)), st.integers(1, SAMPLES), st.integers(0, 50))
def test_same_sample_in_any_batch_and_order(order: list[int], batch_size: int, epoch: int) -> None:
    data = dataset()
    whole, _ = data.batch(torch.arange(SAMPLES), epoch)
    for indices in torch.split(torch.tensor(order), batch_size):
        part, targets = data.batch(indices, epoch)
        assert torch.equal(part, whole[indices])
        assert torch.equal(targets, indices % 7)


def test_epochs_and_seeds_differ() -> None:
    everyone = torch.arange(SAMPLES)
    first, _ = dataset().batch(everyone, 0)
    for other in (dataset().batch(everyone, 1)[0], dataset(seed=6).batch(everyone, 0)[0]):
        same = [torch.equal(a, b) for a, b in zip(first, other, strict=True)]
        assert sum(same) < SAMPLES // 2


def test_draws_spread_evenly() -> None:
    randomness = Randomness(seed=3, epoch=2, indices=torch.arange(20_000))
    counts = torch.bincount(randomness.below(9, stream=1), minlength=9)
    assert len(counts) == 9
    assert counts.min() > 2000
    assert counts.max() < 2450


def test_streams_and_neighbouring_keys_are_independent() -> None:
    indices = torch.arange(4096)
    keys = [(seed, epoch, stream) for seed in (0, 1) for epoch in (0, 1) for stream in (0, 1)]
    drawn = [draw(seed=s, epoch=e, stream=t, indices=indices) & 1 for s, e, t in keys]
    for number, one in enumerate(drawn):
        for other in drawn[:number]:
            assert 0.45 < float((one == other).float().mean()) < 0.55


def test_flip_mirrors_whole_pictures() -> None:
    images = torch.rand(64, 3, 4, 5)
    flipped = Flip()(images, Randomness(seed=0, epoch=0, indices=torch.arange(64)))
    mirrored = [torch.equal(a, b.flip(2)) for a, b in zip(flipped, images, strict=True)]
    kept = [torch.equal(a, b) for a, b in zip(flipped, images, strict=True)]
    assert all(a != b for a, b in zip(mirrored, kept, strict=True))
    assert 16 < sum(mirrored) < 48


def test_crop_moves_the_picture_within_its_padding() -> None:
    images = torch.zeros(200, 1, 9, 9, dtype=torch.uint8)
    images[:, :, 4, 4] = 1
    moved = Crop(padding=2)(images, Randomness(seed=0, epoch=0, indices=torch.arange(200)))
    assert moved.dtype == torch.uint8
    rows, columns = moved.nonzero()[:, 2], moved.nonzero()[:, 3]
    assert set(rows.tolist()) == set(columns.tolist()) == {2, 3, 4, 5, 6}
    assert len(rows) == 200


def test_resize_keeps_the_middle_and_the_proportions() -> None:
    images = torch.zeros(1, 1, 8, 16)
    images[:, :, :, 4:12] = 1
    resized = Resize(size=4)(images, Randomness(seed=0, epoch=0, indices=torch.arange(1)))
    assert resized.shape == (1, 1, 4, 4)
    assert float(resized.mean()) > 0.9


def test_normalize_gives_mean_zero_and_deviation_one() -> None:
    images = torch.randn(50, 2, 6, 6) * torch.tensor([2.0, 3.0]).view(-1, 1, 1) + 4
    before = images.clone()
    step = Normalize(mean=(4.0, 4.0), deviation=(2.0, 3.0))
    normal = step(images, Randomness(seed=0, epoch=0, indices=torch.arange(50)))
    assert torch.equal(images, before)
    torch.testing.assert_close(normal.mean((0, 2, 3)), torch.zeros(2), atol=0.1, rtol=0)
    torch.testing.assert_close(normal.std((0, 2, 3)), torch.ones(2), atol=0.1, rtol=0)


def test_hold_out_takes_each_class_in_proportion() -> None:
    labels = torch.tensor([0] * 100 + [1] * 50 + [2] * 10)
    train, test = hold_out(labels, 16, seed=1)
    assert torch.equal(torch.cat([train, test]).sort().values, torch.arange(160))
    assert torch.bincount(labels[test]).tolist() == [10, 5, 1]
    assert not torch.equal(hold_out(labels, 16, seed=2)[1], test)
