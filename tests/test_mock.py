"The mock server: what each fault looks like to a client, over a socket and in process, in each dialect"
import asyncio, time
from collections import Counter

import httpx, orjson, pytest

import synth_lab.client
from synth_lab.agent import Agent, turn
from synth_lab.client import AsyncInferenceClient, AuthError, BadRequest, ContextLength, Endpoint, ModelNotFoundError, NotPromoted, PermissionDenied, QuotaSpent
from synth_lab.core import LabError
from synth_lab.dialects import DIALECTS
from synth_lab.mock import FAULTS, REPLIES, SHAPES, mock, mock_process, schedule
from synth_lab.serve import serving
from synth_lab.tools import interact_many, read_reply
from synth_lab.view import format, look
from synth_lab.world import ACTIONS, World

ASKED = dict(model='mock', messages=[dict(role='user', content='What now?')], tools=[interact_many()], max_tokens=64)
RETRIED = [k for k,v in FAULTS.items() if v.outcome == 'retry']

def meet(url, **more):
    "The response, or the name of the error that httpx raises"
    try: return httpx.post(f'{url}/chat/completions', json=ASKED | more, timeout=5)
    except httpx.HTTPError as e: return type(e).__name__

def served(app, calls=1, **more):
    with serving(app) as url: found = [meet(url, **more) for _ in range(calls)]
    return found[0] if calls == 1 else found

def in_process(app, **more):
    async def go():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url='http://local/v1') as http:
            try: return await http.post('/chat/completions', json=ASKED | more)
            except httpx.HTTPError as e: return type(e).__name__
    return asyncio.run(go())

def usable(response):
    "Whether a response holds a choice"
    try: return isinstance(response.json()['choices'][0], dict)
    except (AttributeError, ValueError, KeyError, IndexError): return False

@pytest.fixture(scope='module')
def once():
    "(a mock whose call meets the fault that its `user` names, the first time; its URL)"
    met = set()
    def fault(n, asked): return None if (kind := asked.get('user')) in met else met.add(kind) or kind
    app = mock(faults=fault, slow=.02, wait=0., plays=['do'])
    with serving(app) as url: yield app,url

@pytest.mark.parametrize('kind', FAULTS)
@pytest.mark.parametrize('socket', [False, True])
def test_each_kind_is_what_its_row_says(once, kind, socket):
    r,fault = meet(once[1], user=kind) if socket else in_process(mock(faults=[kind], slow=.02)),FAULTS[kind]
    assert usable(r) == (fault.outcome not in ('retry', 'final'))
    if fault.wire.startswith('cut'): assert r == ('RemoteProtocolError' if socket else 'ReadError')
    else: assert r.status_code == fault.status
    if not usable(r): return
    choice,usage = r.json()['choices'][0],r.json()['usage']
    assert read_reply(choice, cut=usage['completion_tokens'] >= 64).verdict == fault.outcome
    assert usage['total_tokens'] == usage['prompt_tokens'] + usage['completion_tokens']

@pytest.mark.parametrize('dialect', SHAPES)
@pytest.mark.parametrize('kind', REPLIES)
def test_each_reply_in_each_dialect(kind, dialect):
    r,outcome = in_process(mock(faults=[kind], dialect=dialect, plays=['move_left'])),FAULTS[kind].outcome
    if dialect == 'groq' and outcome in ('malformed', 'unknown_tool', 'invalid_action'):
        error = r.json()['error']
        assert (r.status_code, error['code']) == (400, 'tool_use_failed') and FAULTS[kind].said.get('arguments', '{"actions":') in error['failed_generation']
    else: assert read_reply(r.json()['choices'][0], cut=r.json()['usage']['completion_tokens'] == 64).verdict == outcome

def message(dialect):
    choice = in_process(mock(dialect=dialect, plays=['do'])).json()['choices'][0]
    return choice['message'],choice['finish_reason']

