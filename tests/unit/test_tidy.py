"""The house rules that no linter knows: pure files, small rooms, no state in modules, settings in one file."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "stoker"
FILES = sorted(SOURCE.rglob("*.py"))
IMPURE = {"asyncio", "socket", "time", "random", "os", "threading", "subprocess", "select"}
PURE = [
    "job/events.py",
    "job/generations.py",
    "job/machine.py",
    "job/membership.py",
    "job/news.py",
    "job/nodes.py",
    "job/records.py",
    "job/state.py",
    "job/words.py",
    "job/workers.py",
    "job/relaunch.py",
    "job/roster.py",
    "job/watch.py",
    "job/care.py",
    "job/growth.py",
    "job/health_check.py",
    "job/health_hangs.py",
    "job/health_stacks.py",
    "job/health_stragglers.py",
    "job/hosts.py",
    "job/hosts_events.py",
    "job/hosts_list.py",
    "job/hosts_roster.py",
    "job/relaunch_budgets.py",
    "job/relaunch_reasons.py",
    "job/remarks.py",
    "job/scaling_advice.py",
    "job/scaling_model.py",
    "job/services.py",
    "job/shard_queue.py",
    "job/shard_records.py",
    "job/shard_requests.py",
    "job/shard_service.py",
    "job/shard_split.py",
    "train/tuner.py",
    "job/meeting.py",
    "job/scaling.py",
    "job/shards.py",
    "agent/core.py",
    "train/breaks.py",
    "train/checkpoints/due.py",
    "train/checkpoints/layout.py",
    "train/member.py",
    "data/order.py",
    "data/group_order.py",
    "data/coming_reads.py",
    "data/key_space.py",
    "data/audit.py",
    "data/framing/csv.py",
    "data/framing/example.py",
    "data/framing/lines.py",
    "data/framing/mds.py",
    "data/framing/recordio.py",
    "data/framing/scan.py",
    "data/framing/tar.py",
    "data/framing/tfrecord.py",
    "data/loader_plan.py",
    "data/loader_report.py",
    "data/waiting.py",
    "base/exposition.py",
    "cache/layout.py",
    "cache/blobs/clock.py",
    "cache/blobs/keys.py",
    "cache/blobs/standing.py",
    "cache/blobs/votes.py",
    "cache/fleet/envoy.py",
    "cache/fleet/envoy_bootstrap.py",
    "cache/fleet/envoy_tls.py",
    "cache/flight.py",
    "cache/room.py",
    "cache/catalog.py",
    "cache/coming.py",
    "cache/farthest.py",
    "cache/prefetch.py",
    "cache/sharing.py",
    "cache/route.py",
    "cache/evict.py",
    "cache/limits.py",
    "cache/reach.py",
    "cache/origin/s3_xml.py",
    "cache/maglev.py",
    "cache/mount/answers.py",
    "cache/mount/core.py",
    "cache/mount/files.py",
    "cache/mount/folders.py",
    "cache/mount/handles.py",
    "cache/mount/known.py",
    "cache/mount/moving.py",
    "cache/mount/names.py",
    "cache/mount/nodes.py",
    "cache/mount/putting.py",
    "cache/mount/questions.py",
    "cache/mount/records.py",
    "cache/mount/requests.py",
    "cache/mount/retries.py",
    "cache/mount/source_port.py",
    "cache/mount/staged.py",
    "cache/mount/state.py",
    "cache/mount/waiting.py",
    "cache/mount/writing.py",
    "cache/segments.py",
    "cache/ahead.py",
    "cache/store/departures.py",
    "cache/summary.py",
    "cli/cache_rates.py",
    "cache/auth/aws_chunked.py",
    "cache/auth/checksums.py",
    "cache/auth/crc.py",
    "cache/auth/links.py",
    "cache/auth/s3_refusal.py",
    "cache/auth/sigv4.py",
    "cache/auth/sigv4_body.py",
    "cache/auth/sigv4_canonical.py",
    "cache/auth/sigv4_sign.py",
    "cache/origin/fleet_url.py",
    "cache/origin/s3_signing.py",
    "cache/server/client_address.py",
    "cache/server/tenant_figures.py",
    "cache/server/metric_names.py",
    "cache/server/openapi.py",
    "wire/cache_routes.py",
    "cache/server/s3/errors.py",
    "cache/server/s3/headers.py",
    "cache/server/s3/documents.py",
    "cache/server/s3/listing.py",
    "cache/server/s3/listing_xml.py",
    "cache/server/s3/operation_fields.py",
    "cache/server/s3/operation_types.py",
    "cache/server/s3/operations.py",
    "cache/server/s3/results.py",
    "cache/server/s3/xml.py",
    "wire/http_dates.py",
    "base/rng.py",
    "base/units.py",
    "base/ranges.py",
    "base/backoff.py",
]
MUTABLE = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def is_error_class(node: ast.ImportFrom) -> bool:
    return [alias.name for alias in node.names] == ["UnpicklingError"]


def imported(tree: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add("an error class" if is_error_class(node) else node.module.split(".")[0])
    return names


@pytest.mark.parametrize("name", PURE)
def test_pure_files_touch_neither_clock_nor_socket_nor_chance(name: str) -> None:
    impure = imported(parse(SOURCE / name)) & IMPURE
    assert not impure, f"{name} is pure and must get {impure} as arguments"


def test_files_fit_on_a_few_screens() -> None:
    long = {str(p.relative_to(SOURCE)): n for p in FILES if (n := p.read_text().count("\n")) > 400}
    assert not long, f"split these along the design: {long}"


def test_functions_are_short() -> None:
    long = {
        f"{path.relative_to(SOURCE)}:{node.name}": length
        for path in FILES
        for node in ast.walk(parse(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or 0) - node.lineno + 1) > 70
    }
    assert not long, f"too long: {long}"


def test_classes_have_few_methods() -> None:
    wide = {
        f"{path.relative_to(SOURCE)}:{node.name}": count
        for path in FILES
        for node in ast.walk(parse(path))
        if isinstance(node, ast.ClassDef)
        and (count := sum(isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) for n in node.body)) > 26
    }
    assert not wide, f"too many methods: {wide}"


def test_modules_hold_no_mutable_state() -> None:
    found = []
    for path in FILES:
        for node in parse(path).body:
            if not isinstance(node, ast.Assign | ast.AnnAssign) or not isinstance(node.value, MUTABLE):
                continue
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [t.id for t in targets if isinstance(t, ast.Name)]
            constant = all(n.isupper() or n.strip("_").isupper() or n == "__all__" for n in names)
            if not constant:
                found.append(f"{path.relative_to(SOURCE)}: {names}")
    assert not found


def test_only_settings_reads_the_environment() -> None:
    readers = [
        str(path.relative_to(SOURCE))
        for path in FILES
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Attribute)
        and node.attr in ("environ", "getenv")
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
        and path.name != "settings.py"
    ]
    assert not readers


def test_nothing_unpickles_or_evaluates() -> None:
    banned = []
    for path in FILES:
        tree = parse(path)
        if imported(tree) & {"pickle", "marshal", "shelve", "dill", "cloudpickle"}:
            banned.append(f"{path.relative_to(SOURCE)}: pickle")
        banned += [
            f"{path.relative_to(SOURCE)}:{node.lineno} {node.func.id}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("eval", "exec")
        ]
    assert not banned


@pytest.mark.parametrize(
    "package", sorted(p.parent for p in SOURCE.rglob("__init__.py")), ids=lambda p: p.name
)
def test_every_package_says_what_it_is(package: Path) -> None:
    assert ast.get_docstring(parse(package / "__init__.py")), f"{package} has no docstring"
