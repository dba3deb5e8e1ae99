"""`axolotl train train.yaml`, on a CPU and with a seed, because axolotl makes the values of LoRA without one.

Before axolotl trains on several ranks it asks torch whether two GPUs reach each other, and goes on after the AssertionError of a torch that was
built for CPUs. A torch that was built for CUDA has another error if there is no driver, so here it has that one."""

import torch
from axolotl.cli.train import do_cli


def built_for_cpus(*devices: int) -> bool:
    raise AssertionError("Torch not compiled with CUDA enabled")


if __name__ == "__main__":  # processes that make data sets import this file
    if not torch.cuda.is_available():
        torch.cuda.can_device_access_peer = built_for_cpus
    torch.manual_seed(1)
    do_cli("train.yaml")
