"A server that fails in every way and a client that is killed: nothing is lost, nothing is there twice, nothing is made up"
import asyncio, importlib.util, time
from pathlib import Path

import pytest

from synth_lab.agent import Agent
from synth_lab.client import AsyncInferenceClient
from synth_lab.metrics import summary
from synth_lab.mock import FAULTS, mock, mock_process
from synth_lab.rollout import rollout
from synth_lab.traces import Store

ROOT = Path(__file__).parent.parent

def bench():
    "`bench/faults.py`, which measures the same at full size"
    spec = importlib.util.spec_from_file_location('faults', ROOT/'bench'/'faults.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

@pytest.mark.parametrize('processes', [1, 2])
def test_a_client_killed_three_times_among_faults_loses_nothing(tmp_path, processes):
    n,turns,at_once = 24,4,16
    told = bench().survive(tmp_path, n, turns, kills=3 if processes == 1 else 1, concurrency=at_once, processes=processes)
    assert told['wrong'] == {} and told['survived'] and sum(told['statuses'].values()) == n and told['statuses']['done'] >= n-2
    assert told['kinds'] > 8 and told['attempts_begun_anew'] == 0 and 0 <= told['lost_calls'] <= told['kills']*at_once

def play(store, faults, seeds=range(4), concurrency=4, wait=.01, **how):
    "Episodes of four turns against a server in this process; the fault of each call is given, or its share"
    app = mock(faults=faults, wait=wait, slow=.01)
    run = asyncio.run(rollout(store, AsyncInferenceClient(app=app), Agent('mock', max_tokens=64), seeds, run_id='r', max_turns=4, concurrency=concurrency, **how))
    return run,app

@pytest.fixture
def store(tmp_path, monkeypatch):
    (tmp_path/'settings.ini').write_text('[limits]\ntimeout = 5\nattempts = 4\nmax_wait = 0.02\n')
    monkeypatch.chdir(tmp_path)
    return Store(tmp_path/'lab')

@pytest.mark.parametrize('kind', [k for k,v in FAULTS.items() if v.outcome not in ('final', 'retry', 'ok')])
def test_a_bad_reply_is_a_turn_with_its_verdict_and_no_step(store, kind):
    run,app = play(store, [None, kind], [0])
    assert run.episodes[['status', 'turns', 'steps', 'unusable', 'calls']].values.tolist() == [['done', 4, 6, 1, 4]]
    assert run.episodes.verdicts[0] == {'ok':3, FAULTS[kind].outcome:1} and app.counts.total() == 4

@pytest.mark.parametrize('kind', [k for k,v in FAULTS.items() if v.outcome == 'retry'])
def test_a_failed_try_is_a_row_and_the_turn_goes_on(store, kind):
    run,app = play(store, [None, kind, kind], [0])
    assert run.episodes[['status', 'turns', 'steps', 'unusable', 'calls']].values.tolist() == [['done', 4, 8, 0, 4]]
    tries = store.sql('SELECT attempts, http_status, verdict FROM calls ORDER BY turn').values.tolist()
    assert tries == [[1, 200, 'ok'], [3, 200, 'ok'], [1, 200, 'ok'], [1, 200, 'ok']] and app.counts[kind] == 2

@pytest.mark.parametrize('kind', ['server_error', 'cut', 'half_body', 'retry_after'])
def test_a_server_that_fails_for_good_is_a_failure_and_no_zero(store, kind):
    "The first episode plays, the others meet a server that is broken: their returns are unknown, the mean is that of the first"
    run,_ = play(store, [None]*4 + [kind]*100, range(3), concurrency=1, max_failures=None)
    e,first = run.episodes,run.episodes.iloc[0]
    assert e.status.tolist() == ['done', 'error', 'error'] and e[1:][['return', 'n_achievements']].isna().all(axis=None)
    assert summary(e)[['n', 'errors', 'mean_return']].values.tolist() == [[1, 2, first['return']]] and e['return'].mean() == first['return']
    again,_ = play(store, (), range(3), resume=True)
    assert again.episodes.status.tolist() == ['done']*3 and again.episodes.attempt.tolist() == [1]*3

@pytest.mark.parametrize('processes', [1, 2])
def test_a_time_limit_ends_tries_and_is_the_reason(store, processes):
    "The server asks for a second each time; after .5 s nobody waits for it"
    (store.path.parent/'settings.ini').write_text('[limits]\ntimeout = 5\nattempts = 8\nmax_wait = 60\n')
    began = time.monotonic()
    if processes == 1: run,_ = play(store, {'retry_after':1.}, range(2), wait=30, time_limit=.5)
    else:
        with mock_process(faults={'retry_after':1.}, wait=30) as url:
            began = time.monotonic()
            agent,client = Agent('mock', max_tokens=64),AsyncInferenceClient(base_url=url)
            run = asyncio.run(rollout(store, client, agent, range(2), run_id='r', max_turns=4, time_limit=5, processes=2))
    assert run.stopped == f'time_limit={.5 if processes == 1 else 5} s is over' and time.monotonic()-began < (3 if processes == 1 else 15)
    assert run.episodes[['status', 'turns', 'error_type', 'error_message']].values.tolist() == [['cancelled', 0, 'LimitReached', f'{run.stopped} → resume the run with a higher limit']]*2
    assert set(store.sql('SELECT error_type FROM calls').error_type) <= {'RateLimited', 'EndpointSlow'}  # the latter for one that was not sent
    if processes == 2: return
    again,_ = play(store, (), range(2), resume=True)
    assert again.episodes.status.tolist() == ['done']*2 and again.episodes.attempt.tolist() == [1]*2

def test_the_tries_of_a_call_that_was_cut_off_are_in_the_trace(store):
    (store.path.parent/'settings.ini').write_text('[limits]\ntimeout = 5\nattempts = 99\nmax_wait = .2\n')
    run,app = play(store, {'server_error':1.}, [0], episode_timeout=.6)
    (turn,attempts,error,unknown), = store.sql('SELECT turn, attempts, error_type, input_tokens IS NULL FROM calls').values.tolist()
    assert (turn, error, run.episodes.status[0]) == (1, 'CancelledError', 'timeout') and attempts == app.counts.total() > 0 and unknown

def test_a_call_that_waited_for_a_place_was_not_sent_and_says_so(store):
    (store.path.parent/'settings.ini').write_text('[limits]\ntimeout = 5\nconcurrency = 1\n')
    app = mock(latency=2)
    async def stopped():
        await asyncio.wait_for(rollout(store, AsyncInferenceClient(app=app), Agent('mock'), range(3), run_id='r', max_turns=1), .5)
    with pytest.raises(TimeoutError): asyncio.run(stopped())
    calls = store.sql('SELECT attempts, error_message, input_tokens, cost_usd FROM calls ORDER BY attempts DESC').astype(object).fillna('?').values.tolist()
    assert calls == [[1, '', '?', '?']] + [[0, 'it was not sent: it still waited for a place at the endpoint', 0, 0.]]*2 and app.counts.total() == 1
    assert sorted(store.sql('SELECT input_tokens FROM episodes').input_tokens.isna()) == [False, False, True]

@pytest.mark.parametrize('processes', [1, 2])
def test_a_key_that_stands_in_no_environment_is_nowhere_on_disk(tmp_path, monkeypatch, processes):
    "A server sends the client's own key back in everything it says, also in `run.json`, where it was part of the prompt"
    monkeypatch.chdir(tmp_path)
    key = 'my-private-token-abcdefghijklmnop'
    (tmp_path/'echo.py').write_text(ECHO)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path/'settings.ini').write_text('[endpoint.echo]\napp = echo:app\n[limits]\nattempts = 2\nmax_wait = 0.02\n')
    store,client = Store(tmp_path/'lab'),AsyncInferenceClient(key, 'echo')
    run = asyncio.run(rollout(store, client, Agent('m', system=f'Say {key}.', history='full'), range(4), run_id='r', max_turns=3, processes=processes, max_failures=None))
    kept = b''.join(p.read_bytes() for p in store.path.rglob('*') if p.is_file())
    assert run.episodes.calls.sum() > 4 and key.encode() not in kept and kept.count(b'[redacted]') > 8

ECHO = '''
import orjson
async def app(scope, receive, send):
    said = dict(scope['headers'])[b'authorization'].decode().split()[1]
    asked = orjson.loads((await receive())['body'])
    body = dict(id=said, choices=[dict(finish_reason='stop', message=dict(content='key ' + said))]) if asked['seed'] % 4 else dict(error=dict(message=said))
    await send(dict(type='http.response.start', status=200 if 'choices' in body else 500, headers=[]))
    await send(dict(type='http.response.body', body=orjson.dumps(body)))
'''

def test_who_waits_and_why_is_on_the_screen(store, monkeypatch):
    lines = []
    monkeypatch.setattr('synth_lab.live._eyes', lambda live: (lambda: lines.append(live.line), lambda: None))
    (store.path.parent/'settings.ini').write_text('[limits]\ntimeout = 5\nattempts = 4\nmax_wait = 1\n')
    play(store, ['retry_after_fraction']*4, wait=.7)
    assert any(' wait: ' in o and '429' in o for o in lines)
