"""The style of the page: what all pages have, and its charts."""

from shaped.html.style import BASE

STYLE = (
    BASE
    + """
:root { --c0: #0550ae; --c1: #b35900; --c2: #116329; --c3: #a40e6c; --c4: #6b5b00; --c5: #6639ba; --c6: #086b74; --c7: #82071e }
@media (prefers-color-scheme: dark) { :root { --c0: #79c0ff; --c1: #ffa657; --c2: #7ee787; --c3: #ff9bce; --c4: #f2cc60; --c5: #d2a8ff;
  --c6: #76e3ea; --c7: #ffa198 } }
.card.verdict { border-left: 4px solid var(--bad) } .card.notice { border-left: 4px solid var(--warn) }
.facts { display: flex; flex-wrap: wrap; gap: .1rem 1.25rem; margin: .4rem 0; padding: 0; list-style: none; font-size: .875rem }
.facts b, td b { font-weight: 600 }
.remedies { margin: .25rem 0 0; padding-left: 1.1rem; font-size: .9rem } .remedies li { margin: .3rem 0 }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 21rem), 1fr)); gap: 1rem }
figcaption { font-weight: 600; font-size: .9rem } figcaption span { font-weight: 400 } svg { display: block; width: 100%; height: auto }
svg text { font: 11px system-ui, sans-serif; fill: var(--soft) } .grid { stroke: var(--line); stroke-width: 1 }
.band { fill: var(--band); fill-opacity: .18 } .mean { fill: none; stroke: var(--band); stroke-opacity: .6; stroke-dasharray: 3 3 }
.limit { stroke: var(--bad); stroke-dasharray: 6 3 }
.curve { fill: none; stroke: var(--curve); stroke-width: 1.8 } .dot { fill: var(--curve) }
.dot.flag { fill: var(--bad) } .reach { fill: transparent } g:hover > .dot { stroke: var(--text); stroke-width: 2 }
.cell { fill: var(--curve); stroke: var(--card); stroke-width: .5 } .empty { fill: none; stroke: var(--line) }
.k0 { stroke: var(--c0) } .k1 { stroke: var(--c1) } .k2 { stroke: var(--c2) } .k3 { stroke: var(--c3) } .k4 { stroke: var(--c4) }
.k5 { stroke: var(--c5) } .k6 { stroke: var(--c6) } .k7 { stroke: var(--c7) } .second { stroke-dasharray: 5 2 }
.line { fill: none; stroke-width: 1.6 }
.legend { display: flex; flex-wrap: wrap; gap: 0 .9rem; margin: .2rem 0 0; padding: 0; list-style: none;
  font-size: .75rem; color: var(--soft) } .legend svg { display: inline-block; width: 20px; height: 8px; margin-right: .3rem }
"""
)
