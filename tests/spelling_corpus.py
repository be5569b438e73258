"""What people write for an op, and what only looks like it: data, read by `test_spelling_corpus.py`.

A text is the body of a forward of ``x``, 3 x 8, in a module that has ``relu``, ``silu`` and other layers. `op` is what
it is; ``lost`` names the captures in which it is no longer to be seen, and why stands in the comment.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """``kind``: exact, forward (its gradient differs at an edge) or decoy, which is ``near`` an op by that reason."""

    text: str
    op: str
    kind: str = "exact"
    lost: tuple[str, ...] = ()
    near: str = ""
    dtype: str = "float32"


def _entries(op: str, kind: str, texts: str, lost: str = "", dtype: str = "float32") -> list[Entry]:
    return [Entry(text.strip(), op, kind, tuple(lost.split()), "", dtype) for text in texts.strip().splitlines()]


def _decoys(near: str, texts: str, lost: str = "") -> list[Entry]:
    return [Entry(text.strip(), "", "decoy", tuple(lost.split()), near) for text in texts.strip().splitlines()]


WRITTEN = "decomposed post_grad"  # written in other calls there, or without the write in place
TYPED = "symbolic"  # a symbolic trace knows no shapes and no dtypes

CORPUS = [
    *_entries(
        "relu_squared",
        "exact",
        """
        torch.square(F.relu(x))
        torch.square(torch.relu(x))
        torch.square(input=F.relu(input=x))
        F.relu(x).square()
        x.relu().square()
        torch.relu(x) ** 2
        torch.pow(F.relu(x), 2)
        F.relu(x).pow(2)
        torch.pow(input=torch.relu(x), exponent=2)
        r = F.relu(x); return r * r
        r = F.relu(x); return torch.mul(r, r)
        r = F.relu(x); return torch.multiply(input=r, other=r)
        r = F.relu(x); return r.mul(r)
        r = F.relu(x); return r.multiply(r)
        F.relu(x) * torch.relu(x)
        F.relu(x, inplace=False).square()
        F.relu(x, False).square()
        aten.square.default(aten.relu.default(x))
        aten.pow.Tensor_Scalar(aten.relu.default(x), 2)
        self.relu(x).square()
        self.relu(x) ** 2
        r = self.relu(x); return r * r
        F.relu(x + 1, inplace=True).square()
        (x + 1).relu_().square()
        torch.relu_(x + 1) ** 2
        F.relu_(x + 1) ** 2
        self.relu_inplace(x + 1).square()
        F.relu(x).square_()
        F.relu(x).pow_(2)
        torch.square_(F.relu(x))
        r = F.relu(x); return r.mul_(r)
        r = F.relu(x); r *= r; return r
        r = F.relu(x); r **= 2; return r
        torch.square(self.identity(F.relu(x)))
        F.dropout(F.relu(x), 0.5, False).square()
        F.dropout(F.relu(x), training=False) ** 2
        torch.where(x <= 0, 0, x).square()
        F.threshold(x, 0, 0).square()
        self.threshold(x).square()
        """,
    ),
    *_entries(
        "relu_squared",
        "exact",
        """
        F.relu(x) ** 2.0
        torch.where(x <= 0.0, 0.0, x) ** 2
        torch.threshold(x, 0.0, 0.0) ** 2
        x.relu().pow(exponent=2.0)
        torch.pow(F.relu(x), 2.0)
        """,
        lost=TYPED,
    ),
    *_entries(
        "relu_squared",
        "forward",
        """
        x.clamp(min=0) ** 2
        x.clamp(0).square()
        torch.clamp(x, min=0).square()
        torch.clamp(x, 0, None).square()
        x.clamp_min(0).square()
        x.clip(min=0).square()
        r = x.clamp(min=0); return r * r
        torch.maximum(x, torch.zeros_like(x)).square()
        torch.maximum(torch.zeros_like(x), x) ** 2
        torch.max(x, torch.zeros_like(x)).square()
        torch.maximum(x, torch.full_like(x, 0.0)).square()
        """,
    ),
    *_entries(
        "relu_squared",
        "forward",
        """
        x.clamp(min=0.0).square()
        torch.clamp_min(x, 0.0) ** 2
        torch.maximum(x, x.new_zeros(())).square()
        """,
        lost=TYPED,
    ),
    *_entries(
        "hardswish",
        "forward",
        """
        F.hardtanh(x + 3, min_val=0.0, max_val=6.0) * x / 6
        x * self.hardtanh(x + 3) / 6
        """,
        lost=TYPED,
    ),
    *_entries(
        "relu_squared_mul",
        "exact",
        """
        y = torch.cos(x); return torch.square(F.relu(x)) * y
        y = torch.cos(x); return y * F.relu(x).square()
        y = torch.cos(x); return torch.mul(y, torch.relu(x) ** 2)
        y = torch.cos(x); r = F.relu(x); return r * r * y
        y = torch.cos(x); return F.relu(x).pow(2).mul(y)
        """,
    ),
    *_entries(
        "silu_mul",
        "exact",
        """
        y = torch.cos(x); return F.silu(x) * y
        y = torch.cos(x); return y * F.silu(x)
        y = torch.cos(x); return self.silu(x) * y
        y = torch.cos(x); return torch.mul(F.silu(x, inplace=False), y)
        y = torch.cos(x); return x * torch.sigmoid(x) * y
        y = torch.cos(x); return y * (x.sigmoid() * x)
        """,
    ),
    *_entries(
        "gelu_mul",
        "exact",
        """
        y = torch.cos(x); return F.gelu(x) * y
        y = torch.cos(x); return F.gelu(x, approximate="none") * y
        y = torch.cos(x); return y * self.gelu(x)
        """,
    ),
    *_entries(
        "gelu_tanh_mul",
        "exact",
        """
        y = torch.cos(x); return F.gelu(x, approximate="tanh") * y
        y = torch.cos(x); return y * self.gelu_tanh(x)
        """,
    ),
    *_entries("silu_mul", "exact", "y = torch.cos(x); return x / (1 + torch.exp(-x)) * y"),
    *_entries(
        "gelu_mul",
        "exact",
        "y = torch.cos(x); return x * 0.5 * (1 + torch.erf(x / 1.4142135623730951)) * y",
    ),
    *_entries(
        "gelu_tanh_mul",
        "exact",
        "y = torch.cos(x); return 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x**3))) * y",
        lost=TYPED,
    ),
    # Its layer holds beta as 1.0, which a decomposition multiplies by.
    *_entries("mish", "exact", "x * self.softplus(x).tanh()", lost="decomposed post_grad"),
    *_entries(
        "relu_mul",
        "exact",
        """
        y = torch.cos(x); return F.relu(x) * y
        y = torch.cos(x); return y * self.relu(x)
        F.relu(x) * F.relu(torch.cos(x))
        """,
    ),
    *_entries("relu_mul", "exact", "x.abs() * F.relu(x)", lost=TYPED),
    *_entries(
        "silu_and_mul",
        "exact",
        """
        a, b = x.chunk(2, -1); return F.silu(a) * b
        a, b = x.chunk(2, dim=-1); return b * F.silu(a)
        a, b = torch.chunk(x, 2, -1); return self.silu(a) * b
        a, b = torch.chunk(input=x, chunks=2, dim=-1); return F.silu(a) * b
        a, b = torch.tensor_split(x, 2, -1); return F.silu(a) * b
        d = x.shape[-1] // 2; return F.silu(x[..., :d]) * x[..., d:]
        d = x.size(-1) // 2; return F.silu(x[..., :d]) * x[..., d:]
        F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]
        a, b = x.split([4, 4], -1); return F.silu(a) * b
        a, b = torch.split(x, [4, 4], dim=-1); return F.silu(a) * b
        """,
    ),
    *_entries(
        "silu_and_mul",
        "exact",
        """
        a, b = x.chunk(2, 1); return F.silu(a) * b
        a, b = x.split(4, -1); return F.silu(a) * b
        F.silu(x.narrow(-1, 0, 4)) * x.narrow(-1, 4, 4)
        F.silu(torch.narrow(x, 1, 0, 4)) * torch.narrow(x, 1, 4, 4)
        F.silu(x[..., :4]) * x[..., 4:]
        F.silu(x[:, :4]) * x[:, 4:]
        a, b = x.view(3, 2, 4).unbind(-2); return F.silu(a) * b
        a, b = x.unflatten(-1, (2, 4)).unbind(1); return F.silu(a) * b
        h = x.reshape(3, 2, 4); return F.silu(h[..., 0, :]) * h[..., 1, :]
        h = x.view(3, 2, 4); return F.silu(h.select(-2, 0)) * h.select(-2, 1)
        """,
        lost=TYPED,
    ),
    *_entries("mul_and_silu", "exact", "a, b = x.chunk(2, -1); return a * F.silu(b)"),
    *_entries(
        "gelu_and_mul",
        "exact",
        "a, b = x.chunk(2, -1); return F.gelu(a) * b\na, b = x.chunk(2, -1); return b * F.gelu(a)",
    ),
    *_entries("gelu_tanh_and_mul", "exact", 'a, b = x.chunk(2, -1); return F.gelu(a, approximate="tanh") * b'),
    *_entries(
        "relu_squared_and_mul",
        "exact",
        """
        a, b = x.chunk(2, -1); return torch.square(F.relu(a)) * b
        a, b = x.chunk(2, -1); return b * F.relu(a) ** 2
        """,
    ),
    *_entries("fatrelu_and_mul", "exact", "a, b = x.chunk(2, -1); return F.threshold(a, 0.01, 0.0) * b", lost=TYPED),
    *_entries(
        "swigluoai_and_mul",
        "exact",
        """
        g, u = x[..., ::2].clamp(max=7), x[..., 1::2].clamp(-7, 7); return (u + 1) * (g * torch.sigmoid(g * 1.702))
        g, u = x.view(3, 4, 2).unbind(-1); g = g.clamp(max=7); return (u.clamp(-7, 7) + 1) * (g * (g * 1.702).sigmoid())
        """,
        lost=TYPED,
    ),
    *_entries(
        "gelu_new",
        "exact",
        """
        0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))
        x * 0.5 * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x**3)))
        """,
        lost=TYPED,
    ),
    *_entries(
        "mish",
        "exact",
        """
        x * torch.tanh(F.softplus(x))
        F.softplus(x, beta=1, threshold=20).tanh() * x
        """,
    ),
    *_entries("star_relu", "exact", "0.8944 * F.relu(x) ** 2 + -0.4472"),
    *_entries("bias_relu_squared", "exact", "torch.square(F.relu(x + self.bias))", lost=TYPED),
    *_entries("bias_gelu", "exact", "F.gelu(x + self.bias)", lost=TYPED),
    *_entries(
        "silu",
        "exact",
        """
        x * torch.sigmoid(x)
        torch.sigmoid(x) * x
        """,
    ),
    *_entries("silu", "exact", "x / (1 + torch.exp(-x))"),
    *_entries("gelu", "exact", "x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))", lost=TYPED),
    *_entries(
        "silu_and_mul",
        "exact",
        """
        a, b = x.chunk(2, -1); return F.silu(a.float()).to(a.dtype) * b
        a, b = x.chunk(2, -1); return F.silu(a.to(torch.float32)).bfloat16() * b
        """,
        lost=TYPED,
        dtype="bfloat16",
    ),
    *_entries(
        "hardswish",
        "forward",
        """
        x * F.relu6(x + 3) / 6
        x * self.relu6(x + 3) / 6
        x * F.hardtanh(x + 3, 0, 6) / 6
        """,
    ),
    *_entries(
        "hardswish",
        "exact",
        """
        x * torch.clamp(x + 3, 0, 6) / 6
        (3 + x).clamp(min=0, max=6) * x / 6
        x * (x + 3).clamp(min=0).clamp(max=6) / 6
        """,
    ),
    *_entries(
        "gelu_quick",
        "exact",
        """
        x * torch.sigmoid(1.702 * x)
        torch.sigmoid(x * 1.702) * x
        """,
    ),
    *_decoys("escapes", "r = F.relu(x); return r.square() + r\nr = F.relu(x); return r, r.square()"),
    *_decoys("x_times_relu", "x * F.relu(x)\nF.relu(x) * x"),
    *_decoys("where_form", "torch.where(x > 0, x * x, 0)\ntorch.where(torch.gt(x, 0), x.square(), 0.0)"),
    *_decoys("float_power", "torch.float_power(F.relu(x), 2)", lost=WRITTEN),
    *_decoys("tensor_exponent", "torch.pow(F.relu(x), torch.full_like(x, 2.0))"),
    *_decoys(
        "mutated",
        "r = F.relu(x); x.add_(1); return r.square()\nr = F.relu(x); x.view(-1)[1:].mul_(3); return r.square()",
    ),
    *_decoys(
        "inplace",
        "F.relu(x, inplace=True).square()\nh = x + 1; return F.relu(h[:1], inplace=True).square() + h",
        lost=WRITTEN,
    ),
    *_decoys("dropout", "torch.square(F.dropout(F.relu(x), 0.5, True))\nself.dropout(F.relu(x)) ** 2", lost=WRITTEN),
    *_decoys(
        "view", "torch.square(F.relu(x).view(-1))\nF.relu(x).transpose(0, 1) ** 2\nF.relu(x).reshape(4, 6).square()"
    ),
    *_decoys("cast", "torch.square(F.relu(x).double())\nF.relu(x).to(torch.float64) ** 2"),
    *_decoys("mask", "torch.square(F.relu(x).masked_fill(x > 1, 0.0))", lost=WRITTEN),
    *_decoys(
        "",
        """
        F.relu(x) ** 3
        F.relu(x) ** 2.5
        torch.square(F.leaky_relu(x))
        F.relu(x.square())
        torch.add(F.relu(x), F.relu(x), alpha=2)
        x.clamp(min=0.1).square()
        torch.maximum(x, torch.ones_like(x)).square()
        torch.maximum(x, torch.zeros(2, 3, 8)).square()
        F.threshold(x, 0.1, 0.0).square()
        F.threshold(x, 0.0, 1.0).square()
        torch.where(x < 0, 0, x + 1).square()
        x * F.hardtanh(x + 3) / 6
        x * F.softplus(x, beta=2).tanh()
        x * F.softplus(x, threshold=10).tanh()
        x * torch.sigmoid(x + 1)
        x / (2 + torch.exp(-x))
        0.5 * x * (1 + torch.erf(x / 1.5))
        torch.square(F.relu(x).sum())
        """,
    ),
]
