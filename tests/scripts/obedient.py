"""An elastic training script that does what it is told by files, and goes on until one says which epoch is the last.

An order is a file WHAT.HOST.SLOT in the folder --orders; what it holds is its argument. Its worker takes it away as it
begins to obey, but for `slow` and `wait`, which last as long as the file is there.

    hang        stand still for ever, in the step
    wait        not to begin at all
    long S      one step that computes for S seconds, or until the order `enough`, before it comes to its collective
    slow S      S more seconds of own work in every step
    raise       an exception
    exit N      end with this code
    eat BYTES   take memory and keep it
    write PATH  a file of 1 MiB
    export      be killed as soon as others are to be given the state
    meet        leave the optimizer's step behind, and wait for others who never come
"""

import argparse
import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import stoker

parser = argparse.ArgumentParser()
parser.add_argument(
    "--orders", required=True, help="folder; its file `last-epoch` says how many epochs there are"
)
parser.add_argument("--out", default="", help="folder for what each worker says at its end")
parser.add_argument("--records", type=int, default=100)
parser.add_argument("--batch", type=int, default=20)
parser.add_argument("--step-s", type=float, default=0.03)
parser.add_argument(
    "--print-bytes", type=int, default=0, help="length of a line that is printed at every step"
)
options = parser.parse_args()
torch.set_num_threads(1)
ORDERS = Path(options.orders)
ME = f"{socket.gethostname()}.{os.environ['LOCAL_RANK']}"
eaten = []
commits_under_way = []


class Points(torch.utils.data.Dataset):
    def __len__(self):
        return options.records

    def __getitem__(self, record):
        generator = torch.Generator().manual_seed(record)
        x = torch.randn(8, generator=generator)
        return x, (x.sum() > 0).long()


def ordered(what, *, keep=False):
    """The argument of an order for this worker; None: there is none."""
    path = ORDERS / f"{what}.{ME}"
    try:
        argument = path.read_text()
        if not keep:
            path.unlink()
    except FileNotFoundError:
        return None
    return argument


def hang_for_ever():
    while True:
        time.sleep(3600)


def evaluate_alone(until, deeper):
    """Where it stands differs at each look."""
    look_at = time.monotonic() + 0.02
    while time.monotonic() < look_at:
        torch.randn(64, 64) @ torch.randn(64, 64)
    if deeper and time.monotonic() < until and not os.path.exists(ORDERS / f"enough.{ME}"):
        evaluate_alone(until, deeper - 1)


def obey():
    """What is to be done before the step."""
    if (seconds := ordered("slow", keep=True)) is not None:
        time.sleep(float(seconds))
    if ordered("hang") is not None:
        hang_for_ever()
    if (seconds := ordered("long")) is not None:
        until = time.monotonic() + float(seconds)
        while time.monotonic() < until and ordered("enough") is None:
            evaluate_alone(until, 20)
    if ordered("raise") is not None:
        raise ValueError("this script is wrong")
    if (code := ordered("exit")) is not None:
        sys.exit(int(code))
    if (size := ordered("eat")) is not None:
        eaten.extend(b"x" * 2**20 for _ in range(int(size) // 2**20))
    if (path := ordered("write")) is not None:
        Path(path).write_bytes(bytes(2**20))


def commit(state):
    commits_under_way.append(state)
    try:
        state.commit()
    finally:
        commits_under_way.clear()


def die_in_export(*_):
    """Within a commit the state is exported for a checkpoint, not for others."""
    if not commits_under_way and ordered("export") is not None:
        os.kill(os.getpid(), signal.SIGKILL)


def is_last(epoch):
    """Whether `epoch` epochs are enough. The file names one that is still far ahead when it appears, so that all
    workers find it in time."""
    try:
        return epoch >= int((ORDERS / "last-epoch").read_text())
    except FileNotFoundError:
        return False


def main():
    while (ORDERS / f"wait.{ME}").exists():
        time.sleep(0.01)
    ctx = stoker.init()
    torch.manual_seed(1234 + ctx.rank)
    loader = stoker.Loader(Points(), global_batch_size=options.batch, shuffle=True, seed=3)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
    model.register_state_dict_post_hook(die_in_export)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    state = stoker.State(model=model, optimizer=optimizer, epoch=0)

    @stoker.elastic
    def train(state):
        while not is_last(state.epoch):
            for x, y in loader:
                obey()
                loss = F.cross_entropy(state.ddp(x), y)
                state.optimizer.zero_grad()
                loss.backward()
                state.optimizer.step()
                if ordered("meet") is not None:
                    stoker.barrier("the others do not come here")
                time.sleep(options.step_s)
                commit(state)
                if options.print_bytes:
                    print("x" * options.print_bytes, flush=True)
            state.epoch += 1

    train(state)
    if options.out:
        said = {
            "pid": os.getpid(),
            "rank": ctx.rank,
            "world_size": ctx.world_size,
            "generation": ctx.generation,
            "commits": state.commits,
            "weights": [p.detach().double().sum().item() for p in model.parameters()],
        }
        Path(options.out, f"{os.getpid()}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
