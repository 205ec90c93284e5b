"""Param groups by kind, on eight architectures: which tensor goes where."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import distlion
from distlion import errors
from distlion.optim.param_groups import describe_groups, group_params

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}


def make_gpt2() -> tuple[nn.Module, set[str]]:
    import transformers

    config = transformers.GPT2Config(
        n_layer=1, n_embd=32, n_head=2, vocab_size=50, bos_token_id=0, eos_token_id=0
    )
    hidden = {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}
    return transformers.GPT2LMHeadModel(config), {f"transformer.h.0.{n}.weight" for n in hidden}


def make_llama() -> tuple[nn.Module, set[str]]:
    import transformers

    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, vocab_size=50))
    hidden = {f"self_attn.{n}_proj" for n in "qkvo"} | {
        f"mlp.{n}_proj" for n in ("gate", "up", "down")
    }
    return model, {f"model.layers.0.{n}.weight" for n in hidden}


def make_bert() -> tuple[nn.Module, set[str]]:
    """Its decoder is tied to the embedding, and said to be the head."""
    import transformers

    model = transformers.BertForMaskedLM(transformers.BertConfig(**SMALL, vocab_size=50))
    inside = ("attention.self.query", "attention.self.key", "attention.self.value")
    more = ("attention.output.dense", "intermediate.dense", "output.dense")
    hidden = {f"bert.encoder.layer.0.{n}.weight" for n in (*inside, *more)}
    return model, hidden | {"cls.predictions.transform.dense.weight"}


def make_vit() -> tuple[nn.Module, set[str]]:
    import transformers

    model = transformers.ViTForImageClassification(transformers.ViTConfig(**SMALL, num_labels=3))
    heads = {f"vit.layers.0.attention.{n}_proj.weight" for n in "qkvo"}
    mlp = {f"vit.layers.0.mlp.{n}.weight" for n in ("fc1", "fc2")}
    return model, heads | mlp | {"vit.embeddings.patch_embeddings.projection.weight"}


def make_resnet() -> tuple[nn.Module, set[str]]:
    """Convolutions are hidden, the classifier and batch norms are not."""
    import transformers

    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=3
    )
    model = transformers.ResNetForImageClassification(config)
    names = {name for name, module in model.named_modules() if isinstance(module, nn.Conv2d)}
    return model, {f"{name}.weight" for name in names}


def make_cnn() -> tuple[nn.Module, set[str]]:
    """As torchvision builds them: a body, and a classifier of several layers."""
    model = nn.Sequential()
    model.add_module("features", nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()))
    model.add_module("classifier", nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 10)))
    return model, {"features.0.weight", "classifier.0.weight"}


def make_lora() -> tuple[nn.Module, set[str]]:
    """Adapters are left to cautious votes; all else is frozen."""
    import peft

    model, _ = make_llama()
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config), set()


def make_torch_transformer() -> tuple[nn.Module, set[str]]:
    """torch keeps the weights of query, key and value in one raw parameter."""
    model = nn.Sequential()
    model.add_module("tokens", nn.Embedding(50, 32))
    model.add_module("block", nn.TransformerEncoderLayer(32, 2, 64))
    model.add_module("head", nn.Linear(32, 50, bias=False))
    model.head.weight = model.tokens.weight
    inside = ("self_attn.in_proj_weight", "self_attn.out_proj.weight")
    return model, {f"block.{n}" for n in (*inside, "linear1.weight", "linear2.weight")}


MODELS = [
    make_gpt2,
    make_llama,
    make_bert,
    make_vit,
    make_resnet,
    make_cnn,
    make_lora,
    make_torch_transformer,
]


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_hidden_matrices_alone_are_orthogonalized(
    make: Callable[[], tuple[nn.Module, set[str]]],
) -> None:
    model, hidden = make()
    groups = group_params(model, weight_decay=0.1)
    named = dict(model.named_parameters())
    found = {name: group for group in groups for name, _ in group["params"]}
    assert set(found) == {name for name, param in named.items() if param.requires_grad}
    assert {name for name, group in found.items() if group.get("orthogonalize")} == hidden
    for name, group in found.items():
        assert group.get("cautious", False) != group.get("orthogonalize", False)
        assert group["weight_decay"] == (0.1 if named[name].ndim > 1 else 0.0)
    optimizer = distlion.VirtualCluster(groups, lr=1e-3, workers=2)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(found)


def test_a_head_and_patterns_leave_matrices_out() -> None:
    model, _ = make_cnn()
    groups = group_params(model, head="classifier.0", exclude=["features.*"])
    hidden = [name for group in groups if "orthogonalize" in group for name, _ in group["params"]]
    assert hidden == ["classifier.2.weight"]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"head": "nowhere"}, errors.InvalidArgumentError, "no such module"),
        ({"exclude": ["*.nowhere"]}, errors.InvalidArgumentError, "matches '\\*.nowhere'"),
        ({"exclude": "*.weight"}, errors.UnsupportedTypeError, "a list of patterns"),
    ],
)
def test_a_misspelt_name_is_refused(
    arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        group_params(make_cnn()[0], **arguments)


def test_a_table_shows_where_each_parameter_went() -> None:
    groups = group_params(make_cnn()[0], weight_decay=0.1)
    text = describe_groups(groups)
    assert "orthogonalize=True\n    features.0.weight  (8, 3, 3, 3)" in text
    optimizer = distlion.Lion(groups)
    assert "classifier.2.bias  (10,)" in describe_groups(optimizer.param_groups)


@pytest.mark.parametrize("shape", [(), (5,), (1, 5), (5, 1), (5, 1, 1)])
def test_a_parameter_that_is_no_matrix_is_refused_by_name(shape: tuple[int, ...]) -> None:
    group = {"params": [("odd", nn.Parameter(torch.zeros(shape)))], "orthogonalize": True}
    for make in (distlion.Lion, distlion.DistributedLion):
        with pytest.raises(errors.InvalidArgumentError, match=r"odd.*two rows and columns"):
            make([group])


def test_what_orthogonalized_votes_do_not_go_with_is_refused() -> None:
    group = {"params": [nn.Parameter(torch.zeros(2, 3))], "orthogonalize": True}
    with pytest.raises(errors.InvalidArgumentError, match="cautious=True"):
        distlion.DistributedLion([{**group, "cautious": True}])
    with pytest.raises(errors.InvalidArgumentError, match="signs of gradients"):
        distlion.DistributedLion([{**group, "aggregation": distlion.MaskedVote()}])
    with pytest.raises(errors.UnsupportedTypeError, match="expected True or False"):
        distlion.Lion([{**group, "orthogonalize": 1}])


def test_a_state_keeps_the_option_and_a_misfit_is_refused() -> None:
    matrix, vector = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(6))
    saved = distlion.Lion([{"params": [matrix], "orthogonalize": True}]).state_dict()
    plain = distlion.Lion([matrix])
    plain.load_state_dict(saved)
    assert plain.param_groups[0]["orthogonalize"] is True
    saved["state"] = {}
    with pytest.raises(errors.CheckpointError):
        distlion.Lion([vector]).load_state_dict(saved)
