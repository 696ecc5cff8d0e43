"""How well and how fast the mask search finds what it should: `python -m tools.benchmarks.search_bench`."""
