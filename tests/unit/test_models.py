"""The zoo: published sizes, every image size it promises, the grammar, and what it refuses."""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import manyhands
from manyhands.errors import UnknownName, UsageError
from manyhands.models import MODELS, build
from manyhands.models.googlenet import TABLE

LARGE = ("alexnet", "vgg16", "vgg19", "resnet50", "resnet152", "googlenet")
SMALL = ("mlp", "cnn", "lenet", "resnet20")
LANGUAGE = ("lstm", "transformer")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Networks this small lose more by waiting for a second thread than they gain."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def outline(text: str, shape: tuple[int, ...], classes: int) -> nn.Module:
    """The model without memory for its parameters: enough to count."""
    with torch.device("meta"):
        return build(text, shape, classes)


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def layers(model: nn.Module, kind: type[nn.Module]) -> list[nn.Module]:
    return [layer for layer in model.modules() if isinstance(layer, kind)]


def sample_shape(name: str) -> tuple[int, ...]:
    return (12,) if name in LANGUAGE else (3, 32, 32)


def learn(
    model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, steps: int, rate: float
) -> list[float]:
    """The loss before each step and after the last one."""
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    losses = []
    for _ in range(steps + 1):
        loss = F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.item())
        if len(losses) <= steps:
            optimizer.step()
    return losses


# Published sizes


@pytest.mark.parametrize(
    ("text", "shape", "classes", "count"),
    [
        ("alexnet", (3, 224, 224), 1000, 61_100_840),
        ("vgg16", (3, 224, 224), 1000, 138_357_544),
        ("vgg19", (3, 224, 224), 1000, 143_667_240),
        ("resnet50", (3, 224, 224), 1000, 25_557_032),
        ("resnet152", (3, 224, 224), 1000, 60_192_808),
        ("googlenet", (3, 224, 224), 1000, 7_005_832),
        ("vgg16:head=linear", (3, 32, 32), 10, 14_714_688 + 512 * 10 + 10),
        ("resnet20", (3, 32, 32), 10, 269_722),
        ("lenet", (1, 32, 32), 10, 61_706),
        ("mlp:hidden=4096-4096", (3, 32, 32), 10, 3073 * 4096 + 4097 * 4096 + 4097 * 10),
    ],
)
def test_parameter_counts(text: str, shape: tuple[int, ...], classes: int, count: int) -> None:
    assert parameters(outline(text, shape, classes)) == count


def test_googlenet_differs_from_the_3x3_variant_only_in_its_5x5_convolutions() -> None:
    fives = sum(filters.five_reduce * filters.five for filters in TABLE.values())
    assert parameters(outline("googlenet", (3, 224, 224), 1000)) - (25 - 9) * fives == 6_624_904


@pytest.mark.parametrize(
    ("text", "convolutions", "linears"),
    [
        ("alexnet", 5, 3),
        ("vgg16", 13, 3),
        ("vgg16:head=linear", 13, 1),
        ("vgg19", 16, 3),
        ("vgg19:head=linear", 16, 1),
        ("resnet20", 19, 1),
        ("resnet50", 49 + 4, 1),  # 4 projection shortcuts, which the 50 does not count
        ("resnet152", 151 + 4, 1),
        ("googlenet", 3 + 9 * 6, 1),
        ("lenet", 2, 3),
        ("mlp:hidden=64-32-16", 0, 4),
    ],
)
def test_layer_lists(text: str, convolutions: int, linears: int) -> None:
    model = outline(text, (3, 64, 64), 10)
    assert len(layers(model, nn.Conv2d)) == convolutions
    assert len(layers(model, nn.Linear)) == linears


@pytest.mark.parametrize("name", LARGE)
def test_parameters_have_the_same_names_and_shapes_at_every_size(name: str) -> None:
    def names(side: int) -> dict[str, torch.Size]:
        return {key: value.shape for key, value in outline(name, (3, side, side), 10).state_dict().items()}

    assert names(32) == names(64) == names(224)


# Every size from the smallest


