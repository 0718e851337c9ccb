"The client against real servers that misbehave"
import asyncio, contextlib, gc, json, math, multiprocessing, pickle, shutil, socket, sqlite3, ssl, subprocess, sys, threading, time, traceback
from dataclasses import replace
from email.utils import formatdate

import orjson, pytest

from synth_lab import client as room
from synth_lab.client import (AsyncInferenceClient, AuthError, BadRequest, CacheError, ClientError, ColdStart, ContextLength, Endpoint, EndpointDown, EndpointSlow, Gate,
    InferenceClient, ModelNotFoundError, NotPromoted, PermissionDenied, QuotaSpent, RateLimited, ReplyCache, ServerError, endpoint, gather_chunks, retry_after)
from synth_lab.core import LabError
from synth_lab.dialects import DIALECTS
from synth_lab.mock import FAILURES, LIMITS, SHAPES, mock
from synth_lab.serve import create_app, serving
from synth_lab.tools import interact_many, read_reply
from synth_lab.view import format as written, look
from synth_lab.world import World

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
    def monotonic(self): return time.monotonic() + sum(self.waits)
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

@pytest.mark.parametrize('status, cls, tries', [(400, BadRequest, 1), (401, AuthError, 1), (402, QuotaSpent, 1), (403, PermissionDenied, 1),
    (422, BadRequest, 1), (303, ColdStart, 5),
    (408, ServerError, 5), (409, ServerError, 5), (425, ServerError, 5), (429, RateLimited, 5), (500, ServerError, 5), (503, ServerError, 5)])
def test_only_what_may_pass_is_tried_again(status, cls, tries, waits):
    app = Scripted(fail(status))
    e = failed(cls, app=app)
    assert (e.status, app.posts, len(e.attempts), len(waits)) == (status, tries, tries, tries-1)
    assert type(e) is cls and e.fix

@pytest.mark.parametrize('answer', [fail(429, 'You exceeded your current quota', 'insufficient_quota'), fail(402, 'Insufficient credits'), fail(429, 'inactive', 'billing_not_active'),
    fail(400, 'Billing hard limit has been reached', 'billing_hard_limit_reached'), (429, {}, dict(error=dict(message='no', type='insufficient_quota', code=429))),
    (200, {}, dict(error=dict(message='no credits', code=402)))])
def test_quota_that_is_spent_is_not_waited_for(answer, waits):
    app = Scripted(answer)
    e = failed(QuotaSpent, app=app)
    assert app.posts == 1 and waits == [] and 'pay' in e.fix and 'concurrency' not in e.fix and isinstance(e, RateLimited) and not e.retry

def test_a_limit_of_calls_is_no_spent_quota(): assert type(failed(RateLimited, app=Scripted(fail(429, 'You exceeded your current quota, please check your plan', 429)))) is RateLimited

def test_a_request_that_is_refused_says_what_the_server_said():
    e = failed(PermissionDenied, app=Scripted(fail(403, 'Your input was flagged by moderation')))
    assert 'flagged by moderation' in e.message and e.fix.startswith('mend the request') and not isinstance(e, AuthError)
    assert 'set GROQ_API_KEY' in str(failed(PermissionDenied, replace(endpoint('groq'), app=Scripted(fail(403, 'Your team may not use this model')))))

# ---- 303

@pytest.mark.parametrize('model', ['rl:Qwen/Qwen3-4B:job_1a2b:checkpoint-epoch-1', 'rl:student:job_1a2b'])
def test_a_checkpoint_of_rl_has_to_be_promoted(model, waits):
    e = failed(NotPromoted, payload=ASK | dict(model=model), app=Scripted((303, {}, b'')))
    assert len(e.attempts) == 1 and waits == [] and f"models.promote('{model}')" in e.fix and isinstance(e, BadRequest)

def test_the_server_may_say_so_itself(): assert 'not promoted' in failed(NotPromoted, app=Scripted(fail(303, 'The checkpoint is not promoted.'))).message

@pytest.mark.parametrize('model', ['Qwen/Qwen3-4B', 'ft:Qwen/Qwen3-4B:job_1a2b', 'm', 'a b:c', '', None])
def test_any_other_model_is_still_being_started(model, waits):
    cold = (303, dict(location='https://elsewhere.example/v1', retry_after='9'), b'')
    body,attempts = post(payload=ASK | dict(model=model), app=Scripted(cold, OK))
    assert body == HELLO and [o['http_status'] for o in attempts] == [303, 200] and 9 <= waits[0] <= 9.5 and 'https://elsewhere.example/v1' in attempts[0]['error']
    assert 'still being started' in failed(ColdStart, payload=ASK | dict(model=model), app=Scripted(cold)).fix

# ---- what is cut off

async def cut_off(client, when, **kw):
    "The attempts on the exception of a call that is cancelled when `when` says so"
    task = asyncio.create_task(client.post(ASK, **kw))
    while not when(client.gate): await asyncio.sleep(.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError) as e: await task
    assert (client.gate.running, client.gate.waiting) == (0, 0)
    return [(o['http_status'], o['error'], o['latency_ms'] is None) for o in e.value.attempts]

def test_a_call_that_is_cancelled_tells_what_was_sent(monkeypatch):
    monkeypatch.setattr(room, 'pause', asyncio.sleep)
    async def go():
        app = Scripted(fail(500), OK, delay=0)
        app.delay = 60
        under_way = await cut_off(AsyncInferenceClient(app=app), lambda gate: app.asked)
        between = await cut_off(AsyncInferenceClient(app=Scripted(fail(500, retry_after='60'))), lambda gate: gate.waiting)
        closed = AsyncInferenceClient(app=app)
        closed.gate.narrow('429: slow down', time.perf_counter(), 60)
        return under_way,between,await cut_off(closed, lambda gate: gate.waiting)
    under_way,between,never_sent = asyncio.run(go())
    assert under_way == [(None, 'cancelled', False)] and never_sent == []
    assert between == [(500, 'http://local/v1 answered 500: no', False)]

def test_a_time_out_around_a_call_has_the_attempts_behind_it(monkeypatch):
    monkeypatch.setattr(room, 'pause', asyncio.sleep)
    async def go():
        async with asyncio.timeout(.05): await AsyncInferenceClient(app=Scripted(fail(500, retry_after='60'))).post(ASK)
    with pytest.raises(TimeoutError) as e: asyncio.run(go())
    assert [o['http_status'] for o in e.value.__cause__.attempts] == [500]

def test_every_exception_has_the_attempts(monkeypatch):
    async def broken(scope, receive, send): raise ZeroDivisionError('mine')
    assert [(o['error'], o['latency_ms'] is None) for o in failed(ZeroDivisionError, app=broken).attempts] == [('ZeroDivisionError', False)]
    assert failed(LabError, replace(endpoint('vllm'), app=broken), ASK | dict(thinking='loudly')).attempts == [] # refused before it was sent

# ---- deadlines

def deadline(seconds): return room.time.monotonic() + seconds

