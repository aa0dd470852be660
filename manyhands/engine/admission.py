"""What a worker refuses before it begins to train."""

import inspect
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from manyhands import placement as placements
from manyhands import strategies
from manyhands.cluster.launchers.rank_info import RankInfo
from manyhands.cluster.worker.server_context import ServerContext
from manyhands.cluster.worker.world import World
from manyhands.comm import codecs
from manyhands.engine.arguments import admit_arguments, admit_parameters
from manyhands.engine.settings import Settings, Training
from manyhands.errors import UsageError
from manyhands.placement.mesh import Mesh
from manyhands.replica.optimizer.abilities import (
    abilities_of,
    keeps_to_rows,
    needs_closure,
    runs_whole,
    trained_by,
    type_names,
)
from manyhands.replica.optimizer.trial import Grain
from manyhands.replica.parameters import sparse_ids
from manyhands.replica.sync_norm import SyncedLayer
from manyhands.strategies import Asked

WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel")


def admit(settings: Settings, training: Training, world: World | ServerContext) -> None:
    """Refuse what cannot run as asked."""
    admit_arguments(training)
    _admit_model(training.model)
    if isinstance(world, World):
        _admit_beside_others(training.model, world)
    admit_parameters(training.model, training.optimizer)
    if training.scheduler is not None:
        _admit_scheduler(training.scheduler)
    strategy = strategies.parse(settings.strategy)
    info = world.rank_info
    placed = placements.parse(settings.placement)
    mesh = placed.mesh(info.workers)
    _admit_scripted(training.model, settings, mesh)
    _admit_parameters(training.model, settings, mesh)
    if mesh.stages > 1:
        _admit_stages(training)
    asked = _asked(mesh, info, training, len(world.hosts) if isinstance(world, World) else None)
    if settings.skip_nonfinite and (strategy.traits.servers or needs_closure(training.optimizer)):
        raise UsageError(
            f"skip_nonfinite={settings.skip_nonfinite}: a worker can leave out a step only where it makes the update "
            "itself; leave it out with servers and with L-BFGS"
        )
    if info.workers > 1:
        _admit_norms(training.model, strategy, settings, mesh)
    placements.admit(placed, mesh, strategy, asked)
    if world.rank_info.workers > 1:
        _admit_limited_rows(training.model, strategy.traits, mesh)
    strategies.admit(strategy, asked)
    _admit_codec(settings, training, strategy, mesh)
    strategies.admit_copies(strategy, have_hosts=info.address is not None)
    _admit_optimizer(training.optimizer, strategy, settings, mesh)
    _admit_tables(training)
    strategies.admit_model(strategy, [name for name, _ in training.model.named_parameters()])


def _admit_codec(
    settings: Settings, training: Training, strategy: strategies.Strategy, mesh: placements.Mesh
) -> None:
    codec, name = codecs.parse(settings.codec), strategies.describe(strategy)
    params = [param for group in training.optimizer.param_groups for param in group["params"]]
    device = params[0].device.type if params else "cpu"
    strategies.admit_codec(codec, strategy, name, members=mesh.members, device=device)
    if settings.codec == codecs.DEFAULT:
        return
    kind = type(training.optimizer).__name__
    if runs_whole(training.optimizer):
        raise UsageError(
            f"--codec {settings.codec} codes the one sum of a host, and {kind} here gives each worker a replica of its "
            "own; leave --codec out, or use an optimizer that can be divided (docs/optimizers.md)"
        )
    if other := {param.dtype for param in params} - {torch.float32}:
        raise UsageError(
            f"--codec {settings.codec} codes 32-bit gradients, and the model has parameters of {other.pop()}; leave "
            "--codec out"
        )
    names = ("momentum", "betas", "alpha", "rho")
    found = (
        f"{one}={group[one]}" for group in training.optimizer.param_groups for one in names if group.get(one)
    )
    strategies.admit_momentum(codec, kind, next(found, ""))


