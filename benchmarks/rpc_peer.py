"""An asynchronous parameter server over `torch.distributed.rpc`, as PyTorch's tutorials on it do it.

The server holds the model and the optimizer. A worker sends its gradients in one call, the server applies them at once
and answers with the parameters that it then has.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.rpc as rpc
from torch import Tensor, nn
from torch.optim import Optimizer

SERVER = "server"


class Server:
    """One per process: calls by name need something to find."""

    made: "Server"

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._parameters = list(model.parameters())
        self._optimizer = optimizer
        self._lock = threading.Lock()
        Server.made = self

    def apply(self, gradients: list[Tensor]) -> list[Tensor]:
        with self._lock:
            for param, gradient in zip(self._parameters, gradients, strict=True):
                param.grad = gradient
            self._optimizer.step()
        return self.parameters()

    def parameters(self) -> list[Tensor]:
        return [param.detach() for param in self._parameters]


def apply(gradients: list[Tensor]) -> list[Tensor]:
    return Server.made.apply(gradients)


def parameters() -> list[Tensor]:
    return Server.made.parameters()


def serve(model: nn.Module, optimizer: Optimizer, rank: int, size: int) -> None:
    """Until all workers have left."""
    Server(model, optimizer)
    rpc.init_rpc(SERVER, rank=rank, world_size=size)
    rpc.shutdown()


def join(
    model: nn.Module, loss: Callable[[nn.Module, Any], Tensor], rank: int, size: int
) -> Callable[[Any], float]:
    """A worker; returns its step."""
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
    own = list(model.parameters())

    def take(values: list[Tensor]) -> None:
        with torch.no_grad():
            for param, value in zip(own, values, strict=True):
                param.copy_(value)

    take(rpc.rpc_sync(SERVER, parameters))

    def step(batch: Any) -> float:
        model.zero_grad()
        value = loss(model, batch)
        value.backward()
        take(rpc.rpc_sync(SERVER, apply, args=([param.grad for param in own],)))
        return value.item()

    return step
