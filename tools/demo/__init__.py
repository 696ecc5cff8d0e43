"""The demo's model, fetched from PyPI."""
