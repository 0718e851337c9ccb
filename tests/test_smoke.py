"The smoke test against our task app, against ones that are broken, and against policies that fail"
import os, re, signal, socket, threading, time
from contextlib import contextmanager

import httpx, orjson, pytest

import synth_lab.smoke
from synth_lab.configs import SmokeConfig
from synth_lab.core import LabError
from synth_lab.lab import Lab
from synth_lab.mock import Said, mock
from synth_lab.serve import port_holder, serving
from synth_lab.smoke import PLAN, PolicyServer, smoke, synthetic
from synth_lab.taskapp import create_task_app
from synth_lab.tasks import Outcome, misfit
from synth_lab.tools import interact_many

@pytest.fixture(scope='module')
def lab(tmp_path_factory): return Lab(tmp_path_factory.mktemp('lab'))

@contextmanager
def at(app):
    with serving(app) as url: yield url.removesuffix('/v1')

def run(lab, app=None, say=None, smoke_with=(), **config):
    "A smoke test of `app`, and its lines"
    lines = []
    def tell(o):
        lines.append(o)
        if say: say(o)
    with at(app or create_task_app()) as url:
        return smoke(SmokeConfig(**dict(task_url=url, max_steps=2) | config), say=tell, lab=lab, **dict(smoke_with)),lines

def altered(change):
    "Our task app, whose answers to rollouts are changed on the way out"
    app = create_task_app()
    async def asgi(scope, receive, send):
        if scope['type'] != 'http' or scope['path'] != '/rollout': return await app(scope, receive, send)
        sent = []
        async def keep(o): sent.append(o)
        await app(scope, receive, keep)
        answer = orjson.loads(b''.join(o.get('body', b'') for o in sent))
        change(answer)
        body = orjson.dumps(answer)
        await send(dict(type='http.response.start', status=sent[0]['status'], headers=[(b'content-type', b'application/json')]))
        await send(dict(type='http.response.body', body=body))
    return asgi

def test_lines_are_those_of_the_documents(lab):
    r,lines = run(lab, max_steps=10, return_trace=True, env_name='crafter', policy_name='crafter-react')
    forms = [r'\[mock-rl\] server ready http://127\.0\.0\.1:\d+ backend=synthetic', r'>> POST /rollout run_id=smoke-\S+ env=crafter policy=crafter-react',
        r'\[mock-rl\] ← request backend=synthetic model=gpt-5-nano messages=2',
        r'\[mock-rl\] → response tool_calls=1 backend=synthetic latency=\d+\.\dms cost=\$0',
        r'  TOOL_CALL\[9\]: interact_many\(\{"actions":\["move_right",',
        r'  rollout\[0:0\] episodes=1 steps=10 mean_return=2\.0000', r'  ✓ 10 tool calls executed',
        r'✓ Smoke rollouts complete$', r'  successes=1/1 total_steps=10 v3_traces=1/1 nonzero_returns=1/1$', r'\[mock-rl\] server stopped']
    found = [next(i for i,o in enumerate(lines) if re.match(f, o)) for f in forms]
    assert found == sorted(found)
    assert (r.exit_code, r.steps, r.cost, len(r.calls)) == (0, 10, 0., 10)
    assert r.calls['latency_ms'].between(0, 5000).all() and r.calls['valid'].all()

def _lose_call(o):
    history = o['trace']['event_history']
    history.remove(next(e for e in history if e.get('call_records')))

def _no_rewards(o):
    for s in o['trajectories'][0]['steps']: s['reward'] = 0.
    o['metrics'].update(mean_return=0., episode_returns=[0.])

BROKEN = {
    'without the id of the rollout': lambda o: o['pipeline_metadata'].update(inference_url='http://elsewhere/v1?cid=other'),
    'mean_return is 7': lambda o: o['metrics'].update(mean_return=7.),
    'info.meta': lambda o: o['trajectories'][0]['steps'][0]['info'].pop('meta'),
    'there is no trace': lambda o: o.update(trace=None),
    'tells of 1 tool calls, the policy made 2': _lose_call,
    'the trace cannot be read': lambda o: o['trace'].update(event_history=[1]),
    'trajectories.0': lambda o: o.update(trajectories=['none']),
    'metrics.num_steps': lambda o: o['metrics'].update(num_steps='many'),
    'no step was played': lambda o: o.update(trajectories=[dict(o['trajectories'][0], steps=[], length=0)])}

