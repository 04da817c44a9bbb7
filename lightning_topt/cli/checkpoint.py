"""`topt checkpoint`: what is in a checkpoint, is it whole, and the same as one plain file.

    topt checkpoint inspect path=last.ckpt                          its plan, step, sizes
    topt checkpoint verify path=s3://bucket/run/last.ckpt           is it whole; exit code 1
    topt checkpoint convert path=last.ckpt to=model.safetensors     weights alone, or ``.ckpt``: all

Checkpoints are folders of ``checkpoint="sharded"``, of Lightning's FSDPStrategy and
ModelParallelStrategy, and plain files; on a disk or in an object store.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from typing import IO, Any

import torch
from omegaconf import DictConfig
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.utils._pytree import tree_leaves

from lightning_topt.basics.argument_checks import check_choice
from lightning_topt.basics.units import format_bytes
from lightning_topt.execution.checkpoint_files import (
    MANIFEST,
    METADATA,
    REST,
    Place,
    RemotePath,
    ShardFolder,
    holds_shards,
    place_of,
    sync,
)
from lightning_topt.execution.sharded_checkpoint import (
    is_folder,
    open_sharded,
    read_sharded_checkpoint,
)
from lightning_topt.execution.stored_states import stored_tensors
from lightning_topt.plan.parallel_plan import ParallelPlan
from topt_console import CHECKPOINT_ACTIONS


def run(config: DictConfig) -> None:
    """Do what `config` says with a checkpoint; end with exit code 1 where it is damaged.

    Raises:
        ValueError: there is no checkpoint at `path`, or options contradict one another.
    """
    check_choice(config.action, name="action", allowed=CHECKPOINT_ACTIONS)
    if config.path is None:
        raise ValueError("say which checkpoint: path=<file or folder>, also path=s3://...")
    if (config.to is not None) != (config.action == "convert"):
        raise ValueError("to=<file> belongs to convert, which needs it")
    console = Console()
    try:
        with _opened(config.path, trusted=config.trusted) as checkpoint:
            if config.action == "inspect":
                _inspect(config.path, checkpoint, console)
                return
            if config.action == "verify":
                problems = _problems(config.path, checkpoint)
    except (ValueError, FileNotFoundError) as error:
        if config.action != "verify" or isinstance(error, FileNotFoundError):
            raise ValueError(str(error)) from error
        problems = [str(error)]
    if config.action == "convert":
        _convert(config.path, config.to, trusted=config.trusted, console=console)
        return
    for problem in problems:
        console.print(f"[bold red]problem[/]: {escape(problem)}", highlight=False)
    console.print("[bold red]damaged[/]" if problems else "[bold green]whole[/]")
    if problems:
        sys.exit(1)


# ---- opening -------------------------------------------------------------------------------------


@contextlib.contextmanager
def _opened(path: str, *, trusted: bool) -> Any:
    # Open a checkpoint: of a folder states are read when asked for, of a file mapped
    if is_folder(path):
        load = _load_trusted if trusted else None
        yield open_sharded(path, load)
        return
    place = place_of(path)
    if not place.is_file():
        raise FileNotFoundError(f"there is no checkpoint at {path!r}")
    yield _load_file(place, trusted=trusted)


def _load_trusted(path: str) -> dict[str, Any]:
    return _load_file(place_of(path), trusted=True)


def _load_file(place: Place, *, trusted: bool) -> dict[str, Any]:
    # What a plain file has, with tensors of the host
    options: dict[str, Any] = {"map_location": "cpu", "weights_only": not trusted}
    try:
        if isinstance(place, RemotePath):
            with place.open() as file:
                checkpoint = torch.load(file, **options)
        else:
            checkpoint = torch.load(place, mmap=True, **options)
    except Exception as error:  # of pickles, zip files and torch: the bytes decide
        hint = "" if trusted else "; trusted=true also makes objects of other classes"
        why = str(error).strip().splitlines()[0]
        raise ValueError(f"{str(place)!r} cannot be read: {why}{hint}") from error
    if not isinstance(checkpoint, dict):
        raise ValueError(f"{str(place)!r} has a {type(checkpoint).__name__}, and no checkpoint")
    return checkpoint


# ---- inspect -------------------------------------------------------------------------------------


def _inspect(path: str, checkpoint: Mapping[str, Any], console: Console) -> None:
    place = place_of(path)
    form = "a plain file"
    if holds_shards(place):
        form = "sharded: a folder to which every rank wrote"
    elif is_folder(path):
        form = "sharded: a folder of Lightning's own strategy"
    own = checkpoint.get("lightning_topt", {})
    lines = {
        "form": form,
        "step": checkpoint.get("global_step", "unknown"),
        "epoch": checkpoint.get("epoch", "unknown"),
        "Lightning": checkpoint.get("pytorch-lightning_version", "unknown"),
        "plan": "none, as under ddp",
    }
    if "plan" in own:
        plan = ParallelPlan.from_dict(own["plan"])
        lines["plan"] = f"{plan.summary()}, {plan.mesh.size} rank(s)"
    for name, value in lines.items():
        console.print(f"{name}: {value}", highlight=False, markup=False)
    table = Table("state", "tensors", "elements", "bytes")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, sizes in _sizes(checkpoint).items():
        table.add_row(
            name,
            str(len(sizes)),
            f"{sum(count for count, _ in sizes):,}",
            format_bytes(sum(size for _, size in sizes)),
        )
    console.print(table)
    others = sorted(checkpoint.keys() - {"state_dict", "optimizer_states"})
    console.print(f"and {', '.join(others)}", highlight=False, markup=False)


def _sizes(checkpoint: Mapping[str, Any]) -> dict[str, list[tuple[int, int]]]:
    # The elements and bytes of each tensor, by state
    states = {"module": checkpoint.get("state_dict", {})}
    for number, state in enumerate(checkpoint.get("optimizer_states", [])):
        states[f"optimizer {number}"] = state
    return {name: [*_sizes_of(state)] for name, state in states.items()}


def _sizes_of(state: Any) -> Iterable[tuple[int, int]]:
    stored: Mapping[str, TensorStorageMetadata] | None = getattr(state, "stored", None)
    if stored is not None:  # in a folder: without reading any
        for entry in stored.values():
            yield entry.size.numel(), entry.size.numel() * entry.properties.dtype.itemsize
        return
    for leaf in tree_leaves(dict(state)):
        if isinstance(leaf, Tensor):
            yield leaf.numel(), leaf.nbytes


# ---- verify --------------------------------------------------------------------------------------


def _problems(path: str, checkpoint: Mapping[str, Any]) -> list[str]:
    # What is missing or not what was saved
    place = place_of(path)
    if not is_folder(path):
        lacks = [] if "state_dict" in checkpoint else [f"{str(place)!r} has no state_dict"]
        return [*_damage_of_file(place), *lacks]
    of_lightning = not holds_shards(place)
    folder = ShardFolder(place, of_others=True) if of_lightning else ShardFolder.at(place)
    found, problems = folder.metadata.storage_data, list[str]()
    if not of_lightning:
        problems += _damage_of_file(folder.file(REST))
    # each tensor: do its chunks fill it, and is each in a file, which is a zip file of its own
    for key, entry in stored_tensors(folder).items():
        chunks = [chunk for chunk in entry.chunks if chunk.sizes.numel()]
        places = [found.get(MetadataIndex(key, chunk.offsets)) for chunk in chunks]
        if sum(chunk.sizes.numel() for chunk in chunks) != entry.size.numel() or None in places:
            problems.append(f"{key} of shape {tuple(entry.size)} is not complete")
        for at in filter(None, places):
            with folder.file(at.relative_path).open("rb") as file:
                file.seek(at.offset)
                if _is_damaged(io.BytesIO(file.read(at.length))):
                    problems.append(f"{key} in {at.relative_path} is damaged")
    return problems


def _is_damaged(file: IO[bytes]) -> bool:
    # compared are the checksums that torch has in it
    try:
        with zipfile.ZipFile(file) as archive:
            return archive.testzip() is not None
    except Exception:  # of zip files: the bytes decide
        return True


def _damage_of_file(place: Place) -> list[str]:
    with place.open("rb") as file:
        return [f"{str(place)!r} is damaged"] if _is_damaged(file) else []


# ---- convert -------------------------------------------------------------------------------------


def _convert(path: str, to: str, *, trusted: bool, console: Console) -> None:
    # Write a checkpoint as one file
    target = place_of(to)
    if target.is_file() or (target / MANIFEST).is_file() or (target / METADATA).is_file():
        raise ValueError(f"{to!r} is there already: name another file, or remove it")
    if is_folder(path):
        checkpoint = read_sharded_checkpoint(path, weights_only=not trusted)
    else:
        checkpoint = _load_file(place_of(path), trusted=trusted)
    left_out: list[str] = []
    if target.name.endswith(".safetensors"):
        content, left_out = _as_safetensors(checkpoint)
        _write(target, lambda file: file.write(content))
    else:
        _write(target, lambda file: torch.save(checkpoint, file))
    size = target.size() if isinstance(target, RemotePath) else target.stat().st_size
    console.print(f"wrote {target} ({format_bytes(size)})", highlight=False, markup=False)
    if left_out:
        console.print(f"left out: {', '.join(left_out)}", highlight=False, markup=False)


def _as_safetensors(checkpoint: Mapping[str, Any]) -> tuple[bytes, list[str]]:
    # The module's tensors in that form, and the names of what it has no place for
    try:
        from safetensors.torch import save  # noqa: PLC0415  (not every environment has it)
    except ImportError as error:
        raise ValueError(
            "files of safetensors need that package: pip install safetensors, or convert to a file "
            "that ends with .ckpt"
        ) from error
    tensors: dict[str, Tensor] = {}
    memory: set[int] = set()
    for name, value in checkpoint["state_dict"].items():
        if isinstance(value, Tensor):
            # two names of one tensor are two entries there
            shared = value.untyped_storage().data_ptr() in memory
            tensors[name] = value.clone() if shared else value.contiguous()
            memory.add(value.untyped_storage().data_ptr())
    own = checkpoint.get("lightning_topt", {})
    metadata = {"format": "pt", "global_step": str(checkpoint.get("global_step", ""))}
    if "plan" in own:
        metadata["plan"] = json.dumps(own["plan"])
    others = [name for name in checkpoint["state_dict"] if name not in tensors]
    others += [name for name in checkpoint if name not in ("state_dict", "global_step")]
    return save(tensors, metadata), others


def _write(target: Place, write: Any) -> None:
    # Let ``write(file)`` write `target`, which is there once it is whole
    if isinstance(target, RemotePath):
        with target.open("wb") as remote:
            write(remote)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=".", suffix=".unfinished")
    try:
        file: IO[bytes]
        with os.fdopen(descriptor, "wb") as file:
            write(file)
        unfinished = target.with_name(os.path.basename(name))
        sync(unfinished)
        unfinished.replace(target)
    except BaseException:
        os.unlink(name)
        raise
