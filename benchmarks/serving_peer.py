"""Another server for the same model and weights: FastAPI as people write it by hand, or LitServe.

Started by serving.py with the interpreter of `make serving-peers`: NAME WEIGHTS PORT.
"""

import sys

import torch
from safetensors.torch import load_file
from torch import nn


def model(weights: str) -> nn.Module:
    """The MLP of the benchmark, without anything of ours."""
    found = nn.Sequential(
        nn.Flatten(),
        nn.Linear(784, 1024),
        nn.ReLU(),
        nn.Linear(1024, 1024),
        nn.ReLU(),
        nn.Linear(1024, 10),
    )
    values = load_file(weights)
    names = ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias", "output.weight", "output.bias")
    found.load_state_dict(dict(zip(found.state_dict(), (values[name] for name in names), strict=True)))
    return found.eval()


def fastapi(weights: str, port: int) -> None:
    import uvicorn
    from fastapi import FastAPI
    from pydantic import BaseModel

    class Call(BaseModel):
        instances: list[list[float]]

    app, net = FastAPI(), model(weights)

    @app.post("/predict")
    async def predict(call: Call) -> dict:
        with torch.inference_mode():
            return {"predictions": net(torch.tensor(call.instances)).tolist()}

    uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")


def litserve(weights: str, port: int) -> None:
    import litserve as ls

    class API(ls.LitAPI):
        def setup(self, device: str) -> None:
            torch.set_num_threads(1)
            self.net = model(weights)

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

    server = ls.LitServer(API(max_batch_size=64, batch_timeout=0.0), accelerator="cpu", timeout=30)
    server.run(host="127.0.0.1", port=port, log_level="warning", generate_client_file=False)


if __name__ == "__main__":
    torch.set_num_threads(1)
    name, path, number = sys.argv[1:]
    {"fastapi": fastapi, "litserve": litserve}[name](path, int(number))
