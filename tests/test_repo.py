"What a clone and a wheel promise"
import ast, configparser, json, re, subprocess, sys, tomllib, zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LIBRARY = sorted((ROOT/'nbs').glob('[0-9][0-9]*_*.ipynb'))


def exported(notebook): return re.search(r'#\| *default_exp (\w+)', notebook.read_text())[1]


def test_each_module_has_one_notebook():
    modules = [exported(p) for p in LIBRARY]
    assert modules == [p.stem.split('_', 1)[1] for p in LIBRARY]
    assert set(modules) == {p.stem for p in (ROOT/'synth_lab').glob('*.py')} - {'__init__', '_modidx'}


def test_imports_point_up_the_list():
    order = [exported(p) for p in LIBRARY]
    for k, module in enumerate(order):
        used = re.findall(r'^\s*from (?:\.|synth_lab\.)(\w+) import', (ROOT/f'synth_lab/{module}.py').read_text(), re.M)
        assert not set(used) - set(order[:k]), f'{module} imports a room below it'


def test_nbdev_and_the_lab_have_a_settings_file_each():
    assert 'nbdev' in tomllib.loads((ROOT/'pyproject.toml').read_text())['tool']
    ini = configparser.ConfigParser(delimiters=('=',), interpolation=None)
    ini.read(ROOT/'settings.ini')
    assert {s.split('.')[0] for s in ini.sections()} == {'lab', 'limits', 'endpoint', 'prices'}


def test_import_is_cheap_and_lazy():
    code = 'import sys, synth_lab; print(sorted(m for m in sys.modules if m.split(".")[0] in {"numpy", "duckdb", "crafter", "httpx", "fastapi", "matplotlib"}))'
    assert subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True).stdout.strip() == '[]'


def test_unknown_public_name_lists_the_known():
    import synth_lab
    with pytest.raises(AttributeError, match='InferenceClient'): synth_lab.Client


def test_public_names_are_there():
    import synth_lab
    assert [n for n in synth_lab.__all__ if not hasattr(synth_lab, n)] == []


def test_wheel_holds_the_package_and_nothing_else(tmp_path):
    subprocess.run([sys.executable, '-m', 'build', '--outdir', tmp_path, ROOT], check=True, capture_output=True)
    names = zipfile.ZipFile(next(tmp_path.glob('*.whl'))).namelist()
    assert {n.split('/')[0] for n in names} == {'synth_lab', 'synth_lab-0.1.0.dist-info'}
    assert {'synth_lab/lab.py', 'synth_lab/settings.ini', 'synth_lab-0.1.0.dist-info/entry_points.txt'} <= set(names)


def test_pages_name_no_place():
    "Committed outputs hold no path of a machine and no address of an object"
    for p in sorted((ROOT/'nbs').rglob('*.ipynb')):
        outputs = json.dumps([c.get('outputs', []) for c in json.loads(p.read_text())['cells']])
        found = re.search(r'/(?:home|root|work|tmp|Users)/\w+|0x[0-9a-f]{9,}', re.sub(r'"image/png": "[^"]+"', '', outputs))
        assert not found, f'{p.name}: {found[0]}'


def test_pages_open_without_a_question():
    "Each notebook names the kernel that runs it, and pairs with no other file"
    odd = {p.name: json.loads(p.read_text())['metadata'] for p in (ROOT/'nbs').rglob('*.ipynb')}
    assert {n for n, m in odd.items() if m != {'kernelspec': {'display_name': 'python3', 'language': 'python', 'name': 'python3'}}} == set()


def test_the_index_leads_to_every_page():
    linked = set(re.findall(r'\]\(([\w/]+\.ipynb)\)', (ROOT/'nbs/index.ipynb').read_text()))
    pages = {str(p.relative_to(ROOT/'nbs')) for p in (ROOT/'nbs').rglob('*.ipynb') if '.ipynb_checkpoints' not in p.parts}
    assert pages - {'index.ipynb'} == linked


def test_imports_stand_in_cells_of_their_own():
    "nbdev's docs run the cells that import, and nothing else but what is exported"
    def mixed(source): return {isinstance(o, (ast.Import, ast.ImportFrom)) for o in ast.parse(source).body} == {True, False}
    for p in (ROOT/'nbs').rglob('*.ipynb'):
        cells = [''.join(c['source']) for c in json.loads(p.read_text())['cells'] if c['cell_type'] == 'code']
        found = [o for o in cells if not o.startswith('#| export') and mixed(o)]
        assert found == [], p.name
