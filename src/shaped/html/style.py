"""The style that all pages have: colours in light and dark, text, cards and tables, from a phone to a desktop."""

BASE = """
:root { color-scheme: light dark; --text: #1b1f24; --soft: #57606a; --back: #fff; --card: #f6f8fa; --line: #d0d7de; --curve: #0550ae;
  --band: #0550ae; --bad: #b3261e; --good: #116329; --warn: #7a4d00 }
@media (prefers-color-scheme: dark) { :root { --text: #e6edf3; --soft: #9da7b3; --back: #0d1117; --card: #161b22; --line: #3b434d;
  --curve: #79c0ff; --band: #79c0ff; --bad: #ff9a92; --good: #7ee787; --warn: #f2cc60 } }
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
figure { margin: 0; background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .6rem .6rem .4rem; min-width: 0 }
.wide { overflow-x: auto; max-width: 100%; border: 1px solid var(--line); border-radius: 8px } .tall { max-height: 30rem; overflow-y: auto }
table { border-collapse: collapse; font-size: .8125rem; width: 100% } th, td { text-align: left; padding: .3rem .6rem; white-space: nowrap;
  border-bottom: 1px solid var(--line); font-variant-numeric: tabular-nums } th { background: var(--card); position: sticky; top: 0 }
td.number { text-align: right } th.number { text-align: right } :focus-visible { outline: 2px solid var(--curve); outline-offset: 1px }
"""
