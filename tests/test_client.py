"The client against real servers that misbehave"
import asyncio, contextlib, json, math, socket, subprocess, sys, threading, time, traceback
from dataclasses import replace
from email.utils import formatdate

import orjson, pytest

from synth_lab import client as room
from synth_lab.client import (AsyncInferenceClient, AuthError, BadRequest, ClientError, ContextLength, EndpointDown, InferenceClient, ModelNotFoundError,
    RateLimited, ServerError, endpoint)
from synth_lab.serve import serving

HELLO = dict(model='m', usage=dict(prompt_tokens=10, completion_tokens=2),
    choices=[dict(index=0, finish_reason='stop', message=dict(role='assistant', content='Hello!'))])
ASK = dict(model='m', messages=[dict(role='user', content='Hi')])
NOON = 1_800_000_000. # seconds since 1970
KEY = 'planted-key-0123456789'

def fail(status, message='no', code=None, **headers): return status, headers, dict(error=dict(message=message, code=code))

class Scripted:
    "An ASGI app that gives its answers in order, the last one for ever, and keeps what it was asked"
    def __init__(self, *answers, delay=0): self.answers,self.asked,self.delay,self.now,self.most = list(answers),[],delay,0,0
    async def __call__(self, scope, receive, send):
        status,headers,body = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        self.asked.append((scope['method'], scope['path'], {k.decode():v.decode() for k,v in scope['headers']}))
        self.now += 1
        self.most = max(self.most, self.now)
        if self.delay: await asyncio.sleep(self.delay)
        self.now -= 1
        await send(dict(type='http.response.start', status=status, headers=[(k.replace('_', '-').encode(), v.encode()) for k,v in headers.items()]))
        await send(dict(type='http.response.body', body=body if isinstance(body, bytes) else orjson.dumps(body)))
    @property
    def posts(self): return sum(o[0] == 'POST' for o in self.asked)

OK = (200, {}, HELLO)

class Clock:
    "The client's clock; a wait moves it and takes no time"
    def __init__(self): self.waits = []
    def time(self): return NOON + sum(self.waits)
    def perf_counter(self): return time.perf_counter() + sum(self.waits)
    async def pause(self, seconds):
        self.waits.append(seconds)
        await asyncio.sleep(0)

@pytest.fixture(autouse=True)
def waits(monkeypatch):
    "The waits the client asked for, none of which happens"
    clock = Clock()
    monkeypatch.setattr(room, 'pause', clock.pause)
    monkeypatch.setattr(room, 'time', clock)
    return clock.waits

def post(url=None, payload=ASK, **kw):
    "One call on a loop of its own: (body, attempts)"
    async def go():
        client = AsyncInferenceClient(base_url=url, **kw)
        try: return await client.post(payload)
        finally: await client.aclose()
    return asyncio.run(go())

def failed(cls, *args, **kw):
    with pytest.raises(cls) as e: post(*args, **kw)
    return e.value

# ---- retries

def test_a_server_that_fails_once_is_asked_again(waits):
    with serving(Scripted(fail(500), OK)) as url: body,attempts = post(url)
    assert body == HELLO and [o['http_status'] for o in attempts] == [500, 200]
    assert '500' in attempts[0]['error'] and attempts[1]['error'] is None and attempts[0]['latency_ms'] > 0
    assert len(waits) == 1 and attempts[0]['started_at'] <= attempts[1]['started_at']

@pytest.mark.parametrize('status, cls, tries', [(400, BadRequest, 1), (401, AuthError, 1), (403, AuthError, 1), (422, BadRequest, 1), (303, BadRequest, 1),
    (408, ServerError, 5), (409, ServerError, 5), (425, ServerError, 5), (429, RateLimited, 5), (500, ServerError, 5), (503, ServerError, 5)])
def test_only_what_may_pass_is_tried_again(status, cls, tries, waits):
    app = Scripted(fail(status))
    e = failed(cls, app=app)
    assert (e.status, app.posts, len(e.attempts), len(waits)) == (status, tries, tries, tries-1)
    assert type(e) is cls and e.fix

def test_quota_that_is_spent_is_not_waited_for():
    app = Scripted(fail(429, 'You exceeded your current quota', 'insufficient_quota'))
    failed(RateLimited, app=app)
    assert app.posts == 1

@pytest.mark.parametrize('value, low, high', [('2', 2, 2.5), ('0.5', .5, 1), ('abc', 0, .5), ('', 0, .5), ('-3', 0, .5), ('nan', 0, .5),
    ('9999', 60, 60.5), ('inf', 60, 60.5), (formatdate(NOON + 30, usegmt=True), 30, 30.5), (formatdate(NOON - 30, usegmt=True), 0, .5), ('Wed, 99 Foo', 0, .5)])
