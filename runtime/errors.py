"""What the runtime refuses, each with a message that says what was found, what was wanted and what to do."""


class ViaSdError(Exception):
    """Base of every failure a caller is expected to handle."""


class BundleError(ViaSdError):
    """A bundle that is missing, damaged, of another version, or lacks what was asked of it."""


class RequestError(ViaSdError):
    """A request that cannot be served as it was made: prompt, mode or parameters."""


class BusyError(ViaSdError):
    """Every KV slot is taken and none came free in time."""
