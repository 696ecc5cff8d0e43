"""Planted verifiers: normal checkpoints whose best mask is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools.benchmarks.planted import MASK_FILE, best_mask, evenly, plant, scattered
from via_sd.masks import read_mask
from via_sd.tools.commands.console import CommandError

#: The tiny checkpoint has six layers: two copies behind layer 1, one behind layer 3.
COPIES = [0, 2, 0, 1, 0, 0]
TOKENS = list(range(3, 60))


def logits(directory: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([TOKENS])).logits[0]


def test_with_epsilon_0_the_planted_model_computes_what_the_source_does(tiny_checkpoint: Path, tmp_path: Path) -> None:
    import torch

    plant(tiny_checkpoint, tmp_path / "planted", COPIES, epsilon=0.0)
    assert torch.equal(logits(tmp_path / "planted"), logits(tiny_checkpoint))


def test_epsilon_says_how_far_the_planted_model_is_from_the_source(tiny_checkpoint: Path, tmp_path: Path) -> None:
    source = logits(tiny_checkpoint)
    differences = []
    for epsilon in (0.01, 0.1):
        plant(tiny_checkpoint, tmp_path / f"{epsilon}", COPIES, epsilon=epsilon)
        differences.append(float((logits(tmp_path / f"{epsilon}") - source).abs().mean()))
    assert 0 < differences[0] < differences[1] < float(source.std())


def test_layers_left_out_by_the_mask_are_the_copies(tiny_checkpoint: Path, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    mask = plant(tiny_checkpoint, tmp_path / "planted", COPIES, epsilon=0.1)
    assert read_mask(tmp_path / "planted" / MASK_FILE).keep_mlp == mask.keep_mlp
    assert mask.keep_attention == mask.keep_mlp == (True, True, False, False, True, True, False, True, True)
    source = load_file(tiny_checkpoint / "model.safetensors")
    planted = load_file(tmp_path / "planted" / "model.safetensors")
    kept = [layer for layer, keep in enumerate(mask.keep_mlp) if keep]
    for name, tensor in source.items():
        if ".layers." in name:
            layer = int(name.split(".layers.")[1].split(".")[0])
            name = name.replace(f".layers.{layer}.", f".layers.{kept[layer]}.")
        assert torch.equal(planted[name], tensor)
    down = [planted[f"model.layers.{layer}.mlp.down_proj.weight"] for layer in (1, 2, 3)]
    assert torch.allclose(down[1], 0.1 * down[0])
    assert torch.equal(down[1], down[2])


def test_the_rest_of_the_directory_comes_along(tiny_checkpoint: Path, tmp_path: Path) -> None:
    plant(tiny_checkpoint, tmp_path / "planted", COPIES, epsilon=0.1)
    assert (tmp_path / "planted" / "tokenizer.json").read_bytes() == (tiny_checkpoint / "tokenizer.json").read_bytes()
    config = json.loads((tmp_path / "planted" / "config.json").read_text(encoding="utf-8"))
    assert config["num_hidden_layers"] == 9
    assert [p.name for p in tmp_path.iterdir()] == ["planted"]


def test_a_checkpoint_in_several_files_stays_in_several_files(tiny_checkpoint: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="300KB")
    shards = sorted((tmp_path / "sharded").glob("*.safetensors"))
    assert len(shards) > 1
    plant(tmp_path / "sharded", tmp_path / "planted", COPIES, epsilon=0.0)
    assert [p.name for p in sorted((tmp_path / "planted").glob("*.safetensors"))] == [p.name for p in shards]
    assert torch.equal(logits(tmp_path / "planted"), logits(tiny_checkpoint))


def test_settings_given_per_layer_are_repeated_for_the_copies(tiny_checkpoint: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for file in tiny_checkpoint.iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["layer_types"] = ["full_attention", "sliding_attention"] * 3
    (source / "config.json").write_text(json.dumps(config), encoding="utf-8")
    plant(source, tmp_path / "planted", COPIES, epsilon=0.1)
    kinds = json.loads((tmp_path / "planted" / "config.json").read_text(encoding="utf-8"))["layer_types"]
    assert [kind[0] for kind in kinds] == list("fsssfssfs")


def test_placements() -> None:
    assert evenly(6, 2, 4) == [0, 0, 1, 1, 1, 0]
    assert best_mask(evenly(4, 1, 2)).keep_mlp == (True, True, False, True, False, True)
    drawn = scattered(30, 10, seed=3)
    assert (len(drawn), sum(drawn), drawn[-1]) == (30, 10, 0)
    assert drawn == scattered(30, 10, seed=3)
    assert drawn != scattered(30, 10, seed=4)


@pytest.mark.parametrize("copies", [[1] * 6, [0, 1, 0], [0, -1, 0, 2, 0, 0]])
def test_a_placement_that_does_not_fit_is_refused(tiny_checkpoint: Path, tmp_path: Path, copies: list[int]) -> None:
    with pytest.raises(CommandError, match="wanted 6 counts"):
        plant(tiny_checkpoint, tmp_path / "planted", copies, epsilon=0.1)
    assert not list(tmp_path.iterdir())


def test_a_model_of_another_family_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=3, n_embd=32, n_head=2, vocab_size=64))
    model.save_pretrained(tmp_path / "gpt2")
    config = json.loads((tmp_path / "gpt2" / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "gpt2" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}), encoding="utf-8")
    with pytest.raises(CommandError, match="another family"):
        plant(tmp_path / "gpt2", tmp_path / "planted", [0, 1, 0], epsilon=0.1)
    assert not (tmp_path / "planted").exists()


def test_a_norm_behind_the_output_projection_is_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_bytes((tiny_checkpoint / "config.json").read_bytes())
    weights = load_file(tiny_checkpoint / "model.safetensors")
    weights["model.layers.1.post_feedforward_layernorm.weight"] = weights["model.norm.weight"].clone()
    save_file(weights, source / "model.safetensors")
    with pytest.raises(CommandError, match="undoes its scale"):
        plant(source, tmp_path / "planted", COPIES, epsilon=0.1)


def test_a_directory_that_exists_or_has_no_model_is_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="exists"):
        plant(tiny_checkpoint, tmp_path, COPIES, epsilon=0.1)
    with pytest.raises(CommandError, match="no Hugging Face model directory"):
        plant(tmp_path, tmp_path / "planted", COPIES, epsilon=0.1)
