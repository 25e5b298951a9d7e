"""What ends up in a wheel, an sdist and an editable install, and what the set-up commands choose."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import sysconfig
import tarfile
import textwrap
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent
LINKED = ("kernels", "reports", "sessions", "tasks")

pytestmark = pytest.mark.skipif(
    not (REPOSITORY / "pyproject.toml").is_file() or not (REPOSITORY / "fathom_eval" / "kernels").is_symlink(),
    reason="needs the repository with its links",
)


def run(arguments: Sequence[str | Path], cwd: Path, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(argument) for argument in arguments],
        cwd=cwd,
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def succeed(arguments: Sequence[str | Path], cwd: Path, environment: Mapping[str, str] | None = None) -> str:
    done = run(arguments, cwd, environment)
    assert done.returncode == 0, f"{arguments} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def copy_repository(target: Path) -> Path:
    """Copy what a build reads, links kept as links, so that building leaves nothing in the repository."""
    target.mkdir()
    for name in ("fathom_eval", *LINKED):
        shutil.copytree(REPOSITORY / name, target / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "published"))
    for name in ("pyproject.toml", "LICENSE", "README.md", "MANIFEST.in"):
        if (REPOSITORY / name).is_file():
            shutil.copy(REPOSITORY / name, target / name)
    return target


def package_files(source: Path) -> dict[str, bytes]:
    """The files that belong into a wheel, by their path in it."""
    package = source / "fathom_eval"
    files = {}
    for folder, subfolders, names in os.walk(package, followlinks=True):
        subfolders[:] = [name for name in subfolders if name not in {"__pycache__", "published"}]
        for name in names:
            path = Path(folder, name)
            if (
                path.suffix in {".py", ".yaml"}
                or path.parent.name in ("paper_data", "templates")
                or name in ("py.typed", "trajectories.jsonl.gz")
            ):
                files[path.relative_to(source).as_posix()] = path.read_bytes()
    return files


def wheel_files(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = copy_repository(tmp_path_factory.mktemp("source") / "checkout")
    published = source / "reports" / "published" / "run"
    published.mkdir(parents=True)
    (published / "results.csv").write_text("method,score\n", encoding="utf-8")
    (published / "plot.py").write_text("", encoding="utf-8")
    return source


@pytest.fixture(scope="module")
def sdist(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    succeed([sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", folder], cwd=source)
    return next(folder.glob("*.tar.gz"))


def build_wheel(project: Path, folder: Path) -> Path:
    succeed([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder], cwd=project)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(source, tmp_path_factory.mktemp("wheel"))


def test_wheel_holds_the_package_and_nothing_else(source: Path, wheel: Path) -> None:
    built = wheel_files(wheel)
    metadata = {name for name in built if name.startswith("fathom_eval-") and ".dist-info/" in name}
    assert {name: built[name] for name in built.keys() - metadata} == package_files(source)
    for name in LINKED:
        assert f"fathom_eval/{name}/__init__.py" in built
    assert any(name.endswith("/licenses/LICENSE") for name in metadata)
    with zipfile.ZipFile(wheel) as archive:
        assert not [entry.filename for entry in archive.infolist() if stat.S_ISLNK(entry.external_attr >> 16)]


def test_wheel_metadata_carries_the_readme(wheel: Path) -> None:
    if not (REPOSITORY / "README.md").is_file():
        pytest.skip("no README.md")
    metadata = next(content for name, content in wheel_files(wheel).items() if name.endswith(".dist-info/METADATA"))
    assert b"Description-Content-Type: text/markdown" in metadata


def test_sdist_builds_the_same_wheel(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        assert not [member.name for member in archive.getmembers() if member.issym() or member.islnk()]
        archive.extractall(tmp_path, filter="data")
    project = next(tmp_path.iterdir())
    folders = {entry.name for entry in project.iterdir() if entry.is_dir()}
    assert folders == {"fathom_eval", "fathom_eval.egg-info"}
    assert wheel_files(build_wheel(project, tmp_path / "wheel")) == wheel_files(wheel)


IMPORT_FROM_INSTALLED = """
    import importlib, importlib.util, site, sys
    # Started without the site module, so that an editable install of the running environment plays no part.
    installed, libraries = sys.argv[1:]
    sys.path.append(libraries)
    before = {name: importlib.util.find_spec(name) for name in ("kernels", "reports", "sessions", "tasks")}
    sys.path.insert(0, installed)
    site.addsitedir(installed)
    for name in before:
        module = importlib.import_module(f"fathom_eval.{name}")
        assert module.__name__ == f"fathom_eval.{name}", module
        print(module.__file__)
        assert (importlib.util.find_spec(name) is None) == (before[name] is None), f"{name} became a package of its own"
