"""`config.pbtxt` is what Triton's own protobuf says a model configuration is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support.blocked import HEAVY, run_blocked
from via_sd.contract.served_model import INPUTS, OUTPUTS, contract_digest
from via_sd.errors import BundleError
from via_sd.export.triton import RepositoryError, ServingOptions, write_repository, write_tiers
from via_sd.export.triton.pbtxt import Word, to_pbtxt
from via_sd.tools.commands.main import app
from via_sd.version import __version__


def parse(text: str) -> Any:
    text_format = pytest.importorskip("google.protobuf.text_format")
    model_config_pb2 = pytest.importorskip("tritonclient.grpc.model_config_pb2")
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def config_of(folder: Path) -> Any:
    return parse((folder / "config.pbtxt").read_text(encoding="utf-8"))


def parameters(config: Any) -> dict[str, str]:
    return {name: value.string_value for name, value in config.parameters.items()}


def test_strings_survive_whatever_is_in_them() -> None:
    name = 'a "quoted" \\ path\nwith a line break, a tab\t, 世界 and 🦩'
    assert parse(to_pbtxt({"name": name})).name == name


def test_lists_enums_and_nested_messages_are_written_as_protobuf_reads_them() -> None:
    config = parse(
        to_pbtxt(
            {
                "max_batch_size": 3,
                "model_transaction_policy": {"decoupled": True},
                "input": [{"name": "a", "data_type": Word("TYPE_FP32"), "dims": [-1, 2]}, {"name": "b", "dims": []}],
            }
        )
    )
    assert config.max_batch_size == 3
    assert config.model_transaction_policy.decoupled
    assert [(each.name, list(each.dims)) for each in config.input] == [("a", [-1, 2]), ("b", [])]


def test_the_model_has_the_tensors_of_the_contract_and_is_decoupled(bundle: Path, tmp_path: Path) -> None:
    config = config_of(write_repository(bundle, tmp_path, name="llm"))
    data_type = config.input[0].DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_number
    assert (config.name, config.backend, config.max_batch_size) == ("llm", "python", 1)
    assert config.model_transaction_policy.decoupled
    inputs = [(each.name, data_type[each.data_type].name, tuple(each.dims), each.optional) for each in config.input]
    assert inputs == [(each.name, f"TYPE_{each.data_type}", each.dims, each.optional) for each in INPUTS]
    outputs = [(each.name, data_type[each.data_type].name, tuple(each.dims)) for each in config.output]
    assert outputs == [(each.name, f"TYPE_{each.data_type}", each.dims) for each in OUTPUTS]
    assert not next(each for each in config.input if each.name == "text_input").optional


@pytest.mark.parametrize(("backend", "wanted"), [(None, False), ("onnxruntime", False), ("portable-cpu", True)])
def test_engines_are_copied_for_a_backend_that_runs_them(backend, wanted, bundle: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(bundle, tmp_path / "source"))
    (source / "engines").mkdir()
    (source / "engines" / "full.plan").write_bytes(b"plan")
    model = write_repository(source, tmp_path / "models", options=ServingOptions(backend=backend))
    assert (model / "1" / "bundle" / "engines" / "full.plan").is_file() == wanted
    assert (model / "1" / "bundle" / "bundle.json").is_file()


def test_options_become_parameters_and_placement(bundle: Path, tmp_path: Path) -> None:
    options = ServingOptions(
        defaults={"mode": "routed", "max_divergence": "0.02"}, backend="tensorrt", trust_engines=True, slots=3,
        threads=5, queue=0, queue_timeout=1.5, apply_chat_template=True, instances=2, gpus=(0, 3),
        environment="/opt/env",
    )  # fmt: skip
    config = config_of(write_repository(bundle, tmp_path, options=options, copy=False))
    written = {"written_by": __version__, "contract": contract_digest()}
    assert parameters(config) == {
        "bundle": str(bundle.resolve()),
        "mode": "routed",
        "max_divergence": "0.02",
        "backend": "tensorrt",
        "trust_engines": "true",
        "slots": "3",
        "threads": "5",
        "queue": "0",
        "queue_timeout": "1.5",
        "apply_chat_template": "true",
        "EXECUTION_ENV_PATH": "/opt/env",
        **written,
    }
    plain = parameters(config_of(write_repository(bundle, tmp_path, name="plain", copy=False)))
    assert plain == {"bundle": str(bundle.resolve()), "slots": "4", "queue": "128", **written}
    (group,) = config.instance_group
    assert (group.count, list(group.gpus), group.kind) == (2, [0, 3], group.KIND_GPU)


def test_a_copied_bundle_is_named_by_a_path_that_moves_with_the_repository(bundle: Path, tmp_path: Path) -> None:
    folder = write_repository(bundle, tmp_path)
    assert parameters(config_of(folder))["bundle"] == "bundle"
    copied = {path.relative_to(folder / "1" / "bundle") for path in (folder / "1" / "bundle").rglob("*")}
    assert copied == {path.relative_to(bundle) for path in bundle.rglob("*")}
    assert not any(path.is_symlink() for path in folder.rglob("*"))


def test_what_does_not_belong_to_a_bundle_is_not_copied(bundle: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(bundle, tmp_path / "source"))
    secret = tmp_path / "secret"
    secret.write_text("not to be served")
    (source / "notes").symlink_to(secret)
    (source / "other").touch()
    folder = write_repository(source, tmp_path / "repository")
    copied = {path.name for path in (folder / "1" / "bundle").iterdir()}
    assert copied == {path.name for path in bundle.iterdir()}
    (source / "policy").mkdir()
    (source / "policy" / "machine.json").symlink_to(secret)
    with pytest.raises(RepositoryError, match=r"machine\.json is a link or no regular file, and is not copied"):
        write_repository(source, tmp_path / "repository", name="other")
    (source / "policy").rename(tmp_path / "elsewhere")
    (source / "tokenizer.json").unlink()
    (source / "tokenizer.json").symlink_to(secret)
    with pytest.raises(BundleError, match="tokenizer"):
        write_repository(source, tmp_path / "repository", name="other")
    assert not list(tmp_path.glob("repository/*other*"))


def test_what_cannot_be_written_is_refused_and_leaves_nothing_behind(bundle: Path, tmp_path: Path) -> None:
    write_repository(bundle, tmp_path, copy=False)
    with pytest.raises(RepositoryError, match="is there already"):
        write_repository(bundle, tmp_path, copy=False)
    with pytest.raises(BundleError, match="is no bundle"):
        write_repository(tmp_path, tmp_path, name="other")
    for name in ("", "a/b", ".hidden"):
        with pytest.raises(RepositoryError, match="cannot be a model's name"):
            write_repository(bundle, tmp_path, name=name)
    with pytest.raises(RepositoryError, match="slots is 0, wanted 1 or more"):
        ServingOptions(slots=0)
    with pytest.raises(RepositoryError, match="queue_timeout is 0 s"):
        ServingOptions(queue_timeout=0)
    with pytest.raises(RepositoryError, match="no default is called 'max_new_tokens'; defaults are mode, max_tokens"):
        ServingOptions(defaults={"max_new_tokens": "5"})
    with pytest.raises(RepositoryError, match="ignore_eos is 'yes', wanted true or false"):
        ServingOptions(defaults={"ignore_eos": "yes"})
    assert [path.name for path in tmp_path.iterdir()] == ["via_sd"]


def test_the_command_writes_a_repository_and_refuses_bad_input_with_code_2(bundle: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models"

    def run(*arguments: str, source: Path = bundle) -> int:
        return CliRunner().invoke(app, ["triton", str(source), "--repository", str(repository), *arguments]).exit_code

    options = ["--name", "llm", "--slots", "2", "--no-copy", "--mode", "routed", "--default", "max_divergence=0.02"]
    assert run(*options) == 0
    written = parameters(config_of(repository / "llm"))
    assert (written["slots"], written["mode"], written["max_divergence"]) == ("2", "routed", "0.02")
    assert run(source=tmp_path) == 2
    for refused in (
        ["--mode", "warp"],
        ["--backend", "warp"],
        ["--name", "llm"],
        ["--slots", "0"],
        ["--default", "max_tokens"],
        ["--default", "max_tokens=many"],
        ["--default", "max_tokens=0"],
        ["--default", "best_of=2"],
        ["--layout", "tiers", "--name", "tiers", "--mode", "routed", "--default", "router=calibrated"],
        ["--layout", "tiers", "--name", "full"],
    ):
        assert run(*refused) == 2, refused
    assert sorted(path.name for path in repository.iterdir()) == ["llm"]


WRITE = """
from via_sd.export.triton import RepositoryError, write_repository, write_tiers

