import json

import pytest

from distlion_lab.errors import DataError
from distlion_lab.tasks.models import read_model_config


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("not json", "cannot be read"),
        ("[1]", "model_type"),
        (json.dumps({"n_embd": 8}), "model_type"),
        (json.dumps({"model_type": "no such"}), "no such"),
        (json.dumps({"model_type": "gpt2", "n_embd": "wide"}), "not valid"),
        (json.dumps({"model_type": ["gpt2"]}), "model_type"),
        (json.dumps({"model_type": "gpt2", "dtype": "no such"}), "not valid"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_model_config_that_cannot_be_used_is_a_data_error(tmp_path, content, complaint):
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(DataError, match=complaint):
        read_model_config(path)


def test_missing_model_config_is_named(tmp_path):
    with pytest.raises(DataError, match=r"absent\.json"):
        read_model_config(tmp_path / "absent.json")


def test_model_config_keeps_the_fields_of_the_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", "hidden_size": 96}))
    assert read_model_config(path).hidden_size == 96


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"auto_map": {"AutoModelForCausalLM": "someone/code--model.Model"}}, "auto_map"),
        ({"attn_implementation": "someone/kernels"}, "someone/kernels"),
        ({"_attn_implementation": "someone/kernels:attend"}, "someone/kernels"),
        ({"attn_implementation": {"": "someone/kernels"}}, "someone/kernels"),
        ({"text_config": {"attn_implementation": "someone/kernels"}}, "someone/kernels"),
    ],
)
def test_model_config_that_names_code_of_the_hub_is_refused(tmp_path, fields, complaint):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gpt2", **fields}))
    with pytest.raises(DataError, match=complaint):
        read_model_config(path)


@pytest.mark.parametrize("name", [None, "eager", "sdpa"])
def test_model_config_may_choose_an_attention_of_torch(tmp_path, name):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gpt2", "attn_implementation": name}))
    assert read_model_config(path).model_type == "gpt2"
