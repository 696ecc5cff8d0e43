"""Write a model repository: the model's folder with its configuration, `model.py`, and the bundle."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from via_sd.contract.file_entries import resolved_within
from via_sd.contract.manifest import ENGINES_FOLDER, MANIFEST, POLICY_FOLDER, load_bundle, read_manifest
from via_sd.errors import RepositoryError
from via_sd.export.triton.config import WARMUP_FOLDER, ServingOptions, model_config, warm_up_files
from via_sd.files import check_space, whole_directory

_MODEL = '''"""What Triton's Python backend loads: the served model of the installed via-sd-export."""

try:
    from via_sd.runtime.triton.backend import TritonPythonModel
except ImportError as error:
    raise ImportError(
        f"this model runs on via-sd-export, which the server's Python cannot import ({error}): install the package "
        "with the extra [cpu] or [gpu] into the environment that runs the Python backend"
    ) from None

__all__ = ["TritonPythonModel"]
'''


def write_repository(
    bundle: str | Path,
    repository: str | Path,
    *,
    name: str = "via_sd",
    options: ServingOptions | None = None,
    copy: bool = True,
    warm_up: bool = True,
) -> Path:
    """Adds the model `name`, which serves `bundle`, to the model repository `repository`.

    Args:
        bundle: bundle directory.
        repository: model repository, made if it is not there; other models in it are left alone.
        name: what clients call the model.
        options: how it is served.
        copy: put a copy of the bundle into the repository, which can then be moved; otherwise it is named by its path.
        warm_up: let every instance answer a short request before the model is ready.

    Returns:
        The model's folder; it appears when everything in it is complete.

    Raises:
        BundleError: no bundle there, or a damaged one.
        RepositoryError: a name that cannot be one, or a model of that name that is there already.
        DiskSpaceError: the copy of the bundle does not fit on the disk.
    """
    source = Path(bundle).resolve()
    read_manifest(source)
    options = options or ServingOptions()
    with new_model(repository, name) as folder:
        if copy:
            _copy_bundle(source, folder / "1" / "bundle", engines=options.backend not in (None, "onnxruntime"))
        named = "bundle" if copy else str(source)
        config = model_config(name, named, options, warm_up=warm_up)
        write_model(folder, config, warm_up=warm_up)
    return Path(repository) / name


def _copy_bundle(source: Path, target: Path, *, engines: bool) -> None:
    """Copy what belongs to the bundle: its files as the manifest lists them, policies, and the engines that are run.

    Plain files: ONNX Runtime reads no weights through a link, and a link may lead to what is nobody's business.
    """
    bundle = load_bundle(source)
    wanted = [source / MANIFEST, *map(bundle.file, bundle.manifest["files"])]
    for folder in (POLICY_FOLDER, *([ENGINES_FOLDER] if engines else [])):
        wanted += (source / folder).rglob("*")
    wanted = [file for file in wanted if file.is_symlink() or not file.is_dir()]
    for file in wanted:
        relative = file.relative_to(source)
        if not resolved_within(source, relative.as_posix()) or file.is_symlink() or not file.is_file():
            raise RepositoryError(f"{file} is a link or no regular file, and is not copied; remove it from the bundle")
    check_space(target, sum(file.stat().st_size for file in wanted), f"the copy of {source}")
    for file in wanted:
        relative = file.relative_to(source)
        (target / relative).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, target / relative)


def write_model(folder: Path, config: str, *, warm_up: bool) -> None:
    """Writes into a model's folder everything but the bundle: configuration, `model.py`, the warm-up request."""
    (folder / "config.pbtxt").write_text(config, encoding="utf-8")
    version = folder / "1"
    version.mkdir(exist_ok=True)
    (version / "model.py").write_text(_MODEL, encoding="utf-8")
    if warm_up:
        (folder / WARMUP_FOLDER).mkdir()
        for file, content in warm_up_files().items():
            (folder / WARMUP_FOLDER / file).write_bytes(content)


@contextmanager
def new_model(repository: str | Path, name: str) -> Iterator[Path]:
    """A folder to fill that becomes the model `name` of `repository` when the block ends well, and else is removed."""
    if not name or name != Path(name).name or name.startswith("."):
        raise RepositoryError(
            f"{name!r} cannot be a model's name: it becomes a folder's name, so it has no / and no dot first"
        )
    root = Path(repository)
    target = root / name
    if target.exists():
        raise RepositoryError(f"{target} is there already; remove it, or choose another --name")
    try:
        root.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise RepositoryError(f"{root} is a file; --repository wants a folder") from None
    with whole_directory(target) as partial:
        yield partial