"""


def imported_files(installed: Path) -> list[Path]:
    """The files that the four linked packages are imported from, in a process that sees one installed copy only."""
    libraries = sysconfig.get_path("purelib")
    program = textwrap.dedent(IMPORT_FROM_INSTALLED)
    return [Path(line) for line in succeed([sys.executable, "-I", "-S", "-c", program, installed, libraries], cwd=installed).splitlines()]


def install(wheel: Path, target: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check"]
    succeed([*pip, "--target", target, wheel], cwd=target.parent)
    return target


def test_installed_wheel_imports_under_one_name(wheel: Path, tmp_path: Path) -> None:
    site = install(wheel, tmp_path / "site")
    assert {entry.name.split("-")[0] for entry in site.iterdir()} == {"fathom_eval", "bin"}
    assert imported_files(site) == [site / "fathom_eval" / name / "__init__.py" for name in LINKED]


def test_editable_install_imports_alike(source: Path, tmp_path: Path) -> None:
    program = "import sys; from setuptools import build_meta; print(build_meta.build_editable(sys.argv[1]))"
    wheel = tmp_path / succeed([sys.executable, "-c", program, tmp_path], cwd=source).splitlines()[-1]
    site = install(wheel, tmp_path / "site")
    assert imported_files(site) == [source / "fathom_eval" / name / "__init__.py" for name in LINKED]


def test_runs_as_a_module_from_the_repository_root() -> None:
    from fathom_eval import __version__

    assert succeed([sys.executable, "-m", "fathom_eval", "--version"], cwd=REPOSITORY) == f"fathom-eval {__version__}\n"


# transformers looks for the Hugging Face package `kernels` and takes the folder of that name where the repository root is on sys.path.


def test_the_kernels_folder_does_not_pass_for_the_package_of_that_name() -> None:
    program = """
        import kernels
        from packaging.version import Version
        from transformers.utils import is_kernels_available

        # Older releases of transformers compare this without asking whether it is a version.
        assert Version(kernels.__version__) < Version("0.1"), kernels.__version__
        assert not is_kernels_available()
    """
    succeed([sys.executable, "-c", textwrap.dedent(program)], cwd=REPOSITORY)


def test_the_package_named_kernels_is_found_when_running_as_a_module(tmp_path: Path) -> None:
    (tmp_path / "kernels.py").write_text("", encoding="utf-8")
    program = """
        import runpy, sys

        sys.argv = ["fathom-eval"]
        try:
            runpy.run_module("fathom_eval", run_name="__main__")
        except SystemExit as end:
            assert not end.code, end.code
        import kernels

        print(kernels.__file__, file=sys.stderr)
    """
    done = run([sys.executable, "-c", textwrap.dedent(program)], REPOSITORY, {"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == str(tmp_path / "kernels.py")


def make_torch_wheel(folder: Path, version: str) -> None:
    """A package named torch that holds nothing, for a package index in a folder."""
    information = f"torch-{version}.dist-info"
    with zipfile.ZipFile(folder / f"torch-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{information}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
        archive.writestr(f"{information}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{information}/RECORD", "")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with what the set-up script reads."""
    checkout = tmp_path / "checkout"
    (checkout / ".ci").mkdir(parents=True)
    shutil.copy(REPOSITORY / ".ci" / "install", checkout / ".ci" / "install")
    shutil.copy(REPOSITORY / "pyproject.toml", checkout / "pyproject.toml")
    return checkout


