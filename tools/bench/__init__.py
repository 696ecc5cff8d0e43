"""Measure modes against each other on the user's machine and prompts."""
