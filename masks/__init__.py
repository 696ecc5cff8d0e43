"""What to skip: mask files. Imports nothing else of ours."""

from via_sd.masks.maskfile import (
    SCHEMA,
    Mask,
    MaskError,
    MaskFormat,
    ModelIdentity,
    parse_mask,
    read_mask,
    write_mask,
)

__all__ = [
    "SCHEMA",
    "Mask",
    "MaskError",
    "MaskFormat",
    "ModelIdentity",
    "parse_mask",
    "read_mask",
    "write_mask",
]