@pytest.fixture(scope="module")
def new_environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with pip alone, to be copied."""
    environment = tmp_path_factory.mktemp("environment") / ".venv"
    succeed([sys.executable, "-m", "venv", environment], cwd=environment.parent)
    return environment


@pytest.fixture
def checkout_with_pip(checkout: Path, new_environment: Path) -> Path:
    shutil.copytree(new_environment, checkout / ".venv", symlinks=True)
    return checkout


def installed_torch(checkout: Path, offered: Sequence[str], environment: Mapping[str, str]) -> tuple[str, str]:
    """The release of torch that .ci/install takes from an index offering these, and what it says about it.

    The index holds nothing else, so that set-up ends after torch.
    """
    index = checkout.parent / "index"
    index.mkdir()
    for version in offered:
        make_torch_wheel(index, version)
    index_only = {"PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index), "PIP_EXTRA_INDEX_URL": ""}
    choice = {"PYTHON": "", "TORCH": "", "TORCH_INDEX": ""}
    done = run([checkout / ".ci" / "install"], checkout, {**index_only, **choice, **environment})
    assert done.returncode == 2, done.stderr
    assert "pip could not install: --editable" in done.stderr
    found = "import importlib.metadata as metadata; print(metadata.version('torch'))"
    return succeed([checkout / ".venv" / "bin" / "python", "-c", found], cwd=checkout).strip(), done.stdout


has_nvidia_device = any(Path("/dev").glob("nvidia[0-9]*")) or shutil.which("nvidia-smi") is not None
without_nvidia_device = pytest.mark.skipif(has_nvidia_device, reason="needs a machine without an NVIDIA device")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("offered", "taken", "said"),
    [
        (["2.12.0+cpu", "2.9.1+cpu", "2.13.0", "99.0+cpu"], "2.12.0+cpu", "CPU build 2.12.0+cpu"),
        (["2.12.0", "99.0+cpu"], "2.12.0", "no CPU build"),
    ],
    ids=["offered", "not-offered"],
)
@without_nvidia_device
def test_set_up_takes_the_cpu_build_of_torch_without_a_device(checkout_with_pip: Path, offered: list[str], taken: str, said: str) -> None:
    version, output = installed_torch(checkout_with_pip, offered, {})
    assert version == taken
    assert said in output


@pytest.mark.slow
def test_set_up_leaves_the_cpu_build_of_torch_alone_with_a_device(checkout_with_pip: Path) -> None:
    tools = checkout_with_pip.parent / "tools"
    tools.mkdir()
    (tools / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: one (UUID: GPU-0)'\n", encoding="utf-8")
    (tools / "nvidia-smi").chmod(0o755)
    version, output = installed_torch(checkout_with_pip, ["2.13.0+cpu", "2.13.0", "2.12.0"], {"PATH": f"{tools}:{os.environ['PATH']}"})
    assert version == "2.13.0"
    assert "NVIDIA device seen" in output


@pytest.mark.slow
def test_set_up_takes_the_torch_that_was_asked_for(checkout_with_pip: Path) -> None:
    version, output = installed_torch(checkout_with_pip, ["2.13.0+cpu", "2.13.0", "2.12.0"], {"TORCH": "torch==2.12.0"})
    assert version == "2.12.0"
    assert "as asked: torch==2.12.0" in output


def test_set_up_refuses_an_unsuitable_python_in_one_line(checkout: Path) -> None:
    done = run([checkout / ".ci" / "install"], checkout, {"PYTHON": "python-that-is-not-there"})
    assert done.returncode == 2
    assert done.stderr == "error: PYTHON=python-that-is-not-there is no Python 3.11 to 3.14 that runs here\n"
    assert not (checkout / ".venv").exists()
