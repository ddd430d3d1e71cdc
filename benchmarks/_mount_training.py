"""Epochs of a training on small pictures, which workers read from a mount, by Stoker's loader, and from the disk."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from _common import median_ratio
from _mounted import in_time, stoker_mount
from _serving import serve
from _web import TOKEN

from stoker.cli.demo.pictures import choose_source
from stoker.errors import StokerError

GOAL = 0.95
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
        path = data / f"{label}" / f"{number:05}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(picture).save(path)
    figures: dict[str, object] = {}
    socket, token = folder / "socket", folder / "token"
    token.write_text(TOKEN)
    with serve(folder / "cache", data, "--unix", str(socket)):
        where = ["--endpoint", f"unix://{socket}", "--token-file", str(token)]
        env = {"STOKER_CACHE_ENDPOINT": f"unix://{socket}", "STOKER_CACHE_TOKEN": TOKEN}
        with stoker_mount("stoker://b", folder / "mount", "--small-files", *where) as mount:
            command = [sys.executable, SCRIPT, str(data), str(mount.folder), "stoker://b/", str(rounds)]
            found = json.loads(in_time(command, _TIMEOUT_S, env=env).splitlines()[-1])
    for state in ("trained", "only read"):
        local = found[state]["local"]
        label = f"epoch of {count} PNGs, {state}"
        goal = f" (goal {GOAL})" if state == "trained" else ""
        figures[f"{label}: mount of small files / local, pictures/s{goal}"] = median_ratio(
            local, found[state]["mount"]
        )
        figures[f"{label}: loader / local, pictures/s"] = median_ratio(local, found[state]["loader"])
        figures[f"{label}: seconds, local"] = sorted(local)[len(local) // 2]
    figures["first epoch of a new mount: seconds"] = found["first"]["mount"]
    shutil.rmtree(folder)
    return figures