def _admit_model(model: nn.Module) -> None:
    """Refuse parameters that have no shape yet."""
    lazy = [name for name, param in model.named_parameters() if is_lazy(param)]
    if lazy:
        raise UsageError(
            f"{lazy[0]} and {len(lazy) - 1} other parameters have no shape yet, because a lazy module makes them with "
            "its first batch; call the model once on a batch before mh.session, and make the optimizer after that"
        )
    for name, module in model.named_modules():
        if type(module).__name__ in WRAPPERS and type(module).__module__.startswith("torch."):
            inside = "model.module" if not name else f"the model without {name}'s wrapper"
            raise UsageError(
                f"the model is wrapped in {type(module).__name__}, which exchanges gradients by itself; give the "
                f"session what is in it: mh.session({inside}, …)"
            )


def _admit_scripted(model: nn.Module, settings: Settings, mesh: Mesh) -> None:
    """Refuse modules of TorchScript, which call no hook of ours, where we need one."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.RecursiveScriptModule):
            made, why = "script", "in which the session cannot see what a script loads"
        elif isinstance(module, torch.jit.ScriptModule) and mesh.members > 1:
            made, why = "trace", f"which {settings.placement} cannot divide"
        else:
            continue
        raise UsageError(
            f"{name or 'the model'} is a module of torch.jit.{made}, {why}; give the session the module that it was "
            f"made of, and use torch.jit.{made} on that after training"
        )


def _admit_parameters(model: nn.Module, settings: Settings, mesh: Mesh) -> None:
    """Refuse a model that gives others than it has, where we ask it what to divide."""
    given, had = (
        {id(param) for param in params} for params in (model.parameters(), nn.Module.parameters(model))
    )
    if mesh.members > 1 and given != had:
        raise UsageError(
            f"{type(model).__name__} has {len(had)} parameters, its parameters() gives {len(given)}, and "
            f"{settings.placement} divides all of them; leave parameters() as torch.nn.Module has it, and give the "
            "optimizer those to train"
        )


def _admit_stages(training: Training) -> None:
    """Refuse parameters that get gradients and that the optimizer has not: each stage needs some that it trains."""
    trained = {id(param) for param in trained_by(training.optimizer)}
    left_out = [
        name
        for name, param in training.model.named_parameters()
        if param.requires_grad and id(param) not in trained
    ]
    if left_out:
        more = f" and {len(left_out) - 1} others" if len(left_out) > 1 else ""
        raise UsageError(
            f"a pipeline is cut by what the optimizer trains, and it has not {left_out[0]}{more}; give them to it, or "
            "say requires_grad_(False) of them"
        )


def _admit_beside_others(model: nn.Module, world: World) -> None:
    """Refuse a model of which another session has laid parts over workers."""
    params = {id(param) for param in model.parameters()}
    for other in world.siblings.open if world.siblings else ():
        if not other.placed.is_whole and params & {id(param) for param in other.training.model.parameters()}:
            raise UsageError(
                f"session {other.number + 1} has laid this model over workers ({other.settings.placement}), and a "
                "model in parts has one session; make one whose optimizer wraps both, or leave --placement out"
            )


def _admit_norms(model: nn.Module, strategy: strategies.Strategy, settings: Settings, mesh: Mesh) -> None:
    """Refuse layers that normalise over the samples of all workers where these have no common step to do it in."""
    found = ((name, one) for name, one in model.named_modules() if isinstance(one, nn.SyncBatchNorm))
    name, layer = next(found, ("", None))
    if layer is None:
        return
    if not (strategy.traits.synchronous and strategy.traits.repeatable):
        why = (
            f"under {settings.strategy} a step is not that of one process on the samples of all workers; use "
            f"--strategy {strategies.DEFAULT}"
        )
    elif mesh.members > 1:
        why = f"{settings.placement} gives each worker a part of the model; use no --placement"
    elif layer.process_group is not None:
        why = "its process_group names some of the workers; leave process_group out, for all workers"
    elif not isinstance(layer, SyncedLayer) and type(layer).forward is not nn.SyncBatchNorm.forward:
        why = f"{type(layer).__name__} has a forward of its own; use torch.nn.SyncBatchNorm"
    else:
        return
    raise UsageError(
        f"the layer {name or 'given'} is a SyncBatchNorm, which cannot be synchronised here: {why}, or leave "
        "convert_sync_batchnorm out: each worker's BatchNorm then goes by its own batches, and statistics become the "
        "mean at every pause; or use GroupNorm, which needs no other samples"
    )


def _admit_limited_rows(model: nn.Module, traits: strategies.Traits, mesh: Mesh) -> None:
    """Refuse tables that write to themselves while they compute, where other workers have the same or a copy of it."""
    is_own = traits.replica == "own" and not traits.pooled and traits.servers is None
    if (
        is_own or (mesh.replicas == 1 and traits.servers is None) or mesh.shards > 1
    ):  # shards have their own reason
        return
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            table = f"{name or 'model'}.weight"
            before = f"; before each step say on every worker: {table}.data = torch.renorm({table}.data, "
            before += f"{module.norm_type:g}, 0, {module.max_norm:g}), which all take over together"
            raise UsageError(
                f"{table} has a limit of the norm of its rows (max_norm), which each worker keeps for the rows that it "
                f"looks up, while others compute with them; leave max_norm out{before if mesh.members == 1 else ''}"
            )


def _admit_scheduler(scheduler: Any) -> None:
    """Refuse a scheduler whose `step` needs more than the session has after a step."""
    wanted = inspect.signature(scheduler.step).parameters.values()
    takes_any = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    missing = [one.name for one in wanted if one.default is one.empty and one.kind not in takes_any]
    if missing:
        raise UsageError(
            f"{type(scheduler).__name__}.step needs {', '.join(missing)}, and the session steps its scheduler after "
            "every step, when there is no such thing; leave scheduler= out, and on every worker call "
            'scheduler.step(session.evaluate(data)["loss"]) where it is due'
        )


def _admit_optimizer(
    optimizer: Optimizer, strategy: strategies.Strategy, settings: Settings, mesh: Mesh
) -> None:
    """An optimizer that cannot be divided, or has parameters of several types, needs a whole replica on every worker,
    and all to make the same steps."""
    found, types = abilities_of(optimizer), type_names(trained_by(optimizer))
    is_mixed, is_known = len(types) > 1, strategies.tuning(strategy).only_optimizer is not None
    if not is_mixed and (found.grain is not Grain.WHOLE or is_known):
        return
    name, traits = type(optimizer).__name__, strategy.traits
    if found.draws == "elsewhere" and mesh.replicas * mesh.members > 1:
        raise UsageError(
            f"{name} draws random numbers that are not PyTorch's, so each worker would have other parameters; draw "
            "them by torch.rand or torch.randn, which we make the same on all workers"
        )
    if traits.servers is not None:
        why, other = "servers would divide its work among them", f"--strategy {strategies.DEFAULT}"
    elif mesh.members > 1:
        why, other = f"{settings.placement} gives each worker a part of the parameters", "no --placement"
    elif not traits.synchronous:
        why, other = (
            f"under {settings.strategy} workers make steps of their own",
            f"--strategy {strategies.DEFAULT}",
        )
    else:
        return
    if is_mixed:
        raise UsageError(
            f"the trained parameters are of {len(types)} types ({', '.join(types)}), so every worker must have and "
            f"update all of them, and {why}; use {other}, or convert the model before mh.session, as by "
            "model.float(), and compute in bfloat16 by torch.autocast"
        )
    raise UsageError(
        f"{name} must update all parameters in one call, by the gradients of all workers, since {found.reason}, and "
        f"{why}; use {other}, or another optimizer"
    )


def _admit_tables(training: Training) -> None:
    """Refuse an optimizer that takes no gradients of some rows, where the model has such tables."""
    tables, optimizer = sparse_ids(training.model), training.optimizer
    if tables and not runs_whole(optimizer):
        for group in optimizer.param_groups:
            if any(id(param) in tables for param in group["params"]):
                keeps_to_rows(optimizer, group)


def _asked(mesh: placements.Mesh, info: RankInfo, training: Training, hosts: int | None) -> Asked:
    name = type(training.optimizer).__name__.lower()
    # The launcher has admitted what a run began with; a worker that joins may find fewer workers.
    workers = info.rows // mesh.members if info.generation and not info.address else mesh.replicas
    return Asked(workers=workers, servers=info.servers, optimizer=name, hosts=hosts)
