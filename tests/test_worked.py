"The notebooks of the pipeline run small, in order, in one lab"
import pytest

from test_notebooks import WORKED, run


@pytest.fixture(scope='session')
def lab_path(tmp_path_factory): return tmp_path_factory.mktemp('pipeline')/'lab'


@pytest.mark.parametrize('notebook', WORKED, ids=lambda p: p.stem)
def test_worked(notebook, lab_path): run(notebook, SYNTH_LAB_PATH=str(lab_path), QUICK='1')
