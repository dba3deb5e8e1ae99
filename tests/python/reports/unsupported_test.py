"""Each entry of the list "What is not supported" of docs/python.md is an error that names it, on every rank."""

import copy
import pathlib
import re
import tempfile

import pytest
import torch
import torch.distributed
from modules import Blocks
from ranks import on_ranks, on_two
from torch import nn
from torch.func import functional_call, grad, jacrev, vmap
from training import SGD, config, offloaded, squared_error, vector_batches

import ebb

PAGE = pathlib.Path(__file__).parents[3] / "docs/python.md"
X, Y = vector_batches(1, 1)[0][0]


def entries() -> list[str]:
    text = PAGE.read_text().partition("## What is not supported\n")[2].partition("\n## ")[0]
    listed = re.search(r"Each of these is an error that names it: (.*?)\.\n\n", text, re.DOTALL)
    return " ".join(listed[1].split()).split("; ")


class Shards:
    """Makes engines in the place that a test is about: at stage 3 in memory, or on the disk."""

    def __init__(self, folder):
        self.settings = config(optimizer=SGD, gradient_clipping=0, zero=offloaded(folder) if folder else {})

    def __call__(self, model, **options):
        return ebb.initialize(model, self.settings, **options)

    def trained(self, model):
        """After three steps, because an engine watches more in the first two."""
        engine = self(model, example=(X,))
        for _ in range(3):
            engine.backward(squared_error(model, (X, Y)))
            engine.step()
        return engine


def refused(action, text, code=None):
    with pytest.raises(ebb.Error, match=text) as caught:
        action()
    assert code is None or caught.value.code == code


def train(model, engine):
    engine.backward(squared_error(model, (X, Y)))
    engine.step()


def second_derivatives(shards):
    model = Blocks()
    engine = shards.trained(model)
    loss = squared_error(model, (X, Y))
    refused(lambda: torch.autograd.grad(loss, list(model.parameters()), create_graph=True), "create_graph", "UNIMPLEMENTED")
    engine.drop()
    refused(lambda: squared_error(model, (X, Y)).backward(create_graph=True), "create_graph", "UNIMPLEMENTED")
    engine.drop()
    train(model, engine)
    engine.close()


def two_engines(shards):
    model = Blocks()
    engine = shards(model)
    refused(lambda: shards(model), "Blocks has an engine", "ALREADY_EXISTS")
    refused(lambda: shards(nn.Sequential(model, nn.Linear(1, 1))), "another engine has parameter '0.blocks.0.weight' already", "ALREADY_EXISTS")
    refused(lambda: shards(model.blocks[0]), "another engine has parameter 'weight' already, as 'blocks.0.weight'", "ALREADY_EXISTS")
    engine.close()


class Subclass(torch.Tensor):
    pass


def strange_parameters(shards):
    kinds = {
        "torch.int64": torch.ones(8, dtype=torch.int64), "torch.bool": torch.ones(8, dtype=torch.bool),
        "torch.complex64": torch.ones(8, dtype=torch.complex64), "torch.float8_e4m3fn": torch.ones(8).to(torch.float8_e4m3fn),
        "Subclass": torch.ones(8).as_subclass(Subclass),
    }
    for kind, value in kinds.items():
        model = Blocks()
        model.blocks[1].strange = nn.Parameter(value, requires_grad=False)
        refused(lambda: shards(model), f"'blocks.1.strange' is (a )?{kind}", "UNIMPLEMENTED")
    model.blocks[1].strange = nn.Parameter(torch.ones(8, dtype=torch.complex64))
    refused(lambda: shards(model), "torch.view_as_real", "UNIMPLEMENTED")
    del model.blocks[1].strange
    shards(model).close()


