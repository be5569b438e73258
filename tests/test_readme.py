"""The README is true: its examples run, its commands exist, its table of ops is that of ops.yaml. So is the drawing.

``python tests/test_readme.py`` writes that table anew.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from test_layers import PACKAGE, layer, modules

from relu2ir import specfile
from relu2ir.__main__ import _parser, main

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")
BEGIN = "<!-- ops: written from ops.yaml by `python tests/test_readme.py` -->\n"
END = "<!-- end of ops -->\n"

DOCTEST = """
import doctest, pathlib, sys
test = doctest.DocTestParser().get_doctest(pathlib.Path("examples.txt").read_text(), {}, "README.md", "README.md", 0)
runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
runner.run(test)
sys.exit(runner.failures or not runner.tries)
"""


def blocks(language: str) -> list[str]:
    """The fenced blocks of the README in ``language``."""
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.M | re.S)


def commands() -> list[tuple[str, str]]:
    """Each command of the README with the output that stands below it."""
    found = []
    for block in blocks("console"):
        for part in block.split("$ ")[1:]:
            line, _, output = part.partition("\n")
            found.append((line.partition("#")[0].strip(), output))
    return found


def arguments(command: str) -> list[str] | None:
    """The arguments of a ``relu2ir`` command, less the variables before it; None for another program."""
    words = [word for word in shlex.split(command) if not re.match(r"[A-Z0-9_]+=", word)]
    return words[1:] if words[0] == "relu2ir" else None


RELU2IR = [(command, args, output) for command, output in commands() if (args := arguments(command)) is not None]


def table() -> str:
    """The README's table of ops, from ops.yaml."""
    rows = ["| op | formula | inputs | rounding | source |", "|---|---|---|---|---|"]
    for spec in specfile.read(ROOT / "ops.yaml").ops:
        inputs, rounding = ", ".join(map(str, spec.inputs)), "exact" if spec.exact else "rounds_once"
        rows.append(f"| `{spec.name}` | `{spec.formula.partition(' = ')[2]}` | {inputs} | {rounding} | {spec.source} |")
    return "\n".join(["", *rows, "", ""])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files that the README shows, each named by its first line."""
    for block in [*blocks("yaml"), *blocks("python")]:
        name = re.match(r"# (\w+\.\w+)\n", block)
        if name:
            (tmp_path / name[1]).write_text(block, encoding="utf-8")
    assert {path.name for path in tmp_path.iterdir()} == {"mine.yaml", "my_model.py", "test_mine.py"}
    return tmp_path


def python(folder: Path, *args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """This interpreter in ``folder``, with warnings as errors and no variable of relu2ir but ``variables``."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RELU2IR_", "TRITON_"))}
    path = os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH")]))
    # torch's own import of Inductor warns about torch.jit.
    warnings = ["-W", "error", "-W", "ignore:`torch.jit:DeprecationWarning"]
    return subprocess.run(
        [sys.executable, *warnings, *args],
        cwd=folder, env=kept | {"PYTHONPATH": path} | variables, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def run_examples(folder: Path, texts: list[str]) -> None:
    (folder / "examples.txt").write_text("\n".join(texts), encoding="utf-8")
    result = python(folder, "-c", DOCTEST)
    assert result.returncode == 0, result.stdout + result.stderr


def examples(compiling: bool) -> list[str]:
    """The interactive python blocks, without those that compile unless ``compiling``."""
    found = [block for block in blocks("python") if block.startswith(">>>")]
    return [block for block in found if compiling or "torch.compile(" not in block]


def test_the_examples_print_what_the_readme_says(folder):
    run_examples(folder, examples(compiling=False))


@pytest.mark.needs("cxx")
def test_the_example_of_torch_compile_runs(folder):
    if "relu2ir" not in entry_points(group="torch_dynamo_backends").names:
        pytest.skip("relu2ir is not installed: torch finds the backend by the package's entry point")
    begin = ["import torch, relu2ir", "from my_model import MLP", "model = MLP()"]
    compiling = [block for block in examples(compiling=True) if "torch.compile(" in block]
    run_examples(folder, ["".join(f">>> {line}\n" for line in begin), *compiling])


def test_a_model_of_ones_own_is_fused_with_an_op_of_ones_own(folder):
    (command,) = [command for command, args, _ in RELU2IR if args[0] == "fuse"]
    variable, value = command.split()[0].split("=")
    result = python(folder, "-m", "relu2ir", *arguments(command), **{variable: value})
    assert result.returncode == 0, result.stdout + result.stderr
    assert "mine::gated_relu_squared" in result.stdout
    assert result.stdout.endswith("all equal\n")


def test_the_cells_of_an_op_of_ones_own_run_in_a_suite_of_ones_own(folder):
    result = python(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py")
    assert result.returncode == 0, result.stdout + result.stderr
    assert re.search(r"^\d+ passed, \d+ skipped", result.stdout, re.M), result.stdout


def test_every_target_of_make_exists():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    named = set(re.findall(r"\bmake ([a-z]+)\b", "\n".join([*re.findall(r"`(.+?)`", TEXT), *blocks("console")])))
    assert {"demo", "test"} <= named <= targets


@pytest.mark.parametrize(("command", "args"), [row[:2] for row in RELU2IR], ids=[row[0] for row in RELU2IR])
def test_every_command_of_relu2ir_exists(command, args):
    _parser().parse_args(args)


@pytest.mark.parametrize(("args", "output"), [row[1:] for row in RELU2IR if row[1][0] == "show"])
def test_show_prints_what_the_readme_says(args, output, capsys):
    assert main(args) == 0
    assert capsys.readouterr().out == output


def test_every_variable_is_one_that_is_read():
    sources = "".join(path.read_text() for path in [ROOT / "setup.py", *(ROOT / "relu2ir").rglob("*.py")])
    named = set(re.findall(r"\bRELU2IR_[A-Z]+\b", TEXT)) - {"RELU2IR_HD"}
    assert named == {
        "RELU2IR_PROVIDERS", "RELU2IR_PLATFORM", "RELU2IR_OPS", "RELU2IR_BUILD", "RELU2IR_CACHE",
    }  # fmt: skip
    assert [name for name in named if name not in sources] == []


def test_every_link_leads_somewhere():
    pages = [README, ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
    links = [(page.name, link) for page in pages for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text())]
    assert [(page, link) for page, link in links if not (ROOT / link).exists()] == []


def test_the_drawing_of_layers_is_the_one_that_is_tested():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    drawn, number = {}, 0
    for digit, names in re.findall(r"^(\d| )  ((?:[\w/]+\.py ?)+)  ", text, re.M):
        number = int(digit) if digit != " " else number
        drawn |= dict.fromkeys(names.split(), number)
    files = {name: path.relative_to(PACKAGE).as_posix() for name, path in modules().items()}
    assert drawn == {
        file: layer(name) for name, file in files.items() if name == "" or not file.endswith("__init__.py")
    }
    sources = {path.name for path in (ROOT / "csrc").iterdir()}
    assert sources == set(re.findall(r"\w+\.(?:h|cpp)", text.partition("csrc/\n")[2].partition("```")[0]))


def test_the_table_of_ops_is_that_of_ops_yaml():
    shown = TEXT.partition(BEGIN)[2].partition(END)[0]
    # An op that is new in ops.yaml may come into the README later; what the README says of one must be true.
    wrong = set(shown.splitlines()) - set(table().splitlines())
    assert not wrong, "the ops changed; write the table anew: python tests/test_readme.py"


if __name__ == "__main__":
    head, _, rest = TEXT.partition(BEGIN)
    README.write_text(head + BEGIN + table() + END + rest.partition(END)[2], encoding="utf-8")