@pytest.mark.parametrize("side", [32, 47, 62, 63, 224])
@pytest.mark.parametrize("name", ["alexnet", "vgg16", "resnet50", "googlenet"])
def test_large_models_take_any_size(name: str, side: int) -> None:
    for shape in ((3, side, side), (1, side, 32)):
        with torch.device("meta"):  # shapes are checked, nothing is computed
            assert build(name, shape, 10)(torch.empty(2, *shape)).shape == (2, 10)


@pytest.mark.parametrize("side", [8, 13, 28, 33, 100])
@pytest.mark.parametrize("name", SMALL)
def test_small_models_take_any_size(name: str, side: int) -> None:
    with torch.device("meta"):
        assert build(name, (1, side, 8), 10)(torch.empty(2, 1, side, 8)).shape == (2, 10)


@pytest.mark.parametrize(
    ("text", "side"),
    [
        ("alexnet", 32),
        ("alexnet", 64),
        ("vgg16:head=linear", 32),
        ("vgg16:head=linear", 64),
        ("resnet50", 32),
        ("resnet50", 64),
        ("googlenet", 32),
        ("googlenet", 64),
        ("resnet20", 8),
        ("resnet20", 32),
        ("lenet", 28),
        ("cnn", 64),
        ("mlp", 32),
    ],
)
def test_forward_and_backward_reach_every_parameter(text: str, side: int) -> None:
    torch.manual_seed(0)
    model = build(text, (3, side, side), 5)
    loss = F.cross_entropy(model(torch.randn(2, 3, side, side)), torch.tensor([0, 3]))
    loss.backward()
    assert loss.isfinite()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


def test_published_size_of_images() -> None:
    with torch.no_grad():
        assert build("googlenet", (3, 224, 224), 1000).eval()(torch.randn(1, 3, 224, 224)).shape == (1, 1000)


# Starting values and learning


