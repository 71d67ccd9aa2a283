"""Steps of the serving layer, made of the cases that every stage is tested on."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
