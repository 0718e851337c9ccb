"""The docs site: each notebook is a page with the outputs that are committed. Nothing is run and nothing is imported.

A hook of mkdocs, which asks nothing of another host. As on nbdev's sites, hidden cells stay hidden, and what an export cell defines is an entry with its
signature, its docments and its source folded away. After the build every link, anchor and picture of the site is looked up, and a page that would ask
another host for anything fails.
"""
import ast, base64, io, re, textwrap, tokenize
from collections import Counter
from dataclasses import dataclass, field
from functools import cache, cached_property
from html import unescape
from pathlib import Path
from urllib.parse import unquote, urlsplit

from latex2mathml.converter import convert
from markdown.extensions.toc import slugify
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from nbdev.doclinks import patch_name
from nbdev.process import NBProcessor
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

ROOT = Path(__file__).resolve().parent.parent
NBS = ROOT/'nbs'
DIRECTIVES = {'default_exp', 'export', 'hide', 'eval', 'notest'} # another one fails, rather than show what was meant to be hidden
PUBLIC = ast.FunctionDef,ast.AsyncFunctionDef,ast.ClassDef


# Notebooks

@dataclass
class Page:
    "A notebook as it is read"
    path:Path
    title:str
    about:str         # the sentence under the title
    cells:list
    module:str=None   # what its export cells become
    html:list=field(default_factory=list) # outputs that go into the page as they are

    @property
    def name(self): return str(self.path.relative_to(NBS).with_suffix(''))
    @property
    def uri(self): return f'{self.name}.md'

    @cached_property
    def imports(self):
        "What it takes from the library by name"
        found = re.findall(r'^from synth_lab[.\w]* import (.+)$', '\n'.join(c.source for c in self.cells if c.cell_type == 'code'), re.M)
        return {o.strip().split(' ')[0] for names in found for o in names.split(',')}


def read(path):
    "The notebook at `path` as a `Page`"
    cells = NBProcessor(path).nb.cells
    said = {k for c in cells for k in c.directives_}
    if odd := said - DIRECTIVES: raise PluginError(f'{path.name}: the docs do not know the directive {sorted(odd)[0]!r}')
    top = re.match(r'# (.+?)\n+(?:> (.+?)(?:\n\n|$))?', cells[0].source+'\n\n', re.S)
    if not top: raise PluginError(f'{path.name} begins with no title: "# Title", and under it "> what it is about"')
    cells[0].source = cells[0].source[top.end():]
    module = next((c.directives_['default_exp'] for c in cells if 'default_exp' in c.directives_), None)
    return Page(path, top[1], ' '.join((top[2] or '').split()), cells, module)


def links(text): return re.findall(r'\]\(([\w/.-]+)\.ipynb\)', text)


@cache
def pages():
    "Every notebook, in the order in which they are read: the index, the pipeline, the howtos as the index has them, the library"
    index = read(NBS/'index.ipynb')
    told = [n for c in index.cells if c.cell_type == 'markdown' for n in links(c.source)]
    found = [read(p) for p in sorted(NBS.rglob('*.ipynb')) if p.name != 'index.ipynb' and '.ipynb_checkpoints' not in p.parts]
    place = {n:k for k,n in enumerate(dict.fromkeys(told)) if n.startswith('howto/')}
    return [index, *sorted(found, key=lambda p: (p.path.parent.name, place.get(p.name, len(told)), p.name))]


# What an export cell defines

def names(node):
    "What a definition is called: its name, or `Class.name` where it is patched into a class"
    found = patch_name(node)
    return found if isinstance(found, list) else [found]


def public(nodes): return [o for o in nodes if isinstance(o, PUBLIC) and o.name[0] != '_']


def comments(source):
    "Line → the comment on it, which says what the parameter of that line is"
    found = tokenize.generate_tokens(io.StringIO(source).readline)
    return {o.start[0]:o.string.lstrip('#').strip() for o in found if o.type == tokenize.COMMENT}


@dataclass
class Param:
    "One row of an entry's table"
    name:str
    anno:str
    default:str
    note:str


def text(node): return ast.unparse(node) if node is not None else ''


def fields(node, notes):
    "The rows of a class whose fields are written in its body"
    return [Param(o.target.id, text(o.annotation), re.sub(r'^field\((?:default_factory|default)=(\w+).*', r'\1()', text(o.value)), notes.get(o.lineno, ''))
        for o in node.body if isinstance(o, ast.AnnAssign) and o.target.id[0] != '_']


