"""Names that are imported from torchvision with an M3 model's image processor, and never called.

The real one has to be built for the torch beside it, and not every index has it for a CPU.
"""

import enum
import sys
import types

# Older than every version that transformers asks about.
__version__ = "0"


class InterpolationMode(enum.Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


NAMES = {"InterpolationMode": InterpolationMode} | dict.fromkeys(
    ("ImageReadMode", "decode_image", "pil_to_tensor")
)
for path in (
    "io",
    "transforms",
    "transforms.functional",
    "transforms.v2",
    "transforms.v2.functional",
):
    module = types.ModuleType(f"{__name__}.{path}")
    vars(module).update(NAMES)
    parent, _, name = module.__name__.rpartition(".")
    setattr(sys.modules[parent], name, module)
    sys.modules[module.__name__] = module
