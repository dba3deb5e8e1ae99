"""A model trained by the engine, and by plain torch over the global batch."""

from __future__ import annotations

import copy
import hashlib
import logging
from typing import Any, Callable

import torch

import ebb

ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1}}
SGD = {"type": "SGD", "params": {"lr": 0.05}}


def config(stage: int = 3, optimizer: dict = ADAMW, **more: Any) -> dict[str, Any]:
    """Small units are sharded, too."""
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "stage3_model_persistence_threshold": 0},
        "optimizer": optimizer,
        "gradient_clipping": 1.0,
    }
    zero = more.pop("zero", {})
    made.update(more)
    made["zero_optimization"].update(zero)
    return made


def offloaded(folder: str) -> dict[str, Any]:
    disk = {"device": "nvme", "nvme_path": folder}
    return {"offload_param": dict(disk, max_in_cpu=0), "offload_optimizer": disk}


Loss = Callable[[torch.nn.Module, Any], torch.Tensor]


def of_output(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**batch).loss


def with_engine(model, batches: list[list[Any]], loss_of: Loss = of_output, settings: dict | None = None, accumulate: int = 1,
                after: Callable[[ebb.Engine], Any] | None = None, **options: Any):
    """`batches`[step][rank x accumulate + micro-batch]. Losses of the report, and what `after` returns."""
    engine = ebb.initialize(model, settings or config(), **options)
    first = engine.world.rank * accumulate
    losses = []
    for of_step in batches:
        for batch in of_step[first : first + accumulate]:
            engine.backward(loss_of(model, batch))
            engine.step()
        losses.append(engine.report().loss)
    result = after(engine) if after else None
    engine.close()
    return losses, result


def with_torch(model, batches: list[list[Any]], loss_of: Loss = of_output, optimizer: dict = ADAMW, clip: float = 1.0) -> list[float]:
    """The same with torch's optimizer, over all ranks' micro-batches."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    kind = {"AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD}[optimizer["type"]]
    steps = kind(trainable, **optimizer["params"])
    losses = []
    for of_step in batches:
        total = 0.0
        for batch in of_step:
            loss = loss_of(model, batch) / len(of_step)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(trainable, clip)
        steps.step()
        steps.zero_grad()
        losses.append(total)
    return losses


def compare(make: Callable[[], torch.nn.Module], batches: list[list[Any]], loss_of: Loss = of_output, settings: dict | None = None,
            tolerance: float = 2e-6, accumulate: int = 1, optimizer: dict = ADAMW, **options: Any) -> list[float]:
    """Trains two copies and compares each step's loss, and the parameters at the end."""
    model = make()
    plain = copy.deepcopy(model)
    expected = with_torch(plain, batches, loss_of, optimizer)
    losses, values = with_engine(model, batches, loss_of, settings or config(optimizer=optimizer), accumulate,
                                 after=lambda engine: engine.state_dict(), **options)
    for step, (ours, theirs) in enumerate(zip(losses, expected)):
        assert abs(ours - theirs) <= tolerance * max(1.0, abs(theirs)), f"step {step}: loss {ours}, torch has {theirs}"
    for name, value in plain.state_dict().items():
        assert values[name].shape == value.shape
        if value.is_floating_point():
            difference = (values[name].float() - value.float()).abs().max().item()
            assert difference <= 200 * tolerance, f"{name} differs by {difference}"
    return losses


def has_bits_of_torch(make: Callable[[], torch.nn.Module], batches: list[list[Any]], loss_of: Loss = of_output, shown: bool = True) -> None:
    """On one rank: from the same parameters, loss and gradients are those of torch. An update of SGD shows the gradients, with a rate of
    1/16, the product with which is exact, and without clipping. `shown`: the first batch is the example."""
    model, plain = make(), make()
    settings = config(optimizer={"type": "SGD", "params": {"lr": 0.0625}}, gradient_clipping=0.0)
    engine = ebb.initialize(model, settings, example=batches[0][0] if shown else None)
    values = engine.state_dict()
    for step, of_step in enumerate(batches):
        plain.load_state_dict(values)
        plain.zero_grad()
        loss, expected = loss_of(model, of_step[0]), loss_of(plain, of_step[0])
        assert torch.equal(loss.detach(), expected.detach()), f"step {step}: loss {loss.item()}, torch has {expected.item()}"
        engine.backward(loss), engine.step()
        expected.backward()
        after = engine.state_dict()
        for name, parameter in plain.named_parameters():
            gradient = 0.0 if parameter.grad is None else parameter.grad
            assert torch.equal(after[name], values[name] - 0.0625 * gradient), f"step {step}: the gradient of '{name}' is not torch's"
        values = after
    engine.close()


def warned(call: Callable[[], Any]) -> list[str]:
    """The warnings of Ebb meanwhile."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ebb").addHandler(handler)
    try:
        call()
    finally:
        logging.getLogger("ebb").removeHandler(handler)
    return said


def digest(engine: ebb.Engine) -> str:
    """Of all masters, whole."""
    sum_ = hashlib.sha256()
    for name in sorted(engine._state.ids):
        sum_.update(engine.gather(name, master=True).numpy().tobytes())
    return sum_.hexdigest()


# Models and batches, the same on every rank.


def token_batches(steps: int, each: int, vocabulary: int = 96, length: int = 12, batch: int = 2, seed: int = 7) -> list[list[dict]]:
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(steps):
        of_step = []
        for _ in range(each):
            ids = torch.randint(0, vocabulary, (batch, length), generator=generator)
            of_step.append({"input_ids": ids, "labels": ids})
        made.append(of_step)
    return made


def vector_batches(steps: int, each: int, width: int = 8, seed: int = 7) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator)
    return [[(draw(2, width), draw(2, 1)) for _ in range(each)] for _ in range(steps)]


def squared_error(model, batch) -> torch.Tensor:
    x, y = batch
    return (model(x) - y).square().mean()


def mlp(width: int = 8, depth: int = 3) -> torch.nn.Module:
    torch.manual_seed(1)
    layers: list[torch.nn.Module] = []
    for _ in range(depth):
        layers += [torch.nn.Linear(width, width), torch.nn.GELU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(width, 1))


def gpt2(**more: Any) -> torch.nn.Module:
    import transformers

    torch.manual_seed(1)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=96, n_embd=32, n_layer=3, n_head=4, n_positions=16, n_inner=64, attn_pdrop=0, embd_pdrop=0, resid_pdrop=0,
        bos_token_id=0, eos_token_id=0, **more,
    ))


def llama(**more: Any) -> torch.nn.Module:
    import transformers

    torch.manual_seed(1)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=32, **more,
    ))
