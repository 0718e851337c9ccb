"The models in the box as an endpoint: in process and over a socket"
import asyncio, json, math, os, signal, socket, subprocess, sys, time

import httpx, orjson, pytest

from synth_lab.agent import Agent, turn
from synth_lab.client import AsyncInferenceClient, BadRequest, InferenceClient
from synth_lab.core import LabError
from synth_lab.serve import create_app, serving, serving_process
from synth_lab.tools import interact_many, read_reply
from synth_lab.view import format, look
from synth_lab.world import ACTIONS, World

BOX = ('random', 'expert', 'student')
TOOLS = [interact_many(4)]

@pytest.fixture(scope='module')
def obs(): return format(look(World(seed=5), 200))

@pytest.fixture(scope='module')
def app(tmp_path_factory): return create_app(tmp_path_factory.mktemp('models'))

@pytest.fixture(scope='module')
def client(app): return InferenceClient(app=app)

def ask(client, obs, model='student', tools=TOOLS, **kw):
    return client.chat.completions.create(model=model, messages=[dict(role='system', content='Play.'), dict(role='user', content=obs)], tools=tools, **kw)

def send(app, body, path='/v1/chat/completions', method='POST'):
    async def go():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url='http://local') as http:
            return await http.request(method, path, content=body if isinstance(body, bytes) else orjson.dumps(body))
    return asyncio.run(go())

@pytest.mark.parametrize('model', BOX)
def test_every_model_answers_with_one_usable_call(client, obs, model):
    r = ask(client, obs, model, seed=3)
    reply = read_reply(r.choices[0])
    assert reply.verdict == 'ok' and 1 <= len(reply.actions) <= 4 and reply.thought
    assert r.choices[0].message == reply.message | dict(tool_calls=r.choices[0].message.tool_calls)
    assert (r.model, r.object, r.choices[0].finish_reason, r.choices[0].logprobs) == (model, 'chat.completion', 'tool_calls', None)
    assert r.usage == dict(prompt_tokens=len(obs.split()) + 1, completion_tokens=len(reply.actions), total_tokens=len(obs.split()) + 1 + len(reply.actions))

@pytest.mark.parametrize('model', BOX)
def test_a_seed_fixes_the_reply_in_process_and_over_a_socket(app, client, obs, model):
    with serving(app) as url: remote = ask(InferenceClient(base_url=url), obs, model, seed=11, logprobs=True)
    assert ask(client, obs, model, seed=11, logprobs=True).choices == remote.choices

def test_seeds_differ(client, obs): assert len({str(ask(client, obs, seed=i).choices) for i in range(8)}) > 4

@pytest.mark.parametrize('seed', [0, -1, 2**63, None])
def test_any_seed_will_do(client, obs, seed): assert ask(client, obs, seed=seed).choices

def test_one_logprob_for_each_action(client, obs):
    entries = ask(client, obs, 'random', seed=1, logprobs=True).choices[0].logprobs.content
    assert len(entries) == 4 and all(o.logprob == pytest.approx(-math.log(len(ACTIONS))) for o in entries)
    choice = ask(client, obs, 'student', seed=1, logprobs=True).choices[0]
    assert tuple(o.token for o in choice.logprobs.content) == read_reply(choice).actions
    assert all(o.logprob < 0 for o in choice.logprobs.content)

def test_temperature_0_is_greedy(client, obs):
    assert len({str(ask(client, obs, temperature=0, seed=i).choices[0].message) for i in range(5)}) == 1

@pytest.mark.parametrize('most', [1, 3])
def test_the_schema_limits_the_call(client, obs, most):
    assert len(read_reply(ask(client, obs, 'random', tools=[interact_many(most)]).choices[0]).actions) == most

def test_without_tools_the_call_is_in_the_text(client, obs):
    choice = ask(client, obs, 'expert', tools=None).choices[0]
    assert choice.finish_reason == 'stop' and choice.message.tool_calls is None and read_reply(choice).verdict == 'ok'

