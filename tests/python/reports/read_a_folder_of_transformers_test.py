"""The user made an empty model and read a folder of transformers, whose files have other names and other tensors than the model: `weights=`."""

import json
import os

import pytest
import safetensors.torch
import tiny
import torch
import transformers
from ranks import on_one, on_ranks, on_two
from torch import nn
from training import config, mlp, offloaded, warned

import ebb
from ebb._conversions import Converted, Sources
from ebb._files import Files

# A type for each form of conversion in transformers' table.
FORMS = {
    "gpt_neox": "renames",
    "llava": "renames of a part",
    "mixtral": "stacked experts, gate beside up",
    "qwen3_moe": "stacked experts by the table of another type",
    "nemotron_h": "stacked experts",
    "kimi_k25": "a group of renames; divided projections that are permuted",
    "gte": "a prefix; divided projections",
    "lara_mini": "parts of different sizes",
    "olmo_hybrid": "projections beside one another",
    "qwen3_vl_moe": "transposed",
    "inkling2_text": "interleaved; rows that are left out; shifted layers",
    "ernie4_5_vl_moe": "experts that are divided among two tensors",
}
IS_FULL = bool(os.environ.get("EBB_FULL"))


def types_with_a_table():
    from transformers.conversion_mapping import _build_checkpoint_conversion_mapping

    return [model_type for model_type in _build_checkpoint_conversion_mapping() if model_type in transformers.CONFIG_MAPPING]


def assert_same(values, expected):
    assert values.keys() == expected.keys()
    for key, value in expected.items():
        assert values[key].shape == value.shape and torch.equal(values[key].float(), value.float()), key


def logits_of(model):
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 15).view(1, 12)).logits


def _read(folder, model_type, is_full=False):
    try:
        model = tiny.model_of(model_type)
    except Exception as error:
        if is_full:
            return f"{type(error).__name__}: {error}"
        raise
    settings = config(zero=offloaded(folder + "/swap") if ebb.world().size > 1 else {})
    if ebb.world().rank == 0:
        model.save_pretrained(folder, max_shard_size="100KB")
    ebb.initialize(mlp(), config()).close()  # ranks meet: the files are there
    kind = type(model)
    expected = kind.from_pretrained(folder).eval()
    with ebb.empty_parameters():
        empty = kind(expected.config).eval()
    engine = ebb.initialize(empty, settings, weights=folder)
    assert_same(engine.state_dict(), expected.state_dict())
    try:
        logits = logits_of(expected)
    except Exception:
        assert is_full or model_type == "gte", model_type  # it has other inputs or outputs
    else:
        assert torch.equal(logits_of(empty), logits)
    engine.save_pretrained(folder + "/again")
    engine.close()
    if ebb.world().rank == 0:
        read, report = kind.from_pretrained(folder + "/again", output_loading_info=True)
        assert not any(report.values()), report
        assert_same(read.state_dict(), expected.state_dict())
    return None


@pytest.mark.parametrize("ranks, model_type", [*(("one", form) for form in FORMS), ("two", "mixtral"), ("two", "inkling2_text")], indirect=["ranks"])
@on_ranks
def test_values_and_logits_are_those_of_from_pretrained(folder, model_type):
    _read(folder, model_type)


def _names_and_shapes(model_type):
    """In the type's default sizes and without values, where transformers does not accept the small ones."""
    from transformers.core_model_loading import revert_weight_conversion

    with torch.device("meta"):
        model = tiny.class_of(model_type)(transformers.CONFIG_MAPPING[model_type]())
    entries = model.state_dict(keep_vars=True)
    saved = {name: tensor.detach() for name, tensor in revert_weight_conversion(model, dict(model.state_dict())).items()}
    sources = Sources(model, entries, saved, lambda name: (list(saved[name].shape), saved[name].dtype))
    assert not sources.left_out
    for key, entry in entries.items():
        shape = sources.shapes[key] if key in sources.conversions else list(saved[sources.tensors[key]].shape)
        assert shape == list(entry.shape), key


