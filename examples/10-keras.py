"""A Keras model, by Keras' optimizer, through every change of the world. Keras runs on its torch backend.

Alone: `python examples/10-keras.py`. Elastic, with workers of which any may be killed:
`stoker run --nproc-per-node 2 examples/10-keras.py`.
"""

import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import torch

import stoker

BATCH, EPOCHS = 128, 5


class Moons(torch.utils.data.Dataset):
    """4,096 points on two noisy half circles."""

    def __len__(self):
        return 4096

    def __getitem__(self, record):
        noise = torch.Generator().manual_seed(record)
        label = record % 2
        angle = torch.rand(1, generator=noise) * torch.pi
        point = torch.cat([angle.cos() + label, angle.sin() * (1 - 2 * label) + 0.5 * label])
        return point + 0.1 * torch.randn(2, generator=noise), label


def main():
    ctx = stoker.init()
    torch.set_num_threads(1)
    keras.utils.set_random_seed(ctx.rank)  # weights come from the first worker, dropout is each one's own
    loader = stoker.Loader(Moons(), global_batch_size=BATCH, shuffle=True, seed=0)
    model = keras.Sequential(
        [
            keras.Input((2,)),
            keras.layers.Dense(32),
            keras.layers.BatchNormalization(),
            keras.layers.ReLU(),
            keras.layers.Dropout(0.1),
            keras.layers.Dense(2),
        ]
    )
    optimizer = keras.optimizers.AdamW(learning_rate=0.01)
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    state = stoker.State(model=model, optimizer=optimizer, epoch=0)

    @stoker.elastic
    def train(state):
        while state.epoch < EPOCHS:
            for x, y in loader:
                loss = loss_fn(y, state.ddp(x, training=True))
                model.zero_grad()
                loss.backward()
                weights = model.trainable_weights
                with torch.no_grad():
                    state.optimizer.apply([weight.value.grad for weight in weights], weights)
                state.commit()
            state.epoch += 1
            if ctx.rank == 0:
                print(f"epoch {state.epoch}: loss {loss.item():.3f}, world of {ctx.world_size}")

    train(state)


if __name__ == "__main__":
    main()
