"The official SDK of OpenAI as a client of our servers: what it makes of replies, streams and errors"
import asyncio, json, time

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

# --- fine-tuning

def row(seed):
    said = dict(name='interact_many', arguments='{"actions": ["move_left", "move_up"]}')
    return dict(messages=[dict(role='user', content=format(look(World(seed), 100))),
        dict(role='assistant', content='I walk.', tool_calls=[dict(id='call_1', type='function', function=said)])], tools=[interact_many()])

@pytest.fixture(scope='module')
def walks(): return '\n'.join(json.dumps(row(i)) for i in range(20)).encode()

@pytest.fixture(scope='module')
def tuning(tmp_path_factory):
    with serving(create_app(tmp_path_factory.mktemp('tuning')/'models', key=KEY)) as url: yield openai.OpenAI(base_url=url, api_key=KEY, max_retries=0)

@pytest.fixture(scope='module')
def file(tuning, walks): return tuning.files.create(file=('walks.jsonl', walks), purpose='fine-tune')

@pytest.fixture(scope='module')
def job(tuning, file):
    made = tuning.fine_tuning.jobs.create(training_file=file.id, model='student', seed=5, suffix='walker', metadata=dict(why='a test'),
        method=dict(type='supervised', supervised=dict(hyperparameters=dict(n_epochs=3, batch_size='auto', learning_rate_multiplier=.5))))
    assert made.status == 'running' and made.fine_tuned_model is None and made.finished_at is None
    for _ in range(600):
        if (now := tuning.fine_tuning.jobs.retrieve(made.id)).status not in ('queued', 'running', 'validating_files'): return now
        time.sleep(.1)
    pytest.fail('the job did not end')

def test_a_file_goes_up(tuning, file, walks):
    assert (file.object, file.filename, file.bytes, file.purpose, file.status) == ('file', 'walks.jsonl', len(walks), 'fine-tune', 'processed')
    assert tuning.files.retrieve(file.id) == file and file.id in [o.id for o in tuning.files.list()] and tuning.files.content(file.id).content == walks
    other = tuning.files.create(file=('other.jsonl', walks), purpose='fine-tune')
    assert tuning.files.delete(other.id).deleted
    with pytest.raises(openai.NotFoundError): tuning.files.retrieve(other.id)

def test_a_job_makes_a_model(tuning, file, job, obs):
    assert (job.status, job.object, job.model, job.training_file, job.seed, job.error, job.metadata) == ('succeeded', 'fine_tuning.job', 'student', file.id, 5, None, dict(why='a test'))
    assert job.fine_tuned_model == f'ft:student:{job.id}-walker' and job.finished_at >= job.created_at
    assert (job.hyperparameters.n_epochs, job.hyperparameters.learning_rate_multiplier) == (3, .5) and job.trained_tokens > 0
    assert ask(tuning, obs, job.fine_tuned_model).choices[0].message.tool_calls
    assert tuning.models.retrieve(job.fine_tuned_model).id == job.fine_tuned_model

def test_its_events_page_by_page(tuning, job):
    events = list(tuning.fine_tuning.jobs.list_events(job.id, limit=2)) # the SDK turns the pages
    assert [o.type for o in events] == ['message', *['metrics']*3, *['message']*2] and len({o.id for o in events}) == 6
    assert events[0].message == f'made {job.fine_tuned_model}' and [o.data['epoch'] for o in events[1:4]] == [3, 2, 1] and {o.level for o in events} == {'info'}

def test_its_checkpoints(tuning, job):
    last = tuning.fine_tuning.jobs.checkpoints.list(job.id).data[0]
    assert (last.fine_tuned_model_checkpoint, last.fine_tuning_job_id, last.step_number) == (job.fine_tuned_model, job.id, 3)
    assert last.metrics.train_loss > 0 and last.metrics.step == 3

