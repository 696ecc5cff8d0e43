"""Mask files: every shape that says what it means is read, everything else is refused with the reason."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from via_sd.masks import (
    HEAD_STATES,
    SCHEMA,
    SUBLAYER_STATES,
    Mask,
    MaskError,
    ModelIdentity,
    SublayerState,
    parse_mask,
    read_mask,
    write_mask,
)

MODEL = ModelIdentity("llama", 5, 64, 320, "c0ffee")
#: Layers 1 and 3 skipped, of five.
FLAGS = (True, False, True, False, True)
STATES = ["keep", "skip", "int8", "bridge", "int4"]
OURS = {"format": "via-sd-mask", "version": 2, "attention": STATES, "mlp": STATES}
WITH_FLAGS = {"format": "via-sd-mask", "version": 1, "keep_attention": list(FLAGS), "keep_mlp": list(FLAGS)}

ACCEPTED: dict[str, tuple[Any, str | None]] = {
    "our format": (OURS, None),
    "our format without its name and version": ({k: OURS[k] for k in ("attention", "mlp")}, None),
    "our format with a head": ({**OURS, "head": "int8"}, None),
    "our first version": (WITH_FLAGS, None),
    "our first version without its name and number": (
        {k: WITH_FLAGS[k] for k in ("keep_attention", "keep_mlp")},
        None,
    ),
    "our format with a model": ({**OURS, "model": MODEL.to_json()}, None),
    "our format that names no model": ({**OURS, "model": None}, None),
    "our format with notes of the search": ({**OURS, "search": {"seed": 3}}, None),
    "kept layers by key": ({"keep_layers": [0, 2, 4]}, None),
    "kept layers in any order, repeated": ({"keep_layers": [4, 0, 2, 2]}, None),
    "skipped layers by key": ({"skip_layers": [1, 3]}, None),
    "a boolean keep mask": ({"keep_mask": list(FLAGS)}, None),
    "a keep mask of ones and zeros": ({"keep_mask": [1, 0, 1, 0, 1]}, None),
    "a keep mask beside other entries": ({"keep_mask": list(FLAGS), "score": 0.93}, None),
    "a bare list of kept layers": ([0, 2, 4], "keep"),
    "a bare list of skipped layers": ([1, 3], "skip"),
    "a bare vector of ones and zeros, kept": ([1, 0, 1, 0, 1], "keep"),
    "a bare vector of ones and zeros, skipped": ([0, 1, 0, 1, 0], "skip"),
    "a bare vector of booleans, kept": (list(FLAGS), "keep"),
    "a bare vector of booleans, skipped": ([not flag for flag in FLAGS], "skip"),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_shape_from_the_wild_is_read(name, tmp_path):
    data, mask_format = ACCEPTED[name]
    (tmp_path / "thin.json").write_text(json.dumps(data))
    mask = read_mask(tmp_path / "thin.json", num_layers=5, mask_format=mask_format)
    assert mask.keep_attention == mask.keep_mlp == FLAGS
    assert mask.name == "thin"


def test_sublayers_are_skipped_one_by_one():
    mask = parse_mask({"keep_attention": [True, False, True], "keep_mlp": [True, True, False]})
    assert mask.sublayers == (True, True, False, True, True, False)
    assert mask.skip_ratio == pytest.approx(1 / 3)
    assert not mask.keeps_all


def test_states_say_what_a_tier_does_with_each_sublayer():
    mask = parse_mask({"attention": ["keep", "bridge", "int8"], "mlp": ["int4", "bridge", "skip"], "head": "int8"})
    assert mask.states == ("keep", "int4", "bridge", "bridge", "int8", "skip")
    assert mask.head == "int8"
    assert mask.sublayers == (True, True, False, False, True, False)
    assert mask.keep_attention == (True, False, True)
    assert mask.skip_ratio == pytest.approx(1 / 2)
    assert hash(mask) == hash(Mask.from_states(mask.states, head="int8"))


def test_flags_are_states_of_keep_and_skip():
    mask = parse_mask(WITH_FLAGS)
    assert mask.attention == mask.mlp == ("keep", "skip", "keep", "skip", "keep")
    assert mask.head == "keep"


def test_neighbours_in_state_bridge_are_one_run():
    states = ["keep", "bridge", "bridge", "skip", "bridge", "int8", "bridge", "bridge"]
    assert Mask.from_states(states).bridges == (range(1, 3), range(4, 5), range(6, 8))
    assert Mask.from_layers(FLAGS).bridges == ()


def test_a_precision_is_given_to_what_is_kept_and_to_nothing_else():
    mask = Mask(("keep", "skip", "int4"), ("bridge", "keep", "int8"))
    assert mask.in_precision("int8") == Mask(("int8", "skip", "int4"), ("bridge", "int8", "int8"), "int8")
    assert Mask(mask.attention, mask.mlp, "int4").in_precision("int8").head == "int4"


def test_only_a_mask_that_keeps_everything_keeps_all():
    assert Mask.from_layers([True, True]).keeps_all
    assert not Mask.from_layers([True, True], head="int8").keeps_all
    assert not Mask.from_states(["keep", "int8"]).keeps_all


def test_zero_and_one_alone_are_layers_unless_there_is_one_per_layer():
    assert parse_mask([0, 1], num_layers=5, mask_format="skip").keep_mlp == (False, False, True, True, True)
    assert parse_mask([0, 1], num_layers=2, mask_format="skip").keep_mlp == (True, False)


REFUSED: dict[str, tuple[Any, str | None, str]] = {
    "a bare array that does not say what it lists": ([0, 2, 4], None, "--mask-format keep|skip"),
    "a bare vector that does not say what it flags": ([1, 0, 1, 0, 1], None, "--mask-format keep|skip"),
    "a layer that does not exist": ({"skip_layers": [1, 5]}, None, r"layers \[5\] do not exist: .* layers 0 to 4"),
    "a layer counted from the end": ({"skip_layers": [-1]}, None, r"layers \[-1\] do not exist"),
    "layers by name": ({"skip_layers": ["model.layers.1"]}, None, "listed by index"),
    "layers as fractions": ({"skip_layers": [1.0, 3.0]}, None, "listed by index"),
    "booleans mixed with layers": ({"skip_layers": [True, 3]}, None, "listed by index"),
    "a layer list that is no array": ({"skip_layers": "1,3"}, None, '"skip_layers" holds str, wanted an array'),
    "nothing kept: no layer listed": ({"keep_layers": []}, None, "keeps nothing"),
    "nothing kept: every layer skipped": ({"skip_layers": [0, 1, 2, 3, 4]}, None, "keeps nothing"),
    "nothing kept: all false": ({"keep_mask": [False] * 5}, None, "keeps nothing"),
    "nothing kept, in our format": ({**OURS, "attention": ["skip"], "mlp": ["bridge"]}, None, "keeps nothing"),
    "nothing kept, by flags": ({**WITH_FLAGS, "keep_attention": [False], "keep_mlp": [False]}, None, "keeps nothing"),
    "an empty keep mask": ({"keep_mask": []}, None, "keeps nothing"),
    "a keep mask of layer indices": ({"keep_mask": [0, 2, 4]}, None, "true/false or 1/0 per layer"),
    "numbers where flags belong": (
        {**WITH_FLAGS, "keep_mlp": [1, 0, 1, 0, 1]},
        None,
        '"keep_mlp" must be an array of true',
    ),
    "flags for attention alone": ({"keep_attention": list(FLAGS)}, None, '"keep_mlp" must be an array of true'),
    "no flags at all": ({"format": "via-sd-mask", "version": 1}, None, '"keep_attention" must be an array'),
    "empty flags": ({**WITH_FLAGS, "keep_attention": []}, None, '"keep_attention" must be an array'),
    "sublayer flags of two lengths": ({**WITH_FLAGS, "keep_mlp": [True]}, None, "5 states of attention and 1 of MLPs"),
    "states for attention alone": ({"attention": STATES}, None, '"mlp" must be an array of keep, skip, bridge, int8'),
    "no states at all": ({"format": "via-sd-mask"}, None, '"attention" must be an array of keep'),
    "flags where states belong": ({**OURS, "mlp": list(FLAGS)}, None, '"mlp" must be an array of keep'),
    "states where flags belong": ({**OURS, "version": 1}, None, '"keep_attention" must be an array of true'),
    "a state that does not exist": ({**OURS, "mlp": [*STATES[:4], "int2"]}, None, "mlp holds 'int2'; its states are"),
    "a head that is skipped": ({**OURS, "head": "skip"}, None, "head holds 'skip'; its states are keep, int8, int4"),
    "a head that is a list": ({**OURS, "head": ["int8"]}, None, "head holds"),
    "sublayer states of two lengths": ({**OURS, "mlp": ["keep"]}, None, "5 states of attention and 1 of MLPs"),
    "another version": ({**OURS, "version": 3}, None, "version is 3, this release reads versions 1 and 2"),
    "another format": ({**OURS, "format": "someone-elses"}, None, "format is 'someone-elses'"),
    "a model that is no object": ({**OURS, "model": "llama"}, None, '"model" must be an object'),
    "a model without its size": (
        {**OURS, "model": {"model_type": "llama"}},
        None,
        "num_layers is null, wanted a whole number",
    ),
    "a model with layers below one": ({**OURS, "model": {**MODEL.to_json(), "num_layers": 0}}, None, "num_layers is 0"),
    "a model whose size is a text": ({**OURS, "model": {**MODEL.to_json(), "hidden_size": "64"}}, None, 'is "64"'),
    "a version that is a flag": ({**OURS, "version": True}, None, "version is True"),
    "notes that are no object": ({**OURS, "search": [1]}, None, '"search" must be an object'),
    "an object without a mask": ({"layers": [1, 3]}, None, r"no mask found in keys \['layers'\]"),
    "an empty object": ({}, None, "no mask found"),
    "a number": (3, None, "found int, wanted an object or an array"),
    "nothing": (None, None, "found NoneType"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_shape_that_could_be_misread_is_refused(name, tmp_path):
    data, mask_format, match = REFUSED[name]
    file = tmp_path / "bad.json"
    file.write_text(json.dumps(data))
    with pytest.raises(MaskError, match=match) as caught:
        read_mask(file, num_layers=5, mask_format=mask_format)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "keep: [1]", '{"keep_mask": [true,]}', "\x80"])
def test_a_file_that_is_not_json_is_refused(text, tmp_path):
    (tmp_path / "bad.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(MaskError, match="is not JSON"):
        read_mask(tmp_path / "bad.json", num_layers=5)


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(MaskError, match=r"cannot read mask .*: No such file"):
        read_mask(tmp_path / "missing.json")
    with pytest.raises(MaskError, match=r"cannot read mask .*: Is a directory"):
        read_mask(tmp_path)


def test_layer_indices_need_the_models_length():
    with pytest.raises(MaskError, match="does not say how many layers the model has"):
        parse_mask({"skip_layers": [1, 3]})


def test_a_mask_for_another_model_is_refused_with_what_differs():
    mask = Mask.from_layers(FLAGS, model=MODEL)
    mask.check_model(MODEL)
    other = ModelIdentity("llama", 5, 64, 320, "deadbeef")
    with pytest.raises(MaskError, match="fingerprint is 'c0ffee', wanted 'deadbeef'") as caught:
        mask.check_model(other)
    assert "hidden_size" not in str(caught.value)  # that is the same
    longer = ModelIdentity("llama", 6, 64, 320, "c0ffee")
    with pytest.raises(MaskError, match=r"is for 5 layers, the model \(llama\) has 6"):
        mask.check_model(longer)


def test_a_mask_that_names_no_model_fits_any_of_its_length():
    Mask.from_layers(FLAGS).check_model(MODEL)
    with pytest.raises(MaskError, match="is for 4 layers"):
        Mask.from_layers(FLAGS[:4]).check_model(MODEL)


@pytest.mark.parametrize(
    ("inner", "within"),
    [
        ((True, False, True), True),
        ((True, False, False), True),
        ((False, False, False), True),
        ((True, True, True), False),
        ((False, True, False), False),
    ],
)
def test_a_mask_is_within_another_if_that_one_writes_all_the_kv_it_reads(inner, within):
    """MLPs do not matter: they leave nothing in the buffers."""
    outer = Mask.from_flags((True, False, True), (False, True, False))
    assert Mask.from_flags(inner, (True, True, True)).is_within(outer) is within


def test_attention_writes_kv_in_any_precision_and_under_no_bridge():
    outer = Mask(("int8", "bridge", "int4"), ("skip", "bridge", "skip"))
    assert Mask(("keep", "skip", "int8"), ("keep", "keep", "keep")).is_within(outer)
    assert not Mask(("keep", "int4", "int8"), ("keep", "keep", "keep")).is_within(outer)


def test_writing_is_atomic_and_makes_the_folder(tmp_path):
    target = tmp_path / "new" / "folder" / "mask.json"
    write_mask(Mask.from_layers(FLAGS), target)
    write_mask(Mask.from_layers((True, True)), target)  # replaces
    assert read_mask(target).num_layers == 2
    assert [p.name for p in target.parent.iterdir()] == ["mask.json"]


# -- schema and reader agree -----------------------------------------------------------------------------------------

_identities = st.builds(
    ModelIdentity,
    model_type=st.text(max_size=8),
    num_layers=st.integers(1, 200),
    hidden_size=st.integers(1, 9999),
    vocab_size=st.integers(1, 999_999),
    fingerprint=st.text("0123456789abcdef", max_size=32),
)
_json = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=5), lambda s: st.lists(s, max_size=3))


def _states(layers: int) -> st.SearchStrategy[tuple[SublayerState, ...]]:
    return st.lists(st.sampled_from(SUBLAYER_STATES), min_size=layers, max_size=layers).map(tuple)


def _runs(states: list[str]) -> bool:
    return bool({*states} - {"skip", "bridge"})


@st.composite
def _masks(draw: st.DrawFn) -> Mask:
    layers = draw(st.integers(1, 12))
    attention, mlp = draw(st.tuples(_states(layers), _states(layers)).filter(lambda both: _runs([*both[0], *both[1]])))
    search = draw(st.dictionaries(st.text(max_size=5), _json, max_size=3))
    model = draw(st.none() | _identities)
    return Mask(attention, mlp, draw(st.sampled_from(HEAD_STATES)), model=model, search=search)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return Path(tmp_path_factory.mktemp("masks"))


@given(mask=_masks())
@settings(derandomize=True, deadline=None)
def test_what_is_written_follows_the_schema_and_is_read_back_the_same(mask, folder):
    file = folder / f"{mask.name}.json"
    write_mask(mask, file)
    assert follows(SCHEMA, json.loads(file.read_text(encoding="utf-8")))
    again = read_mask(file)
    assert again == mask
    assert dict(again.search) == dict(mask.search)


@given(mask=_masks(), seed=st.integers(0, 2**32), flags=st.booleans())
@settings(derandomize=True, deadline=None, max_examples=500)
def test_the_reader_takes_what_the_schema_takes_and_nothing_else(mask, seed, flags):
    """One entry of a good file, of either version, is dropped or given a value of another kind.

    A schema cannot say that there are as many states for attention as for MLPs, nor that one of them runs.
    """
    rng = random.Random(seed)
    data = mask.to_json()
    if flags:
        for key in ("attention", "mlp", "head"):
            del data[key]
        data |= {"version": 1, "keep_attention": list(mask.keep_attention), "keep_mlp": list(mask.keep_mlp)}
    place = data["model"] if "model" in data and rng.random() < 0.5 else data
    key = rng.choice(sorted(place))
    if rng.random() < 0.4:
        del place[key]
    else:
        wrong = [None, "text", -1, 1.5, [], {}, [True, 1], [True, None], True, ["keep", "int2"], ["keep", None], "skip"]
        place[key] = rng.choice(wrong)
    good = follows(SCHEMA, data)
    parts = [data[key] for key in ("keep_attention", "keep_mlp") if key in data] or [
        [state not in ("skip", "bridge") for state in data[key]] for key in ("attention", "mlp") if good
    ]
    if good and len(parts[0]) == len(parts[1]) and any(parts[0] + parts[1]):
        parse_mask(data)
    else:
        with pytest.raises(MaskError):
            parse_mask(data)


def follows(schema: dict[str, Any], data: Any) -> bool:
    """Whether `data` is valid against the keywords of JSON Schema that the mask file's schema uses."""
    known = {"$schema", "title", "type", "required", "properties", "const", "items", "minItems", "minimum"}
    assert set(schema) <= known | {"anyOf", "enum"}
    if "anyOf" in schema and not any(follows(one, data) for one in schema["anyOf"]):
        return False
    if "enum" in schema and data not in schema["enum"]:
        return False
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_is(kind, data) for kind in kinds):
        return False
    if "const" in schema and (data != schema["const"] or isinstance(data, bool)):
        return False
    if isinstance(data, dict):
        if not set(schema.get("required", [])) <= set(data):
            return False
        return all(follows(schema["properties"][k], v) for k, v in data.items() if k in schema.get("properties", {}))
    if isinstance(data, list):
        items = schema.get("items", {})
        return len(data) >= schema.get("minItems", 0) and all(follows(items, v) for v in data)
    return not ("minimum" in schema and data < schema["minimum"])


def _is(kind: str, data: Any) -> bool:
    if kind == "integer":
        return isinstance(data, int) and not isinstance(data, bool)
    kinds = {"object": dict, "array": list, "boolean": bool, "string": str, "null": type(None)}
    return isinstance(data, kinds[kind])


def test_the_schema_can_be_shipped_as_a_file(tmp_path: Path):
    text = json.dumps(SCHEMA)
    assert [one["properties"]["version"] for one in json.loads(text)["anyOf"]] == [{"const": 2}, {"const": 1}]
