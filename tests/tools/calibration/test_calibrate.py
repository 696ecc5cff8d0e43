"""Calibration: passes are timed, modes are run, the fastest that may becomes what `auto` means; requests still win."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from via_sd.runtime import BundleError, GenerationConfig, Pipeline, load_bundle
from via_sd.runtime.decoding.router import Gates, MarginGate
from via_sd.runtime.decoding.statistics import JudgedMargin
from via_sd.runtime.engines.backends import open_engines
from via_sd.runtime.generation.machine import this_machine
from via_sd.runtime.generation.policy import Policy
from via_sd.runtime.generation.policy_file import measured_files, policy_file, read_policy
from via_sd.tools.bench.run import Sample
from via_sd.tools.calibration import rounds
from via_sd.tools.calibration.rounds import candidates, winner_of
from via_sd.tools.commands.main import app
from via_sd.tools.prediction.latency import SIZES, Costs, measure_costs, step_times

pytest.importorskip("onnxruntime")

HERE = ("onnxruntime", 1)
REQUEST: dict[str, Any] = {"raw": True, "max_new_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def calibrated(tiny_bundle_mask_drafter: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A bundle after `calibrate`, and what that printed."""
    folder = tmp_path_factory.mktemp("calibrated")
    bundle = Path(shutil.copytree(tiny_bundle_mask_drafter, folder / "bundle"))
    prompts = folder / "prompts.jsonl"
    prompts.write_text('{"prompt": "abc abc abc", "bucket": "copy"}\n{"prompt": "the thing in the end"}\n')
    done = CliRunner().invoke(
        app,
        ["calibrate", str(bundle), "--prompts", str(prompts), "--max-divergence", "1", "--max-new-tokens", "8",
         "--repeats", "1", "--threads", "1", "--synthetic-acceptance", "0.9", "--synthetic-cost", "0.2", "--json"],
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    return bundle, json.loads(done.stdout)


@pytest.fixture
def bundle(calibrated: tuple[Path, dict[str, Any]], tmp_path: Path) -> Path:
    """A copy, to change its policy."""
    return Path(shutil.copytree(calibrated[0], tmp_path / "bundle"))


def set_auto(bundle: Path, mode: str, **options: Any) -> Path:
    """Make the policy of this machine choose `mode`; its file."""
    file = policy_file(load_bundle(bundle), this_machine(*HERE))
    data = json.loads(file.read_text())
    file.write_text(json.dumps({**data, "auto": {"mode": mode, **options}, "exact": "cascade"}))
    return file


def test_the_policy_holds_what_was_measured_and_the_fastest_of_it(calibrated):
    bundle, facts = calibrated
    assert Path(facts["policy"]) == policy_file(load_bundle(bundle), this_machine(*HERE))
    assert json.loads(Path(facts["policy"]).read_text()) == {k: v for k, v in facts.items() if k != "policy"}
    measured = facts["measured"]
    assert set(measured["step_ms"]) == {"full", "slim", "deep"}
    assert all(list(map(int, times)) == list(SIZES) for times in measured["step_ms"].values())
    routed = ["routed, paper", *(f"routed, alpha2 {alpha2}" for alpha2 in (0.3, 0.5, 0.7, 0.9))]
    assert list(measured["first_round"]) == ["plain", *routed]  # plain is in every bench
    exact = ["plain", "speculative", "cascade"]
    assert list(measured["second_round"])[:3] == exact
    assert measured["second_round"].keys() - exact <= {*routed, "routed, calibrated"}
    assert list(measured["second_round"])[-1] == "routed, calibrated"
    assert len(measured["second_round"]) == 5
    # What was run was predicted, and what was not run says so in its name.
    predicted = measured["predicted"]
    synthetic = {"speculative, synthetic drafter", "cascade, synthetic slim"}
    assert predicted.keys() == measured["second_round"].keys() | synthetic
    assert predicted["plain"]["all"]["over_plain"] == pytest.approx(1)
    assert set(predicted["cascade"]) == {"all", "copy", "default"}
    assert facts["router"]["max_divergence"] == 1.0
    assert facts["router"]["margins"]["1.0"] >= 0
    assert facts["auto"]["mode"] == winner_of(measured["second_round"], 1.0).split(",")[0]
    assert facts["exact"] in ("plain", "speculative", "cascade")
    costs, full = facts["costs"], measured["step_ms"]["full"]
    assert costs["full"] == {size: ms / full["1"] for size, ms in full.items()}
    assert costs["draft"] == measured["step_ms"]["deep"]["1"] / full["1"]


def test_a_pipeline_takes_the_policy_of_its_machine_and_no_other_s(bundle, recwarn):
    file = set_auto(bundle, "cascade")
    policy = read_policy(file, load_bundle(bundle), "onnxruntime")
    found = Pipeline.load(bundle, threads=1)
    assert found.policy == policy
    assert found.model.costs.full.measured == policy.full_cost
    assert found.model.costs.slim.measured == policy.slim_cost
    assert found.generate("x", **REQUEST).stats.mode == "cascade"
    for other in ({"threads": 2}, {"threads": 1, "policy": False}):
        pipeline = Pipeline.load(bundle, **other)
        assert pipeline.policy is None
        assert pipeline.generate("x", **REQUEST).stats.mode == "speculative"
    elsewhere = file.rename(bundle.parent / "policy.json")
    assert Pipeline.load(bundle, threads=2, policy=elsewhere).policy == policy
    assert not recwarn.list


def test_what_a_request_says_wins_over_the_policy(bundle):
    set_auto(bundle, "routed", alpha2=0.9, max_divergence=0.5)
    pipeline = Pipeline.load(bundle, threads=1)
    assert pipeline.generate("x", mode="plain", **REQUEST).stats.mode == "plain"
    assert pipeline.generate("x", **REQUEST).stats.mode == "routed"
    open_, said = (pipeline.resolve(GenerationConfig(**o)) for o in ({}, {"alpha2": 0.3, "alpha1": 0.1}))
    assert (open_.alpha2, open_.max_divergence, Gates.of(open_).alpha1) == (0.9, 0.5, 0.5)
    assert (said.alpha2, said.max_divergence, said.alpha1) == (0.3, 0.5, 0.1)
    explicit = pipeline.resolve(GenerationConfig(mode="routed"))
    assert (Gates.of(explicit).alpha2, explicit.max_divergence) == (0.3, None), "options go with auto, not with a mode"


def test_the_calibrated_router_goes_with_auto_until_a_request_has_thresholds(bundle):
    set_auto(bundle, "routed", router="calibrated", max_divergence=0.5)
    pipeline = Pipeline.load(bundle, threads=1)
    assert isinstance(pipeline.router(pipeline.resolve(GenerationConfig())), MarginGate)
    said = pipeline.resolve(GenerationConfig(alpha2=0.9))
    assert pipeline.router(said) == Gates(alpha2=0.9)
    set_auto(bundle, "routed", alpha2=0.9, max_divergence=0.5)
    asked = Pipeline.load(bundle, threads=1).resolve(GenerationConfig(router="calibrated"))
    assert (asked.router, asked.alpha2, asked.max_divergence) == ("calibrated", None, 0.5)
    assert pipeline.generate("x", **REQUEST).stats.mode == "routed"
    chosen = CliRunner().invoke(
        app,
        ["generate", str(bundle), "--prompt", "x", "--mode", "routed", "--router", "calibrated", "--raw", "--threads",
         "1", "--max-new-tokens", "5", "--json"],
    )  # fmt: skip
    assert json.loads(chosen.stdout)["stats"]["mode"] == "routed"
    refused = CliRunner().invoke(
        app, ["generate", str(bundle), "--prompt", "x", "--mode", "routed", "--router", "calibrated", "--threads", "2"]
    )
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "via-sd-export calibrate --max-divergence" in " ".join(refused.stderr.split())


@pytest.mark.parametrize(
    ("request_", "wanted"),
    [
        ({}, "routed"),
        ({"max_divergence": 0.5}, "routed"),
        ({"max_divergence": 0.9}, "routed"),
        ({"max_divergence": 0.4}, "cascade"),
        ({"max_divergence": 0.0}, "cascade"),
        ({"temperature": 0.7}, "cascade"),
        ({"repetition_penalty": 1.1}, "cascade"),
    ],
    ids=str,
)
def test_auto_is_approximate_only_as_far_as_it_was_measured_and_the_request_allows(request_, wanted, bundle):
    set_auto(bundle, "routed", alpha2=0.9, max_divergence=0.5)
    pipeline = Pipeline.load(bundle, threads=1)
    assert pipeline.generate("x", **REQUEST, **request_).stats.mode == wanted
    set_auto(bundle, "speculative")
    assert Pipeline.load(bundle, threads=1).generate("x", **REQUEST, **request_).stats.mode == "speculative"


def test_the_policy_s_mode_gives_the_text_that_mode_gives(bundle):
    plain = Pipeline.load(bundle, threads=1, policy=False).generate("abc abc", mode="plain", **REQUEST)
    for mode in ("speculative", "cascade"):
        set_auto(bundle, mode)
        assert Pipeline.load(bundle, threads=1).generate("abc abc", **REQUEST).token_ids == plain.token_ids


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: "{", "Expecting"),
        (lambda data: [], "damaged"),
        (lambda data: {**data, "format": "via-sd-police"}, "it is no via-sd-policy version 2"),
        (lambda data: {**data, "version": 1}, "it is no via-sd-policy version 2"),
        (lambda data: {**data, "files": "others"}, "it was measured with other files than the bundle has now"),
        (lambda data: {**data, "auto": {"mode": "warp"}}, "warp"),
        (lambda data: {**data, "auto": {}}, "damaged"),
        (lambda data: {**data, "exact": "routed"}, "routed"),
        (lambda data: {**data, "costs": None}, "costs is None, wanted an object"),
        (lambda data: {**data, "costs": {**data["costs"], "full": {"2": 1.0}}}, "costs"),
        (lambda data: {**data, "costs": {**data["costs"], "full": {"1": 1.0, "2": -1.0}}}, "costs"),
        (lambda data: {**data, "costs": {**data["costs"], "full": {"1": 1.0}}}, "costs"),
        (lambda data: {**data, "costs": {**data["costs"], "slim": "x"}}, "costs.slim is 'x', wanted an object"),
        (lambda data: {**data, "router": {"margins": {"0.1": 2}}}, "damaged"),
        (lambda data: {**data, "router": {"max_divergence": 7, "margins": {}}}, "a share outside 0 to 1"),
        (lambda data: {**data, "router": None, "auto": {"mode": "routed", "router": "calibrated"}}, "has no margins"),
        (lambda data: {**data, "router": {"max_divergence": 0.1, "margins": {"0.1": "wide"}}}, "wide"),
    ],
    ids=[
        "cut",
        "list",
        "format",
        "version",
        "files",
        "mode",
        "no mode",
        "exact",
        "no costs",
        "sizes",
        "cost",
        "one size",
        "slim",
        "router",
        "share",
        "no router",
        "margin",
    ],
)
def test_a_policy_that_cannot_be_relied_on_is_named_and_not_used(change, message, bundle):
    file = policy_file(load_bundle(bundle), this_machine(*HERE))
    changed = change(json.loads(file.read_text()))
    file.write_text(changed if isinstance(changed, str) else json.dumps(changed))
    with pytest.warns(UserWarning, match=rf"{file.name} .*{message}.*via-sd-export calibrate.*the defaults hold"):
        assert Pipeline.load(bundle, threads=1).policy is None
    with pytest.raises(BundleError, match=message):  # somebody asked for this very file
        Pipeline.load(bundle, threads=1, policy=file)


