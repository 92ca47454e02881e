"""The wheel holds the whole package and nothing else, and works where only its dependencies are.

The repository root is the package and its subpackages are listed by hand: one that is forgotten
would vanish from the wheel without a word.
"""

import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOT_PACKAGED = {"tests", "benchmarks", "docs", "examples", "build", "dist", "runs"}


def run(*command: object, cwd: Path) -> str:
    """The command's output; an assertion with all of it if it fails."""
    result = subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True
    )
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def packaged_files() -> set[str]:
    """What the wheel has to hold, from the tree: every module, every YAML file, py.typed."""
    files = {path for path in ROOT.glob("*.py")} | {ROOT / "py.typed"}
    for folder in ROOT.iterdir():
        if folder.is_dir() and folder.name not in NOT_PACKAGED and folder.name[0] not in "._":
            files.update(folder.rglob("*.py"))
    files.update((ROOT / "configs").rglob("*.yaml"))
    return {"fp4zoo/" + path.relative_to(ROOT).as_posix() for path in files}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the source distribution, built from a copy of the tree."""
    folder = tmp_path_factory.mktemp("packaging")
    clutter = shutil.ignore_patterns(".*", "*.egg-info", "__pycache__", "build", "dist", "runs")
    shutil.copytree(ROOT, folder / "tree", ignore=clutter)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, cwd=folder / "tree")
    (path,) = folder.glob("*.whl")
    return path


def test_wheel_holds_every_module_and_yaml_file_and_nothing_else(wheel: Path):
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name for name in names if ".dist-info/" not in name} == packaged_files()
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_every_module_imports_in_a_clean_environment(wheel: Path):
    folder = wheel.parent
    run(sys.executable, "-m", "venv", "--without-pip", folder / "venv", cwd=folder)
    python = folder / "venv" / "bin" / "python"
    # The dependencies come from this environment; an editable install's hook does not work there.
    site_packages = run(
        python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder
    )
    dependencies = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    Path(site_packages.strip(), "dependencies.pth").write_text("\n".join(dependencies) + "\n")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index"]
    run(*pip, "--no-deps", "--force-reinstall", wheel, cwd=folder)

    program = (
        "import importlib, pkgutil, fp4zoo\n"
        "names = [m.name for m in pkgutil.walk_packages(fp4zoo.__path__, 'fp4zoo.')]\n"
        "for name in names: importlib.import_module(name)\n"
        "print(fp4zoo.__file__, *names, sep='\\n')\n"
    )
    location, *names = run(python, "-c", program, cwd=folder).splitlines()
    assert Path(location).is_relative_to(folder)
    modules = {name for name in packaged_files() if name.endswith(".py")} - {"fp4zoo/__init__.py"}
    assert len(names) == len(modules)
    printed = run(folder / "venv" / "bin" / "fp4zoo-train", "--cfg", "job", cwd=folder)
    assert "architecture: llama" in printed
    assert not (folder / "outputs").exists()
