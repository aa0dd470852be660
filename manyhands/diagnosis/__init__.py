"""What is wrong with a run, in words: from its records alone, while it goes on or afterwards.

`diagnose(run)` reads a run's directory and gives its findings, the costliest first. A display that reads the
records anyway keeps a `Diagnosis`, adds the records as they come, and asks for `findings()` as often as it likes.
Nothing here writes, and nothing here imports torch.
"""

from manyhands.diagnosis.diagnosis import Diagnosis, diagnose
from manyhands.diagnosis.finding import KINDS, Finding

__all__ = ["KINDS", "Diagnosis", "Finding", "diagnose"]
