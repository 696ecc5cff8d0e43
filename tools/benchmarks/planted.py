"""A verifier with planted redundancy: a checkpoint whose best mask is known.

    python -m tools.benchmarks.planted CHECKPOINT OUT --behind 3,27 --epsilon 0.1

Block expansion (as in LLaMA Pro, arXiv 2401.02415): copies of a layer are inserted behind it with their output
projections scaled by a small epsilon, so that each copy adds nearly nothing to the residual stream. Skipping exactly
the copies gives back the original model. It stands in for a model large enough to have layers to spare; whatever is
measured on it is a figure for a planted verifier and has to say so.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from via_sd.masks import Mask, write_mask
from via_sd.tools.commands.console import CommandError, command, err

MASK_FILE = "planted.mask.json"
_LAYER = re.compile(r"^(.*\blayers\.)(\d+)(\..+)$")
_OUTPUT_PROJECTIONS = ("self_attn.o_proj.", "mlp.down_proj.")
#: A norm behind the output projection undoes its scale.
_POST_NORMS = ("post_feedforward_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm")
#: Entries of config.json with one element per layer.
_PER_LAYER = ("layer_types", "no_rope_layers", "mlp_layer_types")


def evenly(num_layers: int, first: int, last: int) -> list[int]:
    """Placement with one copy behind each of the layers `first` to `last`: how many copies each layer gets."""
    return [int(first <= layer <= last) for layer in range(num_layers)]


def scattered(num_layers: int, planted: int, seed: int) -> list[int]:
    """Placement of `planted` copies behind layers drawn at random, several behind one layer included.

    The last layer gets none: the search keeps the first and the last layer of a model.
    """
    draw = random.Random(seed)
    copies = [0] * num_layers
    for _ in range(planted):
        copies[draw.randrange(num_layers - 1)] += 1
    return copies


def best_mask(copies: Sequence[int]) -> Mask:
    """The mask of the expanded model that skips exactly the planted layers."""
    return Mask.from_layers([copy == 0 for count in copies for copy in range(count + 1)], name="planted")


def plant(source: str | Path, out: str | Path, copies: Sequence[int], *, epsilon: float) -> Mask:
    """Write the Hugging Face directory `out`: the Llama-family checkpoint `source` with redundant layers.

    Args:
        source: Hugging Face directory with safetensors whose layers are `self_attn` (`o_proj`) and `mlp` (`down_proj`).
        out: directory to create; appears complete or not at all. `planted.mask.json` in it is the best mask.
        copies: how many copies go behind each layer; none behind the last.
        epsilon: what the copies' output projections are multiplied by; 0 makes them exact no-operations.

    Returns:
        The mask that skips exactly the copies.

    Raises:
        CommandError: no such checkpoint, `out` exists, a placement that does not fit, or another kind of layer.
    """
    directory, target = Path(source), Path(out)
    if target.exists():
        raise CommandError(f"{target} exists; remove it or choose another directory")
    config = _read_config(directory)
    num_layers = int(config.get("num_hidden_layers", 0))
    if len(copies) != num_layers or min(copies, default=0) < 0 or copies[-1]:
        raise CommandError(
            f"the placement is {list(copies)}; wanted {num_layers} counts (one per layer), none negative, and 0 for "
            "the last layer"
        )
    mask = best_mask(copies)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        _expand_weights(directory, partial, copies, epsilon)
        for file in directory.iterdir():
            if file.suffix in (".json", ".jinja", ".model", ".txt") and not file.name.endswith(".index.json"):
                shutil.copyfile(file, partial / file.name)
        expanded = _expand_config(config, copies)
        (partial / "config.json").write_text(json.dumps(expanded, indent=1) + "\n", encoding="utf-8")
        write_mask(mask, partial / MASK_FILE)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return mask


def _read_config(directory: Path) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError) as error:
        raise CommandError(f"{directory} is no Hugging Face model directory: {error}") from None
    return config


def _expand_config(config: dict[str, Any], copies: Sequence[int]) -> dict[str, Any]:
    expanded = {**config, "num_hidden_layers": len(copies) + sum(copies)}
    for key in _PER_LAYER:
        if isinstance(values := config.get(key), list):
            expanded[key] = [value for value, count in zip(values, copies, strict=True) for _ in range(count + 1)]
    return expanded


def _expand_weights(source: Path, target: Path, copies: Sequence[int], epsilon: float) -> None:
    """Write one safetensors file per source file, so that memory stays within one file's tensors."""
    try:
        import torch
        from safetensors import SafetensorError, safe_open
        from safetensors.torch import save_file
    except ImportError as error:
        raise CommandError(f"planting needs more packages ({error}): pip install 'via-sd-export[export]'") from None

    files = sorted(source.glob("*.safetensors"))
    if not files:
        raise CommandError(f"{source} has no *.safetensors file; convert the checkpoint to safetensors first")
    first = [layer + sum(copies[:layer]) for layer in range(len(copies))]
    weight_map: dict[str, str] = {}
    scaled = [0] * len(copies)
    size = 0
    for file in files:
        written: dict[str, torch.Tensor] = {}
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - a file handle, no mapping
                    tensor = tensors.get_tensor(name)
                    match = _LAYER.match(name)
                    if match is None:
                        written[name] = tensor
                        continue
                    layer = int(match.group(2))
                    scale = _scale(name, match.group(3)[1:], tensor.is_floating_point())
                    scaled[layer] += scale and name.endswith(".weight")
                    written[f"{match.group(1)}{first[layer]}{match.group(3)}"] = tensor
                    for copy in range(1, copies[layer] + 1):
                        # The file format refuses tensors that share memory.
                        copied = tensor * epsilon if scale else tensor.clone()
                        written[f"{match.group(1)}{first[layer] + copy}{match.group(3)}"] = copied
        except (SafetensorError, OSError) as error:
            raise CommandError(f"{file} is damaged ({error}); fetch it again") from None
        save_file(written, target / file.name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(written, file.name))
        size += sum(tensor.nbytes for tensor in written.values())
    if any(count != len(_OUTPUT_PROJECTIONS) for count in scaled):
        raise CommandError(
            f"{source} is of another family: wanted self_attn.o_proj and mlp.down_proj in each of its "
            f"{len(copies)} layers"
        )
    if len(files) > 1:
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def _scale(name: str, within: str, floating: bool) -> bool:
    """Whether a layer's tensor is an output projection; refuses what would make scaling it pointless."""
    if any(norm in within for norm in _POST_NORMS):
        raise CommandError(f"{name}: a norm behind the output projection undoes its scale; use a Llama-family model")
    if not within.startswith(_OUTPUT_PROJECTIONS):
        return False
    if not floating:
        raise CommandError(f"{name} is quantised; plant into the checkpoint it was quantised from")
    return True


@command
def main(
    checkpoint: Annotated[Path, typer.Argument(help="Hugging Face directory of a Llama-family model.")],
    out: Annotated[Path, typer.Argument(help="Directory to write.")],
    behind: Annotated[str, typer.Option(metavar="FIRST,LAST", help="One copy goes behind each of these layers.")],
    epsilon: Annotated[float, typer.Option(help="What the output projections of the copies are multiplied by.")] = 0.1,
) -> None:
    """Write OUT: CHECKPOINT with copies of layers, and the mask that skips exactly those."""
    try:
        first, last = (int(part) for part in behind.split(","))
    except ValueError:
        raise CommandError(f"--behind is {behind!r}, wanted two layers: FIRST,LAST") from None
    num_layers = int(_read_config(checkpoint).get("num_hidden_layers", 0))
    mask = plant(checkpoint, out, evenly(num_layers, first, last), epsilon=epsilon)
    err.print(f"wrote {out}: {mask.num_layers} layers; {out / MASK_FILE} skips the copies", highlight=False)


if __name__ == "__main__":
    typer.run(main)
