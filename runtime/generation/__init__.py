"""The front door: a loaded pipeline, requests, streams, text and statistics."""
