"""Which models, data and optimizers there are, for a launcher that does not load PyTorch; the tables that make them are
in `models`, `data` and `job/optimizers.py`."""

from manyhands import spec
from manyhands.errors import UnknownName
from manyhands.job.plan import Plan

MODELS = frozenset(
    {
        *("mlp", "cnn", "lenet", "resnet20", "resnet50", "resnet152"),
        *("alexnet", "vgg16", "vgg19", "googlenet", "lstm", "transformer"),
    }
)
DATA = frozenset(
    ("digits", "mnist", "fashion-mnist", "cifar10", "images", "npz", "lmdb", "text", "synthetic")
)
OPTIMIZERS = frozenset(("sgd", "adam", "adamw", "rmsprop", "adagrad", "adadelta", "nadam", "radam", "lbfgs"))


def refuse_unknown(plan: Plan) -> None:
    """Refuse what no table has; what is not in these is looked up in the tables themselves, which takes seconds."""
    name, is_path, _ = spec.split(plan.model)
    if name not in MODELS and not is_path:
        from manyhands import models

        models.build(plan.model, (1,), 1)
    name, is_path, _ = spec.split(plan.data)
    if name not in DATA and not is_path:
        from manyhands import data

        data.load(plan.data)
    name = spec.split(plan.train.optimizer)[0] if plan.train.optimizer else ""
    if name and name not in OPTIMIZERS:
        raise UnknownName("optimizer", name, OPTIMIZERS)
