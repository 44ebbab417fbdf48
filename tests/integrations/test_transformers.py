"""An objective in a `transformers.Trainer` with a `compute_loss` of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import normalize
from transformers import BertConfig, BertModel, Trainer, TrainingArguments

from dualenc.errors import DualencError
from dualenc.integrations.transformers import ObjectiveStateMixin
from dualenc.objectives import MomentumQueue, SogCLR

pytestmark = pytest.mark.slow
NUM_PAIRS = 48


class PairTrainer(ObjectiveStateMixin, Trainer):
    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        left, right = (
            normalize(model(input_ids=inputs[side]).pooler_output, dim=-1)
            for side in ("left", "right")
        )
        loss = self.objective(left, right, inputs["id"]).loss
        return (loss, None) if return_outputs else loss


def collate(rows: list[int]) -> dict[str, torch.Tensor]:
    ids = torch.tensor(rows)
    digits = torch.stack([ids % 7, ids // 7], dim=1)
    return {"id": ids, "left": digits + 1, "right": digits.flip(1) + 1}


def train(output: Path, resume: Any = None, **settings: Any) -> PairTrainer:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=10,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
    )
    plain = {
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "save_steps": 7,
    }
    arguments = TrainingArguments(
        str(output), per_device_train_batch_size=8, learning_rate=3e-3, **plain, **settings
    )
    trainer = PairTrainer(
        BertModel(config), arguments, train_dataset=list(range(NUM_PAIRS)), data_collator=collate
    )
    trainer.objective = SogCLR(num_left=NUM_PAIRS, temperature=0.1, learnable_temperature=True)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def test_it_trains_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    whole = train(tmp_path, max_steps=30)
    losses = [
        line["loss"]
        for line in train(tmp_path / "logged", max_steps=30, logging_steps=10).state.log_history[
            :-1
        ]
    ]
    assert losses[-1] < losses[0]
    assert whole.objective.temperature.item() != pytest.approx(0.1, abs=1e-4), "τ is trained, too"
    again = train(tmp_path, resume=str(tmp_path / "checkpoint-14"), max_steps=30)
    for one, other in ((whole.model, again.model), (whole.objective, again.objective)):
        for name, value in one.state_dict().items():
            torch.testing.assert_close(other.state_dict()[name], value, rtol=0, atol=0)


def test_the_objective_is_where_the_model_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = train(tmp_path, max_steps=1)
    trainer.lr_scheduler = None
    monkeypatch.setattr(TrainingArguments, "device", torch.device("meta"))
    trainer.create_optimizer()
    assert trainer.objective.log_temperature.device.type == "meta"


def test_a_trainer_without_an_objective_is_told_apart(tmp_path: Path) -> None:
    trainer = PairTrainer(
        BertModel(BertConfig(hidden_size=12, num_hidden_layers=1)), TrainingArguments(str(tmp_path))
    )
    with pytest.raises(DualencError, match=r"set trainer\.objective"):
        trainer.find_objective()
    trainer.objective = MomentumQueue()
    with pytest.raises(DualencError, match="MomentumQueue needs a momentum encoder"):
        trainer.find_objective()
