"""Plots as SVG without a library: lines, steps and grouped bars with axes and a legend."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from xml.sax.saxutils import escape

from gyrostat.sim.experiments.finding import Plot, Series

WIDTH, HEIGHT = 720, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 56, 48
_COLORS = ("#3465a4", "#cc5500", "#4e9a06", "#75507b", "#8f5902", "#555753")
_INK, _GRID = "#333", "#ddd"


def draw(plot: Plot) -> str:
    """A complete SVG document."""
    body = _bars(plot) if plot.bars else _lines(plot)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
            'font-family="sans-serif" font-size="12">',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
            _text(_LEFT, 20, plot.title, size=14, weight="bold"),
            *_legend(plot.series),
            *body,
            _text((_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - 8, plot.x, anchor="middle"),
            f'<g transform="translate(14 {(HEIGHT - _BOTTOM + _TOP) / 2}) rotate(-90)">'
            f"{_text(0, 0, plot.y, anchor='middle')}</g>",
            "</svg>\n",
        ]
    )


def _lines(plot: Plot) -> list[str]:
    xs = [x for series in plot.series for x, _ in series.points if not plot.log_x or x > 0]
    ys = [y for series in plot.series for _, y in series.points]
    across, x_ticks = _scale(min(xs), max(xs), _LEFT, WIDTH - _RIGHT, log=plot.log_x)
    up, y_ticks = _scale(0.0, max(ys) or 1.0, HEIGHT - _BOTTOM, _TOP)
    drawn = _y_axis(up, y_ticks)
    for tick in x_ticks:
        drawn.append(_text(across(tick), HEIGHT - _BOTTOM + 16, _label(tick), anchor="middle"))
    for number, series in enumerate(plot.series):
        drawn.append(_path(series, across, up, _COLORS[number % len(_COLORS)], plot.log_x))
    return drawn


def _bars(plot: Plot) -> list[str]:
    up, y_ticks = _scale(
        0.0, max(y for series in plot.series for _, y in series.points) or 1.0, HEIGHT - _BOTTOM, _TOP
    )
    drawn = _y_axis(up, y_ticks)
    group = (WIDTH - _LEFT - _RIGHT) / len(plot.bars)
    width = 0.8 * group / len(plot.series)
    for place, label in enumerate(plot.bars):
        start = _LEFT + group * place + 0.1 * group
        drawn.append(_text(start + 0.4 * group, HEIGHT - _BOTTOM + 16, label, anchor="middle"))
        for number, series in enumerate(plot.series):
            top = up(series.points[place][1])
            drawn.append(
                f'<rect x="{start + number * width:.1f}" y="{top:.1f}" width="{width:.1f}" '
                f'height="{HEIGHT - _BOTTOM - top:.1f}" fill="{_COLORS[number % len(_COLORS)]}"/>'
            )
    return drawn


def _path(
    series: Series, across: Callable[[float], float], up: Callable[[float], float], color: str, log_x: bool
) -> str:
    commands: list[str] = []
    previous: float | None = None
    for x, y in series.points:
        if log_x and x <= 0:
            continue
        if previous is not None and series.steps:
            commands.append(f"L{across(x):.1f} {previous:.1f}")
        previous = up(y)
        commands.append(f"{'L' if commands else 'M'}{across(x):.1f} {previous:.1f}")
    return f'<path d="{"".join(commands)}" fill="none" stroke="{color}" stroke-width="1.8"/>'


def _scale(
    low: float, high: float, start: float, end: float, *, log: bool = False
) -> tuple[Callable[[float], float], list[float]]:
    """Maps values to coordinates; and the values of tick labels."""
    if log:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(max(high, low * 10)))
        return (lambda v: start + (math.log10(v) - first) / (last - first) * (end - start)), [
            10.0**power for power in range(first, last + 1)
        ]
    span = high - low or 1.0
    step = 10 ** math.floor(math.log10(span / 5))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= 6)
    bottom, top = math.floor(low / step) * step, math.ceil(high / step - 1e-9) * step
    ticks = [bottom + step * number for number in range(round((top - bottom) / step) + 1)]
    return (lambda v: start + (v - bottom) / (top - bottom) * (end - start)), ticks


def _y_axis(up: Callable[[float], float], ticks: Sequence[float]) -> list[str]:
    drawn = []
    for tick in ticks:
        drawn.append(
            f'<line x1="{_LEFT}" y1="{up(tick):.1f}" x2="{WIDTH - _RIGHT}" y2="{up(tick):.1f}" stroke="{_GRID}"/>'
        )
        drawn.append(_text(_LEFT - 6, up(tick) + 4, _label(tick), anchor="end"))
    return drawn


def _legend(series: Sequence[Series]) -> list[str]:
    drawn, x = [], float(_LEFT)
    for number, each in enumerate(series):
        drawn.append(
            f'<rect x="{x:.0f}" y="30" width="12" height="12" fill="{_COLORS[number % len(_COLORS)]}"/>'
        )
        drawn.append(_text(x + 17, 40, each.name))
        x += 35 + 6.6 * len(each.name)
    return drawn


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, weight: str = "normal"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}" '
        f'fill="{_INK}">{escape(text)}</text>'
    )


def _label(value: float) -> str:
    """`1.5k`, `20`, `0.25`."""
    for unit, suffix in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:g}{suffix}"
    return f"{value:.6g}"
