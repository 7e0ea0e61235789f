"""How much memory this process may still take, by /proc and its control group."""

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_NO_LIMIT = 1 << 60  # version 1 writes "none" as a huge number


def free_memory(root: Path = Path("/")) -> int:
    """Bytes that can be taken without swapping or being killed.

    The least of the machine's available memory and, for the process's memory control group and
    each one around it (versions 1 and 2), limit - usage + file pages, which the kernel drops on
    demand. ``root`` is where proc and sys are. ValueError where there is no /proc/meminfo.
    """
    try:
        meminfo = (root / "proc/meminfo").read_text()
    except FileNotFoundError:
        raise ValueError(
            "this system has no /proc/meminfo to tell how much memory is free: set kv_cache_memory"
        ) from None
    available = _read_table(meminfo)["MemAvailable:"] * 1024
    return max(0, min([available, *_free_in_groups(root)]))


def _free_in_groups(root: Path) -> Iterator[int]:
    """What each control group that has a limit leaves."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base = root / "sys/fs/cgroup"
            names = ("memory.max", "memory.current", "inactive_file", "active_file")
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            names = (
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
                "total_active_file",
            )
        else:
            continue
        for folder in _with_parents(base, path):
            free = _free_in_group(folder, *names)
            if free is not None:
                yield free


def _with_parents(base: Path, path: str) -> list[Path]:
    """The group's folder and those around it. In a container, ``path`` may be the host's name of
    what is mounted at ``base``: folders that aren't there hold no limit file either."""
    inner = PurePosixPath(path.lstrip("/"))
    return [base / inner, *(base / parent for parent in inner.parents)]


def _free_in_group(
    folder: Path, limit_name: str, usage_name: str, inactive: str, active: str
) -> int | None:
    """None for a group without a limit."""
    try:
        limit_text = (folder / limit_name).read_text().strip()
        if limit_text == "max" or int(limit_text) >= _NO_LIMIT:
            return None
        usage = int((folder / usage_name).read_text())
        stat = _read_table((folder / "memory.stat").read_text())
    except FileNotFoundError:
        return None
    return int(limit_text) - usage + stat[inactive] + stat[active]


def _read_table(text: str) -> dict[str, int]:
    """Lines of a name and a number (and perhaps a unit)."""
    rows = (line.split() for line in text.splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2}
