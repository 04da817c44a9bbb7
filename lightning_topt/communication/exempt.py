"""Exempt parameters are always sent whole: few elements, much at stake."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn


def exempt_names(module: nn.Module, rules: Sequence[str]) -> frozenset[str]:
    """Return the names of the parameters of `module` that `rules` exempt.

    - "bias": parameters of fewer than two dims whose own name contains "bias";
    - "norm": all other parameters of fewer than two dims (the scales of norms), and all of modules
      called ...Norm...;
    - "embedding": the tables of ``nn.Embedding`` and ``nn.EmbeddingBag``;
    - anything else: a pattern of full names (``"head.*"``; * ? [] as in file names). Raises
      ValueError where none matches.
    """
    parameters = dict(module.named_parameters())
    owners = {
        f"{prefix}.{name}" if prefix else name: owner
        for prefix, owner in module.named_modules()
        for name, _ in owner.named_parameters(recurse=False)
    }
    exempt: set[str] = set()
    for rule in rules:
        if rule == "embedding":
            found = {n for n in parameters if isinstance(owners[n], nn.Embedding | nn.EmbeddingBag)}
        elif rule in ("norm", "bias"):
            flat = {n: "bias" in n.rpartition(".")[2] for n, p in parameters.items() if p.dim() < 2}
            found = {n for n, is_bias in flat.items() if is_bias == (rule == "bias")}
            if rule == "norm":
                found |= {n for n in parameters if "Norm" in type(owners[n]).__name__}
        else:
            found = {n for n in parameters if fnmatchcase(n, rule)}
            if not found:
                raise ValueError(
                    f"exempt={rule!r} matches no parameter; names look like "
                    f"{', '.join(list(parameters)[:3])}"
                )
        exempt |= found
    return frozenset(exempt)
