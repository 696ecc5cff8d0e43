"""What a model repository refuses."""

from via_sd.export.errors import ExportError


class RepositoryError(ExportError):
    """The repository cannot be written as asked; the message says what to change."""
