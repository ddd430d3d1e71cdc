"""An elastic training script with Keras 3 on torch; `fit` or a loop of its own."""

import argparse
import json
import os
import time
from pathlib import Path

os.environ["KERAS_BACKEND"] = "torch"

import keras
import torch

import stoker

parser = argparse.ArgumentParser()
parser.add_argument("--fit", choices=("", "own-step", "plain"), default="")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--linear", action="store_true", help="no normalisation and no chance")
parser.add_argument("--step-s", type=float, default=0.03)
options = parser.parse_args()
torch.set_num_threads(1)


class Points(torch.utils.data.Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, record):
        generator = torch.Generator().manual_seed(record)
        x = torch.randn(8, generator=generator)
        return x, x.sum().reshape(1)


class Passes(torch.utils.data.IterableDataset):
    """A loader, as `fit` takes it."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        return iter(self.loader)


class Net(keras.Model):
    def __init__(self):
        super().__init__()
        self.inner = keras.layers.Dense(16)
        if not options.linear:
            self.norm = keras.layers.BatchNormalization(momentum=0.5)
            self.drop = keras.layers.Dropout(0.1, seed=5)
        self.outer = keras.layers.Dense(1)

    def call(self, x, training=False):
        if options.linear:
            return self.outer(self.inner(x))
        return self.outer(self.drop(self.norm(self.inner(x), training=training), training=training))


class Stepping(Net):
    state = None

    def train_step(self, data):
        return {"loss": step(type(self).state, *data)}


def step(state, x, y):
    loss = torch.nn.functional.mse_loss(state.ddp(x, training=True), y)
    state.model.zero_grad()
    loss.backward()
    weights = state.model.trainable_weights
    with torch.no_grad():
        state.optimizer.apply_gradients(zip([w.value.grad for w in weights], weights, strict=True))
    # Keras takes seconds to import, in which the survivor must not come to the end.
    time.sleep(options.step_s if torch.distributed.get_world_size() > 1 else 10 * options.step_s)
    state.commit()
    return loss.detach()


def fit(state, loader):
    """One epoch. Keras takes the length of the first, which may be the rest of one, for that of all."""
    passes = torch.utils.data.DataLoader(Passes(loader), batch_size=None)
    state.model.fit(passes, initial_epoch=state.epoch, epochs=state.epoch + 1, verbose=0)


def main():
    ctx = stoker.init()
    keras.utils.set_random_seed(10 + ctx.rank)  # the first worker's weights count
    loader = stoker.Loader(Points(), global_batch_size=20, shuffle=True, seed=3)
    model = (Stepping if options.fit == "own-step" else Net)()
    model(torch.zeros(2, 8))
    if options.fit == "own-step":
        model.compile(optimizer=keras.optimizers.Adam(0.01))
    else:
        model.compile(optimizer=keras.optimizers.Adam(0.01), loss="mse")
    state = stoker.State(model=model, optimizer=model.optimizer, epoch=0)
    Stepping.state = state

    @stoker.elastic
    def train(state):
        while state.epoch < options.epochs:
            if options.fit:
                fit(state, loader)
            else:
                for x, y in loader:
                    step(state, x, y)
            state.epoch += 1
        state.ddp(torch.zeros(2, 8))  # moving statistics are rank 0's from a forward pass to the next

    train(state)
    said = {
        "pid": os.getpid(),
        "rank": ctx.rank,
        "commits": state.commits,
        "weights": [v.numpy().tolist() for v in model.weights],
        "slots": [v.numpy().tolist() for v in state.optimizer.variables],
    }
    Path(f"{os.getpid()}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
