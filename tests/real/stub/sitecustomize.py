# Copyright (c) 2026, gpuhost.inference contributors
# GNU General Public License v3.0+ (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

"""Let torchvision's CUDA build be imported beside a CPU torch: name the operators it expects."""

import importlib.abc
import sys

OPERATORS = ("torchvision::nms", "torchvision::qnms")
SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path, target=None):  # type: ignore[no-untyped-def]
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import torch.library  # noqa: PLC0415 - only where it is there anyway

            for name in OPERATORS:
                torch.library.define(name, SIGNATURE)


sys.meta_path.insert(0, _BeforeTorchvision())