def test_engines_that_were_built_again_are_other_files(bundle):
    loaded = load_bundle(bundle)
    before = [measured_files(loaded, backend) for backend in ("onnxruntime", "tensorrt-rtx")]
    loaded.manifest["engines"] = {"tensorrt-rtx": {"manifest": "engines/tensorrt-rtx/engines.json", "sha256": "0"}}
    after = [measured_files(loaded, backend) for backend in ("onnxruntime", "tensorrt-rtx")]
    assert (before[0] == after[0], before[1] == after[1]) == (True, False)


def test_without_a_slim_verifier_or_a_limit_there_is_less_to_try(tiny_bundle_model_drafter):
    bundle = load_bundle(tiny_bundle_model_drafter)
    assert list(candidates(bundle, None)) == ["plain", "speculative", "cascade"]
    bundle.manifest["slim"] = None
    assert list(candidates(bundle, 0.1)) == ["plain", "speculative"]
    costs = measure_costs(bundle, *open_engines(bundle, threads=1))
    assert costs.slim is None
    assert costs.draft == costs.step_ms["drafter"][1] / costs.step_ms["full"][1]


def figures(speed: float, divergence: float | None = None, slim: float = 0.4) -> dict[str, Any]:
    return {"all": {"tokens_per_s": {"median": speed}, "divergence": divergence, "slim_calls_per_token": slim}}


