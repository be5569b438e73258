"""Drop each guard of the pass by itself, and see whether what is written down or random programs come out wrong.

``PYTHONPATH=.:tests python tests/guards_dropped.py [--written] [--jobs N] [NAME ...]``: for each ``if`` of the modules
below that ends in a return, and for each alternative of a refusal and each part of a requirement, the condition is
taken away (a refusal never refuses, a requirement always holds). Then the corpus of spellings is fused again, and one
of random programs unless ``--written``. A guard is seen if of a spelling another op is made (another reason is counted
apart), if a program comes out wrong, or if it loses a site: without it the pass refuses more. What is not seen is
printed, and makes the run fail unless `UNSEEN` says why.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import itertools
import multiprocessing
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType, ModuleType
from typing import Any

import test_spelling_corpus as spelling
import torch
from graph_outcomes import Subject, quiet, subject
from random_graphs import Impossible, drawn
from spelling_corpus import CORPUS as SPELLINGS
from torch import fx

import relu2ir
from relu2ir.fx import alias, between, check, match, packing, reading, shapes, spellings
from relu2ir.fx.report import FuseResult

MODULES: tuple[ModuleType, ...] = (check, match, shapes, between, packing, alias, reading, spellings)
CORPUS = {"with_values": 350, "symbolic_trace": 100, "dynamo": 100, "export": 20}
SEED = 1
UNSEEN: dict[str, str] = {}
REASON = "only another reason:"


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
    forget = getattr(function, "cache_clear", lambda: None)
    function = inspect.unwrap(function)
    before, function.__code__ = function.__code__, code
    forget()
    try:
        yield
    finally:
        function.__code__ = before
        forget()


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


@dataclass(frozen=True)
class Spelling:
    """A spelling in one kind of graph; ``judged`` is what the whole pass makes of it."""

    name: str
    graph: fx.GraphModule
    judged: tuple[list[str], list[str]]


def judgement(graph: fx.GraphModule) -> tuple[list[str], list[str]]:
    """The ops found, and the codes of the near misses."""
    result = relu2ir.fuse(graph)
    return sorted(site.spec.name for site in result.sites), sorted(miss.reason for miss in result.near_misses)


def as_written() -> list[Spelling]:
    found = []
    for entry, capture in itertools.product(SPELLINGS, (spelling.symbolic, spelling.dynamo, spelling.exported)):
        x = torch.randn(3, 8, dtype=getattr(torch, entry.dtype))
        try:
            graph = capture(spelling.module_of(entry).to(x.dtype), x)
        except Exception:  # not every spelling can be captured in each way
            continue
        found.append(Spelling(f"{capture.__name__}: {entry.text}", graph, judgement(graph)))
    return found


def judged_otherwise(written: list[Spelling]) -> str | None:
    """The first spelling of which another op is made, or none; else the first that is refused for another reason."""
    only_reason = None
    for each in written:
        try:
            now = judgement(each.graph)
        except Exception as error:
            return f"{each.name} raises {type(error).__name__}"
        if now[0] != each.judged[0]:
            return f"{each.name} gives {now[0]}, not {each.judged[0]}"
        if now != each.judged and only_reason is None:
            only_reason = f"{REASON} {each.name} gives {now[1]}, not {each.judged[1]}"
    return only_reason


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="only the guards whose text has one of these")
    parser.add_argument("--written", action="store_true", help="leave out the random programs")
    parser.add_argument("--jobs", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    start = time.monotonic()
    every = itertools.chain.from_iterable(map(guards, MODULES))
    chosen = [guard for guard in every if not args.names or any(name in str(guard) for name in args.names)]
    with quiet():
        written, programs = as_written(), [] if args.written else corpus()
        print(f"{len(written)} spellings, {len(programs)} programs in {time.monotonic() - start:.0f} s", flush=True)
        assert judged_otherwise(written) is None and effect(programs) is None

        def seen(index: int) -> str | None:
            with without(chosen[index]):
                how = judged_otherwise(written)
                return (effect(programs) or how) if how is None or how.startswith(REASON) else how

        _JUDGE.append(seen)
        with multiprocessing.get_context("fork").Pool(args.jobs) as pool:
            found = pool.imap(_judge, range(len(chosen)))
            unseen, reasons = [], []
            for guard, how in zip(chosen, found):
                if how is not None and how.startswith(REASON):
                    reasons.append(guard)
                if how is None and str(guard) not in UNSEEN:
                    unseen.append(guard)
                text = " ".join((how or UNSEEN.get(str(guard), "NOT SEEN")).split())
                print(f"{guard}\n    {text[:110]}", flush=True)
    for module in MODULES:
        name, of = module.__name__.rpartition(".")[2], [guard for guard in chosen if guard.module is module]
        missed, told = (sum(guard.module is module for guard in those) for those in (unseen, reasons))
        wrong = len(of) - missed - told
        print(f"{name:10} {len(of):3} guards: {wrong:3} wrong, {told:3} told otherwise, {missed:3} not seen")
    print(f"{len(unseen)} of {len(chosen)} not seen, {time.monotonic() - start:.0f} s")
    return bool(unseen)


_JUDGE: list[Any] = []  # what the forked processes call: a closure cannot be sent to them


def _judge(index: int) -> str | None:
    return _JUDGE[0](index)


if __name__ == "__main__":
    sys.exit(main())
