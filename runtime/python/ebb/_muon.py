"""Which parameters Muon updates, as far as torch knows more than their names."""

from __future__ import annotations

from typing import Callable

from torch import nn

BY_RULE, YES, NO, NOT_BY_RULE = range(4)  # as EBB_MUON_... in ebb.h


def matrix_update_function(model: nn.Module) -> Callable[[nn.Parameter], int]:
    """Returns what a parameter's attribute `use_muon` says, as in DeepSpeed. Without it the rule of names decides, but not for embeddings
    and transformers' output layers."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))}
    for module in model.modules():
        output = module.get_output_embeddings() if hasattr(module, "get_output_embeddings") else None
        tables.add(id(getattr(output, "weight", None)))

    def of(parameter: nn.Parameter) -> int:
        said = getattr(parameter, "use_muon", None)
        if said is not None:
            return YES if said else NO
        return NOT_BY_RULE if id(parameter) in tables else BY_RULE

    return of
