"""A loop for Hugging Face Accelerate under `stoker run`: rank 1 kills itself, nobody takes its place."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import torch
import torch.nn.functional as F

import stoker
from stoker.compat.accelerate import ElasticAccelerator
from tests.e2e.framework_helpers import Rows

BATCH = 17
EPOCHS = 2
LAST_STEP = 8


def main() -> None:
    torch.set_num_threads(1)
    accelerator = ElasticAccelerator()
    model = torch.nn.Linear(16, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = stoker.Loader(Rows(), global_batch_size=BATCH, shuffle=True)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    state = stoker.State(model=model, optimizer=optimizer, schedule=schedule, epoch=0, steps=0, read=[])
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    worlds: list[object] = []

    @stoker.elastic
    def train(state: stoker.State) -> None:
        accelerator.enter_world()
        ranks = accelerator.gather(torch.tensor([accelerator.process_index])).tolist()
        accelerator.wait_for_everyone()
        worlds.append([accelerator.num_processes, accelerator.process_index, ranks])
        while state.epoch < EPOCHS:
            for batch in loader:
                if state.steps == LAST_STEP and accelerator.process_index == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                optimizer.zero_grad()
                accelerator.backward(F.cross_entropy(state.wrap(model)(batch["x"]), batch["labels"]))
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                state.read = state.read + accelerator.gather_for_metrics(batch["number"]).tolist()
                optimizer.step()
                schedule.step()
                state.steps += 1
                state.commit()
            state.epoch += 1

    train(state)
    if accelerator.is_main_process:
        said = {
            "worlds": worlds,
            "steps": state.steps,
            "read": state.read,
            "learning_rate": schedule.get_last_lr()[0],
        }
        Path("said.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
