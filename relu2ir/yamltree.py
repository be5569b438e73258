"""YAML text as nodes that know their place, with every problem collected instead of raised. Needs no torch.

The text is composed, never constructed, by PyYAML's safe loader: duplicate keys are still visible, no tag builds
anything, and each value is read as the one type that its key allows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import yaml

from relu2ir.errors import Problem, suggestion


class YamlTree:
    """One YAML document and what is wrong with it. ``where`` in its methods is a path such as ``$.ops.relu.expr``."""

    def __init__(self, path: str, text: str) -> None:
        self.path, self.text = path, text
        self.problems: list[Problem] = []

    def problem(
        self, node: yaml.Node, where: str, message: str, offset: int = 0, excerpt: str = "", relation: bool = False
    ) -> None:
        mark, column = node.start_mark, node.start_mark.column + 1 + offset
        self.problems.append(Problem(self.path, mark.line + 1, column, message, where, excerpt, relation))

    def root(self) -> yaml.Node | None:
        """The document's root node, or None after noting why there is none."""
        line, column, message = 0, 0, "the file is empty; declare an op under 'ops'"
        try:
            node = yaml.compose(self.text, Loader=yaml.SafeLoader)
            if node is not None:
                return node
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            line, column = (mark.line + 1, mark.column + 1) if mark else (0, 0)
            message = f"not YAML: {error.problem or error.context}"
        except RecursionError:
            message = "the file nests too deeply to be a spec; an op has three levels"
        except Exception as error:  # PyYAML's scanner lets others through: OverflowError on "\U99999999"
            message = f"not YAML: {str(error).splitlines()[0]}"
        self.problems.append(Problem(self.path, line, column, message))
        return None

    def entries(self, node: yaml.Node, where: str, what: str) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
        """The (key, key node, value node) of a mapping; a duplicate or odd key is a problem and left out."""
        if not isinstance(node, yaml.MappingNode):
            return self.problem(node, where, f"{what} must be a mapping")
        seen: dict[str, int] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                self.problem(key, where, f"a key of {what} must be a name")
            elif key.value in seen:
                first = f"first on line {seen[key.value]}"
                self.problem(key, f"{where}.{key.value}", f"duplicate key '{key.value}', {first}")
            else:
                seen[key.value] = key.start_mark.line + 1
                yield key.value, key, value

    def fields(self, node: yaml.Node, where: str, what: str, valid: tuple[str, ...]) -> dict[str, yaml.Node]:
        """The values of a mapping with a closed set of keys."""
        found = {}
        for name, key, value in self.entries(node, where, what):
            if name in valid:
                found[name] = value
            else:
                self.problem(key, f"{where}.{name}", f"unknown key '{name}'{suggestion(name, valid)}")
        return found

    def names(self, node: yaml.Node, where: str, what: str) -> list[tuple[str, yaml.Node]]:
        """The items of a list of names."""
        items = node.value if isinstance(node, yaml.SequenceNode) else [node]
        if isinstance(node, yaml.SequenceNode) and all(isinstance(item, yaml.ScalarNode) for item in items):
            return [(self.string(item, where, f"a name in {what}"), item) for item in items]
        self.problem(node, where, f"{what} must be a list of names, such as [x, y]")
        return []

    def string(self, node: yaml.Node, where: str, what: str) -> str:
        if isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:str":
            return node.value
        hint = f"; put {node.value} in quotes" if isinstance(node, yaml.ScalarNode) and node.value else ""
        self.problem(node, where, f"{what} must be text{hint}")
        return ""

    def number(self, node: yaml.Node, where: str, what: str) -> float:
        # By float(), not by YAML's tag: YAML 1.1 calls 1e-3 text and 1:30 the number 90. float() reads any script's
        # digits, and 1_0 as 10: neither is a number here.
        written = node.value if isinstance(node, yaml.ScalarNode) and node.style is None else ""
        try:
            value = float(written) if written.isascii() and "_" not in written else math.nan
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            self.problem(node, where, f"{what} must be a finite number")
        return value
