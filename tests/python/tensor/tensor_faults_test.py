"""Refusals, exceptions and deaths of tensor ranks."""

import os
import selectors
import signal
import socket

import pytest
import torch
from cut_models import SGD, Blocks, by_columns_and_rows, cut_llama, error_of, is_like_torch, mesh_of, refuses, vectors
from ranks import Ranks, on_four, on_fresh, staying
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from training import config, llama, of_output, token_batches

import ebb


@on_four
def test_errors_name_the_parameter_and_its_placement():
    mesh = mesh_of()
    plain = config(3, SGD)

    def with_weight(weight):
        model = Blocks()
        model.blocks[1].up.weight = nn.Parameter(weight)
        return model

    whole = torch.randn(24, 16)
    partial = DTensor.from_local(whole, mesh["tp"], [Partial()], run_check=False)
    with refuses("'blocks.1.up.weight' is a DTensor with the placement Partial"):
        ebb.initialize(with_weight(partial), plain)
    with refuses("'blocks.1.up.weight' is a DTensor over 'dp', with the placement Shard(dim=0)"):
        ebb.initialize(with_weight(distribute_tensor(whole, mesh["dp"], [Shard(0)], src_data_rank=None)), plain)
    with refuses("'blocks.1.up.weight' is a DTensor over 'dp', 'tp'"):
        ebb.initialize(with_weight(distribute_tensor(whole, mesh, [Replicate(), Shard(0)], src_data_rank=None)), plain)
    outer = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))["tp"]
    with refuses("the mesh of 'blocks.1.up.weight' has the ranks", "must be consecutive", "(2, 2), mesh_dim_names=('dp', 'tp')"):
        ebb.initialize(with_weight(distribute_tensor(whole, outer, [Shard(0)], src_data_rank=None)), plain)
    with refuses('"tensor_parallel.autotp_size" is 4', "over 2 tensor ranks"):
        ebb.initialize(with_weight(distribute_tensor(whole, mesh["tp"], [Shard(0)], src_data_rank=None)), {**plain, "tensor_parallel": {"autotp_size": 4}})


@on_four
def test_ranks_that_ask_for_different_numbers_of_tensor_ranks_get_an_error():
    with refuses("2, 2, 4, 4"):
        ebb.initialize(llama(), config(3, SGD, tensor_parallel={"autotp_size": 2 if ebb.world().rank < 2 else 4}))
    mesh_of()
    is_like_torch(llama, token_batches(1, 2), settings={"stage": 3})


@on_four
def test_what_no_plan_can_cut_is_refused_by_name():
    mesh_of()
    with refuses("Blocks has no tp_plan", "parallelize_module"):
        ebb.initialize(Blocks(), config(3, SGD, ebb={"mesh": {"tensor": 2}}))
    with refuses('"tensor_parallel.autotp_size" is 3, which does not divide the 4 rank(s)'):
        ebb.initialize(llama(), config(3, SGD, tensor_parallel={"autotp_size": 3}))
    with refuses('num_key_value_heads 2 is not divisible by "tensor_parallel.autotp_size" 4: take 1 or 2'):
        ebb.initialize(llama(), config(3, SGD, tensor_parallel={"autotp_size": 4}))
    odd = llama()
    odd.model.layers[1].self_attn.q_proj = nn.Sequential(odd.model.layers[1].self_attn.q_proj)
    with refuses("transformers cannot cut this LlamaForCausalLM by its tp_plan", "parallelize_module"):
        ebb.initialize(odd, config(3, SGD, tensor_parallel={"autotp_size": 2}))
    import peft

    with refuses("PeftModelForCausalLM has adapters of peft"):
        adapted = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
        ebb.initialize(adapted, config(3, SGD, tensor_parallel={"autotp_size": 2}))
    with refuses("ebb.mesh.tensor", "autotp_size"):
        ebb.initialize(llama(), config(3, SGD, ebb={"mesh": {"tensor": 2}}, tensor_parallel={"autotp_size": 4}))