def test_retry_after_is_a_floor_and_clamped(value, low, high, waits):
    post(app=Scripted(fail(429, retry_after=value), OK))
    assert len(waits) == 1 and low <= waits[0] <= high

def test_waits_grow_at_random(waits):
    failed(ServerError, app=Scripted(fail(500)))
    assert all(0 <= o <= .5*2**i for i,o in enumerate(waits)) and len(set(waits)) == 4

# ---- lost connections

@contextlib.contextmanager
def raw(*answers):
    "A server that sends each of `answers`, raw bytes, to one connection and hangs up; the last one for ever"
    with socket.create_server(('127.0.0.1', 0)) as sock:
        left = list(answers)
        def run():
            with contextlib.suppress(OSError):
                while True:
                    conn,_ = sock.accept()
                    with conn:
                        conn.recv(65536)
                        conn.sendall(left.pop(0) if len(left) > 1 else left[0])
        threading.Thread(target=run, daemon=True).start()
        yield f'http://127.0.0.1:{sock.getsockname()[1]}/v1'
        sock.shutdown(socket.SHUT_RDWR)

def http(body, length=None):
    return f'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {length or len(body)}\r\nconnection: close\r\n\r\n'.encode() + body

WHOLE = http(orjson.dumps(HELLO))

@pytest.mark.parametrize('broken', [b'', b'HTTP/1.1 200 OK\r\ncontent-le', http(orjson.dumps(HELLO)[:50], length=500), b'what?\r\n\r\n',
    http(orjson.dumps(HELLO)[:50])], ids=['no bytes', 'half a header', 'half a body', 'not HTTP', 'half of the JSON'])
def test_a_connection_that_breaks_is_tried_again(broken):
    with raw(broken, WHOLE) as url: body,attempts = post(url)
    assert body == HELLO and len(attempts) == 2 and attempts[0]['error'] and attempts[1]['http_status'] == 200

def test_a_server_that_always_hangs_up():
    with raw(b'') as url: e = failed(EndpointDown, url)
    assert len(e.attempts) == 5 and url in str(e)

def free_port():
    with socket.create_server(('127.0.0.1', 0)) as s: return s.getsockname()[1]

def test_nobody_there(waits):
    url = f'http://127.0.0.1:{free_port()}/v1'
    e = failed(EndpointDown, url)
    assert url in str(e) and 'start' in e.fix and waits == [] and e.status is None

def test_an_endpoint_of_the_settings_says_how_to_start_it(monkeypatch):
    monkeypatch.setenv('VLLM_BASE_URL', f'http://127.0.0.1:{free_port()}/v1')
    assert 'VLLM_BASE_URL' in str(failed(EndpointDown, 'vllm'))
    monkeypatch.delenv('VLLM_BASE_URL')
    assert 'vllm serve' in endpoint('vllm').start

def test_a_server_that_goes_away_is_waited_for(waits):
    async def go():
        with serving(Scripted(OK)) as url:
            client = AsyncInferenceClient(base_url=url)
            await client.post(ASK)
        with pytest.raises(EndpointDown): await client.post(ASK)
        await client.aclose()
    asyncio.run(go())
    assert len(waits) == 4

def test_a_server_that_is_too_slow():
    async def go(url):
        client = AsyncInferenceClient(base_url=url)
        limits = client.settings.limits.model_copy(update=dict(timeout=.1, attempts=2))
        client.settings = client.settings._replace(limits=limits)
        with pytest.raises(EndpointDown) as e: await client.post(ASK)
        await client.aclose()
        return e.value
    with serving(Scripted(OK, delay=.6)) as url: assert len(asyncio.run(go(url)).attempts) == 2

# ---- answers that make no sense

@pytest.mark.parametrize('body', [b'<html>Bad gateway</html>', b'', b'[]', b'null', b'{"choices": []}', b'{"choices": [null]}',
    b'{"error": {"message": "overloaded"}}', b'['*100_000])
def test_a_good_status_with_a_bad_body(body):
    e = failed(ServerError, app=Scripted((200, {}, body)))
    assert len(e.attempts) == 5 and e.attempts[0]['http_status'] == 200

def test_numbers_and_letters_that_json_does_not_have():
    body = json.dumps(HELLO | dict(logprob=math.nan)).replace('Hello!', '\\ud83d!').encode()
    got,_ = post(app=Scripted((200, {}, body)))
    assert got['logprob'] is None and got['choices'][0]['message']['content'] == '?!'
    orjson.dumps(got)

