"""What a real cache server asks an S3 origin for: no more than it needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from stoker.errors import ObjectNotFound
from tests.e2e.cache_helpers import client_of, served
from tests.e2e.s3_helpers import CountingProxy, ManyKeys
from tests.http_servers import running
from tests.s3_server import BUCKET, KEYS, s3_client, s3_server

pytestmark = pytest.mark.real
COUNT = 1200


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CountingProxy]:
    """A bucket with objects in two folders, more than one page of them."""
    with s3_server(tmp_path_factory.mktemp("weed")) as endpoint:
        client = s3_client(endpoint)
        for number in range(COUNT):
            client.put_object(Bucket=BUCKET, Key=f"cost/{number:05}", Body=b"%05d" % number)
        client.put_object(Bucket=BUCKET, Key="other/x", Body=b"x")
        client.close()
        counting = CountingProxy(endpoint)
        with running(counting):
            yield counting


@pytest.mark.timeout(240)
def test_each_question_costs_one_request(tmp_path: Path, proxy: CountingProxy) -> None:
    url = f"s3://{BUCKET}/?endpoint={proxy.url}"
    with served(tmp_path / "d", {"b": url}, environment=KEYS) as server, client_of(server) as client:

        def cost() -> Counter[str]:
            counted = proxy.counted
            proxy.asked.clear()
            return counted

        cost()
        page = client.list_page("b", "cost/", None, 1)
        assert [info.key for info in page.objects] == ["cost/00000"]
        assert cost() == {"LIST": 1}
        known = client.list_page("b", "cost/", None, 1)
        assert (known.objects, known.after) == (page.objects, page.after)
        assert cost() == {}, "it is known"
        assert [info.key for info in client.list_page("b", "cost/", page.after, 2).objects] == [
            "cost/00001",
            "cost/00002",
        ]
        assert cost() == {"LIST": 1}
        assert len(client.list_page("b", "cost/", "cost/01000", 1000).objects) == 199
        assert cost() == {"LIST": 1}

        assert client.stat("b", "cost/01150").size_bytes == 5
        assert client.read("b", "cost/00000") == b"00000", "the list has told its version"
        assert cost()["LIST"] == 0
        assert client.read("b", "other/x") == b"x"
        assert client.read("b", "other/x") == b"x"
        assert cost() in ({"HEAD": 1, "GET": 1}, {"GET": 1})
        for _ in range(3):
            with pytest.raises(ObjectNotFound):
                client.read("b", "cost/none")
        assert cost() in ({"HEAD": 1}, {"GET": 1})


def test_a_bucket_of_a_million_keys_is_never_walked(tmp_path: Path) -> None:
    origin = ManyKeys(1_000_000)
    url = f"s3://{BUCKET}/?endpoint={origin.url}"
    with running(origin), served(tmp_path / "d", {"b": url}) as server, client_of(server) as client:

        def cost() -> Counter[str]:
            counted = Counter(origin.asked)
            origin.asked.clear()
            return counted

        assert client.read("b", "k/0999999") == (999_999).to_bytes(10, "big")
        assert client.stat("b", "k/0500000").size_bytes == 10
        for key in ("k/none", "k", "none", "k/"):
            with pytest.raises(ObjectNotFound):
                client.stat("b", key)
        assert cost()["LIST"] == 0
        assert [info.key for info in client.list_page("b", "k/", None, 1).objects] == ["k/0000000"]
        assert cost() == {"LIST": 1}
        assert [info.key for info in client.list_page("b", "", "k/0777776", 1).objects] == ["k/0777777"]
        assert cost() == {"LIST": 1}
        assert [info.key for info in client.list_page("b", "k/0000", None, 1).objects] == ["k/0000000"]
        assert cost() == {"LIST": 1}


@pytest.mark.parametrize(("prefix", "keys"), [("k/00025", 1), ("k/000000", 10), ("k/x", 0)])
def test_a_prefix_that_ends_amid_a_name_costs_no_more_than_its_pages(
    tmp_path: Path, prefix: str, keys: int
) -> None:
    origin = ManyKeys(3_000)
    url = f"s3://{BUCKET}/?endpoint={origin.url}"
    with running(origin), served(tmp_path / "d", {"b": url}) as server, client_of(server) as client:
        assert len(client.list_page("b", prefix, None, max(1, keys + (keys > 1))).objects) == keys
        assert origin.asked["LIST"] == 1
