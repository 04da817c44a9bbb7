"""Models as their libraries wrote them run split, and train as on one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from lightning_topt.graph.mesh_axes import Axis, Mesh
from lightning_topt.graph.op_config import Placement, Replicate, Shard
from lightning_topt.techniques.tensor_parallel.split_layouts import BlockRule
from tests.launch import run_ranks
from tests.techniques.tensor_parallel.on_ranks import check, compare

OUT, IN = (Shard(0),), (Shard(1),)
FUSED = (Shard(0, parts=3),)
Case = tuple[
    Callable[[], nn.Module], Callable[[nn.Module], Tensor], Mapping[str, tuple[Placement, ...]]
]


def ids(*shape: int, high: int = 48) -> Tensor:
    return torch.randint(2, high, shape, generator=torch.Generator().manual_seed(sum(shape)))


def values(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


# ---- Hugging Face --------------------------------------------------------------------------------


def llama(layers: int = 2) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    return transformers.LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=48,
        n_positions=16,
        n_embd=32,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.1,
        embd_pdrop=0.1,
        attn_pdrop=0.1,
    )
    return transformers.GPT2LMHeadModel(config)


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=48, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=64, max_position_embeddings=16,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=48,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        dropout_rate=0.1,
    )
    return transformers.T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    config = transformers.ViTConfig(
        image_size=16,
        patch_size=4,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
    )
    return transformers.ViTForImageClassification(config)


def mixtral(experts: str = "eager") -> nn.Module:
    config = transformers.MixtralConfig(
        vocab_size=48, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=8, num_key_value_heads=4, num_local_experts=4, num_experts_per_tok=2,
        output_router_logits=True,
    )  # fmt: skip
    config._experts_implementation = experts
    return transformers.MixtralForCausalLM(config)


def grouped_mixtral() -> nn.Module:
    return mixtral("grouped_mm")


def causal_loss(module: nn.Module) -> Tensor:
    loss: Tensor = module(input_ids=ids(2, 9), labels=ids(2, 9)).loss
    return loss


def masked_loss(module: nn.Module) -> Tensor:
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, 6:] = 0
    loss: Tensor = module(input_ids=ids(2, 9), attention_mask=mask, labels=ids(2, 9)).loss
    return loss


def image_loss(module: nn.Module) -> Tensor:
    loss: Tensor = module(pixel_values=values(2, 3, 16, 16), labels=torch.tensor([0, 1])).loss
    return loss


LLAMA = {
    "embed_tokens.weight": OUT,
    **dict.fromkeys(
        ("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight"),
        OUT,
    ),
    **dict.fromkeys(("o_proj.weight", "down_proj.weight"), IN),
    "lm_head.weight": OUT,
}
GPT2 = {
    "wte.weight": OUT,
    "c_attn.weight": (Shard(1, parts=3),),
    "c_attn.bias": FUSED,
    "attn.c_proj.weight": (Shard(0),),
    "c_fc.weight": IN,
    "c_fc.bias": OUT,
    "mlp.c_proj.weight": (Shard(0),),
}
BERT = {
    "word_embeddings.weight": OUT,
    **{
        f"{name}.{kind}": OUT
        for name in ("query", "key", "value", "intermediate.dense")
        for kind in ("weight", "bias")
    },
    "attention.output.dense.weight": IN,
    "output.dense.weight": IN,
    "predictions.bias": OUT,
}
T5 = {
    "shared.weight": OUT,
    "relative_attention_bias.weight": IN,
    **dict.fromkeys(("q.weight", "k.weight", "v.weight", "wi.weight"), OUT),
    **dict.fromkeys(("o.weight", "wo.weight"), IN),
}
VIT = {
    **{
        f"{name}.{kind}": OUT
        for name in ("q_proj", "k_proj", "v_proj", "fc1")
        for kind in ("weight", "bias")
    },
    "o_proj.weight": IN,
    "fc2.weight": IN,
}
MIXTRAL = {
    "embed_tokens.weight": OUT,
    **dict.fromkeys(("q_proj.weight", "k_proj.weight", "v_proj.weight"), OUT),
    "o_proj.weight": IN,
    "experts.gate_up_proj": (Shard(1, parts=2),),
    "experts.down_proj": (Shard(2),),
    "lm_head.weight": OUT,
}
BY_EXPERT = {**MIXTRAL, "experts.gate_up_proj": OUT, "experts.down_proj": OUT}

# ---- torch ---------------------------------------------------------------------------------------

ATTENTION = {"in_proj_weight": FUSED, "in_proj_bias": FUSED, "out_proj.weight": IN}
LAYER = {**ATTENTION, "linear1.weight": OUT, "linear1.bias": OUT, "linear2.weight": IN}


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def encoder_loss(module: nn.Module) -> Tensor:
    padding = torch.zeros(2, 9, dtype=torch.bool)
    padding[1, 7:] = True
    return F.mse_loss(
        module(values(2, 9, 32), src_key_padding_mask=padding), values(9, 2, 32).transpose(0, 1)
    )


def attention() -> nn.Module:
    return nn.MultiheadAttention(32, 4, dropout=0.1, kdim=32, vdim=32, add_bias_kv=False)


def attention_loss(module: nn.Module) -> Tensor:
    mixed, weights = module(values(7, 2, 32), values(9, 2, 32), values(9, 2, 32), need_weights=True)
    loss: Tensor = mixed.square().mean() + weights.square().mean()
    return loss


class Images(nn.Module):
    """Convolutions. In double precision: statistics of batches amplify rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm1 = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.depthwise, self.norm2 = (
            nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False),
            nn.BatchNorm2d(16),
        )
        self.point, self.norm3 = nn.Conv2d(16, 8, 1), nn.GroupNorm(4, 8)
        self.up, self.norm4 = (nn.ConvTranspose2d(8, 8, 2, stride=2), nn.GroupNorm(8, 8))
        self.pool, self.head = nn.MaxPool2d(2), nn.Linear(8, 8)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.norm1(self.stem(x)), inplace=True))
        x = self.norm3(self.point(F.relu6(self.norm2(self.depthwise(x)))))
        x = F.adaptive_avg_pool2d(F.relu(self.norm4(self.up(x))), 1)
        return self.head(x.flatten(1))


