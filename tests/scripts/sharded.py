"""Workers that read a ShardedDataset of 10 records a shard; what they do is set by their arguments.

Each worker writes into a file of its own, a line for each batch: `read RECORD…` when its loop has it, `counted RECORD…`
when it is committed, `end` when the loop is over. A record's content is its number.
"""

import argparse
import os
import time
from pathlib import Path

from torch.utils.data import DataLoader

import stoker

parser = argparse.ArgumentParser()
parser.add_argument("url")
parser.add_argument("--by", choices=["record", "batch", "fork", "spawn"], default="record")
parser.add_argument("--commit-every", type=int, default=0, help="batches; 0: at least once")
parser.add_argument("--record-s", type=float, default=0.002)
parser.add_argument("--slow", type=float, default=1, help="the first worker takes so many times as long")
parser.add_argument("--stall-after", type=int, default=0, help="batches, after which one worker stands still")
parser.add_argument("--epochs", type=int, default=1)


def main():
    options = parser.parse_args()
    ctx = stoker.init()
    if options.slow > 1:  # who is slow is not to be told from who comes late
        Path(f"started-{ctx.rank}").touch()
        while len(list(Path().glob("started-*"))) < ctx.world_size:
            time.sleep(0.01)
    log = Path(f"{os.environ['STOKER_WORKER_ID']}.log")

    def say(word, records=()):
        """A whole line at once, so that a kill leaves none in halves."""
        with log.open("a") as file:
            file.write(" ".join([word, *map(str, records)]) + "\n")

    data = stoker.ShardedDataset(
        stoker.Dataset(options.url, format="lines", decode=int),
        shard_size=10,
        epochs=options.epochs,
        shuffle=True,
        shuffle_records=True,
        exactly_once=options.commit_every > 0,
        read_size=4,
    )
    match options.by:
        case "record":
            batches = ([record] for record in data)
        case "batch":
            batches = (batch.tolist() for batch in DataLoader(data, batch_size=4))
        case method:
            loader = data.loader(batch_size=4, num_workers=2, multiprocessing_context=method)
            batches = (batch.tolist() for batch in loader)
    uncommitted = []

    def commit():
        data.commit()
        say("counted", uncommitted)
        uncommitted.clear()

    for number, batch in enumerate(batches, 1):
        say("read", batch)
        uncommitted += batch
        if number == options.stall_after:
            try:
                os.close(os.open("stalled", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                pass
            else:
                say("stalls")
                time.sleep(1000)
        if options.commit_every and number % options.commit_every == 0:
            commit()
        time.sleep(options.record_s * len(batch) * (options.slow if ctx.local_rank == 0 else 1))
    if options.commit_every:
        commit()
    say("end")


if __name__ == "__main__":
    main()
