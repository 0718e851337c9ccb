"The docs site: pages of notebooks that ask nothing of another host, and a build that fails when a link leads nowhere"
import ast, importlib.util, json, os, re, subprocess, sys
from functools import partial
from html import unescape
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest

pytest.importorskip('material', reason="the docs are made with mkdocs-material: pip install -e '.[docs]'")
pytest.importorskip('latex2mathml', reason="formulas are made with latex2mathml: pip install -e '.[docs]'")

ROOT = Path(__file__).parent.parent
NOTEBOOKS = [p for p in sorted((ROOT/'nbs').rglob('*.ipynb')) if '.ipynb_checkpoints' not in p.parts]
CHROMIUM = Path('/usr/bin/chromium')

spec = importlib.util.spec_from_file_location('docs', ROOT/'tools/docs.py')
docs = importlib.util.module_from_spec(spec)
sys.modules['docs'] = docs # where dataclasses look for it
spec.loader.exec_module(docs)


@pytest.fixture(scope='module')
def built(tmp_path_factory):
    folder = tmp_path_factory.mktemp('site')
    return folder,subprocess.run([sys.executable, '-m', 'mkdocs', 'build', '--strict', '--site-dir', folder], cwd=ROOT, capture_output=True, text=True,
        env=os.environ | dict(NO_MKDOCS_2_WARNING='1'), timeout=300)


@pytest.fixture
def site(built): return built[0]


def page(site, notebook): return (site/notebook.relative_to(ROOT/'nbs').with_suffix('.html')).read_text()
def said(html): return re.sub(r'\s+', ' ', unescape(re.sub(r'<[^>]+>', '', html)))


def test_no_link_anchor_or_picture_is_missing(built): assert built[1].returncode == 0, built[1].stderr[-4000:]


def test_every_notebook_is_a_page_and_the_navigation_follows_the_data(site):
    nav = list(dict.fromkeys(re.findall(r'href="([\w./]+)\.html" class="md-nav__link', page(site, ROOT/'nbs/index.ipynb'))))
    library = [p.stem for p in NOTEBOOKS if re.match(r'\d\d', p.stem)]
    assert nav[:8] == ['index', *(f'pipeline/{p.stem}' for p in NOTEBOOKS if p.parent.name == 'pipeline')]
    assert nav[-len(library)-1:] == [*library, 'CHANGELOG']
    assert set(nav) == {str(p.relative_to(ROOT/'nbs').with_suffix('')) for p in NOTEBOOKS} | {'CHANGELOG'}


def test_hidden_cells_stay_hidden_and_exported_ones_are_folded(site):
    core = page(site, ROOT/'nbs/00_core.ipynb')
    assert 'default_exp' not in core and '#| export' not in said(core) and 'display.max_colwidth' not in said(page(site, ROOT/'nbs/index.ipynb'))
    shown = said(re.sub(r'<details class="source">.*?</details>', '', core, flags=re.S))
    assert 'class LabError(Exception):' in said(core) and 'class LabError(Exception):' not in shown
    for p in NOTEBOOKS:
        code = [''.join(c['source']) for c in json.loads(p.read_text())['cells'] if c['cell_type'] == 'code']
        hidden = [' '.join(o.split('\n', 1)[1].split()) for o in code if re.match(r'#\| *hide', o)]
        assert [o for o in hidden if o in said(page(site, p))] == [], p.name


def test_an_exported_function_is_an_entry_with_its_docments(site):
    html = page(site, ROOT/'nbs/06b_live.ipynb')
    entry = re.search(r'<h3 class="api function" id="synth_lab\.live\.half_width">.*?<details', html, re.S)[0]
    assert 'half_width(worlds) -> float | None' in said(entry)
    assert re.findall(r'<t[hd]>(.*?)</t[hd]>', entry) == ['', 'type', 'what it is', '<code>worlds</code>', '<code>dict</code>',
        'seed → (episodes, sum of their scores)',
        '<strong>returns</strong>', '<code>float | None</code>', 'None while there are fewer than two worlds']


def test_every_public_name_has_an_entry(site):
    for p in [p for p in NOTEBOOKS if re.match(r'\d\d', p.stem)]:
        module,html = p.stem.split('_', 1)[1],page(site, p)
        defined = [o for o in ast.parse((ROOT/f'synth_lab/{module}.py').read_text()).body if isinstance(o, docs.PUBLIC)]
        plain = [o.name for o in defined if o.name[0] != '_' and not any('patch' in ast.unparse(d) for d in o.decorator_list)]
        assert [n for n in plain if f'id="synth_lab.{module}.{n}"' not in html] == [], p.name


def test_every_picture_of_the_notebooks_is_on_its_page(site):
    for p in NOTEBOOKS:
        outputs = [o.get('data', {}) for c in json.loads(p.read_text())['cells'] if '#| hide' not in ''.join(c['source']) for o in c.get('outputs', [])]
        n = sum(any(k.startswith('image/') for k in o) or 'data:image' in ''.join(o.get('text/html', '')) for o in outputs)
        found = re.findall(rf'<img src="({p.stem}-\d+\.\w+)"', page(site, p))
        assert len(found) == n and all((site/p.relative_to(ROOT/'nbs').parent/o).stat().st_size > 500 for o in found), p.name


