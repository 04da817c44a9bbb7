"""What is published: an sdist, a wheel made of it alone, and what version they say they are."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.preloaded import preloaded_python
from topt_console import __version__

ROOT = Path(__file__).parent.parent
GITHUB = ROOT / ".github"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with what is in the wheel that is made of the sdist's files."""
    if importlib.util.find_spec("hatchling") is None:
        pytest.skip("distributions are built with hatchling: pip install -e '.[test]'")
    from hatchling.builders.sdist import SdistBuilder
    from hatchling.builders.wheel import WheelBuilder

    folder = tmp_path_factory.mktemp("release")
    (sdist,) = SdistBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])
    shutil.unpack_archive(sdist, folder / "source")
    (source,) = (folder / "source").iterdir()
    (wheel,) = WheelBuilder(str(source)).build(directory=str(folder), versions=["standard"])
    assert Path(sdist).name == f"lightning_topt-{__version__}.tar.gz"
    assert Path(wheel).name == f"lightning_topt-{__version__}-py3-none-any.whl"
    shutil.unpack_archive(wheel, folder / "installed", "zip")
    return folder / "installed"


def run(*command, folder, path):
    environment = {**os.environ, "PYTHONPATH": str(path)}
    job = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert job.returncode == 0, job.stdout + job.stderr
    return job.stdout


def files_below(folder):
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {path for path in paths if "__pycache__" not in path.parts}


def test_a_wheel_made_of_the_sdist_has_every_file(installed):
    for package in ("lightning_topt", "topt_console", "hydra_plugins"):
        there, here = files_below(installed / package), files_below(ROOT / package)
        assert here <= there
    assert files_below(installed / "lightning_topt" / "conf") == files_below(ROOT / "conf")


def test_an_installed_wheel_works_without_the_checkout(installed, tmp_path):
    code = (
        "import lightning_topt as t, hydra_plugins.lightning_topt_searchpath as s;"
        "print(t.__file__, t.__version__, t.AutoParallelStrategy.__name__, s.conf_dir(), sep='\\n')"
    )
    package = installed / "lightning_topt"
    assert run(preloaded_python(), "-c", code, folder=tmp_path, path=installed).split() == [
        str(package / "__init__.py"),
        __version__,
        "AutoParallelStrategy",
        str(package / "conf"),
    ]
    code = "from topt_console import main; main()"
    assert "topt plan" in run(sys.executable, "-c", code, "--help", folder=tmp_path, path=installed)
    shown = run(
        *(preloaded_python(), "-m", "topt_console", "plan", "--cfg", "job"),
        folder=tmp_path,
        path=installed,
    )
    assert yaml.safe_load(shown)["strategy"]["_target_"] == "lightning_topt.AutoParallelStrategy"


def test_what_the_distribution_says_of_itself(installed):
    (found,) = importlib.metadata.distributions(path=[str(installed)])
    (script,) = found.entry_points.select(group="console_scripts")
    assert (script.name, script.value) == ("topt", "topt_console:main")
    assert found.version == __version__ and found.metadata["License-Expression"] == "Apache-2.0"
    assert found.metadata["Author"] == "lightning-topt maintainers"
    assert {"hf", "ray", "hydra-extras", "examples", "dev"} <= set(
        found.metadata.get_all("Provides-Extra")
    )
    # Pythons that are promised are those that are tested
    jobs = yaml.safe_load((GITHUB / "workflows" / "ci.yml").read_text())["jobs"]
    tested = jobs["test"]["strategy"]["matrix"]["python"]
    classifiers = found.metadata.get_all("Classifier")
    promised = [name.rpartition(" ")[2] for name in classifiers if re.search(r":: 3\.", name)]
    assert promised == tested and found.metadata["Requires-Python"] == f">={tested[0]}"


def test_version_and_changelog_agree():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert len(changelog.splitlines()) <= 60
    released = re.findall(r"^## (\d+\.\d+\.\d+)", changelog, re.MULTILINE)
    assert released[0] == __version__
    assert str(yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"]) == __version__


def test_hints_install_extras_from_a_checkout():
    """No index has the package: no hint names it in place of a checkout."""
    files = [
        path
        for folder in ("lightning_topt", "conf", "docs", "examples", "benchmarks")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".md", ".yaml", ".ipynb")
    ]
    named = [path for path in files if "lightning-topt[" in path.read_text()]
    assert files and not named
