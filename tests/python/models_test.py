"""Whole models against plain torch, two ranks, stage 3."""

import pytest
import torch
import training
from ranks import on_two
from training import compare, config, gpt2, llama, mlp, offloaded, squared_error, token_batches, vector_batches

import ebb


def example(batches):
    return batches[0][0]


@on_two
def test_a_perceptron_learns_as_in_torch():
    compare(mlp, vector_batches(5, 2), squared_error)


@pytest.mark.parametrize("shown", [True, False], ids=["shown", "in registration order"])
@on_two
def test_gpt2_with_a_tied_head(shown):
    batches = token_batches(5, 2)
    compare(gpt2, batches, example=example(batches) if shown else None)


@pytest.mark.parametrize("stage, accumulate, on_disk, checkpointing", [
    *((stage, 1, False, None) for stage in range(4)), (3, 3, True, None), (3, 2, False, "reentrant"), (3, 2, False, "not_reentrant"),
])
@on_two
def test_llama(stage, accumulate, on_disk, checkpointing, folder):
    def make():
        model = llama()
        if checkpointing is not None:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing == "reentrant"})
            model.enable_input_require_grads()
        return model

    settings = config(stage, gradient_accumulation_steps=accumulate, zero=offloaded(folder) if on_disk else {})
    batches = token_batches(4, 2 * accumulate)
    compare(make, batches, settings=settings, accumulate=accumulate, example=example(batches))


@pytest.mark.parametrize("checkpointing, save_modules", [(False, False), (True, False), (False, True)])
@on_two
def test_lora(checkpointing, save_modules):
    import peft

    def make():
        torch.manual_seed(3)
        model = peft.get_peft_model(llama(), peft.LoraConfig(
            r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False,
            modules_to_save=["lm_head"] if save_modules else None,
        ))
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            model.enable_input_require_grads()
        return model

    batches = token_batches(4, 2)
    compare(make, batches, example=example(batches))


def _half(kind, bound):
    batches = token_batches(4, 2)
    expected = training.with_torch(llama(), batches)
    losses, _ = training.with_engine(llama(), batches, settings=config(3, **{kind: {"enabled": True}}), example=example(batches))
    for ours, theirs in zip(losses, expected):
        assert abs(ours - theirs) < bound * theirs
    return losses


@pytest.mark.parametrize("kind, bound", [("bf16", 2e-2), ("fp16", 4e-3)])
def test_sixteen_bits_are_near_fp32(two, kind, bound):
    first, second = two.run(_half, kind, bound)
    assert first == second


@on_two
def test_generating_between_steps():
    batches = token_batches(3, 2)
    model, plain = llama(), llama()
    ids = batches[0][0]["input_ids"]
    expected = training.with_torch(plain, batches[:2])
    engine = ebb.initialize(model, config(), example=example(batches))
    for step, of_step in enumerate(batches[:2]):
        engine.backward(model(**of_step[engine.world.rank]).loss)
        engine.step()
        assert abs(engine.report().loss - expected[step]) < 2e-6 * expected[step]
        with torch.no_grad():
            model.eval()
            tokens = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
            model.train()
    with torch.no_grad():
        plain.eval()
        assert torch.equal(tokens, plain.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0))
    engine.close()


@on_two
def test_evaluating_within_a_step():
    """Between forward and backward, and between micro-batches."""
    batches = token_batches(2, 4)
    expected = training.with_torch(llama(), batches)
    model = llama()
    engine = ebb.initialize(model, config(gradient_accumulation_steps=2), example=example(batches))
    losses = []
    for of_step in batches:
        for micro in range(2):
            batch = of_step[2 * engine.world.rank + micro]
            loss = model(**batch).loss
            with torch.no_grad():
                assert torch.equal(model(**batch).loss, loss.detach())
            engine.backward(loss)
            with torch.no_grad():
                model(**batch)
            engine.step()
        losses.append(engine.report().loss)
    engine.close()
    for ours, theirs in zip(losses, expected):
        assert abs(ours - theirs) < 2e-6 * theirs


@on_two
def test_an_epoch_that_ends_unevenly():
    """Two of four micro-batches, and their mean."""
    settings = config(gradient_accumulation_steps=4)
    whole, rest = token_batches(1, 8), token_batches(1, 4, seed=8)
    plain = llama()
    expected = training.with_torch(plain, whole + rest)
    model = llama()
    engine = ebb.initialize(model, settings, example=whole[0][0])
    for batch in whole[0][4 * engine.world.rank :][:4]:
        engine.backward(model(**batch).loss)
        last = engine.step()
    assert last
    for i, batch in enumerate(rest[0][2 * engine.world.rank :][:2]):
        engine.backward(model(**batch).loss)
        assert engine.step(now=i == 1) == (i == 1)
    assert abs(engine.report().loss - expected[1]) < 2e-6 * expected[1]
    values = engine.state_dict()
    engine.close()
    for name, value in plain.state_dict().items():
        assert (values[name] - value).abs().max() < 1e-4


@on_two
def test_a_schedule_of_torch():
    batches = vector_batches(6, 2)
    factor = lambda step: 1 / (step + 1)
    plain = mlp()
    optimizer = torch.optim.AdamW(plain.parameters(), **training.ADAMW["params"])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    model = mlp()
    engine = ebb.initialize(model, config())
    ours = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, factor)
    for of_step in batches:
        total = sum(squared_error(plain, batch) for batch in of_step) / 2
        total.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step(), schedule.step(), optimizer.zero_grad()
        engine.backward(squared_error(model, of_step[engine.world.rank]))
        engine.step(), ours.step()
        report = engine.report()
        assert abs(report.loss - total.item()) < 2e-6
    assert abs(engine.learning_rate - 1e-2 / 7) < 1e-9
    assert abs(report.learning_rate - 1e-2 / 6) < 1e-8
    engine.close()


def _digest(stage, folder, checkpointing):
    model = llama()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    batches = token_batches(3, 4)
    settings = config(stage, gradient_accumulation_steps=2, ebb={"reduce_at": "step"}, zero=offloaded(folder) if folder else {})
    return training.with_engine(model, batches, settings=settings, accumulate=2, example=example(batches), after=training.digest)[1]


def test_bits_do_not_depend_on_stage_tier_and_checkpointing(two, tmp_path):
    cells = [(stage, None, False) for stage in range(4)] + [(3, None, True), (3, str(tmp_path), False), (3, str(tmp_path), True)]
    assert len({value for cell in cells for value in two.run(_digest, *cell)}) == 1


def test_one_rank_has_the_bits_of_torch(one):
    one.run(training.has_bits_of_torch, mlp, vector_batches(20, 1), squared_error, False)
    one.run(training.has_bits_of_torch, llama, token_batches(20, 1), training.of_output, True)
    one.run(training.has_bits_of_torch, gpt2, token_batches(20, 1), training.of_output, True)
