"""What may import what: one direction, no torch below the registry, nothing heavy at import."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from relu2ir.ir.primitives import PRIMITIVES

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "relu2ir"

# The drawing of ARCHITECTURE.md: a module imports from its own layer and those below. Longest prefix counts.
LAYERS = {
    "errors": 0, "platforms": 0,
    "ir": 1,
    "spec": 2, "names": 2, "schema": 2, "specfile": 2, "yamltree": 2, "layout": 2, "binaries": 2, "packaged": 2,
    "specexpr": 2, "overrides": 3, "registry": 3, "saving": 3, "guards": 3, "inplace": 3, "oracle": 3, "operands": 3,
    "providers": 4,
    "fastguard": 5, "eager": 5, "counting": 5, "front": 5, "library": 5, "compilecache": 5, "nn": 5,
    "fx": 6,
    "codegen": 7, "building": 7, "inductor": 7, "testing": 7, "check": 7, "demo": 7, "__main__": 7, "": 7,
}  # fmt: skip
WITHOUT_TORCH = 2  # the highest layer that needs no torch
# The only parts of the pass that know providers: lowering chooses, the backend lowers, a report says what was chosen.
CHOOSERS = ("fx.lower", "fx.backend", "fx.report")
# The files of one provider; no provider imports another.
PROVIDER_FILES = {"triton_loops": "triton", "triton_math": "triton"}


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name below it; the package itself is ``""``."""
    names = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def imports(path: Path) -> set[str]:
    """The modules of the package that ``path`` imports, wherever it does, type checking included."""
    found, known = set(), {*modules(), "_C"}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write the import out, from relu2ir..."
            # `from relu2ir.ir import expr` imports the module relu2ir.ir.expr, `... import Expr` only relu2ir.ir.
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name.removeprefix("relu2ir.") in known else str(node.module) for name in names]
        else:
            continue
        found |= {name.removeprefix("relu2ir").lstrip(".") for name in names if name.split(".")[0] == "relu2ir"}
    return found - {"_C"}


def layer(module: str) -> int:
    prefix = module
    while prefix not in LAYERS:
        prefix = prefix.rpartition(".")[0]
    return LAYERS[prefix]


def provider_of(module: str) -> str:
    name = module.removeprefix("providers.")
    return PROVIDER_FILES.get(name, name)


def test_every_module_has_a_layer():
    top = {name.split(".")[0] for name in modules()}
    assert top <= set(LAYERS), f"give {sorted(top - set(LAYERS))} a layer here and in ARCHITECTURE.md"


@pytest.mark.parametrize("module", [name for name in modules() if name != ""])
def test_imports_go_one_way(module):
    upward = {other for other in imports(modules()[module]) if layer(other) > layer(module)}
    assert not upward, f"{module} (layer {layer(module)}) imports {upward}"


def test_no_two_modules_import_each_other():
    edges = {module: imports(path) for module, path in modules().items()}
    done: set[str] = set()
    while rest := {module: edges[module] - done - {module} for module in edges if module not in done}:
        free = {module for module, needs in rest.items() if not needs}
        assert free, f"a cycle among {sorted(rest)}"
        done |= free


def test_no_provider_imports_another():
    for module, path in modules().items():
        if module.startswith("providers."):
            others = {name for name in imports(path) if name.startswith("providers.")}
            assert {provider_of(name) for name in others} <= {provider_of(module)}


@pytest.mark.parametrize("module", [name for name in modules() if name.startswith("fx.") and name not in CHOOSERS])
def test_what_raises_a_graph_never_sees_a_provider(module):
    assert not {name for name in imports(modules()[module]) if name in ("registry", "eager") or layer(name) == 4}


BLOCKER = """
import importlib.abc, sys, types
class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in blocked or name in blocked:
            raise ModuleNotFoundError(f"No module named {name!r} (blocked)", name=name)
def block(*names):
    blocked.update(names)
    sys.meta_path.insert(0, Blocked())
blocked = set()
"""
BARE_PACKAGE = f"""
package = types.ModuleType("relu2ir")
package.__path__ = [{str(PACKAGE)!r}]
sys.modules["relu2ir"] = package
"""


def run(program: str) -> str:
    """What ``program`` prints in a fresh interpreter that sees this checkout."""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", BLOCKER + program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_lower_layers_templates_and_codegen_need_no_torch():
    lower = [module for module in modules() if module and layer(module) <= WITHOUT_TORCH]
    tables = [f"providers.{provider}" for provider in ("native", "triton", "compiled")]
    names = [f"relu2ir.{module}" for module in [*lower, *tables, "codegen", "building"]]
    assert (
        run(f"""
block("torch", "triton", "numpy")
{BARE_PACKAGE}
import importlib
for name in {names!r}:
    importlib.import_module(name)
from relu2ir.specfile import read
print(read("ops.yaml").ops[0].backward.formula)
""")
        == "relu_squared_backward(grad, x) = where(x <= 0, 0, grad * (2 * relu(x)))"
    )


def test_the_import_works_without_triton_and_without_the_extension():
    assert (
        run("""
block("triton", "relu2ir._C")
import torch, relu2ir
x = torch.tensor([-1.0, 3.0, float("nan")])
print(relu2ir.ops.relu_squared(x).tolist(), relu2ir.explain("relu_squared", x).chosen)
""")
        == "[0.0, 9.0, nan] native"
    )


def test_the_import_loads_nothing_heavy_that_torch_does_not():
    loaded = run("""
import torch
before = set(sys.modules)
import relu2ir
print(*set(sys.modules) - before)
""").split()
    heavy = ("triton", "sympy", "numpy", "transformers", "torch._dynamo", "torch._inductor", "relu2ir.testing")
    assert "relu2ir.registry" in loaded
    assert [name for name in loaded if name.startswith(heavy)] == []


@pytest.mark.parametrize("target", ["native", "triton", "compiled"])
def test_every_template_table_has_the_whole_vocabulary_and_nothing_else(target):
    module = __import__(f"relu2ir.providers.{target}", fromlist=["TEMPLATES"])
    # Kernels write a primitive that has a formula by it; plain PyTorch calls its own function.
    by_formula = {name for name, row in PRIMITIVES.items() if row.formula and target != "native"}
    if target == "compiled":  # of sigmoid half types need fewer digits than its formula gives
        by_formula -= {"sigmoid"}
    assert set(module.TEMPLATES) == set(PRIMITIVES) - by_formula


def test_every_primitive_has_a_spelling_in_graphs():
    from relu2ir.fx import spellings

    assert set(PRIMITIVES) == set(spellings.ROWS)


def test_no_file_is_long():
    assert {
        name: lines for name, path in modules().items() if (lines := len(path.read_text().splitlines())) > 320
    } == {}
