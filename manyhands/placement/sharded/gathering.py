"""One parameter that is spread over workers: whole only while a layer computes with it."""

import torch
from torch import Tensor, nn

from manyhands.comm.comm import Comm, bits
from manyhands.placement.absent import Lack
from manyhands.replica.state.slice_of import TensorSlice


class Gathered:
    """The user's parameter, whose memory comes and goes, and the shard of it that stays here."""

    def __init__(self, param: nn.Parameter, comm: Comm, lack: Lack) -> None:
        self.param = param
        self.lack = lack
        self.comm = comm
        count = param.numel()
        length = -(-count // comm.size)
        start, stop = (min(rank * length, count) for rank in (comm.rank, comm.rank + 1))
        self.piece = TensorSlice(
            shape=tuple(param.shape), start=start, stop=stop, padding=length - (stop - start), cut=True
        )
        self.shard = nn.Parameter(self.piece.of(param.detach()).clone(), requires_grad=param.requires_grad)
        self._bytes = param.nbytes
        self.is_whole = self._is_bound = True
        # A storage of its own, to which views that autograd keeps lead as well: they see it come back.
        param.data = self._own = param.data.clone(memory_format=torch.contiguous_format)
        self.give_up()

    def give_up(self) -> None:
        if self.is_whole:
            self._own.untyped_storage().resize_(0)
            self.is_whole = False
            self.lack.leave()

    def fetch(self) -> None:
        """The shards of all workers, put together; the other workers of the replica do the same, or lend theirs."""
        if self.is_whole:
            self.lend()
            return
        self._own.untyped_storage().resize_(self._bytes)
        self._put_together(self._own.view(-1))  # not the parameter itself: autograd would see it change
        self.is_whole = True
        self.lack.come()
        if not self._is_bound:
            self._is_bound = True
            self.param.data = self._own

    def rest(self) -> None:
        """Between steps even code that does not ask the parameter's class finds no memory that is gone."""
        self.give_up()
        if self._is_bound:
            self._is_bound = False
            with torch._C.DisableTorchFunctionSubclass():
                self.param.data = self.lack.stand_in

    def lend(self) -> None:
        """What others need of it, without a use of one's own."""
        self._put_together(self.shard.new_empty(self.param.numel()))

    def _put_together(self, flat: Tensor) -> None:
        with torch.no_grad():
            flat.zero_()
            own = slice(self.piece.start, self.piece.stop)
            flat[own] = self.shard.detach()[: own.stop - own.start]
            self.comm.sum_(bits(flat))  # where the others have zeros: the very bits of each

    def reduced(self, gradient: Tensor | None) -> Tensor:
        """This worker's shard of the sum of all workers' gradients."""
        whole = (
            torch.zeros(self.piece.shape, dtype=self.param.dtype)
            if gradient is None
            else gradient.contiguous()
        )
        self.comm.sum_(whole.view(-1))
        return self.piece.of(whole).clone()
