"The official SDK of OpenAI as a client of our servers: what it makes of replies, streams and errors"
import asyncio, json

import httpx, pytest

from synth_lab.mock import FAULTS, REPLIES, SHAPES, mock
from synth_lab.policies import init_weights, save_checkpoint
from synth_lab.serve import create_app, serving
from synth_lab.tools import interact_many, read_reply
from synth_lab.view import format, look
from synth_lab.world import World

openai = pytest.importorskip('openai')

TOOLS = [interact_many(4)]
KEY = 'sk-nobody-knows'

@pytest.fixture(scope='module')
def obs(): return format(look(World(seed=5), 200))

@pytest.fixture(scope='module')
def box(tmp_path_factory):
    with serving(create_app(tmp_path_factory.mktemp('models'))) as url: yield openai.OpenAI(base_url=url, api_key=KEY, max_retries=0)

@pytest.fixture(scope='module')
def faulty():
    "A client of a mock that meets the fault which its `user` names"
    with serving(mock(faults=lambda n, asked: asked.get('user'))) as url: yield openai.OpenAI(base_url=url, api_key=KEY, max_retries=0)

@pytest.fixture(scope='module', params=SHAPES)
def of_dialect(request):
    with serving(mock(dialect=request.param, plays=['move_left', 'do'])) as url: yield openai.OpenAI(base_url=url, api_key=KEY, max_retries=0)

def ask(client, obs='Hello!', model='expert', **kw):
    return client.chat.completions.create(model=model, messages=[dict(role='user', content=obs)], tools=TOOLS, **kw)

def meet(app, call, **kw):
    "What `call` makes of a client of `app`"
    with serving(app) as url, openai.OpenAI(base_url=url, api_key=KEY, **dict(max_retries=0) | kw) as client: return call(client)

def test_a_reply_with_a_call(box, obs):
    r = ask(box, obs, seed=1)
    call, = r.choices[0].message.tool_calls
    assert (r.object, r.model, r.choices[0].finish_reason, call.type, call.function.name) == ('chat.completion', 'expert', 'tool_calls', 'function', 'interact_many')
    assert json.loads(call.function.arguments)['actions'] == list(read_reply(r.choices[0].model_dump()).actions) != []
    assert r.usage.total_tokens == r.usage.prompt_tokens + r.usage.completion_tokens

def test_a_reply_in_text_and_several(box, obs):
    r = box.chat.completions.create(model='random', messages=[dict(role='user', content=obs)], seed=1, n=2)
    assert [o.index for o in r.choices] == [0, 1] and all('<tool_call>' in o.message.content and o.message.tool_calls is None for o in r.choices)

def test_logprobs(box, obs):
    choice = ask(box, obs, 'student', seed=1, logprobs=True).choices[0]
    assert [o.token for o in choice.logprobs.content] == json.loads(choice.message.tool_calls[0].function.arguments)['actions']

def test_a_conversation_goes_on(box, obs):
    "The SDK's own message object, and the tool's answer, may be sent back"
    said = ask(box, obs).choices[0].message
    messages = [dict(role='user', content=obs), said, dict(role='tool', tool_call_id=said.tool_calls[0].id, content=obs)]
    assert box.chat.completions.create(model='expert', messages=messages, tools=TOOLS).choices[0].message.tool_calls == said.tool_calls

def gather(chunks):
    text,arguments,finish,usage = '','',None,None
    for c in chunks:
        usage = c.usage or usage
        for o in c.choices:
            text,finish = text + (o.delta.content or ''),o.finish_reason or finish
            arguments += ''.join(t.function.arguments for t in o.delta.tool_calls or ())
    return text,arguments,finish,usage

def test_a_stream(box, obs):
    whole = ask(box, obs, 'random', seed=2)
    text,arguments,finish,usage = gather(ask(box, obs, 'random', seed=2, stream=True, stream_options=dict(include_usage=True)))
    assert (text, finish, usage) == (whole.choices[0].message.content, 'tool_calls', whole.usage)
    assert arguments == whole.choices[0].message.tool_calls[0].function.arguments
    assert gather(ask(box, obs, 'random', seed=2, stream=True)) == (text, arguments, finish, None)

def test_the_helper_that_puts_a_stream_together(box, obs):
    "The SDK's own accumulator finds the same message in the stream as in the reply"
    whole = ask(box, obs, 'random', seed=2)
    tools = [dict(TOOLS[0], function=TOOLS[0]['function'] | dict(strict=True))]
    with box.chat.completions.stream(model='random', messages=[dict(role='user', content=obs)], tools=tools, seed=2) as stream:
        done = stream.get_final_completion()
    call,known = done.choices[0].message.tool_calls[0],whole.choices[0].message.tool_calls[0]
    assert (call.id, call.function.name, call.function.arguments) == (known.id, known.function.name, known.function.arguments)
    assert (done.choices[0].message.content, done.choices[0].finish_reason) == (whole.choices[0].message.content, 'tool_calls')

def test_async(box, obs):
    async def go():
        async with openai.AsyncOpenAI(base_url=box.base_url, api_key=KEY, max_retries=0) as client:
            whole = await ask(client, obs, 'random', seed=2)
            chunks = [c async for c in await ask(client, obs, 'random', seed=2, stream=True)]
            with pytest.raises(openai.NotFoundError, match='expert'): await ask(client, obs, 'exprt')
            return whole,chunks,[o.id async for o in client.models.list()]
    whole,chunks,models = asyncio.run(go())
    assert gather(chunks)[1] == whole.choices[0].message.tool_calls[0].function.arguments and models == ['random', 'expert', 'student']