def taken(node, notes):
    "The rows of a function: its parameters"
    a,notes = node.args,{k:v for k,v in notes.items() if k != node.lineno} # a comment on the first line is about what comes back
    plain = [*a.posonlyargs, *a.args]
    defaults = [None]*(len(plain)-len(a.defaults)) + a.defaults
    rows = [(o.arg, o, d) for o,d in zip(plain, defaults)] + ([('*'+a.vararg.arg, a.vararg, None)] if a.vararg else [])
    rows += [(o.arg, o, d) for o,d in zip(a.kwonlyargs, a.kw_defaults)] + ([('**'+a.kwarg.arg, a.kwarg, None)] if a.kwarg else [])
    return [Param(n, text(o.annotation), text(d), notes.get(o.lineno, '')) for n,o,d in rows if n not in ('self', 'cls')]


def rows(node, notes):
    "The rows of a definition, and what it returns"
    if isinstance(node, ast.ClassDef):
        init = next((o for o in node.body if isinstance(o, ast.FunctionDef) and o.name == '__init__'), None)
        return (taken(init, notes) if init else fields(node, notes)), None
    line = node.returns.lineno if node.returns else node.lineno
    note = notes.get(line, '') if line < node.body[0].lineno else ''
    back = Param('returns', text(node.returns), '', note) if node.returns or note else None
    found = taken(node, notes)
    last = {p.name:p for p in found}.get('**kwargs')
    of = next((text(d.args[0]) for d in node.decorator_list if isinstance(d, ast.Call) and text(d.func) == 'delegates'), None)
    if last and of: last.note = last.note or f'as `{of}` takes them'
    return found, back


def is_property(node): return any('property' in text(d) or 'as_prop' in text(d) for d in getattr(node, 'decorator_list', []))


def signature(name, node, params, back, full):
    "How it is called, with types when `full`, folded where it is long"
    if is_property(node): return f'{name}'
    def one(p): return p.name + (f':{p.anno}' if full and p.anno else '') + (f'={p.default}' if p.default else '')
    parts,tail = [one(p) for p in params],f' -> {back.anno}' if back and back.anno else ''
    line = f'{"async " if isinstance(node, ast.AsyncFunctionDef) else ""}{name}({", ".join(parts)}){tail}'
    if len(line) <= 88 or not parts: return line
    return f'{name}(\n' + textwrap.fill(', '.join(parts), 84, initial_indent='    ', subsequent_indent='    ', break_long_words=False) + f'\n){tail}'


def code(s): return f'`{" ".join(s.split())}`' if s else ''


def cell_text(s): return re.sub(r'(?<!\\)[|](?=(?:[^`]*`[^`]*`)*[^`]*$)', r'\\|', ' '.join(s.split()))


def table(page, params, back):
    "The docments as a table; its types and sentences have links, the names of parameters do not"
    said = [*params, *([back] if back and (back.anno or back.note) else [])]
    some = any(p.default for p in said)
    head = ['', 'type', *(['default'] if some else []), 'what it is']
    body = [[f'**{p.name}**' if p is back else code(p.name), prose(page, code(p.anno)), *([code(p.default)] if some else []),
        prose(page, cell_text(p.note))] for p in said]
    return '\n'.join(f'| {" | ".join(r)} |' for r in [head, ['---']*len(head), *body])


def methods(page, node, notes):
    "A class's own methods, a line each"
    found = [(o, *rows(o, notes)) for o in public(node.body) if not isinstance(o, ast.ClassDef)]
    said = [(signature('.'+o.name, o, params, back, False), (ast.get_docstring(o) or '').split('\n')[0]) for o,params,back in found]
    lines = [f'| {code(s)} | {prose(page, cell_text(d))} |' for s,d in said]
    return '\n'.join(['| method | what it does |', '| --- | --- |', *lines]) if lines else ''


def anchor(page, name): return f'synth_lab.{page.module}.{name}'


def entry(page, name, node, notes):
    "The heading, signature, sentence and tables of what one export cell defines"
    params,back = rows(node, notes)
    told = any(p.note for p in [*params, *([back] if back else [])])
    kind = 'class' if isinstance(node, ast.ClassDef) else 'property' if is_property(node) else 'method' if '.' in name else 'function'
    doc = ast.get_docstring(node) or ''
    if doc and doc.rstrip()[-1] not in '.:!?': doc = f'{doc}.'
    parts = [f'### {name} {{ #{anchor(page, name)} .api .{kind} }}', f'```python\n{signature(name, node, params, back, not told)}\n```', prose(page, doc)]
    return '\n\n'.join(p for p in [*parts, table(page, params, back) if told else '', methods(page, node, notes) if kind == 'class' else ''] if p)


def fence(source, kind):
    "A block of `source`, which may hold blocks itself"
    ticks = max([2, *map(len, re.findall(r'^\s*(`{3,})', source, re.M))])+1
    return f'{"`"*ticks}{kind}\n{source.rstrip()}\n{"`"*ticks}'


PYTHON = PythonLexer(),HtmlFormatter(wrapcode=True, cssclass='highlight')