def test_no_wait_between_tries_goes_past_the_deadline(waits):
    async def go(answers, seconds):
        client = AsyncInferenceClient(app=Scripted(*answers))
        try: return (await client.post(ASK, deadline=deadline(seconds)))[1]
        except ClientError as e: return e
    e = asyncio.run(go([fail(429, retry_after='30')], 29))
    assert type(e) is RateLimited and [o['http_status'] for o in e.attempts] == [429] and waits == []
    e = asyncio.run(go([fail(503, retry_after='10')], 25))
    assert type(e) is ServerError and len(e.attempts) == 3 and len(waits) == 2 and sum(waits) <= 25
    waits.clear()
    assert [o['http_status'] for o in asyncio.run(go([fail(503, retry_after='10'), OK], 25))] == [503, 200] and len(waits) == 1

def test_a_gate_that_opens_after_the_deadline_is_not_waited_for(waits):
    async def go(seconds):
        app = Scripted(OK)
        client = AsyncInferenceClient(app=app)
        client.gate.narrow('429: slow down', room.time.perf_counter(), 30)
        try: return len((await client.post(ASK, deadline=deadline(seconds)))[1])
        except EndpointSlow as e:
            assert e.attempts == [] and app.posts == 0 and (client.gate.running, client.gate.waiting) == (0, 0)
            return str(e)
    assert 'before its deadline; 429: slow down' in asyncio.run(go(29)) and waits == []
    assert asyncio.run(go(60)) == 1 and len(waits) == 1

def test_a_place_that_is_not_free_before_the_deadline_is_not_waited_for():
    async def go():
        app = Scripted(OK, delay=.2)
        client = limited(AsyncInferenceClient(app=app), concurrency=1)
        first = asyncio.create_task(client.post(ASK))
        while not app.asked: await asyncio.sleep(0)
        with pytest.raises(EndpointSlow, match='no place') as e: await client.post(ASK, deadline=time.monotonic() + .01)
        assert e.value.attempts == [] and app.posts == 1 and client.gate.waiting == 0
        assert (await first)[0] == HELLO == (await client.post(ASK, deadline=time.monotonic() + 60))[0] and client.gate.running == 0
    asyncio.run(go())

def test_a_request_that_was_sent_is_waited_for_whatever_the_deadline():
    app = Scripted(OK, delay=.05)
    assert asyncio.run(AsyncInferenceClient(app=app).post(ASK, deadline=time.monotonic() + .01))[0] == HELLO

@pytest.mark.parametrize('value, low, high', [('2', 2, 2.5), ('0.5', .5, 1), ('abc', 0, .5), ('', 0, .5), ('-3', 0, .5), ('nan', 0, .5),
    ('9999', 60, 60.5), ('inf', 60, 60.5), (formatdate(NOON + 30, usegmt=True), 30, 30.5), (formatdate(NOON - 30, usegmt=True), 0, .5), ('Wed, 99 Foo', 0, .5)])
def test_retry_after_is_a_floor_and_clamped(value, low, high, waits):
    post(app=Scripted(fail(429, retry_after=value), OK))
    assert len(waits) == 1 and low <= waits[0] <= high

@pytest.mark.parametrize('headers, text, seconds', [
    ({'retry-after': '7.5'}, '', 7.5), ({'retry-after': '90s'}, '', 90), ({'retry-after-ms': '1500', 'retry-after': '9'}, '', 1.5), ({'retry-after-ms': 'soon', 'retry-after': '9'}, '', 9),
    ({'x-ratelimit-reset-requests': '1s'}, '', 1), ({'x-ratelimit-reset-tokens': '6m0s'}, '', 360), ({'x-ratelimit-reset-tokens': '120ms'}, '', .12),
    ({'x-ratelimit-reset-tokens': '1h2m3.5s'}, '', 3723.5), ({'x-ratelimit-reset-requests': '2m59.56s', 'x-ratelimit-reset-tokens': '7.66s'}, '', 179.56),
    ({'x-ratelimit-reset-requests': '2m59.56s', 'x-ratelimit-remaining-requests': '14369', 'x-ratelimit-reset-tokens': '7.66s', 'x-ratelimit-remaining-tokens': '0'}, '', 7.66),
    ({'x-ratelimit-reset-tokens': '6m0s'}, 'Please try again in 7.66s.', 7.66), ({'retry-after': '2'}, 'Please try again in 7.66s.', 2),
    ({}, 'Limit 12000, Used 11000, Requested 2500. Please try again in 1m7.5s. Need more tokens? Upgrade', 67.5), ({}, 'Please try again in 20ms.', .02),
    ({}, 'Please retry after 6 seconds.', 6), ({}, 'Please retry in 37.4s.', 37.4), ({}, 'TRY AGAIN IN 2 MINUTES', 120),
    ({}, 'try again in 3 months', 0), ({}, 'try again later', 0),
    ({}, '[{"error": {"code": 429, "details": [{"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "37s"}]}}]', 37),
    ({'x-ratelimit-reset-tokens': 'never'}, '', 0), ({'retry-after': '1s later'}, '', 0), ({'retry-after': '1e400'}, '', math.inf)])
def test_how_long_to_wait_in_every_form(headers, text, seconds): assert retry_after(headers, text) == pytest.approx(seconds)

def test_what_the_body_says_about_waiting_is_a_floor(waits):
    post(app=Scripted(fail(429, 'Please try again in 7.66s.'), OK))
    assert 7.66 <= waits[0] <= 8.16 and len(waits) == 1

def test_each_attempt_says_how_long_it_waited(waits):
    _,attempts = post(app=Scripted(fail(500), fail(429, retry_after='3'), OK))
    assert [o['waited_s'] for o in attempts] == pytest.approx([0, waits[0], waits[1]], abs=.01) and waits[1] >= 3
    assert set(attempts[0]) == {'started_at', 'waited_s', 'latency_ms', 'http_status', 'error'}

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

def limited(client, **limits):
    "`client` with other limits"
    client.settings = client.settings._replace(limits=client.settings.limits.model_copy(update=limits))
    return client

@pytest.mark.parametrize('wire', [True, False])
def test_a_server_that_is_too_slow(wire):
    async def go(**kw):
        client = limited(AsyncInferenceClient(**kw), timeout=.1, attempts=2)
        with pytest.raises(EndpointSlow, match=r'within 0.1 s.*timeout') as e: await client.post(ASK)
        assert (client.gate.running, client.gate.limit) == (0, 1) and 'within' in client.gate.why
        await client.aclose()
        return e.value
    app = Scripted(OK, delay=.6)
    with serving(app) if wire else contextlib.nullcontext() as url: error = asyncio.run(go(base_url=url) if wire else go(app=app))
    assert len(error.attempts) == 2 and isinstance(error, EndpointDown)

def test_a_body_that_never_ends_is_too_slow():
    async def drip(scope, receive, send):
        await send(dict(type='http.response.start', status=200, headers=[]))
        for _ in range(12):
            await send(dict(type='http.response.body', body=b' ', more_body=True))
            await asyncio.sleep(.05)
    async def go(url):
        client = limited(AsyncInferenceClient(base_url=url), timeout=.2, attempts=1)
        with pytest.raises(EndpointSlow): await client.post(ASK)
        await client.aclose()
    with serving(drip) as url: asyncio.run(go(url))

