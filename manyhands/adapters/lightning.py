"""A strategy for Lightning's Trainer: `Trainer(strategy=ManyhandsStrategy())`, under `manyhands launch`.

Lightning keeps its loop, callbacks and loggers; manyhands divides the training data, adds up the gradients of all
workers and makes the step. Validation runs on all of its data on every worker, so its numbers need no reduction.
"""

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn

from manyhands.adapters.prepare import PreparedLoader, prepare
from manyhands.engine import worker_process
from manyhands.engine.session import Session
from manyhands.errors import UsageError


class ManyhandsStrategy(SingleDeviceStrategy):  # type: ignore[misc]
    """One worker of a manyhands run; `settings` are those of `mh.session`."""

    strategy_name = "manyhands"

    def __init__(self, **settings: Any) -> None:
        super().__init__(device=torch.device("cpu"))
        self._settings = settings
        self._session: Session | None = None
        rank_zero_only.rank = worker_process.rank()  # who logs and shows progress

    @property
    def session(self) -> Session:
        if self._session is None:
            raise UsageError("the session begins with trainer.fit(…)")
        return self._session

    @property
    def is_global_zero(self) -> bool:
        return self._session.is_main if self._session else worker_process.rank() == 0

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        count = len(trainer.optimizers)
        if count != 1 or not trainer.lightning_module.automatic_optimization:
            raise UsageError(
                f"ManyhandsStrategy runs automatic optimization with one optimizer, and this module has "
                f"{count}; keep your own loop with one mh.session for each of them"
            )
        module: nn.Module = trainer.lightning_module
        _, optimizer, _ = prepare(module, trainer.optimizers[0], None, **self._settings)
        self._session = optimizer.session
        self.optimizers = [optimizer]

    def process_dataloader(self, dataloader: object) -> object:
        """Each worker gets its share of the training data; all evaluate everything."""
        trainer = self.lightning_module.trainer if self.lightning_module else None
        if self._session is None or trainer is None or not trainer.training:
            return dataloader
        return PreparedLoader(dataloader, self._session)

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        loss = super().optimizer_step(optimizer, closure, model, **kwargs)
        rank_zero_only.rank = self.session.rank  # it may have changed
        return loss

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """The mean over the workers."""
        if self._session is None or not isinstance(tensor, Tensor):
            return tensor
        return torch.as_tensor(self._session.mean(tensor)).to(tensor)

    def barrier(self, name: str | None = None) -> None:
        if self._session and not self._session.is_closed:
            self._session.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Every worker has made the same: names and paths from the same arguments."""
        return obj

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        if self._session is None:
            return tensor
        return torch.stack([torch.as_tensor(one) for one in self._session.gather(tensor)])

    def teardown(self) -> None:
        if self._session and not self._session.is_closed:
            self._session.close()
        super().teardown()