def test_the_observation_may_come_from_a_tool_or_in_parts(client, obs):
    parts = [dict(type='text', text=o) for o in ('You see:', obs, 'What now?')]
    for message in (dict(role='tool', tool_call_id='c', content=obs), dict(role='user', content=parts)):
        assert client.chat.completions.create(model='expert', messages=[message], tools=TOOLS).choices

@pytest.mark.parametrize('change, status, code, word', [
    (dict(model='exprt'), 404, 'model_not_found', 'expert'), (dict(messages=[dict(role='user', content='Hello!')]), 422, 'no_observation', 'observation'),
    (dict(messages=[]), 422, 'no_observation', 'observation'), (dict(messages=[dict(role='user', content=None)]), 422, 'no_observation', 'observation'),
    (dict(stream='maybe'), 400, 'bad_request', 'stream'), (dict(temperature=-1), 400, 'bad_request', 'temperature'), (dict(n=0), 400, 'bad_request', 'n'),
    (dict(max_tokens=0), 400, 'bad_request', 'max_tokens'), (dict(tool_choice='always'), 400, 'bad_request', 'tool_choice'),
    (dict(tool_choice='required', tools=None), 400, 'bad_request', 'no tools'), (dict(tool_choice=dict(type='function', function=dict(name='look'))), 400, 'bad_request', 'interact_many'),
    (dict(messages='x'), 400, 'bad_request', 'messages'),
    (dict(tools=[dict(type='function', function=dict(name='look'))]), 400, 'bad_request', 'interact_many'),
    (dict(tools=[{}]), 400, 'bad_request', 'interact_many'), (dict(tools=[interact_many(0)]), 400, 'bad_request', 'maxItems'),
    (dict(tools=[interact_many('9')]), 400, 'bad_request', 'maxItems'), (dict(model=None), 400, 'bad_request', 'model')])
def test_refusals(app, obs, change, status, code, word):
    r = send(app, dict(model='expert', messages=[dict(role='user', content=obs)], tools=TOOLS) | change)
    assert (r.status_code, r.json()['error']['code']) == (status, code) and word in r.json()['error']['message']

@pytest.mark.parametrize('stream', [False, True])
def test_a_refusal_names_its_field(app, stream):
    r = send(app, dict(model='expert', messages=[], tools=[{}], stream=stream, temperature=-1))
    assert r.status_code == 400 and r.json() == {'error': dict(type='invalid_request_error', code='bad_request', param='temperature',
        message='temperature: Input should be greater than or equal to 0 → see the chat completions API for what this field may hold')}

@pytest.mark.parametrize('method, path, status', [('POST', '/v1/nothing', 404), ('GET', '/v1/chat/completions', 405), ('GET', '/v1/models/exprt', 404), ('GET', '/v1/models/ft:a/b:job_x', 404)])
def test_every_error_has_the_shape_of_the_api(app, method, path, status):
    r = send(app, b'', path, method)
    assert r.status_code == status and set(r.json()['error']) == {'message', 'type', 'param', 'code'}

@pytest.mark.parametrize('name', ['max_tokens', 'max_completion_tokens'])
def test_a_limit_cuts_the_call_as_it_cuts_a_text(client, obs, name):
    whole = ask(client, obs, 'random', seed=1, logprobs=True).choices[0]
    r = ask(client, obs, 'random', seed=1, logprobs=True, **{name: 2})
    choice,actions = r.choices[0],read_reply(whole).actions
    assert (choice.finish_reason, read_reply(choice).verdict, r.usage.completion_tokens) == ('length', 'truncated', 2)
    assert choice.message.tool_calls[0].function.arguments == f'{{"actions":["{actions[0]}","{actions[1]}"'
    assert choice.logprobs.content == whole.logprobs.content[:2]
    text = ask(client, obs, 'random', seed=1, tools=None, **{name: 1}).choices[0]
    assert (text.finish_reason, read_reply(text).verdict) == ('length', 'truncated')
    assert ask(client, obs, 'random', seed=1, **{name: 4}).choices[0].message == whole.message

