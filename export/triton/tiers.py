"""The other layout: every tier a Triton model of its own, and a model over them that decodes by calling them.

For servers whose operators want the tiers as models that Triton itself runs, places and counts. It pays for that: KV
travels through Triton with every step, and every tier holds its own copy of the weights.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from via_sd.contract.graphs import DRAFTER, FULL
from via_sd.contract.manifest import Bundle, load_bundle, write_manifest
from via_sd.errors import RepositoryError
from via_sd.export.triton.config import ServingOptions, model_config
from via_sd.export.triton.pbtxt import Message, Word, string_map, to_pbtxt
from via_sd.export.triton.repository import new_model, write_model
from via_sd.files import check_space

if TYPE_CHECKING:
    import onnx_ir as ir

SLIM = "slim"


@dataclass(frozen=True)
class Tier:
    """One tier's Triton model.

    Attributes:
        model: its name in the repository.
        tier: its name in the bundle's verifier; None for a drafter that is a model of its own.
        graph, weights: files of the bundle.
    """

    model: str
    tier: str | None
    graph: Path
    weights: Path


def write_tiers(
    bundle: str | Path,
    repository: str | Path,
    *,
    name: str = "via_sd",
    options: ServingOptions | None = None,
    copy: bool = True,
) -> Path:
    """Adds `full`, `slim` and `drafter` (those the bundle has) to `repository`, and the model `name` over them.

    Args:
        options: instances and threads are those of the tiers' models, the rest is for the model over them.
        copy: copy the weights; otherwise they are hard links, which ONNX Runtime takes for plain files.

    Returns:
        The folder of the model `name`; bundle, repository and name are as in `write_repository`.

    Raises:
        BundleError: no bundle there, or a damaged one.
        RepositoryError: a GPU is asked for, a model of one of these names is there already, or no `onnx_ir` to read
            the graphs with.
        DiskSpaceError: the weights of all tiers do not fit on the disk.
    """
    options = options or ServingOptions()
    if options.gpus:
        raise RepositoryError(
            "the tiers layout was asked for a GPU (--gpu), and its graphs give their attention the lengths of several "
            "sequences, which ONNX Runtime's CUDA provider does not take (1.31.1); leave out --gpu, or serve engines: "
            "--layout pipeline --backend tensorrt-rtx"
        )
    source = Path(bundle).resolve()
    checked = load_bundle(source)
    manifest = checked.manifest
    tiers = bundle_tiers(checked)
    if name in (tier.model for tier in tiers):
        raise RepositoryError(f"--name is {name!r}, which is what one of the tiers is called; choose another")
    models = {tier.tier: tier.model for tier in tiers if tier.tier is not None}
    extra = {"verifier_models": json.dumps(models)}
    if any(tier.tier is None for tier in tiers):
        extra["drafter_model"] = DRAFTER
    if copy:
        weights = sum(tier.weights.stat().st_size for tier in tiers)
        check_space(Path(repository), weights, "a copy of the weights for each tier")
    with ExitStack() as all_or_none:
        for tier in tiers:
            _write_tier(all_or_none.enter_context(new_model(repository, tier.model)), tier, options, copy)
        folder = all_or_none.enter_context(new_model(repository, name))
        _copy_without_graphs(source, manifest, folder / "1" / "bundle")
        over = replace(options, instances=1, threads=None)
        # No warm-up: while this model loads, the ones it calls may not be there yet.
        write_model(folder, model_config(name, "bundle", over, warm_up=False, extra=extra), warm_up=False)
    return Path(repository) / name


def _write_tier(folder: Path, tier: Tier, options: ServingOptions, copy: bool) -> None:
    (folder / "1").mkdir()
    graph = write_graph(tier.graph, folder / "1" / "model.onnx")
    # Weights keep their name: the graph looks for them under it, beside itself.
    place(tier.weights, folder / "1" / tier.weights.name, copy=copy)
    (folder / "config.pbtxt").write_text(tier_config(tier.model, graph, options), encoding="utf-8")


def bundle_tiers(bundle: Bundle) -> list[Tier]:
    """The models a bundle's tiers become: `full`, `slim` if it has one, `drafter` if that is a model or a mask."""
    manifest = bundle.manifest
    verifier, drafter = manifest["verifier"], manifest["drafter"]
    weights = bundle.file(verifier["weights"])
    names = {FULL: FULL}
    if manifest["slim"] is not None:
        names[manifest["slim"]] = SLIM
    if drafter["kind"] == "mask":
        names[drafter["tier"]] = DRAFTER
    tiers = [Tier(model, tier, bundle.file(verifier["tiers"][tier]["graph"]), weights) for tier, model in names.items()]
    if drafter["kind"] == "model":
        tiers.append(Tier(DRAFTER, None, bundle.file(drafter["graph"]), bundle.file(drafter["weights"])))
    return tiers


