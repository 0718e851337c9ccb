"What a run shows in a notebook, in a terminal, and that a broken display breaks nothing else"
import asyncio, os, pty, re, subprocess, sys
from types import SimpleNamespace

import pytest

from synth_lab.agent import Agent
from synth_lab.live import EpisodeEvent, Live, TurnEvent, half_width, panel_html
from synth_lab.metrics import mean_ci
from synth_lab.rollout import Run, rollout
from synth_lab.traces import Store
from test_rollout import Dice

def turn(n=1, **how): return TurnEvent(**dict(run_id='r', episode_id='r:0:0', seed=0, turn=n, verdict='ok', thought='', actions=('do',), effects=('+1 wood',),
    unlocked=('collect_wood',), reward=1., usage=dict(prompt_tokens=10, completion_tokens=2), cost=.01, cached=False, latency_ms=1.) | how)

@pytest.mark.parametrize('scores', [{0:[1], 1:[3]}, {0:[1, 2, 3], 1:[3], 2:[0, 0]}, {s:[s % 4, 2] for s in range(9)}])
def test_the_interval_is_that_of_the_metrics(scores):
    flat = [(s, o) for s,found in scores.items() for o in found]
    known = mean_ci([o for _,o in flat], [s for s,_ in flat])
    assert half_width({s:(len(o), sum(o)) for s,o in scores.items()}) == pytest.approx(known.hi - known.value)

def test_sums_with_an_unknown_part_say_so():
    live = Live('m', 2)
    live.turn(turn())
    live.turn(turn(2, usage={}, cost=None))
    assert live.tokens == 12 and live.cost is None and 'cost unknown' in live.line and '$' not in live.line

def test_who_waits_why_and_for_how_long_stands_before_all_else(monkeypatch):
    now = 1000.
    monkeypatch.setattr('synth_lab.live.time', SimpleNamespace(monotonic=lambda: now))
    live = Live('m', 3, SimpleNamespace(waiting=2, why='http://x answered 429: slow down'))
    for now,episode in (1000., 'r:0:0'), (1010., 'r:1:0'), (1020., 'r:2:0'): live.asks(episode)
    now = 1040.
    live.turn(turn(episode_id='r:0:0'))
    assert live.line.split(' · ')[:3] == ['m: 0/3 episodes', '2 wait: http://x answered 429: slow down', 'r:1:0 asks for 30 s']
    assert '2 wait: http://x answered 429: slow down · r:1:0 asks for 30 s' in panel_html(live)
    live.ended(EpisodeEvent('r', 'r:1:0', 1, 'done', 1, ()))
    assert live.line.split(' · ')[2] == 'r:2:0 asks for 20 s'
    live.gate.waiting = 0
    live.ended(EpisodeEvent('r', 'r:2:0', 2, 'done', 1, ()))
    assert 'wait' not in live.line and 'asks' not in live.line and '>nobody</td>' in panel_html(live)

def test_the_text_that_stays_says_that_the_cost_is_unknown_and_counts_what_was_before():
    live = Live('m', 2)
    live.used(12, .02)
    live.turn(turn())
    assert (live.calls, live.tokens, str(live)) == (1, 24, 'm: 0/2 episodes · 2 calls, $0.0300')
    live.used(None, None)
    assert str(live) == 'm: 0/2 episodes · 3 calls, cost unknown'