def test_n_replies_of_which_the_first_is_that_of_one(client, obs):
    one,three = ask(client, obs, 'random', seed=5),ask(client, obs, 'random', seed=5, n=3)
    assert [o['index'] for o in three.choices] == [0, 1, 2] and three.choices[0] == one.choices[0] and three.choices[1].message != one.choices[0].message
    assert three.usage.completion_tokens == 12

@pytest.mark.parametrize('choice, verdict, finish', [('auto', 'ok', 'tool_calls'), ('required', 'ok', 'tool_calls'), ('none', 'no_call', 'stop'),
    (dict(type='function', function=dict(name='interact_many')), 'ok', 'tool_calls')])
def test_tool_choice(client, obs, choice, verdict, finish):
    got = ask(client, obs, 'expert', tool_choice=choice).choices[0]
    assert (read_reply(got).verdict, got.finish_reason) == (verdict, finish) and got.message.content

def gathered(chunks):
    "What a stream says, put together by hand: {index of the choice: [text, {index of the call: [id, name, arguments]}, finish reason]}"
    said = {}
    for c in chunks:
        for o in c['choices']:
            row = said.setdefault(o['index'], ['', {}, None])
            row[0] += o['delta'].get('content') or ''
            row[2] = o['finish_reason'] or row[2]
            for call in o['delta'].get('tool_calls', ()):
                known = row[1].setdefault(call['index'], [call.get('id'), call['function'].get('name'), ''])
                known[2] += call['function']['arguments']
    return said

@pytest.mark.parametrize('more', [{}, dict(tools=None), dict(tool_choice='none'), dict(max_tokens=1), dict(n=2)])
def test_a_stream_says_what_the_reply_says(app, obs, more):
    body = dict(model='random', messages=[dict(role='user', content=obs)], tools=TOOLS, seed=3, logprobs=True) | more
    whole = send(app, body).json()
    r = send(app, body | dict(stream=True, stream_options=dict(include_usage=True)))
    *lines,done,end = r.text.split('\n\n')
    chunks = [json.loads(o.removeprefix('data: ')) for o in lines]
    assert (r.headers['content-type'].split(';')[0], done, end) == ('text/event-stream', 'data: [DONE]', '')
    assert gathered(chunks) == {c['index']: [c['message'].get('content') or '',
        {i: [o['id'], o['function']['name'], o['function']['arguments']] for i,o in enumerate(c['message'].get('tool_calls', ()))}, c['finish_reason']] for c in whole['choices']}
    assert [c['usage'] for c in chunks] == [None]*(len(chunks) - 1) + [whole['usage']] and chunks[-1]['choices'] == []
    assert [o['logprobs'] for c in chunks for o in c['choices'] if o['finish_reason']] == [c['logprobs'] for c in whole['choices']]

@pytest.mark.parametrize('body', [b'', b'{', b'[]', b'null', b'\xff'])
def test_a_body_that_is_no_request(app, body): assert send(app, body).status_code == 400

def test_paths_with_and_without_v1(app, obs):
    body = dict(model='expert', messages=[dict(role='user', content=obs)])
    assert [send(app, body, p).status_code for p in ('/chat/completions', '/v1/chat/completions')] == [200, 200]
    for path in ('/models', '/v1/models'):
        r = send(app, b'', path, 'GET').json()
        assert [o['id'] for o in r['data']] == list(BOX) and all(o['object'] == 'model' and isinstance(o['created'], int) for o in r['data'])

def test_a_checkpoint_of_other_features_is_refused(tmp_path, obs):
    (tmp_path/'ft-student-job_x').mkdir()
    config = dict(model='ft:student:job_x', kind='student', features='other', hidden=128, created='2026-01-01T00:00:00.000Z')
    (tmp_path/'ft-student-job_x'/'config.json').write_text(json.dumps(config))
    client = InferenceClient(app=create_app(tmp_path))
    assert [o.id for o in client.models.list()] == [*BOX, 'ft:student:job_x']
    with pytest.raises(BadRequest, match='features'): ask(client, obs, 'ft:student:job_x')

