"The client of task apps: what it asks, what it repeats, whom it shows its key, and what its checks find"
import asyncio, json, time

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, RedirectResponse, Response

from synth_lab import client as client_module
from synth_lab.client import AuthError, BadRequest, ClientError, EndpointDown, EndpointSlow, RateLimited, ServerError
from synth_lab.jobs import NotFound
from synth_lab.serve import serving
from synth_lab.taskclient import (AsyncTaskAppClient, TaskAppClient, missing_for_rl, missing_in_trace, rollout_request, validate)

KEY = 'sk_env_not-like-any-other'
POLICY = dict(model='m', inference_url='http://127.0.0.1:1/v1')
URL = 'http://127.0.0.1:1/v1/chat/completions?cid=a'
STEPS = [dict(obs={}, tool_calls=[dict(tool_name='count', arguments='{}')], reward=o, done=False, truncated=False, info=dict(meta=dict(inference_url=URL))) for o in (None, 1., 0.)]
CALLS = [dict(output_tool_calls=[dict(name='count', arguments_json='{}')], finish_reason=None)]*3
PLAYED = dict(run_id='r', aborted=False, metrics=dict(episode_returns=[1.], mean_return=1., num_steps=3), pipeline_metadata=dict(inference_url=URL),
    trajectories=[dict(env_id='e', policy_id='p', steps=STEPS, length=3, inference_url=URL)],
    trace=dict(session_trace=dict(session_id='r', created_at='datetime.datetime(2026, 1, 1, 12, 0)', # as an older task app has it
        event_history=[dict(call_records=[o]) for o in CALLS] + [dict(reward=s['reward']) for s in STEPS])))

class Stub:
    "A task app whose answers are written beforehand; it remembers what it was asked"
    def __init__(self, **answers): self.answers,self.asked = answers,[]
    def of(self, path): return [o for o in self.asked if o[1] == path]

    async def __call__(self, scope, receive, send):
        request = Request(scope, receive)
        body = await request.body()
        self.asked.append((scope['method'], scope['path'], dict(request.headers), json.loads(body or 'null')))
        answer = self.answers.get(scope['path'].strip('/').replace('/', '_') or 'root', JSONResponse(dict(detail='Not Found'), 404))
        if isinstance(answer, list): answer = answer.pop(0) if len(answer) > 1 else answer[0]
        if callable(answer) and not isinstance(answer, Response): answer = await answer(request)
        await (answer if isinstance(answer, Response) else JSONResponse(answer))(scope, receive, send)

def refusal(status, code, message='no', **more): return JSONResponse(dict(detail=dict(error=dict(code=code, message=message, **more))), status)

@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    async def pause(seconds): pass
    monkeypatch.setattr(client_module, 'pause', pause)

def to(stub, **how): return TaskAppClient(app=stub, **how)

@pytest.mark.parametrize('url', ['', 'localhost:8765', 'ftp://a', None, 'http://'])
def test_an_address_that_is_none(url):
    with pytest.raises(ClientError, match='give one such as http://127.0.0.1:8765'): TaskAppClient(url)

def test_an_address_shows_no_password():
    with pytest.raises(ClientError) as e: TaskAppClient('http://me:geheim123@host')
    assert 'geheim' not in str(e.value)

def test_nothing_is_there():
    with pytest.raises(EndpointDown, match='start the task app'): TaskAppClient('http://127.0.0.1:9').health()

@pytest.mark.parametrize('given', [None, 'synth_lab'])
def test_the_key_is_sent_as_task_apps_read_it(given, monkeypatch):
    monkeypatch.setenv('ENVIRONMENT_API_KEY', KEY)
    stub = Stub(health=dict(healthy=True))
    assert to(stub, key=given).health() == dict(healthy=True)
    [(_,_,headers,_)] = stub.asked
    assert (headers['x-api-key'], headers['authorization']) == (given or KEY, f'Bearer {given or KEY}')

