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
        r"plan: .*\nwhy: .* limit of 30.00 MiB .*\n"
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
        pytest.skip("the LoRA example needs peft: pip install -e '.[dev]'")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    job = subprocess.run(
        [preloaded_topt(), str(EXAMPLES / name), *sizes.split()],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert job.returncode == 0, job.stdout + job.stderr
    assert re.search(shows, job.stdout, re.DOTALL), job.stdout


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


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """A folder in which Jupyter finds a kernel that has imported what notebooks import."""
    folder = tmp_path_factory.mktemp("jupyter")
    kernel = folder / "kernels" / "preloaded"
    kernel.mkdir(parents=True)
    command = [preloaded_topt(), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(
        json.dumps({"argv": command, "display_name": "preloaded", "language": "python"})
    )
    return folder


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(path, kernels, tmp_path, monkeypatch):
    if not all(map(importlib.util.find_spec, ("nbclient", "ipykernel"))):
        pytest.skip("notebooks run with nbclient and ipykernel: pip install -e '.[dev]'")
    import nbclient
    import nbformat

    monkeypatch.setenv("JUPYTER_PATH", str(kernels))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        cell.source = cell.source.replace("return 512\n", "return 192\n")  # a small size
    nbclient.NotebookClient(
        notebook,
        kernel_name="preloaded",
        timeout=120,
        resources={"metadata": {"path": str(tmp_path)}},
    ).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "\n".join(
        output.get("text") or output.get("data", {}).get("text/plain", "") for output in outputs
    )
    assert SHOWN[path.stem].issubset(re.findall(r"\w+", printed)), printed


# words that the cells print
SHOWN = {
    "plan_and_frontier": {"blocks", "DDP", "recompute", "limit"},
    "stalls": {"waited", "fetching", "memory"},
}


def test_notebooks_are_stored_without_results():
    assert {path.stem for path in NOTEBOOKS} == set(SHOWN)
    for path in NOTEBOOKS:
        cells = json.loads(path.read_text())["cells"]
        assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
