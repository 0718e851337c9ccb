"The task app: what its rollouts answer, what it keeps, whom it lets in, what it refuses, and that none of it is in the way of another"
import asyncio, contextlib, re, time

import httpx, orjson, pytest

from synth_lab.core import LabError
from synth_lab.imports import SourceError, _rollout_session, import_rollout
from synth_lab.lab import Lab
from synth_lab.mock import REPLIES, mock
from synth_lab.serve import serving
from synth_lab.taskapp import Call, Crafter, Outcome, completed, create_task_app, find_task, own_keys
from synth_lab.tools import ToolError
from synth_lab.v3 import FORMS

EXPERT = dict(model='expert', provider='local')

def asks(turns=3, config=EXPERT, **more):
    return dict(run_id='r1', mode='eval', env=dict(env_name='crafter', seed=7), policy=dict(policy_name='crafter-react', config=config), ops=['agent', 'env']*turns) | more

def traced(form='structured', **more): return dict(record=dict(return_trace=True, trace_format=form) | more)

@contextlib.asynccontextmanager
async def client(app=None, **headers):
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app or create_task_app()), base_url='http://task', headers=headers, timeout=30) as http: yield http

def ask(*bodies, app=None, path='/rollout', **headers):
    "(status, body) of the answer to each"
    async def go():
        async with client(app, **headers) as http: return [((r := await http.post(path, json=o)).status_code, r.json()) for o in bodies]
    found = asyncio.run(go())
    return found[0] if len(bodies) == 1 else found

def fine(*bodies, **more):
    found = ask(*bodies, **more)
    for status,body in (found if len(bodies) > 1 else [found]): assert status == 200, body
    return [b for _,b in found] if len(bodies) > 1 else found[1]

def refused(body, **more):
    status,said = ask(body, **more)
    return status,said['detail']['error']

def imported(response, i=0):
    "A game of a response as the import reads it"
    return _rollout_session(response, i)

@contextlib.contextmanager
def model(**how):
    "A mock model on a port: the settings of a policy that is played by it, and the mock"
    with serving(app := mock(**how)) as url: yield dict(model='m', inference_url=f'{url}/chat/completions?cid=c-1'),app

# what a rollout says

@pytest.fixture(scope='module')
def both(tmp_path_factory):
    "The same episode played by the lab, and by the task app in each form"
    lab = Lab(tmp_path_factory.mktemp('lab'))
    lab.rollout_sync('expert', seeds=[7], max_turns=6)
    return lab,dict(zip(FORMS, fine(*(asks(6, **traced(o, logprobs=True)) for o in FORMS))))

COLUMNS = '''turn, model, verdict, finish_reason, problem, thought, tool_name, arguments, actions, logprobs, turn_reward, input_tokens, output_tokens, cost_usd, seed, temperature,
    prompt_ids, output_id, tools_id'''

@pytest.mark.parametrize('form', FORMS)
def test_a_rollout_is_played_told_and_imported_as_the_lab_plays_it(both, form, tmp_path):
    lab,responses = both
    there = Lab(tmp_path)
    there.import_rollout(responses[form])
    calls = [o.sql(f'SELECT {COLUMNS} FROM calls ORDER BY turn').to_json(orient='records') for o in (lab, there)]
    assert calls[0] == calls[1]
    found,played = there.episodes.iloc[0],lab.episodes.iloc[0]
    for k in ('seed', 'status', 'turns', 'n_achievements', 'calls', 'unusable', 'input_tokens', 'output_tokens', 'cost_usd', 'model', 'endpoint'): assert found[k] == played[k], k
    assert list(found.achievements) == list(played.achievements) and found['return'] == played.n_achievements
    assert abs((found.started_at - played.started_at).total_seconds()) < 600

def test_the_sums_are_those_of_the_decisions(both):
    r = both[1]['structured']
    steps = r['trajectories'][0]['steps']
    assert r['metrics']['episode_returns'] == [sum(o['reward'] for o in steps)] == [r['metrics']['mean_return']] and r['metrics']['num_steps'] == len(steps) == 6
    assert r['metrics']['details']['achievements'] == [[a for o in steps for a in o['info']['achievements_added']]]
    assert [o['info']['meta']['decision_rewards']['unique_delta'] for o in steps] == [o['reward'] for o in steps]
    assert list(steps[-1]['info']['achievements_status']) == r['metrics']['details']['achievements'][0]
    assert r['ops_executed'] == 12 and r['aborted'] is False and r['metrics']['details']['ended_by'] == ['max_turns']

