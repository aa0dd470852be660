"""What a person can choose on the page, and whether a plan that was put together there can run."""

import dataclasses
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from manyhands import spec, strategies
from manyhands.errors import UnknownName, UsageError
from manyhands.job.known_names import DATA, MODELS, OPTIMIZERS
from manyhands.job.plan import SCHEDULES, Plan
from manyhands.job.rate_schedule import RateSchedule
from manyhands.placement import PLACEMENTS

PREVIEW_POINTS = 200


def choices() -> dict[str, Any]:
    """Strategies, placements, optimizers and the default plan; models and data come from a process with torch."""
    presets = [
        {"name": name, "line": f"{preset.line} ({preset.paper})", "about": f"The same as {preset.strategy}."}
        for name, preset in strategies.PRESETS.items()
    ]
    return {
        "strategies": list(_described(strategies.STRATEGIES)),
        "presets": presets,
        "placements": list(_described(PLACEMENTS)),
        "optimizers": sorted(OPTIMIZERS),
        "schedules": SCHEDULES,
        "plan": msgspec.to_builtins(Plan()),
    }


def plan_of(words: Mapping[str, Any], *, allow_code: bool) -> Plan:
    """The plan that a page has put together, or the refusal that the command line would give."""
    try:
        plan = msgspec.convert(words, Plan)
    except msgspec.ValidationError as error:
        reason, _, where = str(error).partition(" - at `$.")
        raise UsageError(f"{where.rstrip('`') or 'plan'}: {reason}") from None
    for kind, text, known in (("model", plan.model, MODELS), ("data", plan.data, DATA)):
        refuse_code(kind, text, known, allow_code=allow_code)
    plan.check()
    name = spec.split(plan.train.optimizer)[0] if plan.train.optimizer else ""
    if name and name not in OPTIMIZERS:
        raise UnknownName("optimizer", name, OPTIMIZERS)
    return plan


def refuse_code(kind: str, text: str, known: Iterable[str], *, allow_code: bool) -> None:
    """Refuse names that no table has; a path to code of the person's own runs only where the page may run code."""
    name, is_path, _ = spec.split(text)
    if name in known:
        return
    if not is_path:
        raise UnknownName(kind, name, known)
    if not allow_code:
        raise UsageError(
            f"{kind} {text!r} is code of your own, which this page does not run; start it with --allow-code"
        )


def preview(plan: Plan, samples: int | None) -> dict[str, Any]:
    """With what the plan would train and why, and the learning rate over its steps where their number is known."""
    settled, why = plan.on_fair_terms()
    found: dict[str, Any] = {"optimizer": settled.train.optimizer, "why": why, "batch": settled.batch}
    rate = spec.split(settled.train.optimizer or "")[2].get("lr")
    if samples and rate is not None:
        feeds = plan.mesh().feeds
        per_epoch = max(1, -(-samples // (settled.batch * feeds * plan.train.accumulate)))
        total = settled.train.total_steps(per_epoch)
        schedule = RateSchedule(settled.train, total, per_epoch)
        stride = max(1, total // PREVIEW_POINTS)
        steps = [*range(0, total, stride), total - 1]
        found |= {
            "steps_per_epoch": per_epoch,
            "total_steps": total,
            "step": steps,
            "rate": [float(rate) * schedule(step) for step in steps],
        }
    return found


def _described(table: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    for name, kind in table.items():
        about = inspect.getdoc(kind) or ""
        settings = [
            {"name": field.name, "default": _typed(field.default), "type": str(field.type)}
            for field in dataclasses.fields(kind)
        ]
        yield {"name": name, "line": about.splitlines()[0], "about": about, "settings": settings}


def _typed(default: Any) -> str:
    """As one would type it."""
    return "" if default in (None, (), dataclasses.MISSING) else spec.text(default)
