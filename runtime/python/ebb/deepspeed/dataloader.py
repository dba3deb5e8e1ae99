"""Loaders of data: each rank's micro-batches, and a loader that begins again."""

from typing import Any

from torch.utils.data import DataLoader, IterableDataset, SequentialSampler
from torch.utils.data.distributed import DistributedSampler


class DeepSpeedDataLoader:
    """The micro-batches of this rank. Every epoch has the same order, unless the program calls data_sampler.set_epoch()."""

    def __init__(self, dataset: Any, batch_size: int, sampler: Any, collate_fn: Any, workers: int, ranks: int, rank: int, is_train: bool,
                 drop_last: bool):
        if sampler is None and not isinstance(dataset, IterableDataset):
            sampler = DistributedSampler(dataset, num_replicas=ranks, rank=rank) if is_train else SequentialSampler(dataset)
        self.data_sampler = sampler
        self.dataloader = DataLoader(dataset, batch_size=batch_size, sampler=sampler, collate_fn=collate_fn, num_workers=workers, drop_last=drop_last)
        self.data: Any = None

    def __iter__(self) -> "DeepSpeedDataLoader":
        self.data = iter(self.dataloader)
        return self

    def __next__(self) -> Any:
        if self.data is None:
            iter(self)
        return next(self.data)

    def __len__(self) -> int:
        return len(self.dataloader)


class RepeatingLoader:
    """Begins again at the end of `loader`."""

    def __init__(self, loader: Any):
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> "RepeatingLoader":
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)
