"""What the script reads and changes by itself in its model and optimizer while a session runs.

The session has the values elsewhere: the parameters in the replica's vector, the optimizer's state with the replica or
on servers. What is read comes from there. What is put in (`load_state_dict`, `param.data = …`) has its effect on this
worker's model at once, in memory of its own, and is noticed at the session's next call: then all workers take it over
together (`take_over.py`).
"""

import math
import operator
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as modules

from manyhands import placement
from manyhands.engine.settings import Training
from manyhands.engine.spot_check import Seen, SpotCheck
from manyhands.errors import UsageError
from manyhands.placement.placed import PlacedModel
from manyhands.replica.optimizer.twins import HOOKS
from manyhands.replica.replica import Replica
from manyhands.replica.state.live import ByParameter, LiveState, ShownState
from manyhands.replica.state.state import known_here
from manyhands.servers.worker import saved_state
from manyhands.servers.worker.client import Servers

# For every parameter at every step: the fastest ways to ask.
_address = Tensor.data_ptr
_version = operator.attrgetter("_version")


class _Registrations:
    """How often this process has put a parameter or a module into a module: then a model may have changed."""

    def __init__(self) -> None:
        self.count = -1

    def watch(self) -> None:
        if self.count < 0:
            self.count = 0
            modules.register_module_parameter_registration_hook(self._note)
            modules.register_module_module_registration_hook(self._note)

    def _note(self, *_: Any) -> None:
        self.count += 1


_registrations = _Registrations()


class _Hook:
    """A hook on a module of the model; on a copy of the module, or in a file, it is one that does nothing."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = weakref.WeakMethod(call)

    def __call__(self, *args: Any) -> Any:
        call = self._call()
        return None if call is None else call(*args)

    def __reduce__(self) -> Any:
        return getattr, (
            nullcontext(),
            "__exit__",
        )  # takes anything, does nothing, and needs no package of ours


@dataclass(frozen=True)
class ScriptChange:
    """What the script has put in since the session's last call."""

    values: dict[str, Tensor]
    """Parameters, and where the model is in parts buffers, by name; whole."""
    is_whole: bool
    """Whether these are all parameters."""
    state: Mapping[Any, Mapping[str, Any]] | None
    """Of the optimizer, by parameter, if that is another one."""


