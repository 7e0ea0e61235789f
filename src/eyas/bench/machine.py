"""Facts about machine and software for a benchmark's JSON, and the machine's limits."""

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_INSTRUCTION_SETS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")
_PACKAGES = ("eyas", "torch", "transformers", "numpy")


def facts(threads: int) -> dict[str, Any]:
    """Date, commit, machine and versions, as plain values."""
    cpu_info = _read("/proc/cpuinfo")
    flags = _field(cpu_info, "flags").split()
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": _commit(),
        "machine": {
            "cpu": _field(cpu_info, "model name") or platform.processor() or platform.machine(),
            "cores": available_cores(),
            "instruction_sets": [name for name in _INSTRUCTION_SETS if name in flags],
            "memory_gib": round(_total_memory() / 2**30, 1),
            "system": f"{platform.system()} {platform.machine()}",
        },
        "threads": threads,
        "versions": {"python": platform.python_version()} | {p: _version(p) for p in _PACKAGES},
    }


def available_cores() -> int:
    """How many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def peak_memory() -> int:
    """This process's highest resident memory in bytes, file pages it has mapped included.

    VmHWM where there is one: ru_maxrss survives exec, so that a child would report its parent's.
    """
    if peak := _field(_read("/proc/self/status"), "VmHWM"):
        return int(peak.split()[0]) * 1024
    import resource

    peak_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak_rss if platform.system() == "Darwin" else peak_rss * 1024


def measure_limits(threads: int) -> dict[str, float]:
    """What the machine can do at best with the instruction set that Eyas uses: reading 512 MiB that
    no cache holds, and multiply-adds in registers, of int8 and of float32. Each is the best of
    several."""
    from eyas import _core
    from eyas.ops.native import NativeOps

    context = NativeOps(num_threads=threads).context
    read, int8, floats = _core.measure_peaks(context, 512 << 20, 8)
    return {"read_bytes_per_s": read, "int8_mac_per_s": int8, "float_mac_per_s": floats}


def last_level_cache() -> int:
    """Bytes of the greatest cache that a core can use; a large guess where Linux doesn't say."""
    sizes = [
        int(_read(str(path)).strip().removesuffix("K")) * 1024
        for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    ]
    return max(sizes, default=64 << 20)


def _commit() -> str:
    """The source's commit, "-changed" where files differ from it; "unknown" outside a clone."""
    root = Path(__file__).parent

    def git(*args: str) -> str:
        command = ["git", "-C", str(root), *args]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", ":/src")
        return git("rev-parse", "HEAD")[:12] + ("-changed" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _total_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _field(text: str, name: str) -> str:
    """The value of the first ``name: value`` line, or nothing."""
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon and key.strip() == name:
            return value.strip()
    return ""
