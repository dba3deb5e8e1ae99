"""A loop by hand over deepspeed.initialize: a tiny transformer on batches that depend on the rank and the step."""

import torch
from program import STEPS, Watch, batch_of, case, tiny_llama

import deepspeed

options = case()
deepspeed.init_distributed(dist_backend="gloo")
accumulate = options.get("accumulate", 1)
config = {
    "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": accumulate, "gradient_clipping": 1.0,
    "zero_optimization": {"stage": options["stage"]}, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False, **options.get("json", {}),
}
model = tiny_llama()
if "dtype" in options:
    config[options["dtype"]] = {"enabled": True}
    model.to(getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[options["dtype"]]))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
engine, optimizer, _, schedule = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
watch = Watch()
for step in range(STEPS):
    losses = []
    for micro in range(accumulate):
        tokens = batch_of(step * accumulate + micro)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach().float())
    watch.step(torch.stack(losses).mean(), engine.get_global_grad_norm())
engine.eval()
with torch.no_grad():
    tokens = batch_of(1000)
    watch.evaluation(engine(input_ids=tokens, labels=tokens).loss)
watch.say()