def write_graph(source: Path, target: Path) -> Path:
    """Writes the graph `source` as Triton can serve it: scalar inputs become vectors of one, weights stay outside.

    Triton refuses a scalar input of a model without batches; the attention operator takes its length either way.
    """
    ir = _onnx_ir()
    model = ir.load(source)
    for value in model.graph.inputs:
        if value.shape is not None and len(value.shape) == 0:
            value.shape = ir.Shape([1])
    ir.save(model, target)
    return target


def tier_config(model: str, graph: Path, options: ServingOptions) -> str:
    """`config.pbtxt` that serves `graph` on Triton's ONNX Runtime backend, its tensors read from the graph itself."""
    loaded = _onnx_ir().load(graph).graph
    config: dict[str, Message | list[Message] | str | int] = {
        "name": model,
        "backend": "onnxruntime",
        # Every dimension is the graph's own: one sequence a request, and its KV is not Triton's to batch.
        "max_batch_size": 0,
        "input": [_tensor(value) for value in loaded.inputs],
        "output": [_tensor(value) for value in loaded.outputs],
        "instance_group": options.instance_group(),
    }
    if options.threads is not None:
        config["parameters"] = string_map({"intra_op_thread_count": str(options.threads)})
    return to_pbtxt(config)


def _tensor(value: ir.Value) -> Message:
    if value.name is None or value.dtype is None or value.shape is None:
        raise RepositoryError(f"the graph does not say name, type and shape of {value}: export the bundle again")
    dims = [dim if isinstance(dim, int) else -1 for dim in value.shape]
    return {"name": value.name, "data_type": Word(_data_type(value.dtype)), "dims": dims}


def _data_type(dtype: ir.DataType) -> str:
    names = {"FLOAT": "FP32", "FLOAT16": "FP16", "BFLOAT16": "BF16", "DOUBLE": "FP64"}
    return f"TYPE_{names.get(dtype.name, dtype.name)}"


def _onnx_ir() -> Any:
    try:
        import onnx_ir
    except ImportError:
        raise RepositoryError(
            "models for single tiers are written with onnx_ir, which is not installed: "
            "pip install 'via-sd-export[export]', or keep --layout pipeline"
        ) from None
    return onnx_ir


def place(source: Path, target: Path, *, copy: bool) -> None:
    """Puts the file `source` at `target`, as a copy or as a hard link."""
    if copy:
        shutil.copy2(source, target)
        return
    try:
        os.link(source, target)
    except OSError as error:
        raise RepositoryError(f"{source} cannot be linked to {target} ({error.strerror}); use --copy") from None


def _copy_without_graphs(bundle: Path, manifest: Mapping[str, Any], target: Path) -> None:
    """What the model over the tiers needs of the bundle: its manifest and its tokenizer."""
    target.mkdir(parents=True)
    kept = {file: entry for file, entry in manifest["files"].items() if "/" not in file}
    for file in kept:
        shutil.copy2(bundle / file, target / file)
    write_manifest(target, {**manifest, "files": kept})
