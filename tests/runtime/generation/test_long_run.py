"""Many mixed requests over one pipeline: every text right, and no memory, descriptor or KV slot lost on the way."""

from __future__ import annotations

import gc
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

from via_sd.contract.generation_options import for_mode
from via_sd.runtime import Pipeline

MODES = ("plain", "speculative", "cascade", "routed")
REQUESTS, THREADS, KINDS = 3000, 4, 48


def request(number: int) -> dict[str, Any]:
    """Request `number` of a load in which every mode, sampling and length occurs; there are `KINDS` of them."""
    kind = number % KINDS
    given = {
        "prompt": f"the thing {'abc ' * (kind % 5)}in the ring {kind % 7}",
        "mode": MODES[kind % 4],
        "temperature": 0.8 if kind % 3 == 1 else 0.0,
        "seed": kind,
        "max_new_tokens": 6 + kind % 19,
        "ignore_eos": True,
        "raw": True,
    }
    return for_mode(given)


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_long_mixed_load_loses_nothing(tiny_bundle: Path) -> None:
    pipeline = Pipeline.load(tiny_bundle, threads=1, max_sequences=THREADS, deterministic=True, policy=False)
    wanted = [pipeline.generate(**request(kind)).token_ids for kind in range(KINDS)]

    def work(number: int) -> bool:
        """Whether the request gave what it gives alone; a third are cancelled on the way."""
        if number % 3 == 0:
            with closing(pipeline.stream(**request(number))) as stream:
                for _, _chunk in zip(range(number % 5), stream, strict=False):
                    pass
            return True
        return pipeline.generate(**request(number)).token_ids == wanted[number % KINDS]

    with ThreadPoolExecutor(THREADS) as pool:
        right = list(pool.map(work, range(REQUESTS // 3)))
        gc.collect()
        memory, files = resident_bytes(), descriptors()
        right += list(pool.map(work, range(REQUESTS // 3, REQUESTS)))
    gc.collect()
    assert right.count(False) == 0
    assert resident_bytes() - memory < 16 << 20
    assert descriptors() == files
    streams = [pipeline.stream("abc", raw=True, max_new_tokens=8, mode="plain") for _ in range(THREADS)]
    for stream in streams:  # as many as there are slots: all of them came back
        next(stream)
        stream.close()
