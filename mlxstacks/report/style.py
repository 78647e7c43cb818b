"""The page's style: light and dark by what the reader's system says, phones, print.

Series colours are Okabe and Ito's, lighter in the dark; plots take them as variables (svg.py).
"""

STYLE = """
:root {
  color-scheme: light dark;
  --page: #fff; --panel: #f5f6f8; --ink: #1b1f24; --quiet: #57606a; --rule: #d0d7de;
  --link: #0550ae; --mark: #8a3b00; --mark-page: #fff4e5; --grid: #c9ced6; --edge: #0006;
  --series-0: #0072b2; --series-1: #c24f00; --series-2: #008562; --series-3: #b0568b;
  --series-4: #a06a00; --series-5: #2b88c4;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14171b; --panel: #1d2126; --ink: #e6e8eb; --quiet: #a3abb5; --rule: #3a4149;
    --link: #7cb7ff; --mark: #ffb870; --mark-page: #33260f; --edge: #fff7;
    --series-0: #4fb0ea; --series-1: #ff8a4c; --series-2: #2fc79a; --series-3: #e79ac4;
    --series-4: #f0b840; --series-5: #86d0ff;
  }
}
* { box-sizing: border-box; }
html { scroll-padding-top: 3.5rem; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
  overflow-wrap: break-word;
}
a { color: var(--link); }
a:focus-visible, summary:focus-visible, .scroll:focus-visible {
  outline: 3px solid var(--link); outline-offset: 2px;
}
.skip { position: absolute; left: -999rem; }
.skip:focus { left: .5rem; top: .5rem; z-index: 3; background: var(--page); padding: .3rem .6rem; }
.layout { max-width: 82rem; margin: 0 auto; padding: 0 1.25rem 4rem; }
main { min-width: 0; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 1.6rem 0 .3rem; }
h2 { font-size: 1.4rem; line-height: 1.25; margin: 0 0 .6rem; }
#summary { margin-top: 1.6rem; }
h3 { font-size: 1.05rem; margin: 1.8rem 0 .5rem; }
p { margin: .5rem 0; max-width: 48rem; }
.quiet, .missing { color: var(--quiet); }
.missing { font-style: italic; }
code, pre { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
code { font-size: .9em; overflow-wrap: anywhere; }
pre {
  --under: var(--panel); padding: .8rem 1rem; overflow-x: auto; font-size: .85rem;
  border-radius: .4rem; margin: .5rem 0;
}
nav { --under: var(--page); font-size: .93rem; }
nav ul { list-style: none; margin: 0; padding: 0; }
nav a { text-decoration: none; }
nav .quiet { display: block; font-size: .85em; line-height: 1.2; }
nav a:hover { text-decoration: underline; }
section.run { border-top: 2px solid var(--rule); margin-top: 2.6rem; padding-top: 1.5rem; }
.verdict {
  border-left: .35rem solid var(--ink); background: var(--panel); padding: .7rem 1rem;
  margin: .8rem 0; border-radius: 0 .4rem .4rem 0; font-size: 1.05rem;
}
.verdict p { max-width: 56rem; margin: .25rem 0; }
.outcome { font-weight: 650; }
.tags { display: flex; flex-wrap: wrap; gap: .4rem .6rem; margin: .4rem 0; padding: 0; }
.tags li { list-style: none; }
.tag {
  display: inline-block; border: 1px solid var(--rule); border-radius: 1rem;
  padding: .05rem .7rem; font-size: .85rem; background: var(--page);
}
.exploratory { color: var(--mark); background: var(--mark-page); border-color: var(--mark);
  font-weight: 650; }
.notice { background: var(--mark-page); border: 1px solid var(--mark); border-radius: .4rem;
  padding: .4rem .9rem; margin: .7rem 0; }
.scroll, pre, nav {
  /* a shadow at each edge behind which more is; at the end what moves along covers it */
  background:
    linear-gradient(to right, var(--under) 40%, transparent) 0 0 / 2.2rem 100% local,
    linear-gradient(to left, var(--under) 40%, transparent) 100% 0 / 2.2rem 100% local,
    linear-gradient(to right, var(--edge), transparent) 0 0 / .8rem 100% scroll,
    linear-gradient(to left, var(--edge), transparent) 100% 0 / .8rem 100% scroll;
  background-repeat: no-repeat; background-color: var(--under);
  scrollbar-width: thin; scrollbar-color: var(--quiet) transparent;
}
.scroll { --under: var(--page); overflow-x: auto; margin: .4rem 0 .2rem; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: .4rem 0; }
th, td { padding: .28rem .7rem; border-bottom: 1px solid var(--rule); text-align: left;
  vertical-align: top; max-width: 26rem; }
thead th { border-bottom: 2px solid var(--rule); vertical-align: bottom; }
tbody th { font-weight: 500; }
.number { text-align: right; }
td.number { white-space: nowrap; }
.name { white-space: nowrap; }
.summary { width: 100%; }
.summary td:nth-child(3) { width: 44%; max-width: none; }
.summary .tag { border-radius: .8rem; }
.summary code { white-space: nowrap; }
.note { font-size: .87rem; color: var(--quiet); margin: .2rem 0 .8rem; }
.plots { display: grid; gap: 1rem 1.6rem; align-items: start; margin: 1rem 0;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 27rem), 1fr)); }
figure { margin: 0; min-width: 0; }
figure.wide { grid-column: 1 / -1; }
figure svg { display: block; max-width: 100%; height: auto;
  font-family: system-ui, sans-serif; }
figure svg * { stroke-linejoin: round; stroke-linecap: butt; }
figcaption { font-size: .87rem; color: var(--quiet); margin-top: .3rem; }
details { border: 1px solid var(--rule); border-radius: .4rem; margin: .4rem 0; padding: 0 .9rem; }
summary { cursor: pointer; padding: .35rem 0; font-weight: 550; font-size: .95rem; }
details[open] { padding-bottom: .7rem; }
footer { color: var(--quiet); font-size: .87rem; border-top: 1px solid var(--rule);
  margin-top: 3rem; padding-top: .8rem; }
@media (min-width: 64rem) {
  .layout { display: grid; grid-template-columns: 15rem minmax(0, 1fr); gap: 2.5rem; }
  nav { position: sticky; top: 0; align-self: start; max-height: 100vh; overflow-y: auto;
    padding: 1.9rem 0 2rem; }
  nav li { padding: .22rem 0; }
  html { scroll-padding-top: 1rem; }
}
@media (max-width: 63.99rem) {
  nav { position: sticky; top: 0; z-index: 2; margin: 0 -1.25rem;
    padding: .55rem 1.25rem; border-bottom: 1px solid var(--rule); overflow-x: auto; }
  nav strong { display: none; }
  nav ul { display: flex; gap: 1.2rem; white-space: nowrap; }
  nav .quiet { display: none; }
}
@media (max-width: 40rem) {
  .layout { padding: 0 1rem 3rem; }
  nav { margin: 0 -1rem; padding: .55rem 1rem; }
  h1 { font-size: 1.5rem; }
  h2 { font-size: 1.25rem; }
  table { font-size: .85rem; }
  th, td { padding: .25rem .5rem; max-width: 16rem; }
  figure.wide svg { max-width: none; }
  .summary thead { position: absolute; left: -999rem; }
  .summary, .summary caption, .summary tbody, .summary tr, .summary th, .summary td {
    display: block; max-width: none; border: 0; padding: .1rem 0; text-align: left;
    white-space: normal; }
  .summary tr { border: 1px solid var(--rule); border-radius: .4rem; padding: .6rem .8rem;
    margin: .6rem 0; }
  .summary td:nth-child(3) { width: auto; }
  .summary td::before { content: attr(data-label) ": "; color: var(--quiet); font-size: .85em; }
}
@media (max-width: 35rem) {
  figure.wide::before { content: "The plot goes on to the right."; font-size: .87rem;
    color: var(--quiet); }
}
@media print {
  :root { --page: #fff; --panel: #f5f6f8; --ink: #000; --quiet: #444; --rule: #bbb;
    --link: #000; --mark: #000; --mark-page: #fff; }
  nav, .skip { display: none; }
  .layout { display: block; max-width: none; padding: 0; }
  section.run { break-before: page; border: 0; margin: 0; }
  figure, tr, .verdict { break-inside: avoid; }
  .scroll, pre { overflow: visible; background: none; }
  table { font-size: 8pt; }
  a { text-decoration: none; }
}
""".strip()
