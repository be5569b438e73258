"""Reading a spec file: every entry verified, every problem reported at once with its place. Needs no torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import yaml

from relu2ir import names
from relu2ir.errors import Problem, SpecError, listed, suggestion
from relu2ir.ir.emit import used_names
from relu2ir.ir.expr import Expr
from relu2ir.platforms import PLATFORMS
from relu2ir.spec import GRAD, RESULT, Input, Layout, OpSpec, Output
from relu2ir.specexpr import Reads, read_expr
from relu2ir.yamltree import YamlTree

FILE_KEYS = ("namespace", "platforms", "ops")
OP_KEYS = ("doc", "source", "inputs", "params", "expr", "grad", "grad_from_output", "save", "tolerance")
REQUIRED_KEYS = ("inputs", "expr")
LAYOUTS = {
    "halves": "Two parts, the first and the second half of the last dimension.",
    "pairs": "Two parts, the first and the second of each pair in the last dimension.",
    "vector": "One element for each column, the same in every row: a bias.",
    "scalar": "One element for the whole op: a learned number.",
}
PACKED = tuple(layout.value for layout in Layout if layout.packed)
BROADCAST = tuple(layout.value for layout in Layout if layout.broadcast)
# The gradients that a file may declare, and what a backward may keep; the first is the default.
GRADIENTS = ("grad", "grad_from_output")
SAVES = ("input", "output")
DTYPES = ("float16", "bfloat16", "float32", "float64")
DEFAULT_NAMESPACE = "relu2ir"
MAX_SIZE = 200_000  # PyYAML reads about 100,000 characters a second
# The names that an expr may read: where each is declared, as a node and as a path.
_Scope = dict[str, tuple[yaml.Node, str]]


@dataclass(frozen=True)
class SpecFile:
    """What a file declares: its ops in order, and its ``platforms`` table (empty when it has none)."""

    path: str
    namespace: str
    platforms: Mapping[str, tuple[str, ...]]
    ops: tuple[OpSpec, ...]


def read(path: str | Path) -> SpecFile:
    """Read and verify the file at ``path``; SpecError with every problem found."""
    try:
        data = Path(path).read_bytes()
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise SpecError([Problem(str(path), 0, 0, f"cannot read the spec file: {error.strerror}")]) from None
    except UnicodeDecodeError:
        raise SpecError([Problem(str(path), 0, 0, "cannot read the spec file: it is not UTF-8 text")]) from None
    return read_text(text, str(path))


def read_text(text: str, path: str = "<text>") -> SpecFile:
    """Like `read`, from text; ``path`` only names it in messages."""
    if len(text) > MAX_SIZE:
        message = f"the file has {len(text):,} characters; a spec file may have {MAX_SIZE:,}"
        raise SpecError([Problem(path, 0, 0, message)])
    tree = YamlTree(path, text)
    root = tree.root()
    file = _file(tree, root) if root is not None else None
    if tree.problems or file is None:
        raise SpecError(tree.problems)
    return file


def _file(tree: YamlTree, root: yaml.Node) -> SpecFile:
    found = tree.fields(root, "$", "the file", FILE_KEYS)
    namespace = DEFAULT_NAMESPACE
    if "namespace" in found:
        namespace = tree.string(found["namespace"], "$.namespace", "namespace")
        _check_name(tree, found["namespace"], namespace, "$.namespace", "a namespace")
    platforms = _platforms(tree, found["platforms"]) if "platforms" in found else {}
    ops = []
    if "ops" in found:
        for name, key, node in tree.entries(found["ops"], "$.ops", "'ops'"):
            ops.append(_op(tree, namespace, name, key, node))
    elif not platforms and not tree.problems:
        tree.problem(root, "$", "the file declares nothing; add 'ops'")
    return SpecFile(tree.path, namespace, MappingProxyType(platforms), tuple(op for op in ops if op is not None))


def _platforms(tree: YamlTree, node: yaml.Node) -> dict[str, tuple[str, ...]]:
    table = {}
    for platform, key, value in tree.entries(node, "$.platforms", "'platforms'"):
        where = f"$.platforms.{platform}"
        if platform not in PLATFORMS:
            tree.problem(key, where, f"unknown platform '{platform}'{suggestion(platform, PLATFORMS)}")
        before = len(tree.problems)
        row = [name for name, _ in tree.names(value, where, f"the row of '{platform}'")]
        if len(tree.problems) == before and (row[-1:] != ["native"] or len(set(row)) < len(row)):
            message = f"the row of '{platform}' must name each provider once and end with 'native'"
            tree.problem(value, where, message, relation=True)
        table[platform] = tuple(row)
    return table


def _op(tree: YamlTree, namespace: str, name: str, key: yaml.Node, node: yaml.Node) -> OpSpec | None:
    where, before = f"$.ops.{name}", len(tree.problems)
    _check_name(tree, key, name, where, "an op")
    found = tree.fields(node, where, f"op '{name}'", OP_KEYS)
    for required in REQUIRED_KEYS:
        if required not in found and isinstance(node, yaml.MappingNode):
            tree.problem(key, where, f"op '{name}' has no '{required}'")
    declared, scope = len(tree.problems), _Scope()
    inputs = _inputs(tree, found["inputs"], f"{where}.inputs", scope) if "inputs" in found else []
    params = _params(tree, found["params"], f"{where}.params", scope) if "params" in found else {}
    # The names in an expr are judged once its inputs can be read: one mistake, one problem.
    readable = "inputs" in found and len(tree.problems) == declared
    parts = [part for input in inputs for part in input.parts]
    expr = None
    if "expr" in found:
        reads = Reads(tensors=parts, numbers=params) if readable else None
        expr = read_expr(tree, found["expr"], f"expr of op '{name}'", f"{where}.expr", reads)
        used = scope if expr is None or not readable else used_names([expr])
        for unused, (declared_at, path) in scope.items():
            if unused not in used:
                message = f"'{unused}' is declared in op '{name}' but its expr never uses it"
                tree.problem(declared_at, path, message, relation=True)
    gradients = {
        key: _gradient(tree, found[key], key, name, f"{where}.{key}", inputs, params if readable else None)
        for key in GRADIENTS
        if key in found
    }
    save = _save(tree, found, where) if "save" in found else SAVES[0]
    tolerance = _tolerance(tree, found["tolerance"], f"{where}.tolerance") if "tolerance" in found else {}
    doc, source = (tree.string(found[k], f"{where}.{k}", k) if k in found else "" for k in ("doc", "source"))
    if len(tree.problems) > before or expr is None:
        return None
    return OpSpec(
        namespace=namespace,
        name=name,
        inputs=tuple(inputs),
        outputs=(Output("out", Layout.plain, (expr,)),),
        params=MappingProxyType(params),
        doc=doc,
        source=source,
        tolerance=MappingProxyType(tolerance),
        grad=MappingProxyType(gradients.get("grad", {})),
        grad_from_output=MappingProxyType(gradients.get("grad_from_output", {})),
        save=save,
        file=tree.path,
    )


def _inputs(tree: YamlTree, node: yaml.Node, where: str, scope: _Scope) -> list[Input]:
    """``[x, y]``, or a mapping where layouts are needed: ``{x: {halves: [gate, up]}, y: , bias: vector}``."""
    if isinstance(node, yaml.SequenceNode):
        inputs = [Input(name, parts=(name,)) for name, item in tree.names(node, where, "'inputs'")]
        for input, item in zip(inputs, node.value, strict=False):
            _declare(tree, scope, input.name, item, f"{where}.{input.name}", "an input")
    else:
        inputs = []
        for name, key, value in tree.entries(node, where, "'inputs'"):
            inputs.append(_input(tree, name, key, value, f"{where}.{name}", scope))
        if inputs and inputs[0].layout.broadcast:
            message = "the first input gives the op its shape; put one that is not broadcast first"
            tree.problem(node, where, message, relation=True)
    if not inputs and not tree.problems:
        tree.problem(node, where, "an op needs at least one input")
    return inputs


def _input(tree: YamlTree, name: str, key: yaml.Node, node: yaml.Node, where: str, scope: _Scope) -> Input:
    if isinstance(node, yaml.ScalarNode):
        _declare(tree, scope, name, key, where, "an input")
        if node.tag == "tag:yaml.org,2002:null":
            return Input(name, parts=(name,))
        if node.value in BROADCAST:
            return Input(name, Layout(node.value), (name,))
        tree.problem(node, where, f"unknown layout '{node.value}' of input '{name}'{suggestion(node.value, BROADCAST)}")
        return Input(name, parts=(name,))
    _check_name(tree, key, name, where, "an input")
    found = tree.fields(node, where, f"input '{name}'", PACKED)
    if len(found) != 1:
        if isinstance(node, yaml.MappingNode) and len(node.value) != 1:
            tree.problem(node, where, f"input '{name}' must have one layout: {' or '.join(PACKED)}")
        return Input(name, parts=(name,))
    (layout, parts_node), parts = next(iter(found.items())), []
    for part, item in tree.names(parts_node, f"{where}.{layout}", f"'{layout}'"):
        _declare(tree, scope, part, item, f"{where}.{layout}", "a part")
        parts.append(part)
    if len(parts) != 2 and isinstance(parts_node, yaml.SequenceNode):
        tree.problem(parts_node, f"{where}.{layout}", f"'{layout}' names two parts; found {len(parts)}")
    return Input(name, Layout(layout), tuple(parts))


def _params(tree: YamlTree, node: yaml.Node, where: str, scope: _Scope) -> dict[str, float]:
    params = {}
    for name, key, value in tree.entries(node, where, "'params'"):
        _declare(tree, scope, name, key, f"{where}.{name}", "a param")
        params[name] = tree.number(value, f"{where}.{name}", f"the default of param '{name}'")
        if 0 < abs(params[name]) < sys.float_info.min:  # torch's schema parser: "IndexError: stod"
            tree.problem(value, f"{where}.{name}", f"the default of param '{name}' is subnormal; write 0")
    return params


def _gradient(
    tree: YamlTree,
    node: yaml.Node,
    key: str,
    op: str,
    where: str,
    inputs: Sequence[Input],
    params: Mapping[str, float] | None,
) -> dict[str, Expr]:
    """A declared gradient by scalar name: text for an op of one, a mapping for an op of several.

    ``params`` is None while the op's inputs or params cannot be read: then names are not judged.
    """
    parts = [part for input in inputs for part in input.parts]
    if key == "grad_from_output":
        packed = next((input.name for input in inputs if input.layout.packed), None)
        if packed is not None:
            message = f"'{packed}' holds two parts, whose gradients the result alone cannot tell; drop '{key}'"
            tree.problem(node, where, message, relation=True)
        parts_read: Sequence[str] = [RESULT]
        if RESULT in (params or {}):
            tree.problem(node, where, f"'{RESULT}' is the result in '{key}'; rename the param", relation=True)
    else:
        parts_read = parts
    reads = None if params is None else Reads(tensors=[GRAD, *parts_read], numbers=params)
    if isinstance(node, yaml.ScalarNode):
        if len(parts) > 1:
            message = f"'{key}' of op '{op}' must give each of {', '.join(parts)} its gradient, as a mapping"
            tree.problem(node, where, message, relation=True)
        found = {part: read_expr(tree, node, f"{key} of op '{op}'", where, reads) for part in parts[:1]}
    else:
        found = {}
        for part, name_node, value in tree.entries(node, where, f"'{key}'"):
            if params is not None and part not in parts:
                message = f"op '{op}' has no '{part}'{suggestion(part, parts)}"
                tree.problem(name_node, f"{where}.{part}", message, relation=True)
            found[part] = read_expr(tree, value, f"{key} of op '{op}'", f"{where}.{part}", reads)
        missing = [part for part in parts if part not in found]
        if params is not None and missing and isinstance(node, yaml.MappingNode):
            tree.problem(node, where, f"'{key}' of op '{op}' gives no gradient of {listed(missing)}", relation=True)
    return {part: expr for part, expr in found.items() if expr is not None}


def _save(tree: YamlTree, found: Mapping[str, yaml.Node], where: str) -> str:
    before = len(tree.problems)
    save = tree.string(found["save"], f"{where}.save", "save")
    if len(tree.problems) > before:
        return save
    if save not in SAVES:
        tree.problem(found["save"], f"{where}.save", f"unknown save '{save}'{suggestion(save, SAVES)}")
    elif save == "output" and "grad_from_output" not in found:
        message = "'save: output' needs 'grad_from_output', the gradient by y"
        tree.problem(found["save"], f"{where}.save", message, relation=True)
    return save


def _tolerance(tree: YamlTree, node: yaml.Node, where: str) -> dict[str, float]:
    found = tree.fields(node, where, "'tolerance'", DTYPES)
    tolerance = {}
    for dtype, at in found.items():
        tolerance[dtype] = tree.number(at, f"{where}.{dtype}", f"the tolerance of {dtype}")
        if tolerance[dtype] < 0:
            tree.problem(at, f"{where}.{dtype}", f"the tolerance of {dtype} must not be negative")
    return tolerance


def _declare(tree: YamlTree, scope: _Scope, name: str, node: yaml.Node, where: str, what: str) -> None:
    _check_name(tree, node, name, where, what)
    if name in scope:
        first = scope[name][0].start_mark.line + 1
        tree.problem(node, where, f"'{name}' is declared twice, first on line {first}", relation=True)
    scope.setdefault(name, (node, where))


def _check_name(tree: YamlTree, node: yaml.Node, name: str, where: str, kind: str) -> None:
    problem = names.problem(name, kind)
    if problem is not None:
        tree.problem(node, where, problem)
