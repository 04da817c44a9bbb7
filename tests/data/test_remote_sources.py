"""Sources of any kind that fsspec opens: read once, in forked workers too; what fails, comes late
or changes stays right.
"""

from __future__ import annotations

import http.server
import threading

import fsspec
import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_topt.plugins.cached_data import CachedDataModule

ITEMS, BATCH = 12, 4


class Server(http.server.ThreadingHTTPServer):
    """Files number 0 .. `ITEMS` - 1, of `version`; `fails` holds numbers that it answers with an
    error once.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests, self.fails, self.version = [], set(), 0
        self.lock = threading.Lock()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        number, body = int(self.path[1:]), b""
        with self.server.lock:
            self.server.requests.append(number)
            fails = number in self.server.fails
            self.server.fails.discard(number)
        if not fails:
            body = np.full(6, number + 100 * self.server.version, np.float32).tobytes()
        self.send_response(500 if fails else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_HEAD(self):
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.shutdown()


class Remote(Dataset):
    """What a user writes."""

    def __init__(self, urls):
        self.urls = urls

    def __len__(self):
        return len(self.urls)

    def __getitem__(self, index):
        filesystem, path = fsspec.core.url_to_fs(self.urls[index])
        return torch.frombuffer(
            bytearray(filesystem.cat_file(path)), dtype=torch.float32
        ).clone(), index


class Module(pl.LightningDataModule):
    def __init__(self, urls, **options):
        super().__init__()
        self.urls, self.options = urls, options

    def train_dataloader(self):
        return DataLoader(Remote(self.urls), BATCH, shuffle=True, **self.options)


def cached(tmp_path, urls, *, version="1", **options):
    module = Module(urls, **options)
    return CachedDataModule(
        module, directory=tmp_path, memory_bytes=1 << 20, disk_bytes=1 << 20, data_version=version
    )


def right(loader, *, offset=0):
    """One epoch; whether every sample came once and is what it should be."""
    found = sorted(
        (int(index), values) for batch in loader for values, index in zip(*batch, strict=True)
    )
    assert [index for index, _ in found] == list(range(ITEMS))
    return all((values == index + offset).all() for index, values in found)


def http_urls(server):
    return [f"http://127.0.0.1:{server.server_port}/{number}" for number in range(ITEMS)]


def written(tmp_path, kind):
    if kind == "memory":
        urls = [f"memory://topt-test/{number}" for number in range(ITEMS)]
    else:
        (tmp_path / "files").mkdir()
        urls = [f"file://{tmp_path}/files/{number}" for number in range(ITEMS)]
    for number, url in enumerate(urls):
        with fsspec.open(url, "wb") as file:
            file.write(np.full(6, number, np.float32).tobytes())
    return urls


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_any_file_system(tmp_path, kind):
    urls = written(tmp_path, kind)
    data = cached(tmp_path / "cache", urls)
    assert right(data.train_dataloader()) and right(data.train_dataloader())
    [counts] = data.statistics().values()
    assert (counts.misses, counts.memory_hits) == (ITEMS, ITEMS)
    data.close()


# starting one takes long
SPAWNED = {"num_workers": 1, "multiprocessing_context": "spawn", "persistent_workers": True}


@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 2}, SPAWNED], ids=["alone", "workers", "spawned"]
)
def test_http_is_asked_once(tmp_path, server, options):
    data = cached(tmp_path, http_urls(server), **options)
    loader = data.train_dataloader()
    assert right(loader)
    [counts] = data.statistics().values()
    assert counts.misses == ITEMS and set(server.requests) == set(range(ITEMS))
    server.requests.clear()
    assert right(loader) and right(loader)
    data.close()
    again = cached(
        tmp_path, http_urls(server), **({} if options is SPAWNED else options)
    )  # the next run, from the disk
    assert right(again.train_dataloader()) and not server.requests
    again.close()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_of_the_source_is_the_users_to_see_and_is_not_kept(tmp_path, server, num_workers):
    server.fails = {5}
    data = cached(tmp_path, http_urls(server), num_workers=num_workers)
    with pytest.raises(Exception, match="500"):
        right(data.train_dataloader())
    assert right(data.train_dataloader()) and right(data.train_dataloader())
    [counts] = data.statistics().values()
    assert counts.memory_items == ITEMS
    data.close()


def test_content_that_changes_belongs_to_another_version(tmp_path, server):
    data = cached(tmp_path, http_urls(server))
    assert right(data.train_dataloader())
    server.version = 1
    assert right(data.train_dataloader())  # a run sees one state of the data
    changed = cached(tmp_path, http_urls(server), version="2")
    assert right(changed.train_dataloader(), offset=100)
    assert right(data.train_dataloader())
    data.close(), changed.close()


def test_local_files_that_change_are_found_out_without_a_version(tmp_path):
    urls = [url.removeprefix("file://") for url in written(tmp_path, "file")]
    for offset in (0, 100):
        if offset:
            for number, path in enumerate(urls):
                with open(path, "wb") as file:
                    file.write(np.full(6, number + offset, np.float32).tobytes())
        data = cached(tmp_path / "cache", urls, version=None)
        assert right(data.train_dataloader(), offset=offset) and right(
            data.train_dataloader(), offset=offset
        )
        data.close()
