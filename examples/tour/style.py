"""How every picture of the tour looks.

A picture is as wide as a telephone shows it, so that its text is never made smaller; a wide screen
puts pictures side by side.
"""

from matplotlib.figure import Figure

PIXELS_PER_INCH = 100  # of the page, CSS pixels; a PNG has twice as many, for fine screens
WIDTH = 3.7  # inches, 370 pixels: a telephone has 400, and the page a margin
BLUE, ORANGE, GREY, RED = "#1f6feb", "#e8590c", "#6b7280", "#c92a2a"
STYLE = {
    "font.size": 9,  # points; 12.5 pixels
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "savefig.dpi": 2 * PIXELS_PER_INCH,
    "figure.constrained_layout.use": True,
}


def picture(height: float, width: float = WIDTH, **subplots):
    """A figure of so many inches, and its axes."""
    figure = Figure(figsize=(width, height))
    return figure, figure.subplots(**subplots)
