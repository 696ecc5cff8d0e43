"""Calibration: passes are timed, modes are run, the fastest that may becomes what `auto` means; requests still win."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from via_sd.runtime import BundleError, GenerationConfig, Pipeline, load_bundle
from via_sd.runtime.policy import Policy, policy_file, read_policy, this_machine
from via_sd.tools.calibrate import candidates, measure_costs, winner_of
from via_sd.tools.main import app
from via_sd.tools.step_times import SIZES, step_times

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
         "--repeats", "1", "--threads", "1", "--json"],
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    return bundle, json.loads(done.stdout)


@pytest.fixture
def bundle(calibrated: tuple[Path, dict[str, Any]], tmp_path: Path) -> Path:
    """A copy, to change its policy."""
    return Path(shutil.copytree(calibrated[0], tmp_path / "bundle"))


def set_auto(bundle: Path, mode: str, **options: Any) -> None:
    """Make the policy of this machine choose `mode`."""
    file = policy_file(load_bundle(bundle), this_machine(*HERE))
    data = json.loads(file.read_text())
    data["auto"] = {"mode": mode, "options": options}
    file.write_text(json.dumps(data))


def test_the_policy_holds_what_was_measured_and_the_fastest_of_it(calibrated):
    bundle, facts = calibrated
    assert Path(facts["policy"]) == policy_file(load_bundle(bundle), this_machine(*HERE))
    assert json.loads(Path(facts["policy"]).read_text()) == {k: v for k, v in facts.items() if k != "policy"}
    measured = facts["measured"]
    assert set(measured["step_ms"]) == {"full", "slim", "deep"}
    assert all(list(map(int, times)) == list(SIZES) for times in measured["step_ms"].values())
    routed = [f"routed, alpha2 {alpha2}" for alpha2 in (0.3, 0.5, 0.7, 0.9)]
    assert list(measured["first_round"]) == ["plain", "speculative", "cascade", *routed]
    assert {"plain"} < set(measured["second_round"]) <= set(measured["first_round"])
    winner = winner_of(measured["second_round"], 1.0)
    assert facts["auto"]["mode"] == winner.split(",")[0]
    costs, full = facts["costs"], measured["step_ms"]["full"]
    assert costs["full"] == {size: ms / full["1"] for size, ms in full.items()}
    assert costs["draft"] == measured["step_ms"]["deep"]["1"] / full["1"]


def test_a_pipeline_takes_the_policy_of_its_machine_and_no_other_s(bundle):
    set_auto(bundle, "cascade")
    policy = read_policy(load_bundle(bundle), this_machine(*HERE))
    found = Pipeline.load(bundle, threads=1)
    assert found.policy == policy
    assert found.step_cost.measured == policy.full_cost
    assert found.slim_cost == policy.slim_cost
    assert found.generate("x", **REQUEST).stats["mode"] == "cascade"
    for other in ({"threads": 2}, {"threads": 1, "use_policy": False}):
        pipeline = Pipeline.load(bundle, **other)
        assert pipeline.policy is None
        assert pipeline.generate("x", **REQUEST).stats["mode"] == "speculative"


def test_what_a_request_says_wins_over_the_policy(bundle):
    set_auto(bundle, "routed", alpha2=0.9, max_divergence=0.5)
    pipeline = Pipeline.load(bundle, threads=1)
    assert pipeline.generate("x", mode="plain", **REQUEST).stats["mode"] == "plain"
    assert pipeline.generate("x", **REQUEST).stats["mode"] == "routed"
    open_, said = (pipeline.resolve(GenerationConfig(**o)) for o in ({}, {"alpha2": 0.3, "alpha1": 0.1}))
    assert (open_.alpha2, open_.max_divergence, open_.gates().alpha1) == (0.9, 0.5, 0.5)
    assert (said.alpha2, said.max_divergence, said.alpha1) == (0.3, 0.5, 0.1)
    explicit = pipeline.resolve(GenerationConfig(mode="routed"))
    assert (explicit.gates().alpha2, explicit.max_divergence) == (0.3, None), "options go with auto, not with a mode"


def test_the_policy_s_mode_gives_the_text_that_mode_gives(bundle):
    plain = Pipeline.load(bundle, threads=1, use_policy=False).generate("abc abc", mode="plain", **REQUEST)
    for mode in ("speculative", "cascade"):
        set_auto(bundle, mode)
        assert Pipeline.load(bundle, threads=1).generate("abc abc", **REQUEST).token_ids == plain.token_ids


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:-20], "cannot read"),
        (lambda text: text.replace('"via-sd-policy"', '"via-sd-police"'), "is no via-sd-policy version 1"),
        (lambda text: text.replace('"version": 1', '"version": 2'), "is no via-sd-policy version 1"),
        (lambda text: text.replace('"bundle": "', '"bundle": "0'), "was measured with other files"),
        (lambda text: text.replace('"auto": {\n  "mode": "', '"auto": {\n  "mode": "warp'), "chooses mode 'warp"),
    ],
    ids=["cut", "format", "version", "files", "mode"],
)
def test_a_policy_that_cannot_be_relied_on_is_named_with_the_command(change, message, bundle):
    file = policy_file(load_bundle(bundle), this_machine(*HERE))
    changed = change(file.read_text())
    assert changed != file.read_text()
    file.write_text(changed)
    with pytest.raises(BundleError, match=rf"{message}.*via-sd-export calibrate"):
        Pipeline.load(bundle, threads=1)
    assert Pipeline.load(bundle, threads=1, use_policy=False).policy is None


def test_without_a_slim_verifier_or_a_limit_there_is_less_to_try(tiny_bundle_mask_drafter, tiny_bundle_model_drafter):
    pipeline = Pipeline.load(tiny_bundle_model_drafter, threads=1)
    assert list(candidates(pipeline, None)) == ["plain", "speculative", "cascade"]
    pipeline.bundle.manifest["slim"] = None
    assert list(candidates(pipeline, 0.1)) == ["plain", "speculative"]
    costs = measure_costs(pipeline)
    assert costs.slim is None
    assert costs.draft == costs.step_ms["drafter"][1] / costs.step_ms["full"][1]


def figures(speed: float, divergence: float | None = None) -> dict[str, Any]:
    return {"all": {"tokens_per_s": {"median": speed}, "divergence": divergence}}


@pytest.mark.parametrize(
    ("measured", "limit", "wanted"),
    [
        ({"plain": 100, "speculative": 90, "cascade": 80}, None, "plain"),
        ({"plain": 100, "speculative": 101.9}, None, "plain"),
        ({"plain": 100, "speculative": 150, "cascade": 152}, None, "speculative"),
        ({"plain": 100, "speculative": 150, "cascade": 160}, None, "cascade"),
        ({"plain": 100, "speculative": 150, "routed": (200, 0.05)}, 0.04, "speculative"),
        ({"plain": 100, "speculative": 150, "routed": (200, 0.05)}, 0.05, "routed"),
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
    """Blocks get other lengths where passes cost otherwise; an exact mode's text stays."""
    pipeline = Pipeline.load(tiny_bundle_mask_drafter, threads=1)
    request = {**REQUEST, "max_new_tokens": 40}
    plain = pipeline.generate("abc abc abc", mode="plain", **request)
    drafted = set()
    for slope in (0.0, 1.0):
        pipeline.use(Policy("speculative", {}, {size: 1 + slope * (size - 1) for size in SIZES}, 0.5, 0.1))
        found = pipeline.generate("abc abc abc", **request)
        assert found.token_ids == plain.token_ids
        drafted.add(found.stats["drafted_tokens"])
    assert len(drafted) == 2
