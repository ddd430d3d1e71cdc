"""What frameworks find where PyTorch's DataLoader has its batch sampler."""

from __future__ import annotations

from typing import NoReturn

from stoker.errors import ConfigError


class NoBatchSampler:
    """Stands there to be looked at. Whoever would make a DataLoader with it hears why not, as that one would read
    without regard to this rank and to the epoch: accelerate's `skip_first_batches` does, for `Trainer`."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        """Of this rank."""

    def __iter__(self) -> NoReturn:
        self._refuse()

    def __bool__(self) -> bool:
        return False

    def __len__(self) -> int:
        return self._refuse()

    def _refuse(self) -> NoReturn:
        raise ConfigError(
            "a stoker.Loader has no batch sampler, and cannot be made to skip batches: it goes on where "
            "load_state_dict puts it. With Hugging Face's Trainer set ignore_data_skip=True"
        )
