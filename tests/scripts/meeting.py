"""Workers that meet: barriers, sync points and dynamic shards inside an elastic function.

All write whole lines into one file, whose order is that of time: WORKER WORDS.
"""

import argparse
import os
import time
from pathlib import Path

import stoker
from stoker.errors import ConfigError

parser = argparse.ArgumentParser()
parser.add_argument("--go", required=True, help="rank 0 comes to the barrier `hold` once this file exists")
parser.add_argument("--shards", type=int, default=60)
options = parser.parse_args()
me = os.environ["STOKER_WORKER_ID"]


def say(words):
    with Path("said.log").open("a") as file:
        file.write(f"{me} {words}\n")


def misuse(call):
    try:
        call()
    except ConfigError as error:
        say(f"misuse: {error}")


misuse(lambda: stoker.barrier("early"))
ctx = stoker.init()
misuse(lambda: stoker.barrier("early"))
state = stoker.State(shards=0)


@stoker.elastic
def train(state):
    say(f"enters {ctx.generation}")
    ctx.report(loss=1 / (1 + state.shards), rank=ctx.rank)
    # A single failure of a shard would end the job.
    for shard in stoker.shards("train", records=options.shards, shard_size=1, max_failures=1):
        if shard.number == 20 and not Path("held").exists():
            Path("held").touch()
            say("holds shard 20")
            time.sleep(1000)
        time.sleep(0.02)
        state.shards += 1
        state.commit()
    while ctx.rank == 0 and not os.path.exists(options.go):
        time.sleep(0.01)
        state.commit()
    say("comes to hold")
    stoker.barrier("hold")
    say("is past hold")
    for _ in range(3):
        stoker.barrier("again")
    while not stoker.sync("ready"):
        time.sleep(0.01)
    say("is ready")


train(state)
misuse(lambda: stoker.barrier("late"))
misuse(lambda: stoker.sync("late"))
say("ends")
