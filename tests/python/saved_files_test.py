"""Files of models: what a killed or failed writer leaves, and what readers say about files of other programs."""

import pytest
import safetensors.torch
import torch
from torch import nn
from training import config, gpt2, mlp

import ebb


def _with_ebb(folder, described):
    import transformers

    with ebb.empty_parameters():
        model = transformers.GPT2LMHeadModel(described)
    with ebb.initialize(model, config(), weights=folder) as engine:
        return engine.state_dict()


def _other_files(folder):
    def refused(said, make=mlp):
        with ebb.empty_parameters():
            model = make()
        with pytest.raises(ebb.Error, match=said):
            ebb.initialize(model, config(), weights=folder)

    index = f"{folder}/model.safetensors.index.json"
    for text in ("", "{}", "[]", '{"weight_map": 1}', '{"weight_map": {"a": 1}}'):
        with open(index, "w") as file:
            file.write(text)
        refused("index.json' is not an index of a model's files")
    values = mlp().state_dict()
    name = next(iter(values))
    for dtype, shown in ((torch.float64, "F64"), (torch.float8_e4m3fn, "F8_E4M3")):
        safetensors.torch.save_file(dict(values, **{name: values[name].to(dtype)}), f"{folder}/model.safetensors")
        refused(f"'{name}' of '{folder}' is {shown}, not F32, BF16 or F16")
    model = gpt2()
    tied = {key: value.clone() for key, value in model.state_dict().items()}
    safetensors.torch.save_file(tied, f"{folder}/model.safetensors")
    _with_ebb(folder, model.config)
    tied["lm_head.weight"][-1, -1] += 1
    safetensors.torch.save_file(tied, f"{folder}/model.safetensors")
    with pytest.raises(ebb.Error, match="'transformer.wte.weight' and 'lm_head.weight' are one parameter, and have different values"):
        _with_ebb(folder, model.config)


def test_files_of_other_programs_that_do_not_fit_are_named(one, tmp_path):
    one.run(_other_files, str(tmp_path))


def _buffer_of_another_shape():
    engine = ebb.initialize(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), config())
    with pytest.raises(ebb.Error, match=r"buffer '1.running_mean' has the shape \[4\], and was given \[1\]"):
        engine.load_state_dict(dict(engine.state_dict(), **{"1.running_mean": torch.ones(1)}))
    engine.close()


def test_a_buffer_of_another_shape_is_refused(one):
    one.run(_buffer_of_another_shape)
