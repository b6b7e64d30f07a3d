"""Pictures as SVG, by hand: the same records give the same bytes, whatever is installed.

A picture brings its own paper and ink for light and dark (prefers-color-scheme), so that it can be
read in either on any page.
"""

import math
from xml.sax.saxutils import escape

LIGHT = {"paper": "#ffffff", "ink": "#1f2328", "grey": "#6b7280", "grid": "#e3e6ea"}
LIGHT |= {"blue": "#1f6fb4", "orange": "#c2560a", "green": "#2f7d32", "pale": "#e8f1f9"}
DARK = {"paper": "#1b1e24", "ink": "#e6e8eb", "grey": "#9aa3af", "grid": "#353a43"}
DARK |= {"blue": "#6cb2f2", "orange": "#f0954a", "green": "#7ec384", "pale": "#223447"}
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
WIDTH = 0.56  # of a character, of the font's size; above the mean of the fonts above


def _rules(colours):
    return "".join(f".f-{n}{{fill:{c}}}.s-{n}{{stroke:{c}}}" for n, c in colours.items())


def _number(value):
    return f"{value:.1f}".removesuffix(".0")


class Picture:
    """Shapes in pixels, y downwards. Colours are names of LIGHT."""

    def __init__(self, width, height, title):
        self.width, self.height = width, height
        style = f"text{{font-family:{FONT}}}{_rules(LIGHT)}"
        style += f"@media (prefers-color-scheme:dark){{{_rules(DARK)}}}"
        self.lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img" aria-label="{escape(title)}">',
            f"<title>{escape(title)}</title>",
            f"<style>{style}</style>",
        ]
        self.rectangle(0, 0, width, height, "paper", radius=8)

    def _add(self, tag, text=None, **attributes):
        named = ((key.replace("_", "-"), value) for key, value in attributes.items())
        shown = (f'{k}="{_number(v) if isinstance(v, float) else v}"' for k, v in named)
        inside = "/>" if text is None else f">{escape(text)}</{tag}>"
        self.lines.append(f"<{tag} {' '.join(shown)}{inside}")

    def rectangle(self, x, y, width, height, fill, edge=None, radius=0, dash=None):
        kind = {"class": f"f-{fill}" + (f" s-{edge}" if edge else "")}
        dashed = {"stroke_dasharray": dash} if dash else {}
        sizes = {"x": float(x), "y": float(y), "width": float(width), "height": float(height)}
        self._add("rect", **sizes, rx=radius, **kind, **dashed)

    def line(self, points, colour, width=1.0, dash=None, opacity=None, arrow=False):
        extra = {"stroke_dasharray": dash} if dash else {}
        extra |= {"opacity": opacity} if opacity else {}
        text = " ".join(f"{_number(x)},{_number(y)}" for x, y in points)
        style = {"class": f"s-{colour}", "fill": "none", "stroke_width": width}
        self._add("polyline", points=text, **style, **extra)
        if arrow:
            (x0, y0), (x1, y1) = points[-2:]
            turn = math.atan2(y1 - y0, x1 - x0)
            tips = [(x1 - 8 * math.cos(turn + a), y1 - 8 * math.sin(turn + a)) for a in (-0.4, 0.4)]
            self.area([tips[0], (x1, y1), tips[1]], colour)

    def area(self, points, colour, opacity=1):
        text = " ".join(f"{_number(x)},{_number(y)}" for x, y in points)
        self._add("polygon", points=text, **{"class": f"f-{colour}"}, opacity=opacity)

    def dot(self, x, y, colour, radius=4.0, opacity=1):
        kind = {"class": f"f-{colour}"}
        self._add("circle", cx=float(x), cy=float(y), r=radius, **kind, opacity=opacity)

    def square(self, x, y, colour, half=4.5):
        self.rectangle(x - half, y - half, 2 * half, 2 * half, colour)

    def text(self, x, y, text, colour="ink", size=13, anchor="start", weight=None, turned=False):
        extra = {"font_weight": weight} if weight else {}
        if turned:
            extra["transform"] = f"rotate(-90 {_number(float(x))} {_number(float(y))})"
        kind = {"class": f"f-{colour}"}
        place = {"x": float(x), "y": float(y), "font_size": size, "text_anchor": anchor}
        self._add("text", text, **place, **kind, **extra)

    def save(self, path):
        path.write_text("\n".join([*self.lines, "</svg>\n"]), encoding="utf-8")


