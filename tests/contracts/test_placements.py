"""What every placement must keep, run over everything registered: it computes what one process computes."""

import functools
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal, weight_norm
from torch.optim import Optimizer
from torch.utils.data import TensorDataset

from manyhands import models, placement, strategies
from manyhands.cluster.worker.world import World
from manyhands.engine.evaluate import accuracy
from manyhands.engine.session import Session
from manyhands.errors import UsageError
from manyhands.job import declared
from manyhands.placement import PLACEMENTS
from manyhands.placement.pipeline.timetable import SCHEDULES
from tests.sessions import session_of
from tests.threads import in_threads

Batch = tuple[Tensor, Tensor]

STEPS = 20
SIZE = 12  # samples of a step, over all workers

# The placement, and how many workers make so many replicas of it.
CASES = {
    "single": (2, 2),
    **{f"pipeline:schedule={name}": (2, 1) for name in SCHEDULES},
    "pipeline:stages=3,microbatches=2": (3, 1),
    "pipeline:microbatches=5": (4, 2),
    "tensor": (2, 1),
    "tensor:ways=3,whole=2": (3, 1),
    "tensor:rows=4,columns=8": (4, 2),
    "hybrid": (4, 1),
    "hybrid:schedule=interleaved,microbatches=3": (8, 2),
    "sharded": (3, 1),
    "sharded:shards=2": (4, 2),
}
TEXTS = list(CASES)


def make_net() -> nn.Module:
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Sequential(nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
        nn.Flatten(),
        nn.Linear(24, 17),
        nn.Tanh(),
        nn.Linear(17, 8),
        nn.Tanh(),
        nn.Linear(8, 4),
    )
    return filled(net.double(), 5, 0.3)