@pytest.mark.parametrize('body', [b'<html>gone</html>', b'"no"', b'{"detail": "no"}', b'{"error": "no"}', b'{"message": "no"}', b'\xff\xfe'])
def test_an_error_of_any_shape(body): assert '400' in str(failed(BadRequest, app=Scripted((400, {}, body))))

# ---- what went wrong, and the way out

def test_an_unknown_model_gets_the_list():
    app = Scripted(fail(404, code='model_not_found'), (200, {}, dict(data=[dict(id='expert'), dict(id='student')])))
    e = failed(ModelNotFoundError, app=app)
    assert "'m'" in e.message and '`expert`, `student`' in e.fix and e.status == 404 and len(e.attempts) == 1

def test_a_url_that_is_no_api():
    e = failed(BadRequest, app=Scripted(fail(404)))
    assert '/v1' in e.fix and len(e.attempts) == 1

def test_a_call_that_the_server_itself_could_not_read_is_the_models_fault_not_the_requests():
    said = dict(message='Failed to call a function', code='tool_use_failed', failed_generation='<function=do>{"actions"')
    body,attempts = post(app=Scripted((400, {}, dict(error=said))))
    assert body == dict(model='m', error=said, choices=[dict(index=0, finish_reason='tool_use_failed', message=dict(role='assistant', content='<function=do>{"actions"'))])
    assert [o['http_status'] for o in attempts] == [400]

def test_context_length(): assert len(failed(ContextLength, app=Scripted(fail(400, 'too long', 'context_length_exceeded'))).attempts) == 1

def test_an_unknown_endpoint():
    with pytest.raises(ClientError, match='did you mean `openai`'): endpoint('opnai')

def test_no_key_and_a_bad_key(monkeypatch):
    refused = Scripted((401, {}, dict(error=dict(message=f'Incorrect API key provided: {KEY}'))))
    with serving(refused) as url:
        assert 'OPENAI_API_KEY' in str(failed(AuthError, url))
        assert 'authorization' not in refused.asked[0][2]
        monkeypatch.setenv('GROQ_API_KEY', KEY)
        monkeypatch.setenv('GROQ_BASE_URL', url)
        e = failed(AuthError, 'groq')
    assert refused.asked[1][2]['authorization'] == f'Bearer {KEY}' and 'GROQ_API_KEY' in e.fix
    assert not any(KEY in o for o in (str(e), repr(e), str(e.attempts), ''.join(traceback.format_exception(e))))

def test_a_key_is_never_shown():
    url = f'127.0.0.1:{free_port()}/v1'
    with pytest.raises(ClientError, match='api_key=') as e: endpoint(f'http://user:{KEY}@{url}')
    assert KEY not in str(e.value)
    clients = [InferenceClient(api_key=KEY, base_url=f'http://{url}'), AsyncInferenceClient(api_key=KEY)]
    assert not any(KEY in repr(o) for o in [*clients, clients[0].endpoint])
    with pytest.raises(EndpointDown) as e: clients[0].chat.completions.create(**ASK)
    assert KEY not in str(e.value) + str(e.value.attempts)
    e = failed(BadRequest, app=Scripted(fail(400, f'bad header {KEY}')), api_key=KEY)
    assert KEY not in str(e) + str(e.attempts)

# ---- where calls go

def test_the_environment_of_the_openai_sdk(monkeypatch):
    app = Scripted(OK)
    with serving(app) as url:
        monkeypatch.setenv('OPENAI_BASE_URL', url)
        monkeypatch.setenv('OPENAI_API_KEY', KEY)
        assert InferenceClient().chat.completions.create(**ASK).choices[0].message.content == 'Hello!'
    method,path,headers = app.asked[0]
    assert (method, path, headers['authorization']) == ('POST', '/v1/chat/completions', f'Bearer {KEY}')

def test_names_and_urls(monkeypatch):
    assert endpoint().name == 'local' and endpoint().in_process
    assert endpoint('https://api.openai.com/v1').name == 'openai'
    monkeypatch.setenv('SYNTH_BASE_URL', 'http://127.0.0.1:1/api/')
    assert (endpoint('synth').url, endpoint('synth').key) == ('http://127.0.0.1:1/api', 'SYNTH_API_KEY')

