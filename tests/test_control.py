"Runs that are told something while they play: pauses, other numbers, and budgets that many share"
import asyncio, json, math, os, subprocess, sys, time
from contextlib import contextmanager

import pytest

import synth_lab.rollout as room
from synth_lab.agent import Agent
from synth_lab.client import AsyncInferenceClient, EndpointSlow
from synth_lab.control import Control, ControlError, LabSpent, controls, tune
from synth_lab.episode import RolloutError
from synth_lab.mock import mock
from synth_lab.rates import Rate, deal
from synth_lab.rollout import Processes, rollout
from synth_lab.serve import serving
from synth_lab.traces import Store

class Watch:
    "A server that keeps when its calls came, and how many were there then"
    def __init__(self, **kw): self.mock,self.came,self.now = mock(plays=['noop'], **kw),[],0

    async def __call__(self, scope, receive, send):
        if scope['type'] != 'http': return
        self.now += 1
        self.came.append((time.monotonic(), self.now))
        try: await self.mock(scope, receive, send)
        finally: self.now -= 1

    def most(self, since): return max((n for t,n in self.came if t > since), default=0)

    def fits(self, rate, extra, width=1.):
        "Whether in no window of `width` seconds more came than `rate` a second, and `extra`"
        times = [t for t,_ in self.came]
        return all(sum(t <= o < t+width for o in times) <= rate*width + extra for t in times)

@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Store(tmp_path/'lab')

@contextmanager
def served(app, endpoint='', limits='', price='1, 1, 1'):
    "`app` as endpoint `here` of a settings.ini, in the working folder"
    with serving(app) as url:
        text = f'[endpoint.here]\nbase_url = {url}\n{endpoint}\n[limits]\nmax_wait = 1\nattempts = 20\n{limits}\n' + f'[prices.here]\n* = {price}\n'*bool(price)
        open('settings.ini', 'w').write(text)
        yield

def start(store, run_id='r', seeds=range(6), max_turns=8, **kw):
    return asyncio.create_task(rollout(store, AsyncInferenceClient(base_url='here'), Agent('mock'), seeds, run_id=run_id, max_turns=max_turns, **kw))

async def until(what, seconds=20):
    clock = time.monotonic()
    while not what():
        assert time.monotonic() < clock + seconds
        await asyncio.sleep(.01)

async def quiet(app, n=1):
    "Wait until the server has no more than `n-1` calls for as long as a run may need to hear"
    await asyncio.sleep(.8)
    await until(lambda: app.now < n)

def turns(store): return store.rows('SELECT episode_id, list(turn ORDER BY turn) AS t FROM calls WHERE verdict IS NOT NULL GROUP BY ALL ORDER BY episode_id')

def whole(store, episodes=6, n=8): return [o['t'] for o in turns(store)] == [[*range(1, n+1)]]*episodes

# ---- what may be said, and to whom

@contextmanager
def playing(store, **opening):
    with store.run('r', dict(model='m'), [dict(episode_id='r:0:0', seed=0, sample=0)]) as writer:
        control = Control(writer.folder, **dict(concurrency=4, paused=False, priced=True) | opening)
        yield control
        control.close()

@pytest.mark.parametrize('asked', [dict(concurrency=0), dict(concurrency=2.5), dict(concurrency=True), dict(paused=1), dict(token_limit=0), dict(cost_limit=-1.), dict(time_limit='soon'),
    dict(time_limit=math.nan), {}])
def test_what_cannot_be_meant_is_refused_where_it_is_said(store, asked):
    with playing(store) as control:
        with pytest.raises(ControlError, match='expected|nothing was asked'): tune(store, 'r', **asked)
        assert control.changes() == {}

