"""Data sets by name, and one function that loads any of them."""

import importlib.util
from pathlib import Path

from manyhands import spec
from manyhands.data import cifar, digits, images, lmdb_file, npz, synthetic, text, user
from manyhands.data.idx import FASHION_MNIST, MNIST
from manyhands.data.lmdb_file import to_lmdb
from manyhands.data.loading import gather, prefetch
from manyhands.data.pictures import PictureSettings
from manyhands.data.request import Progress, Request, Source
from manyhands.data.sets import Data, Samples, Store, StoredSet
from manyhands.errors import UnknownName, UsageError

__all__ = [
    "DATASETS",
    "Data",
    "Progress",
    "Samples",
    "Store",
    "StoredSet",
    "gather",
    "load",
    "prefetch",
    "to_lmdb",
]

DATASETS: dict[str, Source] = {
    "digits": Source(
        form="digits",
        description="1,797 handwritten digits, 8×8, shipped with the package (Alpaydin, Kaynak 1998, UCI)",
        load=digits.load,
    ),
    "mnist": Source(
        form="mnist",
        description="70,000 handwritten digits, 28×28 (LeCun, Bottou, Bengio, Haffner 1998)",
        load=MNIST.load,
    ),
    "fashion-mnist": Source(
        form="fashion-mnist",
        description="70,000 pieces of clothing, 28×28 (Xiao, Rasul, Vollgraf 2017)",
        load=FASHION_MNIST.load,
    ),
    "cifar10": Source(
        form="cifar10",
        description="60,000 colour pictures of ten kinds of things, 32×32 (Krizhevsky 2009)",
        load=cifar.load,
        augmented=True,
    ),
    "images": Source(
        form="images:DIR",
        description="your pictures, in one folder per class; train and test (or val) folders above are the split",
        load=images.load,
        settings=PictureSettings,
        augmented=True,
    ),
    "npz": Source(
        form="npz:FILE",
        description="your numpy archive with x and y, and x_test and y_test if it is split already",
        load=npz.load,
        settings=PictureSettings,
        augmented=True,
    ),
    "lmdb": Source(
        form="lmdb:FILE",
        description="an LMDB file written by manyhands (the input format of Caffe, Jia et al. 2014)",
        load=lmdb_file.load,
        augmented=True,
    ),
    "text": Source(
        form="text:FILE,length=64",
        description="your text for language models, one token per byte, the last tenth held out",
        load=text.load,
        settings=text.TextSettings,
        sized=False,
    ),
    "synthetic": Source(
        form="synthetic:3x32x32:10,samples=4096",
        description="made-up samples of a shape and a number of classes that can be learned",
        load=synthetic.load,
        settings=synthetic.SyntheticSettings,
    ),
}

_KNOWN_ELSEWHERE = {
    **dict.fromkeys(("cifar", "cifar-10", "cifar100", "cifar-100"), "cifar10"),
    **dict.fromkeys(("fashionmnist", "fmnist"), "fashion-mnist"),
    **dict.fromkeys(("imagenet", "imagefolder", "folder"), "images:DIR"),
    **dict.fromkeys(("shakespeare", "wikitext", "wikitext2", "openwebtext"), "text:FILE"),
    **dict.fromkeys(("random", "fake", "dummy", "fakedata"), "synthetic:3x32x32:10"),
}


def load(
    text: str,
    *,
    seed: int = 0,
    size: int | None = None,
    augment: bool = False,
    directory: Path | None = None,
    fetch: bool = False,
    progress: Progress | None = None,
) -> Data:
    """The data set that a text like `cifar10` or `text:FILE,length=64` or `package.module:callable` names.

    `size` scales pictures to size × size, `augment` moves and mirrors those to train on, `directory` is where
    published data sets are looked for, and `fetch` allows to bring missing ones.
    """
    name, pieces, settings = spec.split(text)
    if size is not None and size < 1:
        raise UsageError(f"--data {text}: a size of {size} pixels is too small; the smallest is 1")
    request = Request(
        text=text,
        pieces=tuple(pieces),
        seed=seed,
        size=size,
        augment=augment,
        directory=directory,
        fetch=fetch,
        progress=progress,
    )
    source = DATASETS.get(name)
    if source is None:
        if not pieces or not _importable(name):
            raise UnknownName("data", name, [*DATASETS, "package.module:callable"], _KNOWN_ELSEWHERE)
        _refuse(request, sized=False, augmented=False)
        return user.load(request)
    if pieces and ":" not in source.form:
        raise UsageError(f"--data {text}: {name} takes nothing after the colon; write --data {name}")
    _refuse(request, sized=source.sized, augmented=source.augmented)
    values = spec.settings_of(source.settings, settings, "data", name)
    return source.load(request, source.settings(**values))


def _refuse(request: Request, *, sized: bool, augmented: bool) -> None:
    if request.size is not None and not sized:
        raise UsageError(f"--data {request.text}: a size cannot be set for this data; leave it out")
    if request.augment and not augmented:
        able = ", ".join(name for name, source in DATASETS.items() if source.augmented)
        raise UsageError(f"--data {request.text}: augment is for {able}; leave it out")


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module.partition(".")[0]) is not None
    except ValueError:
        return False
