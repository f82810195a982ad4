"""Pictures of attention weights. `import qkv` does not import this module, and this module imports
matplotlib when it is asked to draw: `pip install 'qkv[viz]'` brings it."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qkv._refuse import refuse

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes


def plot_attention(
    weights: "Tensor | np.ndarray",
    tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
    ax: "Axes | np.ndarray | Sequence[Axes] | None" = None,
    *,
    titles: Sequence[str] | None = None,
    vmax: float = 1.0,
    cmap: str = "magma_r",
    colorbar: bool = True,
) -> "Axes | np.ndarray":
    """Draws attention weights as images: a row for each query, a column for each key.

    Args:
        weights: of one head, `[L, S]`, or of several, `[H, L, S]`; any dtype and device, as
            `qkv.attention_weights` returns them for one batch item.
        tokens: a label for each query, L of them; also the keys' if key_tokens is None.
        key_tokens: a label for each key, S of them.
        ax: where to draw: one Axes for one head, H of them for several. None makes a new figure
            with pyplot, in which the heads fill a grid.
        titles: one for each head, H of them. None: "head 0", "head 1" and so on, and none for the
            head of `[L, S]`.
        vmax: the weight that has the last colour; 0 has the first. The same for all heads, so that
            they can be compared.
        cmap: the name of a colour map of matplotlib's.
        colorbar: whether one is drawn beside the heads.

    Returns:
        The Axes for `[L, S]`; for `[H, L, S]` an array of H of them.

    Raises:
        ImportError: matplotlib is not installed.
        RuntimeError: weights of another shape.
        ValueError: numbers of labels, titles or Axes that do not fit, by the argument's name.

    Example:
        >>> query, key = torch.randn(2, 1, 8, 3, 64)
        >>> weights = qkv.attention_weights(query, key, is_causal=True)
        >>> axes = qkv.viz.plot_attention(weights[0], ["the", "cat", "sat"])
        >>> axes.shape, axes[7].get_title()
        ((8,), 'head 7')

    Source: weights as a picture of what a model looks at, Bahdanau et al., "Neural machine
    translation by jointly learning to align and translate", 2014.
    """
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError(
            "qkv.viz.plot_attention needs matplotlib: pip install 'qkv[viz]'"
        ) from error
    weights = torch.as_tensor(weights).detach()
    if weights.dim() not in (2, 3):
        wanted = "[L, S] or [H, L, S], of one batch item, is expected"
        refuse("weights", weights, wanted, RuntimeError, "plot_attention")
    heads = weights if weights.dim() == 3 else weights[None]
    if heads.numel() == 0:
        raise RuntimeError(f"plot_attention: weights is {list(weights.shape)}, and nothing to draw")
    columns = ("tokens", tokens) if key_tokens is None else ("key_tokens", key_tokens)
    if titles is None:
        titles = [f"head {h}" for h in range(len(heads))] if weights.dim() == 3 else [""]
    _check_count("titles", titles, len(heads), "head")
    _check_count("tokens", tokens, heads.size(1), "query")
    _check_count(*columns, heads.size(2), "key")
    every = _axes(pyplot, ax, len(heads), weights.dim() == 2)
    pictures = heads.to("cpu", torch.float64).numpy()
    for one, picture, title in zip(every, pictures, titles, strict=True):
        one.matshow(picture, cmap=cmap, vmin=0, vmax=vmax)
        one.set_title(title)
        _name_rows_and_columns(one, tokens, columns[1])
    if colorbar:
        extend = "max" if pictures.max() > vmax else "neither"
        every[0].figure.colorbar(
            every[0].images[-1], ax=list(every), extend=extend, shrink=0.7, label="attention weight"
        )
    return every if weights.dim() == 3 else every[0]


def _check_count(name: str, given: Sequence[Any] | None, expected: int, what: str) -> None:
    if given is not None and len(given) != expected:
        raise ValueError(
            f"plot_attention: {name} has {len(given)} entries, but {expected}, one for each "
            f"{what}, are expected"
        )


def _axes(pyplot: Any, ax: Any, heads: int, is_single: bool) -> "np.ndarray":
    """`[heads]`, of a new figure if ax is None."""
    import numpy as np

    if ax is not None:
        every = np.array(ax, dtype=object).reshape(-1)
        if is_single and np.ndim(ax) > 0:
            raise ValueError(
                f"plot_attention: ax has {len(every)} entries, but one Axes by itself is expected "
                "for weights of [L, S]"
            )
        _check_count("ax", list(every), heads, "head")
        return every
    columns = math.ceil(math.sqrt(heads))
    rows = math.ceil(heads / columns)
    size = (1.5 + 3.5 * columns, 3.5 * rows) if heads > 1 else (6.5, 5.5)  # inches
    _, grid = pyplot.subplots(rows, columns, squeeze=False, figsize=size, layout="constrained")
    for unused in grid.flat[heads:]:
        unused.remove()
    return grid.reshape(-1)[:heads]


def _name_rows_and_columns(
    ax: "Axes", rows: Sequence[str] | None, columns: Sequence[str] | None
) -> None:
    ax.set_ylabel("query")
    ax.set_xlabel("key")
    ax.xaxis.set_label_position("top")
    ax.tick_params(length=0)
    for axis, labels in ((ax.yaxis, rows), (ax.xaxis, columns)):
        if labels is None:  # numbers
            continue
        names = [str(label) for label in labels]
        is_long = axis is ax.xaxis and max(map(len, names)) > 2  # would overlap side by side
        # A token such as "$x$" is no formula.
        axis.set_ticks(range(len(names)), names, parse_math=False, rotation=90 if is_long else 0)
