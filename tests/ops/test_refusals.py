"""Where torch has no BF16 kernel of an op, its error says why the input is BF16 and what mends it."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import hmpx
from hmpx.ops.policies import op_facts
from hmpx.ops.policies.catalog import catalog
from tests.support.samples import database

SPARSE = torch.eye(4).bfloat16().to_sparse_csr()
CALLS = {
    "fft_rfft": torch.fft.rfft,
    "linalg_inv": torch.linalg.inv,
    "quantile": lambda x: x.quantile(0.5),
    "view_as_complex": lambda x: torch.view_as_complex(x.reshape(8, 2)),
    "torch.sparse.mm": lambda x: torch.sparse.mm(SPARSE, x),
}


@pytest.fixture
def hidden():
    torch.manual_seed(0)
    with hmpx.convert(kernels="native"):
        yield torch.nn.Linear(4, 4)(torch.eye(4))


def refused(call, *tensors):
    """What an error says, with its notes."""
    with pytest.raises((RuntimeError, NotImplementedError)) as error:
        call(*tensors)
    return "\n".join((*map(str, error.value.args), *getattr(error.value, "__notes__", ())))


def test_the_error_names_the_op_its_input_and_the_cure(hidden, tmp_path):
    for op, call in CALLS.items():
        with hmpx.disable_casts():
            plain = refused(call, hidden)
        text = refused(call, hidden)
        assert text.startswith(plain) and "hmpx:" not in plain and text.count("hmpx:") == 1, op
        if op == "torch.sparse.mm":  # its first input is a matrix of the script's own
            assert text.endswith("Call it with input.float().") and call(hidden.float()).dtype is torch.float32
        else:
            made_by = "View" if op == "view_as_complex" else "Addmm"
            assert f"the input of {op} is bfloat16, the result of {made_by}" in text.replace("UnsafeView", "View")
            assert f"fp32: [{op}]" in text
    listed = [op for op in CALLS if op != "torch.sparse.mm"]
    (tmp_path / "fp32.txt").write_text("\n".join(listed))
    with hmpx.convert(bf16_file_path=None, fp32_file_path=tmp_path / "fp32.txt"):
        for op in listed:
            assert not CALLS[op](hidden).dtype.itemsize % 4, op  # what the note says to do


def test_other_errors_have_no_note(hidden):
    for matrix in (torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bfloat16)):
        said = refused(torch.linalg.inv, matrix)
        assert "square" in said and "hmpx:" not in said


class LikeCuda(TorchDispatchMode):
    """Refuses BF16 where torch does so on CUDA alone, in its words."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype is torch.bfloat16 and func.name() in ON_CUDA:
            raise NotImplementedError(f"\"{ON_CUDA[func.name()]}\" not implemented for 'BFloat16'")
        return func(*args, **(kwargs or {}))


ON_CUDA = {"aten::histc": "histogram_cuda", "aten::angle": "angle_cuda", "aten::igamma": "igamma_cuda"}


def test_what_cuda_alone_refuses_is_explained_too(hidden):
    for op in ("histc", "angle", "igamma"):
        with LikeCuda():
            said = refused(getattr(torch, op), hidden, *[hidden] * (op == "igamma"))
        assert "_cuda" in said and f"the input of {op} is bfloat16, the result of Addmm" in said
        assert f"fp32: [{op}]" in said


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_op_without_a_kernel_is_known(device):
    """torch's own table of samples says so for each device. Of products on CUDA it asks the GPU, which has them."""
    for op in database():
        name = op.name.replace("nn.functional.", "").replace(".", "_")
        dtypes = op.supported_dtypes(device)
        has_none = torch.float32 in dtypes and torch.bfloat16 not in dtypes
        if name in catalog() and has_none and (device == "cpu" or name not in op_facts.FP32_KERNELS):
            python = all(entry.signature.python for entry in catalog()[name].entries)
            known = name in op_facts.NO_LOW_KERNEL or name.startswith(op_facts.NO_LOW_KERNELS)
            assert known or python, name


def test_under_a_map_of_dtypes_the_error_says_so_too():
    with hmpx.activate("xla-use-bf16"):
        assert "the input of fft_fft is bfloat16" in refused(torch.fft.fft, torch.ones(8).float())
        with hmpx.casts(fp32=["fft_fft"]):  # what the note says
            assert torch.fft.fft(torch.ones(8).float()).dtype is torch.complex64
