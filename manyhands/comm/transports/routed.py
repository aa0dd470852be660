"""Point-to-point messages that take shared memory inside a host and the network between hosts."""

from torch import Tensor

from manyhands.comm.transports.transport import Handle, Transport


class RoutedTransport:
    """Ranks are those of the world; `local` counts the workers of this host, in the order of `local_ranks`."""

    def __init__(self, local_ranks: tuple[int, ...], local: Transport, remote: Transport) -> None:
        self.rank = remote.rank
        self.size = remote.size
        self._local_index = {peer: index for index, peer in enumerate(local_ranks)}
        self._local = local
        self._remote = remote

    def send(self, peer: int, vector: Tensor) -> Handle:
        transport, address = self._route(peer)
        return transport.send(address, vector)

    def receive(self, peer: int, into: Tensor) -> Handle:
        transport, address = self._route(peer)
        return transport.receive(address, into)

    def _route(self, peer: int) -> tuple[Transport, int]:
        if peer in self._local_index:
            return self._local, self._local_index[peer]
        return self._remote, peer
