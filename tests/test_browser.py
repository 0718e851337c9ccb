"JupyterLab as a person sees it: the pages of the pipeline are opened and run, their widgets moved, and what they show is looked at"
import io, json, os, shutil, subprocess, sys, time
from pathlib import Path
from socket import socket
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from PIL import Image

sync_api = pytest.importorskip('playwright.sync_api', reason='a browser is driven with playwright: pip install playwright')
pytest.importorskip('jupyterlab', reason="the notebooks are opened in JupyterLab: pip install -e '.[dev]'")
CHROMIUM = Path('/usr/bin/chromium')
pytestmark = pytest.mark.skipif(not CHROMIUM.exists(), reason='there is no /usr/bin/chromium: apt-get install chromium')

ROOT = Path(__file__).parent.parent
SHOTS = ROOT/'out/screenshots'
QUIET = {'@jupyterlab/apputils-extension/notification.jupyterlab-settings':{'fetchNews':'false', 'checkForUpdates':False}}
STORY = sorted(p.stem for p in (ROOT/'nbs/pipeline').glob('*.ipynb'))


def free_port():
    with socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]


@pytest.fixture(scope='module')
def jupyter(tmp_path_factory):
    "A JupyterLab with copies of the pages, settings and a lab of its own, until the tests are over; the pages run small"
    home = tmp_path_factory.mktemp('jupyter')
    for name,value in QUIET.items():
        (home/'settings'/name).parent.mkdir(parents=True)
        (home/'settings'/name).write_text(json.dumps(value))
    root,port = home/'notebooks',free_port()
    for folder in ('pipeline', 'howto', 'images'): shutil.copytree(ROOT/'nbs'/folder, root/folder, ignore=shutil.ignore_patterns('.*'))
    own = dict(JUPYTER_CONFIG_DIR='config', JUPYTER_DATA_DIR='data', JUPYTER_RUNTIME_DIR='runtime', JUPYTERLAB_SETTINGS_DIR='settings',
        JUPYTERLAB_WORKSPACES_DIR='workspaces', IPYTHONDIR='ipython', SYNTH_LAB_PATH='lab')
    said = (home/'log').open('w')
    server = subprocess.Popen([sys.executable, '-m', 'jupyterlab', '--no-browser', '--expose-app-in-browser', '--allow-root', '--ServerApp.ip=127.0.0.1',
        f'--ServerApp.port={port}', '--ServerApp.port_retries=0', '--IdentityProvider.token=secret', f'--ServerApp.root_dir={root}'],
        cwd=root, stdout=said, stderr=said, env=os.environ | {k:str(home/v) for k,v in own.items()} | dict(QUICK='1', LONG='', OPENBLAS_NUM_THREADS='1'))
    url = f'http://127.0.0.1:{port}'
    try:
        for _ in range(600):
            assert server.poll() is None, (home/'log').read_text()[-2000:]
            try: urlopen(f'{url}/api?token=secret', timeout=5).close()
            except URLError: time.sleep(.1)
            else: break
        yield url,root
    finally:
        server.terminate()
        server.wait(30)
        said.close()


@pytest.fixture(scope='module')
def browser():
    with sync_api.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args='--no-sandbox --disable-gpu --disable-dev-shm-usage --disable-background-networking'.split())
        yield browser
        browser.close()


RUN = """async () => {
    const s = jupyterapp.shell.currentWidget.context.sessionContext
    await s.ready
    await s.session.kernel.info
    window.ran = false
    jupyterapp.commands.execute('notebook:run-all-cells').then(() => window.ran = true)
}"""

PICTURES = """o => {
    const seen = [...o.querySelectorAll('img')].filter(i => i.offsetParent)
    if (seen.some(i => !i.complete || !i.naturalWidth)) return null
    return seen.map(i => {
        const c = Object.assign(document.createElement('canvas'), {width: i.naturalWidth, height: i.naturalHeight})
        c.getContext('2d').drawImage(i, 0, 0)
        return c.toDataURL()
    }).join()
}"""