def test_a_run_that_nobody_plays_cannot_be_told(store):
    with pytest.raises(ControlError, match="no run 'r'"): tune(store, 'r', paused=True)
    with playing(store): assert tune(store.path, 'r', paused=True) == dict(concurrency=4, paused=True)
    with pytest.raises(ControlError, match='not being played now'): tune(store, 'r', paused=False)
    with store.run('r', dict(model='m'), [dict(episode_id='r:0:0', seed=0, sample=0)], resume=True) as writer: Control(writer.folder, concurrency=4)
    with pytest.raises(ControlError, match='not being played now'): tune(store, 'r', paused=True) # killed: it wrote no end, and its lock is free

def test_a_cost_that_nobody_knows_cannot_be_limited_later(store):
    with playing(store, priced=False):
        with pytest.raises(ControlError, match='price'): tune(store, 'r', cost_limit=1)
        assert tune(store, 'r', cost_limit=math.inf)['cost_limit'] == math.inf

def test_a_damaged_file_is_told_once_and_what_is_whole_counts(store, capsys):
    with playing(store) as control:
        with open(control.file, 'a') as f: f.write('{"event": "tuned", "concur')
        assert control.changes() == {} and capsys.readouterr().err == '' # perhaps the rest is still to come
        tune(store, 'r', concurrency=3)
        assert control.changes() == dict(concurrency=3) and capsys.readouterr().err.count('the run goes on as it was') == 1
        with open(control.file, 'a') as f: f.write('{"event": "tuned", "concurrency": "many"}\n[1]\n\n{"event": "tuned", "paused": true}\n')
        assert control.changes() == dict(paused=True) and capsys.readouterr().err == ''
        control.file.write_text('')
        assert control.changes() == {}
        tune_line = json.dumps(dict(event='tuned', paused=False)) + '\n'
        with open(control.file, 'a') as f: f.write(tune_line)
        assert control.changes() == dict(paused=False)

def test_the_file_is_the_history(store):
    with playing(store):
        tune(store, 'r', concurrency=2, token_limit=100)
        tune(store, 'r', token_limit=math.inf)
    found = controls(store, 'r')
    assert found.event.tolist() == ['begun', 'tuned', 'tuned', 'ended'] and found.token_limit.tolist()[1:3] == [100, math.inf] and found.concurrency.tolist()[:2] == [4, 2]

def test_what_a_run_was_told_before_a_resume_does_not_bind_it(store):
    app = Watch(latency=.05)
    async def go():
        with served(app):
            task = start(store, seeds=range(2), max_turns=4)
            await until(lambda: app.came)
            tune(store, 'r', token_limit=1)
            await task
            assert set((await start(store, seeds=range(2), max_turns=4, resume=True)).episodes.status) == {'done'}
    asyncio.run(go())

# ---- pauses

@pytest.mark.parametrize('how', [{}, dict(processes=2), dict(processes=2, token_limit=10**9)])
def test_a_paused_run_makes_no_call_and_loses_nothing(store, how):
    "Every seventh call fails first and is tried again"
    app = Watch(latency=.05, faults=dict(bad_gateway=.15))
    async def go():
        with served(app):
            task = start(store, concurrency=6, **how)
            await until(lambda: len(app.came) > 12)
            tune(store, 'r', paused=True)
            await quiet(app)
            n = len(app.came)
            assert n < 6*8 and not task.done()
            await asyncio.sleep(1.)
            assert len(app.came) == n and not task.done()
            tune(store, 'r', paused=False)
            return await task
    run = asyncio.run(go())
    assert whole(store) and set(run.episodes.status) == {'done'} and run.episodes.calls.sum() == 48 and app.mock.counts['good'] == 48

@pytest.mark.parametrize('how', [{}, dict(processes=2)])
def test_a_call_that_waits_for_another_try_does_not_go_out_during_a_pause(store, how):
    app = Watch(faults=['retry_after_ms']*2, wait=1.)
    async def go():
        with served(app):
            task = start(store, seeds=range(2), max_turns=2, **how)
            await until(lambda: len(app.came) == 2)
            tune(store, 'r', paused=True)
            await asyncio.sleep(2.5)
            n = len(app.came)
            tune(store, 'r', paused=False)
            return await task,n
    run,n = asyncio.run(go())
    assert n == 2 and len(app.came) == 6 and set(run.episodes.status) == {'done'} and set(store.sql('SELECT attempts FROM calls WHERE turn = 1').attempts) == {2}

