"""README.md from nbs/index.ipynb: prose, visible code, and the text that the code showed.

quarto would do this for nbdev-readme, but it is not to be had everywhere. `--check` writes nothing and fails when README.md is stale.
"""
import re, sys
from pathlib import Path

from nbdev.process import NBProcessor

ROOT = Path(__file__).resolve().parent.parent
HIDDEN = {'hide', 'export', 'default_exp'}


def text_of(output):
    "What an output shows in a page without JavaScript: its markdown, else a block of its plain text"
    data = output.get('data', {})
    if 'text/markdown' in data: return ''.join(data['text/markdown'])
    text = ''.join(output.get('text', data.get('text/plain', ''))).rstrip()
    return f'```\n{text}\n```' if text else ''


def parts(cell):
    "The markdown that stands for `cell`"
    source = cell.source.strip()
    if cell.cell_type == 'markdown': return [re.sub(r'\]\((?!https?:|#)', '](nbs/', source).replace('](nbs/../', '](')]
    if HIDDEN & set(cell.directives_) or not source: return []
    return [f'```python\n{source}\n```', *filter(None, map(text_of, cell.get('outputs', [])))]


def main(check):
    cells = NBProcessor(ROOT/'nbs/index.ipynb').nb.cells
    made = '\n\n'.join(p for c in cells for p in parts(c)) + '\n'
    file = ROOT/'README.md'
    if check and file.read_text() != made: sys.exit('README.md is stale: run python tools/readme.py and commit it')
    if not check: file.write_text(made)


if __name__ == '__main__': main('--check' in sys.argv[1:])
