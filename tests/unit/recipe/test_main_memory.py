"""The memory of a container is what its control groups leave, in both versions of Linux's control groups."""

from pathlib import Path

import psutil
import pytest

from recipe.training import main_memory as memory

MIB = 2**20
VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
VERSION_2 = ("memory.max", "memory.current", "")


@pytest.fixture
def own_groups(tmp_path, monkeypatch) -> Path:
    """The file that names the groups; groups are in the folder `groups` beside it."""
    monkeypatch.setattr(memory, "OWN_GROUPS", tmp_path / "own")
    monkeypatch.setattr(memory, "GROUPS", tmp_path / "groups")
    return tmp_path / "own"


def limit(group: Path, version: tuple[str, str, str], limit: int | str, used: int, cached: int) -> None:
    group.mkdir(parents=True, exist_ok=True)
    of_limit, of_use, prefix = version
    (group / of_limit).write_text(f"{limit}\n")
    (group / of_use).write_text(f"{used}\n")
    files = f"{prefix}active_file {cached // 2}\n{prefix}inactive_file {cached - cached // 2}\n"
    (group / "memory.stat").write_text(f"anon 5\n{files}")


def test_without_limits_it_is_that_of_the_machine(own_groups):
    machine = psutil.virtual_memory()
    for lines in (None, "0::/\n", "3:cpu:/\n2:memory:/away\n0::/\n"):
        if lines is not None:
            own_groups.write_text(lines)
        assert memory.main_memory().total == machine.total
    limit(memory.GROUPS, VERSION_2, "max", 5 * MIB, 0)
    limit(memory.GROUPS / "memory", VERSION_1, 2**63 - 4096, 5 * MIB, 0)
    assert memory.main_memory().total == machine.total


@pytest.mark.parametrize("folder", ["docker/abc", ""])
@pytest.mark.parametrize("version", [VERSION_1, VERSION_2])
def test_a_container_has_less_and_cached_files_do_not_count(own_groups, version, folder):
    """Within a container of version 1, the path is that of the host, and the group is the root."""
    root = memory.GROUPS / "memory" if version is VERSION_1 else memory.GROUPS
    own_groups.write_text("4:memory:/docker/abc\n" if version is VERSION_1 else f"0::/{folder}\n")
    limit(root / folder, version, 64 * MIB, used=50 * MIB, cached=20 * MIB)
    assert memory.main_memory() == (64 * MIB, 34 * MIB)


def test_the_group_that_leaves_least_decides(own_groups):
    own_groups.write_text("0::/slice/own\n")
    limit(memory.GROUPS / "slice" / "own", VERSION_2, 40 * MIB, used=10 * MIB, cached=0)
    limit(memory.GROUPS / "slice", VERSION_2, 64 * MIB, used=60 * MIB, cached=0)
    assert memory.main_memory() == (40 * MIB, 4 * MIB)


def test_a_group_that_is_full_leaves_nothing(own_groups):
    own_groups.write_text("0::/\n")
    limit(memory.GROUPS, VERSION_2, 64 * MIB, used=65 * MIB, cached=0)
    assert memory.main_memory().available == 0
