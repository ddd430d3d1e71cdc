"""A Horovod script, elastic as its users write them. It goes on until a file says that the epoch is the last.

The model's one weight counts the steps, and the state holds the records that all ranks have read in this epoch: if what
belongs together were ever apart, the script would fail.
"""

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

import horovod.torch as hvd
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--fail", default="", help="HOW:RANK,… at step 12: raise, kill or exit")
parser.add_argument("--commit-every", type=int, default=5)
parser.add_argument("--step-s", type=float, default=0.03)
parser.add_argument("--epochs", type=int, default=0, help="0: until there is a file `stop`")
parser.add_argument(
    "--begin-with", type=int, default=1, help="ranks that are waited for before the first step"
)
options = parser.parse_args()
RECORDS, BATCH = 120, 4


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return RECORDS

    def __getitem__(self, record):
        return record


def is_over(epoch):
    return epoch == options.epochs if options.epochs else Path("stop").exists()


def fail(batches):
    how, _, ranks = options.fail.partition(":")
    if not how or batches != 12 or hvd.rank() not in map(int, ranks.split(",")):
        return
    if Path("failed").exists() and "always" not in how:
        return
    Path("failed").touch()
    print("failing as told", flush=True)
    if "kill" in how:
        os.kill(os.getpid(), signal.SIGKILL)
    elif "exit" in how:
        sys.exit(7)
    raise ValueError("this script fails as told")


def wait_for_neighbours():
    """The others that were started with this one: who of them takes longer would come to a world of its own."""
    here = Path(f"here-{os.getppid()}")
    here.mkdir(exist_ok=True)
    (here / os.environ["LOCAL_RANK"]).touch()
    while len(list(here.iterdir())) < int(os.environ["LOCAL_WORLD_SIZE"]):
        time.sleep(0.01)


def main():
    hvd.init()
    torch.set_num_threads(1)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, 0.0 if hvd.rank() == 0 else 1000.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(Numbers(), seed=5)
    loader = torch.utils.data.DataLoader(Numbers(), batch_size=BATCH, sampler=sampler)
    sizes = []
    has_begun = []

    def on_reset():
        sizes.append(hvd.size())

    def assert_whole(state):
        assert model.weight.item() == state.batches, (model.weight.item(), state.batches)

    @hvd.elastic.run
    def train(state):
        while not has_begun and state.batches == 0 and hvd.size() < options.begin_with:
            state.commit()  # until others come
            time.sleep(0.05)
        has_begun.append(1)  # a failure before the first commit brings back no batches, and yet it goes on
        assert_whole(state)
        world = {"pid": os.getpid(), "rank": hvd.rank(), "size": hvd.size(), "batches": state.batches,
                 "left": len(sampler.remaining_indices), "seen": len(set(state.seen)), "sizes": sizes}  # fmt: skip
        with open("worlds.jsonl", "a") as file:
            file.write(json.dumps(world) + "\n")
        assert len(sampler.remaining_indices) == RECORDS - len(set(state.seen)), "divided anew"
        while not hvd.broadcast_object(is_over(state.epoch), root_rank=0):
            for step, records in enumerate(loader):
                fail(state.batches)
                optimizer.zero_grad()
                loss = -model(torch.ones(1, 1)).mean()
                loss.backward()
                optimizer.step()
                time.sleep(options.step_s)
                sampler.record_batch(step, BATCH)
                state.batches += 1
                state.seen = state.seen + [r for some in hvd.allgather_object(records.tolist()) for r in some]
                if state.batches % options.commit_every == 0:
                    state.commit()
                else:
                    state.check_host_updates()
                assert_whole(state)
            assert sorted(set(state.seen)) == list(range(RECORDS)), "every record, in each epoch"
            assert len(state.seen) < RECORDS + 4 * hvd.size() * BATCH, "but for what makes shares even, once"
            state.epoch += 1
            state.seen = []
            sampler.set_epoch(state.epoch)
            state.commit()

    state = hvd.elastic.TorchState(
        model=model, optimizer=optimizer, sampler=sampler, epoch=0, batches=0, seen=[]
    )
    state.register_reset_callbacks([on_reset])
    wait_for_neighbours()
    train(state)
    assert_whole(state)
    weights = hvd.allgather(model.weight.detach()).flatten().tolist()
    said = {
        "rank": hvd.rank(),
        "size": hvd.size(),
        "batches": state.batches,
        "epoch": state.epoch,
        "weights": weights,
    }
    Path(f"{os.getpid()}.json").write_text(json.dumps(said))
    print("trained", state.batches, "steps", flush=True)


if __name__ == "__main__":
    main()