@pytest.mark.parametrize(
    ("measured", "limit", "wanted"),
    [
        ({"plain": 100, "speculative": 90, "cascade": 80}, None, "plain"),
        ({"plain": 100, "speculative": 101.9}, None, "plain"),
        ({"plain": 100, "speculative": 150, "cascade": 152}, None, "speculative"),
        ({"plain": 100, "speculative": 101.9, "cascade": 103}, None, "plain"),
        ({"plain": 100, "routed": (200, 0.05), "speculative": 150}, 0.04, "speculative"),
        ({"plain": 100, "speculative": 150, "cascade": 160}, None, "cascade"),
        ({"plain": 100, "speculative": 150, "routed": (200, 0.05)}, 0.04, "speculative"),
        ({"plain": 100, "speculative": 150, "routed": (200, 0.05)}, 0.05, "routed"),
        ({"plain": 100, "speculative": 150, "cascade": (160, None, 0.04)}, 0.05, "speculative"),
        ({"plain": 100, "speculative": 150, "routed": (160, 0.0, 0.01)}, 0.05, "speculative"),
    ],
)
def test_the_winner_is_the_fastest_that_keeps_to_the_limit_and_beats_the_simpler_ones(measured, limit, wanted):
    table = {label: figures(*(x if isinstance(x, tuple) else (x,))) for label, x in measured.items()}
    assert winner_of(table, limit) == wanted