class Page:
    "A notebook that is open in a tab, and what went wrong there"
    def __init__(self, tab, url, file):
        self.tab,self.url,self.file,self.wrong = tab,url,file,[]
        tab.on('console', lambda m: self.wrong.append(m.text) if m.type == 'error' else None)
        tab.on('pageerror', lambda e: self.wrong.append(str(e)))
        tab.on('request', lambda r: None if r.url.startswith((url, 'data:', 'blob:')) else self.wrong.append(f'asks {r.url}'))
        tab.goto(f'{url}/doc/tree/{file.parent.name}/{file.name}?token=secret')
        tab.wait_for_function("window.jupyterapp?.shell.currentWidget?.context?.sessionContext", timeout=120_000)

    def run(self):
        "Begin to run all cells, as the menu does"
        self.tab.evaluate(RUN)
        return self

    def ran(self):
        "Wait until all cells have run; raises with the error of one that failed"
        self.tab.wait_for_function('window.ran', timeout=240_000)
        failed = [o for c in self.saved() for o in c.get('outputs', ()) if o['output_type'] == 'error']
        assert not failed, '\n'.join(failed[0]['traceback'])
        return self

    def out(self, text):
        "The outputs of the first code cell with `text` in its source, scrolled to, since JupyterLab draws only the cells that are near"
        cells = json.loads(self.file.read_text())['cells']
        k = next(k for k,c in enumerate(cells) if c['cell_type'] == 'code' and text in ''.join(c['source']))
        self.tab.evaluate("k => jupyterapp.shell.currentWidget.content.scrollToItem(k, 'start')", k)
        return self.tab.locator(f'.jp-Notebook .jp-Cell[data-windowed-list-index="{k}"] .jp-Cell-outputArea')

    def asks(self, expression):
        "What the kernel answers"
        return self.tab.evaluate("""async expression => {
            const kernel = jupyterapp.shell.currentWidget.context.sessionContext.session.kernel
            const reply = await kernel.requestExecute({code: '', user_expressions: {answer: expression}}).done
            return reply.content.user_expressions.answer.data['text/plain']
        }""", expression)

    def saved(self):
        "The cells as the file has them after saving"
        self.tab.evaluate("jupyterapp.commands.execute('docmanager:save')")
        return json.loads(self.file.read_text())['cells']

    def outputs(self, text):
        "The outputs of the first cell with `text` in its source, as the file has them"
        return next(c for c in self.saved() if c['cell_type'] == 'code' and text in ''.join(c['source']))['outputs']

    def well(self):
        "Nothing went wrong in the page, nor in a callback of a widget"
        return (self.wrong, self.asks("list(__import__('synth_lab.viz').viz.ERRORS)")) == ([], '[]')


@pytest.fixture(scope='module')
def opened(jupyter, browser):
    "Opens a page and runs it, after those that it builds on; a page stays open"
    SHOTS.mkdir(parents=True, exist_ok=True)
    url,root = jupyter
    pages = {}
    def page(name, wait=True):
        for o in [*STORY[:STORY.index(name)], name] if name in STORY else [name]:
            if o not in pages:
                file, = root.glob(f'*/{o}.ipynb')
                pages[o] = Page(browser.new_page(viewport=dict(width=1440, height=1400)), url, file).run()
                if wait or o != name: pages[o].ran()
        pages[name].tab.bring_to_front()
        return pages[name]
    yield page
    assert {o:p.wrong for o,p in pages.items() if not p.well()} == {}


def shot(out, name): keep(out.screenshot(), name)


