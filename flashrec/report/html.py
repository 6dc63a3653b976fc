"""A report to look at: one self-contained HTML page, a Gantt chart (inline SVG) for each recovery."""

from __future__ import annotations

from html import escape

from flashrec.report.text import LABELS, MEANINGS, details, headline, mirrors, seconds, total_s
from flashrec.report.timeline import Recovery, Timeline

COLOURS = {
    "detect": "#c0504d",
    "fence": "#e08e3c",
    "hand_over": "#9a7bb5",
    "launch": "#d4b13f",
    "form": "#6a9f58",
    "restore": "#4f81bd",
    "first_step": "#7a68a6",
}
LEFT, WIDTH, ROW, AXIS = 120, 760, 26, 40
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin: 2.5rem 0 .5rem; }
table { border-collapse: collapse; } td, th { padding: .15rem .8rem .15rem 0; text-align: left; vertical-align: top; }
td.number { text-align: right; font-variant-numeric: tabular-nums; } svg { max-width: 100%; height: auto; }
svg text { font: 12px system-ui, sans-serif; fill: #222; } .faint { color: #666; } .bad { color: #b00020; }
"""


def render_html(timeline: Timeline, title: str) -> str:
    """The page as text; it loads nothing from anywhere."""
    head = f"<meta charset='utf-8'><title>{escape(title)}</title><style>{STYLE}</style>"
    parts = [f"<h1>{escape(title)}</h1>", _job(timeline)]
    parts += [_recovery(recovery) for recovery in timeline.recoveries]
    if not timeline.recoveries:
        parts.append("<p>No recovery: nothing failed.</p>")
    body = "\n".join(parts)
    return f"<!doctype html>\n<html lang='en'><head>{head}</head>\n<body>\n{body}\n</body></html>\n"


def _job(timeline: Timeline) -> str:
    rows = [
        ("job", str(timeline.job_id) if timeline.job_id is not None else "unknown"),
        ("started", timeline.started or "unknown"),
        ("time to start", seconds(timeline.start_s)),
        ("phase", timeline.phase or "unknown"),
        ("end", timeline.outcome),
        ("recoveries", str(len(timeline.recoveries))),
        *([("mirrors", text)] if (text := mirrors(timeline.mirrors)) else []),
    ]
    bad = ""
    if timeline.unreadable_lines:
        numbers = ", ".join(map(str, timeline.unreadable_lines))
        bad = f"<p class='bad'>Lines of the journal that cannot be read: {numbers}</p>"
    return _table(rows) + bad


def _table(rows: list[tuple[str, str]]) -> str:
    cells = (f"<tr><th>{escape(label)}</th><td>{escape(text)}</td></tr>" for label, text in rows)
    return f"<table>{''.join(cells)}</table>"


def _recovery(recovery: Recovery) -> str:
    rows = "".join(
        f"<tr><td style='color:{COLOURS[name]}'>■</td><th>{LABELS[name]}</th>"
        f"<td class='number'>{seconds(value)}</td><td class='faint'>{MEANINGS[name]}</td></tr>"
        for name, value in recovery.durations.items()
    )
    parts = [f"<h2>{escape(headline(recovery))}</h2>", _gantt(recovery), f"<table>{rows}</table>"]
    return "\n".join([*parts, _table(details(recovery))])


def _gantt(recovery: Recovery) -> str:
    """One row for each kind of phase, one line down for each mark, time in seconds from the fault or detection."""
    total = total_s(recovery) or 1.0
    names = [name for name in LABELS if name in recovery.durations]
    marks = sorted(recovery.marks, key=lambda mark: mark.mono)
    bottom = ROW * len(names)
    height = bottom + AXIS + 15 * len(marks)

    def x(after_s: float) -> float:
        return LEFT + max(0.0, after_s) / total * WIDTH

    parts = [
        f"<text x='0' y='{ROW * row + 17}'>{LABELS[name]}</text>"
        f"<line x1='{LEFT}' x2='{LEFT + WIDTH}' y1='{ROW * (row + 1)}' y2='{ROW * (row + 1)}' stroke='#eee'/>"
        for row, name in enumerate(names)
    ]
    for span in recovery.spans:
        begin, width = x(span.begin_s), max(1.5, x(span.end_s) - x(span.begin_s))
        title = f"<title>{LABELS[span.name]}: {seconds(span.end_s - span.begin_s)}</title>"
        parts.append(
            f"<rect x='{begin:.1f}' y='{ROW * names.index(span.name) + 4}' width='{width:.1f}' height='{ROW - 8}' "
            f"fill='{COLOURS[span.name]}'>{title}</rect>"
        )
    for tick in range(5):
        at = total * tick / 4
        parts.append(f"<text x='{x(at):.1f}' y='{bottom + 15}' text-anchor='middle'>{at:.2f} s</text>")
    for row, mark in enumerate(marks):
        at, y = x(mark.after_s), bottom + AXIS + 15 * row
        end, side = ("end", -5) if at > LEFT + WIDTH / 2 else ("start", 5)
        parts.append(f"<line x1='{at:.1f}' x2='{at:.1f}' y1='0' y2='{y}' stroke='#999' stroke-dasharray='2 3'/>")
        label = f"{escape(mark.name)} {mark.after_s:+.3f} s"
        parts.append(f"<text x='{at + side:.1f}' y='{y}' text-anchor='{end}'>{label}</text>")
    view = f"viewBox='0 0 {LEFT + WIDTH + 40} {height + 5}' width='{LEFT + WIDTH + 40}'"
    return f"<svg {view} role='img' aria-label='{escape(headline(recovery), quote=True)}'>{''.join(parts)}</svg>"