def test_passes_are_timed_for_every_tier_and_size_within_the_buffers(tiny_bundle_mask_drafter):
    engine = Pipeline.load(tiny_bundle_mask_drafter, threads=1).verifier
    times = step_times(engine, sizes=(1, 3), cached=10_000, repeats=2)
    assert {tier: list(of_tier) for tier, of_tier in times.items()} == {tier: [1, 3] for tier in engine.tiers}
    assert all(ms > 0 for of_tier in times.values() for ms in of_tier.values())


def test_costs_of_a_policy_change_no_greedy_text(tiny_bundle_mask_drafter):
    """Blocks get other lengths where forward passes take other times; an exact mode's text stays."""
    bundle = load_bundle(tiny_bundle_mask_drafter)
    verifier, drafter = open_engines(bundle, threads=1)
    request = {**REQUEST, "max_new_tokens": 40}
    plain = Pipeline.load(tiny_bundle_mask_drafter, threads=1).generate("abc abc abc", mode="plain", **request)
    drafted = set()
    for slope in (0.0, 1.0):
        full = {size: 1 + slope * (size - 1) for size in SIZES}
        policy = Policy(
            {"mode": "speculative"}, "speculative", full, {size: cost / 2 for size, cost in full.items()}, 0.1
        )
        pipeline = Pipeline(
            bundle, verifier, drafter, max_sequences=1, retained_slots=1, slot_timeout=None, policy=policy
        )
        found = pipeline.generate("abc abc abc", **request)
        assert found.token_ids == plain.token_ids
        drafted.add(found.stats.drafted_tokens)
    assert len(drafted) == 2


CALIBRATED = {"routed, calibrated": {"mode": "routed", "router": "calibrated", "max_divergence": 0.02}}
TRIED = {
    "plain": {"mode": "plain"},
    "speculative": {"mode": "speculative"},
    "cascade": {"mode": "cascade"},
    "routed": {"mode": "routed", "alpha2": 0.9, "max_divergence": 0.02},
}


@dataclass
class Runs:
    """Stands in for runs of a pipeline: what each round was asked, and the figures it is to give, one table a round."""

    tables: list[dict[str, dict[str, Any]]]
    margins: list[JudgedMargin] = field(default_factory=list)
    labels: list[list[str]] = field(default_factory=list)
    options: list[dict[str, Any]] = field(default_factory=list)
    policy: Policy | None = field(default_factory=lambda: Policy({"mode": "plain"}, "plain", {1: 1.0, 2: 1.0}))

    def bench(self, pipeline: Any, prompts: Any, settings: dict[str, Any], **options: Any) -> list[Sample]:
        assert pipeline is self
        self.labels.append(list(settings))
        self.options.append(options)
        return [Sample(label, 0, 0, list(range(99)), {}, self.margins) for label in settings]

    def figures(self, samples: list[Sample], prompts: Any) -> dict[str, Any]:
        return {sample.setting: self.tables[len(self.labels) - 1][sample.setting] for sample in samples}


def rounds_of(runs: Runs, tried: dict[str, Any], monkeypatch: pytest.MonkeyPatch, **options: Any) -> rounds.Rounds:
    monkeypatch.setattr(rounds, "run_bench", runs.bench)
    monkeypatch.setattr(rounds, "summarise", runs.figures)
    return rounds.run_rounds(runs, [], tried, max_new_tokens=99, repeats=3, **options)  # type: ignore[arg-type]