def keep(png, name):
    "A picture of what was seen, small enough for a page"
    seen = Image.open(io.BytesIO(png))
    seen.convert('RGB').quantize(128, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(SHOTS/f'{name}.png', optimize=True)


def pictures(out):
    "The pixels of all pictures that are seen; None while one is on its way"
    return out.evaluate(PICTURES)


def changes(out, act):
    "Whether the pictures become others after `act`"
    out.locator('img').first.wait_for()
    while not (before := pictures(out)): out.page.wait_for_timeout(50)
    act()
    for _ in range(150):
        if (now := pictures(out)) and now != before: return True
        out.page.wait_for_timeout(100)


def press(out, key, nth=0):
    "Press a key on a slider"
    def act():
        out.locator('.noUi-handle').nth(nth).focus()
        out.page.keyboard.press(key)
    return act


def click(out, label): return out.get_by_role('button', name=label, exact=True).first.click


def choose(out, control, **option):
    "Choose from the list that is called `control`"
    return lambda: out.get_by_label(control, exact=True).select_option(**option)


def test_a_run_has_a_panel_that_keeps_its_height_and_becomes_a_line(opened):
    page,heights = opened('1_collect', wait=False),set()
    out = page.out("lab.rollout('expert'")
    panel = out.locator('table')
    panel.wait_for(timeout=120_000)
    seen = out.screenshot()
    while panel.count() and not page.tab.evaluate('window.ran'):
        before = out.screenshot()
        said = panel.evaluate_all("found => found.map(o => [o.offsetHeight, o.innerText])")
        playing = {h for h,text in said if h and ', turn ' in text} # the table of the run that is over is none of it
        heights |= playing
        if playing: seen = before
        page.tab.wait_for_timeout(100)
    assert len(heights) < 2
    keep(seen, 'rollout')
    page.ran()
    line = page.out("lab.rollout('expert'")
    assert line.inner_text().startswith('expert: 12/12 episodes · ') and not line.locator('.jupyter-widgets').count()
    kept,_ = page.outputs("lab.rollout('expert'")
    assert set(kept['data']) == {'text/markdown', 'text/plain'} and len(json.dumps(kept)) < 1000


def test_an_episode_is_scrubbed_played_and_forked(opened):
    out = opened('1_collect').out('player = lab.watch(')
    assert changes(out, press(out, 'ArrowRight')) and changes(out, press(out, 'End'))
    assert changes(out, click(out, 'next unlock')) and changes(out, click(out, '◂ turn'))
    shot(out, 'watch')
    play = out.locator('.widget-play button').first
    assert changes(out, play.click) and changes(out, lambda: None) # on it goes by itself
    play.click() # pause
    out.get_by_role('button', name='fork here').click()
    out.get_by_text('world = lab.fork(').wait_for()


@pytest.mark.parametrize('name,cell,n', [('4_finetune', 'trained = lab.sft(', 1), ('6_reinforce', 'job.follow()', 3)])
def test_a_training_leaves_its_curves(opened, name, cell, n):
    page = opened(name)
    out = page.out(cell)
    out.locator('img').first.wait_for()
    assert (out.locator('img').count(), out.locator('.jupyter-widgets').count()) == (n, 0)
    kept = [o for o in page.outputs(cell) if 'image/png' in o['data']]
    assert len(kept) == n and all(len(json.dumps(o)) < 100_000 for o in kept)


def test_two_episodes_are_watched_side_by_side(opened):
    out = opened('5_evaluate').out('both = lab.watch(')
    assert changes(out, press(out, 'ArrowRight')) and changes(out, click(out, 'end')) and changes(out, click(out, 'where they part'))
    assert changes(out, out.locator('.widget-play button').first.click)
    shot(out, 'beside')


def test_the_explorer_moves(opened):
    out = opened('7_report').out('lab.explore(')
    out.locator('img').first.wait_for()
    views = out.locator('select:not([multiple])').first.locator('option').all_inner_texts()
    assert len(views) == 6
    for view in (o for o in views[::-1] if o != 'Time to unlock'): assert changes(out, choose(out, 'view', label=view)), view
    assert changes(out, press(out, 'Home', nth=2)) # smoothing
    assert changes(out, press(out, 'ArrowRight')) # the first episode
    shot(out, 'explorer')
    for several in ('achievements', 'models', 'runs'): assert changes(out, choose(out, several, index=0)), several
    assert changes(out, choose(out, 'reward', label='return')) and changes(out, choose(out, 'group by', label='run'))
    out.get_by_text('reward_figure(lab.episodes').wait_for()


def test_a_game_is_played_by_hand_and_handed_over(opened):
    page = opened('watch_and_play')
    out = page.out("player = lab.watch(")
    assert changes(out, press(out, 'ArrowRight'))
    out = page.out('game = lab.play(')
    assert changes(out, click(out, 'left')) and changes(out, click(out, 'hand over'))
    shot(out, 'play')
    click(out, 'finish')()
    out.locator('button[disabled]').first.wait_for()


@pytest.mark.parametrize('name,cell', [('1_collect', 'player = lab.watch('), ('7_report', 'lab.explore(')])
def test_a_page_that_is_reopened_shows_the_pictures(opened, browser, name, cell):
    "While a widget lives, its still picture is hidden; where the kernel is another one, the picture is what is left"
    page,still = opened(name),'.jp-OutputArea-child:has(.lab-panel) + .jp-OutputArea-child img'
    hidden = page.out(cell).locator(still)
    assert hidden.count() == 1 and not hidden.is_visible()
    assert len(page.outputs(cell)[-1]['data']['image/png']) < 80_000
    copy = page.file.with_name(f'{name}-later.ipynb')
    copy.write_text(page.file.read_text().replace('"python3"', '"of-another-machine"')) # so that no kernel starts
    later = Page(browser.new_page(viewport=dict(width=1440, height=1400)), page.url, copy)
    later.out(cell).locator('.jp-OutputArea-child').last.locator('img').wait_for(timeout=60_000)
    later.tab.close()