@on_four
def test_replicas_whose_gradients_differ_are_an_error_on_every_rank():
    mesh = mesh_of()["tp"]
    model = Blocks()
    by_columns_and_rows(model, mesh)
    engine = ebb.initialize(model, config(3, SGD))
    model.norm.weight.register_hook(lambda gradient: gradient * (1 + engine.tensor_rank))
    with refuses("norm", "differs between tensor ranks", "random numbers (dropout)"):
        engine.backward(error_of(model, vectors(1, 1)[0][0]))
        engine.step()
        engine.report()
    engine.close()


@on_four
def test_other_samples_of_tensor_ranks_are_an_error_on_every_rank():
    """A vocabulary that is cut mixes them into one sequence, so that all gradients of whole parameters are equal."""
    model, engine = cut_llama()
    with refuses("losses of tensor ranks 0 and 1 differ", "data_rank"):
        engine.backward(of_output(model, token_batches(1, 4)[0][ebb.world().rank]))
        engine.step()
        engine.report()
    engine.close()


@pytest.fixture
def fresh():
    """Ranks whose torch is not used again."""
    yield from staying(4)


@on_four
def test_what_all_tensor_ranks_of_a_data_rank_raise_ends_one_step():
    model, engine = cut_llama()
    for step, batches in enumerate(token_batches(3, 2)):
        try:
            loss = of_output(model, batches[engine.data_rank])
            if step == 1 and engine.data_rank == 1:
                raise ValueError(f"this sample has no label, says rank {ebb.world().rank}")
            engine.backward(loss)
            engine.step()
            assert engine.report().applied and step != 1
        except (ebb.Error, ValueError) as error:
            assert step == 1 and "this sample has no label" in str(error)
            engine.drop()
    assert engine.report().step == 2
    engine.close()


@on_fresh
def test_what_one_tensor_rank_raises_is_the_error_of_every_rank():
    """Its tensor rank waits for it in torch, and the other data rank in Ebb."""
    model, engine = cut_llama()
    batches = token_batches(2, 2)
    engine.backward(of_output(model, batches[0][engine.data_rank])), engine.step()
    connection, other_end = socket.socketpair()  # not gloo's
    selector = selectors.EpollSelector()
    selector.register(connection, selectors.EVENT_READ)
    said = "rank 1 (data rank 0, tensor rank 1) has left its tensor ranks alone: ValueError: this sample has no label"
    try:
        loss = of_output(model, batches[1][engine.data_rank])
        if ebb.world().rank == 1:
            raise ValueError("this sample has no label")
        engine.backward(loss), engine.step(), engine.report()
        raise AssertionError("no error")
    except (ebb.Error, ValueError) as error:
        assert ebb.world().rank == 1 or said in str(error), error
        with refuses(said, "begin again from a checkpoint"):
            engine.drop()
    with refuses(said):
        model(**batches[0][0])
    other_end.send(b"still open")
    assert selector.select(60) and connection.recv(99) == b"still open"
    engine.close()


def _loses_a_rank(place):
    model, engine = cut_llama()
    batch = token_batches(1, 1)[0][0]
    engine.backward(of_output(model, batch)), engine.step()

    def end(*arguments):
        if engine.tensor_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    middle = model.model.layers[1]
    middle.register_forward_pre_hook(end) if place == "forward" else middle.register_full_backward_hook(end)
    with pytest.raises(RuntimeError, match="rank 1 .* has died"):
        engine.backward(of_output(model, batch))
    with pytest.raises(ebb.Error, match="rank 1 .* has died"):
        engine.drop()


@pytest.mark.parametrize("place", ["forward", "backward"])
def test_of_a_death_the_tensor_rank_has_ebbs_words(place):
    ranks = Ranks(2)
    with pytest.raises(AssertionError) as caught:
        ranks.run(_loses_a_rank, place)
    assert "rank 1 has died, exit code -9" in str(caught.value) and "rank 0" not in str(caught.value)
