"""What every end-to-end test leaves behind: nothing. And a cache at which clients of S3 may make buckets."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.run_helpers import Stoker, kill_all

if TYPE_CHECKING:
    from tests.e2e.s3_helpers import BucketMaker


@pytest.fixture(autouse=True)
def commands_end() -> Iterator[None]:
    """Commands that a failed test has left run on otherwise, beside the tests that follow; what they had said tells why
    the test failed."""
    Stoker.begun.clear()
    yield
    for command in Stoker.begun:
        if command.process.poll() is None or not command.process.stdout.closed:
            print(" ".join(command.arguments), kill_all(command).text, sep="\n")
    Stoker.begun.clear()


@pytest.fixture(autouse=True)
def clients_of_others_end(request: pytest.FixtureRequest) -> Iterator[None]:
    """boto3 closes no connection whose answer nobody has read to its end: another test would be blamed for it, whenever
    the interpreter comes to collect it."""
    yield
    module = request.module
    if ".test_s3_" in module.__name__ or {"boto3", "boto3_at"} & vars(module).keys():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            gc.collect()


@pytest.fixture(scope="module", params=["folder", "s3"])
def here(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BucketMaker]:
    """A cache server with a folder and with a real S3 server behind it; for the tests of one file."""
    from tests.e2e.s3_helpers import (
        bucket_maker,  # its libraries take a while, and most tests need none of them
    )

    with bucket_maker(request.param, tmp_path_factory.mktemp("s3")) as maker:
        yield maker


@pytest.fixture
def client(here: BucketMaker) -> Iterator[Any]:
    """Who may do everything there."""
    client = here.client()
    yield client
    client.close()
