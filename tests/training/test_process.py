"""Setting a process up: precision, other processes, where weights go."""

import pytest
import torch
from accelerate.state import AcceleratorState

from dualenc.errors import DualencError
from dualenc.training import trainer as process
from tests.training.fakes import TinyEncoder


def test_runs_of_different_precision_may_follow_one_another(tmp_path):
    for precision in ("no", "bf16", "no"):
        accelerator = process.start_accelerator(precision, [], tmp_path)
        assert AcceleratorState().mixed_precision == precision
        with accelerator.autocast():
            product = torch.ones(2, 2, device=accelerator.device) @ torch.ones(2, 2, device=accelerator.device)
        assert product.dtype == (torch.bfloat16 if precision == "bf16" else torch.float32)


def test_launching_on_cpu_without_mpi_warns_that_there_is_one_process(monkeypatch, tmp_path):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.warns(UserWarning, match="has started a single process; .* --multi_gpu --num_processes N"):
        process.start_accelerator("no", [], tmp_path)


def test_an_unknown_tracker_is_told(tmp_path):
    with pytest.raises(DualencError, match="tracker 'wanndb' is not installed or unknown"):
        process.start_accelerator("no", ["wanndb"], tmp_path)


def test_placing_keeps_the_weights_and_plain_batchnorm_on_one_process():
    model = TinyEncoder(batchnorm=True)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    placed = process.place(model, torch.device("cpu"), chunk_size=None)
    assert all(torch.equal(before[name], tensor) for name, tensor in placed.state_dict().items())
    assert not any(isinstance(module, torch.nn.SyncBatchNorm) for module in placed.modules())


def test_synchronised_batchnorm_keeps_weights_and_timms_activations():
    from timm.layers import BatchNormAct2d

    model = TinyEncoder(batchnorm=True)
    model.left.norm = BatchNormAct2d(3)
    images, shape = torch.randn(2, 3, 4, 4), [type(module) for module in model.modules()]
    expected = model.left.norm.eval()(images)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    converted = process.synchronised(model)
    assert (expected >= 0).all()
    assert torch.equal(converted.left.norm.eval()(images), expected)
    assert all(torch.equal(before[name], tensor) for name, tensor in converted.state_dict().items())
    norms = [module for module in converted.modules() if isinstance(module, torch.nn.modules.batchnorm._BatchNorm)]
    assert len(norms) == sum(issubclass(kind, torch.nn.modules.batchnorm._BatchNorm) for kind in shape)
    assert all(isinstance(norm, torch.nn.SyncBatchNorm) for norm in norms)
