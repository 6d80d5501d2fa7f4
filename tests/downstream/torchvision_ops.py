"""Import torchvision where its compiled half does not fit the torch that is installed.

Its Python declares shapes for two of its operators while it is imported, and fails where they are not there. Here they
get their names and signatures, and nothing that runs.
"""

import torch

try:
    import torchvision
except RuntimeError:
    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision  # noqa: F401