def test_a_trace_holds_rewards_thoughts_and_finish_reasons(both):
    t = both[1]['structured']['trace']
    records = [r for e in t['event_history'] for r in e.get('call_records', ())]
    steps = both[1]['structured']['trajectories'][0]['steps']
    assert [orjson.loads(r['output_tool_calls'][0]['arguments_json']) for r in records] == [o['tool_calls'][0]['arguments'] for o in steps]
    assert all(r['metadata']['thought'] and r['finish_reason'] == 'tool_calls' for r in records)
    assert [e['reward'] for e in t['event_history'] if 'reward' in e] == [o['reward'] for o in steps] == [o['reward_value'] for o in t['event_rewards']]
    assert t['outcome_rewards'][0]['total_reward'] == sum(o['reward'] for o in steps)
    assert not any(k in e for e in t['event_history'] if 'call_records' in e for k in ('reward', 'terminated', 'truncated', 'actions'))

def test_no_time_is_printed_python_and_every_time_is_in_order(both):
    for form,r in both[1].items(): assert 'datetime' not in (text := orjson.dumps(r).decode()) and 'circular' not in text, form
    t = both[1]['structured']['trace']
    times = [o[k] for o in t['session_time_steps'] for k in ('timestamp', 'completed_at')]
    assert all(re.fullmatch(r'20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z', o) for o in times) and times == sorted(times) and t['created_at'] <= times[0]

def test_a_structured_response_is_a_third_of_the_earlier_one(both):
    sizes = {k:len(orjson.dumps(v)) for k,v in both[1].items()}
    assert sizes['structured']/6*10 < 425_000/3 < sizes['full']/6*10

def test_full_records_stand_alone(both):
    t = both[1]['full']['trace']
    record = t['session_time_steps'][2]['events'][0]['call_records'][0]
    assert record['input_messages'][0]['role'] == 'system' and orjson.loads(record['response_raw_json'])['choices'] and record['request_params']['raw_params']['messages']
    assert [m['message_type'] for m in t['session_time_steps'][0]['markov_blanket_messages']] == ['policy_system_prompt', 'policy_user_prompt', 'policy_tool_call']

KINDS = ['no_call', 'malformed', 'truncated_quietly', 'unknown_tool', 'invalid_action', 'too_many', 'refused', 'empty', 'written_out', 'parallel']
VERDICTS = [REPLIES[k].outcome for k in KINDS]

@pytest.mark.parametrize('form', FORMS)
def test_a_reply_is_imported_as_it_was_read(form):
    with model(faults=KINDS) as (config,_): r = fine(asks(11, config | dict(max_tokens=16), **traced(form)))
    calls,steps = imported(r)['calls'],r['trajectories'][0]['steps']
    assert [o['verdict'] for o in calls] == [*VERDICTS, 'ok'] == [o['info']['meta']['verdict'] for o in steps]
    assert [len(o['actions']) for o in calls] == [0]*8 + [1, 4, 2] and r['metrics']['details']['unusable'] == 8
    for call,step,after in zip(calls[:8], steps, calls[1:]):
        assert step['reward'] == 0. and step['info']['meta']['problem'] == call['problem'] and after['prompt'][-1]['content'].startswith(call['problem'])

def test_unusable_replies_lead_to_the_prompts_that_the_lab_writes(tmp_path):
    faults = ['no_call', None, 'invalid_action', 'malformed', None]
    lab = Lab(tmp_path)
    with serving(mock(faults=faults)) as url: Lab(tmp_path, endpoint=url).rollout_sync('m', seeds=[7], max_turns=5, history='full')
    with model(faults=faults) as (config,_): r = fine(asks(5, config | dict(history='full'), **traced()))
    prompts = [[lab.store.message(i) for i in ids] for ids in lab.calls.prompt_ids]
    assert [o['prompt'] for o in imported(r)['calls']] == prompts

def test_tries_that_failed_are_records_before_the_reply():
    with model(faults=['retry_after_ms']) as (config,_): r = fine(asks(1, config, **traced()))
    failed,reply = r['trace']['event_history'][0]['call_records']
    assert failed['outcome'] == 'error' and failed['error'] and reply['output_tool_calls'] and len(imported(r)['calls'][0]['tries']) == 2

# where the model is

def test_the_query_goes_along_and_the_correlation_id_comes_back():
    seen = []
    inner = mock()
    async def watched(scope, receive, send):
        seen.append((scope['path'], scope['query_string'], dict(scope['headers']).get(b'authorization')))
        await inner(scope, receive, send)
    with serving(watched) as url: r = fine(asks(2, dict(model='m', inference_url=f'{url}?cid=c-9'), mode='rl'))
    assert seen == [('/v1/chat/completions', b'cid=c-9', None)]*2 and r['trace_correlation_id'] == 'c-9'
    urls = {r['pipeline_metadata']['inference_url'], r['trajectories'][0]['inference_url'], *(o['info']['meta']['inference_url'] for o in r['trajectories'][0]['steps'])}
    assert len(urls) == 1 and urls.pop().endswith('/v1/chat/completions?cid=c-9')