def test_the_shapes_of_dialects():
    assert SHAPES.keys() == DIALECTS.keys()
    call = dict(id='call_0', type='function', function=dict(name='interact_many', arguments='{"actions":["do"]}'))
    assert message('openai') == (dict(role='assistant', content=None, refusal=None, annotations=[], tool_calls=[call]), 'tool_calls')
    assert message('groq') == (dict(role='assistant', reasoning='I walk on.', tool_calls=[call]), 'tool_calls')
    assert message('vllm') == (dict(role='assistant', content=None, reasoning_content='I walk on.', tool_calls=[call | dict(id='chatcmpl-tool-0')]), 'tool_calls')
    assert message('synth') == (dict(role='assistant', content='', reasoning_content='I walk on.', tool_calls=[call]), 'tool_calls')
    assert message('ollama') == (dict(role='assistant', content='', reasoning='I walk on.', tool_calls=[call]), 'tool_calls')
    as_object = dict(id='', type='function', function=dict(name='interact_many', arguments=dict(actions=['do'])))
    assert message('llamacpp') == (dict(role='assistant', content=None, reasoning_content='I walk on.', tool_calls=[as_object]), 'tool_calls')
    assert message('lmstudio') == (dict(role='assistant', content='<think>\nI walk on.\n</think>\n\n<tool_call>\n'
        '{"name": "interact_many", "arguments": {"actions":["do"]}}\n</tool_call>'), 'stop')
    assert message('local') == (dict(role='assistant', content='I walk on.', tool_calls=[call]), 'tool_calls')

def hint(kind, wait):
    r = in_process(mock(faults=[kind], wait=wait))
    return {k: v for k,v in r.headers.items() if k not in ('content-type', 'content-length')},r.json()['error']

def test_every_form_of_saying_when():
    assert [hint(k, 2.5)[0] for k in ('rate_limit', 'retry_after', 'retry_after_fraction', 'retry_after_ms', 'retry_after_garbage', 'reset_header')] == [
        {}, {'retry-after':'2'}, {'retry-after':'2.5'}, {'retry-after-ms':'2500'}, {'retry-after':'soon'},
        {'x-ratelimit-remaining-requests':'0', 'x-ratelimit-reset-requests':'2500ms'}]
    assert hint('retry_in_text', 2.5)[1]['message'].endswith('Please try again in 2.5s.')
    assert hint('retry_delay', 2.5)[1]['details'][0]['retryDelay'] == '2.5s'
    assert httpx.Headers(hint('retry_after_date', 60)[0])['retry-after'].endswith('GMT')

@pytest.fixture
def no_waiting(monkeypatch):
    async def pause(seconds): pass
    monkeypatch.setattr(synth_lab.client, 'pause', pause)

@pytest.mark.parametrize('kind', RETRIED)
def test_our_client_asks_again(kind, no_waiting):
    app = mock(faults=[kind], wait=0., plays=['do'])
    body,attempts = asyncio.run(AsyncInferenceClient(app=app).post(ASKED))
    assert read_reply(body['choices'][0]).actions == ('do',) and len(attempts) == 2 and attempts[0]['error'] and attempts[1]['error'] is None
    assert app.calls[0]['asked'] == app.calls[1]['asked'] and app.counts == {kind: 1, 'good': 1}

def test_our_client_asks_again_over_a_socket(no_waiting):
    broken = ['cut', 'cut_body', 'half_body', 'html', 'empty_body', 'no_choices', 'error_in_body']
    app = mock(faults=[kind for o in broken for kind in (o, None)], plays=['do'])
    async def go(url):
        client = AsyncInferenceClient(base_url=url)
        return [len((await client.post(ASKED))[1]) for _ in broken]
    with serving(app) as url: assert asyncio.run(go(url)) == [2]*7
    assert app.counts == dict.fromkeys(broken, 1) | dict(good=7)

@pytest.mark.parametrize('kind, error', [('bad_key', AuthError), ('forbidden', PermissionDenied), ('no_model', ModelNotFoundError), ('not_promoted', NotPromoted),
    ('bad_request', BadRequest), ('too_long', ContextLength), ('quota', QuotaSpent)])
def test_our_client_does_not_ask_again(kind, error):
    app = mock(faults=[kind])
    with pytest.raises(error) as e: asyncio.run(AsyncInferenceClient(app=app).post(ASKED))
    assert len(e.value.attempts) == 1 and app.counts == {kind: 1}