def test_a_pause_takes_no_time_from_the_run_or_its_episodes(store):
    app = Watch(latency=.05)
    async def go():
        with served(app):
            task = start(store, seeds=range(2), time_limit=4., episode_timeout=4.)
            await until(lambda: app.came)
            tune(store, 'r', paused=True)
            await asyncio.sleep(4.5)
            tune(store, 'r', paused=False)
            return await task
    run = asyncio.run(go())
    assert set(run.episodes.status) == {'done'} and run.stopped is None and run.episodes.wall_s.max() < 4

def test_a_run_that_waits_for_its_server_can_be_paused_and_says_who_waits(store, monkeypatch):
    seen = []
    monkeypatch.setattr(room, 'on_screen', lambda live: (seen.append(live), room.suppress())[1])
    app = Watch(latency=.05)
    async def go():
        with served(app):
            task = start(store, seeds=range(3))
            await until(lambda: app.came)
            tune(store, 'r', paused=True)
            await quiet(app)
            line = seen[0].line
            tune(store, 'r', paused=False)
            await task
            return line
    assert '3 wait: paused' in asyncio.run(go()) and seen[0].gate.waiting == 0

@pytest.mark.parametrize('how', [{}, dict(processes=2)])
def test_a_run_goes_on_with_fewer_calls_than_it_was_paused_with(store, how):
    app = Watch(latency=.1)
    async def go():
        with served(app):
            task = start(store, concurrency=6, **how)
            await until(lambda: app.most(0) == 6)
            tune(store, 'r', paused=True)
            await quiet(app)
            clock = time.monotonic()
            tune(store, 'r', paused=False, concurrency=2)
            return await task,app.most(clock)
    run,most = asyncio.run(go())
    assert most == 2 and set(run.episodes.status) == {'done'} and whole(store)

def test_a_paused_run_hears_ctrl_c(store):
    app = Watch(latency=.05)
    async def go():
        with served(app):
            task = start(store)
            await until(lambda: app.came)
            tune(store, 'r', paused=True)
            await quiet(app)
            task.cancel()
            with pytest.raises(asyncio.CancelledError): await task
            assert set((await start(store, resume=True)).episodes.status) == {'done'}
    asyncio.run(go())
    assert whole(store)

# ---- other numbers

@pytest.mark.parametrize('how', [{}, dict(processes=2)])
def test_fewer_and_more_calls_at_once_are_seen_at_the_server(store, how):
    app = Watch(latency=.1)
    async def go():
        with served(app):
            task = start(store, seeds=range(12), max_turns=12, concurrency=8, **how)
            await until(lambda: app.most(0) == 8)
            tune(store, 'r', concurrency=2)
            await quiet(app, 3)
            clock = time.monotonic()
            await asyncio.sleep(.7)
            few = app.most(clock)
            tune(store, 'r', concurrency=6)
            await asyncio.sleep(.8)
            clock = time.monotonic()
            await until(lambda: app.most(clock) >= 6)
            assert not task.done()
            return few,await task,app.most(clock)
    few,run,more = asyncio.run(go())
    assert few == 2 and more == 6 and set(run.episodes.status) == {'done'} and whole(store, 12, 12)

def test_who_was_begun_goes_on_before_anybody_new(store):
    app = Watch(latency=.05)
    async def go():
        with served(app):
            task = start(store, seeds=range(8), concurrency=4)
            await until(lambda: len(app.came) > 8)
            tune(store, 'r', concurrency=1)
            return await task
    assert set(asyncio.run(go()).episodes.status) == {'done'}
    order = store.rows('SELECT episode_id, min(started_at) AS a, max(started_at) AS z FROM calls GROUP BY ALL ORDER BY a')
    assert max(o['z'] for o in order[:4]) < min(o['a'] for o in order[4:])