def filled(net: nn.Module, seed: int, scale: float) -> nn.Module:
    """The same values in every thread: a generator of its own, since threads share torch's."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for param in net.parameters():
            param.copy_(torch.randn(param.shape, generator=generator, dtype=torch.float64) * scale)
    return net


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


@functools.cache
def batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(17)
    return [
        (
            torch.randn(SIZE, 1, 4, 4, generator=generator, dtype=torch.float64),
            torch.randint(0, 4, (SIZE,), generator=generator),
        )
        for _ in range(STEPS)
    ]


def momentum(net: nn.Module) -> Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)


def adam(net: nn.Module) -> Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.01)


def alone(
    make: Callable[[nn.Module], Optimizer] = momentum, clip: float | None = None, decay: float = 1.0
) -> nn.Module:
    """Plain PyTorch on the whole batch."""
    net = make_net()
    optimizer = make(net)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, decay)
    for batch in batches():
        optimizer.zero_grad()
        loss(net, batch).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        scheduler.step()
    return net


def share(batch: Batch, feed: int, feeds: int) -> Batch:
    return batch[0][feed::feeds], batch[1][feed::feeds]


def make_session(world: World, text: str, **more: Any) -> Session:
    net = make_net()
    make = more.pop("make", momentum)
    with torch.no_grad():
        for param in net.parameters():
            param.add_(world.rank)  # worker 0's become everyone's
    optimizer, decay = make(net), more.pop("decay", None)
    if decay:
        more["scheduler"] = torch.optim.lr_scheduler.ExponentialLR(optimizer, decay)
    return session_of(net, optimizer, loss, world=world, placement=text, example=batches()[0], **more)


def train(session: Session, steps: Sequence[Batch]) -> list[float]:
    return [
        float(session.step(share(batch, session.engine.placed.feed, session.engine.placed.mesh.feeds)))
        for batch in steps
    ]


def close_to(first: nn.Module, second: nn.Module, tolerance: float = 1e-9) -> None:
    for (name, one), other in zip(first.state_dict().items(), second.state_dict().values(), strict=True):
        assert torch.allclose(one, other, rtol=tolerance, atol=tolerance), name


def test_every_placement_is_tried() -> None:
    assert {type(placement.parse(text)) for text in TEXTS} == set(PLACEMENTS.values())
    assert {type(placement.parse(text)) for text in ["single", *FEW]} == set(PLACEMENTS.values())


@pytest.mark.parametrize("text", TEXTS)
def test_it_equals_one_process(text: str) -> None:
    workers, replicas = CASES[text]

    def work(world: World) -> tuple[nn.Module, list[float]]:
        session = make_session(world, text)
        assert session.engine.placed.mesh.replicas == replicas
        losses = train(session, batches())
        session.close()
        return session.model, losses

    results = in_threads(workers, work)
    for net, _ in results:
        close_to(net, alone())
    assert len({tuple(losses) for _, losses in results}) == session_feeds(text, workers)


def session_feeds(text: str, workers: int) -> int:
    return placement.parse(text).mesh(workers).feeds


FEW = ["pipeline:microbatches=5", "tensor:rows=4,columns=8", "sharded:shards=2", "hybrid"]


@pytest.mark.parametrize("text", FEW)
def test_clipping_and_schedules(text: str) -> None:
    """The norm is that of the whole replica's gradient, and each worker's optimizer follows the scheduler."""
    workers, _ = CASES[text]

    def work(world: World) -> nn.Module:
        session = make_session(world, text, clip_norm=0.3, make=adam, decay=0.9)
        train(session, batches())
        session.close()
        return session.model

    for net in in_threads(workers, work):
        close_to(net, alone(adam, clip=0.3, decay=0.9), 1e-6)


@pytest.mark.parametrize("text", FEW)
def test_evaluation_is_that_of_the_whole_model(text: str) -> None:
    workers, _ = CASES[text]
    data = TensorDataset(torch.cat([batch[0] for batch in batches()[:3]])[:31], torch.arange(31) % 4)

    def work(world: World) -> dict[str, float]:
        session = make_session(world, text)
        train(session, batches())
        result = session.evaluate(data, batch_size=5, measures={"accuracy": accuracy})
        session.close()
        return result

    net = alone().eval()
    whole = (data.tensors[0], data.tensors[1])
    for result in in_threads(workers, work):
        assert result["loss"] == pytest.approx(loss(net, whole).item(), rel=1e-9)
        assert result["accuracy"] == pytest.approx(accuracy(net, whole).item())


@pytest.mark.processes
@pytest.mark.parametrize(("before", "after"), list(itertools.pairwise(["single", *FEW, "single"])))
def test_checkpoints_reshape(before: str, after: str, tmp_path: Path) -> None:
    """Saved under one placement, loaded under another: the same bits, and training goes on the same."""
    middle = STEPS // 2

    def first(world: World) -> tuple[dict[str, Tensor], dict[str, Any]]:
        session = make_session(world, before, make=adam)
        train(session, batches()[:middle])
        session.save(tmp_path)
        session.close()
        return whole_state(session)

    def second(world: World) -> tuple[dict[str, Tensor], dict[str, Any]]:
        session = make_session(world, after, make=adam)
        session.resume(tmp_path)
        session.close()
        return whole_state(session)

    def rest(world: World) -> nn.Module:
        session = make_session(world, after, make=adam)
        session.resume(tmp_path)
        train(session, batches()[middle:])
        session.close()
        return session.model

    saved = in_threads(CASES[before][0], first)[0]
    for found in in_threads(CASES[after][0], second):
        same_bits(saved, found)
    for net in in_threads(CASES[after][0], rest):
        close_to(net, alone(adam), 1e-6)


def whole_state(session: Session) -> dict[str, Tensor]:
    states = session.optimizer.state_dict()["state"]
    tensors = {
        f"{number}/{name}": torch.as_tensor(v) for number, s in states.items() for name, v in s.items()
    }
    return tensors | session.model.state_dict()


def same_bits(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@pytest.mark.parametrize("strategy", ["local-sgd:period=3", "tournament:every=4", "all-reduce:topology=ring"])
@pytest.mark.parametrize(
    ("text", "workers"),
    [("pipeline:stages=2", 4), ("tensor", 4), ("sharded:shards=2", 4), ("hybrid", 8)],
)
def test_strategies_do_not_notice(text: str, workers: int, strategy: str) -> None:
    """Two replicas do what two workers do that have the samples of all workers of a replica."""
    feeds = session_feeds(text, workers)

    def work(world: World, text: str) -> nn.Module:
        session = make_session(world, text, strategy=strategy)
        own = feeds // session.engine.placed.mesh.feeds
        for batch in batches()[:8]:
            parts = [share(batch, session.engine.placed.feed * own + number, feeds) for number in range(own)]
            session.step(tuple(torch.cat(each) for each in zip(*parts, strict=True)))
        session.close()
        return session.model

    plain = in_threads(2, lambda world: work(world, "single"))
    placed = in_threads(workers, lambda world: work(world, text))
    for net in placed:
        close_to(net, plain[0])


# Servers


SERVED = {"pipeline:microbatches=5": (4, 2), "tensor:rows=4,columns=8": (4, 4), "hybrid": (4, 4)}
SERVERS = "parameter-server"


@pytest.mark.parametrize("text", SERVED)
def test_each_part_has_servers_of_its_own(text: str) -> None:
    workers, servers = SERVED[text]

    def work(world: World) -> nn.Module:
        session = make_session(world, text, strategy=SERVERS, make=adam)
        train(session, batches())
        session.close()
        return session.model

    for net in in_threads(workers, work, strategy=SERVERS, servers=servers):
        close_to(net, alone(adam), 1e-6)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("before", "after"),
    [((SERVERS, "pipeline:microbatches=5", 4, 2), ("all-reduce", "tensor:rows=4,columns=8", 2, 0))],
)
@pytest.mark.parametrize("turned", [False, True])
def test_checkpoints_of_servers_reshape(before: Any, after: Any, turned: bool, tmp_path: Path) -> None:
    middle = STEPS // 2

    def first(world: World, strategy: str, text: str) -> None:
        session = make_session(world, text, strategy=strategy, make=adam)
        train(session, batches()[:middle])
        session.save(tmp_path)
        session.close()

    def rest(world: World, strategy: str, text: str) -> nn.Module:
        session = make_session(world, text, strategy=strategy, make=adam)
        session.resume(tmp_path)
        train(session, batches()[middle:])
        session.close()
        return session.model

    results = []
    for (strategy, text, workers, servers), half in zip(
        [after, before] if turned else [before, after], [first, rest], strict=True
    ):
        work = functools.partial(half, strategy=strategy, text=text)
        results = in_threads(workers, work, strategy=strategy, servers=servers)
    for net in results:
        close_to(net, alone(adam), 1e-6)


def test_servers_that_parts_cannot_have_are_refused() -> None:
    strategy = strategies.parse(SERVERS)

    def refusal(text: str, workers: int, servers: int, strategy: strategies.Strategy = strategy) -> str:
        placed = placement.parse(text)
        mesh = placed.mesh(workers)
        with pytest.raises(UsageError) as refused:
            placement.admit(placed, mesh, strategy, strategies.Asked(workers=mesh.replicas, servers=servers))
        return str(refused.value)

    assert "3 = 1 × 2 + 1; use --servers 2 or 4" in refusal("pipeline", 4, 3)
    assert "servers would have them once more" in refusal("sharded", 2, 2)
    assert "take every step together" in refusal("pipeline", 4, 2, strategies.parse("parameter-server:async"))
    assert "without groups and caches" in refusal(
        "pipeline", 4, 2, strategies.parse("parameter-server:cache=true")
    )


# Pipelines


class Skipping(nn.Module):
    """No sequence: a value goes around some layers, and two parameters are used without a module."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(16, 12)
        self.one = nn.Linear(12, 12)
        self.two = nn.Linear(12, 12)
        self.scale = nn.Parameter(torch.ones(12))
        self.out = nn.Linear(12, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        first = torch.tanh(self.into(inputs.flatten(1)))
        second = torch.tanh(self.one(first))
        third = torch.relu(self.two(second) + first) * self.scale
        return self.out(third + second)


@pytest.mark.parametrize("stages", [2, 3])
def test_a_model_that_is_no_sequence(stages: int) -> None:
    def make() -> nn.Module:
        return filled(Skipping().double(), 3, 0.3)

    def work(world: World) -> nn.Module:
        net = make()
        text = f"pipeline:stages={stages}"
        session = session_of(net, momentum(net), loss, world=world, placement=text, example=batches()[0])
        train(session, batches())
        session.close()
        return net

    net = make()
    optimizer = momentum(net)
    for batch in batches():
        optimizer.zero_grad()
        loss(net, batch).backward()
        optimizer.step()
    for found in in_threads(stages, work):
        close_to(found, net)


@pytest.mark.parametrize(
    ("model", "split", "convolutions"),
    [("alexnet", "features.conv4", 4), ("vgg16:head=linear", "stage4.conv1", 8)],
)
def test_published_splits_can_be_written(model: str, split: str, convolutions: int) -> None:
    """AlexNet after its 4th convolution, VGG16 after its 8th."""

    def work(world: World) -> list[str]:
        torch.manual_seed(0)
        net = models.build(model, (3, 32, 32), 10)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        session = session_of(net, optimizer, loss, world=world, placement=f"pipeline:split={split}")
        session.step((torch.ones(4, 3, 32, 32), torch.arange(4)))
        names = list(session.engine.replica.part.tensors())
        session.close()
        return names

    first, second = in_threads(2, work)
    assert sum("conv" in name and name.endswith("weight") for name in first) == convolutions
    assert not set(first) & set(second)
    assert len(first) + len(second) == len(models.build(model, (3, 32, 32), 10).state_dict())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("pipeline:split=9", ["no such layer", "2.0"]),
        ("pipeline:stages=3,split=6-4", ["order"]),
        ("pipeline:stages=8", ["7 places"]),
        ("pipeline:stages=4,split=0-1-2.0", ["no parameters"]),
    ],
)
def test_splits_that_cannot_be_are_refused(text: str, words: list[str]) -> None:
    workers = placement.parse(text).stages  # type: ignore[attr-defined]

    def work(world: World) -> str:
        with pytest.raises(UsageError) as refusal:
            make_session(world, text)
        return str(refusal.value)

    for message in in_threads(workers, work):
        assert all(word in message for word in words), message


