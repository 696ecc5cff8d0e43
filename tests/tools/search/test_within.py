"""The search within a cost on ONNX Runtime: states as a bundle runs them, what they cost, and the command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import Result

from tests.support.command_line import invoke
from via_sd.errors import SearchError
from via_sd.export import export_bundle
from via_sd.masks import Mask, StepCosts, SublayerState, read_mask, write_mask
from via_sd.runtime import Pipeline
from via_sd.tools.search import recorded_costs
from via_sd.tools.search.evaluator import SearchModel, load_search_model
from via_sd.tools.search.masked_text import MaskedText
from via_sd.tools.search.text import ScoringText
from via_sd.tools.search.timing import measure_step_costs, step_times

for module in ("optuna", "matplotlib"):
    pytest.importorskip(module, reason="needs the search extra")

TOKENS = tuple(range(5, 75))
STATES: tuple[SublayerState, ...] = (
    "keep", "int8", "skip", "skip", "int4", "int4", "int8", "keep", "int4", "skip", "keep", "int8",
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Path) -> SearchModel:
    return load_search_model(tiny_checkpoint, precisions=["int8", "int4"], threads=2)


def scores(model: SearchModel, mask: Mask) -> np.ndarray:
    """Log-probability of each token of the text but the first, under `mask`."""
    masked = MaskedText(model.session, [ScoringText(TOKENS)], cache_bytes=1 << 22)
    logits = np.concatenate([block.copy() for block in masked.logits(mask)]).astype(np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    log_probs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return np.array([log_probs[i, token] for i, token in enumerate(TOKENS[1:])])


@pytest.mark.parametrize("head", ["keep", "int8", "int4"])
def test_a_mask_of_states_is_scored_as_the_tier_of_a_bundle_with_it(
    head: Any, model: SearchModel, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    mask = Mask.from_states(STATES, head=head)
    export_bundle(tiny_checkpoint, tmp_path / "bundle", masks=[mask])
    pipeline = Pipeline.load(tmp_path / "bundle", threads=1)
    for tier, of_tier in (("slim", mask), ("full", Mask.from_layers([True] * 6))):
        wanted = pipeline.score(TOKENS, tier=tier).logprobs
        np.testing.assert_allclose(scores(model, of_tier), wanted, atol=2e-4)
    assert np.abs(scores(model, mask) - pipeline.score(TOKENS).logprobs).max() > 1e-2


def test_shared_streams_do_not_mix_states(model: SearchModel) -> None:
    session = model.session
    sharing = MaskedText(session, [ScoringText(TOKENS)], cache_bytes=1 << 22)
    alone = MaskedText(session, [ScoringText(TOKENS)], cache_bytes=0)
    random = np.random.default_rng(3)
    for _ in range(12):
        mask = Mask.from_states(random.choice(["keep", "skip", "int8", "int4"], 12).tolist(), head="int8")
        for found, wanted in zip(sharing.logits(mask), alone.logits(mask), strict=True):
            assert np.array_equal(found, wanted)
    assert sharing.sublayers_run < alone.sublayers_run


def test_states_cost_shares_of_a_step_that_add_up_to_it(model: SearchModel) -> None:
    costs = measure_step_costs(model)
    assert costs.of(Mask.from_layers([True] * 6)) == pytest.approx(1)
    assert costs.attention.keys() == costs.mlp.keys() == {"keep", "int8", "int4", "skip"}
    assert costs.head.keys() == {"keep", "int8", "int4"}
    assert (costs.attention["skip"], costs.mlp["skip"], costs.head["keep"]) == (0, 0, 0)
    assert 0 < costs.rest < 1


def test_a_graph_without_a_state_names_it_and_what_it_was_built_with(tiny_bundle: Path) -> None:
    plain = load_search_model(tiny_bundle, threads=1)
    with pytest.raises(SearchError, match="state int8, and the search graph of this model was built with keep, skip"):
        step_times(plain, Mask.from_layers([True] * 6).in_precision("int8"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("within") / "text.txt"
    file.write_text("the thing in the ring, of a other thing\n" * 4, encoding="utf-8")
    return file


#: A tiny model's step is hardly shorter in fewer bits, so the tests do not go by what is measured here.
COSTS = StepCosts(
    {"keep": 0.04, "int8": 0.02, "int4": 0.015, "skip": 0},
    {"keep": 0.1, "int8": 0.05, "int4": 0.04, "skip": 0},
    {"keep": 0, "int8": -0.02, "int4": -0.03},
    0.16,
)


@pytest.fixture(scope="module")
def costs_of(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mask that a search within a cost found elsewhere."""
    file = tmp_path_factory.mktemp("elsewhere") / "elsewhere.json"
    write_mask(Mask.from_layers([True] * 6, search={"step_costs": COSTS.to_json()}), file)
    return file


def arguments(verifier: Path, text: Path, *more: object) -> list[object]:
    return ["search", verifier, "--text", text, "--window", 60, "--iterations", 40, "--max-lag", 8, *more]