@pytest.mark.parametrize('said', BROKEN)
def test_every_check_counts(lab, said):
    r,lines = run(lab, altered(BROKEN[said]), return_trace=True)
    assert r.exit_code == 3 and r.successes == 0 and any(said in o for o in r.failures), r
    assert any(o.startswith('  ✗') for o in lines) and '✗ Smoke rollouts failed' in lines

def test_returns_of_zero_count_when_all_are(lab):
    r,_ = run(lab, smoke_with=dict(parallel=2), batch_size=4) # worlds 0 and 3: something, nothing
    assert (r.exit_code, r.attempts, r.nonzero_returns) == (0, 4, 3)
    r,_ = run(lab, altered(_no_rewards))
    assert (r.exit_code, r.successes) == (3, 1) and 'no rollout brought a return' in r.failures[0]

def test_task_app_that_does_not_ask(lab):
    elsewhere = {}
    app = create_task_app()
    async def asgi(scope, receive, send): # asks another policy than the one it is told to
        async def changed():
            message = await receive()
            if scope.get('path') == '/rollout': message['body'] = re.sub(rb'http://127\.0\.0\.1:\d+/v1', elsewhere['url'].encode(), message.get('body', b''))
            return message
        await app(scope | dict(headers=[o for o in scope.get('headers', ()) if o[0] != b'content-length']), changed, send)
    with at(mock(plays=['do'])) as elsewhere['url']: r,_ = run(lab, asgi)
    assert r.exit_code == 3 and any('the policy was never asked' in o for o in r.failures)

def test_policy_that_fails(lab):
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        url = f'http://127.0.0.1:{s.getsockname()[1]}/v1'
    r,lines = run(lab, mock_backend=url)
    assert r.exit_code == 3 and len(r.calls) == 1 and url in r.failures[0] # asked once
    assert any(o.startswith('[mock-rl] ✗ policy failed') for o in lines)

def test_calls_that_do_not_fit(lab):
    faults = ['invalid_action', 'malformed', 'unknown_tool', 'no_call', None]
    with serving(mock(plays=['do'], faults=faults)) as url: r,lines = run(lab, mock_backend=url, max_steps=5)
    assert list(r.calls['valid']) == [False]*4 + [True] and list(r.calls['tool_calls']) == [1, 1, 1, 0, 1]
    assert r.exit_code == 3 and '4 of 5 replies do not fit the tools; call 0: interact_many' in r.failures[0]
    assert 'calls=5 valid=1/5' in repr(r)

def test_openai_is_asked_with_its_key_which_no_line_shows(lab, monkeypatch):
    key = 'sk-smoke-0123456789abcdef'
    upstream = mock(plays=['do'], key=key)
    with serving(upstream) as url:
        monkeypatch.setenv('SMOKE_OPENAI_ENDPOINT', url)
        monkeypatch.setenv('SMOKE_OPENAI_API_KEY', key)
        r,lines = run(lab, mock_backend='openai', model='gpt-4o-mini', return_trace=True)
        monkeypatch.setenv('SMOKE_OPENAI_API_KEY', key.upper())
        wrong,told = run(lab, mock_backend='openai', model='gpt-4o-mini')
    assert len(r.calls) == 2 and upstream.calls[0]['asked']['model'] == 'gpt-4o-mini' and any('backend=openai model=gpt-4o-mini' in o for o in lines)
    assert wrong.exit_code == 3 and 'answered 401' in wrong.failures[0]
    assert key not in ''.join(lines) and key.upper() not in ''.join(told) + repr(wrong)