def test_a_key_goes_to_no_server_but_its_own(monkeypatch):
    seen = []
    async def watched(scope, receive, send):
        seen.append(dict(scope['headers']).get(b'authorization'))
        await mock()(scope, receive, send)
    with serving(watched) as own, serving(watched) as other:
        monkeypatch.setenv('OPENAI_BASE_URL', own)
        monkeypatch.setenv('OPENAI_API_KEY', 'sk-own-key-of-this-machine')
        for url in (own, other): fine(asks(1, dict(model='m', inference_url=url)))
    assert seen == [b'Bearer sk-own-key-of-this-machine', None]

def test_rl_samples_anew_and_eval_again_the_same():
    config = dict(model='random', provider='local')
    acted = [[c for o in r['trajectories'][0]['steps'] for c in o['tool_calls']] for r in fine(*(asks(3, config, mode=m) for m in ('eval', 'eval', 'rl', 'rl')))]
    assert acted[0] == acted[1] and acted[2] != acted[3]

def test_paths_are_completed_once():
    for url in ('http://h/v1/chat/completions?cid=a', 'http://h/chat/completions', 'https://api.groq.com/openai/v1/chat/completions'): assert completed(url) == completed(completed(url)) == url
    assert completed('http://h?cid=a/v1/chat/completions&x=1') == 'http://h/v1/chat/completions?cid=a&x=1'

# limits

def test_limits_stop_a_rollout_and_say_so():
    rows = dict(max_ops=asks(9, safety=dict(max_ops=5)), calls=asks(9, EXPERT | dict(max_llm_calls=2)), steps=asks(9, env=dict(seed=7, config=dict(env_params=dict(max_steps_per_episode=2)))))
    for name,r in zip(rows, fine(*rows.values())):
        assert r['metrics']['num_steps'] == 2 and r['aborted'] == (name == 'max_ops') and r['metrics']['details']['ended_by'] == ['max_ops' if name == 'max_ops' else 'max_turns']

def test_time_that_is_over_gives_back_what_was_played():
    with model(latency=.2) as (config,_):
        r = fine(asks(50, config, safety=dict(max_time_s=.9)))
        late,error = refused(asks(1, config, safety=dict(max_time_s=.05)))
    assert 1 <= r['metrics']['num_steps'] <= 4 and r['aborted'] and r['metrics']['details']['ended_by'] == ['max_time_s']
    assert (late, error['code']) == (504, 'rollout_timeout')
    assert imported(r)['end']['status'] == 'cancelled'

def test_a_run_is_watched_and_stopped_from_elsewhere():
    async def go():
        with serving(mock(latency=.1)) as url:
            async with client() as http:
                playing = asyncio.create_task(http.post('/rollout', json=asks(90, dict(model='m', inference_url=url))))
                await asyncio.sleep(.6)
                before = (await http.get('/run/status/r1')).json()
                stopped = (await http.post('/run/abort', json=dict(run_id='r1'))).json()
                return before,stopped,(await playing).json(),(await http.get('/run/status/r1')).json(),(await http.get('/run/status/r2')).status_code
    before,stopped,r,after,unknown = asyncio.run(go())
    assert before['status'] == 'running' and before['finished_at'] is None and stopped == dict(ok=True, run_id='r1')
    assert r['aborted'] and 1 <= r['metrics']['num_steps'] < 20 and r['metrics']['details']['ended_by'] == ['abort']
    assert after['status'] == 'aborted' and after['finished_at'] > after['started_at'] and unknown == 404

def test_rollouts_at_once_are_those_one_after_the_other():
    bodies = [asks(4, run_id=f'r{i}', env=dict(seed=i), **traced()) for i in range(6)]
    async def go():
        async with client() as http: return [o.json() for o in await asyncio.gather(*(http.post('/rollout', json=o) for o in bodies))]
    acted = lambda rows: [[(o['obs'], o['tool_calls'], o['reward']) for o in r['trajectories'][0]['steps']] for r in rows]
    assert acted(asyncio.run(go())) == acted(fine(*bodies))