def test_formulas_are_drawn_by_the_browser_alone(site):
    for p in NOTEBOOKS:
        html = page(site, p)
        assert 'arithmatex' not in html and r'\frac' not in said(re.sub(r'<(code|annotation).*?</\1>', '', html, flags=re.S)), p.name
    assert page(site, ROOT/'nbs/11a_rl.ipynb').count('<math') == 40


FAULTS = {'a page': ('<a href="b.html">', 'a.html leads to b.html, which is not there'), 'an anchor': ('<a href="#b">', 'a.html leads to #b: no such place'),
    'a picture': ('<img alt="" src="b.png">', 'a.html leads to b.png, which is not there'),
    'a script of another host': ('<script src="https://x.org/a.js">', 'a.html loads https://x.org/a.js'),
    'a style without a scheme': ('<link rel="stylesheet" href="//x.org/a.css">', 'a.html loads //x.org/a.css'),
    'a picture of another host': ('<img src="http://x.org/a.png">', 'a.html loads http://x.org/a.png')}

@pytest.mark.parametrize('html,fault', FAULTS.values(), ids=FAULTS)
def test_the_build_fails_over(tmp_path, html, fault):
    (tmp_path/'a.html').write_text(f'<h1 id="top">A</h1>{html}<a href="#top"><a href="https://x.org">')
    assert list(docs.faults(tmp_path)) == [fault]
    with pytest.raises(docs.PluginError, match=re.escape(fault)): docs.on_post_build(SimpleNamespace(site_dir=str(tmp_path)))


def test_a_font_of_another_host_is_a_fault(tmp_path):
    (tmp_path/'a.css').write_text('@import url("https://fonts.example/a.css"); a {background: url(data:image/png;base64,AA)}')
    assert list(docs.faults(tmp_path)) == ['a.css loads https://fonts.example/a.css']


def one_cell(tmp_path, *cells):
    "A page made of `cells`: (type, source) or (type, source, outputs)"
    made = [dict(cell_type='markdown', source='# A page\n\n> About it', metadata={})]
    made += [dict(cell_type=k, source=s, metadata={}, **(dict(outputs=o[0] if o else [], execution_count=None) if k == 'code' else {})) for k,s,*o in cells]
    (tmp_path/'a.ipynb').write_text(json.dumps(dict(cells=made, metadata={}, nbformat=4, nbformat_minor=5)))
    return docs.read(tmp_path/'a.ipynb')


def test_an_unknown_directive_is_refused(tmp_path):
    with pytest.raises(docs.PluginError, match="a.ipynb: the docs do not know the directive 'hide_input'"): one_cell(tmp_path, ('code', '#| hide_input\n1'))


def test_links_to_notebooks_become_links_to_pages():
    here = next(p for p in docs.pages() if p.name == 'howto/judges')
    made = {'[a](../11a_rl.ipynb#The-same-budget,-three-advantages)':'[a](../11a_rl.md#the-same-budget-three-advantages)', '[b](https://x.org/a.ipynb)':None,
        '`Lab.rollout`':'[`Lab.rollout`](../15_lab.md#synth_lab.lab.Lab.rollout)', '`rollout`':None, '`step_rewards`':None, '```\n`Lab.sql`\n```':None,
        '### `Lab.sql`':None, '`mean_ci(x)`':'[`mean_ci(x)`](../08_metrics.md#synth_lab.metrics.mean_ci)'}
    assert {k:docs.prose(here, k) for k in made} == {k:v or k for k,v in made.items()}


@pytest.fixture
def served(site):
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_): pass
    server = ThreadingHTTPServer(('127.0.0.1', 0), partial(Quiet, directory=site))
    Thread(target=server.serve_forever, daemon=True).start()
    yield f'http://127.0.0.1:{server.server_port}/'
    server.shutdown()
    server.server_close()


@pytest.mark.skipif(not CHROMIUM.exists(), reason='there is no /usr/bin/chromium: apt-get install chromium')
def test_a_browser_without_a_network_shows_and_searches_the_pages(served):
    sync_api = pytest.importorskip('playwright.sync_api', reason='a browser is driven with playwright: pip install playwright')
    shots = ROOT/'out/screenshots'
    shots.mkdir(parents=True, exist_ok=True)
    asked,wrong = [],[]
    with sync_api.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args='--no-sandbox --disable-gpu --disable-dev-shm-usage --disable-background-networking'.split())
        tab = browser.new_page(viewport=dict(width=1360, height=900))
        tab.on('request', lambda r: asked.append(r.url))
        tab.on('requestfailed', lambda r: wrong.append(r.url))
        tab.on('console', lambda m: wrong.append(m.text) if m.type in ('error', 'warning') else None)
        tab.on('pageerror', lambda e: wrong.append(str(e)))
        for name in ('11a_rl', 'index'):
            tab.goto(served + name + '.html')
            tab.screenshot(path=shots/f'docs-{Path(name).name}.png')
            sizes = tab.evaluate(
                "Promise.all([...document.images].map(o => { o.loading = 'eager'; return o.decode().then(() => o.naturalWidth) }))")
            assert all(w > 20 for w in sizes)
            if name == '11a_rl': assert all(tab.evaluate("[...document.querySelectorAll('math')].map(o => o.getBoundingClientRect().height > 5)"))
        tab.fill('.md-search__input', 'advantage')
        tab.wait_for_selector('.md-search-result__link[href*="11a_rl.html"]', timeout=20000)
        browser.close()
    assert wrong == [] and [u for u in asked if not u.startswith((served, 'data:'))] == []
