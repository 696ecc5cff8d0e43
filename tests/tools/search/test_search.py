"""The search on ONNX Runtime: what masks cost, and the command."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import Result

from tests.support.command_line import invoke
from tools.benchmarks.planted import plant
from tools.benchmarks.search_bench.cache import EvaluationCache, OutOfTimeError
from via_sd.masks import DistributionEvaluator, Evaluation, Mask, forward_kl, read_mask, via_cost
from via_sd.tools.search.evaluator import SearchModel, load_search_model, open_evaluator
from via_sd.tools.search.front import drafter_distributions
from via_sd.tools.search.graph import build
from via_sd.tools.search.masked_text import MaskedText
from via_sd.tools.search.text import ScoringText

for module in ("optuna", "matplotlib"):
    pytest.importorskip(module, reason="needs the search extra")

TEXTS = (ScoringText(tuple(range(5, 75)), start=9), ScoringText(tuple(range(90, 40, -1))))
#: Copies behind layers of the six-layer checkpoint, and where they end up among the nine.
COPIES = [0, 2, 0, 1, 0, 0]
PLANTED = [2, 3, 6]


def skipped(mask: Mask) -> list[int]:
    assert mask.keep_attention == mask.keep_mlp
    return [layer for layer, keep in enumerate(mask.keep_mlp) if not keep]


def png(path: Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG")


# -- costs -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tiny_bundle: Path) -> SearchModel:
    return load_search_model(tiny_bundle, threads=2)


def evaluator(model: SearchModel, cache_bytes: int = 1 << 24) -> DistributionEvaluator:
    return DistributionEvaluator(MaskedText(model.session, TEXTS, cache_bytes=cache_bytes), via_cost, {}, threads=2)


def random_masks(count: int) -> Iterator[Mask]:
    random = np.random.default_rng(4)
    for _ in range(count):
        keep = random.random((2, 6)) < 0.7
        keep[:, 0] = True
        yield Mask.from_flags(tuple(keep[0].tolist()), tuple(keep[1].tolist()))


@pytest.fixture
def logits_by_transformers(tiny_checkpoint: Path) -> Any:
    """Mask -> logits of the scored positions, by a model from which the sublayers are taken out."""
    import torch
    from transformers import AutoModelForCausalLM

    full = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)

    def run(mask: Mask) -> np.ndarray:
        slim = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32)
        for layer, (attention, mlp) in enumerate(zip(mask.keep_attention, mask.keep_mlp, strict=True)):
            block = slim.model.layers[layer]
            for keep, projection in ((attention, block.self_attn.o_proj), (mlp, block.mlp.down_proj)):
                if not keep:
                    torch.nn.init.zeros_(projection.weight)
        rows = []
        with torch.no_grad():
            for text in TEXTS:
                tokens = torch.tensor([text.tokens])
                if not text.start:
                    rows.append(slim(tokens).logits[0])
                    continue
                # The prompt is read by the full model, whose KV the slim one goes on with.
                past = full(tokens[:, : text.start], use_cache=True).past_key_values
                rows.append(slim(tokens[:, text.start :], past_key_values=past).logits[0])
        return torch.cat(rows).numpy()

    return run


def test_a_mask_costs_what_the_model_without_its_sublayers_is_off(
    model: SearchModel, logits_by_transformers: Any
) -> None:
    def log_softmax(logits: np.ndarray) -> np.ndarray:
        wide = logits.astype(np.float64)
        shifted = wide - wide.max(-1, keepdims=True)
        result: np.ndarray = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
        return result

    measured = evaluator(model)
    full = log_softmax(logits_by_transformers(Mask.from_layers([True] * 6)))
    assert measured.model.num_positions == len(full) == 61 + 50
    for mask in random_masks(4):
        slim = log_softmax(logits_by_transformers(mask))
        costs, agreement = measured.score(mask, [via_cost, forward_kl])
        np.testing.assert_allclose(costs, [via_cost(full, slim).mean(), forward_kl(full, slim).mean()], rtol=2e-3)
        assert agreement == pytest.approx((slim.argmax(-1) == full.argmax(-1)).mean(), abs=0.01)


def test_the_full_model_costs_nothing(model: SearchModel) -> None:
    evaluation = evaluator(model).evaluate(Mask.from_layers([True] * 6))
    assert (evaluation.cost, evaluation.agreement) == (0.0, 1.0)


def test_what_candidates_share_is_computed_once_and_changes_no_cost(model: SearchModel) -> None:
    sharing, alone = evaluator(model), evaluator(model, cache_bytes=0)
    masks = [*random_masks(12), Mask.from_layers([True] * 5 + [False])]
    assert [sharing.evaluate(mask) for mask in masks * 2] == [alone.evaluate(mask) for mask in masks * 2]
    assert isinstance(sharing.model, MaskedText)
    assert isinstance(alone.model, MaskedText)
    assert sharing.model.sublayers_run < alone.model.sublayers_run < alone.model.sublayers_asked


def test_slim_is_nearer_to_full_when_it_reads_fulls_kv(model: SearchModel) -> None:
    own = evaluator(model)
    assert isinstance(own.model, MaskedText)
    everything = Mask.from_layers([True] * 6)
    mask = Mask.from_layers([True, True, False, True, True, True])

    def lagging(max_lag: int) -> DistributionEvaluator:
        assert isinstance(own.model, MaskedText)
        return DistributionEvaluator(own.model.lagging(max_lag), via_cost, {}, threads=2, full=own.full)

    assert lagging(5).evaluate(everything).cost < 1e-4
    assert lagging(1).evaluate(mask).cost < own.evaluate(mask).cost
    assert lagging(1000).evaluate(mask).cost == pytest.approx(own.evaluate(mask).cost, rel=1e-6)


def test_the_ngram_drafters_proposals_stand_at_the_positions_after_which_it_makes_them(model: SearchModel) -> None:
    text = ScoringText((7, 8, 9, 7, 8, 9, 7), start=2)
    found = open_evaluator(model, [text], objective="via", alpha=0.5, beta=0.3, threads=2)
    distributions = drafter_distributions("ngram", model, found, [text], 2)
    assert len(distributions) == text.scored == 5
    # After 7 8 9 nothing is known; after the second 7 comes 8, and so on.
    rows = distributions.log_probs(0, 5)
    assert [(row == 0).nonzero()[0].tolist() for row in rows[1:]] == [[8], [9], [7], [8]]
    assert np.isneginf(rows[0]).sum() >= rows.shape[1] - 1


def test_evaluations_on_disk_are_not_made_again_and_what_a_kill_left_of_one_is_cut_off(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("via_sd.tools.search.evaluator.build_apart", build)  # the command's own tests start the process
    first, second = random_masks(2)
    costs = EvaluationCache(tiny_checkpoint, tmp_path, ["abc abc"], 40, threads=2).entry(first)
    assert costs.costs.keys() == {"via", "via-flipped", "kl"}
    (file,) = tmp_path.glob("*-evaluations.jsonl")
    with file.open("a", encoding="utf-8") as stream:
        stream.write('{"keep": "3')
    later = EvaluationCache(tiny_checkpoint, tmp_path, ["abc abc"], 40, deadline=0)
    assert later.entry(first) == costs
    assert later.under("kl").evaluate(first) == Evaluation(costs.costs["kl"], costs.agreement)
    with pytest.raises(OutOfTimeError):
        later.entry(second)


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("search") / "prompts.jsonl"
    lines = [{"prompt": text} for text in ("abc abc abc", "the other thing", "xyz", "in the ring")]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Path, prompts: Path) -> tuple[Path, Result]:
    """Directory and output of a search of a planted checkpoint at two skip ratios."""
    directory = tmp_path_factory.mktemp("front")
    plant(tiny_checkpoint, directory / "planted", COPIES, epsilon=0.02)
    result = invoke("search", directory / "planted", "--out", directory / "slim.json", "--prompts", prompts,
                    "--skip-ratio", "0.12,0.34", "--iterations", 40, "--window", 80, "--max-lag", 16)  # fmt: skip
    return directory, result


def test_the_command_finds_the_planted_layers_and_says_what_each_mask_buys(front: tuple[Path, Result]) -> None:
    directory, result = front
    assert result.exit_code == 0, result.stderr
    assert skipped(read_mask(directory / "slim-0.34.json")) == PLANTED
    assert set(skipped(read_mask(directory / "slim-0.12.json"))) < set(PLANTED)
    for heading in ("skip ratio", "cost", "KL", "same top-1", "at lag 16", "step time/full", "Delta (ngram)"):
        assert heading in result.stdout
    rows = [line for line in result.stdout.splitlines() if "0.12" in line or "0.34" in line]
    assert len(rows) == 2
    assert all("%" in row for row in rows)


def test_masks_come_with_plots_and_the_front_with_one_of_its_own(front: tuple[Path, Result]) -> None:
    directory, _ = front
    assert all(png(directory / name) for name in ("slim-0.12.png", "slim-0.34.png", "slim-front.png"))
    assert sorted(path.name for path in directory.iterdir() if path.name != "planted") == [
        *(f"slim-0.12{end}" for end in (".json", ".png", ".search.jsonl")),
        *(f"slim-0.34{end}" for end in (".json", ".png", ".search.jsonl")),
        "slim-front.png",
    ]


def test_the_mask_file_says_how_the_mask_was_found(front: tuple[Path, Result]) -> None:
    directory, _ = front
    mask = read_mask(directory / "slim-0.34.json")
    found = mask.search
    assert mask.model is not None
    assert mask.model.num_layers == 9
    assert found["text"] == {"from": "greedy answers", "window": 80}
    assert found["tokens"] == 80
    assert len(found["tokens_sha256"]) == 64
    assert (found["seed"], found["objective"], found["alpha"], found["beta"]) == (0, "via", 0.5, 0.3)
    assert found["evaluations"] <= found["iterations"] == 40
    assert 0 <= found["cost"] < 0.1
    assert 0.9 < found["agreement"] <= 1
    assert found["regime"]["kv"] == "own"
    assert found["regime"]["max_lag"] == 16
    assert found["regime"]["cost_at_max_lag"] <= found["cost"] + 1e-3
    assert found["step_ms"]["slim"] < found["step_ms"]["full"]
    assert found["versions"].keys() == {"via-sd-export", "numpy", "onnxruntime", "optuna"}
    delta = found["delta"]
    assert 0 < delta["positions"] < 80  # those at which the drafter proposes something
    terms = (delta[name] for name in ("drafter_to_full", "drafter_to_slim", "slim_to_full"))
    assert delta["value"] == pytest.approx(next(terms) - sum(terms))
    assert delta["pays"] == (delta["value"] > 0)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_bundle: Path, prompts: Path) -> tuple[list[object], Path]:
    """Arguments of a search of a bundle by sublayers on a text file, and the mask it wrote."""
    directory = tmp_path_factory.mktemp("whole")
    text = directory / "text.txt"
    text.write_text("the thing in the ring, of a other thing\n" * 4, encoding="utf-8")
    arguments: list[object] = ["search", tiny_bundle, "--text", text, "--window", 60, "--skip-ratio", 0.3,
                               "--granularity", "sublayer", "--iterations", 40, "--json"]  # fmt: skip
    result = invoke(*arguments, "--out", directory / "slim.json")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.count("\n") == 1
    (found,) = json.loads(result.stdout)["masks"]
    mask = read_mask(directory / "slim.json")
    assert found == {"path": str(directory / "slim.json"), **mask.search}
    return arguments, directory / "slim.json"


def lasting(mask: Mask) -> Mask:
    """The mask without the times that were measured."""
    return replace(mask, search={key: value for key, value in mask.search.items() if key != "step_ms"})


def test_a_bundle_is_searched_by_sublayers_on_a_text_file(whole: tuple[list[object], Path], tiny_bundle: Path) -> None:
    mask = read_mask(whole[1])
    assert mask.sublayers.count(False) == 4
    assert all(mask.sublayers[:2] + mask.sublayers[-2:])
    assert mask.search["text"] == {"from": "file", "window": 60}
    manifest = json.loads((tiny_bundle / "bundle.json").read_text(encoding="utf-8"))
    assert mask.model is not None
    assert mask.model.to_json() == manifest["model"]


def test_a_bundle_whose_weights_have_another_name_is_refused_in_our_words(tiny_bundle: Path, tmp_path: Path) -> None:
    bundle = shutil.copytree(tiny_bundle, tmp_path / "bundle")
    os.link(bundle / "verifier/weights.data", tmp_path / "another-name")
    text = tmp_path / "text.txt"
    text.write_text("words")
    done = invoke("search", bundle, "--out", tmp_path / "found.json", "--text", text)
    assert done.exit_code == 2
    assert "another name links to the same file" in " ".join(done.stderr.split())


def test_a_mask_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    there = tmp_path / "there.json"
    there.write_text("a mask")
    text = tmp_path / "text.txt"
    text.write_text("words")
    done = invoke("search", "model", "--out", there, "--text", text)
    assert done.exit_code == 2
    assert "there.json exists; choose another --out, or delete it" in " ".join(done.stderr.split())
    assert there.read_text() == "a mask"


def test_a_killed_search_goes_on_with_resume_and_not_without(whole: tuple[list[object], Path], tmp_path: Path) -> None:
    arguments, file = whole
    state = file.with_suffix(".search.jsonl").read_text(encoding="utf-8").splitlines()
    out, left = tmp_path / "slim.json", tmp_path / "slim.search.jsonl"
    left.write_text("\n".join(state[:15]) + "\n" + state[15][:20], encoding="utf-8")
    refused = invoke(*arguments, "--out", out)
    assert refused.exit_code == 2
    assert "unfinished search (14 evaluations): continue with --resume" in refused.stderr
    assert invoke(*arguments, "--out", out, "--resume").exit_code == 0
    assert lasting(read_mask(out)) == lasting(read_mask(file))
    assert left.read_text(encoding="utf-8").splitlines() == state


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ((), "give either --prompts or --text"),
        (("--prompts", "PROMPTS", "--text", "PROMPTS"), "give either --prompts or --text"),
        (("--prompts", "nowhere.jsonl"), "cannot read prompts"),
        (("--prompts", "PROMPTS", "--skip-ratio", "half"), "wanted numbers between 0 and 1"),
        (("--prompts", "PROMPTS", "--skip-ratio", "0.2,0.2"), "names a number twice"),
        (("--prompts", "PROMPTS", "--theta", 0), "must be 1 or more"),
        (("--prompts", "PROMPTS", "--skip-ratio", "0.99"), "the first and the last layer are kept"),
    ],
)
def test_bad_input_is_one_message_and_leaves_nothing(
    options: tuple[object, ...], says: str, prompts: Path, tiny_bundle: Path, tmp_path: Path
) -> None:
    given = [prompts if option == "PROMPTS" else option for option in options]
    result = invoke("search", tiny_bundle, "--out", tmp_path / "slim.json", *given)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert " ".join(result.stderr.split()).startswith("error: ")
    assert says in " ".join(result.stderr.split())
    assert not list(tmp_path.iterdir())


def test_a_verifier_that_is_not_there_is_refused(prompts: Path, tmp_path: Path) -> None:
    result = invoke("search", tmp_path / "nothing", "--out", tmp_path / "slim.json", "--prompts", prompts)
    assert result.exit_code == 2
    assert "nothing" in result.stderr
    assert "Traceback" not in result.stderr
    assert not list(tmp_path.iterdir())
