"""What a random program reads of its module: layers, a parameter and buffers."""

from __future__ import annotations

import torch
from torch import nn

ROWS = 4  # of the tensors that programs take and hold


class Surroundings(nn.Module):
    """What a program's text reads of ``self``: layers, hooked and patched ones too, a parameter and buffers."""

    def __init__(self, width: int, dtype: torch.dtype, training: bool, grad: bool) -> None:
        super().__init__()
        floating = dtype if dtype.is_floating_point else torch.float32
        self.relu, self.relu_in_place, self.relu_hooked, self.relu_patched = (nn.ReLU(i == 1) for i in range(4))
        self.relu_hooked.register_forward_hook(lambda module, args, output: output + 1)
        self.relu_patched.forward = torch.tanh
        self.silu, self.gelu, self.gelu_tanh = nn.SiLU(), nn.GELU(), nn.GELU("tanh")
        self.softplus, self.softplus_2 = nn.Softplus(), nn.Softplus(2)
        self.sigmoid, self.tanh, self.identity, self.dropout = nn.Sigmoid(), nn.Tanh(), nn.Identity(), nn.Dropout(0.5)
        self.writes = Writes()
        self.linear = nn.Linear(width, width, dtype=floating)
        weights = torch.linspace(-1, 1, width * width).reshape(width, width)
        self.linear.load_state_dict({"weight": weights, "bias": weights[0]})
        self.gain = nn.Parameter(torch.empty(ROWS, width, dtype=floating))
        renew(self, width, dtype)
        self.train(training).requires_grad_(grad)


def renew(owner: nn.Module, width: int, dtype: torch.dtype) -> None:
    """Give ``owner`` the buffers that programs read, new, and its parameter the value that it has at first."""
    state = torch.linspace(-1, 3, ROWS * width).reshape(ROWS, width)
    owner._buffers.update({"state": state.to(dtype), "two": torch.tensor(2, dtype=dtype)})
    if "gain" in owner._parameters:
        owner.gain.data.copy_(1 - state)


class Writes(nn.Module):
    """A layer whose write no name tells of."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.add_(1)
