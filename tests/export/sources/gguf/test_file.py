"""A GGUF file that cannot be read is refused with the reason, before any long work."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from via_sd.errors import ExportError, UnsupportedModelError
from via_sd.export.sources.checkpoint import open_checkpoint
from via_sd.export.sources.gguf.file import open_gguf


def write_gguf(path: Path, kind: gguf.GGMLQuantizationType, architecture: str = "llama") -> Path:
    """A GGUF file with one tensor of the given quantisation."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    writer = gguf.GGUFWriter(path, architecture)
    raw = np.zeros((4, size * max(1, 256 // block)), np.uint8)
    writer.add_tensor("blk.0.attn_q.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_gguf_of_type_number(path: Path, number: int) -> Path:
    """A GGUF file with one tensor whose type is any number, by hand: no library writes a type it does not know."""
    name = b"blk.0.attn_q.weight"
    header = struct.pack("<4sIQQ", b"GGUF", 3, 1, 0)
    tensor = struct.pack("<Q", len(name)) + name + struct.pack("<IQQIQ", 2, 32, 4, number, 0)
    body = header + tensor
    path.write_bytes(body + bytes(-len(body) % 32) + bytes(4096))
    return path


@pytest.mark.parametrize("kind", ["Q8_K", "Q8_1", "I8"])
def test_a_quantisation_that_cannot_be_dequantised_is_named(kind, tmp_path):
    file = write_gguf(tmp_path / "model.gguf", gguf.GGMLQuantizationType[kind])
    with pytest.raises(UnsupportedModelError, match=rf"quantised as {kind}, .*use a file in one of the Q"):
        open_gguf(file)


def test_a_quantisation_nobody_knows_is_refused(tmp_path):
    file = write_gguf_of_type_number(tmp_path / "model.gguf", 4711)
    with pytest.raises(UnsupportedModelError, match="type 4711, which this gguf package does not know"):
        open_gguf(file)


@pytest.mark.parametrize(
    "kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q6_K", "IQ4_NL", "MXFP4"]
)
def test_the_usual_quantisations_pass(kind, tmp_path):
    open_gguf(write_gguf(tmp_path / "model.gguf", gguf.GGMLQuantizationType[kind]))


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04 a zip file", b"{}"])
def test_a_file_of_another_kind_is_refused(content, tmp_path):
    (tmp_path / "model.gguf").write_bytes(content)
    with (
        pytest.raises(ExportError, match=r"is no GGUF file .*wanted b'GGUF'"),
        open_checkpoint(tmp_path / "model.gguf"),
    ):
        pass


@pytest.mark.parametrize("kept", [5, 23, 24, 60, 120, -1, -2000])
def test_a_file_cut_anywhere_is_refused(kept, tmp_path):
    file = write_gguf(tmp_path / "model.gguf", gguf.GGMLQuantizationType.F32)
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(ExportError, match=r"is damaged or cut short: .*; fetch it again"):
        open_gguf(file)


def test_an_architecture_that_is_not_read_is_refused(tmp_path):
    file = write_gguf(tmp_path / "model.gguf", gguf.GGMLQuantizationType.F32, architecture="nonesuch")
    with (
        pytest.raises(UnsupportedModelError, match=r"of architecture nonesuch, wanted one of llama"),
        open_checkpoint(file),
    ):
        pass
