"""The report of a bench, as a browser shows it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from via_sd.runtime import Pipeline
from via_sd.tools.bench import Prompt, Report, run_bench, settings_of, summarise
from via_sd.tools.bench.forecast import forecast_bench
from via_sd.tools.prediction import measure_costs

pytest.importorskip("onnxruntime")
pytest.importorskip("matplotlib", reason="needs the search extra")

PROMPTS = [Prompt("abc abc abc", "copy"), Prompt("the thing in <the> end", "chat & more")]
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
PLOTS = ("Speed over plain", "Where the tokens came from", "Acceptance by position", "Latency", "Memory", "Prediction",
         "Divergence")  # fmt: skip


@pytest.fixture(scope="module")
def page(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    pipeline = Pipeline.load(tiny_bundle, policy=False, threads=1, max_sequences=1)
    settings = settings_of(["speculative", "cascade"]) | {"routed": {"mode": "routed", "router": "paper"}}
    samples = run_bench(pipeline, PROMPTS, settings, max_new_tokens=8, repeats=1)
    costs = measure_costs(pipeline.bundle, pipeline.verifier, pipeline.drafter)
    predicted = forecast_bench(pipeline, PROMPTS, settings, samples, costs)
    figures = summarise(samples, PROMPTS)
    file = tmp_path_factory.mktemp("report") / "report.html"
    facts = {"bundle": "<b>tiny</b>", "machine": "here"}
    Report(samples, figures, ["routed"], costs.step_ms, {"weights": 1.5}, predicted, "2 prompts", facts).write(file)
    return file


def in_browser(page: Path, *options: str) -> str:
    """What a headless browser without a network prints."""
    if BROWSER is None:
        pytest.skip("needs Chromium or Chrome")
    profile = page.parent / "profile"
    done = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}",
         "--virtual-time-budget=500", "--host-resolver-rules=MAP * ~NOTFOUND", *options, page.as_uri()],
        capture_output=True, text=True, check=True, timeout=120, env=os.environ | {"HOME": str(page.parent)},
    )  # fmt: skip
    return done.stdout


def test_a_browser_shows_every_table_and_plot(page: Path) -> None:
    shown = in_browser(page, "--dump-dom")
    captions = re.findall(r"<figcaption>(.*?)</figcaption><svg", shown)
    assert len(captions) == shown.count("</svg>") == len(PLOTS)
    for wanted, caption in zip(PLOTS, captions, strict=True):
        assert caption.startswith(wanted)
    assert shown.count("<table>") == 2
    for mode in ("plain", "speculative", "cascade", "routed"):
        assert shown.count(f"<td>{mode}</td>") == 2


def test_names_are_text(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "&lt;b&gt;tiny&lt;/b&gt;" in text
    assert "<b>tiny" not in text
    assert "chat &amp; more" in text


def test_the_page_needs_no_other_file(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"""(?:src|href)\s*=\s*["']([^"']+)""", text)
    assert links  # those of the plots to their own glyphs
    assert all(link.startswith("#") for link in links)
    assert "url(http" not in text
    assert "<script" not in text


def test_a_browser_draws_it(page: Path, tmp_path: Path) -> None:
    picture = tmp_path / "report.png"
    in_browser(page, f"--screenshot={picture}", "--window-size=1300,2400")
    pixels = pytest.importorskip("PIL.Image").open(picture).convert("RGB")
    # Every tier's colour was painted, so the plots are there and not only their places.
    for colour in ((155, 193, 230), (74, 111, 165)):
        assert sum(count for count, found in pixels.getcolors(1 << 24) if found == colour) > 100