def test_cost_is_that_of_the_price_list_and_unknown_without_one(lab, monkeypatch):
    with serving(mock(plays=['do'])) as url: r,_ = run(lab, mock_backend=url)
    assert r.cost is None and 'cost=unknown' in repr(r)
    with serving(mock(plays=['do'])) as url:
        monkeypatch.setenv('OPENAI_BASE_URL', url)
        monkeypatch.setenv('OPENAI_API_KEY', 'sk-0123456789abcdef')
        r,_ = run(lab, mock_backend='openai', model='gpt-4o-mini')
    sent,got = r.calls['input_tokens'].sum(),r.calls['output_tokens'].sum()
    assert r.cost == pytest.approx((.15*sent + .6*got)/1e6) and r.cost > 0

def test_the_synthetic_policy_plays_where_openai_has_no_key_and_a_line_says_so(lab):
    r,lines = run(lab, mock_backend='openai', model='gpt-4o-mini', max_steps=5)
    assert r.exit_code == 0 and any('OPENAI_API_KEY is not set: the synthetic policy plays' in o for o in lines)
    assert any('→ response tool_calls=1 backend=synthetic' in o for o in lines)

def test_without_the_policy_server_calls_are_read_from_the_trace(lab):
    r,lines = run(lab, use_mock=False, policy='local', model='expert', max_steps=8, return_trace=True)
    assert (r.exit_code, len(r.calls), r.calls['valid'].all()) == (0, 8, True), r
    assert '  ✓ 8 tool calls executed' in lines and any(o.startswith('  TOOL_CALL[7]: interact_many(') for o in lines)
    assert not any('server ready' in o for o in lines)
    with serving(mock(plays=synthetic, dialect='synth')) as url: r,lines = run(lab, use_mock=False, inference_url=url, return_trace=True)
    assert r.exit_code == 0 and list(r.calls['tool']) == ['interact_many']*2

def test_rollouts_at_a_time(lab):
    with serving(mock(plays=synthetic, dialect='synth', latency=.25)) as url:
        r,lines = run(lab, mock_backend=url, smoke_with=dict(parallel=4), max_steps=2)
    assert (r.exit_code, r.attempts, r.calls['rollout'].nunique()) == (0, 4, 4)
    assert r.wall_s < .8*sum(r.walls_s) and '✓ Train-step emulation complete' in lines
    assert re.search(r'parallel=4 successes=4/4 total_wall_ms=[\d.]+ avg_rollout_wall_ms=[\d.]+', '\n'.join(lines))
    assert sum(bool(re.match(r'  rollout\[[0-3]:0\] TOOL_CALL\[[01]\]', o)) for o in lines) == 8

def test_groups_play_the_same_world(lab):
    seeds = []
    r,_ = run(lab, altered(lambda o: seeds.append(o['trajectories'][0]['steps'][0]['obs']['text'])), rollouts=2, group_size=2, max_steps=1)
    assert r.attempts == 4 and len(set(seeds)) == 2

def test_one_action_at_a_time(lab):
    asked = []
    r,_ = run(lab, smoke_with=dict(interactive=asked.append), max_steps=6)
    assert [o.splitlines()[-1] for o in asked] == [f'interact_many({{"actions":["{o}"]}})' for o in (*PLAN, PLAN[0])]
    assert asked[1].startswith('Crafter, step 1 of') and r.exit_code == 0 and r.calls['tool_calls'].sum() == 6
    assert r.calls['latency_ms'].max() < 5000
    for how in (dict(parallel=2), dict()):
        with pytest.raises(LabError, match='one person'): run(lab, smoke_with=dict(interactive=asked.append, **how), rollouts=2)
    with pytest.raises(LabError, match='hold an action back'): run(lab, smoke_with=dict(interactive=asked.append), use_mock=False)

def test_waiting_for_the_person_is_no_latency(lab):
    r,_ = run(lab, smoke_with=dict(interactive=lambda o: time.sleep(.3)), max_steps=2)
    assert r.wall_s > .6 and r.calls['latency_ms'].max() < 300

class Silent:
    "A policy that never answers; `left` once its client has hung up"
    def __init__(self, reached): self.reached,self.left = reached,threading.Event()
    async def __call__(self, scope, receive, send):
        self.reached()
        while (await receive())['type'] != 'http.disconnect': pass
        self.left.set()

