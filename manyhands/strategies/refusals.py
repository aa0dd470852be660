"""What a run is asked to be, and refusals that strategies share."""

from collections.abc import Collection
from dataclasses import dataclass

from manyhands.errors import UnknownName, UsageError


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a run is asked to be, as far as a strategy may have to refuse it."""

    workers: int
    servers: int = 0
    optimizer: str | None = None  # its name in small letters; None where it is not known yet
    hosts: int | None = None  # None until the workers have met


def at_least_one(**settings: int | None) -> None:
    for name, value in settings.items():
        if value is not None and value < 1:
            raise UsageError(f"{name}={value}: it must be at least 1")


def at_least(lowest: float, why: str, **settings: float) -> None:
    for name, value in settings.items():
        if not value >= lowest:
            raise UsageError(f"{name}={value:g}: it must be at least {lowest:g}, {why}")


def within(lowest: float, highest: float, **settings: float | None) -> None:
    for name, value in settings.items():
        if value is not None and not lowest <= value <= highest:
            raise UsageError(f"{name}={value:g}: it must be from {lowest:g} to {highest:g}")


def one_of(known: Collection[str], what: str, value: str) -> None:
    if value not in known:
        raise UnknownName(what, value, known)


def one_gradient_per_step(asked: Asked) -> None:
    """For strategies whose gradients come late, or whose steps are counted: a line search takes any number of them."""
    if asked.optimizer == "lbfgs":
        raise UsageError(
            "lbfgs evaluates the loss several times in a step, and this strategy gives one gradient per step; "
            "use another optimizer or --strategy all-reduce"
        )


def one_gradient_per_push(asked: Asked) -> None:
    """For strategies whose servers run the user's optimizer."""
    if asked.optimizer == "lbfgs":
        raise UsageError(
            "servers cannot run L-BFGS, which evaluates the loss several times in a step; use an optimizer "
            "that takes one gradient per step"
        )


def equal_groups(asked: Asked, groups: int) -> None:
    if asked.workers % groups:
        raise UsageError(
            f"{asked.workers} workers cannot form {groups} groups of equal size ({asked.workers} ÷ {groups} leaves "
            f"{asked.workers % groups}); use --workers {-(-asked.workers // groups) * groups}, or other groups="
        )


def equal_server_groups(asked: Asked, groups: int, server_groups: int) -> None:
    for count, what in ((groups, "groups of workers"), (asked.servers, "servers")):
        if count % server_groups:
            raise UsageError(
                f"{count} {what} cannot be divided among {server_groups} server groups "
                f"({count} ÷ {server_groups} leaves {count % server_groups}); use a multiple of "
                f"{server_groups}, or other server_groups="
            )


def groups_without_servers(asked: Asked, groups: int) -> None:
    """Workers that own the parameters are one group, or each is one by itself in the memory of their host."""
    if groups not in (1, asked.workers):
        raise UsageError(
            f"{groups} groups of {asked.workers // groups} workers need servers to wait in: use owners=servers with "
            f"--servers 1, or, where workers own the parameters, groups=1 or groups={asked.workers}"
        )
    if groups > 1 and (asked.hosts or 1) > 1:
        raise UsageError(
            f"{groups} groups whose workers own the parameters meet in the memory of one host, and there are "
            f"{asked.hosts}; use owners=servers with --servers 1"
        )


def group_settings(
    groups: int, between: str, bound: int | None, owners: str, server_groups: int, exchange_every: int
) -> None:
    at_least_one(groups=groups, server_groups=server_groups, exchange_every=exchange_every)
    one_of(("async", "stale"), "consistency between groups", between)
    one_of(("servers", "workers"), "owners", owners)
    if bound is not None and (between != "stale" or bound < 0):
        raise UsageError(f"bound={bound} must be 0 or more, and is for between=stale; leave it out")
    if between == "stale" and (owners == "workers" or groups == 1):
        raise UsageError("between=stale needs groups that can wait: use groups=2 or more with owners=servers")
    if server_groups > 1 and (owners == "workers" or between == "stale"):
        raise UsageError(
            f"server_groups={server_groups} needs owners=servers and between=async: server groups know nothing of each "
            "other's steps; leave it out otherwise"
        )