def test_the_end_of_a_game_ends_the_rollout_or_begins_another_one():
    env = dict(seed=7, config=dict(length=10))
    ended,again = fine(asks(6, env=env, **traced()), asks(6, env=env, on_done='reset', **traced()))
    last = ended['trajectories'][0]['steps'][-1]
    assert (last['done'], last['truncated'], ended['metrics']['num_episodes']) == (False, True, 1) and ended['metrics']['num_steps'] < 6
    assert again['metrics']['num_steps'] == 6 and again['metrics']['num_episodes'] == len(again['trajectories']) >= 2
    first,second = (t['steps'][0] for t in again['trajectories'][:2])
    assert first['obs'] == second['obs'] and first['tool_calls'] == second['tool_calls']
    games = [imported(again, i) for i in range(len(again['trajectories']))]
    assert [(g['end']['turns'], g['end']['return'], g['seed']) for g in games] == [(t['length'], x, 7) for t,x in zip(again['trajectories'], again['metrics']['episode_returns'])]
    assert all(o['thought'] for g in games for o in g['calls']) and (times := [o['started_at'] for g in games for o in g['calls']]) == sorted(times)

def test_no_connection_outlives_a_rollout():
    with serving(create_task_app()) as url, httpx.Client(base_url=url.removesuffix('/v1')) as http:
        assert [http.post('/rollout', json=asks(1)).headers.get('connection') for _ in range(2)] == ['close']*2 and 'connection' not in http.get('/health').headers

# errors

def test_a_model_that_does_not_answer_is_an_error_and_never_an_empty_success():
    with model(faults=[None, 'no_model']) as (config,_): status,error = refused(asks(3, config))
    assert status == 502 and error['code'] == 'inference_failed' and error['decisions'] == 1 and error['type'] == 'ModelNotFoundError'
    status,error = refused(asks(1, dict(model='m', inference_url='http://127.0.0.1:9')))
    assert status == 502 and 'does not answer' in error['message'] and error['fix']

WRONG = [
    (dict(mode='train'), 'mode', 'rl'), (dict(ops=['agent', 'evn']), 'ops.1', 'did you mean `env`'), (dict(ops=['env']), 'ops.0', 'agent is due'), (dict(ops=[]), 'ops', 'none'),
    (dict(rnu_id='x'), 'rnu_id', 'did you mean `run_id`'), (dict(env=dict(env_name='minecraft')), 'env.env_name', 'crafter'), (dict(env=dict(env_id='e')), 'env.env_id', 'of its own'),
    (dict(env=dict(config=dict(dificulty='hard'))), 'env.config.dificulty', 'did you mean `difficulty`'), (dict(env=dict(config=dict(difficulty='hardest'))), 'env.config', 'normal'),
    (dict(env=dict(config=dict(env_params=dict(max_step=1)))), 'env.config.env_params.max_step', 'max_steps_per_episode'), (dict(env=dict(seed=-1)), 'env.seed', 'greater'),
    (dict(policy=dict(config=dict(model='m', temprature=1))), 'policy.config.temprature', 'did you mean `temperature`'), (dict(policy=dict(config={})), 'policy.config.model', 'required'),
    (dict(policy=dict(config=dict(model='m', provider='grok'))), 'policy.config.provider', 'did you mean `groq`'), (dict(policy=dict(config=EXPERT | dict(use_tools=False))), 'policy.config.use_tools', 'True'),
    (dict(policy=dict(config=dict(model='m', inference_url='http://u:p@h'))), 'policy.config.inference_url', 'password'),
    (dict(policy=dict(config=EXPERT | dict(image_only_mode=True))), 'policy.config', 'use_vision'),
    (dict(policy=dict(config=EXPERT | dict(step_rewards=dict(step_beta=.1)))), 'policy.config.step_rewards.step_beta', '0'), (dict(record=dict(value=True)), 'record.value', 'False'),
    (dict(record=dict(trace_format='tiny')), 'record.trace_format', 'structured'), (dict(safety=dict(max_ops=0)), 'safety.max_ops', 'greater')]

@pytest.mark.parametrize('more,field,said', WRONG, ids=[o[1] for o in WRONG])
def test_what_cannot_be_is_refused_by_name(more, field, said):
    status,error = refused(asks() | more)
    assert (status, error['code'], error['field']) == (422, 'invalid_request', field) and said in f'{error["message"]} {error.get("fix")}'

def test_a_null_is_as_if_it_were_not_there():
    body = asks(1) | dict(training_session_id=None, on_done=None, safety=None, record=dict(trace_format=None))
    body['env'] |= dict(env_id=None)
    body['policy'] |= dict(policy_id=None, config=EXPERT | dict(temperature=None, inference_url=None))
    assert fine(body)['metrics']['num_steps'] == 1

