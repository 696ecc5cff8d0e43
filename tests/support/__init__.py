"""What tests share: tiny models, stand-ins, servers and clients."""

from pathlib import Path

#: The repository.
ROOT = Path(__file__).parents[2]
