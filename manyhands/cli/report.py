"""The result of `manyhands train`, for a person or as JSON."""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

from manyhands import strategies


def report(summary: dict[str, Any], out: Path | None, options: argparse.Namespace) -> None:
    """The result for a person, or as JSON for a program."""
    if options.tensorboard and out is not None:
        from manyhands.telemetry.tensorboard import export

        print(f"TensorBoard: {export(out)}", file=sys.stderr)
    if options.json:
        numbers = {key: None if _is_nan(value) else value for key, value in summary.items()}
        print(json.dumps(numbers, indent=2, allow_nan=False))
        return
    from rich.console import Console

    say = Console(highlight=False, soft_wrap=True).print
    workers = summary["workers"]
    loss = "not a number" if summary["loss"] is None or _is_nan(summary["loss"]) else f"{summary['loss']:.4f}"
    if summary["accuracy"] is not None:
        say(f"[bold]accuracy  {summary['accuracy'] * 100:.2f} %[/] on the held-out part, loss {loss}")
    else:
        say(f"[bold]loss      {loss}[/] on the held-out part")
    rate = summary["samples_per_second"]
    team = f"{workers} workers ({rate / workers:,.0f} per worker)" if workers > 1 else "1 worker"
    say(f"speed     {rate:,.0f} samples/s with {team}")
    say(f"took      {summary['wall_s']:.1f} s, {summary['steps']:,} steps, {summary['samples']:,} samples")
    if summary["committed"]:
        say(f"ledger    {_ledger(summary['committed'])}")
    if (stale := summary.get("staleness")) and stale["histogram"]:
        say(f"staleness mean {stale['mean']:.2f}, at most {stale['max']} updates by others; {_shares(stale)}")
    if out is not None:
        say(f"run       {_relative(out)}")
    say("\nwhat to try next:")
    tries = [
        (f"manyhands train --model mlp --workers {workers * 2}", "another model, more workers"),
        ("manyhands train --model resnet20 --data cifar10 --fetch", "colour pictures"),
        ("manyhands list strategies", "other ways to distribute it"),
    ]
    if out is not None:
        again = (
            "the same run again" + ", to the bit" * strategies.parse(summary["strategy"]).traits.repeatable
        )
        tries.insert(0, (f"manyhands train {_relative(out)}/plan.json", again))
    width = max(len(command) for command, _ in tries)
    for command, why in tries:
        say(f"  {command:<{width}}  {why}")


def _ledger(committed: dict[str, Any]) -> str:
    """Whether every sample of every epoch was used once; the epochs of which that is not true are named."""
    count = len(committed["epochs"])
    text = (
        f"{committed['once']:,} samples of {count} epoch{'s' * (count > 1)} committed once, "
        f"{committed['twice']:,} twice, {committed['never']:,} never"
    )
    odd = [check for check in committed["epochs"] if check["twice"] or check["never"]]
    if odd:
        text += f" (epoch {', '.join(str(check['epoch'] + 1) for check in odd)})"
    return f"{text}; {committed['left']:,} left of the last one" if committed["left"] else text


def _shares(stale: dict[str, Any]) -> str:
    """`0: 61 %, 1: 39 %`: how often a gradient was how stale, the commonest first."""
    counts = sorted(stale["histogram"].items(), key=lambda item: -item[1])
    total = sum(count for _, count in counts) or 1
    return ", ".join(f"{updates}: {count / total:.0%}" for updates, count in counts[:4])


def _is_nan(value: Any) -> bool:
    """Also for infinity: JSON has neither."""
    return isinstance(value, float) and not math.isfinite(value)


def _relative(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
