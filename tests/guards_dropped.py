"""Drop each guard of the pass by itself, and see whether random programs come out wrong.

``PYTHONPATH=.:tests python tests/guards_dropped.py [NAME ...]``: for each ``if`` of the modules below that ends in a
return, and for each alternative of a refusal and each part of a requirement, the condition is taken away (a refusal
never refuses, a requirement always holds) and a corpus of random programs is fused again. A guard is seen if one of
them then fails, or if sites are lost: without it the pass refuses more. What is not seen is printed, and makes the run
fail unless `UNSEEN` says why.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, ModuleType
from typing import Any

import torch
from graph_outcomes import Subject, quiet, subject
from random_graphs import Impossible, drawn

from relu2ir.fx import alias, between, check, match, packing, reading, shapes, spellings
from relu2ir.fx.report import FuseResult

MODULES: tuple[ModuleType, ...] = (check, match, shapes, between, packing, alias, reading, spellings)
CORPUS = {"with_values": 350, "symbolic_trace": 100, "dynamo": 100, "export": 20}
SEED = 1
UNSEEN: dict[str, str] = {}


@dataclass(frozen=True)
class Guard:
    """One condition in one function: ``at`` numbers the conditions of the module's text."""

    module: ModuleType
    function: str
    text: str
    at: int
    holds: bool  # what it is replaced by

    def __str__(self) -> str:
        name = self.module.__name__.rpartition(".")[2]
        return f"{name}.{self.function}: {self.text} -> {self.holds}"


class _Conditions(ast.NodeTransformer):
    """Numbers the conditions of a module; replaces the one that is ``dropped``."""

    def __init__(self, dropped: int = -1) -> None:
        self.dropped, self.names, self.found = dropped, list[str](), list[tuple[str, str, bool]]()
        self.kinds = list[type[ast.AST]]()
        self.refusing = False  # whether what is visited refuses where it holds

    def _condition(self, test: ast.expr, holds: bool) -> ast.expr:
        self.found.append((".".join(self.names), ast.unparse(test), holds))
        return ast.Constant(holds) if self.dropped == len(self.found) - 1 else test

    def _visited(self, node: Any, refusing: bool) -> Any:
        before, self.refusing = self.refusing, refusing
        try:
            return self.visit(node)
        finally:
            self.refusing = before

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.ClassDef) -> ast.AST:
        if ast.FunctionDef in self.kinds:  # inside another: none of these is a guard
            return node
        self.names.append(node.name)
        self.kinds.append(type(node))
        self.generic_visit(node)
        self.names.pop()
        self.kinds.pop()
        return node

    visit_ClassDef = visit_FunctionDef

    def visit_If(self, node: ast.If) -> ast.AST:
        last = node.body[-1]
        ends = isinstance(last, ast.Return | ast.Continue)
        parts = node.test.values if isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.Or) else []
        node.test = self._visited(node.test, refusing=ends and _refuses(last))
        if ends and not (parts and _refuses(last)):
            node.test = self._condition(node.test, False)
        node.body = [self.visit(each) for each in node.body]
        node.orelse = [self.visit(each) for each in node.orelse]
        return node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        node.operand = self._visited(node.operand, self.refusing != isinstance(node.op, ast.Not))
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        self.generic_visit(node)
        if ast.FunctionDef in self.kinds and self.refusing == isinstance(node.op, ast.Or):
            node.values = [self._condition(value, not self.refusing) for value in node.values]
        return node


def _refuses(last: ast.stmt) -> bool:
    """Whether a block that ends so says no: it goes on, or returns nothing, False or a Flaw."""
    if isinstance(last, ast.Return) and last.value is not None:
        return ast.unparse(last.value).startswith(("None", "False", "[]", "Flaw("))
    return True


def guards(module: ModuleType) -> list[Guard]:
    conditions = _Conditions()
    conditions.visit(ast.parse(inspect.getsource(module)))
    return [Guard(module, name, text, at, holds) for at, (name, text, holds) in enumerate(conditions.found)]


@contextmanager
def without(guard: Guard) -> Iterator[None]:
    """The pass with ``guard`` dropped: the function that holds it has other code."""
    tree = _Conditions(guard.at).visit(ast.parse(inspect.getsource(guard.module)))
    code = compile(ast.fix_missing_locations(tree), str(guard.module.__file__), "exec")
    function: Any = guard.module
    for name in guard.function.split("."):
        code = next(each for each in code.co_consts if isinstance(each, CodeType) and each.co_name == name)
        function = inspect.getattr_static(function, name)
    function = getattr(function, "func", getattr(function, "fget", function))  # a cached or a plain property
    before, function.__code__ = function.__code__, code
    try:
        yield
    finally:
        function.__code__ = before


def texts(results: list[FuseResult]) -> list[str]:
    return [str(result.module.graph) for result in results]


def corpus() -> list[tuple[Subject, list[str]]]:
    """The programs, captured and run unfused, each with its graphs as they are fused by the whole pass."""
    found, rng = [], random.Random(SEED)
    for capture, count in CORPUS.items():
        for _ in range(count):
            try:
                program = drawn(rng.randint, capture in ("dynamo", "export"), capture != "symbolic_trace", disturbed=20)
            except Impossible:
                continue
            unfused = subject(program, capture)
            if unfused is not None:
                found.append((unfused, texts(unfused.fused())))
    return found


def effect(programs: list[tuple[Subject, list[str]]]) -> str | None:
    """What a dropped guard does to the programs: the first failure, or that sites are lost; None if nothing."""
    lost = 0
    for number, (unfused, before) in enumerate(programs):
        try:
            results = unfused.fused()
            after = texts(results)
            how = None if after == before else unfused.difference(results)
        except Exception as error:  # a pass without a guard may do anything
            return f"program {number}: raises {type(error).__name__}: {error}"
        if how is not None:
            return f"program {number}: {' '.join(how.split())}"
        lost += str(after).count("target=torch.ops.relu2ir") < str(before).count("target=torch.ops.relu2ir")
    return f"sites are lost in {lost} programs" if lost else None


def main(names: list[str]) -> int:
    torch.set_num_threads(1)
    start, unseen = time.monotonic(), []
    with quiet():
        programs = corpus()
        print(f"{len(programs)} programs in {time.monotonic() - start:.0f} s", flush=True)
        assert effect(programs) is None
        for guard in itertools.chain.from_iterable(map(guards, MODULES)):
            if names and not any(name in str(guard) for name in names):
                continue
            with without(guard):
                found = effect(programs)
            if found is None and str(guard) not in UNSEEN:
                unseen.append(guard)
            print(f"{guard}\n    {(found or UNSEEN.get(str(guard), 'NOT SEEN'))[:90]}", flush=True)
    print(f"{len(unseen)} not seen, {time.monotonic() - start:.0f} s")
    return bool(unseen)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
