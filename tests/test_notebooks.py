"Every notebook, run from top to bottom, is a test case; `test_worked` has those of the pipeline"
import os, subprocess, sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOUND = [p for p in sorted((ROOT/'nbs').rglob('*.ipynb')) if '.ipynb_checkpoints' not in p.parts]
WORKED = [p for p in FOUND if p.parent.name == 'pipeline']
LLM = pytest.mark.skipif(not all(map(find_spec, ('torch', 'trl', 'llguidance'))), reason='needs the extra llm; `make llm` runs it')
NBDEV_TEST = Path(sys.executable).with_name('nbdev-test')


def run(notebook, **env):
    done = subprocess.run([NBDEV_TEST, notebook], cwd=ROOT, env=os.environ | env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    assert 'Success' in done.stdout, f'nothing was run: {done.stdout}{done.stderr}'


def test_there_are_notebooks(): assert len(FOUND) > 20 and [p.stem[0] for p in WORKED] == list('1234567')


@pytest.mark.parametrize('notebook', [pytest.param(p, marks=LLM if 'llm' in p.stem else (), id=p.stem) for p in FOUND if p not in WORKED])
def test_notebook(notebook, tmp_path): run(notebook, SYNTH_LAB_PATH=str(tmp_path/'lab'), QUICK='1')
