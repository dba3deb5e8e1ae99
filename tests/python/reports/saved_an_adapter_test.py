"""The user trained an adapter of peft and saved it: the files have the keys and values of peft's own, and peft loads them."""

import json

import peft
import pytest
import safetensors.torch
import torch
from ranks import on_one, on_ranks
from training import config, llama, offloaded, token_batches

import ebb

TASK = {"task_type": "CAUSAL_LM"}
LORA = {**TASK, "r": 4, "init_lora_weights": False}
ADAPTERS = {
    "lora": lambda: peft.LoraConfig(target_modules=["q_proj", "v_proj"], **LORA),
    "dora": lambda: peft.LoraConfig(target_modules=["q_proj", "down_proj"], use_dora=True, **LORA),
    "with a bias": lambda: peft.LoraConfig(target_modules=["q_proj"], bias="lora_only", lora_bias=True, **LORA),
    "of an embedding": lambda: peft.LoraConfig(target_modules=["embed_tokens", "q_proj"], **LORA),
    "modules_to_save": lambda: peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["norm", "lm_head"], **LORA),
    "tied modules": lambda: peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["embed_tokens"], ensure_weight_tying=True, **LORA),
    "some tokens": lambda: peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices={"embed_tokens": [1, 5]}, **LORA),
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], init_ia3_weights=False, **TASK),
    "adalora": lambda: peft.AdaLoraConfig(target_modules=["q_proj"], total_step=10, init_r=4, target_r=2, **TASK),
    "loha": lambda: peft.LoHaConfig(target_modules=["q_proj"], r=2, init_weights=False, **TASK),
    "vera": lambda: peft.VeraConfig(target_modules=["q_proj"], r=4, init_weights=False, **TASK),
    "oft": lambda: peft.OFTConfig(target_modules=["q_proj"], oft_block_size=8, r=0, init_weights=False, **TASK),
    "prompt": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, **TASK),
    "prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=3, **TASK),
    "p-tuning": lambda: peft.PromptEncoderConfig(num_virtual_tokens=3, encoder_hidden_size=16, **TASK),
}


def make(kind, name="default"):
    base = llama(tie_word_embeddings=kind == "tied modules")
    torch.manual_seed(3)
    model = peft.get_peft_model(base, ADAPTERS[kind](), adapter_name=name)
    with torch.no_grad():  # of no initialization, such as a B of zeros
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def read(folder):
    with open(folder + "/adapter_config.json") as file:
        return safetensors.torch.load_file(folder + "/adapter_model.safetensors"), json.load(file)


@pytest.mark.parametrize("ranks, kind", [*(("one", kind) for kind in ADAPTERS), *(("two", kind) for kind in ("dora", "tied modules", "prompt"))],
                         indirect=["ranks"])
@on_ranks
def test_the_file_is_pefts_own(folder, kind):
    engine = ebb.initialize(make(kind), config(zero=offloaded(folder + "/swap") if ebb.world().size > 1 else {}))
    engine.save_pretrained(folder + "/ours", trainable_only=True)
    engine.close()
    if engine.world.rank != 0:
        return
    plain = make(kind)
    plain.save_pretrained(folder + "/theirs")
    (values, described), (expected, expected_description) = read(folder + "/ours"), read(folder + "/theirs")
    assert sorted(values) == sorted(expected)
    for key, value in expected.items():
        assert values[key].dtype == value.dtype and torch.equal(values[key], value), key
    assert described == expected_description
    loaded = peft.PeftModel.from_pretrained(llama(tie_word_embeddings=kind == "tied modules"), folder + "/ours").eval()
    ids = token_batches(1, 1)[0][0]["input_ids"]
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, plain.eval()(input_ids=ids).logits)


@on_one
def test_the_active_one_of_two_is_saved(folder):
    model = make("lora", "first")
    model.add_adapter("second", ADAPTERS["dora"]())
    model.set_adapter("second")
    engine = ebb.initialize(model, config())
    engine.save_pretrained(folder, trainable_only=True)
    values = engine.state_dict()
    saved, _ = read(folder)
    assert saved and all(torch.equal(values[_of_second(key)], value) for key, value in saved.items())
    engine.close()


def _of_second(key):
    for part in ("lora_A", "lora_B"):
        key = key.replace(f"{part}.weight", f"{part}.second.weight")
    return key + ".second.weight" if key.endswith("lora_magnitude_vector") else key