def test_a_resumed_run_counts_all_its_calls(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr('synth_lab.live._eyes', lambda live: (lambda: None, lambda: told.append(str(live))))
    for n,how in ((3, {}), (6, dict(resume=True))):
        run = asyncio.run(rollout(Store(tmp_path/'lab'), Dice(), Agent('dice'), range(2), run_id='r', max_turns=6, concurrency=1, cost_limit=n/1000, **how))
    assert told == ['dice: 2/2 episodes, 2 cancelled · 3 calls, $0.0030', 'dice: 2/2 episodes, 1 cancelled · 0.00 achievements an episode · 6 calls, $0.0060'] and run.episodes.calls.sum() == 6

def test_an_episode_keeps_its_line_of_the_panel_until_it_ends():
    live = Live('m', 9)
    def shown(): return [(o.episode_id, o.turn) for o in live.recent]
    for n in range(6): live.turn(turn(episode_id=f'r:{n}:0'))
    height = panel_html(live).count('<tr>')
    assert shown() == [(f'r:{n}:0', 1) for n in range(4)]
    live.turn(turn(episode_id='r:1:0', turn=2))
    live.ended(EpisodeEvent('r', 'r:2:0', 2, 'done', 1, ()))
    assert shown() == [('r:0:0', 1), ('r:1:0', 2), ('r:2:0', 1), ('r:3:0', 1)]
    live.turn(turn(episode_id='r:5:0', turn=2))
    assert shown() == [('r:0:0', 1), ('r:1:0', 2), ('r:5:0', 2), ('r:3:0', 1)]
    assert panel_html(live).count('<tr>') == panel_html(Live('m', 9)).count('<tr>') == height

def test_nothing_in_the_panel_is_markup():
    live = Live('m', 2)
    live.turn(turn(episode_id='<b>r</b>', verdict='<i>odd</i>'))
    assert '<b>' not in panel_html(live) and '<i>' not in panel_html(live) and '&lt;b&gt;r' in panel_html(live)

def test_only_what_was_played_to_its_end_is_in_the_score():
    live = Live('m', 3)
    for status,found in dict(done=('a', 'b'), truncated=('a',), error=()).items(): live.ended(EpisodeEvent('r', status, 0, status, 1, found))
    assert str(live) == 'm: 3/3 episodes, 1 truncated, 1 error · 2.00 achievements an episode · 0 calls'

def test_a_display_that_breaks_is_told_and_the_run_goes_on(tmp_path, monkeypatch):
    def broken(): raise OSError('no screen')
    monkeypatch.setattr('synth_lab.live._eyes', lambda live: (broken, lambda: None))
    with pytest.warns(UserWarning, match='the display of dice stopped.*no screen'):
        run = asyncio.run(rollout(Store(tmp_path/'lab'), Dice(), Agent('dice'), range(2), run_id='r', max_turns=3))
    assert run.episodes.status.tolist() == ['done']*2

PLAYED = '''
import sys; sys.path.insert(0, {here!r})
from test_rollout import *
run = {door}(Store({lab!r}), Dice(lambda n, p: asyncio.sleep(.05)), Agent('dice'), range(8), run_id='r', max_turns=6, concurrency=4)
'''

def heard_in_a_notebook(code):
    "What a cell with `code` sends, up to the end of the cell"
    manager = pytest.importorskip('jupyter_client.manager')
    kernel,client = manager.start_new_kernel(kernel_name='python3')
    try:
        client.execute(code)
        heard = []
        while not heard or (heard[-1]['msg_type'], heard[-1]['content'].get('execution_state')) != ('status', 'idle'): heard.append(client.get_iopub_msg(timeout=60))
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)
    return heard

BROKEN = '''
import sys; sys.path.insert(0, {here!r})
from test_rollout import *
lab = Store({lab!r})
def broken(e): raise ZeroDivisionError('mine')
def refused(n, p): raise AuthError('no', status=401)
'''

@pytest.mark.parametrize('call', ['await rollout(lab, Dice(refused), {how})', 'rollout_sync(lab, Dice(refused), {how})', 'async for o in stream(lab, Dice(refused), {how}): pass',
    'await rollout(lab, Dice(), {how}, on_turn=broken)', 'rollout_sync(lab, Far(), {how}, on_turn=broken, processes=2)'])