def raw(page, html):
    "HTML that is put into the page when all else is done: what nobody searches for, and Markdown need not see"
    page.html.append(html)
    return f'<div id="raw-{len(page.html)-1}"></div>'


def exported(page, cell):
    "The entries of an export cell, and its source; imports alone are left out"
    tree,notes = ast.parse(cell.source).body,comments(cell.source)
    if all(isinstance(o, (ast.Import, ast.ImportFrom)) for o in tree): return
    yield from (entry(page, n, o, notes) for o in public(tree) for n in names(o))
    yield raw(page, f'<details class="source"><summary>Source</summary>{highlight(cell.source, *PYTHON)}</details>')


# Links

@cache
def known():
    "What is documented, and where: `Class.method` and `name` where one module has it, and the full name always"
    found = [(p, n) for p in pages() for c in p.cells if 'export' in c.directives_ for o in public(ast.parse(c.source).body) for n in names(o)]
    many = Counter(n for _,n in found)
    whole = {f'synth_lab.{p.module}.{n}':(p, n) for p,n in found} | {f'synth_lab.{p.module}':(p, '') for p in pages() if p.module}
    return {n:(p, n) for p,n in found if many[n] == 1} | whole


def relative(page, other): return '../'*page.name.count('/') + other.uri


def named(page, match):
    "A name in backticks as a link to its entry; a word like `step_rewards` may mean something else, so it has to be called, or be this page's own or imported"
    name,call = match[1],match[2]
    if not (other := known().get(name)): return match[0]
    meant = call or re.search('[A-Z.]', name) or '_' in name and (other[0] is page or name in page.imports)
    if not meant: return match[0]
    return f'[{match[0]}]({relative(page, other[0])}{"#"+anchor(*other) if other[1] else ""})'


def moved(match):
    "A link to a notebook as one to its page; Jupyter's anchors are the heading itself"
    place,_,heading = match[1].partition('#')
    if place.startswith('../') and place.count('../') > 1 or place in ('../LICENSE', '../CHANGELOG.md'): place = place.rsplit('../', 1)[1]
    return f']({re.sub(r"[.]ipynb$", ".md", place)}{"#"+slugify(unquote(heading).replace("-", " "), "-") if heading else ""})'


def prose(page, source):
    "A text with its links and names resolved; blocks of code and headings are left as they are"
    parts = re.split(r'(^```.*?^```\s*?$|^#+ .*?$)', source, flags=re.M | re.S)
    def linked(s): return re.sub(r'(?<![\[`])`([A-Za-z_][\w.]*)(\([^`]*\))?`(?![\]`])', lambda m: named(page, m), re.sub(r'\]\((?!\w+:)([^)\s]+)\)', moved, s))
    return ''.join(s if k % 2 else linked(s) for k,s in enumerate(parts))


# Cells

PICTURES = {'image/png':'png', 'image/jpeg':'jpg', 'image/gif':'gif'}


def picture(page, pictures, data, kind, alt):
    "Put a picture beside the page, and show it"
    own = str(Path(page.name).parent/Path(page.name).name)
    name = f'{Path(page.name).name}-{sum(n.startswith(f"{own}-") for n in pictures)+1}.{kind}'
    pictures[str(Path(page.name).parent/name)] = base64.b64decode(''.join(data))
    return f'<img src="{name}" alt="{alt}" loading="lazy">'


def output(page, pictures, out, alt):
    "One output as a page shows it"
    data = {k:''.join(v) for k,v in out.get('data', {}).items() if isinstance(v, (str, list))}
    for mime,kind in PICTURES.items():
        if mime in data: return raw(page, picture(page, pictures, data[mime], kind, alt))
    if 'text/html' in data:
        def out_of_line(m): return picture(page, pictures, m[2], PICTURES[m[1]], alt)
        html = re.sub(r'<style.*?</style>\s*|\s(?:border="1"|style="text-align: \w+;")', '', data['text/html'], flags=re.S)
        return raw(page, re.sub(r'<img src="data:([\w/]+);base64,([^"]+)"[^>]*>', out_of_line, html))
    if 'text/markdown' in data: return prose(page, data['text/markdown'])
    if 'application/vnd.jupyter.widget-view+json' in out.get('data', {}): return '*A widget: it moves when the notebook is open in JupyterLab.*{ .widget }'
    said = re.sub(r'\x1b\[[0-9;]*m', '', ''.join(out.get('text', '')) or data.get('text/plain', '') or f"{out.get('ename', '')}: {out.get('evalue', '')}")
    return fence(said, 'text') if said.strip() else ''


def shown(page, pictures, cell, alt):
    "A visible code cell and what it showed"
    yield f'<div class="cell" markdown="1">\n\n{fence(cell.source, "python")}\n\n</div>'
    outs = [o for o in (output(page, pictures, out, alt) for out in cell.get('outputs', [])) if o]
    if outs: yield '<div class="output" markdown="1">\n\n' + '\n\n'.join(outs) + '\n\n</div>'