@pytest.fixture(scope="module")
def found(tiny_checkpoint: Path, text: Path, costs_of: Path) -> tuple[Path, Result]:
    """The mask that a search within two costs wrote for the larger, and what it printed."""
    given = arguments(tiny_checkpoint, text, "--costs-of", costs_of)
    result = invoke(*given, "--out", text.with_name("slim.json"), "--cost", "0.5,0.8")
    assert result.exit_code == 0, result.stderr
    return text.with_name("slim-0.8.json"), result


def test_the_command_finds_a_mask_within_each_cost_and_says_what_it_costs(found: tuple[Path, Result]) -> None:
    file, result = found
    mask = read_mask(file)
    assert mask.search["cost_limit"] == 0.8
    assert COSTS.of(mask) <= 0.8
    assert COSTS.of(read_mask(file.with_name("slim-0.5.json"))) <= 0.5
    assert mask.search["objective"] == "kl"
    assert mask.search["states"] == ["keep", "skip", "int8", "int4"]
    assert "step asked for" in result.stdout
    ends = (".json", ".png", ".search.jsonl")
    made = {path.name for path in file.parent.iterdir()} - {"text.txt"}
    assert made == {"slim-front.png", *(f"slim-{cost}{end}" for cost in ("0.5", "0.8") for end in ends)}


def test_the_mask_found_makes_a_bundle(found: tuple[Path, Result], tiny_checkpoint: Path, tmp_path: Path) -> None:
    mask = read_mask(found[0])
    export_bundle(tiny_checkpoint, tmp_path / "bundle", masks=[mask])
    pipeline = Pipeline.load(tmp_path / "bundle", threads=1)
    plain = pipeline.generate("abc abc", mode="plain", max_new_tokens=12).token_ids
    assert pipeline.generate("abc abc", mode="cascade", max_new_tokens=12).token_ids == plain


def test_a_killed_search_goes_on_with_the_costs_it_began_with(
    found: tuple[Path, Result], tiny_checkpoint: Path, text: Path, tmp_path: Path
) -> None:
    state = found[0].with_suffix(".search.jsonl").read_text(encoding="utf-8").splitlines()
    out, left = tmp_path / "slim.json", tmp_path / "slim.search.jsonl"
    left.write_text("\n".join(state[:25]) + "\n" + state[25][:20], encoding="utf-8")
    again = invoke(*arguments(tiny_checkpoint, text), "--out", out, "--cost", 0.8, "--resume")
    assert again.exit_code == 0, again.stderr
    assert left.read_text(encoding="utf-8").splitlines() == state
    assert read_mask(out).states == read_mask(found[0]).states
    assert recorded_costs(read_mask(out)) == COSTS


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--cost", 0.9, "--skip-ratio", 0.3), "wanted one of --skip-ratio and --cost, found both"),
        (("--cost", "half"), "--cost is 'half', wanted numbers between 0 and 1"),
        (("--cost", 0.9, "--states", "keep,int2"), "wanted some of keep, skip, int8, int4"),
        (("--cost", 0.001), "the cheapest costs"),
        (("--cost", 0.9, "--costs-of", "TEXT"), "is not JSON"),
    ],
)
def test_what_cannot_be_searched_is_one_message_and_leaves_nothing(
    options: tuple[object, ...], says: str, tiny_checkpoint: Path, text: Path, tmp_path: Path
) -> None:
    given = [text if option == "TEXT" else option for option in options]
    result = invoke(*arguments(tiny_checkpoint, text), "--out", tmp_path / "slim.json", *given)
    assert result.exit_code == 2
    assert says in " ".join(result.stderr.split())
    assert not list(tmp_path.iterdir())


def test_fewer_iterations_than_states_to_try_are_refused(
    tiny_checkpoint: Path, text: Path, costs_of: Path, tmp_path: Path
) -> None:
    given = arguments(tiny_checkpoint, text, "--costs-of", costs_of, "--iterations", 5)
    result = invoke(*given, "--out", tmp_path / "slim.json", "--cost", 0.8)
    assert result.exit_code == 2
    assert "iterations is 5, wanted" in " ".join(result.stderr.split())


def test_precisions_are_not_searched_from_weights_that_are_quantised(
    tiny_checkpoint: Path, text: Path, costs_of: Path, tmp_path: Path
) -> None:
    export_bundle(tiny_checkpoint, tmp_path / "bundle", precision="int8")
    given = arguments(tmp_path / "bundle", text, "--costs-of", costs_of, "--out", tmp_path / "slim.json", "--cost", 0.9)
    result = invoke(*given)
    assert result.exit_code == 2
    assert "searched from weights in fp32" in " ".join(result.stderr.split())
    skips = invoke(*given, "--states", "keep,skip")
    assert skips.exit_code == 0, skips.stderr
    assert COSTS.of(read_mask(tmp_path / "slim.json")) <= 0.9