def test_a_task_app_gets_no_key_of_a_model(monkeypatch):
    for k in ('OPENAI_API_KEY', 'GROQ_API_KEY', 'SYNTH_API_KEY'): monkeypatch.setenv(k, 'sk-of-a-model-provider')
    client = TaskAppClient('https://api.groq.com/openai')
    assert 'x-api-key' not in client._line._headers and 'authorization' not in client._line._headers

@pytest.mark.parametrize('answer', [refusal(401, 'unauthorised'), refusal(400, 'unauthorised', allowed_first15=[KEY[:15]]), refusal(403, 'forbidden'), JSONResponse(dict(detail='no'), 401)])
def test_a_wrong_key_names_its_variable_and_shows_nothing(answer):
    with pytest.raises(AuthError, match='set ENVIRONMENT_API_KEY') as e: to(Stub(health=answer), key=KEY).health()
    assert KEY[:10] not in str(e.value) and KEY not in repr(e.value)

@pytest.mark.parametrize('answer,error,said', [
    (JSONResponse(dict(detail='Not Found'), 404), BadRequest, 'without a path'),
    (JSONResponse(dict(error=dict(message='Not Found: GET /health', type='invalid_request_error')), 404), BadRequest, 'without a path'), # as a server of models has it
    (Response('<html>hello</html>', 200), BadRequest, 'nothing that a task app says.*without a path'),
    (JSONResponse([1], 200), BadRequest, 'without a path'),
    (Response('no', 405), BadRequest, 'without a path'),
    (JSONResponse(dict(detail=[dict(loc=['body', 'env', 'seed'], msg='Input should be a valid integer')]), 422), BadRequest, 'env.seed: Input should be a valid integer'),
    (refusal(422, 'invalid_request', 'there is no key `temprature`', fix='did you mean `temperature`?'), BadRequest, 'answered 422: there is no key `temprature` → did you mean `temperature`?'),
    (refusal(404, 'unknown_run', 'there is no run `a`'), NotFound, 'there is no run `a`'),
    (JSONResponse(dict(detail='Run a not found'), 404), NotFound, 'Run a not found'),
    (refusal(503, 'missing_environment_api_key', 'no key'), ServerError, 'with ENVIRONMENT_API_KEY set'),
    (refusal(502, 'inference_failed', 'the model is away'), ServerError, 'the model is away')])
def test_an_error_says_what_to_do(answer, error, said):
    stub = Stub(run_status_a=answer)
    with pytest.raises(error, match=said): to(stub).status('a')
    assert len(stub.asked) == 1

def test_a_look_is_repeated():
    stub = Stub(health=[Response('bad gateway', 502), refusal(429, 'busy'), dict(healthy=True)])
    assert to(stub).health()['healthy'] and len(stub.asked) == 3

@pytest.mark.parametrize('answer', [refusal(502, 'inference_failed'), Response('', 502), Response('', 504), JSONResponse(dict(detail='oops'), 500)])
def test_a_rollout_that_may_have_begun_is_not_repeated(answer):
    stub = Stub(rollout=[answer, PLAYED])
    with pytest.raises(ServerError): to(stub).rollout(0, policy=POLICY)
    assert len(stub.of('/rollout')) == 1

def test_a_rollout_that_was_turned_away_is_asked_for_again():
    stub = Stub(rollout=[refusal(429, 'busy'), PLAYED])
    assert to(stub).rollout(0, policy=POLICY)['metrics'] == PLAYED['metrics']
    first,second = stub.of('/rollout')
    assert first[3] == second[3] # under the same run id

def test_a_rollout_whose_connection_breaks_is_not_repeated():
    async def server():
        count = 0
        async def broken(reader, writer):
            nonlocal count
            await reader.readuntil(b'\r\n\r\n')
            count += 1
            writer.close()
        async with await asyncio.start_server(broken, '127.0.0.1', 0) as s:
            client = AsyncTaskAppClient('http://{}:{}'.format(*s.sockets[0].getsockname()))
            client._line._reached = True
            with pytest.raises(EndpointDown): await client.rollout(0, policy=POLICY)
            once,_ = count,await client._line.aclose()
            with pytest.raises(EndpointDown): await client.health()
            return once,count
    rollouts,all_ = asyncio.run(server())
    assert rollouts == 1 and all_ > client_module.settings().limits.attempts # aiohttp repeats a GET on its own, too

