"""The demo: deterministic data, no overlap of the splits, the metric against its formula."""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F

from lightning_topt.demo import ByteGPT, ByteSequences, StdlibBytesDataModule, split_files

STDLIB = Path(sysconfig.get_path("stdlib"))


def trainer(**options):
    return pl.Trainer(
        accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip


def test_split_is_by_file_complete_and_without_overlap():
    train, val = split_files(STDLIB)
    assert not set(train) & set(val)
    assert 0.05 < len(val) / len(train + val) < 0.15
    assert STDLIB / "argparse.py" in set(train) | set(val)
    assert not any(
        {"site-packages", "test", "tests"} & set(p.relative_to(STDLIB).parts) for p in train + val
    )


def test_split_of_a_file_depends_on_its_path_alone(tmp_path):
    names = [f"package/module_{index}.py" for index in range(200)]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    before_train, before_val = split_files(tmp_path)
    for name in names[::2]:
        (tmp_path / name).unlink()
    after_train, after_val = split_files(tmp_path)
    assert after_train == [path for path in before_train if path.exists()]
    assert after_val == [path for path in before_val if path.exists()]
    oracle = {n for n in names if int(hashlib.sha256(n.encode()).hexdigest()[:8], 16) / 2**32 < 0.1}
    assert {path.relative_to(tmp_path).as_posix() for path in before_val} == oracle


def test_every_byte_but_the_first_is_predicted_once():
    data = bytes(range(101))
    sequences = ByteSequences(data, 10)
    targets = torch.cat([sequences[index][1:] for index in range(len(sequences))])
    assert targets.tolist() == list(data[1:])
    with pytest.raises(IndexError):
        sequences[len(sequences)]


def test_too_little_text_says_what_to_do():
    with pytest.raises(ValueError, match="raise max_bytes"):
        StdlibBytesDataModule(seq_len=128, batch_size=8, max_bytes=1000).setup()


def test_bits_per_byte_is_the_mean_over_all_bytes():
    """Unequal batches count by their bytes; the oracle sums the negative log2 probabilities."""
    torch.manual_seed(0)
    model = ByteGPT(num_layers=1, hidden=16, num_heads=2, seq_len=8)
    sequences = torch.randint(0, 256, (7, 9), dtype=torch.uint8)
    loader = torch.utils.data.DataLoader(sequences, batch_size=4)
    (result,) = trainer().validate(model, loader, verbose=False)
    with torch.no_grad():
        probabilities = F.softmax(model(sequences[:, :-1].long()).double(), -1)
    chosen = probabilities.gather(-1, sequences[:, 1:, None].long())
    assert result["val_bits_per_byte"] == pytest.approx(-chosen.log2().mean().item(), rel=1e-5)


def test_byte_gpt_learns():
    pl.seed_everything(0)
    model = ByteGPT(
        num_layers=1, hidden=32, num_heads=2, seq_len=32, learning_rate=1e-2, warmup_steps=2
    )
    data = StdlibBytesDataModule(seq_len=32, batch_size=8, max_bytes=40_000)
    run = trainer(max_steps=60, limit_val_batches=8, num_sanity_val_steps=0)
    run.fit(model, datamodule=data)
    (result,) = run.validate(model, datamodule=data, verbose=False)
    assert result["val_bits_per_byte"] < 5.5  # 8 for a uniform guess
