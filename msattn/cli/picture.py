"""The picture of a selection: which blocks of keys each token reads, one panel for each KV head."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..config import BLOCK_SIZE
from .errors import CliError

if TYPE_CHECKING:
    import numpy as np

SUFFIXES = (".png", ".svg", ".pdf")
SINK, LOCAL, LONG_RANGE = "sink", "local", "long-range"
COLOURS = {SINK: "#8e3b8f", LOCAL: "#e07b00", LONG_RANGE: "#0b6e99"}  # apart in grey, too
UNSELECTED, UNSEEN = "#eef1f4", "#ffffff"
LEGEND = {
    SINK: "sink: block 0, the start of the text; a stripe along the left edge",
    LOCAL: "local: the token's own block and the one before it; the diagonal",
    LONG_RANGE: "long-range: every other block; a vertical stripe is a block that many tokens "
    "read, a second diagonal a fixed distance back",
}
UNSELECTED_LEGEND = (
    "not selected (paler colours: by some tokens of a row); white: later than the token"
)
MAX_PIXELS = 384  # of a side; a row that stands for several tokens shows the share that chose


@dataclass(frozen=True)
class Selection:
    """What one sparse layer selected for a text."""

    block_ids: torch.Tensor  # [T, Hkv, topk] int32, token t at position t; -1 = unused
    layer: int
    model: str  # what a person calls it


def check_can_draw(path: Path) -> None:
    """Fail before the model runs, not after it."""
    if path.suffix.lower() not in SUFFIXES:
        expected = " or ".join(SUFFIXES)
        raise CliError(f"--plot: expected a file name that ends in {expected}, got {path}")
    if path.is_dir():
        raise CliError(f"--plot: cannot write {path}, which is a folder")
    if not os.access(path.absolute().parent, os.W_OK):
        raise CliError(f"--plot: cannot write {path}: its folder is missing or read-only")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise CliError(f"--plot needs matplotlib: pip install 'msattn[cli]' ({error})") from None


def draw(selection: Selection, path: Path) -> None:
    """Write the picture; its format is the file's suffix."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    tokens, heads, topk = selection.block_ids.shape
    columns = min(heads, 2)
    rows = -(-heads // columns)
    layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08)
    figure = Figure(figsize=(4.7 * columns + 0.6, 4.2 * rows + 1.8), layout=layout)
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    for head, panel in enumerate(panels.flat):
        if head < heads:
            _draw_head(panel, selection.block_ids[:, head], head)
        panel.set_visible(head < heads)
    for panel in panels[-1]:
        panel.set_xlabel(f"block of {BLOCK_SIZE} keys")
    for panel in panels[:, 0]:
        panel.set_ylabel("query token")
    figure.suptitle(
        f"The blocks that each token reads: at most {topk} per KV head\n"
        f"{selection.model}, {tokens:,} tokens, layer {selection.layer}",
        fontsize=12,
    )
    _add_legend(figure)
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise CliError(f"--plot: cannot write {path}: {error.strerror or error}") from error


def _draw_head(panel: Any, block_ids: torch.Tensor, head: int) -> None:
    tokens, blocks = block_ids.shape[0], -(-block_ids.shape[0] // BLOCK_SIZE)
    row, column = _pixel(tokens), _pixel(blocks)
    image = _image(block_ids, row, column)
    extent = (0, image.shape[1] * column, image.shape[0] * row, 0)
    panel.imshow(image, aspect="auto", extent=extent, interpolation="nearest")
    panel.set_xlim(0, blocks)
    panel.set_ylim(tokens, 0)
    shares = ", ".join(f"{share:.0%} {kind}" for kind, share in kind_shares(block_ids).items())
    panel.set_title(f"KV head {head}: {shares}", fontsize=10)
    panel.xaxis.get_major_locator().set_params(integer=True)
    panel.xaxis.set_major_formatter("{x:,.0f}")
    panel.yaxis.set_major_formatter("{x:,.0f}")
    panel.tick_params(labelsize=9)


def kind_shares(block_ids: torch.Tensor) -> dict[str, float]:
    """Of the blocks that one head selected, ``[T, topk]``, the share of each kind."""
    counts = torch.bincount(_kinds(block_ids)[block_ids >= 0], minlength=len(COLOURS))
    return {kind: float(n / counts.sum()) for kind, n in zip(COLOURS, counts, strict=True)}


def _pixel(length: int) -> int:
    """Tokens or blocks of a pixel: a power of two, so that the blocks' edges are sharp."""
    size = 1
    while size * MAX_PIXELS < length:
        size *= 2
    return size


def _image(block_ids: torch.Tensor, row: int, column: int) -> np.ndarray[Any, Any]:
    """``[rows, columns, 3]`` colours of one head's ids ``[T, topk]``, of ``row`` tokens each."""
    from matplotlib.colors import to_rgb

    tokens = block_ids.shape[0]
    first = torch.arange(0, tokens, row)  # token of each row
    in_row = (tokens - first).clamp(max=row)
    weights = _counts(block_ids, row, column) / in_row[:, None]  # [kinds, rows, columns]
    weights /= weights.sum(0).clamp(min=1)  # a token may have chosen several blocks of a column
    first_block = torch.arange(weights.shape[2]) * column
    unseen = first_block > (first + in_row - 1)[:, None] // BLOCK_SIZE
    colours = torch.tensor([to_rgb(colour) for colour in COLOURS.values()])
    ground = torch.tensor(to_rgb(UNSELECTED)).repeat(*unseen.shape, 1)
    ground[unseen] = torch.tensor(to_rgb(UNSEEN))
    chosen = torch.einsum("krb,kc->rbc", weights, colours)
    image = ground * (1 - weights.sum(0)).unsqueeze(-1) + chosen
    array: np.ndarray[Any, Any] = image.clamp(0, 1).numpy()
    return array


def _kinds(block_ids: torch.Tensor) -> torch.Tensor:
    """Indices into COLOURS, of ids ``[T, topk]``."""
    own = torch.arange(block_ids.shape[0])[:, None] // BLOCK_SIZE
    kinds = torch.full(block_ids.shape, 2)
    kinds[block_ids == 0] = 0
    kinds[(block_ids == own) | (block_ids == own - 1)] = 1
    return kinds


def _counts(block_ids: torch.Tensor, row: int, column: int) -> torch.Tensor:
    """``[kinds, rows, columns]`` fp32: how often the tokens of a row chose blocks of a column."""
    tokens = block_ids.shape[0]
    rows, columns = -(-tokens // row), -(-tokens // (BLOCK_SIZE * column))
    row_of = torch.arange(tokens)[:, None] // row
    cell = (_kinds(block_ids) * rows + row_of) * columns + block_ids // column
    counts = torch.bincount(cell[block_ids >= 0], minlength=len(COLOURS) * rows * columns)
    return counts.view(len(COLOURS), rows, columns).float()


def _add_legend(figure: Any) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(color=COLOURS[kind], label=text) for kind, text in LEGEND.items()]
    patches.append(
        Patch(
            color=UNSELECTED,
            label=UNSELECTED_LEGEND,
        )
    )
    figure.legend(handles=patches, loc="outside lower center", ncols=1, fontsize=9, frameon=False)
