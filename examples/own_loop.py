"""An objective in a plain PyTorch loop: no trainer, no data set class, any model.

    python examples/own_loop.py

GlobalCache asks for items outside the batch, so the loop passes `encode`; SogCLR, InfoNCE, DCL and
others need none.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from dualenc.objectives import GlobalCache


def main(num_pairs: int = 512, steps: int = 300, batch_size: int = 16) -> tuple[float, float]:
    # Your data: whatever your loop has. Here the right side is a hidden rotation of the left one,
    # with noise.
    torch.manual_seed(0)
    left_data = torch.randn(num_pairs, 16)
    right_data = left_data @ nn.init.orthogonal_(torch.empty(16, 16)) + 0.3 * torch.randn(
        num_pairs, 16
    )
    towers = nn.ModuleDict({"left": nn.Linear(16, 16), "right": nn.Linear(16, 16)})
    data = {"left": left_data, "right": right_data}

    def encode(side: str, ids: Tensor) -> Tensor:
        """(n, D) unit-norm embeddings of items by id: what an objective calls for items outside the
        batch."""
        return normalize(towers[side](data[side][ids]), dim=1)

    def exact_loss() -> float:
        """L(θ) over all pairs, which a step never sees: −s⁺/τ + log Σ_z exp(s_z/τ) over all
        negatives z."""
        everything = torch.arange(num_pairs)
        with torch.no_grad():
            logits = encode("left", everything) @ encode("right", everything).T / 0.1
            positive = logits.diagonal().clone()
            negatives = logits.fill_diagonal_(-torch.inf)
            both = torch.logsumexp(negatives, dim=1) + torch.logsumexp(negatives, dim=0)
        return float((both / 2 - positive).mean())

    criterion = GlobalCache(
        num_left=num_pairs, temperature=0.1
    )  # its state_dict() belongs into your checkpoints
    optimizer = torch.optim.Adam(towers.parameters(), lr=1e-2)
    before = exact_loss()
    for _ in range(steps):
        ids = torch.randperm(num_pairs)[:batch_size]
        out = criterion(encode("left", ids), encode("right", ids), ids, encode=encode)
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
    after = exact_loss()
    print(
        f"exact global loss over {num_pairs} pairs: {before:.2f} → {after:.2f}, "
        f"from batches of {batch_size}"
    )
    return before, after


if __name__ == "__main__":
    main()