# ---- the gate

def test_an_endpoint_is_never_asked_by_more_than_it_takes(waits):
    "A server with four places and 64 callers: all are answered, and the gate has found the four"
    class Small(Scripted):
        async def __call__(self, scope, receive, send):
            self.answers = [fail(429) if self.now >= 4 else OK]
            await super().__call__(scope, receive, send)
    async def go(app):
        client = limited(AsyncInferenceClient(app=app), attempts=100)
        got = await asyncio.gather(*(client.post(ASK) for _ in range(64)))
        return got,client.gate
    got,gate = asyncio.run(go(Small(OK, delay=.001)))
    assert [o[0] for o in got] == [HELLO]*64 and 1 <= gate.limit < 64 and (gate.running, gate.waiting) == (0, 0)
    assert max(len(o[1]) for o in got) > 1

def test_the_limit_of_the_settings_holds_and_all_clients_share_it():
    async def go(url):
        one,two = (limited(AsyncInferenceClient(base_url=url), concurrency=5) for _ in range(2))
        assert one.gate is two.gate and one.gate.most == 5
        await asyncio.gather(*(o.post(ASK) for o in [one, two]*10))
        for o in (one, two): await o.aclose()
    app = Scripted(OK, delay=.01)
    with serving(app) as url: asyncio.run(go(url))
    assert app.most == 5

def test_endpoints_and_loops_do_not_share_a_gate():
    async def gate(client): return client.gate
    app = Scripted(OK)
    one,other = AsyncInferenceClient(app=app),AsyncInferenceClient(app=Scripted(OK))
    assert one.gate.limit == 256
    first = asyncio.run(gate(one))
    assert first is one.gate and asyncio.run(gate(one)) is not first and asyncio.run(gate(other)) is not first

class Stopped:
    "A clock that goes on to the next waking when everybody sleeps"
    def __init__(self): self.at,self.asleep = 1000.,[]
    def time(self): return NOON + self.at
    def perf_counter(self): return self.at
    monotonic = perf_counter
    async def pause(self, seconds):
        self.asleep.append((self.at + seconds, wake := asyncio.get_running_loop().create_future()))
        await wake
    async def run(self, task):
        while not task.done():
            for _ in range(50): await asyncio.sleep(0)
            if self.asleep and not task.done():
                self.asleep.sort(key=lambda o: o[0])
                self.at,wake = self.asleep.pop(0)
                wake.set_result(None)
        return await task

def test_retry_after_closes_the_gate_for_everybody_and_they_come_back_apart(monkeypatch):
    "Twenty calls are told to wait for 30 s; 40 that come later wait too, and no more than half as many are there at once"
    clock,came = Stopped(),[]
    monkeypatch.setattr(room, 'time', clock)
    monkeypatch.setattr(room, 'pause', clock.pause)
    class Busy(Scripted):
        async def __call__(self, scope, receive, send):
            came.append(clock.at - 1000)
            self.now += 1
            self.most = max(self.most, self.now)
            await clock.pause(.05)
            self.now -= 1
            status,headers,body = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            await send(dict(type='http.response.start', status=status, headers=[(b'retry-after', b'30')]))
            await send(dict(type='http.response.body', body=orjson.dumps(body)))
    async def go():
        app = Busy(*[fail(429, 'slow down')]*20, OK)
        client = AsyncInferenceClient(app=app)
        first = [asyncio.create_task(client.post(ASK)) for _ in range(20)]
        while clock.at == 1000 or client.gate.running:
            await asyncio.sleep(0)
            if len(clock.asleep) == 20 and clock.at == 1000:
                for _,wake in clock.asleep: wake.set_result(None)
                clock.at,clock.asleep = 1000.05,[]
        assert (client.gate.limit, client.gate.waiting, app.most) == (10, 20, 20)
        app.most = 0
        rest = asyncio.gather(*first, *(client.post(ASK) for _ in range(40)))
        for _ in range(50): await asyncio.sleep(0)
        assert client.gate.waiting == 60 and '429: slow down' in client.gate.why
        got = await clock.run(asyncio.ensure_future(rest))
        assert (client.gate.waiting, client.gate.running, client.gate.why) == (0, 0, '')
        return got,app.most
    got,most = asyncio.run(go())
    assert [o[0] for o in got] == [HELLO]*60 and len(came) == 80
    assert min(came[20:]) >= 30 and most <= 14 and len(set(came[20:])) > 40
    assert [o['http_status'] for o in got[0][1]] == [429, 200] and min(o[1][-1]['waited_s'] for o in got) >= 29.99

def test_a_burst_of_overload_halves_once():
    async def go():
        gate = Gate(256)
        for _ in range(64): await gate.enter()
        began = room.time.perf_counter()
        for _ in range(64): gate.narrow('503', began, 0)
        assert gate.limit == 32
        for _ in range(64): gate.leave()
        for k in range(40): gate.narrow('503', room.time.perf_counter(), 0)
        assert gate.limit == 1 and gate.why == '503'
        for _ in range(3): gate.widen()
        assert gate.limit == 2 and gate.why == ''
        for _ in range(10**5): gate.widen()
        assert gate.limit == 256
    asyncio.run(go())

@pytest.mark.parametrize('status, limit', [(429, 1), (503, 1), (529, 1), (500, 256), (400, 256)])
def test_what_counts_as_overload(status, limit):
    async def go():
        client = limited(AsyncInferenceClient(app=Scripted(fail(status))), attempts=1)
        with pytest.raises(ClientError): await client.post(ASK)
        return client.gate.limit
    assert asyncio.run(go()) == limit

def test_places_go_in_order_and_a_cancelled_one_passes_it_on():
    async def go():
        gate,order = Gate(1),[]
        async def one(k):
            await gate.enter()
            order.append(k)
        await gate.enter()
        tasks = [asyncio.create_task(one(k)) for k in range(4)]
        await asyncio.sleep(0)
        assert gate.waiting == 4
        tasks[0].cancel()
        gate.leave() # gives the place to 1, or to 0 that cannot use it
        tasks[1].cancel() # after it was given the place
        await asyncio.gather(*tasks[:2], return_exceptions=True)
        await tasks[2]
        assert (order, gate.running, gate.waiting) == ([2], 1, 1)
        gate.leave()
        await tasks[3]
        gate.leave()
        assert (order, gate.running, gate.waiting, len(gate._queue)) == ([2, 3], 0, 0, 0)
    asyncio.run(go())

def test_a_cancelled_wait_for_the_gate_to_open_gives_its_place_back(monkeypatch):
    monkeypatch.setattr(room, 'pause', asyncio.sleep)
    async def go():
        gate = Gate(4)
        gate.narrow('429', room.time.perf_counter(), 60)
        task = asyncio.create_task(gate.enter())
        await asyncio.sleep(0)
        assert gate.waiting == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert (gate.running, gate.waiting) == (0, 0)
    asyncio.run(go())