def test_what_the_models_server_does_not_take_is_refused_by_name():
    status,error = refused(asks(1, dict(model='llama', provider='groq', thinking_mode='think')))
    assert (status, error['field']) == (422, 'policy.config') and 'thinking' in error['message']

def test_a_value_that_is_refused_is_not_said_again():
    status,error = refused(asks(1, EXPERT | dict(api_key='sk-somebodys-secret-key')))
    assert status == 422 and 'secret' not in str(error)

# who is let in

def test_requests_show_a_key_in_any_of_three_ways():
    app = create_task_app(key='right-key')
    for headers,status in (({}, 401), ({'x-api-key':'wrong'}, 401), ({'x-api-key':'right-key'}, 200), ({'x-api-keys':'a, right-key'}, 200), ({'authorization':'Bearer right-key'}, 200),
            ({'x-api-key':'right'}, 401), ({'x-api-key':'ключ'.encode()}, 401)):
        async def go():
            async with client(app, **headers) as http: return await http.get('/health'),await http.get('/'),await http.get('/openapi.json')
        health,root,docs = asyncio.run(go())
        assert health.status_code == status and root.json() == dict(status='ok', service='crafter') and docs.status_code == 200
        assert 'right' not in health.text and (status == 200 or health.json()['detail']['error']['code'] == 'unauthorised')

def test_keys_come_from_the_environment_at_start(monkeypatch):
    assert own_keys() == ()
    monkeypatch.setenv('DEV_ENVIRONMENT_API_KEY', 'dev')
    assert own_keys() == ('dev',)
    monkeypatch.setenv('ENVIRONMENT_API_KEY', 'k1 ')
    monkeypatch.setenv('ENVIRONMENT_API_KEY_ALIASES', 'k2,, k3')
    assert own_keys() == ('k1', 'k2', 'k3')
    app = create_task_app()
    monkeypatch.delenv('ENVIRONMENT_API_KEY')
    assert ask(asks(1), app=app, **{'x-api-key':'k3'})[0] == 200 and ask(asks(1), app=app)[0] == 401
    with pytest.raises(LabError, match='empty'): create_task_app(key=' ')

def test_without_a_key_only_this_machine_is_let_in():
    async def go(host, **headers):
        transport = httpx.ASGITransport(create_task_app(), client=(host, 1))
        async with httpx.AsyncClient(transport=transport, base_url='http://task', headers=headers) as http: return await http.get('/health')
    for host,headers,status in (('127.0.0.1', {}, 200), ('::1', {}, 200), ('10.1.2.3', {}, 503), ('127.0.0.1', {'x-forwarded-for':'1.2.3.4'}, 503)):
        assert (r := asyncio.run(go(host, **headers))).status_code == status
        if status == 503: assert r.json()['detail']['error']['code'] == 'missing_environment_api_key'
        else: assert r.json()['auth'] == dict(required=False)

# what is kept

def test_rollouts_are_kept_with_their_rewards_once(tmp_path):
    app = create_task_app(lab=tmp_path)
    compact,whole = fine(asks(3), asks(3, run_id='r2', **traced()), app=app)
    lab = Lab(tmp_path)
    assert len(lab.episodes) == 2 and lab.episodes['return'].sum() == compact['metrics']['mean_return'] + whole['metrics']['mean_return']
    assert lab.import_rollout([compact, whole]).new == 0 and lab.calls.thought.notna().all()

def test_a_kept_rollout_is_replayed_exactly(tmp_path):
    hard = dict(seed=5, config=dict(difficulty='hard', length=60))
    bodies = [asks(3), asks(8, run_id='r2', env=hard, **traced('full')), asks(12, run_id='r3', env=dict(seed=3, config=dict(length=9)), on_done='reset')]
    with model(faults=['no_call', None, 'malformed']) as (config,_): fine(*bodies, asks(4, config, run_id='r4'), app=create_task_app(lab=tmp_path))
    lab = Lab(tmp_path)
    played = lab.episodes.set_index('episode_id')
    assert len(played) > 4 and played.steps.min() > 0 and played.final_hash.notna().all() and {'easy', 'hard', 'normal'} >= set(played.difficulty) > {'normal'}
    for id,e in played.iterrows():
        assert (again := lab.replay(id)).exact and again.steps == e.steps, again
        assert lab.fork(id, e.steps).state_hash() == e.final_hash
    assert len(lab.film(id, size=32)) == e.steps + 1 and lab.verify().ok

