"""A source that cannot be exported is named, with what was wanted, before the long work begins."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from via_sd.errors import ExportError, UnsupportedModelError
from via_sd.export.sources.checkpoint import open_checkpoint


@pytest.fixture
def checkpoint(checkpoint_of, tmp_path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(checkpoint_of("llama"), tmp_path / "checkpoint"))


def refused(source: Path | str, match: str, kind: type[Exception] = ExportError) -> None:
    with pytest.raises(kind, match=match), open_checkpoint(source):
        pass


@pytest.fixture
def hub_cache(checkpoint_of, tmp_path, monkeypatch) -> Path:
    """The snapshot of `nobody/something` in a hub cache, as huggingface_hub lays it out: links to blobs."""
    import huggingface_hub.constants

    repository = tmp_path / "hub/models--nobody--something"
    snapshot = repository / "snapshots/abc123"
    for folder in (repository / "blobs", repository / "refs", snapshot):
        folder.mkdir(parents=True)
    (repository / "refs/main").write_text("abc123")
    for number, file in enumerate(sorted(checkpoint_of("llama").iterdir())):
        shutil.copyfile(file, repository / f"blobs/{number}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return snapshot


def weights_of(source: Path | str) -> dict[str, bytes]:
    with open_checkpoint(source) as found:
        tensors = {name: value.const_value for name, value in found.model.graph.initializers.items()}
        return {name: tensor.numpy().tobytes() for name, tensor in tensors.items() if tensor is not None}


def test_a_hub_cache_is_read_though_its_files_are_links(hub_cache, checkpoint_of, tmp_path, monkeypatch):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    wanted = weights_of(checkpoint_of("llama"))
    assert weights_of("nobody/something") == wanted
    assert weights_of(hub_cache) == wanted
    assert not list(temporary.iterdir())


def test_what_the_hub_has_in_other_formats_has_to_be_on_disk_first(hub_cache):
    (hub_cache / "model.safetensors").unlink()
    refused("nobody/something", "nobody/something on the hub has no .*hf download nobody/something --local-dir")


def test_a_path_that_does_not_exist_is_refused(tmp_path):
    refused(tmp_path / "nothing", "does not exist; wanted a Hugging Face model directory, a GGUF file, a hub id, or a")
    refused("nothing-here", "does not exist")


def test_a_hub_id_that_cannot_be_fetched_is_refused(monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    refused("nobody/nothing", "nobody/nothing is no local path and cannot be fetched from the hub")


def test_a_directory_without_configuration_is_refused(checkpoint):
    (checkpoint / "config.json").unlink()
    refused(checkpoint, "has no config.json")


@pytest.mark.parametrize(("text", "match"), [("{", "is not JSON"), ("[1]", "holds list, wanted an object")])
def test_a_broken_configuration_is_refused(text, match, checkpoint):
    (checkpoint / "config.json").write_text(text)
    refused(checkpoint, match)


def test_a_directory_without_safetensors_is_refused(checkpoint):
    (checkpoint / "model.safetensors").unlink()
    refused(checkpoint, r"no \*\.safetensors file; convert the checkpoint")


@pytest.mark.parametrize("kept", [0, 4, 2000, -1])
def test_truncated_weights_are_refused(kept, checkpoint):
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    refused(checkpoint, "model.safetensors is damaged .*; fetch it again")


def test_missing_tensors_are_named(checkpoint):
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.2.mlp.down_proj.weight"]
    save_file(tensors, file, metadata={"format": "pt"})
    refused(checkpoint, r"lacks weights for .*layers\.2\.mlp\.down_proj")


def test_an_architecture_nobody_knows_is_refused(checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "model_type": "nonesuch"}))
    refused(checkpoint, "nonesuch", UnsupportedModelError)


def test_an_encoder_is_refused(tmp_path):
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=64
    )
    transformers.BertModel(config).save_pretrained(tmp_path / "bert")
    refused(tmp_path / "bert", ".", UnsupportedModelError)


def test_the_text_models_configuration_of_a_composite_is_what_counts(checkpoint_of, checkpoint):
    """A model wrapped with other modalities keeps its decoder's configuration one level down."""
    from via_sd.export.sources.checkpoint import read_config

    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({"model_type": "wrapper", "text_config": config}))
    assert read_config(checkpoint / "config.json") == config


def test_building_a_graph_prints_nothing(checkpoint, capfd):
    with open_checkpoint(checkpoint):
        pass
    printed = capfd.readouterr()
    assert (printed.out, printed.err) == ("", "")


def test_a_directory_is_read_and_not_written(checkpoint):
    before = {p: p.read_bytes() for p in checkpoint.rglob("*")}
    with open_checkpoint(checkpoint):
        pass
    assert {p: p.read_bytes() for p in checkpoint.rglob("*")} == before
