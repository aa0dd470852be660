"""The terms on which strategies are compared: the same samples for all, and a learning rate that fits the update.

docs/comparing-fairly.md says why. In short, with k the number of workers' batches that go into one update:

    rate = base rate × min(k, 4)       SGD: the linear scaling rule with warm-up (Goyal et al. 2017)
    rate = base rate × √min(k, 4)      methods that divide by the gradient's size: Adam and its relatives
    rate ÷ (1 + updates late)          where others update the parameters meanwhile (Zhang et al. 2016)
    updates = samples ÷ (batch × k)
"""

import math
from dataclasses import dataclass

from manyhands import spec
from manyhands.strategies.interface import Strategy
from manyhands.strategies.tuning import tuning

# What trains each model without a search, with updates from one batch: plain nets need a smaller rate than those
# with batch norm, language models Adam.
BASE = "sgd:lr=0.025,momentum=0.9"
BASE_OF = {
    "alexnet": "sgd:lr=0.005,momentum=0.9",
    "vgg16": "sgd:lr=0.005,momentum=0.9",
    "vgg19": "sgd:lr=0.005,momentum=0.9",
    "lstm": "adamw:lr=0.0015",
    "transformer": "adamw:lr=0.0007",
}

MOST_BATCHES = 4  # the rate grows no further: beyond, small networks no longer follow the linear rule
WARM_UP_EPOCHS = 1.0
_TIMES = {2: "twice ", 3: "3 times ", 4: "4 times "}
CHOOSE_THEIR_STEPS = ("lbfgs",)


@dataclass(frozen=True, kw_only=True)
class Terms:
    """With what, and how carefully, a strategy trains where the person has not said."""

    optimizer: str
    warm_up_epochs: float
    batches_per_update: int
    why: str


def terms(model: str, strategy: Strategy, workers: int, *, hosts: int = 1, accumulate: int = 1) -> Terms:
    """The optimizer for this model under this strategy, and the reason in one sentence."""
    facts = tuning(strategy, workers, hosts)
    base_text = facts.optimizer or BASE_OF.get(spec.split(model)[0], BASE)
    name, _, settings = spec.split(base_text)
    batches = facts.batches * accumulate
    if name in CHOOSE_THEIR_STEPS:
        return Terms(
            optimizer=base_text,
            warm_up_epochs=0.0,
            batches_per_update=batches,
            why=f"{name} chooses the length of its steps itself",
        )
    base = float(settings["lr"])
    scaled = min(batches, MOST_BATCHES)
    is_linear = name == "sgd"
    late = facts.late
    rate = base * (scaled if is_linear else math.sqrt(scaled)) / (1 + late)
    settings["lr"] = f"{rate:.3g}"
    return Terms(
        optimizer=f"{name}:{','.join(f'{key}={value}' for key, value in settings.items())}",
        warm_up_epochs=WARM_UP_EPOCHS if batches > 1 else 0.0,
        batches_per_update=batches,
        why=f"learning rate {rate:.3g}{_reason(base, is_linear, batches, late)}",
    )


def _reason(base: float, is_linear: bool, batches: int, late: int) -> str:
    """How the rate comes from that of one worker, and why."""
    if batches == 1 and not late:
        return ", as one worker has it, since each update uses 1 batch"
    times, parts, reasons = "", "", []
    if batches > 1:
        scaled = min(batches, MOST_BATCHES)
        times = _TIMES[scaled] if is_linear else f"√{scaled} times "
        limit = f", of which {MOST_BATCHES} count" if batches > MOST_BATCHES else ""
        reasons.append(f"each update uses {batches} batches{limit}")
    if late:
        parts = f" divided by {1 + late}"
        reasons.append(f"gradients are about {late} update{'s' * (late > 1)} late")
    warm_up = "; warm-up in epoch 1" if batches > 1 else ""
    return f": {times}the {base:g} of one worker{parts}, since {', and '.join(reasons)}{warm_up}"


def updates(samples: int, batch: int, batches_per_update: int) -> int:
    """How many updates a strategy makes from the samples that all of them get."""
    return -(-samples // (batch * batches_per_update))