def test_an_error_of_a_run_is_one_of_the_cell(tmp_path, call):
    "Not a text on stderr, which is all that a notebook makes of an error whose context is a group"
    heard = heard_in_a_notebook(BROKEN.format(here=os.path.dirname(__file__), lab=str(tmp_path/'lab')) + call.format(how="Agent('dice'), range(2), max_turns=3"))
    assert [o['content']['ename'] for o in heard if o['msg_type'] == 'error'] == ['AuthError' if 'refused' in call else 'ZeroDivisionError']
    assert not [o for o in heard if o['msg_type'] == 'stream']

def test_a_stream_that_is_left_leaves_a_text_before_its_cell_ends(tmp_path):
    code = PLAYED.format(here=os.path.dirname(__file__), lab=str(tmp_path/'lab'), door='stream').replace('run = ', 'async for o in ')
    heard = heard_in_a_notebook(code.rstrip() + ': break')
    left, = [o['content']['data'] for o in heard if o['msg_type'] == 'update_display_data']
    assert re.fullmatch(r'dice: 0/8 episodes · \d calls, \$0.00\d0', left['text/markdown']) and 'application/vnd.jupyter.widget-view+json' not in left

@pytest.mark.parametrize('door', ['await rollout', 'rollout_sync'])
def test_a_notebook_has_a_panel_while_it_runs_and_a_text_afterwards(tmp_path, door):
    heard = heard_in_a_notebook(PLAYED.format(here=os.path.dirname(__file__), lab=str(tmp_path/'lab'), door=door))
    said = [(o['msg_type'], o['content'].get('data')) for o in heard]
    shown, = [data for kind,data in said if kind == 'display_data']
    assert shown['text/markdown'] == 'dice: 0/8 episodes · 0 calls' and 'application/vnd.jupyter.widget-view+json' in shown
    changes = [data['state']['value'] for kind,data in said if kind == 'comm_msg' and data.get('method') == 'update']
    assert any(re.search(r'>\d/8<.*r:\d:0, turn \d<', str(o)) for o in changes) and len(changes) < 20
    left, = [data for kind,data in said if kind == 'update_display_data']
    assert left['text/markdown'].startswith('dice: 8/8 episodes · ') and left['text/markdown'].endswith(' · 48 calls, $0.0480')
    opened,closed = ([o['content']['comm_id'] for o in heard if o['msg_type'] == kind] for kind in ('comm_open', 'comm_close'))
    assert set(opened) == set(closed) and not [o for o in heard if o['msg_type'] in ('stream', 'error')]

@pytest.mark.parametrize('door,table', [('rollout_sync', True), ('asyncio.run(rollout', False)])
def test_a_script_in_a_pipe_prints_the_table_and_nothing_else(tmp_path, door, table):
    "The coroutine is for programs, whose output is their own"
    code = PLAYED.format(here=os.path.dirname(__file__), lab=str(tmp_path/'lab'), door=door).rstrip() + ')'*(not table)
    done = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, timeout=60)
    run = Run('r', 'dice', Store(tmp_path/'lab'))
    assert (done.returncode, done.stderr) == (0, '') and done.stdout == (f'{run}\n' if table else '') and '| dice | 8 | 8 |' in str(run)

def test_a_terminal_has_one_line_that_changes(tmp_path):
    ours,theirs = pty.openpty()
    code = PLAYED.format(here=os.path.dirname(__file__), lab=str(tmp_path/'lab'), door='rollout_sync')
    done = subprocess.run([sys.executable, '-c', code], stderr=theirs, stdout=subprocess.PIPE, env=os.environ | dict(TERM='xterm', COLUMNS='150'), timeout=60)
    os.close(theirs)
    said = os.read(ours, 1<<20).decode()
    assert done.returncode == 0 and done.stdout.decode().startswith('Run `r`') # into a pipe
    assert '4/8 episodes' in said or '0/8 episodes' in said
    assert said.count('\n') <= 2 and said.rstrip('\x1b[?25h\r\n').endswith('48 calls, $0.0480')