def body(page, pictures):
    "The parts of a page under its title"
    alt = page.title
    for cell in page.cells:
        if cell.cell_type == 'markdown':
            if heads := re.findall(r'^#+ (.+)$', cell.source, re.M): alt = re.sub(r'["`<>&]', '', heads[-1])
            yield prose(page, cell.source)
        elif not cell.source.strip() or {'hide', 'default_exp'} & set(cell.directives_): continue
        elif 'export' in cell.directives_: yield from exported(page, cell)
        else: yield from shown(page, pictures, cell, alt)


def whole(page, pictures):
    "The page in Markdown"
    hide = 'hide: [navigation]\n' if page.name == 'index' else ''
    head = f'---\n{hide}title: "{page.title}"\ndescription: "{re.sub(chr(34), chr(39), page.about.replace("`", ""))}"\n---'
    place = f'`nbs/{page.name}.ipynb`' + (f' · `synth_lab.{page.module}`' if page.module else '')
    return '\n\n'.join([head, f'# {page.title}', f'{page.about}\n{{ .about }}', f'{place}\n{{ .place }}', *body(page, pictures)])


# What mkdocs calls

def on_config(config):
    "The navigation follows the data"
    for f in (pages, known): f.cache_clear()  # `mkdocs serve` builds again
    def part(folder): return [{p.title:p.uri} for p in pages() if p.path.parent.name == folder and p.name != 'index']
    config.nav = [{'synth_lab':'index.md'}, {'Pipeline':part('pipeline')}, {'How to':part('howto')}, {'Library':part('nbs')}, {'Changes':'CHANGELOG.md'}]
    return config


def on_files(files, config):
    "The pages, their pictures, and what they link to outside of nbs/"
    kept,pictures = [f for f in files if f.src_uri.startswith('images/') or f.abs_src_path and not Path(f.abs_src_path).is_relative_to(NBS)],{}
    made = {p.uri:whole(p, pictures) for p in pages()} | {'CHANGELOG.md':(ROOT/'CHANGELOG.md').read_text()} | pictures
    beside = [File.generated(config, 'LICENSE', abs_src_path=str(ROOT/'LICENSE'))]
    return Files([*kept, *beside, *(File.generated(config, uri, content=content) for uri,content in made.items())])


def on_page_content(html, page, config, files):
    "Formulas become MathML, which browsers draw by themselves"
    def formula(m): return convert(unescape(m[2]).strip(), display='block' if m[1] == 'div' else 'inline')
    return re.sub(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', formula, html, flags=re.S)


def on_post_page(output, page, config):
    "Sources and outputs go in as they are"
    html = next((p.html for p in pages() if p.uri == page.file.src_uri), [])
    return re.sub(r'<div id="raw-(\d+)"></div>', lambda m: html[int(m[1])], output)


# The built site, looked at as a browser would

LOOK = re.compile(r"""<(\w+)\s[^>]*?\b(?:id|name|href|src|srcset|data)=[^>]*>""")


def seen(html):
    "What a page holds: its anchors, what it leads to, and what it loads by itself"
    anchors,leads,loads = set(),set(),set()
    for tag in LOOK.finditer(html):
        at = {k:unescape(a or b) for k,a,b in re.findall(r"""\s(id|name|href|src|srcset|data)=(?:"([^"]*)"|([^\s">]+))""", tag[0])}
        anchors |= {at[k] for k in ('id', 'name') if k in at}
        (leads if tag[1] == 'a' else loads).update(at[k] for k in ('href', 'src', 'srcset', 'data') if k in at and not at[k].startswith('data:'))
    return anchors,leads,loads


def faults(site):
    "What is wrong with the site in the folder `site`: a sentence each"
    found = {p:seen(p.read_text()) for p in sorted(site.rglob('*.html')) if p.name != '404.html'} # which speaks of the root of a host
    for page,(_,leads,loads) in found.items():
        here = page.relative_to(site)
        for link in sorted(leads | loads):
            to = urlsplit(link)
            target = (page.parent/unquote(to.path)).resolve() if to.path else page
            if to.scheme or to.netloc:
                if link in loads: yield f'{here} loads {link}'
            elif not target.is_file(): yield f'{here} leads to {link}, which is not there'
            elif to.fragment and target in found and unquote(to.fragment) not in found[target][0]: yield f'{here} leads to {link}: no such place'
    for css in site.rglob('*.css'):
        yield from (f'{css.relative_to(site)} loads {u}' for u in re.findall(r'(?:url\(|@import\s+)["\']?(https?:[^"\')]+)', css.read_text()))


def on_post_build(config):
    if found := list(faults(Path(config.site_dir).resolve())): raise PluginError('\n'.join(['the docs have faults:', *found]))