async def sleepy(request): await asyncio.sleep(30)

def test_a_rollout_that_takes_too_long_is_ended():
    stub = Stub(rollout=sleepy, run_abort=dict(ok=True))
    with pytest.raises(EndpointSlow, match='within 0.05 s → give the client a longer timeout='): to(stub, timeout=.05).rollout(0, policy=POLICY, run_id='mine')
    assert [o[3] for o in stub.of('/run/abort')] == [dict(run_id='mine')] and len(stub.of('/rollout')) == 1

def test_a_rollout_that_is_given_up_is_ended():
    stub = Stub(rollout=sleepy, run_abort=dict(ok=True))
    async def give_up():
        task = asyncio.create_task(AsyncTaskAppClient(app=stub).rollout(0, policy=POLICY, run_id='mine'))
        while not stub.asked: await asyncio.sleep(.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError): await task
    asyncio.run(give_up())
    assert [o[3] for o in stub.of('/run/abort')] == [dict(run_id='mine')]

def test_redirects_on_the_host_are_followed():
    stub = Stub(rollout=RedirectResponse('/wait?call=1', 303), wait=[RedirectResponse('/wait?call=1', 303), PLAYED])
    assert to(stub).rollout(0, policy=POLICY)['run_id'] == PLAYED['run_id']
    assert [o[:2] for o in stub.asked] == [('POST', '/rollout'), ('GET', '/wait'), ('GET', '/wait')]

def test_a_redirect_keeps_what_is_posted_where_it_says_so():
    stub = Stub(rollout=RedirectResponse('/v2/rollout', 307), v2_rollout=PLAYED)
    to(stub).rollout(0, policy=POLICY)
    assert stub.asked[0][3] == stub.asked[1][3] and stub.asked[1][0] == 'POST'

def test_no_redirect_carries_the_key_elsewhere():
    with serving(there := Stub(health=dict(healthy=True))) as url:
        elsewhere = url.replace('127.0.0.1', 'localhost')
        with serving(Stub(health=RedirectResponse(f'{elsewhere}/health', 307))) as here:
            with pytest.raises(BadRequest, match='localhost'): TaskAppClient(here, key=KEY).health()
    assert not there.asked

def test_what_is_asked_for():
    asked = rollout_request(7, 'expert', 2, run_id='r', safety=dict(max_ops=9), on_done='reset', record=dict(logprobs=True), env='crafter', trace_format='full')
    assert asked == dict(run_id='r', env=dict(env_name='crafter', seed=7), policy=dict(config=dict(model='expert')), ops=['agent', 'env', 'agent', 'env'], mode='eval',
        record=dict(return_trace=True, trace_format='full', logprobs=True), on_done='reset', safety=dict(max_ops=9))
    whole = rollout_request(1, dict(policy_name='react', config=POLICY), ops=['agent'], env=dict(env_name='crafter', config=dict(difficulty='hard')), trace_format=None)
    assert whole['policy'] == dict(policy_name='react', config=POLICY) and whole['env'] == dict(env_name='crafter', config=dict(difficulty='hard'), seed=1)
    assert (whole['record'], whole['ops']) == (dict(return_trace=False), ['agent']) and 'on_done' not in whole and 'safety' not in whole
    assert rollout_request(1, 'm')['run_id'] != rollout_request(1, 'm')['run_id']

def test_tasks_come_in_the_form_in_which_they_were_asked_for():
    task = dict(task=dict(id='a'))
    assert to(Stub(task_info=dict(taskset={}))).task_info() == dict(taskset={})
    assert to(Stub(task_info=task)).task_info(3) == task
    assert to(Stub(task_info=task)).task_info([3]) == [task] # alone, it comes without a list
    assert to(Stub(task_info=[[task, task]])).task_info([3, 4]) == [task, task]
    assert to(Stub()).task_info([]) == []

