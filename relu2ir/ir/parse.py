"""Text to expression: a tokenizer and a precedence-climbing parser, a hundred lines, nothing evaluated.

Python's own parser is not used: on hostile depth it fails in three different ways (RecursionError, MemoryError,
SyntaxError), and it accepts a language far larger than this one.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple

from relu2ir.errors import ExprError, suggestion
from relu2ir.ir.expr import NEG_STRENGTH, OPERATORS, Call, Const, Expr, Name, depth
from relu2ir.ir.primitives import PRIMITIVES

MAX_LENGTH = 2000
MAX_DEPTH = 64

_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)"
    r"|(?P<name>[A-Za-z_]\w*)|(?P<symbol>\*\*|<=|>=|[-+*/(),<>])|(?P<bad>\S))",
    re.ASCII,
)
_BINARY = {symbol: (primitive, strength) for primitive, (symbol, strength) in OPERATORS.items()}
_CALLED = [name for name in PRIMITIVES if name not in OPERATORS and name != "neg"]
_WAYS_OUT = {
    "**": "write square(x) for x ** 2",
    "[": "an expression cannot index: name the halves or pairs of a packed input under 'inputs'",
    ".": "an expression has no attributes or methods: call a primitive, as in relu(x)",
    "=": "nothing is assigned or passed by keyword",
}
# What is not in the vocabulary, by the reason, and what to write for it.
_NO_REDUCTION = "an expression has no reductions, an op is elementwise: compute it outside and pass it as an input"
_NO_SHAPE = "an expression has no shapes or indices: declare halves, pairs or a vector under 'inputs'"
_NO_CHANCE = "an expression has no randomness: pass a mask as an input"
_WORDS = {
    _NO_REDUCTION: "sum mean prod norm var amax amin softmax logsumexp cumsum argmax argmin any all",
    _NO_SHAPE: "shape size len view reshape transpose permute cat stack chunk split slice index",
    _NO_CHANCE: "dropout rand randn bernoulli",
}
_REFUSED = {word: reason for reason, words in _WORDS.items() for word in words.split()} | {
    "max": f"write maximum(a, b) for two values; {_NO_REDUCTION}",
    "min": f"write minimum(a, b) for two values; {_NO_REDUCTION}",
    "pow": "write square(x), or x * x * x",
    "rsqrt": "write 1 / sqrt(x)",
    "reciprocal": "write 1 / x",
    "exp2": "write exp(0.6931471805599453 * x)",
    "swish": "write silu(x)",
    "logsigmoid": "write -softplus(-x)",
    "leaky_relu": "write where(x > 0, x, 0.01 * x)",
    "elu": "write where(x > 0, x, expm1(x))",
    "relu6": "write clamp(x, 0, 6)",
    "hardtanh": "write clamp(x, -1, 1)",
    "if": "write where(x > 0, a, b)",
}
_ONLY_IN_WHERE = "a comparison is only allowed as the first argument of 'where'"


class Token(NamedTuple):
    kind: str
    text: str
    start: int


def parse(text: str, conditions: Collection[str] = ()) -> Expr:
    """Parse ``text``; raise ExprError with the place of the first problem.

    Grammar: numbers, names, calls of primitives, unary ``-``, ``+ - * /``, brackets, and one comparison (or a name in
    ``conditions``) as the first argument of ``where``.
    """
    if len(text) > MAX_LENGTH:
        raise ExprError(f"the expression has {len(text)} characters; the limit is {MAX_LENGTH}")
    parser = _Parser(_tokens(text), frozenset(conditions))
    expr = parser.expression(0)
    if parser.here.kind != "end":
        raise parser.expected("an operator or the end of the expression")
    if parser.is_condition(expr):
        raise ExprError(_ONLY_IN_WHERE, 0, len(text))
    if depth(expr) > MAX_DEPTH:
        raise ExprError(f"the expression nests deeper than {MAX_DEPTH} levels", 0, len(text))
    return expr


def _tokens(text: str) -> list[Token]:
    tokens, position, end = [], 0, len(text.rstrip())
    while position < end:
        match = _TOKEN.match(text, position)
        assert match is not None and match.lastgroup is not None  # 'bad' takes any character
        token = Token(match.lastgroup, match[match.lastgroup], match.start(match.lastgroup))
        if token.kind == "bad" or token.text == "**":
            hint = _WAYS_OUT.get(token.text, "use numbers, names, calls, + - * / and one comparison inside where")
            shown = (
                f"'{token.text}'" if token.text.isprintable() else repr(token.text)
            )  # no control codes in a terminal
            raise ExprError(f"unexpected {shown}; {hint}", token.start, len(token.text))
        tokens.append(token)
        position = match.end()
    return [*tokens, Token("end", "", end)]


class _Parser:
    def __init__(self, tokens: list[Token], conditions: frozenset[str]) -> None:
        self.tokens, self.conditions, self.position, self.nesting = tokens, conditions, 0, 0

    @property
    def here(self) -> Token:
        return self.tokens[self.position]

    def take(self) -> Token:
        token = self.here
        self.position += 1
        return token

    def expected(self, what: str) -> ExprError:
        found = f"found '{self.here.text}'" if self.here.text else "the expression ends"
        return ExprError(f"expected {what}; {found}", self.here.start, max(1, len(self.here.text)))

    def expect(self, symbol: str) -> None:
        if self.here.text != symbol:
            raise self.expected(f"'{symbol}'")
        self.take()

    def is_condition(self, expr: Expr) -> bool:
        if isinstance(expr, Name):
            return expr.name in self.conditions
        return isinstance(expr, Call) and PRIMITIVES[expr.primitive].is_condition

    def refuse_condition(self, expr: Expr, at: Token) -> None:
        if self.is_condition(expr):
            raise ExprError(_ONLY_IN_WHERE, at.start, len(at.text))

    def expression(self, strength: int) -> Expr:
        """The longest expression from here whose operators all bind more tightly than ``strength``."""
        left = self.operand()
        while self.here.text in _BINARY and _BINARY[self.here.text][1] > strength:
            symbol = self.take()
            primitive, own = _BINARY[symbol.text]
            right = self.expression(own)
            self.refuse_condition(left, symbol)
            self.refuse_condition(right, symbol)
            left = Call(primitive, (left, right))
        return left

    def operand(self) -> Expr:
        token = self.here
        self.nesting += 1  # each level of recursion passes here, so the Python stack is bounded by this check
        if self.nesting > MAX_DEPTH:
            raise ExprError(f"the expression nests deeper than {MAX_DEPTH} levels", token.start, len(token.text))
        try:
            if token.kind == "number":
                return self.number(self.take())
            if token.kind == "name":
                self.take()
                return self.call(token) if self.here.text == "(" else Name(token.text)
            if token.text == "-":
                self.take()
                literal = self.here.kind == "number"
                value = self.expression(NEG_STRENGTH - 1)
                self.refuse_condition(value, token)
                return Const(-value.value) if literal and isinstance(value, Const) else Call("neg", (value,))
            if token.text == "(":
                self.take()
                inner = self.expression(0)
                self.expect(")")
                return inner
            raise self.expected("a number, a name or '('")
        finally:
            self.nesting -= 1

    def number(self, token: Token) -> Const:
        value = float(token.text)
        if value == float("inf"):
            raise ExprError(f"the number '{token.text}' does not fit float64", token.start, len(token.text))
        return Const(value)

    def call(self, token: Token) -> Expr:
        if token.text not in _CALLED:
            way_out = _REFUSED.get(token.text)
            way_out = f"; {way_out}" if way_out else suggestion(token.text, _CALLED)
            raise ExprError(f"unknown primitive '{token.text}'{way_out}", token.start, len(token.text))
        args = self.arguments()
        wanted = len(PRIMITIVES[token.text].args)
        if len(args) != wanted:
            message = f"'{token.text}' takes {wanted} argument{'s' * (wanted != 1)}; found {len(args)}"
            raise ExprError(message, token.start, len(token.text))
        if token.text == "where" and not self.is_condition(args[0]):
            message = "the first argument of 'where' must be a comparison, as in where(x <= 0, 0, x)"
            raise ExprError(message, token.start, len(token.text))
        for value in args[token.text == "where" :]:
            self.refuse_condition(value, token)
        return Call(token.text, tuple(args))

    def arguments(self) -> list[Expr]:
        self.expect("(")
        args: list[Expr] = []
        while self.here.text != ")":
            args.append(self.expression(0))
            if self.here.text != ",":
                break
            self.take()
        self.expect(")")
        return args
