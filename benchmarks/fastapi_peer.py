"""Another server for the same model and weights: FastAPI, as people write it by hand.

Started by serving.py with the interpreter of `make serving-peers`: WEIGHTS PORT.
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


if __name__ == "__main__":
    torch.set_num_threads(1)
    fastapi(sys.argv[1], int(sys.argv[2]))
