"""A loss that goes wrong, and the likely reason: the learning rate, alone or with gradients that are too old.

How old is too old: a rate is divided by 1 + the updates that come between a gradient and its own (Zhang et al. 2016),
as the learning-rate rule does; a run whose gradients are older than the rate was chosen for is told so when its loss
goes wrong, and when they are more than twice as old.
"""

import math
from collections import Counter, deque

from manyhands.diagnosis.finding import Finding
from manyhands.telemetry.lines import Record, number

WINDOW = 32  # losses of workers, whose mean is compared
RISE = 0.3  # of the lowest mean: a plateau that creeps up is no trouble
NOISE = 6.0  # standard errors
JUMP = 3.0  # times the first loss
BEGINNING = 4  # windows in which a jump is the rate's doing
FLAT_WINDOWS = 16
FELL = 0.02  # of the first mean: a loss that has fallen less has not fallen
LATE_AGAIN = 2.0
HIGHEST = 1e100  # a loss beyond it is as good as infinite


class LossEvidence:
    """The losses of a run in windows, and how stale its gradients were."""

    def __init__(self) -> None:
        self.rate: float | None = None
        self.late = 0.0
        self._window: list[float] = []
        self._means: deque[float] = deque(maxlen=4)
        self._windows = 0
        self._first: float | None = None
        self._lowest, self._noise = math.inf, 0.0
        self._highest_early = 0.0
        self._bad: tuple[int, int, float] | None = None  # worker, step and the loss that is no number
        self._before_bad = math.nan
        self._staleness: Counter[int] = Counter()

    def add_start(self, record: Record) -> None:
        rate, late = number(record.get("rate")), number(record.get("late"))
        self.rate = self.rate if rate is None else rate
        self.late = self.late if late is None else late

    def add_step(self, record: Record) -> None:
        loss = number(record.get("loss"))
        if loss is None or record.get("samples") == 0:
            return
        if not abs(loss) < HIGHEST:
            step = record.get("step")
            self._bad = self._bad or (record["rank"], step if isinstance(step, int) else 0, loss)
            return
        if self._bad is None:
            self._before_bad = loss
        self._window.append(loss)
        if len(self._window) == WINDOW:
            self._close_window()

    def _close_window(self) -> None:
        mean = sum(self._window) / WINDOW
        variance = sum((loss - mean) ** 2 for loss in self._window) / WINDOW
        self._window = []
        self._windows += 1
        self._means.append(mean)
        if self._first is None:
            self._first = mean
        if self._windows <= BEGINNING:
            self._highest_early = max(self._highest_early, mean)
        if mean < self._lowest:
            self._lowest, self._noise = mean, NOISE * math.sqrt(variance / WINDOW)

    def add_updates(self, record: Record) -> None:
        counts = record.get("staleness")
        for late, times in counts.items() if isinstance(counts, dict) else ():
            if str(late).isdecimal() and isinstance(times, int) and 0 <= times < 1 << 53:
                self._staleness[min(int(late), 1 << 20)] += times

    @property
    def staleness(self) -> float:
        """Updates by others between computing a gradient and applying it, as a mean."""
        total = sum(self._staleness.values())
        return sum(late * times for late, times in self._staleness.items()) / total if total else 0.0

    def findings(self) -> list[Finding]:
        trouble = self._trouble()
        stale = self.staleness > LATE_AGAIN * (self.late + 1) or (
            trouble is not None and self.staleness >= max(1.0, self.late)
        )
        if not stale:
            return [trouble] if trouble else []
        finding = self._stale(is_trouble=trouble is not None)
        return [trouble, finding] if trouble else [finding]

    def _trouble(self) -> Finding | None:
        if self._bad is not None:
            return self._not_finite(*self._bad)
        if self._first is None or not self._means:
            return None
        last = self._means[-1]
        gained = self._first - self._lowest
        has_risen = all(
            mean - self._lowest > max(gained / 2, RISE * abs(self._lowest), self._noise)
            for mean in list(self._means)[-2:]
        )
        if len(self._means) >= 2 and has_risen:
            return Finding(
                kind="diverging-loss",
                text=f"the loss is rising: {last:.4g} of late, {self._lowest:.4g} at its lowest",
                advice=self._lower_rate(),
                share=0.0,
                numbers={"loss": last, "lowest_loss": self._lowest},
            )
        jumped = self._highest_early > JUMP * max(self._first, 1e-9)
        is_flat = self._windows >= FLAT_WINDOWS and last > (1 - FELL) * self._first
        if jumped and last > (1 - FELL) * self._first:
            return self._rate_too_high(f"the loss jumped from {self._first:.4g} to {self._highest_early:.4g}")
        if is_flat and self.rate:
            return Finding(
                kind="rate-too-high",
                text=f"the loss has not fallen: {last:.4g} of late, {self._first:.4g} at first, at the learning "
                f"rate {self.rate:g}",
                advice=f"try the rate {self.rate / 10:.2g}; where that is no better, {self.rate * 10:.2g}",
                share=0.0,
                numbers={"loss": last, "first_loss": self._first, "rate": self.rate},
            )
        return None

    def _not_finite(self, worker: int, step: int, loss: float) -> Finding:
        text = f"the loss of worker {worker} is {loss} in step {step:,}"
        if math.isnan(self._before_bad):
            return Finding(
                kind="diverging-loss",
                text=f"{text}, the very first",
                advice="look for such numbers in the data, or for a logarithm or a division in the model",
                share=0.0,
                processes=(f"worker {worker}",),
                numbers={"step": step},
            )
        return Finding(
            kind="rate-too-high" if self.rate else "diverging-loss",
            text=f"{text}, after {self._before_bad:.4g}"
            + (f", at the learning rate {self.rate:g}" if self.rate else ""),
            advice=self._lower_rate(),
            share=0.0,
            processes=(f"worker {worker}",),
            numbers={"step": step, "loss_before": self._before_bad},
        )

    def _rate_too_high(self, text: str) -> Finding:
        at = f" at the learning rate {self.rate:g}" if self.rate else ""
        return Finding(
            kind="rate-too-high",
            text=f"{text}{at}, and has not come back",
            advice=self._lower_rate(),
            share=0.0,
            numbers={"first_loss": self._first or 0.0, "highest_loss": self._highest_early},
        )

    def _lower_rate(self) -> str:
        if not self.rate:
            return "try a lower learning rate, or limit the norm of the gradient"
        return f"try the learning rate {self.rate / 10:.2g}, or limit the norm of the gradient"

    def _stale(self, *, is_trouble: bool) -> Finding:
        staleness, worst = self.staleness, max(self._staleness)
        allowed = (1 + self.late) / (1 + staleness)
        lower = f", or the rate {self.rate * allowed:.2g}" if self.rate else ""
        fits = f"the learning rate is for about {self.late:g}" if not is_trouble else "the loss goes wrong"
        return Finding(
            kind="stale",
            text=f"gradients are {staleness:.1f} updates old when they are applied, at most {worst}, and {fits}",
            advice=f"bound the staleness, use a synchronous strategy{lower}",
            share=0.0,
            numbers={"staleness": staleness, "most": worst, "late": self.late},
        )
