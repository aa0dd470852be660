"""What the script does between two steps is taken over, warned of or refused, and hooks of its optimizer see the whole
step; a scheduler's counts the steps alone."""

from manyhands.engine.engine import Engine, groups_of, has_momentum
from manyhands.errors import UsageError
from manyhands.replica.optimizer.abilities import is_hooked


def begin_call(engine: Engine, trains: bool) -> None:
    """What the script has done to model and optimizer since the last call is taken over, warned of or refused."""
    script = engine.script
    if engine.has_entered and script.is_made_anew():
        _refuse_other_groups(engine)
        _refuse_late_changes(engine)
        script.accept()
    if name := script.written_state():
        engine.warn_written_state(name)
    if script.is_changed():
        engine.take_over(engine, trains)
    if trains and engine.world.size > 1 and (name := script.written()):
        engine.warn_written(name)
    script.look_away()
    script.is_late = False


def _refuse_other_groups(engine: Engine) -> None:
    """The optimizer must have the parameters, group by group, that the session was made with."""
    now = groups_of(engine.training.optimizer)
    if now == engine.trained:
        return
    before, after = (sum(map(len, groups)) for groups in (engine.trained, now))
    what = f"had {before} parameters when the session was made and has {after} now"
    if before == after:
        what = "has its parameters in other groups than when the session was made, or others in their places"
    raise UsageError(
        f"the optimizer {what}; call session.close() before you change them, and make a new session after that"
    )


def _refuse_late_changes(engine: Engine) -> None:
    """An optimizer that has hooks when the session is made runs whole, and they see all of it. What it will keep is
    known then, too."""
    optimizer = engine.training.optimizer
    if not engine.had_momentum and (engine.served or engine.world.size > 1) and has_momentum(optimizer):
        raise UsageError(
            "the momentum of SGD was 0 when the session was made, so there is no memory for what it keeps; make the "
            "optimizer with a momentum, if only of 1e-9, or close the session and make a new one"
        )
    if not engine.replica.runs_whole and is_hooked(engine.training.optimizer):
        raise UsageError(
            "a hook was put on the optimizer after mh.session had divided its work among workers, and would see no "
            "gradients; put it there before the session is made"
        )


def show_step(engine: Engine, loss: float) -> None:
    """A scheduler that replaced `step` wants to see it called; without gradients it changes nothing."""
    optimizer = engine.training.optimizer
    evaluates = engine.replica.needs_closure
    if "step" in vars(optimizer) and (engine.served or not engine.replica.runs_whole):
        optimizer.step(*[lambda: loss] * evaluates)
