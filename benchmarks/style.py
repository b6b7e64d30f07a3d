"""The house style of the pictures: matplotlib's settings, colours, and files in SVG.

A picture brings its own paper and ink for light and dark (prefers-color-scheme), so that it can be
read in either on any page. Lengths are in pixels, sizes of text in points. matplotlib is imported
when a figure is made: benchmarks whose figures come to a picture at the end run without it.
"""

import re

PAPER, INK, GREY, GRID = "#ffffff", "#1f2328", "#6b7280", "#e3e6ea"
BLUE, ORANGE, GREEN, PALE = "#1f6fb4", "#c2560a", "#2f7d32", "#e8f1f9"
DARK = {PAPER: "#1b1e24", INK: "#e6e8eb", GREY: "#9aa3af", GRID: "#353a43"}
DARK |= {BLUE: "#6cb2f2", ORANGE: "#f0954a", GREEN: "#7ec384", PALE: "#223447"}
CONTESTANTS = {"eager": GREY, "compile": ORANGE, "Liger": GREEN, "flce": BLUE, "sampled": INK}
CONTESTANTS |= {"plain": INK, "loss_parallel": GREEN, "float32": GREY}
DASHED = (0, (5, 4))
WIDTH = 0.55  # of a letter, of the font's size: more than the mean in a reader's fonts
FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif"
SETTINGS = {
    "svg.fonttype": "none",  # text, not its outlines
    "svg.hashsalt": "flce",  # the same names in each run
    "font.family": "DejaVu Sans",
    "text.color": INK,
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "ytick.alignment": "center",
    "axes.axisbelow": True,
    "grid.color": GRID,
    "legend.frameon": False,
    "legend.labelcolor": "linecolor",
    "lines.linewidth": 1.4,
}
for axis in "xtick", "ytick":
    SETTINGS |= {f"{axis}.color": GREY, f"{axis}.labelsize": 9.5, f"{axis}.major.size": 0}


def figure(width, height, label):
    """label: what the picture shows, for those who do not see it."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams.update(SETTINGS)
    return Figure((width / 96, height / 96), dpi=72, label=label)


def write(made, x, y, text, **how):
    """A text whose baseline begins there; y downwards from the top of the figure."""
    width, height = 96 * made.get_size_inches()
    made.text(x / width, 1 - y / height, text, va="baseline", **how)


def notes(made, y, *lines, x=20, size=10):
    for i, line in enumerate(lines):
        write(made, x, y + 20 * i, line, size=size, color=GREY)


def head(made, title, note=""):
    write(made, 20, 32, title, size=12, weight="bold")
    notes(made, 53, note)


def frame(made, left, top, width, height, xlabel="", ylabel=""):
    """Axes whose frame lies there."""
    w, h = 96 * made.get_size_inches()
    place = left / w, 1 - (top + height) / h, width / w, height / h
    axes = made.add_axes(place, xlabel=xlabel, ylabel=ylabel)
    axes.yaxis.label.set_rotation_mode("anchor")  # in the middle in a reader's font too
    return axes


def logarithmic(axis, unit=""):
    """The numbers of a logarithmic axis in which all is drawn; fewer of each of many decades."""
    from matplotlib import ticker

    low, high = axis.get_view_interval()
    steps = (1, 1.5, 2, 3, 5, 7) if high < 100 * low else (1, 3) if high < 1e4 * low else (1,)
    axis.set_major_locator(ticker.LogLocator(subs=steps))
    axis.set_major_formatter(f"{{x:g}}{unit}")
    axis.set_minor_locator(ticker.NullLocator())


PLACES = [(dx, dy) for dy in (0, 9, -9, 19, -19, 30, -30, 41, -41) for dx in (7, -7)]

LEADER = {"arrowstyle": "-", "color": GREY, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3}


def label(axes, texts):
    """texts: [(point, text, colour)], each where it overlaps no line, mark or text before it, if
    there is such a place."""
    from matplotlib.transforms import Bbox

    paths = [(one, one.get_transform().transform_path(one.get_path())) for one in axes.lines]
    lines = [path for one, path in paths if one.get_linestyle() != "None"]
    marks = [at for one, path in paths if one.get_marker() != "None" for at in path.vertices]
    taken = [Bbox.from_extents(x - 4, y - 4, x + 4, y + 4) for x, y in marks]
    for point, text, colour in texts:
        (x, y), width = axes.transData.transform(point), len(text) * 9.5 * WIDTH
        for dx, dy in PLACES:
            box = Bbox.from_bounds(x + dx - (width if dx < 0 else 0), y + dy - 5, width, 10)
            inside = all(map(axes.bbox.contains, *box.get_points().T))
            crossed = any(line.intersects_bbox(box, filled=False) for line in lines)
            if inside and not crossed and not box.count_overlaps(taken):
                break
        how = {"textcoords": "offset points", "ha": "left" if dx > 0 else "right", "va": "center"}
        axes.annotate(text, point, (dx, dy), color=colour, size=9.5, **how)
        if abs(dy) > 9:  # far from its point: a thin line leads there
            axes.annotate("", point, (dx, dy), textcoords="offset points", arrowprops=LEADER)
        taken.append(box.padded(2))


def save(made, path):
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    made.savefig(path, format="svg", metadata=nothing | {"Title": made.get_label()})
    rules = [
        f"[style*='{what}: {light}']{{{what}:{dark} !important}}"
        for light, dark in DARK.items()
        for what in ("fill", "stroke")
    ]
    css = f"text{{font-family:{FONT} !important}}\n"
    css += f"@media (prefers-color-scheme:dark){{{''.join(rules)}}}</style>"
    text = path.read_text(encoding="utf-8").replace("</style>", css, 1)
    path.write_text(re.sub(r' transform="rotate\(-0 [^"]*"', "", text), encoding="utf-8")