def test_an_endpoint_is_used_as_it_is(monkeypatch):
    app = Scripted(OK)
    with serving(app) as url:
        for name,key in dict(SYNTH=KEY, OPENAI='another-key').items():
            monkeypatch.setenv(f'{name}_BASE_URL', url)
            monkeypatch.setenv(f'{name}_API_KEY', key)
        found = endpoint('synth')
        for cls in (InferenceClient, AsyncInferenceClient): assert cls(base_url=found).endpoint is found
        InferenceClient(base_url=found).chat.completions.create(**ASK)
    assert app.asked[0][2]['authorization'] == f'Bearer {KEY}'
    assert InferenceClient(base_url=replace(endpoint('vllm'), app=Scripted(OK))).chat.completions.create(**ASK) == HELLO

def test_a_url_in_the_environment_wins_over_the_app_of_the_settings(monkeypatch):
    app = Scripted(OK)
    with serving(app) as url:
        monkeypatch.setenv('LOCAL_BASE_URL', url)
        assert not endpoint('local').in_process
        for o in ('local', endpoint('local')): assert InferenceClient(base_url=o).chat.completions.create(**ASK) == HELLO
    assert app.posts == 2

def test_the_list_of_models():
    app = Scripted((200, {}, dict(object='list', data=[dict(id='a'), dict(id='b')])))
    models = InferenceClient(app=app).models.list()
    assert [o.id for o in models] == [o.id for o in models.data] == ['a', 'b']

# ---- sync, async, loops and threads

def test_sync_in_a_script_in_a_coroutine_and_in_threads():
    with serving(Scripted(OK)) as url:
        client = InferenceClient(base_url=url)
        def ask(): return client.chat.completions.create(**ASK).choices[0].message.content
        async def inside(): return ask()
        assert ask() == asyncio.run(inside()) == 'Hello!'
        said = []
        threads = [threading.Thread(target=lambda: said.append(ask())) for _ in range(4)]
        for o in threads: o.start()
        for o in threads: o.join()
        assert said == ['Hello!']*4

def test_one_async_client_in_two_loops():
    with serving(Scripted(OK)) as url:
        client = AsyncInferenceClient(base_url=url)
        assert [asyncio.run(client.post(ASK))[0] for _ in range(2)] == [HELLO]*2

def test_many_at_once():
    async def go(url):
        client = AsyncInferenceClient(base_url=url)
        got = await asyncio.gather(*(client.post(ASK) for _ in range(150)))
        await client.aclose()
        return got
    app = Scripted(OK, delay=.3)
    with serving(app) as url: got = asyncio.run(go(url))
    assert [o[0] for o in got] == [HELLO]*150 and app.most == 150

def test_no_noise_when_a_script_ends():
    code = '''
import asyncio, sys
from synth_lab.client import AsyncInferenceClient, InferenceClient
ask = dict(model='m', messages=[])
print(InferenceClient(base_url=sys.argv[1]).chat.completions.create(**ask).choices[0].message.content)
client, kept = AsyncInferenceClient(base_url=sys.argv[1]), InferenceClient(base_url=sys.argv[1])
asyncio.run(client.post(ask))
kept.chat.completions.create(**ask)
'''
    with serving(Scripted(OK)) as url: done = subprocess.run([sys.executable, '-c', code, url], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == ('Hello!\n', '', 0)

def test_objects_and_dicts():
    r = InferenceClient(app=Scripted(OK)).chat.completions.create(**ASK, temperature=None)
    assert r == HELLO and r.usage.prompt_tokens == 10 and r.choices[0].message.tool_calls is None and json.loads(json.dumps(r)) == HELLO
    with pytest.raises(AttributeError): r.choises

# ---- cost

@pytest.mark.parametrize('usage, dollars', [
    (dict(prompt_tokens=1000, completion_tokens=100), .0027),
    (dict(prompt_tokens=1000, completion_tokens=100, prompt_tokens_details=dict(cached_tokens=400)), .0021),
    (dict(prompt_tokens=1000, completion_tokens=100, prompt_tokens_details=None), .0027), ({}, None), (dict(prompt_tokens=5), None)])
def test_cost(usage, dollars, tmp_path, monkeypatch):
    (tmp_path/'settings.ini').write_text('[prices.openai]\nm = 2.0, 0.5, 7.0\n')
    monkeypatch.chdir(tmp_path)
    client = AsyncInferenceClient(base_url='openai')
    got = client.cost('m', usage)
    assert got == (dollars if dollars is None else pytest.approx(dollars))
    assert client.cost('other', usage) is None

def test_local_is_free(): assert AsyncInferenceClient(base_url='local').cost('expert', HELLO['usage']) == 0.
