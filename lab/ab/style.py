"""How the page looks."""

from __future__ import annotations

CSS = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; --quiet: #777; --a: #8a8a8a; --b: #0072b2; --c: #d55e00;
  --good: #1a7f4b; --bad: #c0392b; --open: #b7791f; --mark: #ffd54f88; }
@media (prefers-color-scheme: dark) { :root { --b: #56b4e9; --c: #f0843c; --good: #4cc38a; --bad: #ff7b6b; --open: #e0b04c; } }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0; }
main { max-width: 1240px; margin: 0 auto; padding: 24px; }
h1 { font-size: 26px; margin: 0 0 4px; } h2 { font-size: 17px; margin: 28px 0 6px; } p, ul { margin: 4px 0; }
section + section { margin-top: 56px; }
header { border-left: 6px solid var(--open); padding: 10px 16px; background: var(--soft); }
header.equivalent { border-color: var(--good); } header.different { border-color: var(--bad); }
header h1::first-letter { text-transform: uppercase; }
.equivalent h1, b.equivalent { color: var(--good); } .different h1, b.different { color: var(--bad); }
.not h1, b.not { color: var(--open); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); gap: 20px 28px; margin-top: 20px; }
figure { margin: 0; } svg { width: 100%; height: auto; display: block; }
svg text { font-size: 11px; fill: currentColor; opacity: .8; } svg .title { font-size: 12px; }
.key { font-size: 13px; display: flex; flex-wrap: wrap; gap: 2px 14px; margin: 0 0 2px; }
.key i { display: inline-block; width: 14px; height: 3px; margin-right: 5px; vertical-align: middle; }
i.b { background: var(--b); } i.c { background: var(--c); } i.noise { background: var(--a); }
.grid { stroke: var(--line); stroke-width: 1; } .one { stroke: var(--quiet); stroke-dasharray: 3 3; }
polyline { fill: none; stroke-width: 2; } line.b { stroke-width: 3; }
.b { stroke: var(--b); } circle.b, rect.b { fill: var(--b); } .c { stroke: var(--c); } circle.c, rect.c { fill: var(--c); }
.noise { stroke: var(--a); } polyline.noise { stroke-dasharray: 5 4; } circle.noise, rect.noise { fill: var(--a); }
rect { stroke: none !important; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 14px; }
th, td { text-align: right; padding: 3px 12px 3px 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } small { color: var(--quiet); margin-left: 4px; }
article { margin: 16px 0; } .two { display: grid; grid-template-columns: 1fr 1fr; gap: 12px; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: 4px 0; padding: 8px 10px; background: var(--soft); font-size: 13px; }
.prompt, .same { color: var(--quiet); } mark { background: var(--mark); color: inherit; }
footer { margin-top: 40px; font-size: 13px; } a { color: var(--b); }
"""
