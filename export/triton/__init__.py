"""From a bundle to a model repository that Triton Inference Server loads."""

from via_sd.errors import RepositoryError
from via_sd.export.triton.config import ServingOptions
from via_sd.export.triton.repository import write_repository
from via_sd.export.triton.tiers import write_tiers

__all__ = ["RepositoryError", "ServingOptions", "write_repository", "write_tiers"]