CHANGES = {
    "a block's parameter": (lambda model: model.blocks[0].register_parameter("gain", nn.Parameter(torch.ones(1))), "'blocks.0.gain' came into the model"),
    "an outer parameter": (lambda model: model.register_parameter("scale", nn.Parameter(torch.ones(1))), "'scale' came into the model"),
    "a frozen one": (lambda model: model.blocks[0].register_parameter("gain", nn.Parameter(torch.ones(1), requires_grad=False)),
                     "'blocks.0.gain' came into the model"),
    "a module": (lambda model: model.add_module("head2", nn.Linear(8, 1)), "'head2.weight' came into the model"),
    "another module": (lambda model: model.blocks.__setitem__(1, nn.Linear(8, 8)), "'blocks.1.weight' came into the model"),
    "another parameter": (lambda model: setattr(model.head, "weight", nn.Parameter(torch.zeros(1, 8))), "'head.weight' was replaced"),
    "a larger parameter": (lambda model: setattr(model.head, "weight", nn.Parameter(torch.zeros(3, 8))), r"'head.weight' was replaced .* the shape \[3, 8\]"),
    "a larger tensor": (lambda model: setattr(model.head.weight, "data", torch.zeros(3, 8)), r"'head.weight', which has the shape \[3, 8\] instead of \[1, 8\]"),
    "another's parameter": (lambda model: setattr(model.blocks[0], "weight", model.blocks[2].weight), "'blocks.0.weight' became parameter 'blocks.2.weight'"),
    "fewer modules": (lambda model: model.blocks.__delitem__(2), "'blocks.2.weight' was removed from the model"),
    "no bias": (lambda model: setattr(model.head, "bias", None), "'head.bias' was removed from the model"),
    "half()": (lambda model: model.half(), r"'blocks.0.weight', which has the data type torch.float16 instead of torch.float32"),
    "to(meta)": (lambda model: model.to("meta"), "'blocks.0.weight' was replaced .* the device meta instead of cpu"),
    "other tensors": (lambda model: torch.utils.swap_tensors(model.head.weight, nn.Parameter(torch.zeros(1, 8))), "written to 'head.weight'"),
    "spectral norm": (lambda model: torch.nn.utils.parametrizations.spectral_norm(model.blocks[0]), "'blocks.0.weight' is read by mv .*before ebb.initialize"),
    "weight norm": (lambda model: torch.nn.utils.parametrizations.weight_norm(model.blocks[0]), "'blocks.0.weight' is read by norm_except_dim .*before ebb.initialize"),
}


def changes(shards):
    for what, (change, text) in CHANGES.items():
        model = Blocks()
        engine = shards.trained(model)
        refused(lambda: (change(model), train(model, engine)), text)
        with torch.no_grad():
            refused(lambda: (model(X), engine.step()), text + "|without a forward")
        engine.close()
    model = Blocks()  # what has no parameters of its own is welcome
    engine = shards.trained(model)
    model.blocks[1] = nn.Sequential(model.blocks[1], nn.Tanh())
    model.head.register_forward_hook(lambda module, arguments, output: output)
    train(model, engine)
    model.blocks[0].requires_grad_(False)
    train(model, engine)
    model.blocks[0].requires_grad_(True)
    train(model, engine)
    engine.close()


def resized_vocabulary(shards):
    from training import gpt2

    model = gpt2()
    engine = shards(model)
    refused(lambda: model.resize_token_embeddings(100, mean_resizing=False), "'transformer.wte.weight' is read by .*before ebb.initialize")
    engine.close()


def added_adapter(shards):
    import peft
    from training import gpt2

    model = gpt2()
    engine = shards(model)
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["c_attn"], r=2, fan_in_fan_out=True), model)
    refused(lambda: model(torch.ones(1, 4, dtype=torch.long)), "'.*lora_A.default.weight' came into the model")
    engine.close()


class alone:
    """A torch.distributed group of this process only, or the one that TrainingArguments of a test before have made in this process."""

    def __enter__(self):
        self.is_own = not torch.distributed.is_initialized()
        if self.is_own:
            self.folder = tempfile.TemporaryDirectory()
            torch.distributed.init_process_group("gloo", init_method=f"file://{self.folder.name}/store", rank=0, world_size=1)
        return torch.distributed.device_mesh.init_device_mesh("cpu", (torch.distributed.get_world_size(),))

    def __exit__(self, *error):
        if self.is_own:
            torch.distributed.destroy_process_group()
            self.folder.cleanup()


def tensor_parallel(shards):
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    with alone() as mesh:
        other = torch.distributed.device_mesh.init_device_mesh("cpu", (mesh.size(),), mesh_dim_names=("fsdp",))
        cut = parallelize_module(Blocks(), other, {"blocks.0": ColwiseParallel()})
        refused(lambda: shards(cut), r"'blocks.0.weight' is a DTensor over 'fsdp', with the placement Shard\(dim=0\)", "UNIMPLEMENTED")
        model = Blocks()
        engine = shards.trained(model)
        refused(lambda: parallelize_module(model, mesh, {"blocks.0": ColwiseParallel()}), r"'blocks.0.\w+' is read by .*parallelize.* before ebb.initialize")
        engine.close()


def pipeline_parallel(shards):
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, SplitPoint, pipeline

    with alone():
        refused(lambda: shards(pipeline(Blocks(), (X,), split_spec={"head": SplitPoint.BEGINNING})), "pipeline parallelism", "UNIMPLEMENTED")
        model = Blocks()
        engine = shards.trained(model)
        schedule = ScheduleGPipe(PipelineStage(model, 0, 1, torch.device("cpu")), 2, loss_fn=nn.functional.mse_loss)
        refused(lambda: schedule.step(X, target=Y, losses=[]), "pipeline parallelism", "UNIMPLEMENTED")
        train(model, engine)
        engine.close()