def test_a_cancelled_call_closes_its_connection_and_leaves_the_gate():
    gone = threading.Event()
    async def hang(scope, receive, send):
        while (await receive())['type'] != 'http.disconnect': pass
        gone.set()
    async def go(url):
        client = AsyncInferenceClient(base_url=url)
        task = asyncio.create_task(client.post(ASK))
        while not client.gate.running: await asyncio.sleep(.01)
        await asyncio.sleep(.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError): await task
        assert (client.gate.running, client.gate.limit) == (0, 256)
        await asyncio.to_thread(gone.wait, 5)
        await client.aclose()
    with serving(hang) as url: asyncio.run(go(url))
    assert gone.is_set()

def test_a_connection_is_used_again_but_not_with_half_an_answer_in_it():
    ports,started = [],threading.Event()
    async def app(scope, receive, send):
        ports.append(scope['client'][1])
        await send(dict(type='http.response.start', status=200, headers=[]))
        whole = orjson.dumps(HELLO)
        if len(ports) == 3:
            await send(dict(type='http.response.body', body=whole[:20], more_body=True))
            started.set()
            await asyncio.sleep(.3)
        await send(dict(type='http.response.body', body=whole[20*(len(ports) == 3):]))
    async def go(url):
        client = AsyncInferenceClient(base_url=url)
        for _ in range(2): await client.post(ASK)
        task = asyncio.create_task(client.post(ASK))
        await asyncio.to_thread(started.wait, 5)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert (await client.post(ASK))[0] == HELLO
        await client.aclose()
    with serving(app) as url: asyncio.run(go(url))
    assert ports[0] == ports[1] == ports[2] != ports[3]

# ---- TLS

@pytest.mark.skipif(not shutil.which('openssl'), reason='openssl makes the certificate')
def test_a_certificate_that_nobody_vouches_for_is_refused(tmp_path, monkeypatch):
    "Not tried again, nothing sent, and the way out works"
    subprocess.run(['openssl', 'req', '-x509', '-newkey', 'rsa:2048', '-nodes', '-keyout', tmp_path/'key.pem', '-out', tmp_path/'cert.pem', '-days', '2',
        '-subj', '/CN=127.0.0.1', '-addext', 'subjectAltName=IP:127.0.0.1'], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path/'cert.pem', tmp_path/'key.pem')
    seen = []
    def serve(sock):
        with contextlib.suppress(OSError):
            while True:
                conn,_ = sock.accept()
                with contextlib.suppress(ssl.SSLError), context.wrap_socket(conn, server_side=True) as tls:
                    seen.append(tls.recv(65536))
                    tls.sendall(WHOLE)
    with socket.create_server(('127.0.0.1', 0)) as sock:
        threading.Thread(target=serve, args=[sock], daemon=True).start()
        url = f'https://127.0.0.1:{sock.getsockname()[1]}/v1'
        e = failed(EndpointDown, url, api_key=KEY)
        assert len(e.attempts) == 1 and 'certificate' in e.message and 'SSL_CERT_FILE' in e.fix and not any(KEY.encode() in o for o in seen)
        monkeypatch.setenv('SSL_CERT_FILE', str(tmp_path/'cert.pem'))
        room._tls.cache_clear()
        try: assert post(url)[0] == HELLO
        finally: room._tls.cache_clear()
        sock.shutdown(socket.SHUT_RDWR)

def test_certificates_are_read_only_where_they_are_needed(monkeypatch):
    for name in ('http_proxy', 'HTTP_PROXY', 'all_proxy', 'ALL_PROXY', 'no_proxy', 'NO_PROXY'): monkeypatch.delenv(name, raising=False)
    read = []
    monkeypatch.setattr(room, '_tls', lambda: read.append(1) or ssl.create_default_context())
    async def connect(url): room._connect(AsyncInferenceClient(base_url=url).endpoint, 10)
    asyncio.run(connect('http://127.0.0.1:9/v1'))
    assert read == []
    asyncio.run(connect('https://127.0.0.1:9/v1'))
    monkeypatch.setenv('http_proxy', 'https://127.0.0.1:9')
    asyncio.run(connect('http://10.0.0.1/v1'))
    assert read == [1, 1]

def test_https_to_a_server_without_it():
    with raw(b'HTTP/1.1 400 Bad Request\r\n\r\n') as url: e = failed(EndpointDown, url.replace('http', 'https'))
    assert 'http://' in e.fix and len(e.attempts) == 1

# ---- proxies

def test_a_proxy_of_the_environment_is_used_and_no_proxy_is_kept(monkeypatch):
    for name in ('http_proxy', 'HTTP_PROXY', 'all_proxy', 'ALL_PROXY', 'no_proxy', 'NO_PROXY'): monkeypatch.delenv(name, raising=False)
    app = Scripted(OK)
    with serving(app) as proxy:
        monkeypatch.setenv('http_proxy', proxy.removeprefix('http://').removesuffix('/v1'))
        assert post('http://models.invalid/v1')[0] == HELLO and app.asked[0][2]['host'] == 'models.invalid'
        monkeypatch.setenv('no_proxy', 'models.invalid')
        failed(EndpointDown, 'http://models.invalid/v1')
        monkeypatch.delenv('no_proxy')
        monkeypatch.setenv('http_proxy', 'socks5://127.0.0.1:1')
        assert 'no_proxy' in str(failed(ClientError, 'http://models.invalid/v1'))
    assert app.posts == 1

# ---- answers that make no sense

@pytest.mark.parametrize('body', [b'<html>Bad gateway</html>', b'', b'[]', b'null', b'{"choices": []}', b'{"choices": [null]}',
    b'{"error": {"message": "overloaded"}}', b'{"choices": [], "error": "overloaded"}', b'{"choices": [{"error": {"code": 502}, "finish_reason": "error"}]}', b'['*100_000,
    b'{"choices": [{"message": {}, "x": ' + b'['*300 + b']'*300 + b'}]}', b'['*1020 + b']'*1020])
def test_a_good_status_with_a_bad_body(body):
    e = failed(ServerError, app=Scripted((200, {}, body)))
    assert len(e.attempts) == 5 and e.attempts[0]['http_status'] == 200

@pytest.mark.parametrize('code, cls, tries', [(429, RateLimited, 5), (401, AuthError, 1), (404, ModelNotFoundError, 1), (200, ServerError, 5), (None, ServerError, 5)])
def test_an_error_that_came_with_a_good_status_is_of_its_own_kind(code, cls, tries):
    app = Scripted(*[(200, {}, dict(error=dict(message='no', code=code)))]*tries, (200, {}, dict(data=[])))
    assert len(failed(cls, app=app).attempts) == tries

def test_numbers_and_letters_that_json_does_not_have():
    body = json.dumps(HELLO | dict(logprob=math.nan)).replace('Hello!', '\\ud83d!').encode()
    got,_ = post(app=Scripted((200, {}, body)))
    assert got['logprob'] is None and got['choices'][0]['message']['content'] == '?!'
    orjson.dumps(got)

@pytest.mark.parametrize('body', [b'<html>gone</html>', b'"no"', b'{"detail": "no"}', b'{"error": "no"}', b'{"message": "no"}', b'\xff\xfe',
    b'{"error": ' + b'['*300 + b']'*300 + b'}', b'['*1020 + b']'*1020])
