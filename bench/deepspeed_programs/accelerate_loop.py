"""accelerate's loop: prepare, accumulate, backward, clip, step, a schedule and gather."""

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from program import STEPS, Watch, batch_of, config, meet, tiny_llama
from torch.utils.data import DataLoader

meet()
plugin = DeepSpeedPlugin(hf_ds_config=config(gradient_clipping=1.0, gradient_accumulation_steps=2, train_micro_batch_size_per_gpu=2))
accelerator = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=2)
model = tiny_llama()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
tokens = torch.cat([batch_of(number) for number in range(4 * STEPS)])
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, DataLoader(tokens, batch_size=2), schedule)
watch = Watch()
losses = []
for batch in loader:
    with accelerator.accumulate(model):
        loss = model(input_ids=batch, labels=batch).loss
        losses.append(loss.detach())
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0) if accelerator.sync_gradients else None
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    if accelerator.sync_gradients:
        watch.step(torch.stack(losses).mean(), model.get_global_grad_norm())
        losses = []
model.eval()
batch = batch_of(1000)
with torch.no_grad():
    watch.evaluation(accelerator.gather(model(input_ids=batch, labels=batch).loss.reshape(1)).mean())
if accelerator.num_processes != torch.distributed.get_world_size():
    raise SystemExit("accelerate counts another number of ranks")
watch.say()
