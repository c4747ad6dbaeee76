"""What is known of the devices: their peak, and the memory that was used.

Peaks are those of the makers' data sheets, dense bf16 with fp32 accumulation, for one JAX device.
A device that is not listed has none: its MFU is null and never a guess.
"""

import os
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax

_TERA = 1e12
_PEAKS = {
    "TPU v4": 275,
    "TPU v5 lite": 197,
    "TPU v5e": 197,
    "TPU v5": 459,
    "TPU v5p": 459,
    "TPU v6 lite": 918,
    "TPU v6e": 918,
    "NVIDIA A100-PCIE-40GB": 312,
    "NVIDIA A100-SXM4-40GB": 312,
    "NVIDIA A100 80GB PCIe": 312,
    "NVIDIA A100-SXM4-80GB": 312,
    "NVIDIA L4": 121,
    "NVIDIA L40S": 362,
    "NVIDIA H100 PCIe": 756,
    "NVIDIA H100 NVL": 835,
    "NVIDIA H100 80GB HBM3": 989,
    "NVIDIA H200": 989,
    "NVIDIA GH200 480GB": 989,
}


def peak_flops(device_kind: str) -> float | None:
    """Peak FLOP/s of one device (`jax.Device.device_kind`); None when it is not known."""
    peak = _PEAKS.get(device_kind)
    return None if peak is None else peak * _TERA


def mfu(flops_per_second: float, devices: "Sequence[jax.Device]") -> float | None:
    """Model FLOPs utilisation (arXiv 2204.02311, appendix B): useful FLOP/s over the peak of all.

    Args:
      flops_per_second: model FLOPs of an update, recomputation not counted, over its time.
      devices: all devices of the mesh.

    Returns:
      A fraction, or None when the peak of a device is not known.
    """
    peaks = [peak_flops(device.device_kind) for device in devices]
    known = [peak for peak in peaks if peak is not None]
    return flops_per_second / sum(known) if known and len(known) == len(peaks) else None


def memory_limit(devices: "Sequence[jax.Device]") -> int | None:
    """Bytes that each of these devices has for arrays, the least of them; None where the backend
    does not say. Devices of a CPU have an equal part of the machine's memory each."""
    if all(device.platform == "cpu" for device in devices):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // len(devices)
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in devices]
    return min((limit for limit in limits if limit is not None), default=None)


def peak_memory(devices: "Sequence[jax.Device]") -> dict[str, int | None]:
    """Largest memory so far, in bytes: `host`, resident, of this process; `device`, the most of any
    of these devices, None where the backend does not count (CPU)."""
    used = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in devices]
    known = [peak for peak in used if peak is not None]
    return {"host": _peak_resident(), "device": max(known, default=None)}


def _peak_resident() -> int:
    try:
        # ru_maxrss of a process can be that of the one that started it.
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
