"""What a strategy keeps beside the parameters: named vectors of a worker's own, part of every checkpoint."""

from torch import Tensor


class StrategyVectors(dict[str, Tensor]):
    """Vectors by name, made when they are first asked for."""

    def get_or_make(self, name: str, params: Tensor, start: Tensor | None) -> Tensor:
        """The vector of that name: at first a copy of `start`, or zeros like the parameters."""
        if name not in self:
            self[name] = params.new_zeros(params.shape) if start is None else start.detach().clone()
        return self[name]
