"""Fine-tuning: weights that stay fixed, rates by layer, averaged weights, and a stop when nothing gets better."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from dualenc.encoders import ImageTextEncoder, TextEncoder, train_tokenizer
from dualenc.errors import DualencError
from dualenc.training.averages import AveragedWeights
from dualenc.training.log import read_metrics
from dualenc.training.optim import build_optimizer, layer_depths
from dualenc.training.trainer import Trainer
from tests.training.fakes import TinyEncoder, same, weights
from tests.training.runs import FixedEvaluator, run_and_die, train, train_and_die


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return train_tokenizer(["a dog runs"] * 3, vocab_size=300)


def bert(tokenizer: PreTrainedTokenizerBase) -> TextEncoder:
    config = {"model_type": "bert", "hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2}
    torch.manual_seed(0)
    return TextEncoder(config={**config, "intermediate_size": 16, "max_position_embeddings": 20}, tokenizer=tokenizer)


def test_matching_weights_stay_and_all_others_move(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = TinyEncoder()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    patterns = ("left.layers.0.*", "*.bias")
    train(tmp_path, model=model, freeze=patterns)
    for name, parameter in model.named_parameters():
        fixed = name.startswith("left.layers.0.") or name.endswith(".bias")
        assert torch.equal(before[name], parameter) == fixed, name


def test_a_pattern_without_a_weight_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DualencError, match=r"'right\.nothing\*' matches no weight; names are such as left") as caught:
        train(tmp_path, freeze=["left.*", "right.nothing*"])
    assert "\n" not in str(caught.value)


def test_layers_of_a_transformer_by_depth(tokenizer: PreTrainedTokenizerBase) -> None:
    model = bert(tokenizer)
    depths = layer_depths(model)
    found = {name: depths[id(p)] for name, p in model.named_parameters()}
    for name, depth in found.items():
        if ".layer." in name:
            assert depth == 3 - int(name.split(".layer.")[1].split(".")[0])
        elif "embeddings" in name:
            assert depth == 4
        else:
            assert depth == 0, name
    assert set(found.values()) == {0, 1, 2, 3, 4}


def test_both_towers_of_open_clip_by_depth() -> None:
    vision = {"image_size": 32, "layers": 2, "width": 32, "head_width": 16, "patch_size": 16}
    text = {"context_length": 20, "width": 32, "heads": 2, "layers": 3}
    model = ImageTextEncoder(config={"embed_dim": 24, "vision_cfg": vision, "text_cfg": text})
    depths = layer_depths(model)
    found = {name: depths[id(p)] for name, p in model.named_parameters()}
    expected = {
        "left.visual.conv1.weight": 3,
        "left.visual.class_embedding": 3,
        "left.visual.ln_pre.weight": 3,
        "left.visual.transformer.resblocks.0.ln_1.weight": 2,
        "left.visual.transformer.resblocks.1.mlp.c_proj.weight": 1,
        "left.visual.ln_post.weight": 0,
        "left.visual.proj": 0,
        "right.encoder.clip.token_embedding.weight": 4,
        "right.encoder.clip.positional_embedding": 4,
        "right.encoder.clip.transformer.resblocks.2.attn.in_proj_weight": 1,
        "right.encoder.clip.ln_final.weight": 0,
        "right.encoder.clip.text_projection": 0,
    }
    assert {name: found[name] for name in expected} == expected


def test_a_step_is_shorter_by_the_decay_of_every_layer(tokenizer: PreTrainedTokenizerBase) -> None:
    model = bert(tokenizer)
    depths = layer_depths(model)
    optimizer = build_optimizer([model, nn.Linear(2, 2)], "sgd", 0.1, 0.0, momentum=0.0, layer_decay=0.5)
    assert optimizer.param_groups[0]["lr"] == 0.1  # what is logged
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model("left", model.left.prepare(["a dog"]))[:, 0].sum().backward()
    optimizer.step()
    for name, p in model.named_parameters():
        if p.grad is not None:
            torch.testing.assert_close(before[name] - p, 0.1 * 0.5 ** depths[id(p)] * p.grad, atol=1e-7, rtol=1e-3)


@pytest.mark.parametrize("decay", [0.5, 0.999])
def test_the_average_is_that_of_the_formula(decay: float) -> None:
    model = TinyEncoder(batchnorm=True)
    average = AveragedWeights(model, decay)
    expected = {name: t.detach().double().numpy().copy() for name, t in model.state_dict().items()}
    for step in range(1, 6):
        with torch.no_grad():
            for number, tensor in enumerate(model.state_dict().values()):
                tensor.add_(step + number)
        share = min(decay, (1 + step) / (10 + step))
        for name, tensor in model.state_dict().items():
            new = tensor.double().numpy()
            whole = not tensor.is_floating_point()
            expected[name] = new.copy() if whole else share * expected[name] + (1 - share) * new
        average.update()
    last = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with average.applied():
        for name, tensor in model.state_dict().items():
            np.testing.assert_allclose(tensor.double().numpy(), expected[name], rtol=1e-5)
    assert all(torch.equal(last[name], tensor) for name, tensor in model.state_dict().items())


def test_a_model_without_weights_has_nothing_to_average() -> None:
    average = AveragedWeights(torch.nn.Identity(), 0.9)
    average.update()
    assert average.average == {}


class Watching(FixedEvaluator):
    """Keeps the weights that it measures."""

    seen: dict[str, torch.Tensor]

    def __call__(self, model: Any) -> dict[str, float]:
        self.seen = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        return super().__call__(model)


@pytest.mark.slow
def test_the_average_is_evaluated_and_saved_and_training_goes_on_without_it(tmp_path: Path) -> None:
    evaluator, models = Watching(0.0, 1.0), [TinyEncoder(), TinyEncoder()]
    models[1].load_state_dict(models[0].state_dict())
    train(tmp_path / "plain", model=models[0])
    train(tmp_path / "averaged", model=models[1], weight_average=0.5, evaluator=evaluator)
    assert same(models[0].state_dict(), models[1].state_dict())
    saved = weights(tmp_path / "averaged")
    assert not same(saved, weights(tmp_path / "plain"))
    for name, tensor in saved.items():
        torch.testing.assert_close(evaluator.seen[name].to(tensor), tensor)


@pytest.mark.slow
def test_a_killed_run_with_averages_resumes_as_if_unbroken(tmp_path: Path) -> None:
    settings = {"weight_average": 0.9, "layer_decay": 0.7, "freeze": ["*.bias"]}
    train(tmp_path / "unbroken", **settings)
    assert run_and_die(train_and_die, tmp_path / "run", 6, settings) == -9
    train(tmp_path / "run", model=TinyEncoder(dropout=0.2), resume=True, **settings)
    assert same(weights(tmp_path / "run"), weights(tmp_path / "unbroken"))


def test_it_stops_when_nothing_gets_better_and_stays_stopped(tmp_path: Path) -> None:
    scores = (0.1, 0.5, 0.4, 0.6, 0.3, 0.2, 0.9, 0.9, 0.9)
    settings = {"evaluate_every": 1, "patience": 2}
    result = train(tmp_path, evaluator=FixedEvaluator(*scores), **settings)
    assert result.steps == 5
    assert result.metrics == {"score": 0.6}
    again = train(tmp_path, evaluator=FixedEvaluator(0.99), resume=True, **settings)
    assert again.steps == 5
    assert again.metrics == {"score": 0.6}
    evaluated = [line["step"] for line in read_metrics(tmp_path / "metrics.jsonl") if "evaluation/score" in line]
    assert evaluated == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layer_decay": 0.0}, "layer_decay is 0.0"),
        ({"layer_decay": 1.1}, "layer_decay is 1.1"),
        ({"weight_average": 1.0}, "weight_average is 1.0"),
        ({"patience": 2}, "set evaluate_every"),
        ({"patience": 0, "evaluate_every": 1}, "patience is 0"),
    ],
)
def test_mistakes_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(DualencError, match=message) as caught:
        Trainer(output="run", **settings)
    assert "\n" not in str(caught.value)


def test_patience_without_an_evaluator(tmp_path: Path) -> None:
    with pytest.raises(DualencError, match="there is no evaluator"):
        train(tmp_path, patience=2, evaluate_every=1)