@pytest.mark.parametrize("name", ["vgg16:head=linear", "googlenet", *SMALL, *LANGUAGE])
def test_the_seed_decides_the_starting_values(name: str) -> None:
    def state(seed: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(seed)
        return build(name, sample_shape(name), 5).state_dict()

    first, again, other = state(1), state(1), state(2)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not all(torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("name", ["vgg16:head=linear", "resnet20", "cnn", "mlp", *LANGUAGE])
def test_first_predictions_are_close_to_uniform(name: str) -> None:
    torch.manual_seed(0)
    shape = sample_shape(name)
    model = build(name, shape, 10)
    inputs = torch.randint(10, (4, *shape)) if name in LANGUAGE else torch.randn(4, *shape)
    with torch.no_grad():
        logits = model(inputs)
    loss = F.cross_entropy(logits.flatten(0, -2), torch.zeros(logits.shape[:-1], dtype=torch.long).flatten())
    assert abs(loss.item() - torch.tensor(10.0).log().item()) < 0.25
    assert logits.std() > 1e-3, "the signal died on its way"


@pytest.mark.parametrize("text", ["cnn", "lenet", "resnet20", "mlp"])
def test_small_models_learn(text: str) -> None:
    torch.manual_seed(0)
    targets = torch.arange(20) % 10
    images = 0.5 * torch.randn(20, 1, 8, 8) + torch.randn(10, 1, 8, 8)[targets]
    losses = learn(build(text, (1, 8, 8), 10), images, targets, steps=20, rate=0.03)
    assert losses[-1] < 0.5 * losses[0]


def test_cnn_reads_digits_in_eight_epochs() -> None:
    with np.load(Path(manyhands.__file__).parent / "data" / "digits.npz") as arrays:
        images = torch.from_numpy(arrays["x"]).float().unsqueeze(1) / 16
        labels = torch.from_numpy(arrays["y"]).long()
    torch.manual_seed(0)
    train, test = torch.randperm(len(labels)).split([1437, 360])
    model = build("cnn", (1, 8, 8), 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(8):
        for batch in train[torch.randperm(1437)].split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    with torch.no_grad():
        accuracy = (model(images[test]).argmax(1) == labels[test]).float().mean().item()
    assert accuracy >= 0.97


@pytest.mark.parametrize("text", ["lstm:width=32", "transformer:layers=2,width=32,heads=2"])
def test_language_models_learn_to_count(text: str) -> None:
    torch.manual_seed(0)
    sequences = (torch.arange(13) + torch.arange(8)[:, None]) % 8
    losses = learn(build(text, (12,), 8), sequences[:, :-1], sequences[:, 1:], steps=40, rate=0.3)
    assert losses[-1] < 0.5 * losses[0]


# Language models


@pytest.mark.parametrize("name", LANGUAGE)
def test_language_models_see_only_the_past(name: str) -> None:
    torch.manual_seed(0)
    model = build(name, (6,), 11).eval()
    tokens = torch.randint(11, (2, 6))
    changed = tokens.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 11
    with torch.no_grad():
        before, after = model(tokens), model(changed)
        shorter = model(tokens[:, :3])
    assert before.shape == (2, 6, 11)
    torch.testing.assert_close(before[:, :4], after[:, :4])
    assert not torch.allclose(before[:, 4:], after[:, 4:])
    torch.testing.assert_close(shorter, before[:, :3])


def test_transformer_knows_the_order_of_tokens() -> None:
    torch.manual_seed(0)
    model = build("transformer", (3,), 11)
    with torch.no_grad():
        assert not torch.allclose(
            model(torch.tensor([[1, 2, 5]]))[0, 2], model(torch.tensor([[2, 1, 5]]))[0, 2]
        )


def test_lstm_layers_are_separate_modules() -> None:
    model = build("lstm:layers=3,width=16", (5,), 7)
    assert [layer.num_layers for layer in layers(model, nn.LSTM)] == [1, 1, 1]
    assert [name for name, _ in model.named_children()] == ["embedding", "layer1", "layer2", "layer3", "head"]


def test_transformer_settings() -> None:
    model = outline("transformer:layers=3,width=24,heads=2", (9,), 50)
    assert [name for name, _ in model.named_children()][1:4] == ["block1", "block2", "block3"]
    assert model.get_submodule("block1.attention.query").weight.shape == (24, 24)
    assert model.get_submodule("block1.attention").head_width == 12


# For placements that split a model


@pytest.mark.parametrize("name", MODELS)
def test_models_are_chains_of_parts_without_branches(name: str) -> None:
    """Symbolic tracing finds one graph, whatever the data."""
    model = outline(name, sample_shape(name), 5)
    assert isinstance(model, nn.Sequential)
    graph = torch.fx.symbolic_trace(model)
    with torch.device("meta"):
        inputs = torch.zeros(2, *sample_shape(name), dtype=torch.long if name in LANGUAGE else torch.float)
        assert graph(inputs).shape[-1] == 5


# The grammar


def test_settings_are_parsed() -> None:
    model = build("mlp:hidden=12-7", (1, 8, 8), 3)
    assert [layer.out_features for layer in layers(model, nn.Linear)] == [12, 7, 3]
    assert parameters(build("mlp", (5,), 3)) == 6 * 256 + 257 * 3
    assert layers(build("cnn:width=4", (1, 8, 8), 3), nn.Conv2d)[0].out_channels == 4


@pytest.mark.parametrize("name", MODELS)
def test_every_model_says_what_it_is_and_where_it_comes_from(name: str) -> None:
    first_line = (MODELS[name].__doc__ or "").splitlines()[0]
    assert first_line.endswith(".")
    assert "(" in first_line
    assert any(year in first_line for year in map(str, range(1980, 2026)))


@pytest.mark.parametrize(
    ("text", "shape", "said"),
    [
        ("resnet51", (3, 32, 32), ["resnet51", "resnet50", "package.module:callable"]),
        ("", (3, 32, 32), ["known", "cnn"]),
        (":tiny", (3, 32, 32), ["known", "cnn"]),
        ("..up:tiny", (3, 32, 32), ["known", "cnn"]),
        ("nothing:width=3", (3, 32, 32), ["nothing", "known"]),
        ("vgg16:head=round", (3, 32, 32), ["head of vgg16", "round", "linear", "published"]),
        ("vgg16:linear", (3, 32, 32), ["key=value", "linear"]),
        ("vgg16:heads=2", (3, 32, 32), ["vgg16", "heads", "head"]),
        ("resnet50:width=2", (3, 32, 32), ["resnet50", "width", "none at all"]),
        ("mlp:shape=3", (3, 32, 32), ["shape", "hidden"]),
        ("mlp:classes=3", (3, 32, 32), ["classes", "hidden"]),
        ("mlp:hidden=wide", (3, 32, 32), ["hidden", "wide", "whole number"]),
        ("mlp:hidden=12-0", (3, 32, 32), ["hidden=0", "from 1"]),
        ("cnn:width=0", (3, 32, 32), ["width=0", "from 1"]),
        ("lstm:layers=0", (9,), ["layers=0", "from 1"]),
        ("transformer:width=30,heads=4", (9,), ["30", "4 heads", "width=32"]),
    ],
)
def test_wrong_texts_are_refused(text: str, shape: tuple[int, ...], said: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        build(text, shape, 10)
    assert all(words in str(caught.value) for words in said), str(caught.value)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in (*LANGUAGE, "mlp")])
def test_image_models_refuse_token_sequences(name: str) -> None:
    with pytest.raises(UsageError, match=rf"{name} takes images.* is 128; use lstm or transformer"):
        build(name, (128,), 10)


@pytest.mark.parametrize("name", LANGUAGE)
def test_language_models_refuse_images(name: str) -> None:
    with pytest.raises(UsageError, match=rf"{name} takes sequences of tokens.* is 3×32×32; .*cnn"):
        build(name, (3, 32, 32), 10)


@pytest.mark.parametrize("name", LARGE)
def test_large_models_refuse_small_images(name: str) -> None:
    with pytest.raises(UsageError, match=rf"{name} takes images from 32×32 upwards, not 31×64; .*cnn.*8×8"):
        build(name, (3, 31, 64), 10)


def test_small_models_refuse_tiny_images() -> None:
    with pytest.raises(UsageError, match=r"cnn takes images from 8×8 upwards, not 8×7; .*mlp takes any size"):
        build("cnn", (1, 8, 7), 10)


def test_no_classes_are_refused() -> None:
    with pytest.raises(UsageError, match="0 classes"):
        build("mlp", (1, 8, 8), 0)


# The user's own models

OWN = """
from torch import nn

def sized(shape, classes):
    return nn.Linear(shape[0], classes)

def with_more(shape, classes, width=3):
    return nn.Linear(shape[0], classes + width)

def plain():
    return nn.Linear(2, 3)

class Tiny(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.shape, self.classes = shape, classes

def one(shape):
    return nn.Linear(2, 3)

def text(shape, classes):
    return "a model"

ready = nn.Linear(2, 3)
number = 5
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "my_models_for_this_test.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_models_for_this_test", raising=False)
    yield "my_models_for_this_test"
    sys.modules.pop("my_models_for_this_test", None)


def test_own_models(own: str) -> None:
    assert build(f"{own}:sized", (4,), 6).weight.shape == (6, 4)
    assert build(f"{own}:with_more", (4,), 6).weight.shape == (9, 4)
    assert build(f"{own}:plain", (4,), 6).weight.shape == (3, 2)
    tiny = build(f"{own}:Tiny", (1, 8, 8), 6)
    assert (tiny.shape, tiny.classes) == ((1, 8, 8), 6)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("one", ["(shape)", "(shape, classes) or nothing"]),
        ("text", ["returned a str", "torch.nn.Module"]),
        ("ready", ["is a Linear", "function or a class"]),
        ("number", ["is a int", "function or a class"]),
        ("missing", ["has no 'missing'"]),
        ("sized,width=3", ["nothing after it"]),
        ("sized:more", ["nothing after it"]),
    ],
)
def test_own_models_that_cannot_be_used(own: str, name: str, said: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        build(f"{own}:{name}", (4,), 6)
    assert all(words in str(caught.value) for words in said), str(caught.value)


def test_own_module_that_does_not_exist() -> None:
    with pytest.raises(UsageError, match="cannot import 'no_such_module_here'"):
        build("no_such_module_here:tiny", (4,), 6)


def test_unknown_names_are_unknown_names() -> None:
    with pytest.raises(UnknownName):
        build("resnet51", (3, 32, 32), 10)
