"""What an export refuses, each with a message that a user can act on."""


class ExportError(Exception):
    """An export that cannot be done as asked."""


class UnsupportedModelError(ExportError):
    """A model whose structure or semantics this toolkit cannot represent."""
