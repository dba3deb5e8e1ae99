"""A Llama of transformers with optimizer states of 8 and 16 bits, and with Muon: saved, resumed by other ranks, and exported."""

import pytest
import torch
import transformers
from training import ADAMW, config, llama, token_batches

import ebb

KINDS = {
    "8bit": dict(ADAMW, params={**ADAMW["params"], "states": "8bit", "min_8bit_size": 100}),
    "bf16": dict(ADAMW, params={**ADAMW["params"], "states": "bf16"}),
    "muon": {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 1e-3, "states": "8bit"}},
}
STATES = ("exp_avg", "exp_avg_sq", "momentum_buffer")


def _settings(kind, **more):
    return config(optimizer=KINDS[kind], bf16={"enabled": True}, **more)


def _step(engine, model, batches):
    for batch in batches:
        engine.backward(model(**batch).loss)
        engine.step()


def _values(engine):
    made = {}
    for name, _ in llama().named_parameters():
        made[name] = engine.gather(name, master=True)
        for state in STATES:
            try:
                made[name, state] = engine.gather(name, state=state)
            except ebb.Error:
                pass  # the other optimizer's
    return made


def _saved(kind, folder):
    model = llama()
    engine = ebb.initialize(model, _settings(kind))
    _step(engine, model, [batch for (batch,) in token_batches(3, 1)])
    engine.save(folder)
    optimizer_bytes = sum(row.current for row in engine.memory() if row.state == "optimizer")
    values = _values(engine)
    engine.close()
    return values, optimizer_bytes


def _resumed(kind, folder, written):
    model = llama()
    engine = ebb.initialize(model, _settings(kind, stage=2))
    engine.load(folder)
    values = _values(engine)
    engine.save_pretrained(written)
    _step(engine, model, token_batches(1, 2, seed=9)[0][engine.world.rank :][:1])
    engine.close()
    return values


@pytest.mark.parametrize("kind", KINDS)
def test_other_ranks_go_on_and_write_transformers_files(one, two, tmp_path, kind):
    ((saved, optimizer_bytes),) = one.run(_saved, kind, str(tmp_path / "run"))
    for resumed in two.run(_resumed, kind, str(tmp_path / "run"), str(tmp_path / "written")):
        assert resumed.keys() == saved.keys()
        assert all(torch.equal(resumed[key], saved[key]) for key in saved)
    elements = sum(value.numel() for name, value in saved.items() if isinstance(name, str))
    assert optimizer_bytes < {"8bit": 2.6, "bf16": 4.1, "muon": 5}[kind] * elements
    exported = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "written")
    for name, parameter in exported.named_parameters():
        assert torch.equal(parameter, saved[name].to(parameter.dtype))
