"JupyterLab as a person sees it: a notebook is run in a browser, its widgets are moved, and what they show is looked at"
import io, json, os, subprocess, sys, time
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

CELLS = {'import': """
from synth_lab import Lab
from synth_lab.play import play
from synth_lab.viz import ERRORS, reward_explorer
from synth_lab.watch import watch
lab = Lab()
""",
    'rollout': "run = await lab.rollout('expert', seeds=range(16), length=60, concurrency=4, run_id='seen')",
    'others': "others = await lab.rollout('random', seeds=range(6), length=60, run_id='other')",
    'explorer': 'reward_explorer(lab)', 'watch': "watch(lab, 'seen:0:0')", 'beside': "watch(lab, 'seen:0:0', 'other:0:0')", 'play': 'play(lab, seed=3)'}


def free_port():
    with socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]


@pytest.fixture(scope='module')
def jupyter(tmp_path_factory):
    "A JupyterLab with a folder, settings and a lab of its own, until the tests are over"
    home = tmp_path_factory.mktemp('jupyter')
    for name,value in QUIET.items():
        (home/'settings'/name).parent.mkdir(parents=True)
        (home/'settings'/name).write_text(json.dumps(value))
    root,port = home/'notebooks',free_port()
    root.mkdir()
    own = dict(JUPYTER_CONFIG_DIR='config', JUPYTER_DATA_DIR='data', JUPYTER_RUNTIME_DIR='runtime', JUPYTERLAB_SETTINGS_DIR='settings',
        JUPYTERLAB_WORKSPACES_DIR='workspaces', IPYTHONDIR='ipython', SYNTH_LAB_PATH='lab')
    said = (home/'log').open('w')
    server = subprocess.Popen([sys.executable, '-m', 'jupyterlab', '--no-browser', '--expose-app-in-browser', '--allow-root', '--ServerApp.ip=127.0.0.1',
        f'--ServerApp.port={port}', '--ServerApp.port_retries=0', '--IdentityProvider.token=secret', f'--ServerApp.root_dir={root}'],
        cwd=root, stdout=said, stderr=said, env=os.environ | {k:str(home/v) for k,v in own.items()})
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


def code_cell(name, source): return dict(cell_type='code', id=name, source=source, metadata={}, outputs=[], execution_count=None)

RUN = """async () => {
    const s = jupyterapp.shell.currentWidget.context.sessionContext
    await s.ready
    await s.session.kernel.info
    window.ran = false
    jupyterapp.commands.execute('notebook:run-all-cells').then(() => window.ran = true)
}"""

