"""One core of this machine, timed so that neither other processes nor its own drift are in the figures.

What emulation and its calibration measure is processor time of this thread, against that of a matrix product which is
made before and after: a core that is slower for a while makes both slower.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch

_SIDE = 256
_FLOPS = 2.0 * _SIDE**3
_RECENT_S = 0.01
"""For which a product tells of the core's speed."""
_FIRST = 25
"""Products from which the core's usual speed is taken."""

now_s = time.thread_time


class Core:
    """The core that this process runs on; torch has to run on one thread."""

    def __init__(self) -> None:
        self._a, self._b = (torch.ones(_SIDE, _SIDE) for _ in range(2))
        self._out = torch.empty(_SIDE, _SIDE)
        for _ in range(3):
            self._product_s()
        self._usual_s = statistics.median(self._product_s() for _ in range(_FIRST))
        self._last_s, self._last_at = self._usual_s, now_s()

    @property
    def flops(self) -> float:
        """FLOP/s of matrix products in fp32."""
        return _FLOPS / self._usual_s

    def _product_s(self) -> float:
        begin = now_s()
        torch.mm(self._a, self._b, out=self._out)
        return now_s() - begin

    def usual(self, call: Callable[[], Sequence[float]]) -> tuple[float, ...]:
        """The seconds that `call` gives, as they were if the core ran at its usual speed."""
        before = self._last_s if now_s() - self._last_at < _RECENT_S else self._product_s()
        found = call()
        self._last_s = self._product_s()
        self._last_at = now_s()
        factor = 2 * self._usual_s / (before + self._last_s)
        return tuple(part * factor for part in found)
