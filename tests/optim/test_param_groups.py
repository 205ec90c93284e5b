"""Param groups by kind, on many architectures: which tensor goes where."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import distlion
from distlion import errors
from distlion.optim.param_groups import describe_groups, group_params
from tiers import in_tiers

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}


def make_gpt2() -> tuple[nn.Module, set[str]]:
    transformers = pytest.importorskip("transformers")

    config = transformers.GPT2Config(
        n_layer=1, n_embd=32, n_head=2, vocab_size=50, bos_token_id=0, eos_token_id=0
    )
    hidden = {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}
    return transformers.GPT2LMHeadModel(config), {f"transformer.h.0.{n}.weight" for n in hidden}


def make_llama() -> tuple[nn.Module, set[str]]:
    transformers = pytest.importorskip("transformers")

    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, vocab_size=50))
    hidden = {f"self_attn.{n}_proj" for n in "qkvo"} | {
        f"mlp.{n}_proj" for n in ("gate", "up", "down")
    }
    return model, {f"model.layers.0.{n}.weight" for n in hidden}


def make_bert() -> tuple[nn.Module, set[str]]:
    """Its decoder is tied to the embedding, and said to be the head."""
    transformers = pytest.importorskip("transformers")

    model = transformers.BertForMaskedLM(transformers.BertConfig(**SMALL, vocab_size=50))
    inside = ("attention.self.query", "attention.self.key", "attention.self.value")
    more = ("attention.output.dense", "intermediate.dense", "output.dense")
    hidden = {f"bert.encoder.layer.0.{n}.weight" for n in (*inside, *more)}
    return model, hidden | {"cls.predictions.transform.dense.weight"}


def make_vit() -> tuple[nn.Module, set[str]]:
    transformers = pytest.importorskip("transformers")

    model = transformers.ViTForImageClassification(transformers.ViTConfig(**SMALL, num_labels=3))
    heads = {f"vit.layers.0.attention.{n}_proj.weight" for n in "qkvo"}
    mlp = {f"vit.layers.0.mlp.{n}.weight" for n in ("fc1", "fc2")}
    return model, heads | mlp | {"vit.embeddings.patch_embeddings.projection.weight"}


def make_resnet() -> tuple[nn.Module, set[str]]:
    """Convolutions are hidden, the classifier and batch norms are not."""
    transformers = pytest.importorskip("transformers")

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
    peft = pytest.importorskip("peft")

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


class OldTitan(nn.Module):
    """The names of torchtitan's Llama up to 0.2, which many forks keep; a head of its own or not.

    Its last linear layer is w3, which has the shape of w1.
    """

    def __init__(self, *, n_layers: int, is_tied: bool = False) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(50, 32)
        self.layers = nn.ModuleDict()
        for index in range(n_layers):
            block = nn.Module()
            block.attention, block.feed_forward = nn.Module(), nn.Module()
            for name, rows in (("wq", 32), ("wk", 16), ("wv", 16), ("wo", 32)):
                setattr(block.attention, name, nn.Linear(32, rows, bias=False))
            block.feed_forward.w1 = nn.Linear(32, 64, bias=False)
            block.feed_forward.w2 = nn.Linear(64, 32, bias=False)
            block.feed_forward.w3 = nn.Linear(32, 64, bias=False)
            block.attention_norm, block.ffn_norm = nn.RMSNorm(32), nn.RMSNorm(32)
            self.layers[str(index)] = block
        self.norm = nn.RMSNorm(32)
        if not is_tied:
            self.output = nn.Linear(32, 50, bias=False)


TITAN_BLOCK = [f"attention.w{n}" for n in "qkvo"] + [f"feed_forward.w{n}" for n in "123"]


def make_old_titan() -> tuple[nn.Module, set[str]]:
    return OldTitan(n_layers=2), {f"layers.{i}.{n}.weight" for i in (0, 1) for n in TITAN_BLOCK}


def make_functional_titan() -> tuple[nn.Module, set[str]]:
    """Its outputs are F.linear(x, tok_embeddings.weight): no linear layer is a head."""
    model = OldTitan(n_layers=1, is_tied=True)
    return model, {f"layers.0.{n}.weight" for n in TITAN_BLOCK}


def make_titan() -> tuple[nn.Module, set[str]]:
    """As torchtitan builds it today, with the weights of query, key and value in one matrix."""
    llama3 = pytest.importorskip("torchtitan.models.llama3")
    with torch.device("meta"):
        model = llama3.llama3_configs["debugmodel"]("flex").build()
    names = ("attention.qkv_linear.wqkv", "attention.wo", *TITAN_BLOCK[4:])
    hidden = {f"layers.{i}.{n}.weight" for i in range(len(model.layers)) for n in names}
    assert {"tok_embeddings.weight", "lm_head.weight"} <= dict(model.named_parameters()).keys()
    return model, hidden


def make_functional_gpt() -> tuple[nn.Module, set[str]]:
    """Positions are embedded too, and a matrix is as wide as there are positions."""
    model = nn.Sequential()
    model.add_module("tokens", nn.Embedding(256, 32))
    model.add_module("positions", nn.Embedding(32, 32))
    for index in range(2):
        block = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
        model.add_module(f"block{index}", block)
    return model, {f"block{i}.{n}.weight" for i in (0, 1) for n in (1, 3)}


def make_byte_gpt() -> tuple[nn.Module, set[str]]:
    """Its head has the shape of a hidden matrix, and of the embedding."""
    model = nn.Sequential()
    model.add_module("tokens", nn.Embedding(256, 64))
    model.add_module("mlp", nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)))
    model.add_module("head", nn.Linear(64, 256, bias=False))
    return model, {"mlp.0.weight", "mlp.2.weight"}


def make_text_classifier() -> tuple[nn.Module, set[str]]:
    """As in torch's tutorial: the classes are not the words."""
    model = nn.Sequential()
    model.add_module("words", nn.EmbeddingBag(50, 16))
    model.add_module("body", nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)))
    model.add_module("classes", nn.Linear(16, 4))
    return model, {"body.0.weight", "body.2.weight"}