def test_a_rollout_that_was_changed_is_found_out(both, tmp_path):
    r = orjson.loads(orjson.dumps(both[1]['compact']))
    r['trajectories'][0]['steps'][2]['info']['steps'][0]['health'] = 3
    (lab := Lab(tmp_path)).import_rollout(r)
    assert (again := lab.replay(lab.episodes.episode_id[0])).divergence.endswith('`health` was 3, is 9') and 0 < again.steps < again.episode['steps']

def test_rollouts_that_end_together_are_written_together(tmp_path, monkeypatch):
    took = []
    monkeypatch.setattr('synth_lab.taskapp.import_rollout', lambda store, found: took.append(len(found)) or time.sleep(.3) or import_rollout(store, found))
    async def go():
        async with client(create_task_app(lab=tmp_path)) as http:
            return await asyncio.gather(*(http.post('/rollout', json=asks(1, run_id=f'r{i}', env=dict(seed=i))) for i in range(6)))
    assert [o.status_code for o in asyncio.run(go())] == [200]*6 and sum(took) == 6 == len(Lab(tmp_path).episodes) and len(took) < 4

def test_a_rollout_that_cannot_be_kept_is_answered_and_says_so(tmp_path, monkeypatch):
    def full(store, found): raise SourceError('cannot write: No space left on device')
    monkeypatch.setattr('synth_lab.taskapp.import_rollout', full)
    with pytest.warns(UserWarning, match='not kept: cannot write: No space left'): r = fine(asks(1), app=create_task_app(lab=tmp_path))
    assert r['metrics']['num_steps'] == 1 and r['pipeline_metadata']['not_kept'] == 'cannot write: No space left on device'

def test_a_folder_that_nothing_can_be_kept_in_is_refused_at_once(tmp_path, monkeypatch):
    (tmp_path/'file').write_text('')
    with pytest.raises(LabError, match='cannot be made: '): create_task_app(lab=tmp_path/'file/lab')
    monkeypatch.setattr('synth_lab.taskapp.os.access', lambda path, how: False) # whoever tests may be root, who may write anywhere
    with pytest.raises(LabError, match='cannot be written to'): create_task_app(lab=tmp_path)

# bodies that are none

@pytest.mark.parametrize('body, said', [(b'{"run_id": ', 'body: it is no JSON: Expecting value at character 11'), (b'['*100_000 + b']'*100_000, 'body: it cannot be read'),
    (b'[1]', 'body: Input should be a valid dictionary')])
def test_a_body_that_is_no_request_is_refused_in_a_sentence(body, said):
    async def go():
        async with client() as http: return await http.post('/rollout', content=body, headers={'content-type':'application/json'})
    r = asyncio.run(go())
    assert r.status_code == 422 and r.json()['detail']['error']['code'] == 'invalid_request' and r.json()['detail']['error']['message'].startswith(said)

@pytest.mark.parametrize('body, field', [(dict(env=dict(seed=2**63)), 'env.seed'), (dict(env=dict(config=dict(index=2**70))), 'env.config.index'),
    *((dict(policy=dict(config=dict(model='m', inference_url=o))), 'policy.config.inference_url') for o in ('file:///etc/passwd', 'http://[', 'there'))])
def test_what_no_trace_holds_and_what_is_no_server_is_refused(body, field):
    status,error = refused(asks(1, **body))
    assert status == 422 and error['field'] == field and error['message'].startswith(field)

def test_a_fault_in_a_task_is_an_error_of_the_wire_without_keys():
    class Broken(Crafter):
        id = 'broken'
        def info(self, seed): raise RuntimeError('at sk-abcdefghijklmnopqrstuvwx')
    async def go():
        transport = httpx.ASGITransport(create_task_app(Broken), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url='http://task') as http: return await http.get('/task_info?seed=1')
    r = asyncio.run(go())
    assert r.status_code == 500 and r.json()['detail']['error']['message'].startswith('RuntimeError: at sk') and 'abcdef' not in r.text

# games stepped by hand

