"""What another user has put in place of a cache's files is neither written nor believed."""

from __future__ import annotations

import multiprocessing
import os
import warnings

import pytest

from lightning_topt.basics.own_files import NotOwn, made, open_own
from lightning_topt.data.cache.memory_file import REGISTRY
from tests.data.test_sample_cache import ITEMS, epoch, make

FORK = multiprocessing.get_context("fork")
EVERYTHING = list(range(ITEMS))
FOREIGN = 54321
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who may give files away")


pytestmark = pytest.mark.usefixtures("shared")


def planted(tmp_path):
    """The folder of a cache that is full and closed."""
    cache = make(tmp_path, memory=0)
    epoch(cache)
    cache.close()
    return tmp_path / "f"


def without_disk(tmp_path, words, **options):
    with pytest.warns(
        UserWarning, match=f"goes on without its disk cache .*{words}.*name a directory of your own"
    ) as caught:
        cache = make(tmp_path, **options)
    assert len(caught) == 1
    return cache


@pytest.mark.parametrize(
    ("name", "link"),
    [
        *((name, os.symlink) for name in ("samples", "disk.lock", REGISTRY)),
        ("samples", os.link),
        ("refused", os.link),
    ],
)
def test_a_link_in_place_of_a_file_leads_nowhere(tmp_path, link, name):
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (tmp_path / "f").mkdir(mode=0o700)
    link(victim, tmp_path / "f" / name)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        cache = make(tmp_path)
        assert epoch(cache) == EVERYTHING and epoch(cache) == []
        cache.refuse("two draws differ")
        cache.close()
    assert victim.read_bytes() == b"precious"


@pytest.mark.parametrize("name", ["samples", "disk.lock"])
def test_a_link_costs_the_tier_and_says_so(tmp_path, name):
    path = planted(tmp_path) / name
    path.rename(tmp_path / "moved")
    path.symlink_to(tmp_path / "moved")
    cache = without_disk(tmp_path, f"symbolic link.*{name}")
    assert cache.disk is None and epoch(cache) == EVERYTHING and epoch(cache) == []


@as_root
@pytest.mark.parametrize("what", ["samples", "disk.lock", "", ".."])
def test_what_another_user_planted_is_not_served(tmp_path, what):
    directory = tmp_path / "directory"
    os.chown((planted(directory) / what).resolve(), FOREIGN, FOREIGN)
    cache = without_disk(directory, f"belongs to user {FOREIGN}")
    assert epoch(cache) == EVERYTHING


@as_root
def test_memory_that_another_user_planted_is_not_served(tmp_path):
    cache = make(tmp_path, disk=0)
    epoch(cache)
    os.fchown(cache.memory.file.descriptor, FOREIGN, FOREIGN)
    assert epoch(make(tmp_path, disk=0)) == EVERYTHING
    os.chown(tmp_path / "f" / REGISTRY, FOREIGN, FOREIGN)
    cache.close()
    assert epoch(make(tmp_path, disk=0)) == EVERYTHING


@pytest.mark.parametrize(
    ("what", "mode"),
    [("", 0o770), ("", 0o707), ("..", 0o777), ("samples", 0o660), ("disk.lock", 0o602)],
)
def test_where_others_may_write_nothing_is_believed(tmp_path, what, mode):
    directory = tmp_path / "directory"
    (planted(directory) / what).resolve().chmod(mode)
    cache = without_disk(directory, f"others may write.*{mode:o}")
    assert epoch(cache) == EVERYTHING and epoch(cache) == []


@pytest.mark.parametrize("mode", [0o1777, 0o755, 0o775])
def test_a_directory_like_tmp_or_of_a_group_will_do(tmp_path, silent, mode):
    (tmp_path / "scratch").mkdir()
    (tmp_path / "scratch").chmod(mode)
    planted(tmp_path / "scratch")
    assert epoch(make(tmp_path / "scratch")) == []


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o077])
def test_what_is_made_is_for_its_user_alone(tmp_path, silent, umask):
    before = os.umask(umask)
    try:
        planted(tmp_path / "a" / "b")
        assert epoch(make(tmp_path / "a" / "b")) == []
    finally:
        os.umask(before)
    assert (tmp_path / "a" / "b" / "f").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o077 for path in (tmp_path / "a" / "b" / "f").iterdir()} == {0}


def test_a_pipe_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(NotOwn, match="no plain file"):
        open_own(tmp_path / "pipe")
    with pytest.raises(ValueError, match="is a file"):
        (tmp_path / "file").touch()
        made(tmp_path / "file" / "f")


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def test_a_closed_cache_holds_no_descriptor(tmp_path):
    def use(name):
        cache = make(tmp_path / name)
        epoch(cache)
        cache.close()

    use("warm")
    before = descriptors()
    for number in range(5):
        use(str(number))
    assert descriptors() == before


def make_without_folder(tmp_path):
    """Its registry is in shared memory: the folder may not be used."""
    (tmp_path / "f").mkdir(exist_ok=True, parents=True)
    (tmp_path / "f").chmod(0o777)
    return make(tmp_path, disk=0)


def test_no_registry_stays_in_shared_memory(tmp_path, shared):
    first, second = make_without_folder(tmp_path), make_without_folder(tmp_path)
    epoch(first)
    assert epoch(second) == [] and len(os.listdir(shared)) == 1
    first.close()
    assert epoch(make_without_folder(tmp_path)) == []  # the second is still listed
    second.close()
    assert os.listdir(shared) == []
    third = make_without_folder(tmp_path)
    assert epoch(third) == EVERYTHING and len(os.listdir(shared)) == 1
