"""An asynchronous parameter server over `torch.distributed.rpc`, as PyTorch's tutorial on batched RPC teaches it.

The server holds the model and the optimizer. A worker sends its gradients in one call; the server adds them to those
that it has, steps once enough calls have come (here: each one), clears them and answers with the model, with which the
worker goes on.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.rpc as rpc
from torch import Tensor, nn
from torch.optim import Optimizer

SERVER = "server"
CALLS_PER_STEP = 1  # as many as workers would make it synchronous


class Server:
    """One per process: calls by name need something to find."""

    made: "Server"

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model = model
        self._optimizer = optimizer
        self._lock = threading.Lock()
        self._calls = 0
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        Server.made = self

    def apply(self, gradients: list[Tensor]) -> nn.Module:
        with self._lock:
            for param, gradient in zip(self.model.parameters(), gradients, strict=True):
                param.grad.add_(gradient)
            self._calls += 1
            if self._calls == CALLS_PER_STEP:
                for param in self.model.parameters():
                    param.grad.div_(CALLS_PER_STEP)
                self._optimizer.step()
                self._optimizer.zero_grad(set_to_none=False)
                self._calls = 0
        return self.model


def apply(gradients: list[Tensor]) -> nn.Module:
    return Server.made.apply(gradients)


def fetch() -> nn.Module:
    return Server.made.model


def serve(model: nn.Module, optimizer: Optimizer, rank: int, size: int) -> None:
    """Until all workers have left."""
    Server(model, optimizer)
    rpc.init_rpc(SERVER, rank=rank, world_size=size)
    rpc.shutdown()


def join(loss: Callable[[nn.Module, Any], Tensor], rank: int, size: int) -> Callable[[Any], float]:
    """A worker; returns its step."""
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=size)
    model = rpc.rpc_sync(SERVER, fetch)

    def step(batch: Any) -> float:
        nonlocal model
        value = loss(model, batch)
        value.backward()
        model = rpc.rpc_sync(SERVER, apply, args=([param.grad for param in model.parameters()],))
        return value.item()

    return step
