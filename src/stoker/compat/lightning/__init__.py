"""PyTorch Lightning that goes on when workers die, join or leave.

    from stoker.compat.lightning import ElasticStrategy

    loader = stoker.Loader(data, global_batch_size=256, shuffle=True)
    trainer = lightning.Trainer(strategy=ElasticStrategy(), max_epochs=3)
    trainer.fit(model, loader)

under `stoker run`, or alone. `strategy` is what Lightning knows of the world, `loops` are its loops that go on at the
last commit, `progress` is what such a commit holds of them, `csv_log` has rank 0's log go on in another process.
"""

from stoker.compat.lightning.strategy import ElasticStrategy

__all__ = ["ElasticStrategy"]
