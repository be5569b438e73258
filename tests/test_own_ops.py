"""Users' own ops and providers: those that packages bring along, ``relu2ir check``, cells in a suite of their own."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import relu2ir
from relu2ir import check, library, packaged, registry, testing
from relu2ir.__main__ import main
from relu2ir.errors import SpecError
from relu2ir.registry import Provider

ROOT = Path(__file__).parents[1]
NATIVE = registry.PROVIDERS["native"]


def install(folder, distribution, group, value, **files):
    """A distribution of one package, which must not be imported, with one entry point; ``files`` by their stem."""
    package = folder / distribution
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    for stem, text in files.items():
        (package / f"{stem}.yaml").write_bytes(text.encode(errors="surrogateescape"))
    info = folder / f"{distribution}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\nmine = {value}\n")


def ops(namespace, expr="relu(x)", name="f"):
    return f"namespace: {namespace}\nops:\n  {name}: {{inputs: [x], expr: {expr}}}\n"


def python(folder, *arguments, **env):
    """A fresh process in ``folder``, whose distributions are installed for it."""
    paths = os.pathsep.join([str(folder), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | env
    return subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True)


# ** ops that packages bring along **


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of distributions, as installed in this process."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(packaged, "rejected", {})
    registry._third_parties.cache_clear()
    yield tmp_path
    registry._third_parties.cache_clear()


def rejection(site, capsys):
    """The one warning of loading what is installed in ``site``, which `explain` tells too."""
    with pytest.warns(RuntimeWarning) as caught:
        relu2ir._load_packaged()
    (message,) = [str(warning.message) for warning in caught]
    assert main(["explain"]) == 0
    ((entry, reason),) = packaged.rejected.items()
    assert (
        f"\nspec files of packages that are not loaded\n  {entry}: {reason.splitlines()[0]}\n"
        in capsys.readouterr().out
    )
    assert message == f"the ops of {entry} are not loaded: {reason}"
    return message.replace(str(site), "SITE")


@pytest.mark.parametrize("value", ["brought:ops.yaml", "brought.specs:ops.yaml"])
def test_the_ops_of_a_package_are_there_without_its_import(site, value):
    name = value.partition(":")[0].replace(".", "_")
    install(site, "brought", packaged.GROUP, value)
    folder = site / value.partition(":")[0].replace(".", "/")
    folder.mkdir(exist_ok=True)
    (folder / "ops.yaml").write_text(ops(name))
    relu2ir._load_packaged()
    assert getattr(relu2ir.ops, name).f(torch.tensor([-1.0, 2.0])).tolist() == [0.0, 2.0]
    assert library.find(f"{name}::f").file == str(folder / "ops.yaml")
    assert packaged.rejected == {} and "brought" not in sys.modules


@pytest.mark.parametrize(
    ("value", "text", "message"),
    [
        ("none_such:ops.yaml", "", "SpecError: none_such:ops.yaml: there is no package 'none_such'; the entry point of "
                                   "broken must be package:file.yaml at $"),
        ("json.tool:ops.yaml", "", "there is no file "),
        ("yaml_of_nothing", "", "there is no package 'yaml_of_nothing'"),
        ("broken:other.yaml", "", "there is no file SITE/broken/other.yaml; the entry point of broken must be"),
        ("broken:ops.yaml", ops("broken", "rleu(x)"), "SpecError: SITE/broken/ops.yaml:3:26: cannot read expr of op "
         "'f' at $.ops.f.expr\n    rleu(x)\n    ^^^^ unknown primitive 'rleu'; did you mean 'relu'?"),
        ("broken:ops.yaml", ops("relu2ir", "relu(x)", "silu"), "SITE/broken/ops.yaml: op 'relu2ir::silu' is already "
         f"declared in {ROOT}/ops.yaml as silu(x) = silu(x); choose another name or 'namespace'"),
        ("broken:ops.yaml", "platforms: {cpu: [fastest, native]}", "ProviderError: unknown provider 'fastest' in "
         "SITE/broken/ops.yaml: platforms.cpu"),
        ("broken:ops.yaml", "\udcff", "SpecError: SITE/broken/ops.yaml: cannot read the spec file: it is not UTF-8"),
    ],
)  # fmt: skip
def test_a_package_whose_ops_do_not_load_is_told_and_breaks_nothing(site, capsys, value, text, message):
    install(site, "broken", packaged.GROUP, value, **({"ops": text} if text else {}))
    told = rejection(site, capsys)
    assert told.startswith(f"the ops of broken ({value}) are not loaded: ")
    assert message in told


def test_a_broken_package_leaves_the_import_and_the_others_alone(tmp_path):
    install(tmp_path, "a_broken", packaged.GROUP, "a_broken:ops.yaml", ops="ops: [")
    install(tmp_path, "b_right", packaged.GROUP, "b_right:ops.yaml", ops=ops("right"))
    install(tmp_path, "c_other", packaged.GROUP, "c_other:ops.yaml", ops=ops("right", "silu(x)"))
    (tmp_path / "mine.yaml").write_text(ops("right"))
    code = "import relu2ir, torch; print(relu2ir.ops.right.f(torch.tensor([-1.0, 2.0])).tolist())"
    result = python(tmp_path, "-c", code, RELU2IR_OPS="mine.yaml")
    assert (result.returncode, result.stdout) == (0, "[0.0, 2.0]\n")
    assert result.stderr.count("RuntimeWarning") == 2
    assert f"a_broken (a_broken:ops.yaml) are not loaded: SpecError: {tmp_path}/a_broken/ops.yaml:1:7: not YAML" in (
        result.stderr
    )
    assert (
        f"SpecError: {tmp_path}/c_other/ops.yaml: op 'right::f' is already declared in {tmp_path}/b_right/ops.yaml"
        in (result.stderr)
    )
    (tmp_path / "mine.yaml").write_text(ops("right", "gelu(x)"))
    result = python(tmp_path, "-c", code, RELU2IR_OPS="mine.yaml")
    assert result.returncode == 1
    assert (
        f"SpecError: mine.yaml: op 'right::f' is already declared in {tmp_path}/b_right/ops.yaml as f(x) = relu(x)"
        in (result.stderr)
    )


def test_two_files_that_declare_an_op_differently_are_both_named(tmp_path):
    first, second, same = (tmp_path / name for name in ("first.yaml", "second.yaml", "same.yaml"))
    first.write_text(ops("twice"))
    second.write_text(ops("twice", "silu(x)"))
    same.write_text(ops("twice"))
    assert len(relu2ir.load(first)) == 1
    assert relu2ir.load(same) == []
    with pytest.raises(SpecError) as caught:
        relu2ir.load(second)
    assert str(caught.value) == (
        f"{second}: op 'twice::f' is already declared in {first} as f(x) = relu(x); choose another name or 'namespace' "
        "at $.ops.f"
    )


# ** relu2ir check **

MINE = ops("checked", "relu(x) + relu(x)", "doubled") + "  gate: {inputs: [x, y], expr: relu(x) * y}\n"
WRONG = Provider(
    "wrong", lambda: None, lambda spec, tensors: None, plain=True,
    lower=lambda spec: lambda *args: NATIVE.lower(spec)(*args) * (1.5 if spec.name == "gate" else 1.0),
)  # fmt: skip
RAISING = replace(WRONG, name="raising", lower=lambda spec: lambda *args: 1 / 0)
ABSENT = replace(WRONG, name="absent", missing=lambda: "it is not here")


@pytest.fixture
def checked(tmp_path, monkeypatch, capsys):
    """`relu2ir check` of `MINE` with native and these providers, in float32 alone: its exit status and its output."""
    monkeypatch.setattr(testing, "DTYPES", (torch.float32,))
    monkeypatch.setattr(testing, "device_of", lambda platform: torch.device("cpu") if platform == "cpu" else None)
    monkeypatch.chdir(tmp_path)

    def run(*providers, text=MINE):
        monkeypatch.setattr(registry, "PROVIDERS", {p.name: p for p in (*providers, NATIVE)})
        Path("mine.yaml").write_text(text)
        status = main(["check", "mine.yaml"])
        out, err = capsys.readouterr()
        return status, out, err

    return run


def test_check_prints_a_row_for_every_op_and_provider(checked):
    assert checked(ABSENT, replace(WRONG, name="right", lower=NATIVE.lower)) == (
        0,
        "op                provider  platform  passed  failed  skipped  max ulp\n"
        "checked::doubled  absent    cpu            0       0        2        -  it is not here\n"
        "                  right     cpu            2       0        0        0\n"
        "                  native    cpu            2       0        0        0\n"
        "checked::gate     absent    cpu            0       0        2        -  it is not here\n"
        "                  right     cpu            2       0        0      0.5\n"
        "                  native    cpu            2       0        0      0.5\n"
        "\n"
        "mine.yaml: 8 cells passed\n",
        "",
    )


def test_check_says_when_no_kernel_was_checked(checked):
    status, out, _ = checked(ABSENT)
    assert status == 0
    assert out.endswith(
        "mine.yaml: 4 cells passed\nOnly plain PyTorch (native) could run here: no kernel was checked.\n"
    )


def test_check_catches_a_wrong_provider(checked):
    status, out, _ = checked(WRONG)
    assert status == 1
    assert "checked::doubled  wrong     cpu            2       0        0        0\n" in out
    # Half the value, of up to 2**24 ulp.
    assert "checked::gate     wrong     cpu            0       2        0  8.39e+06\n" in out
    assert re.search(r"\ncpu-wrong-checked\.gate-float32-forward: \d+ wrong\n", out)
    assert re.search(r"\n  contiguous \(x, y\): out\[0, \d+\] is \S+, expected \S+ \(\d+ of 180 are wrong\)\n", out)
    assert re.search(r"\n  \.\.\. and \d+ lines more\n", out)
    assert out.endswith("\nmine.yaml: 2 of 8 cells are wrong\n")


def test_a_provider_that_raises_fails_its_cells_and_no_others(checked):
    status, out, _ = checked(RAISING)
    assert status == 1
    assert "checked::doubled  raising   cpu            0       2        0        -\n" in out
    assert "                  native    cpu            2       0        0        0\n" in out
    assert "\ncpu-raising-checked.gate-float32-gradient: ZeroDivisionError: division by zero\n" in out


def test_check_of_a_file_without_ops_has_nothing_to_run(checked):
    status, out, _ = checked(text="platforms: {cpu: [native]}")
    assert (status, out.splitlines()[-1]) == (0, "mine.yaml: 0 cells passed")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ops: {f: {inputs: [x], expr: rleu(x)}}", "SpecError: mine.yaml:1:30: cannot read expr of op 'f'"),
        ("ops: [", "SpecError: mine.yaml:1:7: not YAML"),
        ("platforms: {cpu: [fastest, native]}", "ProviderError: unknown provider 'fastest'"),
        (ops("relu2ir", "relu(x)", "silu"), "SpecError: mine.yaml: op 'relu2ir::silu' is already declared in"),
    ],
)
def test_check_of_a_file_that_cannot_be_loaded_exits_with_2(checked, text, message):
    status, out, err = checked(text=text)
    assert (status, out) == (2, "")
    assert err.startswith(message)


def test_on_a_terminal_a_bar_says_which_cell_runs(checked, monkeypatch):
    cells = testing.cells(["silu"], ["native"], ["cpu"])
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "60")
    _, _, err = checked(text=ops("bar"))
    first, second, cleared = err.split("\r\x1b[2K")[1:]
    assert len(cells) == 2
    assert first == "[                        ] 0/2 cpu-native-bar.f-float32-for"
    assert second == "[############            ] 1/2 cpu-native-bar.f-float32-gra"
    assert cleared == ""


def test_the_largest_error_is_that_of_the_results():
    cell = testing.Cell("cpu", "native", "relu2ir::silu", torch.float32, "forward")
    assert 0.5 < check.largest_error(cell) < 4
    assert check.largest_error(replace(cell, dtype=torch.float16)) < 1


# ** cells in a suite of one's own **

LINES = re.findall(r"(?:    .+\n)+", testing.__doc__)


def suite(folder, lines, *arguments):
    """The lines of the docstring as the only test file of an empty folder, run there."""
    (folder / "test_mine.py").write_text(re.sub("^    ", "", lines, flags=re.M))
    return python(folder, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments)


def test_three_lines_check_an_op_of_ones_own(tmp_path):
    (tmp_path / "my_ops.yaml").write_text(ops("mine", name="gated"))
    result = suite(tmp_path, LINES[0], "-k", "cpu and float32")
    assert LINES[0].count("\n") == 3
    assert re.search(r"^[2-6] passed, \d+ skipped, \d+ deselected", result.stdout, re.M), result.stdout


@pytest.mark.parametrize(("factor", "summary"), [("1.0", "3 passed"), ("1.01", "3 failed")])
def test_three_lines_check_a_provider_of_ones_own(tmp_path, factor, summary):
    install(tmp_path, "provided", "relu2ir.providers", "provided:PROVIDER")
    (tmp_path / "provided" / "__init__.py").write_text(
        "from relu2ir.providers.native import lower\n"
        "from relu2ir.registry import Provider\n\n"
        "PROVIDER = Provider('mine', missing=lambda: None, refuses=lambda spec, tensors: None, plain=True,\n"
        f"                    lower=lambda spec: lambda *args: {factor} * lower(spec)(*args))\n"
    )
    result = suite(tmp_path, LINES[1], "-k", "cpu and ir.relu_squared-float32")
    assert LINES[1].count("\n") == 3
    assert re.search(rf"^{summary}, \d+ deselected", result.stdout, re.M), result.stdout


def test_an_entry_point_s_provider_is_checked_and_explained(tmp_path):
    install(tmp_path, "provided", "relu2ir.providers", "provided:PROVIDER")
    (tmp_path / "mine.yaml").write_text(ops("mine"))
    result = python(tmp_path, "-m", "relu2ir", "explain")
    assert "  mine    its entry point 'provided:PROVIDER' does not load: RuntimeError: imported\n" in result.stdout
