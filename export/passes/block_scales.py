"""Block scales for 4 bits that keep what the matrix product computes, not what the weights look like."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

_LOW, _HIGH, _ZERO = -8, 7, 8
#: Where the largest weight of a block is tried on the grid (the quantiser's own place is -8): clipped, the other sign.
_PLACES = (-7.3, -9.0, -10.0, 7.0, 7.6, 8.4)
_ROWS = 1024


def refine_int4(
    matrix: np.ndarray, packed: np.ndarray, scales: np.ndarray, energy: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Lower the error of a symmetric int4 quantisation where the inputs of the product are large.

    For each block several scales are tried, each fitted by least squares, and the one with the least
    `sum_k energy[k] * (w[k] - scale * q[k])**2` stays: the expected squared error of the product for inputs with
    uncorrelated channels. The quantisation given is one of those compared, so no block gets worse.

    Args:
        matrix: float32 [K, N].
        packed: uint8 [N, K / block, block / 2], two values to a byte, zero point 8.
        scales: float32 [N, K / block].
        energy: float32 [K], mean square of each input channel.

    Returns:
        (packed, scales), of the same shapes.
    """
    columns, blocks, half = packed.shape
    padding = blocks * 2 * half - len(matrix)  # of the last block, with zeros that no input meets
    weight = np.pad(energy, (0, padding)).reshape(1, blocks, 2 * half).astype(np.float32)
    weight = weight + 1e-6 * max(float(weight.mean()), 1e-30)  # a channel that was silent still counts a little
    best, chosen = np.empty_like(packed), np.empty_like(scales)

    def refine(start: int) -> None:
        rows = slice(start, start + _ROWS)
        exact = np.pad(matrix[:, rows].T, ((0, 0), (0, padding))).reshape(-1, blocks, 2 * half)
        levels, scale = _unpack(packed[rows]), scales[rows, :, None]
        error = _error(exact, levels, scale, weight)
        peak = np.take_along_axis(exact, np.abs(exact).argmax(-1)[..., None], -1)
        for place in _PLACES:
            trial = _nearest(exact, _fit(exact, _nearest(exact, peak / place), weight, peak / place))
            fitted = _fit(exact, trial, weight, peak / place)
            found = _error(exact, trial, fitted, weight)
            better = found < error
            error = np.where(better, found, error)
            levels = np.where(better, trial, levels)
            scale = np.where(better, fitted, scale)
        codes = (levels + _ZERO).astype(np.uint8)
        best[rows] = codes[..., 0::2] | (codes[..., 1::2] << 4)
        chosen[rows] = scale[..., 0]

    with ThreadPoolExecutor() as pool:
        list(pool.map(refine, range(0, columns, _ROWS)))
    return best, chosen


def _unpack(packed: np.ndarray) -> np.ndarray:
    levels = np.empty((*packed.shape[:2], 2 * packed.shape[2]), np.float32)
    levels[..., 0::2], levels[..., 1::2] = packed & 15, packed >> 4
    return levels - _ZERO


def _nearest(exact: np.ndarray, scale: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore", invalid="ignore"):
        levels = np.where(scale == 0, 0, np.rint(exact / scale))
    result: np.ndarray = np.clip(levels, _LOW, _HIGH).astype(np.float32)
    return result


def _fit(exact: np.ndarray, levels: np.ndarray, weight: np.ndarray, otherwise: np.ndarray) -> np.ndarray:
    """Scale [..., 1] of least weighted square error for these levels; `otherwise` where all levels are zero."""
    weighted = levels * weight
    power = (weighted * levels).sum(-1, keepdims=True)
    dot = (weighted * exact).sum(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        result: np.ndarray = np.where(power > 0, dot / power, otherwise)
    return result


def _error(exact: np.ndarray, levels: np.ndarray, scale: np.ndarray, weight: np.ndarray) -> np.ndarray:
    result: np.ndarray = (weight * np.square(exact - levels * scale)).sum(-1, keepdims=True)
    return result
