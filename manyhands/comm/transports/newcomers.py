"""A listener takes no more connections, once those for which it was opened are there.

PyTorch keeps its listeners as long as their store or group: closing one is not ours to do. But the kernel can be told
to drop what arrives at a socket. Connections that were made before go on; any other process finds a port that does not
answer.
"""

import ctypes
import os
import socket
import struct

_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)  # of a packet let in 0 bytes (BPF_RET)
_SO_ATTACH_FILTER = _SO_GET_FILTER = 26
_PIDFD_GETFD = 438


def refuse(listener: socket.socket) -> None:
    """From now on."""
    program = ctypes.create_string_buffer(_DROP_ALL, len(_DROP_ALL))
    listener.setsockopt(
        socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("@HL", 1, ctypes.addressof(program))
    )


def are_refused(pid: int, descriptor: int) -> bool:
    """Whether another process has done so with a listener; False where the kernel does not let this one look."""
    system = ctypes.CDLL(None)
    try:
        process = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        copy = system.syscall(_PIDFD_GETFD, process, descriptor, 0)
        if copy < 0:
            return False
        instructions = ctypes.c_uint(0)
        failed = system.getsockopt(copy, socket.SOL_SOCKET, _SO_GET_FILTER, None, ctypes.byref(instructions))
        os.close(copy)
        return not failed and instructions.value > 0
    finally:
        os.close(process)
