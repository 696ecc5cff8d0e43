"""Continuous batching: sequences join and leave between forward passes, and share them."""
