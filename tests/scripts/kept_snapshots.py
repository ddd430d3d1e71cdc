"""An elastic script with a Checkpointer: `URL STEPS [how it ends]`; `hold` as well: it waits for a file `go`."""

import os
import signal
import sys
import time

import torch

import stoker


def main() -> None:
    url, steps, ends = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpointer = stoker.Checkpointer(url, every_s=None, every_commits=2)
    state = stoker.State(model=model, optimizer=optimizer, total=0, checkpointer=checkpointer)

    @stoker.elastic
    def train(state: stoker.State) -> None:
        print(f"begins at {state.commits} with {state.total}", flush=True)
        while "hold" in ends and not os.path.exists("go"):
            time.sleep(0.01)
        while state.commits < steps:
            state.ddp(torch.ones(2, 4)).sum().backward()
            state.optimizer.step()
            state.optimizer.zero_grad()
            state.total += 1
            state.commit()
            time.sleep(0.02)
        if ends == ["error"]:
            raise ValueError("failed on purpose")
        if ends == ["kill"]:
            os.kill(os.getpid(), signal.SIGKILL)
        if "wait" in ends:
            print("waits", flush=True)
            time.sleep(600)

    train(state)


if __name__ == "__main__":
    main()