def test_an_error_of_any_shape(body): assert '400' in str(failed(BadRequest, app=Scripted((400, {}, body))))

# ---- what went wrong, and the way out

def test_an_unknown_model_gets_the_list_and_what_the_server_said():
    app = Scripted(fail(404, 'not here', code='model_not_found'), (200, {}, dict(data=[dict(id='expert'), dict(id='student')])))
    e = failed(ModelNotFoundError, app=app)
    assert "'m'" in e.message and 'not here' in e.message and '`expert`, `student`' in e.fix and e.status == 404 and len(e.attempts) == 1

def test_a_model_that_is_in_the_list_was_found():
    e = failed(BadRequest, app=Scripted(fail(404, 'No endpoints found that support tool use'), (200, {}, dict(data=[dict(id='m')]))))
    assert e.message == 'http://local/v1 answered 404: No endpoints found that support tool use' and 'did you mean' not in e.fix and '/v1' not in e.fix
    assert (e.status, len(e.attempts)) == (404, 1)

@pytest.mark.parametrize('listed', [(200, {}, dict(data=[dict(id='m')])), fail(405), fail(401)])
def test_a_server_that_names_the_model_is_believed(listed):
    e = failed(ModelNotFoundError, app=Scripted(fail(404, 'You have no access to m', 'model_not_found'), listed))
    assert e.message == 'http://local/v1 answered 404: You have no access to m' and e.code == 'model_not_found' and '/v1' not in e.fix and len(e.attempts) == 1

def test_the_list_of_models_is_not_waited_for_past_the_deadline(waits):
    app = Scripted(fail(404, 'not here'), fail(503, retry_after='30'))
    with pytest.raises(BadRequest, match='not here') as e: asyncio.run(AsyncInferenceClient(app=app).post(ASK, deadline=deadline(20)))
    assert waits == [] and len(e.value.attempts) == 1

def test_a_url_that_is_no_api():
    e = failed(BadRequest, app=Scripted(fail(404)))
    assert '/v1' in e.fix and len(e.attempts) == 1

def test_a_call_that_the_server_itself_could_not_read_is_the_models_fault_not_the_requests():
    said = dict(message='Failed to call a function', code='tool_use_failed', failed_generation='<function=do>{"actions"')
    body,attempts = post(app=Scripted((400, {}, dict(error=said))))
    message = dict(role='assistant', content='<function=do>{"actions"')
    assert body == dict(model='m', error=said, choices=[dict(index=0, finish_reason='tool_use_failed', message=message, error=said)])
    assert [o['http_status'] for o in attempts] == [400]

@pytest.mark.parametrize('message', ["tool call validation failed: attempted to call tool 'act_now' which was not in request.tools",
    'tool call validation failed: parameters for tool interact_many did not match schema: errors: [missing properties: actions]'])
def test_a_call_that_does_not_fit_the_tools_is_the_models_fault(message):
    app = Scripted(fail(400, message, 'invalid_request_error'))
    body,attempts = post(app=app)
    assert (body['choices'][0]['finish_reason'], body['choices'][0]['message']['content'], body['error']['message']) == ('tool_use_failed', '', message)
    assert app.posts == 1 and message in attempts[0]['error']

def test_a_schema_that_the_server_does_not_take_is_the_requests_fault():
    failed(BadRequest, app=Scripted(fail(400, "Invalid schema for function 'interact_many': did not match schema")))

def test_an_error_in_a_list(): assert 'API key not valid' in str(failed(BadRequest, app=Scripted((400, {}, [dict(error=dict(message='API key not valid'))]))))

@pytest.mark.parametrize('status, fix', [(301, 'sends callers'), (308, 'sends callers'), (403, 'as the server says'), (405, '/v1'), (422, 'as the server says')])
def test_each_refusal_has_its_way_out(status, fix):
    e = failed(BadRequest, app=Scripted((status, dict(location='https://elsewhere.example/v1'), b'')))
    assert fix in e.fix and str(status) in e.message and 'https://elsewhere.example/v1' in e.message

def test_a_page_in_place_of_an_answer_may_mean_a_wrong_url(): assert '/v1' in failed(ServerError, app=Scripted((200, {}, b'Ollama is running'))).fix

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
    for bad in (f'{KEY}\nx-other: 1', f'«{KEY}»'):
        with pytest.raises(AuthError, match='GROQ_API_KEY') as e: AsyncInferenceClient(bad, 'groq')
        assert KEY not in ''.join(traceback.format_exception(e.value))
    e = failed(BadRequest, app=Scripted(fail(400, f'bad header {KEY}')), api_key=KEY)
    assert KEY not in str(e) + str(e.attempts)

@pytest.mark.parametrize('url', [f'http://user:{KEY}@host:99999999/v1', f'http://{KEY}@ho st/v1', f'http://[{KEY}@host/v1', f'https://host.example/v1?key={KEY}', f'htp://user:{KEY}@host/v1',
    f'http://user:{KEY}@host/v1', f'host?key={KEY}', 'http://host:port/v1?key=' + KEY])
def test_a_key_in_a_url_is_refused_and_not_shown(url, monkeypatch):
    monkeypatch.setenv('VLLM_BASE_URL', url)
    for name in (url, 'vllm') if 'host/' in url else (url,):
        with pytest.raises(ClientError) as e: endpoint(name)
        shown = ''.join(traceback.format_exception(e.value))
        assert not any(KEY[:k] in shown for k in range(8, len(KEY) + 1))

def heard(said):
    "What a client with `KEY` makes of an answer that holds it: all that an error or a reply shows"
    try: return repr(post(app=Scripted(said), api_key=KEY))
    except ClientError as e: return ''.join([str(e), repr(e.attempts), *traceback.format_exception(e)])

def heard_streamed(parts):
    try: return repr(streamed(app=Streaming(parts), api_key=KEY))
    except ClientError as e: return ''.join([str(e), repr(e.attempts), *traceback.format_exception(e)])

