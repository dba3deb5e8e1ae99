"""transformers' from_pretrained at stage 3, which makes and loads models within zero.Init."""

import contextlib
import gc
import os

import loops
import pytest
import torch
from ranks import on_ranks, on_two
from zero_test import bytes_alone

both = pytest.mark.parametrize("ranks", ["one", "two"], indirect=True)


@contextlib.contextmanager
def _stage_3(**more):
    deepspeed = loops.deepspeed()
    from transformers.integrations import HfDeepSpeedConfig

    deepspeed.init_distributed()
    config = HfDeepSpeedConfig(loops.config(3, **more))  # transformers has a weak reference
    yield deepspeed
    del config
    gc.collect()


def _saved(folder, kind="llama", without=(), **more):
    """A model with random weights, whose files rank 0 writes."""
    import transformers
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    deepspeed = loops.deepspeed()
    deepspeed.init_distributed()
    sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, vocab_size=64, **more)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **sizes))
    if deepspeed.comm.get_rank() == 0:
        model.save_pretrained(folder)
        if without:
            from safetensors.torch import load_file, save_file

            values = load_file(f"{folder}/model.safetensors")
            save_file({key: value for key, value in values.items() if key not in without}, f"{folder}/model.safetensors", {"format": "pt"})
    deepspeed.comm.barrier()
    return model


def _loaded(folder):
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@both
@on_ranks
def test_a_checkpoint_in_fp32_gives_parameters_in_bf16_and_its_digits_to_the_masters(folder):
    plain, half = _saved(folder), {"bf16": {"enabled": True}}
    with _stage_3(**half) as deepspeed:
        model = _loaded(folder)
        assert {one.dtype for one in model.parameters()} == {model.dtype} == {torch.bfloat16}
        engine = loops.begin(model, loops.config(3, **half))
        for name, one in model.named_parameters():
            assert torch.equal(deepspeed.utils.safe_get_full_fp32_param(one), plain.get_parameter(name))
        engine.destroy()


def _batch(step, rank=0):
    return torch.randint(0, 64, (2, 6), generator=torch.Generator().manual_seed(10 * step + rank))


@both
@pytest.mark.parametrize("kind, more", [("llama", {"tie_word_embeddings": True}), ("mixtral", {"num_local_experts": 2, "num_experts_per_tok": 1})])
@on_ranks
def test_a_model_is_loaded_trained_and_generates(kind, more, folder):
    plain = _saved(folder, kind, **more)
    with _stage_3():
        model = _loaded(folder)
        assert {one.numel() for one in model.parameters()} == {0}
        engine = loops.begin(model, loops.config(3), loops.sgd)
        assert all(torch.equal(value, plain.state_dict()[name]) for name, value in engine.module_state_dict().items())
        optimizer = loops.sgd(plain.parameters())
        for step in range(2):
            ids = _batch(step, engine.global_rank)
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
            for rank in range(engine.world_size):
                (plain(input_ids=_batch(step, rank), labels=_batch(step, rank)).loss / engine.world_size).backward()
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            options = dict(max_new_tokens=5, do_sample=False, pad_token_id=0)
            assert torch.equal(engine.module.generate(ids, **options), plain.generate(ids, **options))
        for name, value in engine.module_state_dict().items():
            assert (value - plain.state_dict()[name]).abs().max() < 1e-5, name
        engine.destroy()


@both
@on_ranks
def test_missing_weights_are_made_and_embeddings_are_resized(folder):
    lacks = "model.layers.1.mlp.up_proj.weight"
    plain = _saved(folder, without=[lacks], tie_word_embeddings=True)
    with _stage_3() as deepspeed:
        model = _loaded(folder)
        model.resize_token_embeddings(70)
        assert model.lm_head.weight is model.model.embed_tokens.weight and model.config.vocab_size == 70
        engine = loops.begin(model, loops.config(3), loops.sgd)
        values = engine.module_state_dict()
        assert torch.equal(values["lm_head.weight"][:64], plain.state_dict()["lm_head.weight"]) and values["lm_head.weight"].shape == (70, 16)
        made = values[lacks]
        assert 0 < made.abs().max() < 1 and not torch.equal(made, plain.state_dict()[lacks])
        of_rank_0 = made.clone()
        deepspeed.comm.broadcast(of_rank_0, src=0)
        assert torch.equal(made, of_rank_0)
        ids = _batch(0, engine.global_rank)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
        engine.destroy()


@on_two
def test_a_host_has_one_copy_of_a_model_that_is_loaded(folder):
    import transformers

    loops.deepspeed().init_distributed()
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=4, vocab_size=4096
    )
    if loops.deepspeed().comm.get_rank() == 0:
        transformers.LlamaForCausalLM(config).save_pretrained(folder)
    loops.deepspeed().comm.barrier()
    gc.collect()
    size = os.path.getsize(f"{folder}/model.safetensors")
    with _stage_3():
        before = bytes_alone()
        model = _loaded(folder)
        assert bytes_alone() - before < size / 4
        engine = loops.begin(model, loops.config(3), loops.sgd)
        assert bytes_alone() - before < size  # this rank's half of masters and of gradients
        engine.destroy()