@pytest.mark.parametrize('field', ['thinking', 'reasoning_content', 'logprobs'])
def test_fields_that_a_server_does_not_know(field):
    asked = dict(messages=[dict(role='assistant', content='', reasoning_content='Hm.')]) if field == 'reasoning_content' else {field: True}
    taken = {o for o in SHAPES if in_process(mock(dialect=o), **asked).status_code == 200}
    assert SHAPES.keys() - taken == {'openai', 'groq'} - ({'openai'} if field == 'logprobs' else set())
    assert f'supplied: {field}' in in_process(mock(dialect='groq'), **asked).json()['error']['message']

@pytest.mark.parametrize('dialect', SHAPES)
def test_our_agent_in_each_dialect(dialect):
    obs,agent = format(look(World(seed=4), 200)),Agent('mock', max_tokens=64, history='full', keep_thoughts=True)
    async def go(url):
        client = AsyncInferenceClient(base_url=Endpoint('mock', url, dialect=DIALECTS[dialect]))
        first = await turn(agent, client, [], obs, seed=0)
        return [first.reply, *[(await turn(agent, client, [first.memory], obs, seed=0)).reply for _ in REPLIES]]
    with serving(mock(faults=[None, *REPLIES], dialect=dialect, plays=['do'])) as url: replies = asyncio.run(go(url))
    assert [o.verdict for o in replies] == ['ok', *(v.outcome for v in REPLIES.values())] and replies[0].actions == ('do',)
    assert all(not o.actions for o in replies if o.verdict != 'ok')

STREAM = dict(stream=True, stream_options=dict(include_usage=True))

def test_a_stream():
    lines = served(mock(plays=['do'], dialect='vllm'), **STREAM).text.split('\n\n')
    chunks = [orjson.loads(o[6:]) for o in lines[:-2]]
    deltas = [c['delta'] for o in chunks for c in o['choices']]
    assert lines[-2:] == ['data: [DONE]', ''] and deltas[0] == dict(role='assistant', content=None)
    assert ''.join(o.get('reasoning_content', '') for o in deltas) == 'I walk on.'
    assert ''.join(t['function']['arguments'] for o in deltas for t in o.get('tool_calls', ())) == '{"actions":["do"]}'
    assert chunks[-2]['choices'][0]['finish_reason'] == 'tool_calls' and chunks[-1]['usage']['total_tokens'] > 0

def test_streams_that_break():
    cut,half,error,slow = served(mock(faults=['cut_body', 'half_body', 'error_in_body', 'slow_body'], slow=.05), 4, **STREAM)
    assert cut == 'RemoteProtocolError'
    assert half.status_code == 200 and half.text.startswith('data: {') and '[DONE]' not in half.text
    *_,said,done,_ = error.text.split('\n\n')
    assert orjson.loads(said[6:])['error']['message'] == 'Provider returned error' and done == 'data: [DONE]'
    assert slow.text.endswith('data: [DONE]\n\n')

def test_a_stream_arrives_before_it_is_cut():
    with serving(mock(faults=['cut_body'])) as url, httpx.stream('POST', f'{url}/chat/completions', json=ASKED | STREAM) as r:
        lines = r.iter_lines()
        assert r.headers['content-type'] == 'text/event-stream' and next(lines).startswith('data: {')
        with pytest.raises(httpx.RemoteProtocolError): list(lines)

def test_a_key_is_needed():
    app = mock(key='sk-right')
    with serving(app) as url:
        asked = [httpx.post(f'{url}/chat/completions', json=ASKED, headers=h) for h in ({}, dict(authorization='Bearer sk-wrong'), dict(authorization='Bearer sk-right'))]
        assert httpx.get(f'{url}/models').status_code == 401
    assert [o.status_code for o in asked] == [401, 401, 200] and asked[0].json()['error']['code'] == 'invalid_api_key'
    assert app.counts == dict(good=1) and 'sk-right' not in repr(app)

def test_shares_are_drawn_alike_however_calls_overlap():
    faults = dict(cut=.1, malformed=.2, server_error=0.)
    kinds = [schedule(faults, 3)(n, {}) for n in range(2000)]
    assert kinds == [schedule(faults, 3)(n, {}) for n in range(2000)] != [schedule(faults, 4)(n, {}) for n in range(2000)]
    counts = Counter(kinds)
    assert counts.keys() == {None, 'cut', 'malformed'} and abs(counts['cut'] - 200) < 50 and abs(counts['malformed'] - 400) < 70
    assert {schedule(dict(cut=1.), 0)(n, {}) for n in range(50)} == {'cut'}

