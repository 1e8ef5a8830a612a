"""Python's own standard library as text: the .py files at its top level, in the order of their names.

It exists wherever Python is installed; the text is that of the installed version.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

VOCABULARY = 128
"""Tokens are the bytes of ASCII; whatever is not ASCII becomes a question mark."""


def load(limit: int) -> tuple[Tensor, Tensor]:
    """`limit` tokens to train on and a ninth as many to validate on: every tenth file is held out whole."""
    directory = Path(sysconfig.get_path("stdlib"))
    train: list[bytes] = []
    validation: list[bytes] = []
    for number, path in enumerate(sorted(directory.glob("*.py"), key=lambda path: path.name)):
        text = path.read_text(encoding="utf-8").encode("ascii", errors="replace")
        (validation if number % 10 == 9 else train).append(text)
    return _tokens(train, limit), _tokens(validation, limit // 9)


def decode(tokens: Tensor) -> str:
    return bytes(tokens.tolist()).decode("ascii")


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Consecutive stretches of `context` tokens, each with the tokens that follow: shifted by one."""

    def __init__(self, tokens: Tensor, context: int) -> None:
        self.tokens = tokens
        self.context = context

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.context
        stretch = self.tokens[start : start + self.context + 1]
        return stretch[:-1], stretch[1:]


def unigram_loss(train: Tensor, validation: Tensor) -> float:
    """Nats per token of a model that knows how frequent each character is and nothing else."""
    counts = torch.bincount(train, minlength=VOCABULARY) + 1.0
    return float(-(counts / counts.sum()).log()[validation].mean())


def _tokens(texts: list[bytes], limit: int) -> Tensor:
    return torch.frombuffer(bytearray(b"".join(texts)[:limit]), dtype=torch.uint8).long()
