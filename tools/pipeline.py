"""The worked notebooks of nbs/pipeline, run in order into out/.

Each notebook runs in a process of its own, as it would in Jupyter. out/ then holds the lab (traces and checkpoints), the executed notebooks,
their figures as PNG, and report.json. A run that was stopped goes on where it was; a finished one is put aside, never written over.
QUICK=1 in the environment makes a small run, LONG=1 one in which each training of RL gets half an hour of CPU time.
"""
import base64, fcntl, json, multiprocessing, os, re, resource, signal, sys, time
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from execnb.shell import CaptureShell
from fastcore.nbio import read_nb, write_nb
from nbdev.clean import clean_nb
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table

from synth_lab.core import LabError

ROOT = Path(__file__).resolve().parent.parent
console = Console(file=sys.__stdout__)  # the real one: cells run with theirs captured


def heading(cell):
    "The heading that a markdown cell gives to the cells after it"
    found = re.match(r'#+ (.+)', cell.source) if cell.cell_type == 'markdown' else None
    return found[1] if found else None


def trouble(shell, name):
    "What to say about the cell that failed: one sentence when the lab can explain it, else the traceback"
    return f'{name}: {shell.exc}' if isinstance(shell.exc, LabError) else shell.prettytb(fname=name)


def run(source, dest, out):
    "Run the notebook `source` with a live line, and write it with its outputs to `dest`; ends the process with 1 when a cell fails"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the parent, which ends this process
    os.environ |= {'SYNTH_LAB_PATH': str(out/'lab'), 'OPENBLAS_NUM_THREADS': '1'}
    os.chdir(source.parent)
    nb, shell = read_nb(source), CaptureShell(source, mpl_format='png')
    with Live(Spinner('dots', source.stem), console=console, transient=True, redirect_stdout=False, redirect_stderr=False) as line:
        def show(cell):
            if h := heading(cell): line.update(Spinner('dots', f'{source.stem} · {h}'))
        try: shell.run_all(nb, exc_stop=True, preproc=show)
        except Exception: pass  # it is in `shell.exc`, and told below
    if shell.exc: console.print(trouble(shell, source.name), markup=False, highlight=False, soft_wrap=True)
    clean_nb(nb)
    write_nb(nb, dest)
    os._exit(0 if shell.exc is None else 1)


def figures(notebook, folder):
    "Write every figure in `notebook` to `folder` as NAME-K.png"
    pngs = [o.data['image/png'] for c in read_nb(notebook).cells for o in c.get('outputs', []) if 'image/png' in o.get('data', {})]
    for k, png in enumerate(pngs, 1): (folder/f'{notebook.stem}-{k}.png').write_bytes(base64.b64decode(''.join(png)))


def stage(source, out):
    "Run one notebook to its end, and write its figures"
    dest = out/'notebooks'/source.name
    child = multiprocessing.get_context('spawn').Process(target=run, args=(source, dest, out))
    child.start()
    try: child.join()
    except KeyboardInterrupt: sys.exit(f'\nStopped in {source.stem}. What is done is kept in {out.name}/; the same command goes on from there.')
    finally:
        child.terminate()
        child.join()
        console.show_cursor(True)
    if child.exitcode: sys.exit(f'{source.stem} failed. What is done is kept in {out.name}/; once it is mended, the same command goes on from there.')
    figures(dest, out/'figures')


def save(out, spent):
    "Keep what the run has `spent` beside what it made"
    part = out/'spent.part'
    part.write_text(json.dumps(spent))
    part.replace(out/'spent.json')
    return spent


@contextmanager
def timed(source, out, spent):
    "Add the wall and CPU seconds of the block to those `spent`, also when it is stopped, so that the report tells the whole cost"
    cpu = lambda: (u := resource.getrusage(resource.RUSAGE_CHILDREN)).ru_utime + u.ru_stime
    wall0, cpu0 = time.perf_counter(), cpu()
    try: yield
    finally:
        wall, used = time.perf_counter()-wall0, cpu()-cpu0
        save(out, spent | dict(wall_s=round(spent['wall_s']+wall, 1), cpu_s=round(spent['cpu_s']+used, 1)))
        console.print(f'{source.stem:<14} {wall:6.1f} s, {used:6.1f} s CPU', highlight=False)


def spent_so_far(out):
    "What an earlier run in `out` has spent, `None` when that cannot be told"
    try: return json.loads((out/'spent.json').read_text())
    except (FileNotFoundError, ValueError): return None


def begin(out, size):
    "Make `out` ready for this run, or for the rest of an unfinished one of the same size; what another run left there is put aside"
    spent = spent_so_far(out)
    goes_on = spent and spent['size'] == size and not (out/'report.json').exists()
    if any((out/o).exists() for o in ('lab', 'notebooks', 'spent.json')) and not goes_on:
        aside = out.with_name(f'{out.name}-{datetime.now():%Y%m%d-%H%M%S}')
        out.rename(aside)
        console.print(f'What lay in {out.name}/ is kept in {aside.name}/; delete it when you no longer need it', highlight=False)
    for folder in ('notebooks', 'figures'): (out/folder).mkdir(parents=True, exist_ok=True)
    if not goes_on: save(out, dict(size=size, wall_s=0, cpu_s=0))


def table(stages):
    "The stages of report.json as the table that the pipeline ends on"
    t = Table('stage', 'model', 'n', 'mean', '95 % interval', 'Crafter score', title='Achievements in an episode, on the same unseen worlds',
        box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for column in t.columns: column.no_wrap = True
    for name, s in stages.items():
        t.add_row(name, s['model'], str(s['n']), f"{s['mean_achievements']:.2f}", '{:.2f} to {:.2f}'.format(*s['ci95']), f"{s['crafter_score']:.1f} %")
    return t


def alone():
    "Hold this script for as long as it runs, so that no second pipeline writes into the same folder"
    own = open(__file__)
    try: fcntl.flock(own, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError: sys.exit('A pipeline is already running in this clone. Wait for it, or make another clone.')
    return own


def main():
    held = alone()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    asked = [o for o in ('QUICK', 'LONG') if os.environ.get(o, '') not in ('', '0')]
    if len(asked) > 1: sys.exit('QUICK=1 makes a small run and LONG=1 a long one: choose one of them.')
    size, out = asked[0].lower() if asked else 'full', ROOT/'out'
    notebooks = sorted((ROOT/'nbs/pipeline').glob('[0-9]_*.ipynb'))
    if not notebooks: sys.exit('There are no notebooks in nbs/pipeline: is this the whole repository?')
    begin(out, size)
    for nb in notebooks:
        with timed(nb, out, spent_so_far(out)): stage(nb, out)
    report = json.loads((out/'lab/report.json').read_text()) | spent_so_far(out)
    (out/'report.json').write_text(json.dumps(report, indent=1))
    console.print(table(report['stages']))
    held.close()


if __name__ == '__main__':
    try: main()
    except OSError as e: sys.exit(f'{e.filename or ROOT/"out"}: {e.strerror}. make pipeline needs to write into out/ and make room beside it.')