def make_even_mlp() -> tuple[nn.Module, set[str]]:
    """All its layers have one shape; without an embedding the last one is the head."""
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))), {"0.weight", "1.weight"}


def make_headless_llama() -> tuple[nn.Module, set[str]]:
    transformers = pytest.importorskip("transformers")

    model = transformers.LlamaModel(
        transformers.LlamaConfig(**SMALL | {"num_hidden_layers": 2}, vocab_size=50)
    )
    return model, {name for name, _ in model.named_parameters() if "_proj" in name}


def make_adapted_classifier() -> tuple[nn.Module, set[str]]:
    """The head is trained whole beside adapters, which stand after it."""
    peft = pytest.importorskip("peft")

    config = peft.LoraConfig(r=2, target_modules=["classifier.0"], modules_to_save=["classifier.2"])
    return peft.get_peft_model(make_cnn()[0], config), set()


MODELS = [
    make_gpt2,
    make_llama,
    make_bert,
    make_vit,
    make_resnet,
    make_cnn,
    make_lora,
    make_torch_transformer,
    make_old_titan,
    make_functional_titan,
    make_titan,
    make_functional_gpt,
    make_byte_gpt,
    make_text_classifier,
    make_even_mlp,
    make_headless_llama,
    make_adapted_classifier,
]
QUICK = (make_gpt2, make_cnn, make_torch_transformer, make_functional_titan, make_byte_gpt)
QUICK += (make_even_mlp,)


@pytest.mark.parametrize(
    "make", in_tiers(MODELS, lambda make: make in QUICK), ids=lambda make: make.__name__
)
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
    if any(param.is_meta for param in named.values()):
        return
    optimizer = distlion.VirtualCluster(groups, lr=1e-3, workers=2)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(found)


def test_a_head_and_patterns_leave_matrices_out() -> None:
    model, _ = make_cnn()
    groups = group_params(model, head="classifier.0", exclude=["features.*"])
    hidden = [name for group in groups if group["orthogonalize"] for name, _ in group["params"]]
    assert hidden == ["classifier.2.weight"]


def list_hidden(model: nn.Module, **arguments: Any) -> set[str]:
    groups = group_params(model, **arguments)
    return {name for group in groups if group["orthogonalize"] for name, _ in group["params"]}


def test_one_block_without_a_head_takes_the_name_of_the_embedding() -> None:
    """No two of its layers have one shape, so that the last one looks like a head."""
    model = nn.Sequential()
    model.add_module("tokens", nn.Embedding(256, 32))
    model.add_module("mlp", nn.Sequential(nn.Linear(32, 128), nn.Linear(128, 32)))
    assert list_hidden(model) == {"mlp.0.weight"}
    assert list_hidden(model, head="tokens") == {"mlp.0.weight", "mlp.1.weight"}


def test_a_weight_tied_to_an_embedding_is_never_orthogonalized() -> None:
    model, hidden = make_torch_transformer()
    assert list_hidden(model, head="block.linear2") == hidden - {"block.linear2.weight"}


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


def test_a_lazy_module_is_refused_by_name() -> None:
    with pytest.raises(errors.UnsupportedTypeError, match=r"0\.weight belongs to a lazy module"):
        group_params(nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2)))


def test_a_table_shows_where_each_parameter_went() -> None:
    groups = group_params(make_cnn()[0], weight_decay=0.1)
    text = describe_groups(groups)
    settings = "orthogonalize=True, cautious=False, weight_decay=0.1"
    assert f"{settings}\n    features.0.weight  (8, 3, 3, 3)" in text
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


def test_decay_is_the_optimizers_where_none_is_given() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = distlion.Lion(group_params(model), lr=0.1, weight_decay=0.3, cautious=True)
    decays = {
        tuple(param.shape): group["weight_decay"]
        for group in optimizer.param_groups
        for param in group["params"]
    }
    assert decays == {(4, 4): 0.3, (2, 4): 0.3, (4,): 0.0, (2,): 0.0}


def test_mask_of_the_optimizer_does_not_reach_matrices() -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 2))
    optimizer = distlion.Lion(group_params(model), lr=0.1, cautious=True)
    matrices, *others = optimizer.param_groups
    assert (matrices["orthogonalize"], matrices["cautious"]) == (True, False)
    assert all(group["cautious"] for group in others)


def test_convolutions_that_are_no_matrix_stay_out() -> None:
    model = nn.Sequential(
        *(nn.Conv2d(8, 8, 3, groups=8, bias=False), nn.ConvTranspose2d(8, 8, 3, bias=False)),
        *(nn.Conv2d(8, 8, 3, bias=False), nn.Flatten(), nn.Linear(8, 2, bias=False)),
    )
    assert list_hidden(model) == {"2.weight"}
