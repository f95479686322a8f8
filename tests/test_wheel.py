"""What a person gets from `pip install`: the wheel in a fresh environment, used outside of the checkout."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedfactor

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "src" / "fedfactor" / "recipes"

pytestmark = pytest.mark.wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder], cwd=ROOT, check=True)
    (found,) = folder.iterdir()
    return found


class Installed:
    """A fresh environment with the wheel and no extra, and a folder that is not a checkout."""

    def __init__(self, wheel: Path, folder: Path) -> None:
        self.bin, self.folder = folder / "env" / "bin", folder / "elsewhere"
        self.folder.mkdir()
        subprocess.run([sys.executable, "-m", "venv", folder / "env"], check=True)
        wanted = ["torch==2.13.0", f"fedfactor @ {wheel.as_uri()}"]  # the torch that `make setup` installs
        pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
        self("python", *pip, "-c", str(ROOT / "constraints.txt"), *wanted)

    def __call__(self, program: str, *words: str) -> str:
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
        done = subprocess.run(
            [self.bin / program, *words], cwd=self.folder, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    folder = tmp_path_factory.mktemp("fresh")
    yield Installed(wheel, folder)
    shutil.rmtree(folder)  # nearly a gigabyte, which pytest would keep


def test_the_wheel_has_the_recipes_and_nothing_of_the_tests(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    packed = {name.removeprefix("fedfactor/recipes/") for name in names if name.startswith("fedfactor/recipes/")}
    assert packed == {path.relative_to(RECIPES).as_posix() for path in RECIPES.rglob("*.toml")}
    assert "fedfactor/py.typed" in names
    assert {name.partition("/")[0] for name in names} == {"fedfactor", f"fedfactor-{fedfactor.__version__}.dist-info"}


def test_it_is_the_wheel_that_runs(installed: Installed) -> None:
    where = installed("python", "-c", "import fedfactor; print(fedfactor.__file__)")
    assert Path(where.strip()).is_relative_to(installed.bin.parent)
    assert installed("fedfactor", "--version").strip() == fedfactor.__version__


def test_the_demo_runs(installed: Installed) -> None:
    installed("fedfactor", "run", "demo", "--set", "train.rounds=2", "--set", "evaluate.every=1")
    runs = installed.folder / "runs" / "demo"
    found = {name: json.loads((runs / name / "summary.json").read_text()) for name in ("fedavg", "fedpara")}
    assert all(summary["rounds"] == 2 and not summary["failures"] for summary in found.values())
    assert 7 < found["fedavg"]["bytes_up"] / found["fedpara"]["bytes_up"] < 8  # the README's eighth


def test_a_new_recipe_runs(installed: Installed) -> None:
    installed("fedfactor", "new", "recipe", "mine")
    installed("fedfactor", "run", "mine.toml", "--small", "--quiet")
    assert (installed.folder / "runs" / "mine" / "summary.json").exists()


def test_what_is_missing_is_installed_as_the_package_was(installed: Installed) -> None:
    code = "from fedfactor.support.install import install_command; print(install_command('report'))"
    assert installed("python", "-c", code).strip() == "pip install 'fedfactor[report]'"


def test_recipes_are_listed_and_copied(installed: Installed) -> None:
    listed = installed("fedfactor", "recipes").splitlines()
    names = {path.relative_to(RECIPES).with_suffix("").as_posix() for path in RECIPES.rglob("*.toml")}
    assert names == {line.split()[0] for line in listed if line.split()[0] in names}
    installed("fedfactor", "recipes", "copy", "demo")
    assert (installed.folder / "demo.toml").read_text() == (RECIPES / "demo.toml").read_text()


def test_the_readmes_python_runs(installed: Installed) -> None:
    block = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)[0]
    assert installed("python", "-c", f"{block}\nprint(type(plain).__name__)").split()[-1] == "Sequential"
