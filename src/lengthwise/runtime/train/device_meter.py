"""Seconds and peak bytes of what is computed on this device."""

import time

import torch


class DeviceMeter:
    """Measures time and peak memory between :meth:`start` and :meth:`stop`; both wait for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start_s, self._before = 0.0, 0

    def start(self) -> "DeviceMeter":
        """Begin to measure, after the device has finished its work."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
        self._start_s = time.perf_counter()
        return self

    def stop(self) -> tuple[float, int]:
        """Seconds since the start, and the most bytes above those at the start; 0 on a CPU, which does not count."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            peak = torch.cuda.max_memory_allocated(self._device) - self._before
        else:
            peak = 0
        return time.perf_counter() - self._start_s, peak