@pytest.mark.skipif(not IS_FULL, reason="takes minutes: EBB_FULL=1")
@pytest.mark.parametrize("model_type", types_with_a_table() if IS_FULL else [])
def test_each_type_with_a_table(one, tmp_path, model_type):
    (why,) = one.run(_read, str(tmp_path), model_type, is_full=True)
    if why is None:
        return
    try:
        tiny.class_of(model_type)(transformers.CONFIG_MAPPING[model_type]())
    except ImportError as error:
        pytest.skip(f"it needs another package: {error}")
    _names_and_shapes(model_type)


@on_one
def test_conversions_are_held_two_at_a_time(folder):
    """Beside its slices a rank holds what two conversions have made, not the model."""
    model = tiny.model_of("mixtral")
    model.save_pretrained(folder)
    held, runs = [], []
    values = Converted.values

    def counted(self, key):
        result = values(self, key)
        held.append(len(self.held))
        runs.append(id(self.sources.conversions[key]))
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Converted, "values", counted)
        with ebb.empty_parameters():
            empty = type(model)(model.config)
        ebb.initialize(empty, config(), weights=folder).close()
    assert len(set(runs)) == 4 and max(held) == 2


def _refused(said, make, folder):
    with ebb.empty_parameters():
        model = make()
    with pytest.raises(ebb.Error, match=said):
        ebb.initialize(model, config(), weights=folder)


@on_one
def test_files_that_do_not_fit_are_named(folder):
    file = folder + "/model.safetensors"
    make = lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    values = make().state_dict()
    lacking = {key: value for key, value in values.items() if key not in ("0.weight", "2.bias", "1.running_mean")}
    safetensors.torch.save_file(lacking | {"old.weight": torch.ones(1)}, file)
    _refused(r"has no tensor '0.weight', '2.bias' and no buffer '1.running_mean'. The model has no 'old.weight', which are there", make, folder)
    safetensors.torch.save_file(values | {"old.weight": torch.ones(1), "head.bias": torch.ones(1)}, file)
    with ebb.empty_parameters():
        model = make()
    said = warned(lambda: ebb.initialize(model, config(), weights=folder).close())
    assert said == [f"'{folder}' has tensors that the model does not have: 'head.bias', 'old.weight'"]
    model = tiny.model_of("mixtral")
    model.save_pretrained(folder)
    experts = safetensors.torch.load_file(file)
    name = "model.layers.1.block_sparse_moe.experts.3.w1.weight"
    safetensors.torch.save_file({key: value for key, value in experts.items() if key != name}, file)
    empty = lambda: type(model)(model.config)
    one = "'model.layers.1.block_sparse_moe.experts.2.w3.weight'"
    _refused(f"transformers cannot convert .*{one}.* to 'model.layers.1.mlp.experts.gate_up_proj'", empty, folder)
    safetensors.torch.save_file(experts | {name: experts[name][:, :4].contiguous()}, file)
    _refused("transformers cannot convert", empty, folder)


@on_two
def test_a_rank_that_cannot_read_is_every_ranks_error(folder):
    model = tiny.model_of("mixtral")
    if ebb.world().rank == 0:
        model.save_pretrained(folder)
    ebb.initialize(mlp(), config()).close()

    def read(self, name, shape, read=Files._read):
        if "experts.3.w2" in name and ebb.world().rank == 1:
            raise OSError(5, f"cannot read {name}")
        return read(self, name, shape)

    with pytest.MonkeyPatch.context() as patch, ebb.empty_parameters():
        patch.setattr(Files, "_read", read)
        empty = type(model)(model.config)
        with pytest.raises((ebb.Error, OSError), match="mlp.experts.down_proj|cannot read model.layers.[01].block_sparse_moe.experts.3.w2.weight"):
            ebb.initialize(empty, config(), weights=folder)
    ebb.initialize(mlp(), config()).close()


@on_one
def test_a_config_in_utf_16_is_named(folder):
    path = folder + "/ds_config.json"
    with open(path, "w", encoding="utf-16") as file:
        file.write(json.dumps(config()))
    with pytest.raises(ebb.Error, match=f"'{path}' is not UTF-8, which JSON files must be") as caught:
        ebb.initialize(mlp(), path)
    assert caught.value.code == "INVALID_ARGUMENT"