def wrapped(shards):
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    with alone() as mesh:
        model = nn.Sequential(Blocks(), nn.Linear(1, 1))
        refused(lambda: shards(DistributedDataParallel(copy.deepcopy(model))), "wrapped in DistributedDataParallel", "UNIMPLEMENTED")
        refused(lambda: shards(nn.DataParallel(copy.deepcopy(model))), "wrapped in DataParallel", "UNIMPLEMENTED")
        model[1] = DistributedDataParallel(model[1])
        refused(lambda: shards(model), "'1' is wrapped in DistributedDataParallel", "UNIMPLEMENTED")
        refused(lambda: shards(fully_shard(Blocks(), mesh=mesh)), "wrapped in FSDP", "UNIMPLEMENTED")
        model = Blocks()
        engine = shards.trained(model)
        for wrapper in (DistributedDataParallel, nn.DataParallel):
            refused(lambda: wrapper(model), f"{wrapper.__name__} around a model whose 'blocks.0.weight'", "UNIMPLEMENTED")
            refused(lambda: wrapper(model.head), f"{wrapper.__name__} around a model whose 'head.weight'", "UNIMPLEMENTED")
        with pytest.raises(Exception, match="FSDP"):
            fully_shard(model, mesh=mesh)
        engine.close()
    model = Blocks()
    model.head._hf_hook = object()
    refused(lambda: shards(model), "'head' has hooks of accelerate", "UNIMPLEMENTED")


def scripted(shards):
    refused(lambda: shards(torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)))), "torch.jit", "UNIMPLEMENTED")
    model = Blocks()
    model.blocks[1] = torch.jit.script(model.blocks[1])
    refused(lambda: shards(model), "'blocks.1' is a script of torch.jit", "UNIMPLEMENTED")
    model = Blocks()
    engine = shards.trained(model)
    refused(lambda: torch.jit.trace(model, (X,)), "torch.jit.trace", "UNIMPLEMENTED")
    with pytest.raises(Exception, match="torch.jit|TorchScript|supported"):
        torch.jit.script(model)
    train(model, engine)
    engine.close()


def transforms(shards):
    x = torch.ones(2, 8)
    model = Blocks()
    engine = shards.trained(model)
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    other = {name: torch.ones_like(parameter) for name, parameter in model.named_parameters()}
    for within in (
        lambda: vmap(model)(x),
        lambda: vmap(model.blocks[1])(x),
        lambda: jacrev(model)(x),
        lambda: grad(lambda one: model(one).sum())(x),
        lambda: grad(lambda given: functional_call(model, given, (x,)).sum())(values),
        lambda: vmap(grad(lambda given, one: functional_call(model, given, (one,)).sum()), (None, 0))(values, x),
        lambda: functional_call(model, other, (x,)),
    ):
        refused(within, "torch.func", "UNIMPLEMENTED")
        engine.drop()
    train(model, engine)
    assert engine.report().applied
    engine.close()


def closures(shards):
    model = Blocks()
    engine = shards.trained(model)
    engine.backward(squared_error(model, (X, Y)))
    for step in (engine.step, engine.optimizer.step):
        refused(lambda: step(lambda: squared_error(model, (X, Y))), r"step\(closure\)", "UNIMPLEMENTED")
    assert engine.step()
    engine.close()


def tied_to_two_values(shards):
    from training import gpt2

    model = gpt2()
    engine = shards(model)
    values = engine.state_dict()
    values["lm_head.weight"] = values["lm_head.weight"] + 1
    refused(lambda: model.load_state_dict(values), "'transformer.wte.weight' and 'lm_head.weight' are one parameter", "INVALID_ARGUMENT")
    engine.close()
    with tempfile.TemporaryDirectory() as folder:
        from safetensors.torch import save_file

        save_file(values, f"{folder}/model.safetensors")
        refused(lambda: shards(gpt2(), weights=folder), "'transformer.wte.weight' and 'lm_head.weight' are one parameter", "INVALID_ARGUMENT")


def several_backwards(shards):
    model = Blocks()
    engine = shards.trained(model)
    y = model(X)
    engine.backward(y.mean())
    refused(lambda: engine.backward(y.square().mean()), "a forward of '.*' whose step, or whose backward, is over. Add the losses of one forward")
    refused(engine.step, r"Call drop\(\)")
    engine.drop()
    loss = squared_error(model, (X, Y))
    loss.backward(retain_graph=True)
    refused(lambda: loss.backward(), "Add the losses of one forward")
    refused(engine.step, r"Call drop\(\)")
    engine.drop()
    loss = squared_error(model, (X, Y))
    loss.backward(retain_graph=True)
    refused(lambda: torch.autograd.grad(loss, list(model.parameters())), "call torch.autograd.grad before backward")
    engine.drop()
    y = model(X)
    engine.backward(y.mean())
    engine.step()
    refused(lambda: y.sum().backward(), "whose step, or whose backward, is over")
    engine.drop()
    train(model, engine)
    engine.close()


