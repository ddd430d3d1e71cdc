"""`stoker.Loader`: what cannot be done is said plainly."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from stoker.data.loader import Loader
from stoker.errors import ConfigError
from tests.unit.loader_data import Rows

pytestmark = [
    pytest.mark.usefixtures("fresh_process"),
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning"),
]


@pytest.fixture
def loaders() -> Iterator[list[Loader]]:
    """Those that are put here are closed in the end."""
    made: list[Loader] = []
    yield made
    for loader in made:
        loader.close()


class Unnumbered(torch.utils.data.IterableDataset[int]):
    """Has no records by number."""

    def __iter__(self) -> Iterator[int]:
        return iter(())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"global_batch_size": 0}, "global_batch_size must be a whole number of at least 1, got 0"),
        ({"global_batch_size": 2.5}, "global_batch_size must be a whole number"),
        ({"num_workers": "2"}, "num_workers must be a whole number of at least 0, got '2'"),
        ({"num_workers": -1}, "num_workers must be"),
        ({"prefetch_factor": None}, "prefetch_factor must be"),
        ({"seed": None}, "seed must be a whole number, got None"),
        ({"collate_fn": "stack"}, "collate_fn must be a function"),
        ({"multiprocessing_context": "spwan"}, "'spwan' must be one of fork, spawn, forkserver"),
        ({"multiprocessing_context": 5}, "multiprocessing_context=5"),
        ({"dataset": Unnumbered()}, "needs __len__ and __getitem__"),
    ],
)
def test_arguments_that_cannot_be_used(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Loader(**{"dataset": Rows(3), "global_batch_size": 2, **arguments})


def test_a_context_is_taken_for_its_name(loaders: list[Loader]) -> None:
    context = multiprocessing.get_context("fork")
    loader = Loader(Rows(10), global_batch_size=4, num_workers=1, multiprocessing_context=context)
    loaders.append(loader)
    assert len(list(loader)) == 3


def test_a_loader_is_not_copied() -> None:
    loader = Loader(Rows(3), global_batch_size=2, name="mine")
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(ConfigError, match="'mine' cannot be copied or sent to another process"):
            attempt(loader)


def test_what_cannot_be_sent_to_a_process_that_is_not_forked(loaders: list[Loader]) -> None:
    loader = Loader(
        Rows(3),
        global_batch_size=2,
        num_workers=1,
        multiprocessing_context="spawn",
        collate_fn=lambda batch: batch,
    )
    loaders.append(loader)
    with pytest.raises((AttributeError, pickle.PicklingError)) as caught:
        next(iter(loader))
    assert "at a module's top level" in caught.value.__notes__[0]


def test_a_daemon_is_told_that_it_has_no_children() -> None:
    ours, theirs = multiprocessing.get_context("fork").Pipe()

    def read() -> None:
        try:
            next(iter(Loader(Rows(3), global_batch_size=2, num_workers=1)))
        except ConfigError as error:
            theirs.send(str(error))

    child = multiprocessing.get_context("fork").Process(target=read, daemon=True)  # type: ignore[call-arg]
    child.start()
    assert ours.poll(60)
    assert "num_workers must be 0 in a daemon" in ours.recv()
    child.join()
    ours.close()
    theirs.close()