@pytest.mark.parametrize('how', [{}, dict(processes=2)])
def test_limits_are_raised_and_lowered_while_it_runs(store, how):
    app = Watch(latency=.2)
    async def go():
        with served(app):
            task = start(store, concurrency=6, token_limit=30_000, max_turns=20, **how)
            await until(lambda: app.came)
            tune(store, 'r', token_limit=math.inf, time_limit=60)
            await until(lambda: len(app.came) > 50)
            tune(store, 'r', cost_limit=1e-9)
            return await task
    run = asyncio.run(go())
    n = store.rows('SELECT sum(input_tokens + output_tokens) AS n FROM calls')[0]['n']
    assert n > 30_000 and 'cost_limit=' in run.stopped and 'cancelled' in set(run.episodes.status) and run.episodes.turns.sum() < 6*20
    assert (run.episodes[run.episodes.status == 'cancelled'].error_type == 'LimitReached').all()

# ---- what an endpoint takes a minute

class Apart(Processes): apart = True # as if they were on machines of their own

@pytest.mark.parametrize('how,extra', [({}, 2), (dict(processes=2), 2), (dict(executor=Apart(2)), 3)])
def test_a_rate_holds_at_the_servers_clock(store, how, extra):
    app = Watch(latency=.02)
    async def go():
        with served(app, 'requests_per_minute = 900'): return await start(store, max_turns=6, **how)
    assert set(asyncio.run(go()).episodes.status) == {'done'} and len(app.came) == 36 and set(app.mock.counts) == {'good'}
    assert app.fits(15, extra) and app.came[-1][0] - app.came[0][0] < 36/15*3

def test_two_runs_on_one_machine_share_a_rate(store):
    app = Watch()
    code = f'''
import asyncio
from synth_lab.agent import Agent
from synth_lab.client import AsyncInferenceClient
from synth_lab.rollout import rollout_sync
from synth_lab.traces import Store
rollout_sync(Store({str(store.path)!r}), AsyncInferenceClient(base_url='here'), Agent('mock'), range(4), run_id='other', max_turns=5)'''
    async def go():
        with served(app, 'requests_per_minute = 600'):
            other = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.DEVNULL)
            await until(lambda: app.came, 60)
            await start(store, seeds=range(4), max_turns=5)
            assert await asyncio.to_thread(other.wait, 60) == 0
    asyncio.run(go())
    assert len(app.came) == 40 and app.fits(10, 4) # the first calls of a new process take longer on their way, and arrive together; two rates would be twenty

def test_tokens_a_minute_hold_whatever_was_guessed(store):
    "The first calls guess, the others know: 1,000 tokens a call at 5,000 a second are five calls"
    app = Watch()
    async def go():
        with served(app, 'tokens_per_minute = 300000'): await start(store, max_turns=6)
    asyncio.run(go())
    used = store.rows('SELECT input_tokens + output_tokens AS n FROM calls')
    came,mean,dearest = [t for t,_ in app.came],sum(o['n'] for o in used)/len(used),max(o['n'] for o in used)
    assert all(sum(t <= o < t+1 for o in came)*mean <= 5_000 + 2*dearest for t in came) and len(came) == 36

def test_whoever_waits_for_a_rate_is_told_why_and_not_beyond_the_deadline(store):
    app = Watch()
    async def go():
        with served(app, 'requests_per_minute = 30'):
            client,ask = AsyncInferenceClient(base_url='here'),dict(model='m', messages=[])
            await client.post(ask)
            with pytest.raises(EndpointSlow, match=r'requests_per_minute = 30 of \[endpoint.here\]'): await client.post(ask, deadline=time.monotonic() + .5)
            late = asyncio.create_task(client.post(ask))
            await until(lambda: client.gate.waiting)
            assert 'requests_per_minute' in client.gate.why and len(app.came) == 1
            late.cancel()
            await asyncio.wait([late])
            assert (client.gate.running, client.gate.waiting) == (0, 0)
    asyncio.run(go())

