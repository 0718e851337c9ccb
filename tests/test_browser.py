"JupyterLab as a person sees it: a notebook is run in a browser, its widgets are moved, and what they show is looked at"
import json, os, subprocess, sys, time
from pathlib import Path
from socket import socket
from urllib.error import URLError
from urllib.request import urlopen

import pytest

sync_api = pytest.importorskip('playwright.sync_api', reason='a browser is driven with playwright: pip install playwright')
pytest.importorskip('jupyterlab', reason="the notebooks are opened in JupyterLab: pip install -e '.[dev]'")
CHROMIUM = Path('/usr/bin/chromium')
pytestmark = pytest.mark.skipif(not CHROMIUM.exists(), reason='there is no /usr/bin/chromium: apt-get install chromium')

ROOT = Path(__file__).parent.parent
SHOTS = ROOT/'out/screenshots'
QUIET = {'@jupyterlab/apputils-extension/notification.jupyterlab-settings':{'fetchNews':'false', 'checkForUpdates':False}}

CELLS = {'import': 'from synth_lab import Lab\nlab = Lab()',
    'rollout': "run = await lab.rollout('expert', seeds=range(12), length=60, concurrency=4, run_id='seen')",
    'widgets': """
import ipywidgets as W, matplotlib.pyplot as plt
def shown(seed, colour):
    fig,ax = plt.subplots(figsize=(3, 1))
    ax.plot([0, seed], color=colour)
W.interact(shown, seed=W.Play(min=1, max=5, interval=200), colour=['red', 'blue']);
"""}


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
    own = dict(JUPYTER_CONFIG_DIR='config', JUPYTER_DATA_DIR='data', JUPYTER_RUNTIME_DIR='runtime', JUPYTERLAB_SETTINGS_DIR='settings', JUPYTERLAB_WORKSPACES_DIR='workspaces',
        IPYTHONDIR='ipython', SYNTH_LAB_PATH='lab')
    said = (home/'log').open('w')
    server = subprocess.Popen([sys.executable, '-m', 'jupyterlab', '--no-browser', '--expose-app-in-browser', '--allow-root', '--ServerApp.ip=127.0.0.1', f'--ServerApp.port={port}',
        '--ServerApp.port_retries=0', '--IdentityProvider.token=secret', f'--ServerApp.root_dir={root}'], cwd=root, stdout=said, stderr=said,
        env=os.environ | {k:str(home/v) for k,v in own.items()})
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
        browser = p.chromium.launch(executable_path=CHROMIUM, args=['--no-sandbox', '--disable-gpu', '--disable-dev-shm-usage', '--disable-background-networking'])
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
        self.tab,self.file,self.wrong,self.cells = tab,file,[],list(CELLS)
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

    def shot(self, name): self.out(name).screenshot(path=SHOTS/f'{name}.png')

    def changes(self, name, act):
        "Whether the picture in the outputs of the cell `name` becomes another one after `act`"
        picture = self.out(name).locator('img').first
        before = picture.get_attribute('src')
        act(self.out(name))
        for _ in range(150):
            if (picture.get_attribute('src') or before) != before: return True
            self.tab.wait_for_timeout(100)

    def saved(self):
        "The cells as the file has them, by name"
        self.tab.evaluate("jupyterapp.commands.execute('docmanager:save')")
        return {c['id']:c for c in json.loads(self.file.read_text())['cells']}


@pytest.fixture(scope='module')
def notebook(jupyter, browser):
    SHOTS.mkdir(parents=True, exist_ok=True)
    url,root = jupyter
    return Notebook(browser.new_page(viewport=dict(width=1100, height=1400)), url, root/'seen.ipynb')


@pytest.fixture(autouse=True)
def nothing_goes_wrong(notebook):
    yield
    assert notebook.wrong == []


def test_a_run_has_a_panel_that_becomes_a_line(notebook):
    notebook.out('rollout').locator('table').wait_for(timeout=120_000)
    notebook.shot('rollout')
    notebook.tab.wait_for_function('window.ran', timeout=240_000)
    assert notebook.out('rollout').inner_text().startswith('expert: 12/12 episodes · ') and not notebook.out('rollout').locator('.jupyter-widgets').count()
    kept, = notebook.saved()['rollout']['outputs']
    assert set(kept['data']) == {'text/markdown', 'text/plain'} and notebook.file.stat().st_size < 100_000


def test_widgets_move(notebook):
    notebook.tab.wait_for_function('window.ran', timeout=240_000)
    assert notebook.changes('widgets', lambda out: out.locator('select').select_option('blue'))
    assert notebook.changes('widgets', lambda out: out.locator('.widget-play button').first.click())
    notebook.shot('widgets')
