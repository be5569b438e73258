"""What random programs are written with: every way to write a primitive, a view, a write, and what only looks so.

Independent of the pass's own table (`relu2ir/fx/spellings.py`): a mistake there is not repeated here.
"""

from __future__ import annotations

# Each primitive's spellings: those that mean it, those that write into their operand, those that only look like it.
# Of the operators the first spelling takes numbers on both sides, and the methods none on the left.
SPELLINGS: dict[str, tuple[list[str], list[str], list[str]]] = {
    "relu": (
        ["torch.relu({0})", "F.relu({0})", "F.relu(input={0}, inplace=False)", "{0}.relu()", "self.relu({0})",
         "aten.relu.default({0})", "torch.clamp({0}, min=0)", "{0}.clamp(0.0)", "{0}.clamp_min(0)",
         "torch.clamp_min({0}, 0.0)", "aten.clamp_min.default({0}, 0)", "F.threshold({0}, 0, 0)"],
        ["F.relu({0}, inplace=True)", "{0}.relu_()", "torch.relu_({0})", "F.relu_({0})", "self.relu_in_place({0})",
         "aten.relu_.default({0})", "{0}.clamp_(0)", "{0}.clamp_min_(0)", "F.relu({0}, True)"],
        ["F.relu6({0})", "F.leaky_relu({0})", "{0}.clamp(0, 1)", "F.threshold({0}, 0, 1)", "F.threshold({0}, 1, 0)",
         "{0}.clamp_min(1)", "torch.clamp({0}, max=0)", "self.relu_hooked({0})", "self.relu_patched({0})"],
    ),
    "square": (
        ["torch.square({0})", "{0}.square()", "{0} ** 2", "{0} ** 2.0", "{0}.pow(2)", "torch.pow({0}, 2.0)",
         "torch.pow(input={0}, exponent=2)", "pow({0}, 2)", "{0} * {0}", "torch.mul({0}, other={0})", "{0}.mul({0})",
         "aten.pow.Tensor_Scalar({0}, 2)", "aten.square.default({0})", "aten.mul.Tensor({0}, {0})"],
        ["{0}.square_()", "torch.square_({0})", "{0}.pow_(2)", "{0}.mul_({0})", "operator.imul({0}, {0})",
         "operator.ipow({0}, 2)", "aten.square_.default({0})"],
        ["{0} ** 3", "{0} ** 2.5", "{0} ** self.two", "torch.float_power({0}, 2)", "{0} ** 1", "{0} * -{0}"],
    ),
    "silu": (
        ["F.silu({0})", "F.silu({0}, inplace=False)", "self.silu({0})", "aten.silu.default({0})"],
        ["F.silu({0}, inplace=True)", "aten.silu_.default({0})"],
        ["F.mish({0})", "F.hardswish({0})"],
    ),
    "gelu": (
        ["F.gelu({0})", "F.gelu({0}, approximate='none')", "self.gelu({0})", "aten.gelu.default({0})"],
        [],
        ["F.gelu({0}, approximate='tanh')", "self.gelu_tanh({0})"],
    ),
    "gelu_tanh": (
        ["F.gelu({0}, approximate='tanh')", "self.gelu_tanh({0})", "aten.gelu.default({0}, approximate='tanh')"],
        [],
        ["F.gelu({0})", "self.gelu({0})"],
    ),
    "softplus": (
        ["F.softplus({0})", "F.softplus({0}, 1, 20)", "self.softplus({0})", "aten.softplus.default({0})"],
        [],
        ["F.softplus({0}, beta=2)", "F.softplus({0}, threshold=1)", "self.softplus_2({0})"],
    ),
    "sigmoid": (
        ["torch.sigmoid({0})", "{0}.sigmoid()", "F.sigmoid({0})", "self.sigmoid({0})", "torch.special.expit({0})"],
        ["{0}.sigmoid_()", "torch.sigmoid_({0})"],
        ["F.hardsigmoid({0})", "F.logsigmoid({0})"],
    ),
    "tanh": (["torch.tanh({0})", "{0}.tanh()", "F.tanh({0})", "self.tanh({0})"], ["{0}.tanh_()"], ["F.hardtanh({0})"]),
    "expm1": (["torch.expm1({0})", "{0}.expm1()", "torch.special.expm1({0})"], ["{0}.expm1_()"], ["{0}.exp()"]),
    "clamp": (
        ["{0}.clamp({1}, {2})", "torch.clamp({0}, min={1}, max={2})", "{0}.clip({1}, {2})",
         "torch.clip({0}, {1}, {2})"],
        ["{0}.clamp_({1}, {2})", "torch.clamp_({0}, {1}, {2})"],
        ["{0}.clamp({1})", "{0}.clamp(max={2})"],
    ),
    "clamp_max": (
        ["{0}.clamp(max={1})", "torch.clamp_max({0}, {1})", "{0}.clamp_max({1})"],
        ["{0}.clamp_max_({1})", "torch.clamp_({0}, max={1})"],
        ["{0}.clamp(min={1})", "{0}.clamp_min({1})"],
    ),
    "add": (
        ["{0} + {1}", "torch.add({0}, {1})", "{0}.add({1})", "torch.add({0}, other={1}, alpha=1)"],
        ["{0}.add_({1})", "operator.iadd({0}, {1})"],
        ["torch.add({0}, {1}, alpha=2)", "{0} - {1}"],
    ),
    "sub": (
        ["{0} - {1}", "torch.sub({0}, {1})", "{0}.sub({1})", "torch.rsub({1}, {0})"],
        ["{0}.sub_({1})"],
        ["torch.sub({0}, {1}, alpha=2)", "{1} - {0}"],
    ),
    "mul": (
        ["{0} * {1}", "torch.mul({0}, {1})", "{0}.mul({1})", "torch.multiply({0}, {1})"],
        ["{0}.mul_({1})", "operator.imul({0}, {1})"],
        ["{0} / {1}"],
    ),
    "div": (
        ["{0} / {1}", "torch.div({0}, {1})", "{0}.div({1})", "torch.true_divide({0}, {1})"],
        ["{0}.div_({1})"],
        ["{0} * {1}", "torch.div({0}, {1}, rounding_mode='floor')"],
    ),
    "where": (["torch.where({0}, {1}, {2})"], [], ["torch.where({0}, {2}, {1})"]),
    "le": (["{0} <= {1}", "torch.le({0}, {1})", "{0}.le({1})"], [], ["{0} < {1}", "{0} >= {1}"]),
    "gt": (["{0} > {1}", "torch.gt({0}, {1})", "{0}.gt({1})"], [], ["{0} >= {1}"]),
}  # fmt: skip