def test_models(box):
    assert [o.id for o in box.models.list()] == ['random', 'expert', 'student']
    one = box.models.retrieve('expert')
    assert (one.id, one.object, one.owned_by, one.created) == ('expert', 'model', 'synth_lab', 0)
    with pytest.raises(openai.NotFoundError, match='did you mean `expert`') as e: box.models.retrieve('exprt')
    assert (e.value.code, e.value.param, e.value.type) == ('model_not_found', None, 'invalid_request_error')

def test_a_checkpoint_by_its_id(tmp_path):
    for o in ('ft:student:job_1', 'ft:me/student:job_2'): save_checkpoint(tmp_path, o, init_weights())
    listed,one = meet(create_app(tmp_path), lambda client: ([o.id for o in client.models.list()], client.models.retrieve('ft:me/student:job_2')))
    assert listed[3:] == ['ft:student:job_1', 'ft:me/student:job_2'] and one.id == 'ft:me/student:job_2' and one.created > 1_700_000_000

@pytest.mark.parametrize('change, error, status, code, param', [
    (dict(model='exprt'), openai.NotFoundError, 404, 'model_not_found', None), (dict(temperature=-1), openai.BadRequestError, 400, 'bad_request', 'temperature'),
    (dict(messages=[]), openai.UnprocessableEntityError, 422, 'no_observation', None), (dict(n=0), openai.BadRequestError, 400, 'bad_request', 'n'),
    (dict(tools=[dict(type='function', function=dict(name='look', parameters={}))]), openai.BadRequestError, 400, 'bad_request', 'tools')])
@pytest.mark.parametrize('stream', [False, True])
def test_refusals_by_class(box, obs, change, error, status, code, param, stream):
    with pytest.raises(error) as e: box.chat.completions.create(**dict(model='expert', messages=[dict(role='user', content=obs)], tools=TOOLS, stream=stream) | change)
    assert (e.value.status_code, e.value.code, e.value.param) == (status, code, param) and e.value.body['message'] in str(e.value)

def test_the_raw_response(box, obs):
    raw = box.chat.completions.with_raw_response.create(model='expert', messages=[dict(role='user', content=obs)], tools=TOOLS)
    assert raw.status_code == 200 and raw.headers['content-type'] == 'application/json' and raw.parse().choices[0].message.tool_calls

def test_every_dialect_of_the_mock(of_dialect):
    assert read_reply(ask(of_dialect).choices[0].model_dump(warnings=False)).actions == ('move_left', 'do')

def test_every_dialect_of_the_mock_streams(of_dialect):
    text,arguments,finish,_ = gather(ask(of_dialect, stream=True))
    assert 'move_left' in (arguments or text) and finish in ('tool_calls', 'stop')

ERRORS = dict(bad_key=openai.AuthenticationError, forbidden=openai.PermissionDeniedError, no_model=openai.NotFoundError, bad_request=openai.BadRequestError,
    too_long=openai.BadRequestError, quota=openai.RateLimitError, rate_limit=openai.RateLimitError, retry_after=openai.RateLimitError, retry_delay=openai.RateLimitError,
    server_error=openai.InternalServerError, bad_gateway=openai.InternalServerError, unavailable=openai.InternalServerError, gateway_timeout=openai.InternalServerError,
    overloaded=openai.InternalServerError, conflict=openai.ConflictError, request_timeout=openai.APIStatusError, cut=openai.APIConnectionError)

@pytest.mark.parametrize('kind, error', ERRORS.items())
def test_errors_of_the_mock_by_class(faulty, kind, error):
    with pytest.raises(error) as e: ask(faulty, user=kind)
    fault = FAULTS[kind]
    if fault.status != 200: assert e.value.status_code == fault.status
    if fault.code: assert e.value.code == fault.code

def test_a_key_is_checked():
    assert meet(mock(key=KEY), ask).choices
    with pytest.raises(openai.AuthenticationError) as e: meet(mock(key='sk-another'), ask)
    assert (e.value.code, e.value.status_code) == ('invalid_api_key', 401)

def test_its_retries_find_the_good_reply():
    app = mock(faults=['retry_after_ms', 'cut'], wait=.01)
    assert meet(app, ask, max_retries=2).choices and app.counts == dict(retry_after_ms=1, cut=1, good=1)

def test_it_gives_up_on_a_slow_server():
    with pytest.raises(openai.APITimeoutError): meet(mock(latency=.5), ask, timeout=.1)

def test_the_tool_call_that_groq_could_not_read():
    with pytest.raises(openai.BadRequestError) as e: meet(mock(faults=['malformed'], dialect='groq'), ask)
    assert e.value.code == 'tool_use_failed' and '"move_left"' in e.value.body['failed_generation']

def test_a_stream_that_breaks(faulty):
    def all_of(kind): return list(ask(faulty, stream=True, user=kind))
    with pytest.raises(openai.APIError, match='Provider returned error'): all_of('error_in_body')
    with pytest.raises((httpx.RemoteProtocolError, openai.APIConnectionError)): all_of('cut_body')
    with pytest.raises(openai.RateLimitError): all_of('rate_limit')

@pytest.mark.parametrize('kind', REPLIES)
def test_what_the_sdk_takes_for_a_good_reply(faulty, kind):
    "The SDK says nothing about a call that cannot be carried out: reading it is the harness's part"
    r = ask(faulty, max_tokens=64, user=kind)
    assert read_reply(r.choices[0].model_dump(), cut=r.usage.completion_tokens == 64).verdict == FAULTS[kind].outcome