def test_an_answer_that_is_no_rollout():
    with pytest.raises(ServerError, match='without a rollout'): to(Stub(rollout=dict(ok=True))).rollout(0, policy=POLICY)

def test_what_a_trainer_misses():
    assert missing_for_rl(PLAYED) == []
    def told(**more): return '; '.join(missing_for_rl(PLAYED | more))
    assert 'pipeline_metadata.inference_url' in told(pipeline_metadata=dict(inference_url='http://h/v1?x=1&cid=2'))
    assert 'trajectories: List should have at least 1 item' in told(trajectories=[])
    assert 'the mean of the returns is' in told(metrics=PLAYED['metrics'] | dict(mean_return=7.))
    [trajectory] = PLAYED['trajectories']
    bare = [trajectory | dict(steps=[trajectory['steps'][0] | dict(info={})], length=1)]
    assert told(trajectories=bare) == 'trajectories.0.steps.0.info.meta: Field required'
    assert 'trajectories.0.length is 9' in told(trajectories=[trajectory | dict(length=9)])

def test_what_a_trace_does_not_say():
    "The trace of an older task app holds the reprs of its times, and not why a call ended"
    assert missing_in_trace(PLAYED) == ["created_at is 'datetime.datetime(2026, 1, 1, 12, 0)', which is no time", 'a call does not say why the model stopped']
    session = PLAYED['trace']['session_trace'] | dict(created_at='2026-01-01T12:00:00Z', event_history=[])
    assert missing_in_trace(PLAYED | dict(trace=session)) == ['it has 0 calls for 3 decisions', 'its rewards add up to 0, those of the steps to 1']
    assert missing_in_trace(PLAYED | dict(trace=None)) == ['there is no trace']

def older():
    "A task app with the faults of an older one"
    app = FastAPI()
    def refused(request): return None if request.headers.get('x-api-key') == KEY else refusal(400, 'unauthorised', allowed_first15=[KEY[:15]])
    @app.middleware('http')
    async def door(request, go): return (request.url.path != '/' and refused(request)) or await go(request)
    @app.get('/')
    def root(): return dict(status='ok', service='older')
    @app.get('/health')
    def health(): return dict(healthy=True, auth=dict(required=True, expected_prefix=KEY[:6]))
    @app.get('/info')
    def info(): return dict(service=dict(task=dict(id='a', name='A')), dataset='<circular type=dict>', inference={}, limits={})
    @app.get('/task_info')
    def task_info(seed:int=None):
        return dict(taskset={}) if seed is None else dict(task=dict(id='a', name='A'), environment='a', dataset=dict(seed=seed), rubric={}, inference={}, limits={}, seen=time.time_ns())
    return app

def test_the_checks_find_the_faults_of_an_older_task_app():
    found = validate(TaskAppClient(app=older(), key=KEY))
    said = {o.name:o.said for o in found.rows if o.ok is False}
    assert set(said) == {'key', 'info', 'tasks', 'refusal', 'runs'} and not found.ok
    assert said['key'] == 'a wrong key is answered by 400 in place of 401'
    assert said['info'] == "GET /info has to hold an object `dataset`, and holds '<circular type=dict>'"
    assert said['tasks'] == 'the same seed gives another task the second time'
    assert [o.ok for o in found.rows if o.name in ('trainer', 'trace', 'seeds', 'limits')] == [None]*4
    assert '5 of 11 checks failed' in repr(found) and KEY[:6] not in repr(found)

def test_the_checks_survive_what_is_no_task_app():
    found = validate(TaskAppClient(app=Stub(root=[1, 2], health=dict(healthy=1, auth=3), info=dict(service=3))))
    assert [o.name for o in found.rows if o.ok] == [] and all(o.said for o in found.rows)