def test_a_share_for_all_leaves_out_what_ends_an_episode():
    counts = Counter(schedule(.5)(n, {}) for n in range(5000))
    assert counts.keys() == {None} | {k for k,v in FAULTS.items() if v.outcome != 'final'} and abs(counts[None] - 2500) < 150

def test_a_function_decides():
    app = mock(faults=lambda n, asked: 'server_error' if asked['model'] == 'bad' else None)
    assert [in_process(app, model=o).status_code for o in ('bad', 'good')] == [500, 200]

@pytest.mark.parametrize('faults, words', [(['cutt'], 'did you mean `cut`'), (dict(nothing=.1), 'nothing'), (dict(cut=.7, html=.4), 'add up to 1.1'), (dict(cut=-.1), 'add up')])
def test_schedules_that_cannot_be(faults, words):
    with pytest.raises(LabError, match=words): mock(faults=faults)

def test_what_cannot_be_answered():
    with pytest.raises(LabError, match='did you mean `vllm`'): mock(dialect='vlm')
    with serving(mock(plays='expert')) as url:
        assert [httpx.post(f'{url}/chat/completions', content=o).status_code for o in (b'', b'[]', b'{')] == [400]*3
        assert 'no observation' in meet(url).json()['error']['message'] and httpx.get(f'{url}/nothing').status_code == 404

def test_what_it_plays():
    def actions(**kw): return read_reply(in_process(mock(**kw), messages=[dict(role='user', content=format(look(World(seed=4), 200)))]).json()['choices'][0]).actions
    assert actions(plays=['noop', 'do']) == ('noop', 'do')
    assert len(actions(plays=5)) == 5 and actions(plays=5) == actions(plays=5) != actions(plays=5, seed=1) and set(actions(plays=5)) <= set(ACTIONS)
    assert actions(plays='expert')

def test_the_log_is_bounded():
    app = mock(log=2)
    for i in range(4): in_process(app, seed=i)
    assert [(o['n'], o['asked']['seed']) for o in app.calls] == [(2, 2), (3, 3)] and app.counts == dict(good=4)

def test_a_client_adapts_to_a_server_that_takes_few_at_once():
    app = mock(at_once=4, latency=.005, wait=.01, plays=['do'])
    async def go():
        client = AsyncInferenceClient(app=app)
        return await asyncio.gather(*(client.post(ASKED) for _ in range(40)), return_exceptions=True)
    got = asyncio.run(go())
    assert all(isinstance(o, tuple) and o[1][-1]['http_status'] == 200 for o in got) and app.running == 0
    assert app.counts['good'] == 40 and app.counts['retry_after_ms'] == sum(len(o[1]) - 1 for o in got) > 0

def test_latency_may_be_drawn():
    app = mock(latency=(.01, .03))
    with serving(app) as url:
        began = time.monotonic()
        assert all(usable(meet(url)) for _ in range(5)) and time.monotonic() - began >= .05

def test_a_slow_answer_is_late_and_whole():
    with serving(mock(latency=.1, faults=['slow'], slow=.1)) as url:
        began = time.monotonic()
        assert usable(meet(url)) and time.monotonic() - began >= .2

def test_in_a_process_of_its_own():
    with mock_process(faults=['cut', 'server_error'], dialect='groq') as url:
        assert [o if isinstance(o, str) else o.status_code for o in (meet(url) for _ in range(3))] == ['RemoteProtocolError', 500, 200]
        assert httpx.get(f'{url}/counts').json() == dict(cut=1, server_error=1, good=1)


def test_a_server_of_some_models_knows_no_others():
    with serving(mock(models=['small', 'large'])) as url:
        assert [o['id'] for o in httpx.get(f'{url}/models').json()['data']] == ['small', 'large']
        asked = {m: httpx.post(f'{url}/chat/completions', json=dict(model=m, messages=[])) for m in ('large', 'lrge')}
    assert {m: o.status_code for m,o in asked.items()} == {'large': 200, 'lrge': 404}
    assert asked['lrge'].json()['error']['code'] == 'model_not_found'