@pytest.mark.parametrize('way', ['person', 'before the call', 'during the call'])
def test_ctrl_c_ends_at_once_and_leaves_nothing(lab, way):
    def stop(text): raise KeyboardInterrupt
    def ctrl_c(): signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    before,began,lines = threading.active_count(),time.monotonic(),[]
    def said(line):
        lines.append(line)
        if way == 'before the call' and '← request' in line: ctrl_c()
    silent = Silent(ctrl_c if way == 'during the call' else lambda: None)
    with serving(mock(plays=['do']) if way == 'person' else silent) as url, pytest.raises(KeyboardInterrupt):
        run(lab, say=said, smoke_with=dict(interactive=stop) if way == 'person' else {}, mock_backend=url)
    assert time.monotonic() - began < 10 and (way != 'during the call' or silent.left.is_set())
    port = int(re.search(r':(\d+) backend', next(o for o in lines if 'server ready' in o))[1])
    assert lines[-1] == '[mock-rl] server stopped' and port_holder(port) is None and threading.active_count() <= before + 1 # the loop of `run_sync` stays

def test_replay_brings_the_same_rewards(lab):
    lab.rollout_sync('expert', [4], max_turns=6, difficulty='easy')
    episode, = lab.episodes.query('model == "expert"')['episode_id']
    turns = list(lab.calls.query(f'episode_id == "{episode}"')['turn_reward'].astype(float))
    assert sum(turns) > 0
    r,lines = run(lab, smoke_with=dict(replay=episode), return_trace=True)
    assert (r.exit_code, r.steps) == (0, 6), r
    assert f'  reward.per_step: {turns}' in lines and any('backend=replay' in o for o in lines)
    def dearer(o):
        for s in o['trajectories'][0]['steps']: s['reward'] *= 2
        o['metrics'].update(mean_return=2*o['metrics']['mean_return'], episode_returns=[2*o['metrics']['mean_return']])
    r,_ = run(lab, altered(dearer), smoke_with=dict(replay=episode))
    assert r.exit_code == 3 and any(f'the episode brought {turns}, its replay {[2*o for o in turns]}' in o for o in r.failures)
    r,_ = run(lab, smoke_with=dict(replay=episode, interactive=lambda o: None))
    assert r.exit_code == 0 and r.steps == sum(len(o) for o in lab.calls.query(f'episode_id == "{episode}"')['actions'])

def test_rollout_of_a_task_app_can_be_given_again(tmp_path):
    lab = Lab(tmp_path)
    first,_ = run(lab, create_task_app(lab=tmp_path), max_steps=3, return_trace=True)
    r,_ = run(lab, smoke_with=dict(replay=lab.episodes['episode_id'][0]), return_trace=True)
    assert (r.exit_code, r.steps, list(r.calls['arguments'].map(orjson.loads))) == (0, 3, [dict(actions=[*PLAN])]*3), r
    with pytest.raises(LabError, match='no episode `nothing`'): run(lab, smoke_with=dict(replay='nothing'))

class Doors:
    "A task of another kind: two doors, one of them pays"
    id,name,description,version,system = 'doors','Doors','Choose a door.','1','Choose a door.'
    tools = [dict(type='function', function=dict(name='open_door', parameters=dict(type='object', required=['side'], additionalProperties=False,
        properties=dict(side=dict(type='string', enum=['left', 'right'])))))]
    def new(self, seed, config): return Room()
    def restore(self, data): return Room()

class Room:
    observation = 'Two doors, left and right.'
    def step(self, calls): return Outcome(float(calls[0].arguments['side'] == 'right'))
    def snapshot(self): return b'{}'

def test_another_task(lab):
    r,lines = run(lab, create_task_app('test_smoke:Doors'), max_steps=2, return_trace=True)
    assert (r.exit_code, list(r.calls['arguments'])) == (0, ['{"side":"left"}', '{"side":"right"}']), r
    assert '  TOOL_CALL[1]: open_door({"side":"right"})' in lines

def test_key(lab):
    app = create_task_app(key='open-sesame-1')
    assert run(lab, app, api_key='open-sesame-1')[0].exit_code == 0
    with pytest.raises(LabError, match='ENVIRONMENT_API_KEY') as e: run(lab, app, api_key='open-barley-22')
    assert 'barley' not in str(e.value)