class Notebook:
    "A notebook that is open and running in a tab, and what went wrong there"
    def __init__(self, tab, url, file):
        self.tab,self.url,self.file,self.wrong,self.cells = tab,url,file,[],list(CELLS)
        file.write_text(json.dumps(dict(cells=[code_cell(*o) for o in CELLS.items()], nbformat=4, nbformat_minor=5,
            metadata=dict(kernelspec=dict(display_name='python3', language='python', name='python3')))))
        tab.on('console', lambda m: self.wrong.append(m.text) if m.type == 'error' else None)
        tab.on('pageerror', lambda e: self.wrong.append(str(e)))
        tab.on('request', lambda r: None if r.url.startswith((url, 'data:', 'blob:')) else self.wrong.append(f'asks {r.url}'))
        tab.goto(f'{url}/doc/tree/{file.name}?token=secret')
        tab.wait_for_function("window.jupyterapp?.shell.currentWidget?.context?.sessionContext", timeout=120_000)
        tab.evaluate(RUN)

    def out(self, name):
        "The outputs of the cell `name`"
        return self.tab.locator('.jp-Notebook .jp-CodeCell').nth(self.cells.index(name)).locator('.jp-Cell-outputArea')

    def shot(self, name):
        "A picture of the outputs of the cell `name`, small enough for a page"
        seen = Image.open(io.BytesIO(self.out(name).screenshot()))
        seen.convert('RGB').quantize(128, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(SHOTS/f'{name}.png', optimize=True)

    def changes(self, name, act):
        "Whether the pictures and texts in the outputs of the cell `name` become others after `act`"
        before = self.seen(name)
        act(self.out(name))
        for _ in range(150):
            if self.seen(name) != before: return True
            self.tab.wait_for_timeout(100)

    def seen(self, name): return self.out(name).evaluate("o => [...o.querySelectorAll('img')].map(i => i.src).join()")

    def asks(self, expression):
        "What the kernel answers"
        return self.tab.evaluate("""async expression => {
            const kernel = jupyterapp.shell.currentWidget.context.sessionContext.session.kernel
            const reply = await kernel.requestExecute({code: '', user_expressions: {answer: expression}}).done
            return reply.content.user_expressions.answer.data['text/plain']
        }""", expression)

    def saved(self):
        "The cells as the file has them, by name"
        self.tab.evaluate("jupyterapp.commands.execute('docmanager:save')")
        return {c['id']:c for c in json.loads(self.file.read_text())['cells']}


@pytest.fixture(scope='module')
def notebook(jupyter, browser):
    SHOTS.mkdir(parents=True, exist_ok=True)
    (SHOTS/'rollout.png').unlink(missing_ok=True)
    url,root = jupyter
    return Notebook(browser.new_page(viewport=dict(width=1440, height=1400)), url, root/'seen.ipynb')


@pytest.fixture
def ran(notebook):
    "The notebook when all its cells have run; whatever is done with it, nothing goes wrong"
    notebook.tab.wait_for_function('window.ran', timeout=240_000)
    yield notebook
    assert (notebook.wrong, notebook.asks('list(ERRORS)')) == ([], '[]')


def press(key, what='.noUi-handle', nth=0):
    "A key is pressed on a slider"
    def act(out):
        out.locator(what).nth(nth).focus()
        out.page.keyboard.press(key)
    return act


def click(label): return lambda out: out.get_by_role('button', name=label, exact=True).first.click()


def test_a_run_has_a_panel_that_keeps_its_height_and_becomes_a_line(notebook):
    panel,heights = notebook.out('rollout').locator('table'),set()
    panel.wait_for(timeout=120_000)
    while panel.count() and not notebook.tab.evaluate('window.ran'):
        said = panel.evaluate_all("found => found.map(o => [o.offsetHeight, o.innerText])")
        heights |= {h for h,text in said if h and 'turn' in text}
        if len(heights) == 1 and said and not (SHOTS/'rollout.png').exists(): notebook.shot('rollout')
        notebook.tab.wait_for_timeout(100)
    assert len(heights) < 2
    notebook.tab.wait_for_function('window.ran', timeout=240_000)
    assert notebook.out('rollout').inner_text().startswith('expert: 16/16 episodes · ') and not notebook.out('rollout').locator('.jupyter-widgets').count()
    kept, = notebook.saved()['rollout']['outputs']
    assert set(kept['data']) == {'text/markdown', 'text/plain'} and len(json.dumps(kept)) < 1000


def test_the_explorer_moves(ran):
    views,runs = (ran.out('explorer').locator(o) for o in ('select:not([multiple])', 'select[multiple]'))
    names = views.first.locator('option').all_inner_texts()
    ran.shot('explorer')
    assert ran.changes('explorer', press('ArrowRight', nth=0)) # the first episode
    for name in names[1:]:
        assert ran.changes('explorer', lambda out: views.first.select_option(label=name)), name
    assert ran.changes('explorer', lambda out: runs.first.select_option(index=0))
    assert ran.changes('explorer', lambda out: views.first.select_option(label=names[0]))


def test_an_episode_is_scrubbed_played_and_forked(ran):
    assert ran.changes('watch', press('ArrowRight'))
    assert ran.changes('watch', click('next unlock'))
    ran.shot('watch')
    assert ran.changes('watch', lambda out: out.locator('.widget-play button').first.click())
    ran.out('watch').locator('.widget-play button').first.click() # pause
    ran.out('watch').get_by_role('button', name='fork here').click()
    ran.out('watch').get_by_text('world = lab.fork(').wait_for()


def test_two_episodes_are_watched_side_by_side(ran):
    assert ran.changes('beside', press('ArrowRight'))
    assert ran.changes('beside', click('end'))
    ran.shot('beside')


def test_a_game_is_played_by_hand_and_handed_over(ran):
    assert ran.changes('play', click('left'))
    assert ran.changes('play', click('hand over'))
    ran.shot('play')
    ran.out('play').get_by_role('button', name='finish').click()
    ran.out('play').locator('button[disabled]').first.wait_for()
    assert ran.asks("lab.episodes.query('model == \"human\"').status.tolist()") == "['truncated']"


def test_the_notebook_is_small_and_shows_its_pictures_without_a_kernel(ran):
    cells = ran.saved()
    for name in ('explorer', 'watch', 'beside', 'play'):
        *_,kept = cells[name]['outputs']
        assert 'image/png' in kept['data'] and len(kept['data']['image/png']) < 80_000, name


def test_a_page_that_is_reopened_shows_the_pictures(ran, browser):
    "While a widget lives, its still picture is hidden; where the kernel is another one, the picture is what is left"
    still = '.jp-OutputArea-child:has(.lab-panel) + .jp-OutputArea-child img'
    assert ran.out('watch').locator(still).count() == 1 and not ran.out('watch').locator(still).is_visible()
    cells = ran.saved()
    copy = ran.file.with_name('later.ipynb')
    copy.write_text(ran.file.read_text().replace('"python3"', '"of-another-machine"')) # so that no kernel starts
    tab = browser.new_page(viewport=dict(width=1440, height=1400))
    tab.goto(f'{ran.url}/doc/tree/{copy.name}?token=secret')
    for name in ('explorer', 'watch', 'beside', 'play'):
        last = tab.locator('.jp-Notebook .jp-CodeCell').nth(list(cells).index(name)).locator('.jp-OutputArea-child').last.locator('img')
        last.wait_for(timeout=60_000)
        assert last.is_visible()
    tab.close()
