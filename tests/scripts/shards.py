"""Workers that share a dataset by dynamic shards, each at its own speed; what they do is set by their arguments.

Each worker writes into a file of its own: `work SHARD START STOP` before it reports on a shard, `accepted SHARD` or
`refused SHARD` after it, `end DONE TOTAL` when its loop is over.
"""

import argparse
import os
import signal
import time
from pathlib import Path

import stoker

parser = argparse.ArgumentParser()
parser.add_argument("--records", type=int, default=100)
parser.add_argument("--shard-size", type=int, default=2)
parser.add_argument(
    "--shard-s", type=float, default=0.05, help="of the first worker; the n-th takes n times it"
)
parser.add_argument("--fast", default="", help="as soon as this file exists a shard takes no time")
parser.add_argument("--lease-timeout-s", type=float, default=None)
parser.add_argument("--poison", default="", help="SHARD:HOW; HOW is fail or segv")
parser.add_argument(
    "--stream", action="store_true", help="one worker says what records there are, bit by bit"
)
options = parser.parse_args()

ctx = stoker.init()
log = Path(f"{os.environ['STOKER_WORKER_ID']}.log")


def say(words):
    """A whole line at once, so that a kill leaves none in halves."""
    with log.open("a") as file:
        file.write(words + "\n")


def source():
    if options.stream:
        return stoker.shards("clicks", stream=True, shard_size=options.shard_size)
    return stoker.shards(
        "train",
        records=options.records,
        shard_size=options.shard_size,
        lease_timeout_s=options.lease_timeout_s,
    )


def feed(stream):
    """Should the feeder die, its successor says all of it again, which changes nothing."""
    for stop in range(10, options.records + 1, 10):
        for partition in ("left", "right"):
            stream.add_records(stop, partition=partition)
        time.sleep(options.shard_s)
    stream.end_of_stream()


def work(shards):
    poisoned, _, how = options.poison.partition(":")
    for shard in shards:
        if not (options.fast and os.path.exists(options.fast)):
            time.sleep(options.shard_s * (1 + ctx.local_rank))
        if how and shard.number == int(poisoned):
            if how == "segv":
                os.kill(os.getpid(), signal.SIGSEGV)
            shard.fail(f"record {shard.start} is no picture")
            continue
        where = f"{shard.partition}:" if shard.partition else ""
        say(f"work {shard.number} {where}{shard.start} {where}{shard.stop}")
        say(f"{'accepted' if shard.done() else 'refused'} {shard.number}")
    status = shards.status()
    say(f"end {status.done} {status.total}")


shards = source()
if options.stream:
    while not stoker.sync("all know the stream"):
        time.sleep(0.05)
    say("all know the stream")
    if ctx.local_rank == 0:
        feed(shards)
work(shards)
