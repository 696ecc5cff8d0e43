"""The report of a bench: one page that holds its tables and plots, and says what was measured and where."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from via_sd.files import write_whole
from via_sd.tools.bench import plots
from via_sd.tools.bench.run import Sample
from via_sd.tools.bench.tables import Figures, comparison, prediction

_TEMPLATE = "report.html.j2"


@dataclass(frozen=True)
class Report:
    """What a page shows.

    Attributes:
        samples, figures: of the bench, see `run_bench` and `summarise`.
        approximate: settings that are not exact.
        step_ms: tier -> tokens of a pass -> milliseconds.
        megabytes: name -> what it takes of memory.
        predicted: see `summarise_forecasts`; None where nothing was predicted.
        measured: what was run, in a sentence.
        facts: the circumstances: name -> value.
    """

    samples: Sequence[Sample]
    figures: Figures
    approximate: Collection[str]
    step_ms: Mapping[str, Mapping[int, float]]
    megabytes: Mapping[str, float]
    predicted: Figures | None
    measured: str
    facts: Mapping[str, object]

    def write(self, path: Path) -> None:
        """Write the page, which needs no other file; it appears complete or not at all."""
        tables, drawn = [comparison(self.figures, self.approximate)], self._plots()
        if self.predicted is not None:
            tables.append(prediction(self.predicted, self.figures))
        template = files("via_sd.tools.bench").joinpath(_TEMPLATE).read_text(encoding="utf-8")
        page = Environment(autoescape=True, undefined=StrictUndefined).from_string(template)
        write_whole(
            path,
            page.render(
                title="Decoding modes",
                measured=self.measured,
                tables=tables,
                plots=[{"title": title, "svg": svg} for title, svg in drawn],
                facts=self.facts,
            ),
        )

    def _plots(self) -> list[tuple[str, str]]:
        drawn = [
            ("Speed over plain decoding, by kind of prompt", plots.speed(self.figures)),
            ("Where the tokens came from", plots.tier_shares(self.figures)),
            ("Acceptance by position in a block", plots.acceptance_by_position(self.samples)),
            ("Latency of a forward pass", plots.pass_latency(self.step_ms)),
            ("Memory", plots.memory(self.megabytes)),
        ]
        if self.predicted is not None:
            drawn.append(("Prediction against measurement", plots.prediction(self.predicted, self.figures)))
        audited = [name for name in self.approximate if self.figures[name]["all"]["divergence"] is not None]
        if audited:
            drawn.append(("Divergence from the full verifier", plots.divergence(self.figures, audited)))
        return drawn