write_repository(sys.argv[2], sys.argv[3])
try:
    write_tiers(sys.argv[2], sys.argv[3], name="other")
except RepositoryError as error:
    print(error)
"""


def test_a_repository_is_written_without_what_exporting_a_model_takes(bundle: Path, tmp_path: Path) -> None:
    said = run_blocked(WRITE, HEAVY | {"onnxruntime"}, str(bundle), str(tmp_path))
    assert said.startswith("models for single tiers are written with onnx_ir, which is not installed: pip install")
    assert [path.name for path in tmp_path.iterdir()] == ["via_sd"]
    assert config_of(tmp_path / "via_sd").name == "via_sd"


def test_a_tier_that_cannot_be_written_leaves_no_other_behind(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "slim").mkdir()
    with pytest.raises(RepositoryError, match="slim is there already"):
        write_tiers(bundle, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["slim"]


def graph_tensors(graph: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Inputs and outputs of an ONNX file as Triton would write them: name to (type, dimensions)."""
    onnx = pytest.importorskip("onnx")
    kinds = {onnx.TensorProto.FLOAT: "TYPE_FP32", onnx.TensorProto.INT64: "TYPE_INT64"}
    kinds |= {onnx.TensorProto.INT32: "TYPE_INT32", onnx.TensorProto.BOOL: "TYPE_BOOL"}

    def read(values: Any) -> dict[str, Any]:
        tensors = {}
        for value in values:
            tensor = value.type.tensor_type
            dims = [dim.dim_value if dim.HasField("dim_value") else -1 for dim in tensor.shape.dim]
            tensors[value.name] = (kinds[tensor.elem_type], dims)
        return tensors

    model = onnx.load(graph, load_external_data=False)
    return read(model.graph.input), read(model.graph.output)