ECHOES = dict(refused=fail(401, f'Incorrect API key provided: {KEY}'), at_the_cut=fail(401, 'x'*(300 - len(KEY)//2) + KEY), code=fail(400, 'no', KEY), page=(502, {}, f'<p>{KEY}</p>'.encode()),
    location=(302, dict(location=f'https://x.example/?key={KEY}'), b''), no_choices=(200, {}, dict(id=KEY, choices=[])), failed_choice=(200, {}, dict(choices=[dict(error=KEY)])),
    no_model=fail(404, f'no model for {KEY}'), late_error=(200, {}, dict(error=dict(message=KEY, code=429))), escaped=(401, {}, f'{{"error": {{"message": "{KEY}"}}}}'.replace('-', '\\u002d').encode()),
    detail=(422, {}, dict(detail=[dict(loc=['header'], input=f'Bearer {KEY}')])), unread=fail(400, 'Failed', 'tool_use_failed'), nested=fail(400, dict(header=KEY)),
    generation=(400, {}, dict(error=dict(message='Failed', code='tool_use_failed', failed_generation=f'my key is {KEY}', more=dict(key=KEY), **{KEY: 1}))))

@pytest.mark.parametrize('said', ECHOES.values(), ids=ECHOES)
def test_a_key_that_a_server_repeats_is_in_no_error_and_no_attempt(said, monkeypatch):
    shown = heard(said)
    assert not any(KEY[:k] in shown for k in range(10, len(KEY) + 1))

@pytest.mark.parametrize('parts', [[f'data: {{"id": "{KEY}"}}\n\n'], (200, {}, dict(note=KEY)), ['data: ' + 'x'*190 + KEY + '\n\n'],
    [f'data: {{"choices": [{{"error": "{KEY}"}}]}}\n\n'], fail(400, 'x'*290 + KEY), fail(400, 'no', 'tool_use_failed'), fail(500, KEY)])
def test_nor_in_a_stream(parts):
    shown = heard_streamed(parts)
    assert not any(KEY[:k] in shown for k in range(10, len(KEY) + 1))

def test_a_reply_that_repeats_the_key_is_handed_on_and_not_kept(tmp_path):
    "Who writes it down knows the client's `secrets`"
    with serving(Scripted((200, {}, HELLO | dict(id=KEY)))) as url:
        assert [post(url, api_key=KEY, cache=tmp_path/'cache')[0]['id'] for _ in range(2)] == [KEY]*2
    assert not any(KEY.encode() in o.read_bytes() for o in tmp_path.iterdir())

def test_the_secrets_of_a_client(monkeypatch):
    assert AsyncInferenceClient(KEY).secrets == (KEY,) and AsyncInferenceClient().secrets == AsyncInferenceClient('EMPTY').secrets == ()
    odd = 'a-key-with-"quotes"'
    client = AsyncInferenceClient(odd)
    assert odd in client.secrets and client.mask(json.dumps(json.dumps(odd)))[1:-1] == '\\"[redacted]\\"'
    monkeypatch.setenv('OTHER_API_KEY', f'{KEY}-and-more')
    assert AsyncInferenceClient(KEY).mask(f'{KEY}-and-more, {KEY}') == '[redacted], [redacted]'
    assert KEY not in repr(AsyncInferenceClient(KEY)) and client.mask('Authorization: Bearer abcdefgh1234') == 'Authorization: Bearer [redacted]'

def test_a_client_pickles_without_its_connections_and_with_its_key(tmp_path):
    client = AsyncInferenceClient(KEY, 'http://127.0.0.1:9/v1', cache=tmp_path/'replies')
    async def used(): return client.gate
    asyncio.run(used())
    there = pickle.loads(pickle.dumps(client))
    assert (there.endpoint.url, there.secrets, there.cache.path, there._pools) == (client.endpoint.url, (KEY,), client.cache.path, {})
    code = 'import sys, base64, pickle; from synth_lab.client import AsyncInferenceClient; pickle.dumps(AsyncInferenceClient()); print("synth_lab.rollout" in sys.modules)'
    assert subprocess.run([sys.executable, '-c', code], capture_output=True, text=True).stdout == 'False\n'

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

def test_loops_that_are_gone_leave_nothing_behind():
    with serving(Scripted(OK)) as url:
        client = AsyncInferenceClient(base_url=url)
        for _ in range(5): asyncio.run(client.post(ASK))
        assert len(client._pools) == 1
        del client
        gc.collect()
        assert not [k for k in room._gates if k[1] == url]

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

# ---- streams

class Streaming:
    "An ASGI app that answers with server-sent events, or with a (status, headers, body) in their place, and keeps the bodies it was sent"
    def __init__(self, *answers): self.answers,self.asked = list(answers),[]
    async def __call__(self, scope, receive, send):
        if scope['type'] != 'http': return
        self.asked.append(orjson.loads((await receive())['body']))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        status,headers,parts = answer if isinstance(answer, tuple) else (200, {'content-type': 'text/event-stream; charset=utf-8'}, answer)
        await send(dict(type='http.response.start', status=status, headers=[(k.encode(), v.encode()) for k,v in headers.items()]))
        for o in parts if isinstance(parts, list) else [orjson.dumps(parts)]:
            await send(dict(type='http.response.body', body=o if isinstance(o, bytes) else o.encode(), more_body=True))
        await send(dict(type='http.response.body', body=b''))

def sse(o): return f'data: {json.dumps(o)}\n\n'
def piece(finish=None, index=0, **delta):
    return sse(dict(id='c', model='m', created=1, object='chat.completion.chunk', choices=[dict(index=index, delta=delta, finish_reason=finish)]))
def call(index=None, **of): return dict(dict(index=index) if index is not None else {}, **of)
TEXT = [piece(role='assistant', content=''), piece(content='Hel'), piece(content='lo!'), piece('stop'), sse(dict(choices=[], usage=HELLO['usage'])), 'data: [DONE]\n\n']
CALLS = [piece(role='assistant', content=None, tool_calls=[call(0, id='a', type='function', function=dict(name='look', arguments=''))]),
    piece(tool_calls=[call(0, function=dict(arguments='{"x"'))]),
    piece(tool_calls=[call(1, id='b', function=dict(name='step', arguments='{}')), call(0, function=dict(arguments=': 1}'))]),
    piece('tool_calls'), 'data: [DONE]\n\n']

def streamed(url=None, **kw):
    async def go():
        client = AsyncInferenceClient(base_url=url, **kw)
        try: return [o async for o in await client.chat.completions.create(**ASK, stream=True)]
        finally:
            assert client.gate.running == 0
            await client.aclose()
    return asyncio.run(go())

@pytest.mark.parametrize('wire', [True, False])
def test_a_stream_of_text(wire):
    app = Streaming(TEXT)
    with serving(app) if wire else contextlib.nullcontext() as url:
        chunks = streamed(url) if wire else streamed(app=app)
        assert [o.choices[0].delta.content for o in chunks if o.choices] == ['', 'Hel', 'lo!', None]
        again = list(InferenceClient(**(dict(base_url=url) if wire else dict(app=app))).chat.completions.create(**ASK, stream=True))
    whole = gather_chunks(chunks)
    assert again == chunks and app.asked == [ASK | dict(stream=True)]*2
    assert whole.choices == HELLO['choices'] and whole.usage == HELLO['usage'] and (whole.object, whole.model) == ('chat.completion', 'm')

def test_a_stream_of_tool_calls():
    chunks = streamed(app=Streaming(CALLS))
    assert chunks[0].choices[0].delta.tool_calls[0].function.name == 'look' and chunks[1].choices[0].delta.tool_calls[0].id is None
    message = gather_chunks(chunks).choices[0].message
    assert [(o.id, o.type, o.function.name, o.function.arguments) for o in message.tool_calls] == [('a', 'function', 'look', '{"x": 1}'), ('b', 'function', 'step', '{}')]
    assert message.content is None and gather_chunks(chunks).choices[0].finish_reason == 'tool_calls'

def test_calls_that_come_whole_and_without_an_index():
    for arguments in ('{"x":1}', dict(x=1)):
        parts = [piece(index=None, tool_calls=[call(id=k, function=dict(name='f', arguments=arguments))]) for k in 'ab'] + [piece('tool_calls')]
        calls = gather_chunks(streamed(app=Streaming(parts))).choices[0].message.tool_calls
        assert [(o.id, o.function.arguments) for o in calls] == [('a', '{"x":1}'), ('b', '{"x":1}')]

def test_thoughts_logprobs_and_several_choices_are_gathered():
    logprobs = lambda t: dict(content=[dict(token=t, logprob=-1.)])
    part = lambda i, t: sse(dict(model='m', choices=[dict(index=i, delta=dict(reasoning_content=t), logprobs=logprobs(t), finish_reason=None)]))
    got = gather_chunks(streamed(app=Streaming([part(1, 'x'), part(0, 'a'), part(0, 'b'), piece('stop'), piece('length', 1)])))
    seen = [(o.index, o.message.reasoning_content, o.finish_reason, [t.token for t in o.logprobs.content]) for o in got.choices]
    assert seen == [(0, 'ab', 'stop', ['a', 'b']), (1, 'x', 'length', ['x'])]

def test_bytes_may_be_cut_anywhere():
    raw = ''.join([': ping\n\n', piece(content='Hé\u2028llo'), piece('stop')]).replace('\n', '\r\n').encode()
    assert gather_chunks(streamed(app=Streaming([raw[i:i+3] for i in range(0, len(raw), 3)]))).choices[0].message.content == 'Hé\u2028llo'

@pytest.mark.parametrize('rest', ['', 'data: {"choi', 'data: <html>\n\n', sse([1]), sse(dict(choices=[1])), sse(dict(error='overloaded')),
    'event: error\n' + sse(dict(error=dict(message='overloaded')))])
def test_a_stream_that_breaks_is_an_error_and_not_tried_again(rest):
    app = Streaming([piece(content='x'), rest])
    with pytest.raises(ServerError): streamed(app=app)
    assert len(app.asked) == 1

def test_a_connection_that_is_cut_inside_a_stream():
    head = b'HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 9999\r\n\r\n'
    with raw(head + ''.join(TEXT[:3]).encode()) as url, pytest.raises(EndpointDown): streamed(url)

def test_an_error_inside_a_stream_is_of_its_kind():
    with pytest.raises(RateLimited): streamed(app=Streaming([piece(content='x'), sse(dict(error=dict(message='slow down', code=429)))]))
    with pytest.raises(AuthError) as e: streamed(app=Streaming([piece(content='x'), sse(dict(error=dict(message=f'bad {KEY}', status_code=401)))]), api_key=KEY)
    assert KEY not in str(e.value)

@pytest.mark.parametrize('bad', [fail(500), fail(429), (200, {}, HELLO), [], ['data: [DONE]\n\n'], [sse(dict(error=dict(message='busy')))]])
def test_a_stream_is_tried_again_until_its_first_chunk(bad):
    app = Streaming(bad, TEXT)
    assert gather_chunks(streamed(app=app)).choices == HELLO['choices'] and len(app.asked) == 2

def test_what_cannot_be_streamed_says_why():
    with pytest.raises(BadRequest, match='no such'): streamed(app=Streaming(fail(400, 'no such')))
    said = dict(message='Failed to call a function', code='tool_use_failed', failed_generation='<function=do>{"actions"')
    got = gather_chunks(streamed(app=Streaming((400, {}, dict(error=said)))))
    assert (got.choices[0].finish_reason, got.choices[0].message.content, got.error.code) == ('tool_use_failed', '<function=do>{"actions"', 'tool_use_failed')

def test_a_stream_that_is_left_or_never_read_gives_its_place_back():
    async def endless(scope, receive, send):
        await send(dict(type='http.response.start', status=200, headers=[(b'content-type', b'text/event-stream')]))
        with contextlib.suppress(OSError):
            for _ in range(80):
                await send(dict(type='http.response.body', body=piece(content='x').encode(), more_body=True))
                await asyncio.sleep(.01)
    async def go(url):
        client = AsyncInferenceClient(base_url=url)
        create = client.chat.completions.create
        stream = await create(**ASK, stream=True)
        async for _ in stream: break
        assert client.gate.running == 1
        await stream.aclose()
        assert client.gate.running == 0
        stream = await create(**ASK, stream=True) # never read
        del stream
        for _ in range(100):
            gc.collect()
            if not client.gate.running: break
            await asyncio.sleep(.01)
        assert client.gate.running == 0
        async def read():
            async for _ in await create(**ASK, stream=True): pass
        task = asyncio.create_task(read())
        await asyncio.sleep(.1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert client.gate.running == 0
        await client.aclose()
    with serving(endless) as url: asyncio.run(go(url))

TOOLS = dict(messages=ASK['messages'], model='m', tools=[interact_many(8)])

@pytest.mark.parametrize('dialect', SHAPES)
def test_a_stream_says_what_the_whole_reply_says_in_every_dialect(dialect, monkeypatch):
    async def go(url):
        client = AsyncInferenceClient(base_url=replace(endpoint(url), dialect=DIALECTS[dialect]))
        body,_ = await client.post(TOOLS)
        chunks = [o async for o in await client.stream(TOOLS | dict(stream_options=dict(include_usage=True)))]
        await client.aclose()
        return body,gather_chunks(chunks)
    with serving(mock(dialect=dialect, plays=['do', 'sleep'])) as url: body,whole = asyncio.run(go(url))
    for found in (body, whole):
        reply = read_reply(found['choices'][0], 8)
        assert (reply.verdict, reply.actions, found['choices'][0]['finish_reason']) == ('ok', ('do', 'sleep'), body['choices'][0]['finish_reason'])
    assert whole.usage.completion_tokens == body['usage']['completion_tokens'] and len(calls_of(whole)) == len(calls_of(body))

def calls_of(body): return body['choices'][0]['message'].get('tool_calls') or []

@pytest.mark.parametrize('kind', LIMITS | FAILURES)
@pytest.mark.parametrize('wire', [True, False])
def test_a_stream_survives_what_happens_before_its_first_chunk_and_tells_the_rest(kind, wire):
    app = mock(faults=[kind], plays=['do'], slow=.01)
    inside = kind in ('half_body', 'error_in_body') or wire and kind == 'cut_body' # in process a body that is cut has no beginning
    def ask(client): return gather_chunks(list(client.chat.completions.create(**TOOLS, stream=True)))
    with serving(app) if wire else contextlib.nullcontext() as url:
        client = InferenceClient(base_url=url) if wire else InferenceClient(app=app)
        if inside:
            with pytest.raises(ClientError) as e: ask(client)
            assert e.value.retry and app.counts.total() == 1
        else: assert read_reply(ask(client).choices[0], 8).actions == ('do',) and app.counts.total() == 2 - kind.startswith('slow')

# ---- the cache

def named(app):
    "`app` by an import string"
    globals()['APP'] = app
    return Endpoint('named', 'http://named/v1', app=f'{__name__}:APP', dialect=DIALECTS['local'])

def test_the_same_request_is_asked_once(tmp_path):
    app = Scripted(OK)
    def client(): return AsyncInferenceClient(base_url=named(app), cache=tmp_path/'deep/cache.sqlite')
    for k in (1, 2): # a second client stands for a second run
        one = client()
        body,attempts = asyncio.run(one.post(ASK))
        assert body == HELLO and len(attempts) == (k == 1)
    assert InferenceClient(base_url=named(app), cache=tmp_path/'deep/cache.sqlite').chat.completions.create(**ASK).choices[0].message.content == 'Hello!'
    assert app.posts == 1

@pytest.mark.parametrize('other', [dict(model='n'), dict(messages=[dict(role='user', content='Ho')]), dict(seed=1), dict(temperature=.5), dict(tools=[]),
    dict(max_tokens=5), dict(thinking=True), dict(top_p=.9), dict(tool_choice='none'), dict(anything=1)])
def test_another_request_is_another_key(other, tmp_path):
    async def go():
        client = AsyncInferenceClient(base_url=named(app), cache=tmp_path/'cache.sqlite')
        client.endpoint = replace(client.endpoint, dialect=DIALECTS['vllm'])
        return [len((await client.post(o))[1]) for o in (ASK, ASK | other, dict(reversed(ASK.items())), ASK | other)]
    app = Scripted(OK)
    assert asyncio.run(go()) == [1, 1, 0, 0]

def test_another_endpoint_is_another_key(tmp_path):
    with serving(Scripted(OK)) as one, serving(Scripted(OK)) as other:
        assert [len(post(o, cache=tmp_path/'cache.sqlite')[1]) for o in (one, other, one)] == [1, 1, 0]

@pytest.mark.parametrize('app', [Scripted(OK), mock(plays=['do']), '__main__:app'], ids=['app', 'mock', '__main__'])
def test_an_app_without_a_lasting_name_is_not_kept(app, tmp_path):
    for how in (dict(app=app), dict(base_url=replace(endpoint('local'), app=app)), dict(base_url=Endpoint('x', 'http://x/v1', app=app))):
        with pytest.raises(CacheError, match='in memory.*import string'): AsyncInferenceClient(cache=tmp_path/'cache.sqlite', **how)

def test_another_app_and_another_version_are_other_keys(tmp_path, monkeypatch):
    one = named(Scripted(OK))
    globals()['OTHER'] = Scripted((200, {}, HELLO | dict(model='n')))
    other = replace(one, app=f'{__name__}:OTHER')
    def asked(o): return [(body['model'], len(attempts)) for body,attempts in [post(o, cache=tmp_path/'cache.sqlite')]][0]
    assert [asked(o) for o in (one, other, one, other)] == [('m', 1), ('n', 1), ('m', 0), ('n', 0)]
    monkeypatch.setattr(room, '__version__', 'next')
    assert [asked(o) for o in (one, other)] == [('m', 1), ('n', 1)]

def test_the_models_in_the_box_are_kept_wherever_their_app_was_made(tmp_path):
    ask,cache = dict(model='random', messages=[dict(role='user', content=written(look(World(0), 100)))], seed=3),tmp_path/'cache.sqlite'
    got = [post(payload=ask, cache=cache, **o) for o in (dict(app=create_app(tmp_path)), dict(app=create_app(tmp_path/'b')), dict(url='local'))]
    assert [len(o[1]) for o in got] == [1, 0, 0] and got[0][0] == got[2][0]

def test_only_good_replies_are_kept(tmp_path):
    cache = tmp_path/'cache.sqlite'
    unread = (400, {}, dict(error=dict(message='x', code='tool_use_failed', failed_generation='<')))
    app = Scripted(unread, fail(400), (200, {}, HELLO | dict(error='half')), (200, {}, HELLO | dict(choices=[dict(message=dict(content='sk-' + 'a1'*10))])), OK)
    assert post(named(app), cache=cache)[0]['choices'][0]['finish_reason'] == 'tool_use_failed'
    failed(BadRequest, named(app), cache=cache)
    for _ in range(2): post(named(app), cache=cache)
    assert post(named(app), cache=cache)[0] == HELLO and app.posts == 5
    assert post(named(app), cache=cache) == (HELLO, []) and app.posts == 5

def test_nothing_secret_is_in_the_cache(tmp_path):
    secret = ASK | dict(messages=[dict(role='user', content='a private question')])
    post(named(Scripted(OK)), secret, api_key=KEY, cache=tmp_path/'cache.sqlite')
    held = b''.join(o.read_bytes() for o in tmp_path.iterdir())
    assert b'Hello!' in held and KEY.encode() not in held and b'private' not in held

def test_a_file_that_is_no_cache(tmp_path):
    (tmp_path/'a').write_text('not a database, and long enough to be seen as none of them' * 100)
    for path in (tmp_path/'a', tmp_path/'a'/'b', tmp_path):
        with pytest.raises(CacheError, match='another file'): AsyncInferenceClient(base_url=named(Scripted(OK)), cache=path)

def _fill(path, k):
    cache = ReplyCache(path)
    for i in range(50): cache.put(f'{i}', dict(n=i))
    return [cache.get(f'{i}')['n'] for i in range(50)] == list(range(50))

def test_several_processes_and_threads_share_a_cache(tmp_path):
    path = str(tmp_path/'cache.sqlite')
    with multiprocessing.get_context('spawn').Pool(2) as pool: assert pool.starmap(_fill, [(path, k) for k in range(4)]) == [True]*4
    cache,got = ReplyCache(path),[]
    def read():
        for i in range(50):
            cache.put(f't{i}', dict(n=i))
            got.append(cache.get(f't{i}') == dict(n=i) == cache.get(f'{i}'))
    threads = [threading.Thread(target=read) for _ in range(4)]
    for o in threads: o.start()
    for o in threads: o.join()
    assert got == [True]*200
    assert sqlite3.connect(path).execute('SELECT count(*) FROM replies').fetchone() == (100,)

# ---- dialects

def test_requests_are_in_the_endpoints_dialect(monkeypatch):
    app = Streaming((200, {}, HELLO))
    with serving(app) as url:
        monkeypatch.setenv('OPENAI_BASE_URL', url)
        post('openai', ASK | dict(model='gpt-4o-mini', max_tokens=9))
    assert app.asked[0]['max_completion_tokens'] == 9 and 'max_tokens' not in app.asked[0]
    assert endpoint('https://api.groq.com/openai/v1').dialect is DIALECTS['groq'] and endpoint('http://10.0.0.1/v1').dialect is DIALECTS['openai']
    assert AsyncInferenceClient(app=app).endpoint.dialect is DIALECTS['local']

def test_an_image_passes_through_untouched():
    app = Streaming((200, {}, HELLO))
    content = [dict(type='text', text='Hi'), dict(type='image_url', image_url=dict(url='data:image/png;base64,iVBORw0KGgo='))]
    post(app=app, payload=dict(model='m', messages=[dict(role='user', content=content)]))
    assert app.asked[0]['messages'][0]['content'] == content

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


def test_a_url_is_no_key():
    with pytest.raises(AuthError, match='a URL was given where the key belongs.*base_url='): InferenceClient('http://127.0.0.1:8000/v1')

def test_a_client_of_a_block_is_closed_after_it():
    async def go():
        async with AsyncInferenceClient(app=Scripted(OK)) as client: await client.post(ASK)
        return client._pools
    assert asyncio.run(go()) == {}
