"""What measures this repository; not in the wheel. From the repository root: `python -m tools.benchmarks.NAME`."""