# Two parts of a tensor of width 2 * {1} (or one less): texts of both, or of what both are taken from.
HALVES = [
    "{0}.chunk(2, -1)", "{0}.chunk(2, dim=1)", "torch.chunk({0}, 2, dim=-1)", "{0}.split({1}, -1)",
    "torch.split({0}, {1}, dim=1)", "({0}[..., :{1}], {0}[..., {1}:])",
    "({0}.narrow(-1, 0, {1}), {0}.narrow(1, {1}, {2}))", "{0}.split([{1}, {2}], -1)",
]  # fmt: skip
PAIRS = ["({0}[..., ::2], {0}[..., 1::2])", "({0}[..., 0::2], {0}[..., 1::2])"]
OTHER_PARTS = [
    "{0}.chunk(2, 0)", "{0}.chunk(4, -1)[:2]", "{0}.split([1, 7], -1)", "{0}.split(1, -1)[:2]", "{0}.chunk(2)",
    "({0}[..., {1}:], {0}[..., :{1}])", "({0}[..., :4], {0}[..., 1:5])", "({0}[:2], {0}[2:])", "{0}.chunk(2, -1)[::-1]",
    "({0}[..., :{1}], {0}[..., :{1}])", "{0}.unflatten(-1, (2, {1})).unbind(-2)", "({0}[..., 1::2], {0}[..., ::2])",
    "({0}.narrow(0, 0, 2), {0}.narrow(0, 2, 2))", "{0}.unflatten(-1, ({1}, 2)).unbind(-1)", "({0}, {0})",
]  # fmt: skip
VIEWS = [
    "{0}.view_as({0})", "{0}.detach()", "{0}.t().t()", "self.identity({0})", "{0}.contiguous()", "{0}[...]",
    "{0}.expand_as({0})", "F.dropout({0}, 0.5, False)", "{0}.to({0}.dtype)", "aten.alias.default({0})",
    "self.dropout({0})", "{0}.reshape({0}.shape)", "torch.atleast_2d({0})",
]  # fmt: skip
COPIES = ["{0}.clone()", "-{0}", "torch.sin({0})", "{0}.flip(0)", "F.dropout({0}, 0.5, True)", "torch.cumsum({0}, 0)"]
WRITES = [
    "{0}.add_(1)", "{0}.mul_(-1)", "{0}.neg_()", "{0}.zero_()", "operator.iadd({0}, 1)", "torch.relu_({0})",
    "torch.neg({0}, out={0})", "{0}.view(-1).add_(1)", "{0}[0].add_(2)", "F.dropout({0}, 0.5, True, True)",
    "{0}.detach().mul_(2)", "aten.add_.Tensor({0}, 1)", "self.relu_in_place({0})", "{0}.t().sub_(1)",
    "torch.add({0}, 1, out={0})", "{0}.copy_(torch.flip({0}, [0]))", "{0}.clamp_(-0.5, 0.5)", "{0}.t_().t_().add_(1)",
    "F.silu({0}, inplace=True)", "self.writes({0})", "aten.copy_.default({0}, {0} + 1)",
]  # fmt: skip
ITEM_WRITES = ["{0}[0] = 1", "{0}[..., 1:] *= 2", "{0}[1] += 1"]
CASTS = ["{0}.to(low)", "{0}.to(full)", "{0}.to(dtype=low)", "{0}.type(full)", "{0}.float()", "{0}.type_as(x)"]
MODES = [
    "torch.no_grad()", "torch.enable_grad()", "torch.set_grad_enabled(False)",
    "torch.autocast('cpu', torch.bfloat16)", "torch.inference_mode()",
]  # fmt: skip
