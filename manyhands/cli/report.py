"""The result of `manyhands train`, for a person or as JSON."""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

from manyhands import strategies
from manyhands.cli.run_findings import worth_saying
from manyhands.launching.ending import shown
from manyhands.launching.words import width_of, wrapped


def report(
    summary: dict[str, Any], out: Path | None, options: argparse.Namespace, *, expected: str = ""
) -> None:
    """The result for a person, or as JSON for a program; `expected` is how it went beside a prediction."""
    if options.tensorboard and out is not None:
        from manyhands.telemetry.tensorboard import export

        print(f"TensorBoard: {export(out)}", file=sys.stderr)
    if options.json:
        numbers = {key: None if _is_nan(value) else value for key, value in summary.items()}
        print(json.dumps(numbers, indent=2, allow_nan=False))
        return
    from rich.console import Console

    columns = width_of(sys.stdout)
    console = Console(highlight=False, soft_wrap=True)

    def say(line: str) -> None:
        console.print(wrapped(line, columns))

    workers = summary["workers"]
    loss = "not a number" if summary["loss"] is None or _is_nan(summary["loss"]) else f"{summary['loss']:.4f}"
    if summary["accuracy"] is not None:
        say(f"[bold]accuracy  {summary['accuracy'] * 100:.2f} %[/] on the held-out part, loss {loss}")
    else:
        say(f"[bold]loss      {loss}[/] on the held-out part")
    rate = summary["samples_per_second"]
    team = f"{workers} workers ({rate / workers:,.0f} per worker)" if workers > 1 else "1 worker"
    say(f"speed     {rate:,.0f} samples/s with {team}, without evaluation and saving")
    if expected:
        say(f"plan      {expected}")
    say(f"took      {summary['wall_s']:.1f} s without the start, {summary['steps']:,} steps")
    say(f"samples   {_samples(summary)}")
    if (stale := summary.get("staleness")) and stale["histogram"]:
        say(f"staleness mean {stale['mean']:.2f}, at most {stale['max']} updates by others; {_shares(stale)}")
    if out is not None:
        say(f"run       {shown(out)}")
    for finding in worth_saying(out) if out is not None else ():
        say(f"note      {finding.sentence}")
    say("\nwhat to try next:")
    tries = _tries(summary, out)
    width = max(len(command) for command, _ in tries)
    is_narrow = columns is not None and columns < width + 40
    for command, why in tries:
        say(f"  {command}\n      {why}" if is_narrow else f"  {command:<{width}}  {why}")


def _tries(summary: dict[str, Any], out: Path | None) -> list[tuple[str, str]]:
    """Commands that may come next, and what they are good for."""
    tries = [
        (f"manyhands train --model mlp --workers {summary['workers'] * 2}", "another model, more workers"),
        ("manyhands train --model resnet20 --data cifar10 --fetch", "colour pictures"),
        ("manyhands list strategies", "other ways to distribute it"),
    ]
    if out is not None:
        again = (
            "the same run again" + ", to the bit" * strategies.parse(summary["strategy"]).traits.repeatable
        )
        tries.insert(0, (f"manyhands train {shown(out)}/plan.json", again))
    return tries


def _samples(summary: dict[str, Any]) -> str:
    """Whether every sample of every epoch was used once; the epochs of which that is not true are named."""
    committed = summary["committed"]
    if not committed:
        return f"{summary['samples']:,}"
    count = sum(
        check.get("epochs", 1) for check in committed["epochs"]
    )  # the oldest of very many are one entry
    epochs = f"{count} epoch{'s' * (count > 1)}"
    odd = [
        f"{'up to ' if 'epochs' in check else ''}{check['epoch'] + 1}"
        for check in committed["epochs"]
        if check["twice"] or check["never"]
    ]
    left = f"; {committed['left']:,} of epoch {committed['epochs'][-1]['epoch'] + 1} are left" * bool(
        committed["left"]
    )
    if not odd:
        what = f"of {epochs}" if left else f"= {epochs}"
        return f"{committed['once']:,} {what}, each used once{left}"
    return (
        f"of {epochs}: {committed['once']:,} used once, {committed['twice']:,} more than once, "
        f"{committed['never']:,} never (epoch{'s' * (len(odd) > 1)} {', '.join(odd)}){left}"
    )


def _shares(stale: dict[str, Any]) -> str:
    """`0: 61 %, 1: 39 %`: how often a gradient was how stale, the commonest first."""
    counts = sorted(stale["histogram"].items(), key=lambda item: -item[1])
    total = sum(count for _, count in counts) or 1
    return ", ".join(f"{updates}: {count / total:.0%}" for updates, count in counts[:4])


def _is_nan(value: Any) -> bool:
    """Also for infinity: JSON has neither."""
    return isinstance(value, float) and not math.isfinite(value)
