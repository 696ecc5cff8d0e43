"""Drafters: who proposes the block that the verifiers judge.

To add one: implement `Drafter` (protocol.py) in a file here, construct it in `new_drafter` (factory.py), and name its
kind where `export` writes the manifest's `drafter`. `ngram.py` is the shortest example.
"""

from via_sd.runtime.decoding.drafters.protocol import Draft, Drafter

__all__ = ["Draft", "Drafter"]