def test_members_of_a_replica_must_get_the_same_batch() -> None:
    def work(world: World) -> None:
        session = make_session(world, "pipeline")
        batch = batches()[0]
        with pytest.raises(UsageError, match="were given 12 and 6"):
            session.step(batch if world.rank == 0 else share(batch, 0, 2))

    in_threads(2, work)


# Slices


class Attending(nn.Module):
    """PyTorch's own attention, with all that it can be asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.MultiheadAttention(8, 4, batch_first=True)
        self.other = nn.MultiheadAttention(
            8, 2, kdim=6, vdim=5, add_bias_kv=True, add_zero_attn=True, bias=False
        )
        self.layer = nn.TransformerEncoderLayer(8, 4, 12, dropout=0.0, batch_first=True)
        self.out = nn.Linear(8, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        words = inputs.flatten(2).repeat(1, 5, 2)[..., :8] * torch.arange(1, 6).view(5, 1)
        causal = nn.Transformer.generate_square_subsequent_mask(5, dtype=words.dtype)
        padding = torch.zeros(len(words), 5, dtype=torch.bool)
        padding[:, 4] = True
        first, weights = self.own(words, words, words, key_padding_mask=padding, attn_mask=causal != 0)
        turned = first.transpose(0, 1)
        per_head = causal.expand(2 * len(words), 5, 5)
        second, each = self.other(
            turned, turned[..., :6], turned[..., :5], attn_mask=per_head, average_attn_weights=False
        )
        third = self.layer(second.transpose(0, 1) + weights.mean() + each[:, 1].mean())
        alone, _ = self.own(third[0], third[0], third[0], need_weights=False)
        return self.out(third.mean(1) + alone.mean())


@pytest.mark.parametrize(
    ("text", "divided"), [("tensor", True), ("tensor:whole=own-other-layer", False), ("tensor:ways=3", False)]
)
def test_attention_of_pytorch_is_divided_by_heads(text: str, divided: bool) -> None:
    def make() -> nn.Module:
        return filled(Attending().double(), 3, 0.3)

    data = TensorDataset(*batches()[0])

    def work(world: World) -> tuple[nn.Module, tuple[int, ...], float]:
        net = make()
        session = session_of(net, momentum(net), loss, world=world, placement=text)
        train(session, batches()[:8])
        shape = tuple(session.engine.replica.part.tensors()["own.in_proj_weight"].shape)
        value = session.evaluate(data)["loss"]
        session.close()
        return net, shape, value

    net = make()
    optimizer = momentum(net)
    for batch in batches()[:8]:
        optimizer.zero_grad()
        loss(net, batch).backward()
        optimizer.step()
    for found, shape, value in in_threads(placement.parse(text).mesh(6).ways, work):
        close_to(found, net)
        assert shape == ((12, 8) if divided else (24, 8))
        assert value == pytest.approx(loss(net.eval(), batches()[0]).item(), rel=1e-9)


class Masked(nn.Module):
    """Attention with every form of mask, and the layers that PyTorch builds on it."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=batch_first)
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoderLayer(8, 2, 12, dropout=0.0, batch_first=batch_first)
        self.out = nn.Linear(8, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        words = inputs.flatten(2).repeat(1, 5, 2)[..., :8] * torch.arange(1, 6).view(5, 1)
        samples = len(words)
        if not self.attention.batch_first:
            words = words.transpose(0, 1)
        causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
        added = torch.zeros(5, 5, dtype=words.dtype).masked_fill(causal, float("-inf"))
        padding = (torch.arange(samples)[:, None] % 3 + 2) < torch.arange(5)
        attention = [causal, added, causal.expand(2 * samples, 5, 5), added.expand(2 * samples, 5, 5)]
        total = torch.zeros((), dtype=words.dtype)
        for mask, pad, need in itertools.product([None, *attention], [None, padding], [True, False]):
            hidden, weights = self.attention(
                words,
                words,
                words,
                attn_mask=mask,
                key_padding_mask=pad,
                need_weights=need,
                is_causal=mask is not None,
            )
            total = total + hidden if weights is None else total + hidden + weights.std()
        for mask in (added, causal):
            total = total + self.encoder(words, mask=mask, is_causal=True)
            total = total + self.encoder(words, mask=mask, src_key_padding_mask=padding)
            total = total + self.decoder(words, hidden, tgt_mask=mask, memory_key_padding_mask=padding)
        return self.out(torch.tanh(total / 30).mean(1 if self.attention.batch_first else 0))


@pytest.mark.filterwarnings("ignore:Support for mismatched")
@pytest.mark.parametrize("batch_first", [True, False])
def test_attention_takes_every_mask(batch_first: bool) -> None:
    def make() -> nn.Module:
        return filled(Masked(batch_first).double(), 3, 0.3)

    data = TensorDataset(*batches()[0])

    def work(world: World) -> tuple[nn.Module, float]:
        net = make()
        session = session_of(net, momentum(net), loss, world=world, placement="tensor")
        train(session, batches()[:4])
        value = session.evaluate(data)["loss"]
        session.close()
        return net, value

    net = make()
    optimizer = momentum(net)
    for batch in batches()[:4]:
        optimizer.zero_grad()
        loss(net, batch).backward()
        optimizer.step()
    value = loss(net.eval(), batches()[0]).item()
    for found, measured in in_threads(2, work):
        close_to(found, net)
        assert measured == pytest.approx(value, rel=1e-9)


class Tied(nn.Module):
    """One matrix for the words that go in and those that come out; `called`: without a module for the second use."""

    def __init__(self, called: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(4, 8)
        self.middle = nn.Linear(8, 8)
        self.head = nn.Linear(8, 4, bias=False)
        self.out = nn.Linear(4, 4)
        self.called = called
        if called:
            del self.head
        else:
            self.head.weight = self.words.weight

    def forward(self, inputs: Tensor) -> Tensor:
        bits = (inputs.flatten(1)[:, :10] > 0).long()
        hidden = torch.tanh(self.middle(self.words(bits[:, :5] + 2 * bits[:, 5:])))
        scores = F.linear(hidden, self.words.weight) if self.called else self.head(hidden)
        return self.out(scores.mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(16, 12)
        self.lstm = nn.LSTM(3, 6, num_layers=2, batch_first=True, bidirectional=True)
        self.out = nn.Linear(12, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.out(self.lstm(self.into(inputs.flatten(1)).view(-1, 4, 3))[0].mean(1))


def flattened(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Flatten(), *layers)


class Halved(nn.Linear):
    """What it computes is not what its parent computes."""

    def forward(self, inputs: Tensor) -> Tensor:
        return F.linear(inputs, self.weight / self.weight.norm(), self.bias)


def watched() -> nn.Module:
    """Hooks of the script see whole values, and change them."""
    net = flattened(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4))
    net[1].register_forward_hook(lambda module, args, output: output / (1 + output.abs().mean()))
    net[3].weight.register_hook(lambda gradient: gradient / (1 + gradient.norm()))
    return net


MADE: dict[str, Callable[[], nn.Module]] = {
    "tied": Tied,
    "tied by a call": lambda: Tied(called=True),
    "recurrent": Recurrent,
    "parametrized": lambda: flattened(weight_norm(nn.Linear(16, 8)), nn.Tanh(), orthogonal(nn.Linear(8, 4))),
    "subclass": lambda: flattened(Halved(16, 8), nn.Tanh(), Halved(8, 4)),
    "watched": watched,
}


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize(("text", "workers"), [("tensor", 2), ("sharded", 2), ("hybrid", 4)])
def test_layers_that_are_not_plain(made: str, text: str, workers: int) -> None:
    """What cannot be divided stays whole, and what is used from elsewhere is put together."""
    if made == "watched" and text != "tensor":
        pytest.skip("hooks see the samples of a shard, or of a microbatch")
    torch.manual_seed(0)
    state = MADE[made]().double().state_dict()

    def make() -> nn.Module:
        net = MADE[made]().double()
        net.load_state_dict(state)
        return net

    def work(world: World) -> nn.Module:
        net = make()
        session = session_of(net, momentum(net), loss, world=world, placement=text, example=batches()[0])
        train(session, batches()[:4])
        session.close()
        return net

    net = make()
    optimizer = momentum(net)
    for batch in batches()[:4]:
        optimizer.zero_grad()
        loss(net, batch).backward()
        optimizer.step()
    for found in in_threads(workers, work):
        close_to(found, net, 1e-8)


# Shards


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_layers_that_write_their_parameters_are_refused_in_shards(kind: Any) -> None:
    def work(world: World) -> None:
        net = nn.Sequential(kind(4, 8, max_norm=1.0), nn.Linear(8, 4))
        with pytest.raises(UsageError, match="max_norm"):
            session_of(net, momentum(net), loss, world=world, placement="sharded")

    in_threads(2, work)


class Choosing(nn.Module):
    """Which layers it uses depends on the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(16, 6)
        self.left = nn.Linear(6, 6)
        self.right = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6))
        self.out = nn.Linear(6, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.into(inputs.flatten(1)))
        chosen = self.left(hidden) if inputs[0, 0, 0, 0] > 0 else self.right(self.left(hidden))
        return self.out(chosen)


@pytest.mark.parametrize(("text", "workers"), [("sharded", 3), ("sharded:shards=2", 4)])
def test_workers_may_use_different_layers_in_a_step(text: str, workers: int) -> None:
    """Some also have no samples in it, or more batches than others."""

    def make() -> nn.Module:
        return filled(Choosing().double(), 3, 0.3)

    def given(step: int, worker: int) -> list[Batch]:
        whole = batches()[step]
        if (step + worker) % 4 == 3:
            return []
        if (step + worker) % 4 == 2:
            return [share(whole, worker, workers), share(batches()[step - 1], worker, workers)]
        return [share(whole, worker, workers)]

    def work(world: World) -> nn.Module:
        net = make()
        session = session_of(net, momentum(net), loss, world=world, placement=text)
        for step in range(STEPS):
            session.step(*given(step, world.rank))
        session.evaluate(TensorDataset(*batches()[0]), batch_size=2)
        session.close()
        return net

    net = make()
    optimizer = momentum(net)
    for step in range(STEPS):
        parts = [batch for worker in range(workers) for batch in given(step, worker)]
        total = sum(len(batch[1]) for batch in parts)
        optimizer.zero_grad()
        for batch in parts:
            (loss(net, batch) * len(batch[1]) / total).backward()
        optimizer.step()
    for found in in_threads(workers, work):
        close_to(found, net)


# The zoo


ZOO = [
    ("googlenet", (3, 32, 32), 10, "tensor", 2),
    ("googlenet", (3, 32, 32), 10, "hybrid:microbatches=1", 4),
    ("transformer:layers=2,width=16,heads=4", (6,), 11, "tensor", 2),
    ("transformer:layers=2,width=16,heads=4", (6,), 11, "pipeline:microbatches=2", 2),
    ("transformer:layers=2,width=16,heads=4", (6,), 11, "sharded", 2),
    ("lstm:layers=3,width=8", (6,), 11, "pipeline:stages=3,split=layer1-layer2", 3),
    ("lstm:layers=3,width=8", (6,), 11, "sharded", 2),
    ("resnet20", (3, 8, 8), 10, "sharded", 2),
    ("mlp:hidden=9-8", (7,), 5, "tensor", 2),
]


@pytest.mark.parametrize(("model", "shape", "classes", "text", "workers"), ZOO, ids=lambda value: str(value))
def test_models_of_the_zoo(model: str, shape: tuple[int, ...], classes: int, text: str, workers: int) -> None:
    """In double precision, in evaluation mode: no dropout, and batch norm by its running statistics."""
    generator = torch.Generator().manual_seed(2)
    steps = 2 if model == "googlenet" else 4
    if classes == 11:
        data = [torch.randint(0, 11, (4, 6), generator=generator) for _ in range(2 * steps)]
    else:
        pictures = [torch.randn(4, *shape, generator=generator, dtype=torch.float64) for _ in range(steps)]
        targets = [torch.randint(0, classes, (4,), generator=generator) for _ in range(steps)]
        data = [tensor for pair in zip(pictures, targets, strict=True) for tensor in pair]
    work = list(zip(data[::2], data[1::2], strict=True))

    def make() -> nn.Module:
        return filled(models.build(model, shape, classes).double().eval(), 9, 0.2)

    def run(world: World) -> nn.Module:
        net = make()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.5)
        session = session_of(net, optimizer, declared.loss, world=world, placement=text, example=work[0])
        train(session, work)
        session.close()
        return net

    net = make()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.5)
    for batch in work:
        optimizer.zero_grad()
        declared.loss(net, batch).backward()
        optimizer.step()
    for found in in_threads(workers, run):
        close_to(found, net, 1e-7)


def test_branches_are_on_different_workers() -> None:
    def work(world: World) -> set[tuple[str, ...]]:
        net = models.build("googlenet", (3, 32, 32), 10)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        session = session_of(net, optimizer, declared.loss, world=world, placement="tensor")
        names = session.engine.replica.part.tensors()
        return {tuple(name.split(".")[:2]) for name in names if name.startswith("inception")}

    first, second = in_threads(2, work)
    assert {branch for _, branch in first | second} == {"one", "three", "five", "pool"}
    assert not first & second


@pytest.mark.parametrize("text", ["tensor", "pipeline:microbatches=5", "sharded"])
def test_a_sparse_batch_is_a_batch(text: str) -> None:
    def make() -> nn.Module:
        return filled(Sums(), 5, 0.3)

    def work(world: World) -> None:
        net = make()
        session = session_of(net, momentum(net), loss, world=world, placement=text)
        for inputs, targets in batches()[:3]:
            ours = share(
                (inputs.flatten(1), targets), session.engine.placed.feed, session.engine.placed.mesh.feeds
            )
            session.step((ours[0].to_sparse(), ours[1]))
        session.close()
        plain = make()
        optimizer = momentum(plain)
        for inputs, targets in batches()[:3]:
            optimizer.zero_grad()
            loss(plain, (inputs.flatten(1).to_sparse(), targets)).backward()
            optimizer.step()
        close_to(net, plain)

    in_threads(2, work)


class Sums(nn.Module):
    """Takes sparse inputs, as of bags of words."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(16, 8, dtype=torch.float64))
        self.out = nn.Linear(8, 4).double()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.out(torch.tanh(torch.sparse.mm(inputs, self.table)))
