"""Every example runs as its docstring says, with small sizes, and shows what it promises."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.preloaded import preloaded_topt

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
COMMAND = re.compile(r"^ *python (examples/\S+\.py.*)$", re.MULTILINE)

# what to run, small sizes, and what it prints
RUNS = [
    ("image_classification.py", "--epochs 1", r"plan: \d+ x DDP\naccuracy: 0\.\d"),
    (
        "language_model.py",
        "--max-steps 8 --layers 2 --hidden 64 --memory-limit 30MiB",
        r"plan: .*\nwhy: .* fits into 30.00 MiB .*\n"
        r"measured: \d+\.\d+ s per step, \d+ MiB at the peak\nloss: [345]\.\d\d",
    ),
    ("lora.py", "--max-steps 6", r"plan: .*DDP\ntrained: 36,864 of 871,168 .*\nloss: [345]\.\d\d"),
    ("gan.py", "--epochs 1", r"plan: .*DDP\nlosses: generator \d\.\d\d, discriminator \d\.\d\d"),
    (
        "slow_storage.py",
        "--epochs 2 --pictures 96",
        r"epoch 0: waited .*\nepoch 1: waited .*\n96 samples from the source, 96 from memory",
    ),
    ("slow_network.py", "--exchange local_steps --epochs 2", r"sent per step: .*\naccuracy: 0\.\d"),
    (
        "pipeline.py",
        "--schedule continuous --epochs 1",
        r"plan: .*2 stages \(continuous, multistep\).*\naccuracy: 0\.\d",
    ),
    ("parallel_optimizer.py", "", r"shared; its update takes .*\naccuracy: 0\.\d|accuracy 0\.\d"),
    (
        "demo.py",
        "trainer.limit_train_batches=32 trainer.limit_val_batches=1 model.num_layers=2",
        r"strategy=ddp .*strategy=topt .*"
        r"strategy.memory_limit=(\d+)MiB .*topt: .*fits into \1\.00 MiB.*"
        r"│ ddp .* ms .* MiB .* (\d\.\d{3})\d .*│ topt .* \2\d .*│ topt, \1MiB .* \2\d ",
    ),
    ("show_frontier.py", "", r"plans are worth knowing"),
    (
        "hydra_app/train.py",
        "trainer=topt_limited trainer.strategy.memory_limit=1GiB trainer.max_epochs=1",
        r"plan: \d+ x DDP\nmetrics: .*val_accuracy 0\.\d",
    ),
]


@pytest.mark.parametrize(
    ("name", "sizes", "shows"), RUNS, ids=[f"{name} {sizes}".strip() for name, sizes, _ in RUNS]
)
def test_example(name, sizes, shows, tmp_path):
    if name == "lora.py" and importlib.util.find_spec("peft") is None:
        pytest.skip("the LoRA example needs peft: pip install -e '.[test]'")
    output = run(EXAMPLES / name, *sizes.split(), folder=tmp_path)
    assert re.search(shows, output, re.DOTALL), output


def run(*command, folder):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    job = subprocess.run(
        [preloaded_topt(), *map(str, command)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert job.returncode == 0, job.stdout + job.stderr
    return job.stdout


def test_every_example_is_run_and_its_commands_have_options_that_it_takes():
    of_configs = {EXAMPLES / "digits.py", EXAMPLES / "hugging_face.py"}  # classes, by examples/conf
    paths = {*EXAMPLES.glob("*.py"), EXAMPLES / "hydra_app" / "train.py"} - of_configs
    assert {EXAMPLES / name for name, *_ in RUNS} == paths
    for path in paths:
        text = path.read_text()
        commands = [shlex.split(command) for command in COMMAND.findall(text)]
        assert commands, f"{path} does not say how it is run"
        for script, *options in commands:
            assert ROOT / script == path
            for option in options:
                group, _, choice = option.partition("=")
                if not choice and option.startswith("--"):
                    assert f'add_argument("{option}"' in text, option
                elif choice and (EXAMPLES / "hydra_app" / "conf" / group).is_dir():
                    assert (path.parent / "conf" / group / f"{choice}.yaml").exists(), option


# in place of matplotlib, which draws the last cell
NO_PLOTS = """
import sys
from unittest.mock import MagicMock

plt = MagicMock()
plt.subplots.return_value = MagicMock(), MagicMock()
sys.modules["matplotlib"] = sys.modules["matplotlib.pyplot"] = plt
plt.pyplot = plt
"""
# words that the cells print
SHOWN = {"plan_and_frontier": {"blocks", "DDP", "recompute", "limit"}}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(path, tmp_path):
    """Its cells, one after the other, with a small size."""
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells)
    code = "\n".join("".join(cell["source"]) for cell in cells)
    script = tmp_path / "notebook.py"
    script.write_text(NO_PLOTS + code.replace("return 512\n", "return 192\n"))
    printed = run(script, folder=tmp_path)
    assert SHOWN[path.stem].issubset(re.findall(r"\w+", printed)), printed
