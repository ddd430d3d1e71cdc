"""Other libraries that load records, in a virtual environment of their own: their pins are not ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TORCH = "torch==2.13.0"
PACKAGES = (
    "mosaicml-streaming==0.13.0",
    "litdata==0.2.76",
    "webdataset==1.0.2",
    "s3fs==2026.9.0",
    "boto3<2",
    "torchvision<1",
)
_STUB = {
    "__init__.py": "",
    "datasets.py": "class VisionDataset: ...\nclass CIFAR10: ...\n",
    "transforms/__init__.py": "",
    "transforms/functional.py": "def to_tensor(image): raise NotImplementedError\n",
}
"""What mosaicml-streaming takes from torchvision when it is imported; nothing here uses it."""


def python_of(folder: Path) -> Path:
    """The interpreter of an environment, whether it is there or not."""
    return folder / "bin" / "python"


def install(folder: Path) -> None:
    """Make the environment. Raises CalledProcessError."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = str(python_of(folder))
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", TORCH, *PACKAGES], check=True)
    if subprocess.run([python, "-c", "import torchvision"], capture_output=True, check=False).returncode == 0:
        return
    # torchvision's build does not fit every build of torch (one for the CPU alone).
    subprocess.run([*pip, "uninstall", "--yes", "torchvision"], check=True)
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = subprocess.run(
        [python, "-c", where], capture_output=True, text=True, check=True
    ).stdout.strip()
    for name, text in _STUB.items():
        path = Path(packages) / "torchvision" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    subprocess.run([python, "-c", "import streaming, litdata, webdataset, s3fs"], check=True)


def versions(folder: Path) -> str:
    """What is installed there, for people."""
    names = [package.partition("==")[0] for package in PACKAGES if "==" in package]
    ask = f"from importlib.metadata import version; print(*(f'{{n}} {{version(n)}}' for n in {names}), sep=', ')"
    command = [str(python_of(folder)), "-c", ask]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