class ScriptState:
    """One session's view of the script's objects; `enter` tells it where a generation has their values."""

    def __init__(self, training: Training, *, is_synchronous: bool) -> None:
        """Where it `is_synchronous`, nothing but a step changes the parameters."""
        self._is_synchronous = is_synchronous
        self._spots: SpotCheck | None = None
        self._seen_spots: Seen | None = None  # what they were after a step
        self._model, self._optimizer = training.model, training.optimizer
        self._live = LiveState(self._read)
        self._make = _make_of(training.optimizer)
        self._expected: Any = None  # what the optimizer's state is while the script has not changed it
        self._hooks: list[Any] = []
        self._trained: dict[int, str] = {}  # the names of all parameters, by id
        self._names: dict[int, str] = {}  # those of buffers as well
        self._params: list[nn.Parameter] = []
        self._homes: dict[int, Tensor] = {}  # by id of a parameter: where it is in the replica
        self._addresses: list[int] = []
        self._versions: list[int] = []  # how often PyTorch has seen each parameter written to
        self._seen = 0  # registrations when the model was last compared
        # Of a model in parts, by id: the whole shapes; and what the script has loaded, with its part from before.
        self._shapes: dict[int, tuple[int, ...]] = {}
        self._loaded: dict[int, tuple[Tensor, Tensor]] = {}
        self._replica: Replica | None = None
        self.is_late = False
        """Whether this worker has joined a run under way, and has made no call of its own yet: what its script has
        loaded the others have left behind."""

    # Where a generation has everything

    def enter(self, replica: Replica, servers: Servers | None, placed: PlacedModel) -> None:
        """A generation begins."""
        self._replica, self._servers, self._placed = replica, servers, placed
        self._params = list(self._model.parameters()) if placed.is_whole else []
        watches = self._is_synchronous and bool(self._params) and placed.peers.size > 1
        self._spots = SpotCheck(replica) if watches else None
        self._trained = {id(param): name for name, param in self._model.named_parameters()}
        self._names = {**{id(one): name for name, one in self._model.named_buffers()}, **self._trained}
        self._shapes = {id(tensor): tuple(shape) for tensor, shape in replica.part.whole_shapes}
        self._loaded = {}
        self._homes = {id(param): param.data for param in self._params}
        self._addresses = list(map(_address, self._params))
        if not self._hooks:
            _registrations.watch()
            self._hooks = [
                module.register_load_state_dict_pre_hook(_Hook(self._divert))
                for module in self._model.modules()
            ]
            if hasattr(
                self._optimizer, "_optimizer_state_dict_post_hooks"
            ):  # a wrapper's state is in what it wraps
                self._hooks.append(self._optimizer.register_state_dict_post_hook(_Hook(self._copy)))
        self._seen = _registrations.count
        self.settle()

    def settle(self) -> None:
        """Everything is where the replica has it."""
        self._versions = list(map(_version, self._params))
        self.look_away()
        if self._keeps_its_own:
            self._expected = self._optimizer.state
        else:
            self._expected = self._optimizer.state = self._live  # type: ignore[assignment]

    def leave(self) -> None:
        """The session ends: everything is the script's own again."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._optimizer.state is self._live:
            self._optimizer.state = defaultdict(dict)
        self._replica = self._spots = self._seen_spots = None

    @property
    def _keeps_its_own(self) -> bool:
        """Whether the user's optimizer itself makes the updates."""
        replica = self._replica
        return replica is not None and replica.runs_whole and not replica.is_served

    # What the script reads

    def _read(self, param: Any) -> ByParameter:
        """The state of one parameter, or of all, by the script's own parameters."""
        replica = self._replica
        if replica is None:
            return {}
        if not self._placed.is_whole:
            raise UsageError(
                f"under --placement {placement.describe(self._placed.placement)} this worker has a part of the "
                "optimizer's state: call session.optimizer_state() on every worker instead of optimizer.state_dict()"
            )
        originals = replica.part.originals(replica.parameters)
        own = {place.name: original for place, original in zip(replica.layout.places, originals, strict=True)}
        if replica.is_served and replica.needs_closure and param is not None:
            return {param: {}}  # hooks on the optimizer's step see it called, which keeps something here
        if replica.is_served:
            known = self._from_servers(replica)
        else:
            known = known_here(
                replica, None if param is None else {name for name, one in own.items() if one is param}
            )
        return {own[name]: ShownState(values) for name, values in known.items()}

    def _from_servers(self, replica: Replica) -> Any:
        if replica.needs_closure:
            raise UsageError(
                f"the servers have {type(self._optimizer).__name__}'s history in parts: save it with session.save()"
            )
        if self._servers is None:
            raise UsageError(
                "the servers have the optimizer's state, and another worker of this host speaks with them: "
                "call session.optimizer_state() on every worker instead of optimizer.state_dict()"
            )
        return saved_state.read(self._servers, replica)

    def _copy(self, optimizer: Any, shown: dict[str, Any]) -> dict[str, Any]:
        """A `state_dict` stays as it is while training goes on: numbers are copies anyway, and then vectors must be."""
        if self._optimizer.state is not self._live:
            return shown
        self.written_state()
        state = {
            index: {name: one.clone() if isinstance(one, Tensor) else one for name, one in values.items()}
            for index, values in shown["state"].items()
        }
        return {**shown, "state": state}

    def written_state(self) -> str | None:
        """The name of what the script has written into the optimizer's state, as it is shown: where that is the memory
        of the replica. Into a copy it must not write."""
        found = self._live.written()
        if found is None or self._replica is None:
            return None
        name, written = found
        vector = self._replica.updates.vectors.get(name)
        if vector is None or not 0 <= written.data_ptr() - vector.data_ptr() < vector.nbytes:
            raise UsageError(
                f"the script has written into {name!r} of optimizer.state, which is a copy while a session runs, so "
                "nothing would come of it; give the optimizer another state by optimizer.load_state_dict(…), on every "
                "worker"
            )
        return name

    # What the script puts in

    def _divert(
        self, module: nn.Module, state: Mapping[str, Any], prefix: str, metadata: Any, *_: Any
    ) -> None:
        """Before a module loads values: they go into memory of this worker's own, since other workers may be reading
        the replica's, until all take them over. With `assign=True` they are copied too."""
        if self._replica is None:
            return
        metadata["assign_to_params_buffers"] = False
        if self._placed.is_opened:
            return  # into the whole model, which is this worker's own for the moment
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None or prefix + name not in state:
                continue
            self._placed.lend(tensor)
            if id(tensor) in self._shapes and id(tensor) not in self._loaded:
                self._loaded[id(tensor)] = tensor, tensor.data
                unknown = math.nan if tensor.is_floating_point() else 0  # should the load fail
                tensor.data = tensor.new_full(self._shapes[id(tensor)], unknown)
            elif id(tensor) in self._homes and tensor.data_ptr() == self._homes[id(tensor)].data_ptr():
                tensor.data = tensor.data.clone()

    def is_touched(self) -> bool:
        """Whether the script may have done something since the last step; asked before every step."""
        return (
            bool(self._live.shown)
            or self._spotted() is not None
            or self.is_late
            or self.is_changed()
            or self.is_made_anew()
            or self._versions != list(map(_version, self._params))
        )

    def is_made_anew(self) -> bool:
        """Whether the optimizer has other parameters, hooks or memory than the session was made for."""
        return self._make != _make_of(self._optimizer)

    def accept(self) -> None:
        """It may."""
        self._make = _make_of(self._optimizer)

    def is_changed(self) -> bool:
        """Whether the script may have put something into model or optimizer."""
        return self._replica is not None and (
            self._addresses != list(map(_address, self._params))
            or self._optimizer.state is not self._expected
            or self._seen != _registrations.count
            or bool(self._loaded)
        )

    def refuse_moved(self) -> None:
        """After a step: the model itself must not have moved a parameter, since the update went to where it was."""
        if self._addresses != list(map(_address, self._params)):
            name = next(iter(self._moved()))
            raise UsageError(
                f"the forward pass gave parameter {name!r} other memory (param.data = …), which the update does not "
                "reach; write into it instead: param.data.copy_(…)"
            )
        self._versions = list(map(_version, self._params))
        self._seen_spots = None

    def look(self, *, is_early: bool) -> None:
        """A step is made on all workers; until the next call only the script changes the parameters."""
        if self._spots is not None and (is_early or self._spots.is_cheap):
            self._seen_spots = self._spots.look()

    def look_away(self) -> None:
        """Something else than a step or the script may change the parameters."""
        self._seen_spots = None

    def _spotted(self) -> str | None:
        seen, spots = self._seen_spots, self._spots
        if seen is None or spots is None:
            return None
        now = spots.look()
        return None if now.tobytes() == seen.tobytes() else spots.names(seen, now)[0]

    def written(self) -> str | None:
        """The name of a parameter into which the script has written since the last step, if there is one."""
        versions = list(map(_version, self._params))
        if versions == self._versions:
            return self._spotted()
        self._versions, before = versions, self._versions
        first = next(
            index for index, (now, then) in enumerate(zip(versions, before, strict=True)) if now != then
        )
        return self._trained[id(self._params[first])]

    def take(self, *, trains: bool) -> ScriptChange | None:
        """What the script has put in, if anything: afterwards the model's parameters are the replica's again. Where no
        step follows, the script may only have lent the model other values, for an evaluation."""
        if self._seen != _registrations.count:
            self._compare()
        values = {}
        if trains:
            moved = self._moved()
            for name, param in moved.items():
                self._check_kind(name, param)
                if param.numel() and param.data_ptr() in self._addresses:
                    raise UsageError(
                        f"parameter {name!r} was given the memory of another one, and would not stay tied to it; tie "
                        "them before mh.session as one parameter: module.weight = other.weight"
                    )
                values[name], param.data = param.data, self._homes[id(param)]
        for tensor, home in self._loaded.values():
            values[self._names[id(tensor)]], tensor.data = tensor.data, home
            self._placed.take_back(tensor)
        is_whole = bool(values) and len(values) >= len(self._params)
        self._loaded.clear()
        state = self._optimizer.state if self._optimizer.state is not self._expected else None
        return ScriptChange(values, is_whole, state) if values or state is not None else None

    def drop(self) -> None:
        """Forget what the script has put in."""
        if self._replica is not None:
            self.take(trains=True)
            self.settle()

    def _moved(self) -> dict[str, nn.Parameter]:
        return {
            self._names[id(param)]: param
            for param, address in zip(self._params, self._addresses, strict=True)
            if param.data_ptr() != address
        }

    def _check_kind(self, name: str, param: nn.Parameter) -> None:
        home = self._homes[id(param)]
        for what, now, then in (
            ("shape", tuple(param.shape), tuple(home.shape)),
            ("type", param.dtype, home.dtype),
            ("device", param.device, home.device),
        ):
            if now != then:
                raise UsageError(
                    f"parameter {name!r} has another {what} ({now}) than when the session was made ({then}); convert "
                    "the model before mh.session, or close the session, convert, and make a new one"
                )

    def _compare(self) -> None:
        """A parameter or a module was put into some module: refuse it if it was this model."""
        self._seen = _registrations.count
        now = {id(param): name for name, param in self._model.named_parameters()}
        for number, name in now.items():
            if number not in self._trained:
                raise UsageError(
                    f"parameter {name!r} is not the one that the model had when the session was made, so it would "
                    "not be trained; copy new values into the old one (param.data.copy_(…), "
                    "model.load_state_dict(…)), or close the session and make a new one"
                )
        for number, name in self._trained.items():
            if number not in now:
                raise UsageError(
                    f"the model has lost parameter {name!r} since the session was made; close the session and make "
                    "a new one"
                )


def _make_of(optimizer: Any) -> list[Any]:
    """Its parameters by group, whether they have momentum, and who looks on."""
    own = vars(optimizer)
    return [
        own.get("step"),
        *[len(own.get(name) or ()) for name in HOOKS],
        *[(bool(group.get("momentum")), *map(id, group["params"])) for group in optimizer.param_groups],
    ]
