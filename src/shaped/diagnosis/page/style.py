"""The style of the page: light and dark, from a phone to a desktop."""

STYLE = """
:root { color-scheme: light dark; --text: #1b1f24; --soft: #57606a; --back: #fff; --card: #f6f8fa; --line: #d0d7de; --curve: #0550ae;
  --band: #0550ae; --bad: #b3261e; --good: #116329; --warn: #7a4d00;
  --c0: #0550ae; --c1: #b35900; --c2: #116329; --c3: #a40e6c; --c4: #6b5b00; --c5: #6639ba; --c6: #086b74; --c7: #82071e }
@media (prefers-color-scheme: dark) { :root { --text: #e6edf3; --soft: #9da7b3; --back: #0d1117; --card: #161b22; --line: #3b434d;
  --curve: #79c0ff; --band: #79c0ff; --bad: #ff9a92; --good: #7ee787; --warn: #f2cc60;
  --c0: #79c0ff; --c1: #ffa657; --c2: #7ee787; --c3: #ff9bce; --c4: #f2cc60; --c5: #d2a8ff; --c6: #76e3ea; --c7: #ffa198 } }
* { box-sizing: border-box }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 0 auto; padding: 1rem; color: var(--text); background: var(--back);
  overflow-wrap: anywhere }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .5rem 0 } h2 { font-size: 1.2rem; margin: 2rem 0 .5rem }
h3 { font-size: 1rem; margin: 1rem 0 .4rem } .card h3 { margin: 0 }
p { margin: .4rem 0; max-width: 70ch }
code { font: 13px/1.5 ui-monospace, monospace; background: var(--back); border: 1px solid var(--line);
  border-radius: 4px; padding: 0 .25rem }
.soft { color: var(--soft); font-size: .875rem } .bad { color: var(--bad) } .good { color: var(--good) } .warn { color: var(--warn) }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .75rem 1rem; margin: .75rem 0 }
.card.verdict { border-left: 4px solid var(--bad) } .card.notice { border-left: 4px solid var(--warn) }
.facts { display: flex; flex-wrap: wrap; gap: .1rem 1.25rem; margin: .4rem 0; padding: 0; list-style: none; font-size: .875rem }
.facts b, td b { font-weight: 600 }
.remedies { margin: .25rem 0 0; padding-left: 1.1rem; font-size: .9rem } .remedies li { margin: .3rem 0 }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 21rem), 1fr)); gap: 1rem }
figure { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .6rem .6rem .4rem; min-width: 0 }
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
.wide { overflow-x: auto; max-width: 100%; border: 1px solid var(--line); border-radius: 8px } .tall { max-height: 30rem; overflow-y: auto }
table { border-collapse: collapse; font-size: .8125rem; width: 100% } th, td { text-align: left; padding: .3rem .6rem; white-space: nowrap;
  border-bottom: 1px solid var(--line); font-variant-numeric: tabular-nums } th { background: var(--card); position: sticky; top: 0 }
td.number { text-align: right } th.number { text-align: right } :focus-visible { outline: 2px solid var(--curve); outline-offset: 1px }
"""
