"""The style of the report: contents that stay in view, verdicts, and tables of claims that become lists on a phone."""

from shaped.html.style import BASE

STYLE = (
    BASE
    + """
html { scroll-padding-top: 1rem } body { max-width: 88rem; display: grid; grid-template-columns: 15rem minmax(0, 1fr); gap: 0 2rem }
a { color: var(--curve) } main { min-width: 0 } section { margin-top: 2.5rem; border-top: 1px solid var(--line) }
h2 { font-size: 1.3rem; margin-top: 1.25rem } details { margin: .75rem 0 } summary { cursor: pointer }
.side { position: sticky; top: 0; align-self: start; max-height: 100vh; overflow-y: auto; padding: .75rem 0; font-size: .875rem }
.bar { display: none } .contents { list-style: none; margin: 0; padding: 0 } .contents a { display: block; padding: .3rem .5rem;
  border-radius: 6px; text-decoration: none; color: var(--text); line-height: 1.3 } .contents a:hover { background: var(--card) }
.contents small { display: block; color: var(--soft); font-size: .78rem }
.counts { display: flex; flex-wrap: wrap; gap: .5rem; padding: 0; margin: .75rem 0; list-style: none }
.counts li { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .4rem .9rem }
.counts b { font-size: 1.35rem }
.verdict { font-weight: 600; white-space: nowrap }
.holds { color: var(--good) } .not-proved { color: var(--warn) } .fails { color: var(--bad) }
.picture { overflow-x: auto; background: #fff; border: 1px solid var(--line); border-radius: 8px; padding: .6rem; margin: 1rem 0 }
.picture img { display: block; max-width: 100%; height: auto; margin: 0 auto }
.claims td { white-space: normal; vertical-align: top } .claims .measured { min-width: 8.5rem } .claims .threshold { white-space: nowrap }
.claims .words { min-width: 16rem } .claims .why { display: block; color: var(--soft); margin-top: .2rem; max-width: 60ch }
.claims .words .verdict { display: none } .interval { color: var(--soft); white-space: nowrap } .claims .name { white-space: nowrap }
@media (max-width: 60rem) {
  html { scroll-padding-top: 3.5rem } body { display: block } .side { display: none }
  .bar { display: block; position: sticky; top: 0; z-index: 1; margin: -1rem -1rem 0; background: var(--back);
    border-bottom: 1px solid var(--line) }
  .bar details { margin: 0 } .bar summary { padding: .6rem 1rem; font-weight: 600 }
  .bar .contents { max-height: 60vh; overflow-y: auto; padding: 0 .5rem .5rem }
}
@media (max-width: 40rem) {
  .picture .broad { max-width: none; width: 40rem } .wide.claims { border: 0; overflow: visible }
  .claims table, .claims tbody, .claims tr, .claims td { display: block; width: auto } .claims thead { display: none }
  .claims tr { border: 1px solid var(--line); border-radius: 8px; margin: .6rem 0; padding: .4rem 0 }
  .claims td { border: 0; padding: .15rem .7rem } .claims .interval, .claims .threshold { white-space: normal }
  .claims .words { font-size: .9rem } .claims .words .verdict { display: inline }
  .claims td[data-label]::before { content: attr(data-label) " "; color: var(--soft) } .claims .empty { display: none }
}
"""
)
