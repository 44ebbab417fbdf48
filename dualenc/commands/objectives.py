"""`dualenc evaluate objectives`: what the gradients of the objectives are worth on a model and pairs, by batch size."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dualenc import distributed
from dualenc.cli import nearest
from dualenc.commands.convergence import CHUNK, open_set
from dualenc.commands.evaluation import (
    HIGHEST_SEED,
    MOST_ITEMS,
    begin,
    check_range,
    check_weights,
    conclude,
    display_name,
    random_rows,
    simclr_prepare,
)
from dualenc.errors import DualencError
from dualenc.evaluation import plots
from dualenc.evaluation.ledger import Ledger
from dualenc.evaluation.objectives import (
    ESTIMATORS,
    OTHER_LOSSES,
    FrozenPairs,
    Measured,
    advice,
    epochs,
    measure,
    softmax_shares,
)
from dualenc.evaluation.report import Figure, Table

if TYPE_CHECKING:
    from dualenc.data import Corpus, PairDataset
    from dualenc.encoders import DualEncoder
    from dualenc.types import Side

Row = dict[str, object]

TEMPERATURE = 0.07
BOUND = 0.02


def objectives(
    model: str,
    data: str,
    *,
    out: str | None = None,
    split: str = "train",
    left_column: str | None = None,
    right_column: str | None = None,
    batch_size: int = 32,
    temperature: float | None = None,
    objectives: list[str] | None = None,
    pairs: int = 2000,
    warm_up: int = 10,
    max_epochs: int = 64,
    seed: int = 0,
    device: str | None = None,
) -> None:
    """Measure how far the gradient of each objective is from that of the global loss, on your model and pairs.

    Writes metrics.json and report.html. Pairs are embedded once and stay as they are; gradients are those with respect
    to the embeddings, and the pairs that are embedded are the whole corpus. Each objective makes six independent runs,
    until the standard error of its bias is below 0.02, or to the limit of epochs. Under `accelerate launch` the
    processes share the objectives. Interrupted, or with further objectives, it measures only those that it has not
    measured yet.

    Args:
        model: model folder or name.
        data: pairs, as `train` reads them; for models of kind image, images, of which two augmentations are a pair.
        out: folder to write; by default evaluations/objectives/MODEL-DATA.
        split: of the data.
        left_column: of a table of pairs.
        right_column: of a table of pairs.
        batch_size: B, pairs in a batch.
        temperature: τ; by default what the model was trained with, if it or its run's checkpoints tell, or 0.07.
        objectives: some of InfoNCE, DCL, SogCLR, SogCLR-0.1 (γ = 0.1), ISogCLR, GlobalCache, NegativeCache, EMC2, ISIR,
            HCL, SACLR, SigLIP; by default all.
        pairs: the most pairs that are embedded, chosen at random and always the same; a multiple of the batch size.
        warm_up: epochs of each run before anything counts, in which averages and chains settle.
        max_epochs: the most epochs of a run after that.
        seed: of the order of the pairs, of the objectives' draws, and of augmentations.
        device: such as cpu or cuda:0; by default a GPU if there is one.
    """
    check_range(2, MOST_ITEMS, batch_size=batch_size)
    check_range(batch_size, math.inf, pairs=pairs)
    check_range(1e-3, 1e4, temperature=temperature)
    check_range(0, 1 << 20, warm_up=warm_up)
    check_range(1, 1 << 20, max_epochs=max_epochs)
    check_range(0, HIGHEST_SEED, seed=seed)
    chosen = list(ESTIMATORS) if objectives is None else list(dict.fromkeys(objectives))
    for name in chosen:
        if name not in ESTIMATORS:
            known = ", ".join(ESTIMATORS)
            raise DualencError(f"--objectives: there is no '{name}'{nearest(name, ESTIMATORS)}; choose from {known}")
    if not chosen:
        raise DualencError("--objectives names none; leave it out to measure all")
    target, device_to_use = begin("objectives", model, data, out, device)
    from dualenc.encoders import load_model
    from dualenc.encoders.dual import SIDES
    from dualenc.search.embed import tower_checksum

    encoder = load_model(model, device=str(device_to_use)).eval()
    weights = check_weights(target, model, encoder.left, encoder.right)
    if temperature is None:
        temperature = trained_temperature(encoder, Path(model)) or TEMPERATURE
    found = open_set(encoder, data, split, left_column, right_column)
    if len(found) < batch_size:
        raise DualencError(f"{data}: holds {len(found)} pairs, fewer than a batch of {batch_size}; lower --batch-size")
    # In whole batches: a rest would make a smaller one.
    rows = random_rows(len(found), min(pairs, len(found)) // batch_size * batch_size)
    frozen = embed_pairs(encoder, found, rows, seed)
    how: dict[str, Any] = {"warm_up": warm_up, "bound": BOUND, "max_epochs": max_epochs, "seed": seed}
    signature = {"batch_size": batch_size, "temperature": temperature, "pairs": len(frozen), **how}
    if distributed.is_main():
        signature |= {"data": found.identity(), "model": [tower_checksum(encoder.tower(side)) for side in SIDES]}
    ledger: Ledger[str] = Ledger(target / "finished", distributed.broadcast_object(signature))
    own = ledger.missing(chosen)
    with distributed.alone():  # objectives would take the batches of all processes for one
        order = next(epochs(len(frozen), batch_size, seed))
        shares = softmax_shares(frozen, temperature, order).cpu().numpy()
        _, loss = frozen.exact(temperature)
        for name in own:
            measured = measure(frozen, ESTIMATORS[name], temperature, batch_size, **how)
            ledger.add({name: measured.to_plain()})
            print(f"{name}: {measured.epochs} epochs", file=sys.stderr)
    done = ledger.all_values()
    if distributed.is_main():
        facts: Row = {"model": model, "data": data, "split": split, "kind": encoder.kind, "pairs": len(frozen)}
        facts |= {"pairs_of_data": len(found), "batch_size": batch_size, "temperature": temperature}
        facts |= {"warm_up": warm_up, "max_epochs": max_epochs, "seed": seed}
        results = {name: Measured.from_plain(done[name]) for name in chosen}
        _conclude(target, facts, results, loss, shares, weights)
    distributed.barrier()


def trained_temperature(model: DualEncoder, folder: Path) -> float | None:
    """τ that a model was trained with: its own note, or that of its run's latest checkpoint; None if nothing tells."""
    from dualenc.training.checkpoint import Checkpoints

    known = getattr(model, "temperature", None)
    if known is not None:
        return float(known)
    written = folder.parent / "checkpoints"
    checkpoints = Checkpoints(written).complete() if folder.is_dir() and written.is_dir() else []
    if not checkpoints:
        return None
    try:
        state = torch.load(checkpoints[-1][1] / "state.pt", map_location="cpu", weights_only=True, mmap=True)
        return float(state["objective"]["log_temperature"].exp())
    except Exception as error:
        reason = " ".join(str(error).split())[:120]
        raise DualencError(f"{written}: tells no temperature ({reason}); give one with --temperature") from None


