"""The native run that a page is compared with: `python -m tests.support.web.web_run JSON` prints its losses."""

import json
import sys
from dataclasses import replace
from typing import Any

from wgpu_lora.events import Events
from wgpu_lora.models.loaded_model import LoadedModel, open_model
from wgpu_lora.train.prepare_job import prepare_job
from wgpu_lora.train.web.recording import web_device
from wgpu_lora.train.web.site import WebOptions


class Losses(Events):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def step(self, result: Any) -> None:
        self.losses.append(result.loss)


def opened(name: str, layers: int | None) -> LoadedModel:
    model = open_model(name, web_device())
    return model.declared(layers) if layers else model


def main(name: str, layers: int, options: dict[str, Any], data: str, heldout: str, steps: int, output: str) -> None:
    model, web = opened(name, layers), WebOptions(**options)
    args = replace(
        web.arguments(model, 16),
        data=data,
        eval_data=heldout,
        output=output,
        max_steps=steps,
        tune=False,
        eval_steps=steps,
    )
    losses = Losses()
    record = prepare_job(args, model).train(losses)
    print(json.dumps({"losses": losses.losses, "heldout": record.eval_loss, "device": model.device.info.name}))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
