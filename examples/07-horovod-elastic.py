"""An elastic Horovod script: `stoker run --horovod --nproc-per-node 2 examples/07-horovod-elastic.py`.

Nothing in it is Stoker's. Kill one of its workers while it runs: the other goes on from the last commit, and another
one takes the place.
"""

import time

import horovod.torch as hvd
import torch
import torch.nn.functional as F

RECORDS, BATCH, EPOCHS = 600, 10, 3


class Points(torch.utils.data.Dataset):
    """Whether the sum of some numbers is above zero."""

    def __len__(self):
        return RECORDS

    def __getitem__(self, record):
        x = torch.randn(8, generator=torch.Generator().manual_seed(record))
        return x, (x.sum() > 0).long()


def main():
    hvd.init()
    torch.manual_seed(1)
    torch.set_num_threads(1)
    model = torch.nn.Linear(8, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size())
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(Points())
    loader = torch.utils.data.DataLoader(Points(), batch_size=BATCH, sampler=sampler)

    def on_reset():
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * hvd.size()

    @hvd.elastic.run
    def train(state):
        while state.epoch < EPOCHS:
            for step, (x, y) in enumerate(loader):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                sampler.record_batch(step, BATCH)
                time.sleep(0.02)
                if step % 10 == 9:
                    state.commit()
                else:
                    state.check_host_updates()
            mean = hvd.allreduce(loss.detach(), name="loss").item()
            if hvd.rank() == 0:
                print(f"epoch {state.epoch}: loss {mean:.3f} with {hvd.size()} workers", flush=True)
            state.epoch += 1
            sampler.set_epoch(state.epoch)
            state.commit()

    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, sampler=sampler, epoch=0)
    state.register_reset_callbacks([on_reset])
    train(state)


if __name__ == "__main__":
    main()
