"""Packaging: from the source distribution to a wheel, into a fresh environment, and away from the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
from requirements import tool

ROOT = Path(__file__).parent.parent
IGNORED = shutil.ignore_patterns(".git", ".venv", "build", "dist", "*.so", "*.egg-info", "__pycache__", ".*_cache")

# Runs in the fresh environment: the op on the provider named, its gradient, and where the package came from.
CHECK = """
import sys, torch, relu2ir
x = torch.linspace(-2, 2, 1001, requires_grad=True)
y = relu2ir.ops.relu_squared(x, provider=sys.argv[1])
y.sum().backward()
assert torch.equal(y, torch.square(torch.relu(x))) and torch.equal(x.grad, 2 * torch.relu(x))
print(relu2ir.__file__)
"""


def python(*args: str | Path, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """This interpreter in ``cwd``, with none of this process's build settings."""
    names = ("RELU2IR_BUILD", "CXX", "CUDA_HOME", "ROCM_PATH", "PYTHONPATH", "TORCH_CUDA_ARCH_LIST")
    kept = {name: value for name, value in os.environ.items() if name not in names}
    return subprocess.run(
        [sys.executable, *args], cwd=cwd, env=kept | environment, capture_output=True, text=True, timeout=300
    )


def build(what: str, source: Path, into: Path, **environment: str) -> tuple[Path, str]:
    """The one file that the build backend makes of ``source``, and what it printed."""
    code = f"from setuptools import build_meta; build_meta.build_{what}({str(into)!r})"
    done = python("-c", code, cwd=source, **environment)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    (made,) = into.iterdir()
    return made, done.stdout + done.stderr


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, unpacked: all that follows is built from it alone."""
    folder = tmp_path_factory.mktemp("source")
    shutil.copytree(ROOT, folder / "checkout", ignore=IGNORED)
    (folder / "dist").mkdir()
    archive, _ = build("sdist", folder / "checkout", folder / "dist", RELU2IR_BUILD="none")
    with tarfile.open(archive) as tar:
        tar.extractall(folder / "unpacked", filter="data")
    (source,) = (folder / "unpacked").iterdir()
    return source


def test_the_source_distribution_is_complete(unpacked: Path) -> None:
    for name in ("ops.yaml", "csrc", "tests", "relu2ir", "benchmarks"):
        mine = [
            path for path in [ROOT / name, *(ROOT / name).rglob("*")] if path.suffix in (".yaml", ".py", ".h", ".cpp")
        ]
        missing = [str(path.relative_to(ROOT)) for path in mine if not (unpacked / path.relative_to(ROOT)).exists()]
        assert mine and missing == []


def test_ops_yaml_stands_once_in_the_sources(unpacked: Path) -> None:
    assert [path.parent for path in unpacked.rglob("ops.yaml")] == [unpacked]


@pytest.mark.needs("cxx")
def test_a_wheel_from_the_source_distribution_runs_away_from_the_checkout(unpacked: Path, tmp_path: Path) -> None:
    """Beside an nvcc that fails, as one does that does not know the host's compiler: the CPU kernels are built."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvcc").symlink_to(shutil.which("false") or "/bin/false")
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    wheel, printed = build("wheel", unpacked, tmp_path / "dist", PATH=path)
    assert "warning: relu2ir is built without GPU kernels" in printed and "nvcc" in printed
    assert wheel.name.endswith(f"-cp310-abi3-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}.whl")
    with zipfile.ZipFile(wheel) as files:
        assert {"relu2ir/_C.abi3.so", "relu2ir/ops.yaml"} <= set(files.namelist())
        assert files.read("relu2ir/ops.yaml") == (ROOT / "ops.yaml").read_bytes()
        assert {f"relu2ir/csrc/{path.name}" for path in (ROOT / "csrc").iterdir()} <= set(files.namelist())
    assert run_installed(wheel, tmp_path, "cpp").returncode == 0
    assert build_own_op(tmp_path) == "tensor([0., 6.])\n"


def build_own_op(folder: Path) -> str:
    """What an op of a user's file computes by `cpp`, compiled in an empty folder by the installed package."""
    empty, interpreter = folder / "empty", folder / "environment/bin/python"
    empty.mkdir()
    (empty / "my_ops.yaml").write_text("namespace: mine\nops: {threefold: {inputs: [x], expr: 3 * relu(x)}}\n")
    code = (
        "import relu2ir, torch; relu2ir.load('my_ops.yaml'); "
        "print(relu2ir.ops.mine.threefold(torch.tensor([-1.0, 2.0]), provider='cpp'))"
    )
    settings = os.environ | {"RELU2IR_CACHE": str(folder / "cache"), "RELU2IR_BUILD": "cpp"}
    for arguments in (["-m", "relu2ir", "build", "my_ops.yaml"], ["-c", code]):
        command = [interpreter, *arguments]
        done = subprocess.run(command, cwd=empty, env=settings, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
    assert [path.name for path in empty.iterdir()] == ["my_ops.yaml"]
    return done.stdout


def test_without_a_compiler_the_wheel_is_pure_and_says_so(unpacked: Path, tmp_path: Path) -> None:
    wheel, printed = build("wheel", unpacked, tmp_path / "dist", CXX="/nonexistent")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert "relu2ir is built without compiled kernels; '/nonexistent' compiles no extension" in printed
    assert run_installed(wheel, tmp_path, "native").returncode == 0
    refused = run_installed(wheel, tmp_path, "cpp").stderr
    assert "the extension was not built; run pip install . with a C++ compiler on PATH" in refused


def run_installed(wheel: Path, folder: Path, provider: str) -> subprocess.CompletedProcess[str]:
    """`CHECK` in a fresh environment that holds the wheel, and by a path file the packages of this one."""
    environment = folder / "environment"
    if not environment.exists():
        assert python("-m", "venv", "--without-pip", environment, cwd=folder).returncode == 0
        (packages,) = environment.glob("lib/python*/site-packages")
        with zipfile.ZipFile(wheel) as files:
            files.extractall(packages)  # what an installer does, but for the scripts
        # Packages in a folder that a path file names run no path files of their own: an editable relu2ir stays out.
        (packages / "torch.pth").write_text(str(Path(torch.__file__).parent.parent))
    done = subprocess.run(
        [environment / "bin/python", "-c", CHECK, provider], cwd=folder, capture_output=True, text=True, timeout=120
    )
    if done.returncode == 0:
        assert done.stdout.strip().startswith(str(environment))
    return done


@pytest.mark.needs("cxx")
def test_a_compiler_asked_for_by_name_must_be_there(tmp_path: Path) -> None:
    for name in ("as", "ld"):
        (tmp_path / name).symlink_to(shutil.which(name) or name)
    for choice, program in ("cuda", "nvcc"), ("hip", "hipcc"):
        done = python("setup.py", "--name", cwd=ROOT, RELU2IR_BUILD=choice, PATH=str(tmp_path), CXX=str(tool("cxx")))
        assert done.returncode != 0
        assert f"RELU2IR_BUILD={choice} cannot be built; {program} was not found: put it on PATH" in done.stderr


def test_an_unknown_choice_lists_the_known_ones() -> None:
    done = python("setup.py", "--name", cwd=ROOT, RELU2IR_BUILD="rocm")
    assert done.returncode != 0
    assert "unknown RELU2IR_BUILD='rocm'; use one of auto, cuda, hip, cpp, none" in done.stderr
