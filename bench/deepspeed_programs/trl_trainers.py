"""TRL's trainers: "kind" is sft, dpo, reward or grpo. With "lora" an adapter is trained, and DPO's reference is the model without it."""

import tempfile

import torch
from datasets import Dataset
from program import STEPS, StepTimes, Watch, case, llama_config, meet, sentences, tiny_llama, tokenizer


def main():
    import trl
    from peft import LoraConfig
    from transformers import LlamaForSequenceClassification

    kind, watch = case()["kind"], Watch()

    def reward(completions, **more):
        watch.text(completions)
        return [float(text.count("e")) + len(text) / 100 for text in completions]

    ranks = meet()
    adapter = None
    if case().get("lora"):
        adapter = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["q_proj", "v_proj"])
    pairs = {"prompt": sentences(48, "question"), "chosen": sentences(48, "good"), "rejected": sentences(48, "bad")}
    columns = {"sft": {"text": sentences(64)}, "grpo": {"prompt": sentences(32, "question")}}.get(kind, pairs)
    make, make_arguments = {
        "sft": (trl.SFTTrainer, trl.SFTConfig), "dpo": (trl.DPOTrainer, trl.DPOConfig), "reward": (trl.RewardTrainer, trl.RewardConfig),
        "grpo": (trl.GRPOTrainer, trl.GRPOConfig),
    }[kind]
    data = Dataset.from_dict(columns)
    own, options = {}, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_length": 128, "eval_strategy": "steps", "eval_steps": 3}
    if kind == "grpo":
        options = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 8}
        own["reward_funcs"] = reward
    else:
        own["eval_dataset"] = data.select(range(8))
    if kind == "dpo":
        own["ref_model"] = None if adapter is not None else tiny_llama()
    torch.manual_seed(1)
    model = LlamaForSequenceClassification(llama_config(num_labels=1)) if kind == "reward" else tiny_llama()
    with tempfile.TemporaryDirectory() as folder:
        arguments = make_arguments(
            folder, learning_rate=1e-3, max_steps=STEPS, logging_steps=1, save_strategy="no", report_to=[], seed=1, bf16=False, **ranks, **options,
        )
        trainer = make(
            model=model, args=arguments, train_dataset=data, processing_class=tokenizer(), peft_config=adapter, callbacks=[StepTimes(watch)], **own
        )
        trainer.train()
    watch.follow(trainer)
    watch.say()


main()
