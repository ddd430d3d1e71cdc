"""Hugging Face `Trainer` that goes on when workers die, join or leave.

    from stoker.compat.transformers import ElasticTrainer as Trainer
    from stoker.compat.transformers import ElasticTrainingArguments as TrainingArguments

    loader = stoker.Loader(dataset, global_batch_size=256, shuffle=True)
    Trainer(model, TrainingArguments("out"), train_dataset=loader).train()

under `stoker run`, or alone. `trainer` is the Trainer, `progress` what a commit holds of it.
"""

from stoker.compat.transformers.arguments import ElasticTrainingArguments
from stoker.compat.transformers.trainer import ElasticTrainer

__all__ = ["ElasticTrainer", "ElasticTrainingArguments"]
