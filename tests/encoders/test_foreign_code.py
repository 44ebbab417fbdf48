"""Model folders are untrusted: code in them is never run, nobody is asked about it, and pickles are
not weights."""

from __future__ import annotations

import io
import json
import logging
import os
import pickle
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import PreTrainedTokenizerBase, dynamic_module_utils

from dualenc.encoders import (
    DualEncoder,
    ImageEncoder,
    ImageTextEncoder,
    TextEncoder,
    load_model,
    with_map,
)
from dualenc.encoders.hub import quiet_loading
from dualenc.encoders.vector import VectorTower
from dualenc.errors import DualencError

AUTO_MAP = {
    "AutoConfig": "evil.Config",
    "AutoModel": "evil.Model",
    "AutoTokenizer": ["evil.Tokenizer", None],
}


def edit(path: Path, **changes: Any) -> dict[str, Any]:
    """Change keys of a JSON file, which is made if it is not there."""
    value = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(value | changes))
    return value


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A question on the terminal would get a yes."""
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 20))


@pytest.fixture
def evil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with code that leaves `canary` beside it when it is imported, and all of
    transformers' hooks to it."""
    monkeypatch.setattr(
        transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    folder = tmp_path / "evil"
    folder.mkdir()
    _with_code(folder)
    edit(folder / "config.json", model_type="made-up", auto_map=AUTO_MAP)
    edit(folder / "tokenizer_config.json", auto_map=AUTO_MAP)
    return folder


def _with_code(folder: Path) -> None:
    canary = folder.parent / "canary"
    (folder / "evil.py").write_text(
        f"open({str(canary)!r}, 'w')\nclass Config: pass\nclass Tokenizer: pass\n"
    )


def refuses(make: Callable[[], Any], canary: Path) -> str:
    with pytest.raises(DualencError) as caught:
        make()
    assert not canary.exists()
    return str(caught.value)


def test_the_code_would_run(evil: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows proves nothing unless the hooks work: transformers asks, and on "y" imports the
    code."""
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 20))
    with pytest.raises(AttributeError, match="'Config' has no attribute"):
        transformers.AutoConfig.from_pretrained(evil)
    assert (evil.parent / "canary").exists()


def test_a_text_tower_of_code_in_open_clip(
    evil: Path, clip: dict[str, Any], tokenizer: PreTrainedTokenizerBase, answers: None
) -> None:
    canary = evil.parent / "canary"
    ImageTextEncoder(config=clip, tokenizer=tokenizer).save(evil.parent / "model")
    path = evil.parent / "model" / "open_clip_config.json"
    config = json.loads(path.read_text())["model_cfg"]
    foreign = {"hf_model_name": str(evil), "hf_tokenizer_name": "."}
    edit(path, model_cfg={**config, "text_cfg": {**config["text_cfg"], **foreign}})
    clip["text_cfg"] |= foreign
    for make in (
        lambda: load_model(evil.parent / "model"),
        lambda: ImageTextEncoder(config=clip, tokenizer=tokenizer),
    ):
        assert "custom code, which is not run" in refuses(make, canary)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        {"tokenizer_kwargs": {"trust_remote_code": True}},
        {"tokenizer_kwargs": {"subfolder": "sub", "trust_remote_code": True}},
        "tokenizer_config.json",
        "config.json",
    ],
    ids=str,
)
def test_a_tokenizer_of_code_in_open_clip(
    change: Any, evil: Path, clip: dict[str, Any], tokenizer: PreTrainedTokenizerBase, answers: None
) -> None:
    canary, model = evil.parent / "canary", evil.parent / "model"
    ImageTextEncoder(config=clip, tokenizer=tokenizer).save(model)
    _with_code(model)
    (model / "sub").mkdir()
    for name in ("tokenizer_config.json", "config.json", "evil.py"):
        (model / "sub" / name).write_text((evil / name).read_text())
    if isinstance(change, dict):
        config = json.loads((model / "open_clip_config.json").read_text())["model_cfg"]
        edit(
            model / "open_clip_config.json",
            model_cfg={**config, "text_cfg": {**config["text_cfg"], **change}},
        )
    elif change == "config.json":
        for path in model.glob("tokenizer*"):
            path.unlink()
        edit(model / change, model_type="made-up", auto_map=AUTO_MAP)
    else:
        edit(model / change, auto_map=AUTO_MAP)
    told = refuses(lambda: load_model(model), canary)
    assert "custom code, which is not run" in told or change == "config.json"


def test_a_text_model_of_code(
    evil: Path, text_encoder: Any, bert: dict[str, Any], answers: None
) -> None:
    canary, model = evil.parent / "canary", evil.parent / "model"
    text_encoder().save(model)
    _with_code(model)
    before = edit(model / "config.json", auto_map=AUTO_MAP, model_type="made-up")
    refuses(lambda: load_model(model), canary)
    (model / "config.json").write_text(json.dumps({**before, "auto_map": AUTO_MAP}))
    load_model(model)  # transformers has this architecture itself: the folder's code is not needed
    edit(model / "tokenizer_config.json", auto_map=AUTO_MAP, tokenizer_class="Tokenizer")
    with suppress(DualencError):  # or a plain tokenizer, by another name
        load_model(model)
    text_encoder(config={**bert, "auto_map": AUTO_MAP, "trust_remote_code": True})
    refuses(lambda: text_encoder(config={"model_type": "made-up", "auto_map": AUTO_MAP}), canary)
    refuses(lambda: text_encoder(tokenizer=str(evil)), canary)
    assert not canary.exists()


@pytest.mark.slow
def test_code_of_a_model_inside_a_model(evil: Path, text_encoder: Any, answers: None) -> None:
    """transformers passes no `trust_remote_code` on to it, and would ask."""
    canary, model = evil.parent / "canary", evil.parent / "model"
    text_encoder().save(model)
    inner = {"model_type": "align_text_model", "auto_map": {"AutoModel": f"{evil}--evil.Model"}}
    config = {
        "model_type": "vision-text-dual-encoder",
        "vision_config": {"model_type": "vit"},
        "text_config": inner,
    }
    edit(model / "config.json", **config)
    assert "requires you to execute custom code" in refuses(lambda: TextEncoder(str(model)), canary)
    assert "requires you to execute custom code" in refuses(
        lambda: text_encoder(config=config), canary
    )


@pytest.mark.slow
def test_other_hooks_of_a_text_model(
    text_encoder: Any, bert: dict[str, Any], tmp_path: Path
) -> None:
    canary, model = tmp_path / "canary", tmp_path / "model"
    text_encoder().save(model)
    edit(model / "config.json", attn_implementation="evil/kernel")
    assert "attn_implementation 'evil/kernel' is code from the hub" in refuses(
        lambda: load_model(model), canary
    )
    config = {**bert, "attn_implementation": "evil/kernel"}
    assert "is code from the hub" in refuses(lambda: text_encoder(config=config), canary)
    edit(model / "config.json", attn_implementation="eager")
    load_model(model)
    edit(model / "adapter_config.json", base_model_name_or_path="evil/model")
    assert "holds adapters of another model; merge them" in refuses(
        lambda: load_model(model), canary
    )


@pytest.mark.parametrize(
    "change", [{"type": "evil.Transformer"}, {"type": "evil.models.Pooling"}, {"path": "../evil"}]
)
def test_modules_of_a_sentence_folder(
    change: dict[str, str], evil: Path, text_encoder: Any
) -> None:
    canary, model = evil.parent / "canary", evil.parent / "model"
    text_encoder().save(model)
    modules = json.loads((model / "modules.json").read_text())
    modules[0] |= change
    (model / "modules.json").write_text(json.dumps(modules))
    assert "is not supported" in refuses(lambda: load_model(model), canary) or "path" in change


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        (
            "2_Dense/config.json",
            {"activation_function": "torch.hub.load"},
            "is not an activation of torch.nn",
        ),
        (
            "2_Dense/config.json",
            {"activation_function": "evil.Tokenizer"},
            "is not an activation of torch.nn",
        ),
        (
            "sentence_bert_config.json",
            {"model_kwargs": {"trust_remote_code": True}},
            "would be passed on",
        ),
        ("sentence_bert_config.json", {"tokenizer_args": {"cache_dir": "x"}}, "would be passed on"),
        ("sentence_bert_config.json", {"tokenizer_name_or_path": "evil"}, "would be passed on"),
        (
            "sentence_bert_config.json",
            {"modality_config": {"text": {"method": "push_to_hub"}}},
            "other than forward",
        ),
        (
            "config.json",
            {"text_config": {"_attn_implementation": "evil/kernel"}},
            "'evil/kernel' is code from the hub",
        ),
        ("adapter_config.json", {"base_model_name_or_path": "evil"}, "adapters of another model"),
    ],
)
def test_settings_of_a_sentence_folder(
    file: str, changes: dict[str, Any], message: str, evil: Path, text_encoder: Any
) -> None:
    canary, model = evil.parent / "canary", evil.parent / "model"
    with_map(text_encoder(), VectorTower("linear", 32, 20, None)).save(model)
    load_model(model)
    edit(
        model / next(model.glob("*_Dense")).name / "config.json"
        if "Dense" in file
        else model / file,
        **changes,
    )
    assert message in refuses(lambda: load_model(model), canary)


@pytest.mark.slow
@pytest.mark.parametrize("attack", ["type", "router", "path", "link", "pickle", "activation"])
def test_modules_inside_a_router(attack: str, evil: Path, text_encoder: Any) -> None:
    canary, model = evil.parent / "canary", evil.parent / "model"
    with_map(text_encoder(shared=False), VectorTower("linear", 32, 20, None)).save(model)
    load_model(model)
    path = model / "router_config.json"
    config = json.loads(path.read_text())
    dense = next(model.glob("query*_Dense"))
    if attack == "type":
        config["types"][dense.name] = "evil.Tokenizer"
    elif attack == "router":
        config["types"][dense.name] = "sentence_transformers.models.Router"
    elif attack == "path":
        config["types"]["../evil"] = config["types"][dense.name]
    elif attack == "link":
        dense.rename(evil / "dense")
        dense.symlink_to(evil / "dense")
    elif attack == "pickle":
        (dense / "model.safetensors").unlink()
        (dense / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(canary)))
    else:
        edit(dense / "config.json", activation_function="torch.utils.data.dataset.random_split")
    path.write_text(json.dumps(config))
    messages = (
        "is not supported",
        "is not a path in the folder",
        "safetensors first",
        "is not an activation of torch.nn",
    )
    assert any(message in refuses(lambda: load_model(model), canary) for message in messages)


class Bomb:
    """Pickles to a command that makes the canary."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.canary}",)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pytorch_model.bin", "open_clip_pytorch_model.bin"])
@pytest.mark.parametrize("kind", ["query-document", "image-text", "image"])
def test_pickles_are_not_read_beside_safetensors_nor_instead(
    kind: str, name: str, build: Callable[[str], DualEncoder], tmp_path: Path
) -> None:
    canary, folder = tmp_path / "canary", tmp_path / "model"
    build(kind).save(folder)
    (folder / name).write_bytes(pickle.dumps(Bomb(canary)))
    load_model(folder)
    assert not canary.exists()
    for path in folder.glob("*.safetensors"):
        path.unlink()
    assert "safetensors first" in refuses(lambda: load_model(folder), canary)


@pytest.mark.parametrize("key", ["checkpoint_path", "pretrained_cfg"])
def test_arguments_of_a_backbone_name_no_other_weights(key: str, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    (tmp_path / "evil.pt").write_bytes(pickle.dumps(Bomb(canary)))
    value: Any = {"file": str(tmp_path / "evil.pt")} if "cfg" in key else str(tmp_path / "evil.pt")
    refuses(lambda: ImageTextEncoder("ViT-B-32", pretrained=str(tmp_path / "evil.pt")), canary)
    told = refuses(lambda: ImageEncoder("test_resnet", backbone_args={key: value}), canary)
    assert f"{key} is not an argument of an architecture" in told
    ImageEncoder("test_resnet", projector_dim=None).save(tmp_path / "model")
    edit(tmp_path / "model" / "config.json", model_args={key: value})
    assert f"{key} is not an argument" in refuses(lambda: load_model(tmp_path / "model"), canary)


def test_threads_that_load_at_once_neither_ask_nor_lose_the_log() -> None:
    seconds = dynamic_module_utils.TIME_OUT_REMOTE_CODE
    has_entered, may_leave = threading.Event(), threading.Event()
    seen = []

    def first() -> None:
        with quiet_loading():
            has_entered.set()
            may_leave.wait(10)

    def second() -> None:
        has_entered.wait(10)
        threading.Timer(0.1, may_leave.set).start()
        with quiet_loading(), quiet_loading():
            time.sleep(0.3)
            seen.append(dynamic_module_utils.TIME_OUT_REMOTE_CODE)

    threads = [threading.Thread(target=load) for load in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [0]
    assert seconds == dynamic_module_utils.TIME_OUT_REMOTE_CODE
    assert logging.root.manager.disable == logging.NOTSET
