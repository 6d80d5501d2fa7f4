"""Op list files: what reads, what is refused, and what the refusal says."""

import json
from pathlib import Path

import pytest
import torch

import hmpx
from hmpx.insight.explain import explain_op
from hmpx.ops.policies import lists as op_list_files
from hmpx.ops.policies.catalog import catalog
from hmpx.ops.policies.lists import OpLists, default_lists, read_lists, shipped
from hmpx.ops.policies.policy import build_policy

WILD = sorted((Path(__file__).parents[1] / "data" / "in_the_wild").glob("*.yaml"))


def names(listed):
    return [entry.name for entry in listed]


def test_text_takes_comments_blank_lines_crlf_and_a_byte_order_mark(tmp_path):
    path = tmp_path / "ops.txt"
    path.write_bytes(b"\xef\xbb\xbf# head\r\nconv2d\r\n\r\n  mm  # product\r\nlinear")
    listed = OpLists.read(path, "bf16").bf16
    assert [(entry.name, entry.place.line) for entry in listed] == [("conv2d", 2), ("mm", 4), ("linear", 5)]
    assert listed[1].where == f"{path}:4"


def test_a_name_for_some_torches_is_in_no_list_of_others_and_explain_says_so(tmp_path, monkeypatch, capsys):
    path = tmp_path / "fp32.txt"
    path.write_text("softmax\nrms_norm ; torch >= 2.12  # since then\n")
    for version, listed in (((2, 12), ["softmax", "rms_norm"]), ((2, 11), ["softmax"])):
        monkeypatch.setattr(op_list_files, "_TORCH", version)
        assert names(OpLists.read(path, "fp32").fp32) == listed
        policy = build_policy("O1", read_lists(fp32_file_path=path))
        assert (str(policy.rule(catalog()["rms_norm"])) == "fp32") is (version == (2, 12))
        assert f"fp32.txt:2{' from torch 2.12 on' * (version == (2, 11))}" in explain_op("rms_norm", policy)
        hmpx.explain({"fp32_file_path": str(path)})
        assert ("rms_norm with a newer torch" in capsys.readouterr().out) is (version == (2, 11))
    path.write_text("softmax\nlog ; torch < 2.12\n")
    for version, listed in (((2, 12), ["softmax"]), ((2, 11), ["softmax", "log"])):
        monkeypatch.setattr(op_list_files, "_TORCH", version)
        assert names(OpLists.read(path, "fp32").fp32) == listed
    path.write_text("rms_norm; torch > 2\n")
    with pytest.raises(hmpx.OpListError, match=r"fp32.txt:1: 'torch > 2': behind a name"):
        OpLists.read(path, "fp32")


# Ops that torch registers and no list names: parts of listed ones, and what autocast refuses.
_PARTS = {
    *("_cudnn_rnn", "_thnn_fused_gru_cell", "_thnn_fused_lstm_cell", "binary_cross_entropy", "cross_entropy_loss"),
    *("multilabel_margin_loss_forward", "nll_loss2d"),
}
# Ops that lists name and torch does not register there: they call registered ones in C++, or are written in Python.
_BESIDE = {"cross_entropy", "flex_attention", "square"}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_lists_of_autocast_are_those_of_the_installed_torch(device):
    """Every op that torch's dispatcher has for autocast on this device, and no other."""
    registered = torch._C._dispatch_get_registrations_for_dispatch_key(f"Autocast{device.upper()}")
    ops = {name.removeprefix("aten::").split(".")[0] for name in registered if name.startswith("aten::")}
    files = (shipped() / f"autocast-{device}").glob("*.txt")
    listed = {name for path in files for name in names(OpLists.read(path, "fp32").fp32) if "torchvision" not in name}
    assert (ops - listed <= _PARTS, listed - ops <= _BESIDE) == (True, True), (ops - listed, listed - ops)


def test_yaml_fills_its_sides_and_remembers_lines(tmp_path):
    path = tmp_path / "ops.yaml"
    path.write_text('name: "mine"\nbf16:\n  - conv2d\nfp32: [softmax, log]\npromote: null\n')
    lists = read_lists(path)
    assert names(lists.bf16) == ["conv2d"] and lists.bf16[0].place.line == 3
    assert names(lists.fp32) == ["softmax", "log"]
    assert lists.promote is None


def test_json_of_gaudi_with_tabs(tmp_path):
    path = tmp_path / "gaudi_config.json"
    path.write_text('{\n\t"use_fused_adam": true,\n\t"hmp_bf16_ops": ["add", "mm"],\n\t"hmp_fp32_ops": []\n}')
    lists = read_lists(path)
    assert names(lists.bf16) == ["add", "mm"] and lists.bf16[1].place.line == 3
    assert lists.fp32 == () and lists.promote is None


