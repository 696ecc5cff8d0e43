"""The failures a caller is expected to handle. Each message says what was found, what was wanted and what to do."""


class ViaSdError(Exception):
    """Base of every expected failure."""


class MaskError(ViaSdError):
    """A mask file that cannot be read, or a mask that does not fit its model."""


class BundleError(ViaSdError):
    """A bundle that is missing, damaged, of another version, or lacks what was asked of it."""


class ExportError(ViaSdError):
    """An export that cannot be done as asked."""


class UnsupportedModelError(ExportError):
    """A model whose structure or semantics this toolkit cannot represent."""


class RepositoryError(ExportError):
    """A Triton model repository that cannot be written as asked."""


class RequestError(ViaSdError):
    """A request that cannot be served as it was made: prompt, mode or parameters."""


class LogitsError(ViaSdError):
    """Logits with NaN or Inf: no token can be chosen by them, and the sequence ends; its KV buffers are thrown away."""


class BusyError(ViaSdError):
    """Every KV slot is taken and none became free in time."""


class PromptFileError(ViaSdError):
    """A file of prompts that cannot be read, or that holds no prompts."""


class SearchError(ViaSdError):
    """A mask search that cannot be run as asked: verifier, scoring text, objective or drafter."""


class ValidationError(ViaSdError):
    """A comparison with transformers that cannot be made as asked."""


class DiskSpaceError(ViaSdError):
    """A disk that has too little room for what is to be written."""


class DownloadError(ViaSdError):
    """A model that cannot be fetched, or is not the one that was wanted."""


class MissingPackageError(ViaSdError):
    """A package that an extra brings is not installed."""
