"""How fast is a GET of a held object against nginx with an Authorization check, by the same wrk command?"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from _common import interleaved, median_ratio, parser, report
from _web import TOKEN, missing_tools, nginx, wrk

from stoker.cache.client.client import CacheClient
from stoker.cache.embedded import EmbeddedCache

SIZES = {"1KiB": (1024, 0.65), "100KiB": (100 * 1024, 0.95)}
CONNECTIONS = 32


def main() -> int:
    """Print the ratios of requests per second, ours over nginx's."""
    arguments = parser(__doc__ or "").parse_args()
    if missing := missing_tools():
        print(f"cache_get: skipped, {' and '.join(missing)} not found: apt-get install nginx-light wrk")
        return 0
    rounds, seconds = (5, 1) if arguments.quick else (9, 3)
    figures: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "www" / "b").mkdir(parents=True)
        for label, (size_bytes, _) in SIZES.items():
            (folder / "www" / "b" / label).write_bytes(os.urandom(size_bytes))
        # The folder of mkdtemp is closed to nginx's worker, which runs as another user.
        folder.chmod(0o755)
        with nginx(folder) as (nginx_url, _), _ours(folder) as our_url:
            for label, (_, goal) in SIZES.items():
                sides = {
                    "nginx": partial(_rate, f"{nginx_url}/b/{label}", seconds),
                    "stoker": partial(_rate, f"{our_url}/b/{label}", seconds),
                }
                for run in sides.values():
                    run()
                found = interleaved(sides, rounds)
                figures[f"{label} ratio (goal {goal})"] = median_ratio(found["stoker"], found["nginx"])
                for side, rates in found.items():
                    figures[f"{label} {side} req/s"] = round(statistics.median(rates))
    report("cache_get", figures, arguments.json)
    return 0


def _rate(url: str, seconds: int) -> float:
    return wrk(url, seconds, CONNECTIONS).per_s


@contextlib.contextmanager
def _ours(folder: Path) -> Iterator[str]:
    cache = EmbeddedCache(folder / "cache", 10**9, {"b": f"{folder}/www/b"}, TOKEN)
    with cache:
        assert cache.endpoint is not None
        with CacheClient(cache.endpoint.url, TOKEN) as client:
            client.read_many("b", list(SIZES))
        yield cache.endpoint.url


if __name__ == "__main__":
    sys.exit(main())
