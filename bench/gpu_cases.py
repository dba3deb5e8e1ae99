"""The cases of bench/gpu_against_torch.py: shapes, batches, programs, and the wanted ratios."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Case:
    layers: int
    heads: int
    width: int
    batches: tuple  # sequences of a micro-batch; the next one is tried if memory is too small
    programs: tuple
    tokens: int = 0  # of a step, by accumulation; 0: one micro-batch
    context: int = 1024
    vocabulary: int = 50304
    steps: int = 14
    rounds: int = 1
    limit: int = 120  # seconds of a run
    least: int = 30  # a run is not started with fewer seconds left

    def warm_up(self):
        """Steps before the clock starts, as gpt's (examples/gpt/report/progress.h)."""
        return min(2, self.steps // 2)

    def accumulate(self, batch):
        return max(1, self.tokens // (batch * self.context))

    def flops_of_token(self):
        products = 12 * self.layers * self.width**2 + self.vocabulary * self.width
        return 6 * products + 6 * self.layers * self.context * self.width


SMALL, XL, LARGE = (12, 12, 768), (48, 25, 1600), (32, 32, 4096)
BOTH = ("Ebb", "FSDP2")
OFFLOADED = ("Ebb, states in RAM", "FSDP2, CPUOffloadPolicy", "Ebb")
# A timeline costs time, so it is a case of its own. It has the batch of the case before the comma.
TRACED, OFFLOADED_TRACED, TIMELINE = ("Ebb, traced",), ("Ebb, states in RAM, traced",), ", timeline"
# Ebb against itself, in turns.
GRAPHS = ("Ebb, CUDA graphs", "Ebb, no CUDA graphs")
HALF_MILLION = 2**19
CASES = {
    "124M": Case(*SMALL, (32, 16, 8), BOTH, rounds=2, steps=33),
    "1.5B": Case(*XL, (16, 8, 4), BOTH, rounds=2),
    "1.5B, 0.5 M tokens": Case(*XL, (16, 8, 4), OFFLOADED, HALF_MILLION, steps=3, limit=180, least=45),
    "1.5B, 0.5 M tokens, timeline": Case(*XL, (16, 8, 4), OFFLOADED_TRACED, HALF_MILLION, steps=3, limit=180, least=45),
    # Launches take the host longest beside the smallest batch.
    "124M, graphs, batch 1": Case(*SMALL, (1,), GRAPHS, rounds=2, steps=63, limit=60, least=15),
    "124M, graphs": Case(*SMALL, (16, 8), GRAPHS, rounds=2, steps=33, limit=60, least=15),
    "124M, timeline": Case(*SMALL, (32, 16, 8), TRACED, steps=10),
    "1.5B, timeline": Case(*XL, (16, 8, 4), TRACED, steps=6),
    # For 128 GiB of RAM: masters, states and gradients take 90 GiB in Ebb and 102 in FSDP2, beside staging. One step warms
    # up and one counts, so that three programs can end within 9 minutes.
    "6.7B, 0.5 M tokens": Case(*LARGE, (8, 4), OFFLOADED, HALF_MILLION, steps=2, limit=240, least=90),
}
ON_CPU = {
    "tiny": Case(2, 2, 64, (2, 1), BOTH, context=64, vocabulary=512, steps=4, rounds=2, least=5),
    "tiny, accumulated": Case(2, 2, 64, (2, 1), OFFLOADED, 512, 64, 512, steps=4, least=5),
    "tiny, accumulated, timeline": Case(2, 2, 64, (2, 1), OFFLOADED_TRACED, 512, 64, 512, steps=4, least=5),
    "tiny, graphs": Case(2, 2, 64, (2, 1), GRAPHS, context=64, vocabulary=512, steps=4, rounds=2, least=5),
    "tiny, timeline": Case(2, 2, 64, (2, 1), TRACED, context=64, vocabulary=512, steps=4, least=5),
}
# Only with --largest, or if --cases names them.
LARGEST = ("6.7B, 0.5 M tokens",)
# Ratios in the table: of one program to another, with the least wanted ratio.
RATIOS = {
    "124M": (("Ebb", "FSDP2", 1.1),),
    "124M, graphs, batch 1": ((*GRAPHS, 1.0),),
    "124M, graphs": ((*GRAPHS, 0.99),),
    "1.5B": (("Ebb", "FSDP2", 1.1),),
    "1.5B, 0.5 M tokens": ((OFFLOADED[0], OFFLOADED[1], 1.2), (OFFLOADED[0], "Ebb", 0.9)),
    "6.7B, 0.5 M tokens": ((OFFLOADED[0], OFFLOADED[1], 1.2), (OFFLOADED[0], "Ebb", 0.9)),
    "tiny": (("Ebb", "FSDP2", 0),),
    "tiny, graphs": ((*GRAPHS, 0),),
    "tiny, accumulated": ((OFFLOADED[0], OFFLOADED[1], 0), (OFFLOADED[0], "Ebb", 0)),
}
