"""Lightning's DeepSpeedStrategy: "kind" is fabric or trainer. The strategy asks for a CUDAAccelerator, so here one says that its devices are the CPU.

Then the values of the saved checkpoint are read by Lightning's own functions for a single file, and compared with the model's."""

import os
import tempfile
from pathlib import Path

import torch
from program import RANK, STEPS, Watch, batch_of, case
from torch import nn
from torch.utils.data import DataLoader, Dataset

import deepspeed
from lightning.fabric.accelerators import CUDAAccelerator as OfFabric
from lightning.pytorch.accelerators import CUDAAccelerator as OfTrainer

RANKS = int(os.environ["WORLD_SIZE"])
STAGE = case()["stage"]
CPU = torch.device("cpu", 0)
WORDS = 128


class _OnCPU:
    def setup_device(self, device):
        pass

    def setup(self, trainer):
        pass

    def teardown(self):
        pass

    @staticmethod
    def parse_devices(devices):
        return list(range(int(devices)))

    @staticmethod
    def get_parallel_devices(devices):
        return [torch.device("cpu", at) for at in devices]

    @staticmethod
    def auto_device_count():
        return RANKS

    @staticmethod
    def is_available():
        return True


class FabricOnCPU(_OnCPU, OfFabric):
    pass


class TrainerOnCPU(_OnCPU, OfTrainer):
    pass


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Predictor(nn.Module):
    """The next token from the one before."""

    def __init__(self, width=64):
        super().__init__()
        self.table = nn.Embedding(WORDS, width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.head = nn.Linear(width, WORDS)

    def forward(self, tokens):
        return nn.functional.cross_entropy(self.head(self.blocks(self.table(tokens[:, :-1]))).flatten(0, 1), tokens[:, 1:].flatten())


class Batches(Dataset):
    def __len__(self):
        return 2 * STEPS

    def __getitem__(self, number):
        return batch_of(number)


def config(accumulate=2):
    return {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": accumulate, "gradient_clipping": 1.0, "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": STAGE}, "zero_force_ds_cpu_optimizer": False,
    }


def loader():
    return DataLoader(Batches(), batch_size=None)


def compare_single_file(folder, convert, engine):
    """Values that are read from the checkpoint, with those of the model."""
    values = engine.module_state_dict() if STAGE < 3 else engine._zero3_consolidated_16bit_state_dict()
    if RANK == 0:
        convert(folder, folder + ".pt")
        read = torch.load(folder + ".pt", weights_only=False)["state_dict"]
        for name, value in values.items():
            name = name if name in read else name.removeprefix("model.")
            if not torch.allclose(read[name].float(), value.float(), rtol=0, atol=0):
                raise SystemExit(f"{name} has other values in the checkpoint")


def with_fabric(folder):
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DeepSpeedStrategy

    class Strategy(DeepSpeedStrategy):
        root_device = CPU

    fabric = Fabric(accelerator=FabricOnCPU(), devices=RANKS, strategy=Strategy(config=config(accumulate=1)), precision="32-true")
    fabric.launch()
    torch.manual_seed(1)
    with fabric.init_module():
        model = Predictor()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    model, optimizer = fabric.setup(model, optimizer)
    watch = Watch()
    for tokens in fabric.setup_dataloaders(loader(), use_distributed_sampler=False):
        loss = model(tokens)
        fabric.backward(loss, model=model)
        optimizer.step()  # that of DeepSpeed's optimizer, which has no gradients between micro-batches, and does not tell the engine the norm
        watch.step(loss, None)
    model.eval()
    with torch.no_grad():
        watch.evaluation(model(batch_of(1000)))
    state = {"model": model, "optimizer": optimizer, "step": STEPS}
    fabric.save(folder, state)
    fabric.load(folder, state)
    with torch.no_grad():
        watch.evaluation(model(batch_of(1000)))
    return watch


def with_trainer(folder):
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DeepSpeedStrategy
    from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict

    watch = Watch()

    class Strategy(DeepSpeedStrategy):
        root_device = CPU

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model, self.losses = None, []
            if STAGE < 3:
                self.configure_model()

        def configure_model(self):
            if self.model is None:
                torch.manual_seed(1)
                self.model = Predictor()

        def training_step(self, tokens, number):
            loss = self.model(tokens)
            self.losses.append(loss.detach())
            return loss

        def on_train_batch_end(self, *arguments):
            if len(self.losses) == 2:
                watch.step(torch.stack(self.losses).mean(), self.trainer.strategy.model.get_global_grad_norm())
                self.losses = []

        def validation_step(self, tokens, number):
            watch.evaluation(self.model(tokens))

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.1)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    given = config()
    given.pop("gradient_accumulation_steps"), given.pop("gradient_clipping")  # the Trainer's
    trainer = pl.Trainer(
        accelerator=TrainerOnCPU(), devices=RANKS, strategy=Strategy(config=given), precision="32-true", max_steps=STEPS, accumulate_grad_batches=2,
        gradient_clip_val=1.0, logger=False, enable_checkpointing=False, enable_progress_bar=False, num_sanity_val_steps=0, use_distributed_sampler=False,
        default_root_dir=folder,
    )
    module = Module()
    held = DataLoader(torch.utils.data.Subset(Batches(), [0, 5]), batch_size=None)
    trainer.fit(module, loader(), held)
    trainer.save_checkpoint(folder)
    compare_single_file(folder, convert_zero_checkpoint_to_fp32_state_dict, trainer.strategy.model)
    trainer.validate(module, held, verbose=False)
    return watch


def main():
    base = os.environ["SHARED_FOLDER"]
    kind = case()["kind"]
    watch = {"fabric": with_fabric, "trainer": with_trainer}[kind](str(Path(base) / "checkpoint"))
    watch.say()


main()
