"""The process in which models compute: what the server tells it, one thing after the other; it opens no port.

Versions are loaded in a thread, so that others go on to answer meanwhile.
"""

import ctypes
import os
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path

import torch

from manyhands.errors import CheckpointError, DataError, ManyhandsError, UsageError
from manyhands.serving import model_frames as frames
from manyhands.serving.picture_input import row_of
from manyhands.serving.served_model import ServedModel, load

_PR_SET_PDEATHSIG = 1
_LOADING_NICENESS = 5
_TYPES = {"FP32": torch.float32, "INT64": torch.int64}


class ModelProcess:
    """Until the server closes its end."""

    def __init__(self, server: socket.socket) -> None:
        self._server = server
        self._sending = threading.Lock()
        self._models: dict[int, ServedModel] = {}

    def run(self) -> None:
        head = bytearray(frames.HEAD.size)
        while self._fill(head):
            length, tensor_bytes = frames.HEAD.unpack(head)
            said, tensor = bytearray(length), bytearray(tensor_bytes)
            if not (self._fill(said) and self._fill(tensor)):
                return
            message = frames.decode_to_process(said)
            if isinstance(message, frames.LoadVersion):
                threading.Thread(target=self._load, args=(message,), daemon=True).start()
            elif isinstance(message, frames.UnloadVersion):
                self._models.pop(message.handle, None)
            else:
                self._compute(message, tensor)

    def _compute(self, message: frames.RunBatch | frames.DecodePicture, tensor: bytearray) -> None:
        begun_s = time.perf_counter()
        try:
            model = self._models[message.handle]
            if isinstance(message, frames.RunBatch):
                dtype = _TYPES[model.form.input.type]
                inputs = torch.frombuffer(tensor, dtype=dtype).view(message.rows, *message.row_shape)
                outputs = model.run(inputs)
                if len(outputs) != message.rows:
                    raise CheckpointError(f"the model gave {len(outputs)} rows for {message.rows}")
            else:
                outputs = row_of(bytes(tensor), model.form.picture)
        except Exception as error:  # of a model, of a decoder: any
            is_input = isinstance(error, DataError)
            if not isinstance(error, ManyhandsError):
                traceback.print_exc()
            reason = str(error) or type(error).__name__
            self._say(
                frames.NotComputed(
                    number=message.number, reason=reason.splitlines()[0][:500], is_input=is_input
                )
            )
            return
        content = memoryview(outputs.numpy()).cast("B")  # type: ignore[arg-type]
        took_s = time.perf_counter() - begun_s
        self._say(frames.Computed(number=message.number, took_s=took_s), content)

    def _load(self, message: frames.LoadVersion) -> None:
        begun_s = time.perf_counter()
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOADING_NICENESS)
        try:
            model = load(Path(message.place), message.allowed)
            model.warm_up(message.warm_up)
            accuracy = model.accuracy()
            self._models[message.handle] = model
            took_s = time.perf_counter() - begun_s
            self._say(
                frames.VersionLoaded(handle=message.handle, form=model.form, accuracy=accuracy, took_s=took_s)
            )
        except Exception as error:  # of files, of models that others wrote, of what cannot be told: any
            self._models.pop(message.handle, None)
            if not isinstance(error, (ManyhandsError, OSError)):
                traceback.print_exc()
            # What is damaged may be half copied; what is refused, or computes nonsense, stays so.
            is_whole = isinstance(error, UsageError)
            reason = " ".join(str(error).split()) or type(error).__name__
            self._say(frames.VersionFailed(handle=message.handle, reason=reason[:1000], for_good=is_whole))

    def _say(self, message: frames.FromProcess, content: memoryview | None = None) -> None:
        with self._sending:
            said = frames.framed(message, len(content) if content is not None else 0)
            self._server.sendall(said if content is None else said + content)

    def _fill(self, buffer: bytearray) -> bool:
        """Read so many bytes; False if the server has ended."""
        view = memoryview(buffer)
        while view:
            count = self._server.recv_into(view)
            if not count:
                return False
            view = view[count:]
        return True


def main() -> None:
    """Of a process that the server starts with a descriptor, a number of threads, its own number and a folder."""
    descriptor, threads, server = (int(word) for word in sys.argv[1:4])
    sys.path.append(sys.argv[4])  # last: nothing there takes the place of a library
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
        return
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # to a whole group: the server ends this process when it is done
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(threads)
    with socket.socket(fileno=descriptor) as connection:
        try:
            ModelProcess(connection).run()
        except (ConnectionResetError, BrokenPipeError):  # the server has ended
            return


if __name__ == "__main__":
    main()
