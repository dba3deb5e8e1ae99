"""Which parameters Muon updates, as far as torch knows more than their names."""

from __future__ import annotations

import contextlib
from typing import Callable

from torch import nn

from ._library import Error

BY_RULE, YES, NO, NOT_BY_RULE = range(4)  # as EBB_MUON_... in ebb.h


def matrix_update_function(model: nn.Module) -> Callable[[nn.Parameter], int]:
    """Returns what a parameter's attribute `use_muon` says, as in DeepSpeed. Without it the rule of names decides, but not for embeddings
    and output layers: those of transformers, and linear ones of no numbered layer with an output for each row of an embedding."""
    embeddings = [module for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))]
    tables, sizes = {id(module.weight) for module in embeddings}, {module.num_embeddings for module in embeddings}
    for name, module in model.named_modules():
        with contextlib.suppress(AttributeError, NotImplementedError):  # some models of transformers raise these, most have None
            tables.add(id(module.get_output_embeddings().weight))
        if isinstance(module, nn.Linear) and module.out_features in sizes and not any(part.isdigit() for part in name.split(".")):
            tables.add(id(module.weight))

    def of(parameter: nn.Parameter) -> int:
        said = getattr(parameter, "use_muon", None)
        if said is not None and not isinstance(said, bool):
            raise Error(f"a parameter has use_muon={said!r}: give True or False", "INVALID_ARGUMENT")
        if said is not None:
            return YES if said else NO
        return NOT_BY_RULE if id(parameter) in tables else BY_RULE

    return of
