"""Epochs of a training on pictures, which workers read from mounts, by Stoker's loader, and from the disk: each a small
file, or all in one that is mapped into memory, which the mount passes through."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import numpy as np
from _common import median_ratio
from _mounted import in_time, stoker_mount
from _serving import serve
from _web import TOKEN

from stoker.cli.demo.pictures import choose_source
from stoker.errors import StokerError

GOAL = 0.95
SIDES = {
    "mount": "local",
    "mount of small files": "local",
    "mount, mapped": "local, mapped",
    "loader": "local",
}
"""Each, and what it is measured against."""
SCRIPT = str(Path(__file__).parent / "scripts" / "picture_epochs.py")
_TIMEOUT_S = 900.0


def epochs(folder: Path, *, quick: bool) -> dict[str, object]:
    """Pictures per second of warm epochs, over those from the disk."""
    try:
        from PIL import Image

        source = choose_source("fashion-mnist", lambda _: None)
    except (ImportError, StokerError) as error:
        return {f"training: skipped, {error}": 0}
    count, rounds = (3_000, 2) if quick else (12_000, 5)
    pictures = source.load()[0].first(count)
    data = folder / "data"
    for number, (picture, label) in enumerate(zip(pictures.pictures, pictures.labels, strict=True)):
        path = data / "files" / f"{label}" / f"{number:05}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(path)
    (data / "arrays").mkdir()
    np.save(data / "arrays" / "pictures.npy", np.asarray(pictures.pictures))
    np.save(data / "arrays" / "labels.npy", np.asarray(pictures.labels))
    found = _measured(folder, data, rounds)
    figures: dict[str, object] = {}
    for state in ("trained", "only read"):
        label = f"epoch of {count} PNGs, {state}"
        for side, peer in SIDES.items():
            goal = f" (goal {GOAL})" if state == "trained" and side != "loader" else ""
            figures[f"{label}: {side} / {peer}, pictures/s{goal}"] = median_ratio(
                found[state][peer], found[state][side]
            )
        figures[f"{label}: seconds, local"] = sorted(found[state]["local"])[rounds // 2]
    figures["first epoch of a new mount: seconds"] = found["first"]["mount of small files"]
    shutil.rmtree(folder)
    return figures


def _measured(folder: Path, data: Path, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of each epoch."""
    socket, token = folder / "socket", folder / "token"
    token.write_text(TOKEN)
    where = ("--endpoint", f"unix://{socket}", "--token-file", str(token))
    env = {"STOKER_CACHE_ENDPOINT": f"unix://{socket}", "STOKER_CACHE_TOKEN": TOKEN}
    with (
        serve(folder / "cache", data, "--unix", str(socket)),
        stoker_mount("stoker://b", folder / "mount", *where) as mount,
        stoker_mount("stoker://b", folder / "small", "--small-files", *where) as small,
    ):
        command = [
            sys.executable,
            SCRIPT,
            str(data),
            str(mount.folder),
            str(small.folder),
            "stoker://b/",
            str(rounds),
        ]
        found: dict[str, dict[str, list[float]]] = json.loads(
            in_time(command, _TIMEOUT_S, env=env).splitlines()[-1]
        )
    return found