@torch.inference_mode()
def embed_pairs(model: DualEncoder, found: PairDataset | Corpus, rows: np.ndarray, seed: int) -> FrozenPairs:
    """Embed every item of some pairs (M,) once; of images, two SimCLR augmentations of each."""
    from dualenc.data import Corpus
    from dualenc.training.loader import augmentation_seeds

    device = next(model.parameters()).device

    def embed(side: Side, ids: np.ndarray) -> torch.Tensor:
        """(N, D) embeddings of the items of a side."""
        parts = []
        for some in np.split(ids, range(CHUNK, len(ids), CHUNK)):
            if isinstance(found, Corpus):
                seeds = augmentation_seeds(seed, 0, some.tolist(), side)
                inputs = simclr_prepare(model.left.prepare)([found[row] for row in some.tolist()], seeds)
            else:
                items = [found.item(side, item) for item in some.tolist()]
                inputs = model.tower(side).prepare(items)
            parts.append(model.encode(side, {name: tensor.to(device) for name, tensor in inputs.items()}))
        return torch.cat(parts).float()

    if isinstance(found, Corpus):
        left, right = embed("left", rows), embed("right", rows)
        return FrozenPairs.one_to_one(left.clone(), right.clone(), views=True)
    items, places = {}, {}
    of: dict[Side, np.ndarray] = {"left": found.left_id[rows], "right": found.right_id[rows]}
    for side, ids in of.items():
        items[side], places[side] = np.unique(ids, return_inverse=True)
    listed = {}
    opposite: tuple[tuple[Side, Side], ...] = (("left", "right"), ("right", "left"))
    for side, other in opposite:
        known = found.positives(side, of[side])
        # Ids among the items that are embedded; others, and padding, are -1.
        place = np.searchsorted(items[other], known).clip(max=len(items[other]) - 1)
        known = np.where(items[other][place] == known, place, -1)
        # Without more than the pair's own there is nothing to list.
        listed[side] = torch.from_numpy(known).to(device) if ((known >= 0).sum(axis=1) > 1).any() else None
    return FrozenPairs(
        embed("left", items["left"]),
        embed("right", items["right"]),
        torch.from_numpy(places["left"]).to(device),
        torch.from_numpy(places["right"]).to(device),
        left_positives=listed["left"],
        right_positives=listed["right"],
    )