def images_loss(module: nn.Module) -> Tensor:
    return F.cross_entropy(
        module(values(4, 3, 8, 8).double()), torch.tensor([0, 1, 2, 3]), label_smoothing=0.1
    )


IMAGES = {
    **{f"{name}.{kind}": OUT for name in ("stem", "norm1", "norm2") for kind in ("weight", "bias")},
    "depthwise.weight": OUT,
    "point.weight": IN,
    "up.weight": IN,
    "up.bias": OUT,
    "norm4.weight": OUT,
    "norm4.bias": OUT,
    "head.weight": IN,
}

CASES: dict[str, Case] = {
    "llama": (llama, causal_loss, LLAMA),
    "gpt2": (gpt2, causal_loss, GPT2),
    "bert": (bert, masked_loss, BERT),
    "t5": (t5, masked_loss, T5),
    "vit": (vit, image_loss, VIT),
    "mixtral": (mixtral, causal_loss, MIXTRAL),
    "mixtral, grouped": (grouped_mixtral, causal_loss, MIXTRAL),
    "mixtral by expert": (grouped_mixtral, causal_loss, BY_EXPERT),
    "encoder": (encoder, encoder_loss, LAYER),
    "attention": (attention, attention_loss, ATTENTION),
    "images": (Images, images_loss, IMAGES),
}


def all_of(rank: int, cases: Mapping[str, Case], mesh: Mesh, **options: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, case in cases.items():
        try:
            found[name] = compare(rank, *case, mesh, **options)
        except Exception as error:
            raise RuntimeError(name) from error
    return found


# Of more ranks, those whose slices have parts, heads, experts or channels to be cut further.
ON_FOUR = ("llama", "gpt2", "mixtral, grouped", "attention", "images")


@pytest.mark.parametrize(("ranks", "names"), [(2, CASES), (4, ON_FOUR)])
def test_models(ranks: int, names: Iterable[str]) -> None:
    cases = {name: CASES[name] for name in names}
    results = run_ranks(all_of, ranks, cases, Mesh((Axis("tensor", ranks),)))
    for name in cases:
        check([found[name] for found in results])


def on_two_axes(
    placements: Mapping[str, tuple[Placement, ...]], *, other: bool
) -> dict[str, tuple[Placement, ...]]:
    """Weights cut along one dim twice, or along inputs and outputs."""
    found = {}
    for name, (shard,) in placements.items():
        assert isinstance(shard, Shard)
        twice = shard.parts == 1 and not any(
            word in name for word in ("bias", "embed", "head", "wte")
        )
        second = Shard(1 - shard.dim) if other else shard
        found[name] = (shard, second if twice else Replicate())
    return found


def test_models_on_two_axes() -> None:
    cases = {
        f"{name}, other dim: {other}": (*CASES[name][:2], on_two_axes(CASES[name][2], other=other))
        for name in ("llama", "gpt2")
        for other in (False, True)
    }
    results = run_ranks(all_of, 4, cases, Mesh((Axis("tensor_rows", 2), Axis("tensor_columns", 2))))
    for name in cases:
        check([found[name] for found in results])


# sums of (sample, step, channel), Korthikanti et al., arXiv 2205.05198
BY_STEP = BlockRule(sums=(Shard(1),))


def even_loss(module: nn.Module) -> Tensor:
    loss: Tensor = module(input_ids=ids(2, 8), labels=ids(2, 8)).loss
    return loss


def test_sequence_parallel() -> None:
    """Experts of Mixtral are picked by token, so tokens are gathered for each."""
    cases = {
        name: (CASES[name][0], even_loss, CASES[name][2])
        for name in ("llama", "gpt2", "bert", "t5", "mixtral")
    }
    results = run_ranks(partial(all_of, rules={"": BY_STEP}), 2, cases, Mesh((Axis("tensor", 2),)))
    for name in cases:
        check([found[name] for found in results], whole_calls=None if name == "mixtral" else 0)
