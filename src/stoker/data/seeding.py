"""Random generators that begin anew, so that what is drawn depends on the records and not on who reads them."""

from __future__ import annotations

import random

import numpy as np
import torch


def seed_host(seed: int) -> None:
    """Python's, NumPy's and PyTorch's on the host: a loader process must not wake a device."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def seed_everything(seed: int) -> None:
    """Those on devices too."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