def left_out_backward(shards):
    model = Blocks()
    engine = shards.trained(model)
    values = engine.state_dict()
    loss = squared_error(model, (X * float("inf"), Y))
    assert not loss.isfinite()
    refused(lambda: engine.backward(squared_error(model, (X, Y))),
            r"^a forward of the model had no backward, .* Call engine.drop\(\) instead of a backward that the loop leaves out, [^.]*torch.no_grad\(\)[^.]*$")
    engine.drop()
    squared_error(model, (X * float("inf"), Y))
    refused(engine.step, r"drop\(\)")
    refused(lambda: engine.save("/nowhere"), r"drop\(\) the step")
    engine.drop()
    assert all(torch.equal(value, engine.gather(name)) for name, value in values.items())
    train(model, engine)
    engine.close()
    engine = ebb.initialize(Blocks(), {**shards.settings, "gradient_accumulation_steps": 2})
    train(engine.model, engine)
    squared_error(engine.model, (X, Y))  # of the second micro-batch
    refused(lambda: engine.backward(squared_error(engine.model, (X, Y))), r"^a forward of the model had no backward, .* engine.drop\(\)")
    engine.close()


def over_one_memory(shards):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8), nn.Linear(8, 8, bias=False))
    model[2].weight.data = model[0].weight.data
    refused(lambda: shards(model), "'0.weight' and '2.weight' are two parameters over one memory", "INVALID_ARGUMENT")
    model[2].weight = model[0].weight
    shards(model).close()


def own_writes(shards):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(8, 8, max_norm=0.1), nn.Linear(8, 8), nn.Linear(8, 1))
    engine = shards(model)
    refused(lambda: model(torch.arange(4)), "written to '0.weight'")
    engine.close()


def other_options(shards):
    engine = shards.trained(Blocks())
    for option, value in (("eps", 0.1), ("momentum", 0.7), ("maximize", True)):
        refused(lambda: engine.param_groups[0].update({option: value}), rf"\['{option}'\] = .*Set it in the JSON", "UNIMPLEMENTED")
    engine.close()


PROVOCATIONS = {
    "`create_graph=True`": [second_derivatives],
    "several backwards through one forward": [several_backwards],
    "a forward whose backward is left out without `engine.drop()`": [left_out_backward],
    "two engines over one module": [two_engines],
    "parameters that are integers (except bytes), complex numbers, 8-bit floating-point numbers or tensor subclasses other than DTensors": [strange_parameters],
    "parameters over one memory": [over_one_memory],
    "parameters that are added, removed, replaced, resized, tied, moved or cast after `initialize`": [changes, resized_vocabulary, added_adapter],
    "modules that write to their own parameters, such as `nn.Embedding(max_norm=)`": [own_writes],
    'options of `param_groups` other than "lr" and "weight_decay"': [other_options],
    'tensor parallelism after `initialize`, and DTensors over other dimensions of a mesh than "tp"': [tensor_parallel],
    "pipeline parallelism": [pipeline_parallel],
    "DDP, FSDP, DataParallel or accelerate's hooks around the model or inside it": [wrapped],
    "`torch.jit`": [scripted],
    "`torch.func` (its transforms, and `functional_call` with other tensors)": [transforms],
    "`step(closure)`": [closures],
    "two values for one tied parameter": [tied_to_two_values],
}


def test_the_page_lists_what_is_provoked_here():
    assert sorted(entries()) == sorted(PROVOCATIONS)


CALLS = [pytest.param(call, id=call.__name__) for calls in PROVOCATIONS.values() for call in calls]


@pytest.mark.parametrize("ranks", ["one", "two"], indirect=True)
@pytest.mark.parametrize("provocation", CALLS)
@on_ranks
def test_it_is_an_error(provocation, folder):
    """Two ranks are on the disk."""
    provocation(Shards(folder if ebb.world().size > 1 else None))


@pytest.mark.parametrize("what", ["a block's parameter", "half()"])
@on_two
def test_an_error_on_one_rank_reaches_the_other(what):
    change, text = CHANGES[what]
    model = Blocks()
    engine = Shards(None).trained(model)
    if engine.world.rank == 1:
        change(model)
        refused(lambda: train(model, engine), text)
    else:
        refused(lambda: (train(model, engine), engine.report()), "rank 1")
    engine.close()