def _conclude(
    target: Path, facts: Row, results: dict[str, Measured], loss: float, shares: np.ndarray, weights: list[str]
) -> None:
    """The report: a table of the objectives, what a batch sees, plots of both, and the advice."""
    num_pairs, batch_size = int(str(facts["pairs"])), int(str(facts["batch_size"]))
    rows: list[Row] = []
    plain: dict[str, Row] = {}
    for name, found in results.items():
        per_pair = found.state_bytes / num_pairs
        rows.append(
            {
                "objective": name,
                "bias": str(found.bias),
                "step error": f"{found.step_error:.3f} ± {found.step_error_error:.3f}",
                "extra encodes per pair": round(found.encodes, 3),
                "state, bytes per pair": round(per_pair),
                "epochs": found.epochs,
                "note": _note(name, found),
            }
        )
        plain[name] = {
            "bias": found.bias.value,
            "bias_error": found.bias.error,
            "bias_limit": found.bias.limit,
            "biased": found.bias.is_significant,
            "step_error": found.step_error,
            "step_error_error": found.step_error_error,
            "encodes_per_pair": found.encodes,
            "state_bytes_per_pair": per_pair,
            "epochs": found.epochs,
            "global_loss": name not in OTHER_LOSSES,
        }
    seen = {"mean": float(shares.mean()), "median": float(np.median(shares))}
    seen["anchors_above_half"] = float(np.mean(shares > 0.5))
    seen_row: Row = {"B": batch_size, "pairs": num_pairs, **seen}
    line = advice(results, batch_size)
    figures = []
    shown = {name: found for name, found in results.items() if name not in OTHER_LOSSES}
    if shown:
        heights = {
            "bias": {name: found.bias.value for name, found in shown.items()},
            "error of a step": {name: found.step_error for name, found in shown.items()},
        }
        spreads = {
            "bias": {name: found.bias.error for name, found in shown.items()},
            "error of a step": {name: found.step_error_error for name, found in shown.items()},
        }
        caption = "Distance from the gradient of the global loss, relative to its length, ± one standard error"
        figures.append(Figure(caption, plots.bars(heights, ylabel="relative to the gradient", errors=spreads)))
    caption = f"Share of an anchor's softmax that its batch of {batch_size} holds; mean {seen['mean']:.4f}"
    plot = plots.histograms({"share": shares.tolist()}, xlabel="share of the softmax", ylabel="share of anchors")
    figures.append(Figure(caption, plot))
    conclude(
        target,
        "objectives",
        f"Objectives: {display_name(str(facts['model']))} on {facts['data']}",
        facts | {"advice": line},
        {"objectives": plain, "softmax_share": seen, "exact_loss": loss},
        [
            Table(f"Gradients at B = {batch_size}, τ = {facts['temperature']:.4g}, {num_pairs:,} pairs", rows),
            Table("Share of the softmax over the corpus that a batch holds", [seen_row]),
        ],
        weights=weights,
        figures=figures,
    )
    print(line)


def _note(name: str, found: Measured) -> str:
    notes = ["another loss"] if name in OTHER_LOSSES else []
    notes += ["stopped at the limit of epochs"] if found.bias.error > BOUND else []
    return "; ".join(notes)
