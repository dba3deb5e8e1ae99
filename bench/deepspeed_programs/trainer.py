"""transformers' Trainer: accumulation, a schedule, evaluation, and the saved model at the end."""

import os
import tempfile

from datasets import Dataset
from program import STEPS, StepTimes, Watch, meet, sentences, tiny_llama, tokenizer
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

words = tokenizer()
data = Dataset.from_dict(dict(words(sentences(64), truncation=True, max_length=64)))
ranks = meet()
watch = Watch()
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, **ranks, per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=1e-3, max_steps=STEPS,
        lr_scheduler_type="cosine", warmup_steps=2, eval_strategy="steps", eval_steps=3, save_strategy="no", logging_steps=1, report_to=[], seed=1,
    )
    trainer = Trainer(
        tiny_llama(), arguments, train_dataset=data, eval_dataset=data.select(range(12)),
        data_collator=DataCollatorForLanguageModeling(words, mlm=False), callbacks=[StepTimes(watch)],
    )
    trainer.train()
    trainer.save_model(folder)
    if trainer.is_world_process_zero() and not os.path.exists(os.path.join(folder, "model.safetensors")):
        raise SystemExit("save_model() has written no model.safetensors")
watch.follow(trainer)
watch.say()
