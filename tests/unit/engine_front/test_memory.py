"""Free memory, from files as the kernel writes them."""

import pytest

from eyas.engine.memory import free_memory

MEMINFO = "MemTotal:  8000 kB\nMemFree:  100 kB\nMemAvailable:   4000 kB\nHugePages_Total:  0\n"
STAT = "anon 5\nfile 900\ninactive_file 300\nactive_file 200\nslab_reclaimable 7\n"
STAT_V1 = "inactive_file 1\nactive_file 2\ntotal_inactive_file 300\ntotal_active_file 200\n"
NO_LIMIT_V1 = "9223372036854771712\n"


@pytest.fixture
def root(tmp_path):
    def write(files):
        for name, text in ({"proc/meminfo": MEMINFO} | files).items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write


def group(path, limit, usage, stat=STAT):
    folder = f"sys/fs/cgroup/{path}"
    return {
        f"{folder}/memory.max": f"{limit}\n",
        f"{folder}/memory.current": f"{usage}\n",
        f"{folder}/memory.stat": stat,
    }


def group_v1(path, limit, usage):
    folder = f"sys/fs/cgroup/memory/{path}"
    return {
        f"{folder}/memory.limit_in_bytes": f"{limit}\n",
        f"{folder}/memory.usage_in_bytes": f"{usage}\n",
        f"{folder}/memory.stat": STAT_V1,
    }


def test_without_control_groups(root):
    assert free_memory(root({})) == 4000 * 1024


def test_file_pages_of_a_group_count_as_free(root):
    files = {"proc/self/cgroup": "0::/jobs/one\n"} | group("jobs/one", 2000, 1500)
    assert free_memory(root(files)) == 2000 - 1500 + 300 + 200


def test_the_machine_may_have_less_than_the_group_allows(root):
    files = {"proc/self/cgroup": "0::/jobs\n"} | group("jobs", 10**9, 0)
    assert free_memory(root(files)) == 4000 * 1024


def test_a_group_without_limit_within_one_with_a_limit(root):
    files = {"proc/self/cgroup": "0::/jobs/one\n"}
    files |= group("jobs/one", "max", 1500) | group("jobs", 3000, 2600)
    assert free_memory(root(files)) == 3000 - 2600 + 500


def test_in_a_container_the_group_is_mounted_at_the_root(root):
    files = {"proc/self/cgroup": "0::/host/names/that/are/not/here\n"} | group("", 5000, 4900)
    assert free_memory(root(files)) == 600


def test_a_group_over_its_limit_leaves_nothing(root):
    files = {"proc/self/cgroup": "0::/\n"} | group("", 1000, 9000)
    assert free_memory(root(files)) == 0


@pytest.mark.parametrize("controllers", ["memory", "cpu,memory"])
def test_version_1(root, controllers):
    files = {"proc/self/cgroup": f"5:devices:/\n4:{controllers}:/jobs/one\n0::/\n"}
    files |= group_v1("jobs/one", 7000, 6000) | group_v1("", int(NO_LIMIT_V1), 10)
    assert free_memory(root(files)) == 7000 - 6000 + 500


def test_version_1_without_limits(root):
    files = {"proc/self/cgroup": "4:memory:/a\n"} | group_v1("a", int(NO_LIMIT_V1), 10)
    assert free_memory(root(files)) == 4000 * 1024


def test_a_system_without_proc(tmp_path):
    with pytest.raises(ValueError, match=r"no /proc/meminfo.*set kv_cache_memory"):
        free_memory(tmp_path)


def test_on_this_machine():
    assert free_memory() > 0