def test_the_default_endpoint_needs_nothing(tmp_path, obs):
    code = '''
import sys
from synth_lab.client import InferenceClient
r = InferenceClient().chat.completions.create(model='expert', messages=[dict(role='user', content=sys.argv[1])])
print(r.choices[0].message.content)
'''
    done = subprocess.run([sys.executable, '-c', code, obs], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert '<tool_call>' in done.stdout and (done.stderr, done.returncode, list(tmp_path.iterdir())) == ('', 0, [])

def test_a_port_is_taken_and_given_back(app):
    with serving(app) as url:
        port = httpx.URL(url).port
        with pytest.raises(LabError, match=f'{port}.*process {os.getpid()}.*another port'):
            with serving(app, port=port): pass
    socket.create_server(('127.0.0.1', port)).close()

def test_what_is_sent_leaves_at_once():
    "Without TCP_NODELAY each call on an open connection waits some 45 ms for the other side's acknowledgement"
    async def app(scope, receive, send):
        at_once = send.__self__.transport.get_extra_info('socket').getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        await send(dict(type='http.response.start', status=200, headers=[]))
        await send(dict(type='http.response.body', body=b'%d' % bool(at_once)))
    with serving(app) as url: assert httpx.get(url).text == '1'

def test_a_process_serves_and_ends_with_the_block(tmp_path):
    with serving_process('synth_lab.serve:create_app', dict(models=str(tmp_path))) as url:
        assert [o['id'] for o in httpx.get(f'{url}/models').json()['data']] == list(BOX)
        with pytest.raises(LabError, match='another port'):
            with serving_process('synth_lab.serve:app', port=httpx.URL(url).port): pass
    with pytest.raises(httpx.ConnectError): httpx.get(f'{url}/models')

def test_a_process_ends_with_a_parent_that_is_killed():
    code = """
import time
from synth_lab.serve import serving_process
with serving_process('synth_lab.serve:app') as url:
    print(url, flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE, text=True) as parent:
        url = parent.stdout.readline().strip()
        assert httpx.get(f'{url}/models').status_code == 200
        parent.kill()
    for _ in range(200):
        try: httpx.get(f'{url}/models')
        except httpx.ConnectError: break
        except httpx.TransportError: pass # it went in the middle of an answer
        time.sleep(.05)
    else: pytest.fail('the server outlived its parent')

def test_an_app_that_prints(tmp_path, monkeypatch, capfd):
    (tmp_path/'chatty.py').write_text('print("Hello!")\nfrom synth_lab.serve import app\n')
    monkeypatch.setenv('PYTHONPATH', str(tmp_path))
    with serving_process('chatty:app') as url: assert httpx.get(f'{url}/models').status_code == 200
    assert capfd.readouterr() == ('', 'Hello!\n')

def test_a_server_that_is_interrupted_ends():
    code = "from synth_lab.serve import serve; serve('synth_lab.serve:app', port=0, ready=lambda url: print(url, flush=True))"
    with subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        url = server.stdout.readline().strip()
        assert httpx.get(f'{url}/models').status_code == 200
        server.send_signal(signal.SIGINT)
        assert (server.wait(20), server.stderr.read()) == (0, '')

def test_an_app_that_is_not_there(capfd):
    with pytest.raises(LabError, match='synth_lab.serve:nothing'):
        with serving_process('synth_lab.serve:nothing'): pass
    assert 'nothing' in capfd.readouterr().err

def test_a_turn_carries_what_rl_needs(app, obs):
    t = asyncio.run(turn(Agent('student', max_actions=3), AsyncInferenceClient(app=app), [], obs, seed=2))
    assert len(t.logprobs) == len(t.reply.actions) <= 3 and t.cost == 0. and t.usage['completion_tokens'] == len(t.reply.actions)
    assert t.payload['messages'][-1]['content'] == obs and t.memory.user == obs and len(t.attempts) == 1
    expert = asyncio.run(turn(Agent('expert'), AsyncInferenceClient(app=app), [], obs, seed=2))
    assert expert.logprobs is None
