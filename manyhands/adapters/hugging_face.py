"""Hugging Face's `Trainer` with manyhands below it. Import it before you make `TrainingArguments`.

    from manyhands.adapters.hugging_face import ManyhandsTrainer as Trainer

The Trainer keeps its loop, callbacks, logs and checkpoints; manyhands divides the training data, adds up the gradients
of all workers and makes the step. Evaluation runs on all of its data on every worker.
"""

import os
from typing import Any

import transformers

from manyhands.adapters.prepare import PreparedLoader, PreparedOptimizer, prepare
from manyhands.engine import worker_process
from manyhands.errors import UsageError

# What would have accelerate make a process group of its own.
for _name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
    os.environ.pop(_name, None)


class ManyhandsTrainer(transformers.Trainer):  # type: ignore[misc]
    """`transformers.Trainer`, one worker of a manyhands run; `session_settings` are those of `mh.session`."""

    def __init__(
        self, *arguments: Any, session_settings: dict[str, Any] | None = None, **settings: Any
    ) -> None:
        super().__init__(*arguments, **settings)
        self._session_settings = session_settings or {}
        self._prepared: PreparedOptimizer | None = None
        if self.args.world_size > 1:
            raise UsageError(
                f"accelerate has begun a world of {self.args.world_size} processes of its own; import "
                "manyhands.adapters.hugging_face before you make TrainingArguments"
            )
        self._be(worker_process.rank())

    def _be(self, rank: int) -> None:
        """Which worker this is, for those who ask who logs and saves; it may change when another one dies."""
        self.args.distributed_state.process_index = rank
        self.args.distributed_state.local_process_index = rank

    def create_optimizer(self, *arguments: Any) -> PreparedOptimizer:
        if self._prepared is None:
            made = super().create_optimizer(*arguments)
            _, self._prepared, _ = prepare(self.model, made, None, **self._session_settings)
            self.optimizer = self._prepared
        return self._prepared

    def get_train_dataloader(self) -> Any:
        loader = super().get_train_dataloader()
        prepared = self.create_optimizer()
        return PreparedLoader(getattr(loader, "base_dataloader", loader), prepared.session)

    def training_step(self, *arguments: Any, **settings: Any) -> Any:
        loss = super().training_step(*arguments, **settings)
        prepared = self.create_optimizer()
        prepared.loss = (prepared.loss or 0.0) + float(loss)  # the parts of an accumulated step
        self._be(prepared.session.rank)
        return loss

    def _save_checkpoint(self, *arguments: Any, **settings: Any) -> None:
        super()._save_checkpoint(*arguments, **settings)
        self.create_optimizer().session.barrier()  # the others go on when it is written