def test_jobs_are_listed_page_by_page(tuning, file, job):
    more = [tuning.fine_tuning.jobs.create(training_file=file.id, model='student', hyperparameters=dict(n_epochs=100_000)) for _ in range(2)]
    assert [o.id for o in tuning.fine_tuning.jobs.list(limit=1)] == [more[1].id, more[0].id, job.id]
    assert {tuning.fine_tuning.jobs.cancel(o.id).status for o in more} == {'cancelled'}
    with pytest.raises(openai.BadRequestError, match='nothing to cancel'): tuning.fine_tuning.jobs.cancel(job.id)

def test_refusals_of_fine_tuning_by_class(tuning, file, walks):
    create = tuning.fine_tuning.jobs.create
    with pytest.raises(openai.BadRequestError, match='n_epochs') as e: create(training_file=file.id, model='student', hyperparameters=dict(n_epoch=3))
    assert (e.value.code, e.value.param) == ('bad_job', 'hyperparameters.n_epoch')
    with pytest.raises(openai.NotFoundError, match='file-none'): create(training_file='file-none', model='student')
    with pytest.raises(openai.NotFoundError) as e: create(training_file=file.id, model='gpt-none')
    assert e.value.code == 'model_not_found'
    with pytest.raises(openai.BadRequestError, match='val_split') as e: create(training_file=file.id, model='student', validation_file=file.id)
    assert e.value.param == 'validation_file'
    with pytest.raises(openai.BadRequestError, match='only supervised'): create(training_file=file.id, model='student', method=dict(type='dpo'))
    bad = tuning.files.create(file=('bad.jsonl', walks + b'\n{"messages": []}'), purpose='fine-tune')
    with pytest.raises(openai.BadRequestError, match='line 21, messages') as e: create(training_file=bad.id, model='student')
    assert e.value.param == 'training_file' and e.value.body['problems'][0]['line'] == 21
    with pytest.raises(openai.NotFoundError, match='job_none'): tuning.fine_tuning.jobs.retrieve('job_none')
    with pytest.raises(openai.BadRequestError): tuning.files.create(file=('w.jsonl', walks), purpose='vision')

def test_a_job_that_fails_says_why(tuning):
    blind = json.dumps(dict(messages=[dict(role='user', content='Hello!'), dict(role='assistant', content='Hello!')])).encode()
    made = tuning.fine_tuning.jobs.create(training_file=tuning.files.create(file=('blind.jsonl', blind), purpose='fine-tune').id, model='student')
    for _ in range(600):
        if (now := tuning.fine_tuning.jobs.retrieve(made.id)).status == 'failed': break
        time.sleep(.1)
    assert now.error.code == 'TrainError' and 'observation' in now.error.message and now.fine_tuned_model is None

def test_fine_tuning_asks_for_the_key(tuning):
    stranger = openai.OpenAI(base_url=tuning.base_url, api_key='sk-somebody-else', max_retries=0)
    for call in (stranger.files.list, stranger.fine_tuning.jobs.list, stranger.models.list):
        with pytest.raises(openai.AuthenticationError) as e: call()
        assert e.value.code == 'invalid_api_key' and KEY[:5] not in str(e.value)

def test_a_model_that_waits_to_be_promoted(tmp_path, obs):
    save_checkpoint(tmp_path/'models', 'rl:student:job_1', init_weights(), promoted=False)
    def both(client):
        with pytest.raises(openai.APIStatusError, match='promote') as e: ask(client, obs, 'rl:student:job_1')
        client.post('/models/rl:student:job_1/promote', cast_to=object)
        return e.value.status_code,ask(client, obs, 'rl:student:job_1').choices[0].finish_reason
    assert meet(create_app(tmp_path/'models'), both) == (303, 'tool_calls')

def test_fine_tuning_async(tuning, job):
    async def go():
        async with openai.AsyncOpenAI(base_url=tuning.base_url, api_key=KEY, max_retries=0) as client:
            return (await client.fine_tuning.jobs.retrieve(job.id)).fine_tuned_model,[o.id async for o in client.fine_tuning.jobs.list_events(job.id, limit=4)]
    model,events = asyncio.run(go())
    assert model == job.fine_tuned_model and len(set(events)) == 6