@pytest.mark.parametrize(
    "keys, bf16",
    [
        ({"autocast_bf16_ops": ["add"], "autocast_fp32_ops": None}, ["add"]),
        ({"use_torch_autocast": True, "autocast_bf16_ops": ["add"], "hmp_bf16_ops": ["mm"]}, ["add"]),
        ({"use_habana_mixed_precision": True, "autocast_bf16_ops": ["add"], "hmp_bf16_ops": ["mm"]}, ["mm"]),
        ({"use_torch_autocast": False, "hmp_bf16_ops": ["mm"], "autocast_bf16_ops": None}, ["mm"]),
        ({"hmp_opt_level": "O1", "hmp_bf16_ops": ["mm"]}, ["mm"]),
        ({"hmp_opt_level": "O2", "use_torch_autocast": True, "autocast_bf16_ops": ["add"]}, ["add"]),
    ],
)
def test_of_the_two_generations_of_gaudis_lists_the_one_in_use_counts(keys, bf16, tmp_path):
    path = tmp_path / "gaudi_config.json"
    path.write_text(json.dumps(keys))
    lists = read_lists(path)
    assert names(lists.bf16) == bf16 and lists.fp32 is None


def test_an_empty_file_is_an_empty_list_and_an_empty_path_is_the_default(tmp_path):
    path = tmp_path / "none.txt"
    path.write_text("")
    assert build_policy(lists=read_lists(path, path, path)).bf16 == ()
    assert build_policy(lists=read_lists("", None, "")) == build_policy() != build_policy(lists=read_lists(path))


def test_one_side_from_each_of_two_files(tmp_path):
    first, second = tmp_path / "a.yaml", tmp_path / "b.yaml"
    first.write_text("bf16: [mm]\nfp32: [log]\n")
    second.write_text("fp32: [exp]\n")
    assert names(read_lists(first, second).fp32) == ["exp"]
    second.write_text("bf16: [bmm]\nfp32: [exp]\npromote: [add]\n")
    with pytest.raises(hmpx.OpListError, match="both hold a fp32 list; say which with fp32_file_path="):
        read_lists(bf16_file_path=first, promote_file_path=second)


def test_the_published_defaults_of_hmp_are_the_defaults():
    lists = default_lists()
    assert set(names(lists.bf16)) == set(
        "addmm batch_norm bmm conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d dot dropout "
        "dropout1d dropout2d dropout3d group_norm instance_norm layer_norm leaky_relu linear matmul mm mul mv "
        "relu t".split()
    )
    assert {name for name in names(lists.fp32) if not name.startswith("torchvision.ops.")} == set(
        "binary_cross_entropy binary_cross_entropy_with_logits cross_entropy div divide embedding embedding_bag log "
        "log2 log_softmax nll_loss smooth_l1_loss softmax topk truediv".split()
    )


def test_every_shipped_folder_makes_a_policy():
    for folder in ("resnet50", "bert", "unet", "vit", "decoder"):
        lists = read_lists(shipped() / folder / "bf16.txt", shipped() / folder / "fp32.txt")
        policy = build_policy(lists=lists)
        assert set(names(lists.bf16)) == set(policy.bf16) and set(names(lists.fp32)) == set(policy.fp32), folder


def test_lists_from_the_wild_load_or_are_refused_by_name():
    for path in WILD:
        if path.stem != "mr-dlrm":
            assert build_policy(lists=read_lists(path)).bf16, path
    path = next(path for path in WILD if path.stem == "mr-dlrm")  # names an op that only Habana's own bridge had
    line = next(i for i, text in enumerate(path.read_text().splitlines(), 1) if "embedding_bag_sum_fwd" in text)
    with pytest.raises(hmpx.UnknownOpError, match="'embedding_bag_sum_fwd'; did you mean 'embedding_bag'") as error:
        build_policy(lists=read_lists(path))
    assert f"{path}:{line}:" in str(error.value)
    assert "embedding_bag_sum_fwd" not in build_policy(lists=read_lists(path), unknown="warn").fp32


def test_what_is_no_path_of_a_list_is_refused(tmp_path):
    for value, said in (
        *((each, "bf16_file_path takes the path of a file, not a") for each in (["linear"], True, b"ops.txt", {"mm"})),
        ("nowhere/oplists/bert/bf16.txt", r"no such op list file; hmpx ships one: .*bert.bf16.txt"),
        (tmp_path, "is a directory"),
    ):
        with pytest.raises(hmpx.OpListError, match=said):
            hmpx.convert(bf16_file_path=value)