def test_what_it_starts(lab, tmp_path, monkeypatch):
    "A task app with the variables of its file, which hold no longer than the test; the page starts one in a process"
    def beside(app, options, port): return serving(create_task_app(**options), port=port)
    monkeypatch.setattr(synth_lab.smoke, 'serving_process', beside)
    env,lines,before = tmp_path/'.env',[],len(lab.episodes)
    env.write_text('ENVIRONMENT_API_KEY=from-the-file-1\n')
    config = SmokeConfig(task_app_name='grpo-crafter', task_app_port=0, task_app_env_file=str(env), task_app_force=True, sqld_auto_start=True, max_steps=1)
    r = smoke(config, say=lines.append, lab=lab)
    assert r.exit_code == 0 and 'ENVIRONMENT_API_KEY' not in os.environ
    ready = next(o for o in lines if 'Task app ready at' in o)
    for said in ("Starting task app 'grpo-crafter'", 'Stopping task_app', 'Background services stopped', 'no server for traces', "nobody's process"):
        assert any(o.startswith('[smoke]') and said in o for o in lines), said
    with pytest.raises(httpx.ConnectError): httpx.get(ready.split()[-1])
    assert len(lab.episodes) == before + 1 # kept
    assert 'from-the-file' not in ''.join(lines)

def test_port_that_is_taken(lab):
    with at(create_task_app()) as url, pytest.raises(LabError) as e:
        smoke(SmokeConfig(task_app_name='crafter', task_app_port=httpx.URL(url).port), say=lambda o: None, lab=lab)
        assert httpx.get(url).status_code == 200
    assert f'process {os.getpid()}' in str(e.value) and 'choose another port' in str(e.value)

def test_url_goes_before_a_name(lab, tmp_path):
    r,lines = run(lab, task_app_name='crafter', task_app_env_file=str(tmp_path/'nothing.env'))
    assert r.exit_code == 0 and not any('Starting' in o for o in lines) and any('nothing.env is not there' in o for o in lines)

def test_nobody_at_the_url(lab):
    with pytest.raises(LabError, match='does not answer'): smoke(SmokeConfig(task_url='http://127.0.0.1:9'), say=lambda o: None, lab=lab)

def test_policy_server_speaks_of_what_it_cannot_read():
    async def nobody(asked, cid): raise AssertionError
    with at(PolicyServer(nobody, 'mock', lambda o: None)) as url:
        assert httpx.get(f'{url}/v1/models').status_code == 404
        assert httpx.post(f'{url}/v1/chat/completions', content=b'{').status_code == 400

def test_stream_for_who_asks_for_one():
    choice = dict(index=0, finish_reason='stop', logprobs=None, message=dict(role='assistant', content='Hi.'))
    async def says(asked, cid): return dict(id='a', created=0, model='m', usage=None, choices=[choice]),None
    server = PolicyServer(says, 'mock', lambda o: None)
    with at(server) as url: r = httpx.post(f'{url}/v1/chat/completions?cid=a', json=dict(model='m', messages=[], stream=True))
    assert r.headers['content-type'].startswith('text/event-stream') and r.text.endswith('data: [DONE]\n\n')
    assert server.rows[0]['valid'] is False and server.rows[0]['cost_usd'] is None

def tool(name, **properties):
    return dict(type='function', function=dict(name=name, parameters=dict(type='object', properties=properties, required=[*properties])))

@pytest.mark.parametrize('offered,value', [(interact_many(), dict(actions=[*PLAN])), (tool('look'), {}),
    (tool('go', n=dict(type='integer', minimum=2), on=dict(type='boolean')), dict(n=2, on=False)),
    (tool('say', what=dict(type='string', minLength=3), to=dict(type='array', items=dict(enum=['a', 'b']), minItems=2)), dict(what='xxx', to=['a', 'b']))])
def test_what_the_synthetic_policy_says_fits(offered, value):
    said,function = synthetic(0, dict(tools=[offered])),offered['function']
    assert orjson.loads(said.arguments) == value and misfit(function['parameters'], value) is None
    assert isinstance(said, Said) and said.name == function['name']
