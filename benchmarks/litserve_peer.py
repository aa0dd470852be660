"""Another server for the same model and weights: LitServe, which batches what has come without waiting for more.

Started by serving.py with the interpreter of `make serving-peers`: WEIGHTS PORT.
"""

import sys

import litserve
import torch
from fastapi_peer import model


class PeerAPI(litserve.LitAPI):
    """At the top of a module, because its workers unpickle it."""

    def __init__(self, weights: str) -> None:
        super().__init__(max_batch_size=64, batch_timeout=0.0)
        self.weights = weights

    def setup(self, device: str) -> None:
        torch.set_num_threads(1)
        self.net = model(self.weights)

    def decode_request(self, request: dict) -> torch.Tensor:
        return torch.tensor(request["instances"])

    def batch(self, inputs: list) -> torch.Tensor:
        return torch.cat(inputs)

    def predict(self, batch: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return self.net(batch)

    def unbatch(self, output: torch.Tensor) -> list:
        return list(output)

    def encode_response(self, output: torch.Tensor) -> dict:
        return {"predictions": [output.tolist()]}


if __name__ == "__main__":
    server = litserve.LitServer(PeerAPI(sys.argv[1]), accelerator="cpu", timeout=30)
    server.run(host="127.0.0.1", port=int(sys.argv[2]), log_level="warning", generate_client_file=False)
