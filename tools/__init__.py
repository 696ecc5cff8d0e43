"""The command line, benchmarks and the demo; imports everything, imported by nothing."""