def test_the_exact_modes_are_in_the_second_round_and_the_best_of_the_others(monkeypatch):
    """So there is one to fall back on where what is fast proves too far from the full verifier in the longer round."""
    speeds = {f"routed {i}": 200 + i for i in range(4)}
    tried = {**TRIED, **{label: {**TRIED["routed"], "alpha2": 0.1} for label in speeds}, **CALIBRATED}
    near = {"routed 1": 0.01, "routed 2": 0.01, "routed 3": 0.03}  # the fastest is too far already in the first round
    exact = {"plain": figures(100), "speculative": figures(150), "cascade": figures(100)}
    first = {**exact, "routed": figures(90, 0.0), **{x: figures(speeds[x], near.get(x, 0.0)) for x in speeds}}
    second = {**first, "routed 2": figures(300, 0.05), "routed, calibrated": figures(250, 0.03)}
    runs = Runs([first, second], margins=[JudgedMargin(i, float(i), True) for i in range(99)])
    found = rounds_of(runs, tried, monkeypatch, max_divergence=0.02)
    assert runs.labels == [
        ["routed", *speeds],
        ["plain", "speculative", "cascade", "routed 2", "routed, calibrated"],
    ]
    assert (runs.options[0]["keep_margins"], runs.options[0]["max_new_tokens"]) == (True, 48)
    assert (runs.options[1]["max_new_tokens"], runs.options[1]["repeats"]) == (99, 3)
    assert found.router is not None
    assert runs.policy.router == found.router
    assert found.router.gate(0.02).margin == 0.0
    assert found.router.gate(0.009).shut, "99 tokens, though five settings told of each"
    policy = rounds.policy_of(tried, found, 0.02, Costs({}, {1: 1.0, 2: 1.0}, {1: 0.5, 2: 0.5}, None))
    assert (policy.auto, policy.exact) == ({"mode": "speculative"}, "speculative")
    assert policy.router == found.router
    assert "cascade, the best with it, is 0.67x" in rounds.slim_verdict(tried, found.second, 0.02)


def test_a_router_that_could_let_nothing_through_is_not_run(monkeypatch):
    table = {label: figures(100, 0.0) for label in TRIED}
    runs = Runs([table, table], margins=[JudgedMargin(i, float(i), False) for i in range(99)])
    found = rounds_of(runs, {**TRIED, **CALIBRATED}, monkeypatch, max_divergence=0.02)
    assert runs.labels[1] == ["plain", "speculative", "cascade", "routed"]
    assert found.router is not None
    assert found.router.margins == {}


def test_without_anything_approximate_there_is_one_round(monkeypatch):
    runs = Runs([{"plain": figures(1), "speculative": figures(1), "cascade": figures(1)}])
    exact = {label: options for label, options in TRIED.items() if label != "routed"}
    found = rounds_of(runs, exact, monkeypatch, max_divergence=None)
    assert (found.first, found.router) == ({}, None)
    assert [(options["max_new_tokens"], options["repeats"]) for options in runs.options] == [(99, 3)]


def test_the_verdict_leaves_out_what_is_too_far_from_the_full_verifier():
    table = {"plain": figures(100), "speculative": figures(150), "cascade": figures(120), "routed": figures(200, 0.05)}
    assert "cascade, the best with it, is 0.80x of speculative" in rounds.slim_verdict(TRIED, table, 0.02)
    assert rounds.slim_verdict(TRIED, table, 0.05) == "The slim tier pays here."
    assert rounds.slim_verdict(TRIED, {"plain": figures(1), "speculative": figures(2)}, 0.05).endswith("verifier.")


def test_the_verdict_names_a_slim_tier_that_its_modes_leave_out():
    table = {"plain": figures(100), "speculative": figures(150), "cascade": figures(160, slim=0.01)}
    table |= {"routed": figures(100, 0.0)}
    assert rounds.slim_verdict(TRIED, table, 0.05).endswith("routed, the best with it, is 0.67x of speculative.")
    del table["routed"]
    assert rounds.slim_verdict(TRIED, table, None).endswith("does not pay here: the modes that have it leave it out.")


def test_a_place_that_could_not_be_written_is_refused_before_anything_is_measured(bundle, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "abc"}\n')
    done = CliRunner().invoke(
        app, ["calibrate", str(bundle), "--prompts", str(prompts), "--out", str(tmp_path / "no/policy.json")]
    )
    assert done.exit_code == 2
    assert "there is no directory" in " ".join(done.stderr.split())
    assert not (tmp_path / "no").exists()


def test_no_divergence_at_all_means_the_exact_modes(tiny_bundle_mask_drafter):
    assert list(candidates(load_bundle(tiny_bundle_mask_drafter), 0.0)) == ["plain", "speculative", "cascade"]
