"""Models of installed packages, tiny and at random, with the activations that they run and what of these is found.

A row's ``executed`` is what one forward runs; `counting_mode` counts it, without the FX pass. ``compiled`` is what
torch.compile(backend="relu2ir") raises of it: all that is not a single primitive, unless the row says else, and why.
``fused`` is what `relu2ir.fuse` raises. It looks into each module by itself, so it cannot see

- ``self.act_fn(gate) * up``: the activation is a module of transformers, a leaf in the trace of its parent;
- a forward that compares with None, reads attributes or is decorated: it could do otherwise at another call;
- a formula in which the op would treat integers otherwise: no example tells the types.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import nn

Ops = Mapping[str, int]
Made = tuple[nn.Module, torch.Tensor]


@dataclass(frozen=True)
class Row:
    name: str
    package: str
    make: Callable[[], Made]
    executed: Ops
    fused: Ops = field(default_factory=dict)
    compiled: Ops | None = None
    slow: bool = False  # too much like another row for every run


def tokens() -> torch.Tensor:
    return torch.randint(3, 64, (4, 8))


def language_model(name: str, **config: Any) -> Callable[[], Made]:
    """A one-layer ``name``ForCausalLM of transformers."""

    def make() -> Made:
        import transformers

        sizes = {
            "vocab_size": 64,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 32,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "use_cache": False,
            "attn_implementation": "eager",  # compiled, sdpa is given another mask, and rounds otherwise
        }
        made = getattr(transformers, f"{name}Config")(**sizes | config)
        return getattr(transformers, f"{name}ForCausalLM")(made), tokens()

    return make


def nemotron_h(*layers: str, **config: Any) -> Callable[[], Made]:
    """Nemotron-H of these ``layers``: "mamba", "attention", "mlp" or "moe"."""
    mamba = {"mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 1, "ssm_state_size": 8, "chunk_size": 8}
    experts = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16,
        "n_group": 1,
        "topk_group": 1,
    }
    return language_model("NemotronH", layers_block_type=list(layers), head_dim=8, **mamba, **experts, **config)


def gpt2() -> Made:
    import transformers

    sizes = {"vocab_size": 64, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}
    config = transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2)
    return transformers.GPT2LMHeadModel(config), tokens()


def rwkv() -> Made:
    import transformers

    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 32, "context_length": 32}
    return transformers.RwkvForCausalLM(transformers.RwkvConfig(**sizes, use_cache=False)), tokens()


def clip() -> Made:
    import transformers

    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = transformers.CLIPTextConfig(**sizes, num_attention_heads=2, max_position_embeddings=32, eos_token_id=2)
    return transformers.CLIPTextModel(config), tokens()


def x_transformer(**settings: Any) -> Callable[[], Made]:
    """A one-layer decoder of x-transformers, with settings of its feed-forward."""

    def make() -> Made:
        from x_transformers import Decoder, TransformerWrapper

        layers = Decoder(dim=16, depth=1, heads=2, attn_dim_head=8, **{f"ff_{k}": v for k, v in settings.items()})
        return TransformerWrapper(num_tokens=64, max_seq_len=32, attn_layers=layers), tokens()

    return make


def caformer() -> Made:
    with without_torchvision():
        from timm.models.metaformer import Attention, LayerNorm2dNoBias, LayerNormNoBias, MetaFormer, SepConv
    mixers = {"token_mixers": [SepConv, Attention], "norm_layers": [LayerNorm2dNoBias, LayerNormNoBias]}
    return MetaFormer(num_classes=8, depths=(1, 1), dims=(8, 32), **mixers), torch.randn(2, 3, 32, 32)


def vision_transformer(**settings: Any) -> Callable[[], Made]:
    """A one-layer vision transformer of timm; ``mlp_layer`` by its name in timm.layers."""

    def make() -> Made:
        with without_torchvision():
            import timm.layers
            from timm.models.vision_transformer import VisionTransformer
        given = {name: getattr(timm.layers, value) for name, value in settings.items()}
        sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 8}
        return VisionTransformer(**sizes, **given), torch.randn(2, 3, 16, 16)

    return make


class _Placeholder(type):
    """A class of torchvision that no model here is made of; ``InterpolationMode.NEAREST`` is its name."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _Torchvision(MetaPathFinder, Loader):
    """Finds torchvision and everything below it, empty: modules of placeholders."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == "torchvision" else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        class Module(ModuleType):
            def __getattr__(self, name: str) -> type:
                if name.startswith("__"):
                    raise AttributeError(name)
                return _Placeholder(name, (), {})

        return Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


@contextmanager
def without_torchvision() -> Iterator[None]:
    """Lets timm be imported where torchvision is not installed: beside a CPU build of torch its operators fail."""
    if find_spec("torchvision") is not None:
        yield
        return
    finder = _Torchvision()
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]


RELU2, RELU2_MUL, SILU_MUL = {"relu_squared": 1}, {"relu_squared_mul": 1}, {"silu_mul": 1}
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
TF, XT, TIMM = "transformers", "x_transformers", "timm"

MODELS = [
    Row("Nemotron", TF, language_model("Nemotron", num_hidden_layers=2), {"relu_squared": 2}, {"relu_squared": 2}),
    Row("Nemotron-H", TF, nemotron_h("mamba", "mlp"), {**RELU2, **SILU_MUL, "silu": 1}, RELU2),
    Row("Nemotron-H MoE", TF, nemotron_h("moe"), {"relu_squared": 2}, {"relu_squared": 2}),
    Row("Arcee", TF, language_model("Arcee"), RELU2, RELU2),
    Row("Persimmon", TF, language_model("Persimmon"), RELU2, RELU2, slow=True),
    Row("NanoChat", TF, language_model("NanoChat"), RELU2, RELU2),
    Row("RWKV", TF, rwkv, {"relu_squared": 2}),
    Row("BitNet", TF, language_model("BitNet"), RELU2_MUL, RELU2),
    Row("Llama, relu2", TF, language_model("Llama", hidden_act="relu2"), RELU2_MUL, RELU2),
    Row("Llama", TF, language_model("Llama"), SILU_MUL),
    Row("Qwen2", TF, language_model("Qwen2"), SILU_MUL, slow=True),
    Row("Qwen3", TF, language_model("Qwen3", head_dim=8), SILU_MUL),
    Row("Gemma", TF, language_model("Gemma", head_dim=8), {"gelu_tanh_mul": 1}),
    Row("Gemma 2", TF, language_model("Gemma2", head_dim=8), {"gelu_tanh_mul": 1}, slow=True),
    Row("Phi", TF, language_model("Phi"), {"gelu_new": 1}),
    Row("Phi-3", TF, language_model("Phi3"), {"silu_and_mul": 1}),
    Row("GPT-2", TF, gpt2, {"gelu_new": 1}),
    Row("CLIP", TF, clip, {"gelu_quick": 1}, {"gelu_quick": 1}),
    Row("Mixtral", TF, language_model("Mixtral", **MOE), {"silu_and_mul": 1}),
    Row("gpt-oss", TF, language_model("GptOss", head_dim=8, **MOE), {"swigluoai_and_mul": 1}),
    # Its beta and eps are buffers, which may change; the op's are numbers.
    Row("Apertus", TF, language_model("Apertus"), {"xielu": 1}, compiled={}),
    Row("relu squared", XT, x_transformer(relu_squared=True), RELU2, RELU2),
    Row("relu squared, gated", XT, x_transformer(glu=True, relu_squared=True), RELU2_MUL, RELU2),
    Row("SwiGLU", XT, x_transformer(glu=True, swish=True), {"mul_and_silu": 1}),
    Row("GEGLU", XT, x_transformer(glu=True), {"gelu_mul": 1}),
    # StarReLU's scale and bias are parameters of one element, not numbers, and no whole tensors either.
    Row("CAFormer", TIMM, caformer, {"star_relu": 3, **RELU2}, {"relu_squared": 4}, {"relu_squared": 4}),
    Row("ViT", TIMM, vision_transformer(), {"gelu": 1}),
    Row("ViT, QuickGELU", TIMM, vision_transformer(act_layer="QuickGELU"), {"gelu_quick": 1}, {"gelu_quick": 1}),
    Row("ViT, GEGLU", TIMM, vision_transformer(mlp_layer="SwiGLU"), {"gelu_mul": 1}, {"gelu_mul": 1}),
    Row("ViT, packed GEGLU", TIMM, vision_transformer(mlp_layer="SwiGLUPacked"), {"gelu_and_mul": 1}),
]