def ticks(low, high, logarithmic):
    """Numbers from low to high: 1, 1.5, 2, 3, 5, 7 of each decade, 1 alone where these would be
    many, or at most seven even steps."""
    if logarithmic:
        decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        factors = (1, 1.5, 2, 3, 5, 7) if high < 300 * low else (1,)
        made = [round(m * 10.0**d, 9) for d in decades for m in factors]
    else:
        rough = (high - low) / 5
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.99)
        made = [round(i * step, 9) for i in range(math.ceil(low / step), int(high / step) + 1)]
    return [value for value in made if low <= value <= high]


class Axes:
    """A frame at (left, top) of a picture, and where numbers lie in it."""

    def __init__(self, picture, box, xs, ys, logarithmic=(False, False), margin=0.06):
        self.picture, (self.left, self.top, self.width, self.height) = picture, box
        self.logarithmic = logarithmic
        self.scales = [math.log10 if one else float for one in logarithmic]
        self.limits = []
        for values, scale in zip((xs, ys), self.scales, strict=True):
            low, high = scale(min(values)), scale(max(values))
            room = (high - low or 1.0) * margin
            self.limits.append((low - room, high + room))

    def at(self, x, y):
        parts = []
        for value, scale, (low, high) in zip((x, y), self.scales, self.limits, strict=True):
            parts.append((scale(value) - low) / (high - low))
        return self.left + parts[0] * self.width, self.top + (1 - parts[1]) * self.height

    def frame(self, xlabel, ylabel, unit="", xticks=True):
        picture, size = self.picture, 12.5
        bottom, right = self.top + self.height, self.left + self.width
        for axis, (low, high) in enumerate(self.limits):
            ends = [10.0**v if self.logarithmic[axis] else v for v in (low, high)]
            for value in ticks(*ends, self.logarithmic[axis]) if axis or xticks else ():
                if axis:
                    _, y = self.at(self._inside(0), value)
                    picture.line([(self.left, y), (right, y)], "grid")
                    picture.text(self.left - 7, y + 4, f"{value:g}{unit}", "grey", size, "end")
                else:
                    x, _ = self.at(value, self._inside(1))
                    picture.line([(x, self.top), (x, bottom)], "grid")
                    picture.text(x, bottom + 16, f"{value:g}", "grey", size, "middle")
        picture.line([(self.left, self.top), (self.left, bottom), (right, bottom)], "grey")
        picture.text((self.left + right) / 2, bottom + 38, xlabel, "ink", 13.5, "middle")
        middle = (self.top + bottom) / 2
        picture.text(self.left - 48, middle, ylabel, "ink", 13.5, "middle", turned=True)

    def _inside(self, axis):
        low, high = self.limits[axis]
        return 10.0**low if self.logarithmic[axis] else low


class Labels:
    """Texts each of which is put where it overlaps nothing that was put before it."""

    def __init__(self, axes, points):
        self.axes, self.taken = axes, [(x - 6, y - 6, x + 6, y + 6) for x, y in points]

    def put(self, x, y, text, colour, size=12.5):
        offsets = [(9, 4), (7, -8), (7, 16), (-9, 4), (-7, -8), (-7, 16), (9, -22), (9, 30)]
        offsets += [(-9, -22), (-9, 30), (9, -36), (-9, -36), (9, 44), (-9, 44)]
        width, axes = len(text) * size * WIDTH, self.axes
        for dx, dy in offsets:
            left = x + dx if dx > 0 else x + dx - width
            box = (left, y + dy - size, left + width, y + dy + 3)
            inside = axes.left <= box[0] and box[2] <= axes.left + axes.width + 8
            free = all(
                box[2] < o[0] or o[2] < box[0] or box[3] < o[1] or o[3] < box[1] for o in self.taken
            )
            if inside and free and axes.top <= box[1] and box[3] <= axes.top + axes.height:
                break
        self.taken.append(box)
        axes.picture.text(box[0], y + dy, text, colour, size)