def test_a_game_is_stepped_and_gone_back_to():
    call = dict(tool_name='interact_many', arguments=dict(actions=['move_left', 'do']))
    async def go():
        async with client() as http:
            async def post(path, status=200, **body):
                r = await http.post(f'/env/{path}', json=body)
                assert r.status_code == status, r.text
                return r.json()
            a = await post('create', env_name='crafter', seed=7, config=dict(length=40), rl_run_id='x')
            kept = await post('snapshot', env_id=a['env_id'])
            first = await post('step', env_id=a['env_id'], tool_calls=[call])
            for back in (dict(snapshot_id=kept['snapshot_id']), dict(snapshot=kept['snapshot'])):
                b = await post('restore', **back)
                assert b['observation'] == a['observation'] and b['env_id'] != a['env_id'] and b['step_idx'] == 0
                second = await post('step', env_id=b['env_id'], tool_calls=[dict(function=dict(name='interact_many', arguments='{"actions": ["left", "use"]}'))])
                assert {k:second[k] for k in second if k != 'env_id'} == {k:first[k] for k in first if k != 'env_id'}
            assert (await post('reset', env_id=a['env_id']))['observation'] == a['observation']
            assert (await post('step', 422, env_id=a['env_id'], tool_calls=[dict(name='fly')]))['detail']['error']['field'] == 'tool_calls'
            assert (await post('terminate', env_id=a['env_id'])) == dict(ok=True)
            for path,more in (('step', dict(tool_calls=[call])), ('snapshot', {}), ('terminate', {})): await post(path, 404, env_id=a['env_id'], **more)
            await post('restore', 422, snapshot='bm90IG9uZQ==')
            await post('restore', 404, snapshot_id='none')
    asyncio.run(go())

def test_a_game_that_ended_takes_no_more_calls():
    sleep = [Call('interact_many', dict(actions=['noop']*5))]
    env = Crafter().new(7, dict(length=5))
    assert env.step(sleep).truncated
    with pytest.raises(LabError, match='ended'): env.step(sleep)

# a task of one's own

class Countdown:
    "Reach zero"
    id,name,description,version,system = 'countdown','Countdown','Reach zero','1','Bring the number to 0.'
    tools = [dict(type='function', function=dict(name='take', parameters=dict(type='object', properties=dict(n=dict(type='integer', minimum=1, maximum=3)), required=['n'])))]
    def new(self, seed, config):
        if config: raise LabError(f'no key {next(iter(config))}')
        return Count(seed)
    def restore(self, data): return Count(int(data))

class Count:
    def __init__(self, n): self.n = n
    @property
    def observation(self): return f'The number is {self.n}.'
    def step(self, calls):
        if sum(c.arguments['n'] for c in calls) > self.n: raise ToolError('invalid_action', 'That is more than there is.')
        self.n -= sum(c.arguments['n'] for c in calls)
        return Outcome(float(self.n == 0), done=self.n == 0, told=f'{self.n} left.')
    def snapshot(self): return str(self.n).encode()

def talks(*arguments):
    "A model that calls `take` with these arguments, one after the other"
    said,asked = iter(arguments),[]
    async def app(scope, receive, send):
        body = b''
        while (m := await receive()).get('more_body'): body += m['body']
        asked.append(orjson.loads(body + m['body']))
        message = dict(role='assistant', content='Hm.', tool_calls=[dict(id='a', type='function', function=dict(name='take', arguments=next(said)))])
        reply = orjson.dumps(dict(id='x', choices=[dict(index=0, message=message, finish_reason='tool_calls')], usage=dict(prompt_tokens=5, completion_tokens=2)))
        await send(dict(type='http.response.start', status=200, headers=[(b'content-type', b'application/json')]))
        await send(dict(type='http.response.body', body=reply))
    return app,asked

@pytest.mark.parametrize('form', FORMS)
def test_a_task_of_ones_own_is_played_told_and_imported(form):
    app,asked = talks('{"n": 2}', '{"n": 9}', '{"n": 3}', '{"n": 1}')
    with serving(app) as url: r = fine(asks(6, dict(model='m', inference_url=url), env=dict(seed=3), **traced(form)), app=create_task_app(Countdown))
    steps = r['trajectories'][0]['steps']
    assert [(o['reward'], o['done'], o['info']['meta']['verdict']) for o in steps] == [(0., False, 'ok'), (0., False, 'invalid_action'), (0., False, 'invalid_action'), (1., True, 'ok')]
    assert [o['messages'][-1]['content'].split('.')[0] for o in asked] == ['The number is 3', '1 left', 'take: arguments', 'That is more than there is']
    assert asked[0]['tools'] == Countdown.tools and asked[0]['messages'][0]['content'] == Countdown.system and r['metrics']['details']['ended_by'] == ['done']
    g = imported(r)
    assert [(o['verdict'], o['tool_name'], o['thought']) for o in g['calls']] == [(v, 'take', 'Hm.') for v in ('ok', 'invalid_action', 'invalid_action', 'ok')]
    assert (g['end']['return'], g['end']['status'], g['end']['input_tokens']) == (1., 'done', 20)

class Broken(Countdown):
    def new(self, seed, config): return BrokenGame(seed)
class BrokenGame(Count):
    def step(self, calls): return [Outcome(float('nan')), Outcome(0., info=dict(x={1})), 1/0 if self.n == 2 else None][self.n]

