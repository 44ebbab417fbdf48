"""Every kind of sentence-transformers model trains here: our vectors are the library's, before and
after saving."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import (
    Dense,
    Dropout,
    LayerNorm,
    Normalize,
    Pooling,
    Router,
    StaticEmbedding,
    Transformer,
    WeightedLayerPooling,
)
from torch import nn

from dualenc.encoders import DualEncoder, TextEncoder, load_model
from dualenc.encoders.sentence_model import new_model
from dualenc.errors import DualencError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

pytestmark = pytest.mark.slow

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
HEADS = {**SIZES, "num_key_value_heads": 2, "head_dim": 16}
LAST = lambda size: [Pooling(size, "lasttoken"), Normalize()]  # noqa: E731
MEAN = lambda size: [Pooling(size), Normalize()]  # noqa: E731
PROMPTS = {"query": "Instruct: find an answer\nQuery:", "document": ""}

Tail = Callable[[int], list[Any]]
MODELS: dict[str, tuple[dict[str, Any], Tail]] = {
    "bert": (SIZES, MEAN),
    "mpnet": (SIZES, MEAN),
    "xlm-roberta": ({**SIZES, "max_position_embeddings": 66}, MEAN),
    "modernbert": (SIZES, lambda size: [Pooling(size, "cls")]),
    "distilbert": ({"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64}, MEAN),
    "t5": ({"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}, MEAN),
    "bart": (
        {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "decoder_ffn_dim": 64},
        MEAN,
    ),
    "qwen3": (HEADS, LAST),  # Qwen3-Embedding
    "llama": (HEADS, LAST),
    "gemma3_text": (  # EmbeddingGemma
        {**HEADS, "use_bidirectional_attention": True},
        lambda size: [
            Pooling(size),
            Dense(size, 96, bias=False, activation_function=nn.Identity()),
            Dense(96, size, bias=False, activation_function=nn.Identity()),
            Normalize(),
        ],
    ),
}
TAILS: dict[str, Tail] = {
    "max": lambda size: [Pooling(size, "max")],
    "weighted mean": lambda size: [Pooling(size, "weightedmean")],
    "square root of the length": lambda size: [Pooling(size, "mean_sqrt_len_tokens")],
    "several poolings": lambda size: [Pooling(size, ("cls", "mean", "max")), Dense(3 * size, 20)],
    "mean without prompt": lambda size: [Pooling(size, include_prompt=False)],
    "first token without prompt": lambda size: [
        Pooling(size, "cls", include_prompt=False),
        Normalize(),
    ],
    "residual": lambda size: [Pooling(size), Dense(size, 16, use_residual=True), Dropout(0.2)],
    "normalised before": lambda size: [Pooling(size), Normalize(), LayerNorm(size)],
    "tokens mapped": lambda size: [
        Dense(
            size, 16, module_input_name="token_embeddings", module_output_name="token_embeddings"
        ),
        Pooling(16),
    ],
}


@pytest.fixture
def transformer(tokenizer: PreTrainedTokenizerBase) -> Callable[..., Transformer]:
    """Makes a small Transformer module; its biases differ from 0, with which they would not
    matter."""

    def make(kind: str, sizes: dict[str, Any], padding_side: str = "right") -> Transformer:
        torch.manual_seed(0)
        own = copy.deepcopy(tokenizer)
        own.init_kwargs["padding_side"] = own.padding_side = padding_side
        module: Transformer = new_model({"model_type": kind, **sizes}, own, torch.float32)[0]
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        module.max_seq_length = 60
        return module

    return make


def save(modules: list[Any], folder: Path, **options: Any) -> Path:
    """The folder of a model of sentence-transformers, written by it."""
    model = SentenceTransformer(modules=modules, device="cpu", prompts=PROMPTS, **options)
    model.save(str(folder), create_model_card=False)
    return folder


def theirs(folder: Path, side: str, texts: list[str], batch_size: int) -> torch.Tensor:
    """Unit vectors by `encode_query` or `encode_document`."""
    model = SentenceTransformer(str(folder), device="cpu")
    encode = model.encode_query if side == "left" else model.encode_document
    vectors = encode(texts, batch_size=batch_size, convert_to_tensor=True, show_progress_bar=False)
    return nn.functional.normalize(vectors)


def ours(model: DualEncoder, side: Any, texts: list[str], batch_size: int) -> torch.Tensor:
    return torch.from_numpy(model.encode(texts, side, batch_size=batch_size))


def assert_equal(model: DualEncoder, folder: Path, texts: list[str]) -> None:
    """Both libraries give equal vectors, of texts alone and in a batch."""
    for side in ("left", "right"):
        for batch_size in (1, len(texts)):
            expected = theirs(folder, side, texts, batch_size)
            torch.testing.assert_close(
                ours(model, side, texts, batch_size), expected, atol=1e-6, rtol=0
            )


def assert_equal_before_and_after_saving(
    folder: Path, texts: list[str], saved: Path
) -> DualEncoder:
    model = load_model(folder)
    assert_equal(model, folder, texts)
    model.save(saved)
    assert_equal(model, saved, texts)
    assert torch.equal(ours(load_model(saved), "left", texts, 4), ours(model, "left", texts, 4))
    return model


@pytest.mark.parametrize("kind", MODELS)
def test_architectures(kind: str, transformer: Any, texts: list[str], tmp_path: Path) -> None:
    sizes, tail = MODELS[kind]
    folder = save([transformer(kind, sizes), *tail(32)], tmp_path / "theirs")
    assert_equal_before_and_after_saving(folder, texts, tmp_path / "ours")


@pytest.mark.parametrize("kind", ["qwen3", "gemma3_text", "modernbert", "t5", "xlm-roberta"])
def test_padding_on_the_left(kind: str, transformer: Any, texts: list[str], tmp_path: Path) -> None:
    sizes, tail = MODELS[kind]
    folder = save([transformer(kind, sizes, "left"), *tail(32)], tmp_path / "theirs")
    assert_equal_before_and_after_saving(folder, texts, tmp_path / "ours")
    assert (
        SentenceTransformer(str(tmp_path / "ours"), device="cpu").tokenizer.padding_side == "right"
    )


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("kind", ["bert", "qwen3"])
def test_modules_behind_the_transformer(
    kind: str, tail: str, transformer: Any, texts: list[str], tmp_path: Path
) -> None:
    folder = save([transformer(kind, MODELS[kind][0]), *TAILS[tail](32)], tmp_path / "theirs")
    model = assert_equal_before_and_after_saving(folder, texts, tmp_path / "ours")
    # Texts without padding, and both sides at once, as in training.
    parts = [model.left.prepare(texts * 2), model.right.prepare(texts)]
    with torch.no_grad():
        separate = torch.cat([model("left", parts[0]), model("right", parts[1])])
        packed = [
            model("left", model.left.pack(parts[0])),
            model("right", model.right.pack(parts[1])),
        ]
        torch.testing.assert_close(torch.cat(packed), separate, atol=1e-6, rtol=0)
        joined = model.left.prepare.join(parts)
        assert (joined is None) == ("without prompt" in tail)
        if joined is not None:
            torch.testing.assert_close(model("left", joined), separate, atol=1e-6, rtol=0)


def test_layers_are_weighed(transformer: Any, texts: list[str], tmp_path: Path) -> None:
    module = transformer("bert", SIZES)
    module.model.config.output_hidden_states = True
    modules = [module, WeightedLayerPooling(32, num_hidden_layers=2, layer_start=1), Pooling(32)]
    model = load_model(save(modules, tmp_path / "theirs"))
    assert_equal(model, tmp_path / "theirs", texts)
    inputs = model.left.prepare(texts * 4)
    assert model.left.pack(inputs) is inputs


@pytest.mark.parametrize("kind", ["bert", "qwen3", "t5", "modernbert"])
def test_adapters_are_merged(kind: str, transformer: Any, texts: list[str], tmp_path: Path) -> None:
    sizes, tail = MODELS[kind]
    model = TextEncoder(
        str(save([transformer(kind, sizes), *tail(32)], tmp_path / "theirs")), lora_rank=2
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            assert parameter.requires_grad == ("lora_" in name)
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    assert (
        ours(model, "left", texts, 4) - theirs(tmp_path / "theirs", "left", texts, 4)
    ).abs().max() > 0.01
    model.save(tmp_path / "ours")
    assert_equal(model, tmp_path / "ours", texts)


def test_a_router_is_two_towers(
    transformer: Any, tokenizer: PreTrainedTokenizerBase, texts: list[str], tmp_path: Path
) -> None:
    first = [transformer("bert", SIZES), Pooling(32)]
    second = [transformer("qwen3", HEADS), *LAST(32)]
    words = [StaticEmbedding(tokenizer, embedding_dim=32)]
    pairs = {"two transformers": (first, second), "words and a transformer": (words, first)}
    for name, (left, right) in pairs.items():
        modules = [Router.for_query_document(left, right), Normalize()]
        folder = save(modules, tmp_path / name)
        model = assert_equal_before_and_after_saving(folder, texts, tmp_path / f"{name}, saved")
        assert not model.shares_weights
        with pytest.raises(DualencError, match="its sides are separate, so shared cannot be true"):
            TextEncoder(str(folder), shared=True)
    behind = [*first, Router.for_query_document([Dense(32, 16)], [Dense(32, 16)])]
    model = assert_equal_before_and_after_saving(
        save(behind, tmp_path / "behind"), texts, tmp_path / "saved"
    )
    assert model.num_parameters == sum(p.numel() for p in nn.Sequential(*behind).parameters())


def test_separate_towers_are_saved_as_a_router(
    text_encoder: Any, texts: list[str], tmp_path: Path
) -> None:
    model = text_encoder(shared=False, query_prompt="q ", document_prompt="d ")
    model.save(tmp_path / "model")
    assert_equal(model, tmp_path / "model", texts)
    again = load_model(tmp_path / "model")
    assert not again.shares_weights
    for side in ("left", "right"):
        assert torch.equal(ours(again, side, texts, 4), ours(model, side, texts, 4))


def test_a_static_embedding_is_a_mean_of_words(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    static = StaticEmbedding(tokenizer, embedding_dim=16)
    folder = save([static, Normalize()], tmp_path / "theirs")
    model = assert_equal_before_and_after_saving(folder, texts, tmp_path / "ours")
    inputs = model.right.prepare(texts)
    assert inputs["input_ids"].shape == inputs["attention_mask"].shape
    ids = tokenizer.backend_tokenizer.encode(texts[0], add_special_tokens=False).ids
    expected = nn.functional.normalize(static.embedding.weight[ids].mean(dim=0), dim=0)
    torch.testing.assert_close(model("right", inputs)[0], expected)
    empty = model.right.prepare([""])
    assert empty["input_ids"].shape == (1, 0)
    assert model("right", empty).tolist() == [[0.0] * 16]
    short = TextEncoder(str(folder), max_length=3)
    assert short.right.prepare(texts)["attention_mask"].sum(dim=1).tolist() == [3, 3, 3, 0]
    short.save(tmp_path / "short")
    assert_equal(short, tmp_path / "short", texts)


def test_a_model_in_memory(transformer: Any, texts: list[str], tmp_path: Path) -> None:
    theirs_in_memory = SentenceTransformer(
        modules=[transformer("bert", SIZES), Pooling(32)],
        prompts=PROMPTS,
        device="cpu",
        truncate_dim=20,
    )
    model = TextEncoder(theirs_in_memory)
    assert model.left.backbone is theirs_in_memory[0].model
    assert model.dim == 20
    separate = TextEncoder(theirs_in_memory, shared=False)
    assert not separate.shares_weights
    model.save(tmp_path / "model")
    for one in (model, separate):
        assert_equal(one, tmp_path / "model", texts)


@pytest.mark.parametrize(
    ("default", "query_prompt", "kept"),
    [("web", None, "web"), ("web", "", None), ("query", None, "query"), (None, None, None)],
)
def test_the_default_prompt_is_saved(
    transformer: Any,
    tmp_path: Path,
    default: str | None,
    query_prompt: str | None,
    kept: str | None,
) -> None:
    """Unless a side that was given no prompt would get it."""
    prompts = {"web": "web: ", "query": "ask: " if default == "query" else ""}
    theirs = SentenceTransformer(
        modules=[transformer("bert", SIZES), Pooling(32)],
        prompts=prompts,
        default_prompt_name=default,
        device="cpu",
    )
    model = TextEncoder(theirs, query_prompt=query_prompt)
    model.save(tmp_path / "model")
    saved = SentenceTransformer(str(tmp_path / "model"), device="cpu")
    assert saved.default_prompt_name == kept
    for side in (model.left, model.right):
        again = TextEncoder(str(tmp_path / "model")).tower(
            "left" if side is model.left else "right"
        )
        assert again.prepare.prompt == side.prepare.prompt
    if kept == default:
        assert (
            np.abs(
                saved.encode(["a dog"]) - theirs.encode(["a dog"], normalize_embeddings=True)
            ).max()
            < 1e-6
        )


def test_a_prompt_that_was_taken_away_stays_away(transformer: Any, tmp_path: Path) -> None:
    """Where the base model has it under another name."""
    prompts = {"query": "ask: ", "passage": "text: "}
    modules = [transformer("bert", SIZES), Pooling(32)]
    theirs = SentenceTransformer(modules=modules, prompts=prompts, device="cpu")
    assert TextEncoder(theirs).right.prepare.prompt == "text: "
    model = TextEncoder(theirs, document_prompt="")
    model.save(tmp_path / "model")
    again = TextEncoder(str(tmp_path / "model"))
    assert [tower.prepare.prompt for tower in (again.left, again.right)] == ["ask: ", ""]
    saved = SentenceTransformer(str(tmp_path / "model"), device="cpu")
    assert np.abs(saved.encode_document(["a dog"]) - model.encode_document(["a dog"])).max() < 1e-6


def test_a_language_model_as_it_is(transformer: Any, texts: list[str], tmp_path: Path) -> None:
    """Without modules.json the library pools the last token, of the text in its chat template where
    there is one."""
    module = transformer("qwen3", HEADS)
    template = "{% for m in messages %}[CLS]{{ m['role'] }}: {{ m['content'] }}[SEP]{% endfor %}"
    for number, chat_template in enumerate((None, template)):
        folder = tmp_path / str(number)
        module.tokenizer.chat_template = chat_template
        module.model.save_pretrained(folder)
        module.tokenizer.save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(
            json.dumps(config | {"architectures": ["Qwen3ForCausalLM"]})
        )
        model: Any = assert_equal_before_and_after_saving(
            folder, texts, tmp_path / f"{number}, saved"
        )
        assert model.left.head[0].pooling_mode == "lasttoken"


def test_another_pooling(text_encoder: Any, texts: list[str], tmp_path: Path) -> None:
    for pooling in ("last", ["cls", "mean"]):
        model = text_encoder(pooling=pooling)
        model.save(tmp_path / str(pooling))
        assert_equal(model, tmp_path / str(pooling), texts)
    with pytest.raises(DualencError, match="Invalid pooling mode: 'sum'"):
        text_encoder(pooling="sum")


def test_a_model_in_half_precision_trains_in_single_and_one_for_dot_products_is_named(
    tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    model = new_model({"model_type": "bert", **SIZES}, tokenizer, torch.float32)
    modules = [*model, Pooling(32)]
    half = SentenceTransformer(modules=modules, device="cpu", similarity_fn_name="dot").to(
        torch.bfloat16
    )
    encoder = TextEncoder(half)
    assert {parameter.dtype for parameter in encoder.parameters()} == {torch.float32}
    assert "trained for dot scores" in caplog.text
    caplog.clear()
    TextEncoder(SentenceTransformer(modules=modules, device="cpu"))
    assert not caplog.text