def test_a_call_that_was_refused_used_no_tokens():
    rate = Rate('m', tokens=60)
    assert rate.take(30) == 0 and rate.take() > 25
    rate.settle(30, 0)
    assert rate.take() < 1

def test_parts_never_add_up_to_more_than_the_whole_and_follow_who_asks():
    parts = [1/3]*3
    for wants in ([4, 0, 0], [4, 0, 0], [0, 1, 1], [0, 1, 1], [0, 0, 0], [5, 3, 1], [5, 3, 1], [0, 0, 7], [0, 0, 7]):
        before,parts = parts,deal(parts, wants)
        assert sum(max(a, b) for a,b in zip(before, parts)) <= 1 + 1e-9 # whoever gets more does so from what was free before
    assert parts == pytest.approx([0, 0, 1])

# ---- what a lab may cost

COST = 'cost_limit = .02' # at 1 dollar for 1,000 tokens, some 40 calls

def dollars(store): return store.rows('SELECT sum(cost_usd) AS c FROM calls')[0]['c']

def test_two_runs_at_once_share_what_the_lab_may_cost(store):
    app = Watch(latency=.2)
    code = f'''
from test_control import *
if __name__ == '__main__': asyncio.run(rollout(Store({str(store.path)!r}), AsyncInferenceClient(base_url='here'), Agent('mock'), range(3), run_id='other', max_turns=500))'''
    async def go():
        with served(app, '', 'cost_limit = .05', '1, 1, 1'):
            env = os.environ | dict(PYTHONPATH=os.path.dirname(__file__))
            other = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.DEVNULL, env=env)
            await until(lambda: app.came, 60)
            run = await start(store, seeds=range(3), max_turns=500)
            assert await asyncio.to_thread(other.wait, 60) == 0
            third = await start(store, 'third', seeds=range(3))
            return run,third
    run,third = asyncio.run(go())
    e = store.sql('SELECT run_id, status, error_message, cost_usd FROM episodes')
    assert set(e.status) == {'cancelled'} and e.error_message.str.contains(r'settings.ini: \[limits\] cost_limit = 0.05 is reached').all() and '[limits] cost_limit' in run.stopped
    costs = e.groupby('run_id').cost_usd.sum()
    assert .05 <= dollars(store) < .065 and costs['r'] > .01 and costs['other'] > .01 and third.episodes.turns.sum() == 0

def test_a_lab_that_may_cost_more_goes_on_where_it_stopped(store):
    app = Watch()
    async def go():
        with served(app, '', 'cost_limit = .01'):
            assert '[limits] cost_limit' in (await start(store)).stopped
            cost = dollars(store)
            text = open('settings.ini').read()
            open('settings.ini', 'w').write(text.replace('= .01', '= 9'))
            run = await start(store, resume=True)
            return cost,run
    cost,run = asyncio.run(go())
    assert .01 <= cost < .016 and run.stopped is None and whole(store) and app.mock.counts['good'] == 48

def test_a_lab_with_a_limit_refuses_what_has_no_price_and_lets_play_what_is_free(store):
    app = Watch()
    async def go():
        with served(app, '', COST, price=''):
            with pytest.raises(RolloutError, match=r'settings.ini: \[limits\] cost_limit needs the price'): await start(store)
            assert app.came == [] and not (store.path/'runs').exists()
        with served(app, '', COST, price='0, 0, 0'): return await start(store)
    assert set(asyncio.run(go()).episodes.status) == {'done'} and not (store.path/'spent').exists()

def test_what_others_cost_is_in_their_traces_or_their_files_and_counts_once(store):
    async def go():
        with served(Watch()): await start(store, 'old', seeds=range(2))
    asyncio.run(go())
    cost,spent = dollars(store),LabSpent(store, 'new', look=True)
    assert cost > 0 and spent.others == pytest.approx(cost)
    LabSpent(store, 'old', look=False).tell(cost + 1)
    LabSpent(store, 'new', look=False).tell(5.)
    assert spent.others == pytest.approx(cost + 1)