@pytest.mark.parametrize('seed,said', [(0, 'a reward is nan'), (1, 'not JSON serializable'), (2, 'ZeroDivisionError')])
def test_a_task_that_fails_is_an_error_that_says_where(seed, said):
    app,_ = talks('{"n": 1}')
    with serving(app) as url: status,error = refused(asks(1, dict(model='m', inference_url=url), env=dict(seed=seed)), app=create_task_app(Broken))
    assert (status, error['code']) == (500, 'task_failed') and said in error['message'] and 'countdown' in error['fix']

def test_the_docs_need_no_other_host_and_no_key():
    async def go():
        async with client(create_task_app(key='right-key')) as http:
            page = (await http.get('/docs')).text
            named = re.findall(r'(?:src|href)="([^"]+)"', page)
            return page,named,[await http.get(f'/{o}') for o in named]
    page,named,found = asyncio.run(go())
    assert 'http://' not in page and 'https://' not in page and len(named) == 3 and {o.status_code for o in found} == {200}
    assert "url: 'openapi.json'" in page

def test_tasks_are_found_by_file(tmp_path):
    file = tmp_path/'mine.py'
    file.write_text('''from __future__ import annotations
from dataclasses import dataclass
from synth_lab.taskapp import Outcome, Crafter
@dataclass
class Mine:
    id:str = 'mine'
    name = description = version = system = 'Mine'
    tools = ()
    def new(self, seed, config): ...
    def restore(self, data): ...
''')
    assert find_task(str(file)).id == find_task(f'{file}:Mine').id == 'mine'
    for name,said in ((f'{file}:Other', 'defines Mine'), (tmp_path/'no.py', 'no file'), ('synth_lab.nothing:X', 'no task')):
        with pytest.raises(LabError, match=said): find_task(str(name))
    file.write_text('1/0')
    with pytest.raises(LabError, match='ZeroDivisionError'): find_task(str(file))

def test_pictures_go_along_where_the_policy_wants_them():
    with model() as (config,app): r = fine(asks(2, config | dict(use_vision=True), **traced()))
    parts = app.calls[0]['asked']['messages'][-1]['content']
    assert [o['type'] for o in parts] == ['text', 'image_url'] and orjson.dumps(r).count(b'data:image/png') == 2
    with model() as (config,_): assert refused(asks(1, config | dict(use_vision=True), env=dict(seed=1)), app=create_task_app(Countdown))[1]['field'] == 'policy.config.use_vision'

def test_a_second_reward_stands_beside_the_tasks_own():
    per = dict(enabled=True, mode='decision_stepwise', strategy='per_achievement', weights=dict(collect_sapling=.5))
    on = fine(asks(4, env=dict(seed=7, config=dict(step_rewards=per))))
    steps = on['trajectories'][0]['steps']
    assert [o['info']['stepwise']['reward'] for o in steps] == [sum(per['weights'].get(a, 1.) for a in o['info']['achievements_added']) for o in steps]
    assert [o['r_i'] for o in on['trajectories'][0]['decision_samples']] == [o['info']['stepwise']['reward'] for o in steps]
    same = fine(asks(4, EXPERT | dict(step_rewards=dict(enabled=True, mode='decision_stepwise', indicator_lambda=.1))))
    assert [o['info']['stepwise']['reward'] for o in same['trajectories'][0]['steps']] == [.1*bool(o['reward']) for o in steps]

# what the app tells of itself

def test_what_trainers_ask_beforehand_is_json():
    async def go():
        async with client() as http: return [(await http.get(o)).json() for o in ('/info', '/task_info', '/task_info?seed=3', '/task_info?seed=3&seeds=4', '/openapi.json')]
    info,taskset,one,two,docs = asyncio.run(go())
    assert info['service']['task']['id'] == 'crafter' and info['limits']['max_turns'] and isinstance(info['dataset'], dict) and isinstance(taskset['taskset'], dict)
    assert one['environment'] == 'crafter' and one == two[0] and two[1]['dataset']['seed'] == 4
    assert {'task', 'environment', 'dataset', 'rubric', 'inference', 'limits', 'task_metadata'} <= one.keys() and len(one['action_space']) == 17
    fields = docs['components']['schemas']['PolicyConfig']['properties']
    assert 'temperature' in fields and '/rollout' in docs['paths'] and docs['components']['securitySchemes']

def test_an_unknown_route_says_which():
    assert ask({}, path='/rollouts') == (404, dict(detail=dict(error=dict(code='no_route', message='Not Found: POST /rollouts'))))
