"""What a user runs over bundles: the command line, and search, calibration, bench and validation for Python."""