@pytest.mark.parametrize("copy", [True, False], ids=["copied", "linked"])
def test_tiers_become_models_whose_configuration_is_their_graph(tiny_bundle: Path, tmp_path: Path, copy: bool) -> None:
    # A bundle of its own: weights that something links to cannot be read any more where only plain files are taken.
    bundle = Path(shutil.copytree(tiny_bundle, tmp_path / "source" / "bundle"))
    tmp_path = tmp_path / "repository"
    folder = write_tiers(bundle, tmp_path, options=ServingOptions(threads=2, slots=3), copy=copy)
    manifest = json.loads((bundle / "bundle.json").read_text(encoding="utf-8"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full", "slim", "via_sd"]
    for model, tier in (("full", "full"), ("slim", manifest["slim"])):
        source = graph_tensors(bundle / manifest["verifier"]["tiers"][tier]["graph"])
        graph = tmp_path / model / "1" / "model.onnx"
        # Triton has no scalars, so the one there is becomes a vector of one; all else is the bundle's.
        assert source[0]["total_length"] == ("TYPE_INT32", [])
        source[0]["total_length"] = ("TYPE_INT32", [1])
        assert graph_tensors(graph) == source
        assert (graph.parent / "weights.data").read_bytes() == (bundle / "verifier" / "weights.data").read_bytes()
        assert not (graph.parent / "weights.data").is_symlink()
        config = config_of(tmp_path / model)
        assert (config.backend, config.max_batch_size) == ("onnxruntime", 0)
        assert parameters(config) == {"intra_op_thread_count": "2"}
        data_type = config.input[0].DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_number
        for written, graphs in zip((config.input, config.output), graph_tensors(graph), strict=True):
            assert {each.name: (data_type[each.data_type].name, list(each.dims)) for each in written} == graphs
    assert json.loads(parameters(config_of(folder))["verifier_models"]) == {"full": "full", manifest["slim"]: "slim"}
    left = {path.name for path in (folder / "1" / "bundle").rglob("*")}
    assert "tokenizer.json" in left
    assert not {"weights.data", "model.onnx"} & left


def test_tiers_are_not_placed_on_a_gpu_that_cannot_run_them(tiny_bundle, tmp_path):
    with pytest.raises(RepositoryError, match=r"leave out --gpu, or serve engines: --layout pipeline"):
        write_tiers(tiny_bundle, tmp_path / "models", options=ServingOptions(gpus=(0,)))
    assert not (tmp_path / "models").exists()
