"""The lists that cast as `torch.autocast` does on a CPU."""

from hmpx.ops.policies.lists import shipped

_SIDES = ("bf16", "fp32", "promote")
AUTOCAST_LISTS = {f"{side}_file_path": shipped() / "autocast-cpu" / f"{side}.txt" for side in _SIDES}
