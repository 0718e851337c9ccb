"Training as jobs: their folder, their process, the learning API and its client"
import asyncio, json, os, signal, socket, time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx, pytest

from synth_lab import jobs as client_module, worker
from synth_lab.client import AsyncInferenceClient, AuthError, BadRequest, EndpointDown, InferenceClient, ModelNotFoundError, NotPromoted
from synth_lab.core import LabError
from synth_lab.jobs import AsyncLearningClient, Cursor, JobCancelled, JobFailed, JobTimeout, LearningClient, NotFound, state_after, state_of
from synth_lab.policies import init_weights, load_policy, save_checkpoint
from synth_lab.rows import to_synth, to_trl
from synth_lab.serve import create_app, serving, serving_process
from synth_lab.tools import interact_many
from synth_lab.train import Trained
from synth_lab.view import format, look
from synth_lab.worker import JobError, JobFolder, Kind, create_job, find_job, save_file, start_job, work
from synth_lab.world import World

KEY = 'not-like-any-other-key'
TOOLS = [interact_many(4)]
ASK = dict(messages=[dict(role='user', content=format(look(World(1), 100)))], tools=TOOLS)

def walk(seed, actions='["move_left", "move_up"]'):
    said = dict(name='interact_many', arguments=f'{{"actions": {actions}}}')
    return dict(messages=[dict(role='user', content=format(look(World(seed), 100))),
        dict(role='assistant', content='I walk.', tool_calls=[dict(id='call_1', type='function', function=said)])], tools=[interact_many()])

def lines(rows): return '\n'.join(map(json.dumps, rows)).encode()

@pytest.fixture(scope='module')
def walks(tmp_path_factory):
    path = tmp_path_factory.mktemp('data')/'walks.jsonl'
    path.write_bytes(lines(walk(i) for i in range(24)))
    return path

@pytest.fixture
def lab(tmp_path): return tmp_path/'lab'

@pytest.fixture
def client(lab): return LearningClient(app=create_app(lab/'models'))

@pytest.fixture(scope='module')
def home(tmp_path_factory): return tmp_path_factory.mktemp('home')/'lab'

@pytest.fixture(scope='module')
def shared(home): return LearningClient(app=create_app(home/'models'))

@pytest.fixture(scope='module')
def tuned(shared, walks):
    "A job that fine-tuned a student"
    job = shared.jobs.create('sft', 'student', shared.files.upload(walks).id, n_epochs=4, hidden=16, metadata=dict(why='a test'))
    assert job.follow(timeout=120) is job
    return job

def weights(lab, model): return {k:v.tobytes() for k,v in load_policy(model, lab/'models').weights.items()}
def until(true, seconds=60):
    end = time.monotonic()+seconds
    while not true():
        assert time.monotonic() < end, 'it did not come'
        time.sleep(.01)
def numbered_once(rows): return [o['seq'] for o in rows] == list(range(1, len(rows)+1))
def pid_of(job): return int((job.path/'lock').read_text())
def kinds(rows): return [o['type'].split('.', 1)[1] for o in rows]

# --- the whole way

def test_upload_train_and_chat(shared, tuned, walks, home):
    file, = shared.files.list()
    assert shared.files.get(file.id).bytes == walks.stat().st_size and tuned.status == 'succeeded'
    events = tuned.events()
    assert kinds(events) == ['job.created', 'job.started', *['epoch']*4, 'job.completed'] and numbered_once(events)
    loss = [o.value for o in tuned.metrics() if o.name == 'loss']
    assert len(loss) == 4 and loss[-1] < loss[0] and {o.step for o in tuned.metrics()} == {1, 2, 3, 4}
    model = shared.models.get(tuned.fine_tuned_model)
    assert (model.id, model.ready, model.job_id, model.base_model) == (f'ft:student:{tuned.id}', True, tuned.id, 'student')
    assert model.id in [o.id for o in shared.models.list()]
    assert shared.chat.completions.create(model=model.id, **ASK).choices[0].message.tool_calls
    assert tuned.row.metadata == dict(why='a test') and not (home/'jobs'/tuned.id/'state').exists()
    assert tuned.chart()._repr_png_()[:4] == b'\x89PNG'

def test_rl_goes_on_from_there_and_is_served_once_it_is_promoted(shared, tuned, home):
    job = shared.jobs.create('rl', tuned.fine_tuned_model, tuned.row.training_file_id, iterations=2, worlds=4, length=30, seeds=[1, 2], warmup=1, suffix='small',
        checkpoint_every=1).wait(120)
    model = job.fine_tuned_model
    assert model == f'rl:student:{job.id}-small' and not shared.models.get(model).ready and {'score', 'loss', 'kl'} <= {o.name for o in job.metrics()}
    with pytest.raises(NotPromoted, match='models.promote') as e: shared.chat.completions.create(model=model, **ASK)
    assert e.value.status == 303
    assert shared.models.promote(model).ready and shared.models.promote(model).ready
    assert shared.chat.completions.create(model=model, **ASK).choices
    with pytest.raises(ModelNotFoundError): shared.models.promote('rl:student:job_none')
    made = send(create_app(home/'models'), 'GET', f'/rl/jobs/{job.id}/checkpoints').json()['data']
    assert {f'{model}:checkpoint-epoch-{i}' for i in (1, 2)} <= {o['fine_tuned_model_checkpoint'] for o in made} and made[0]['step_number'] == 2
    assert not shared.models.get(f'{model}:checkpoint-epoch-1').ready and shared.models.promote(f'{model}:checkpoint-epoch-1').ready

# --- deaths

LONG = dict(epochs=60, hidden=48, seed=3)

@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory, walks):
    lab = tmp_path_factory.mktemp('calm')
    client = LearningClient(app=create_app(lab/'models'))
    job = client.jobs.create('sft', 'student', client.files.upload(walks).id, **LONG).wait(180)
    return weights(lab, job.fine_tuned_model),[(o.name, o.step, o.value) for o in job.metrics()]

def same(lab, job, undisturbed):
    "Whether a job that was disturbed ended as the other one did, with each thing told once"
    events = job.events()
    assert numbered_once(events) and [o['data']['epoch'] for o in events if o['type'] == 'sft.epoch'] == list(range(1, LONG['epochs']+1))
    assert Counter(kinds(events))['job.completed'] == 1 and Counter(kinds(events))['job.resumed'] == 1
    assert [(o['name'], o['step'], o['value']) for o in job.metrics()] == undisturbed[1]
    assert weights(lab, job.fine_tuned_model) == undisturbed[0]

def test_a_worker_that_is_killed_is_replaced(client, walks, lab, undisturbed):
    job = client.jobs.create('sft', 'student', client.files.upload(walks).id, **LONG)
    folder = find_job(lab, job.id)
    until(lambda: len(folder.rows()) > 10)
    os.kill(pid_of(folder), signal.SIGKILL)
    assert folder.state == 'running'
    same(lab, job.wait(180), undisturbed)

@pytest.mark.slow
def test_a_server_and_its_worker_that_are_killed(walks, lab, undisturbed):
    with serving_process('synth_lab.serve:create_app', dict(models=str(lab/'models'))) as url:
        client = LearningClient(url)
        job = client.jobs.create('sft', 'student', client.files.upload(walks).id, **LONG)
        folder = find_job(lab, job.id)
        until(lambda: len(folder.rows()) > 10)
    os.kill(pid_of(folder), signal.SIGKILL)
    with serving_process('synth_lab.serve:create_app', dict(models=str(lab/'models'))) as url:
        until(lambda: folder.state == 'succeeded', 180) # nobody asked: the server saw to it when it started
        same(lab, LearningClient(url).jobs.get(job.id), undisturbed)

@pytest.mark.slow
def test_rl_ends_with_the_same_weights_too(client, lab):
    asked = dict(iterations=8, worlds=4, length=60, seeds=[1, 2, 3], warmup=1, seed=5)
    calm,killed = (client.jobs.create('rl', 'student', **asked) for _ in range(2))
    folder = find_job(lab, killed.id)
    until(lambda: len(folder.rows()) > 2)
    os.kill(pid_of(folder), signal.SIGKILL)
    for o in (calm, killed): o.wait(180)
    assert weights(lab, calm.fine_tuned_model) == weights(lab, killed.fine_tuned_model) and [o['value'] for o in calm.metrics()] == [o['value'] for o in killed.metrics()]
    assert Counter(kinds(killed.events())) == {'job.created':1, 'job.started':1, 'job.resumed':1, 'iteration':8, 'job.completed':1} and numbered_once(killed.events())

@pytest.mark.slow
def test_whoever_follows_outlives_the_server_too(walks, lab, undisturbed, monkeypatch):
    seen = []
    monkeypatch.setattr(client_module, '_shows', lambda job: lambda new: seen.extend(new.events))
    options = dict(models=str(lab/'models'))
    with serving_process('synth_lab.serve:create_app', options) as url:
        client = LearningClient(url)
        job = client.jobs.create('sft', 'student', client.files.upload(walks).id, **LONG | dict(epochs=400))
        with ThreadPoolExecutor() as pool:
            followed = pool.submit(job.follow, 180)
            until(lambda: len(seen) > 5)
            port = httpx.URL(url).port
            os.kill(server_of(port), signal.SIGKILL)
            time.sleep(.5)
            with serving_process('synth_lab.serve:create_app', options, port=port): assert followed.result().status == 'succeeded'
    assert [o['seq'] for o in seen] == list(range(1, 404)) and kinds(seen)[-1] == 'job.completed'

def server_of(port):
    "The process that listens on `port`"
    inode = next(o.split()[9] for o in Path('/proc/net/tcp').read_text().splitlines() if f':{port:04X} ' in o and ' 0A ' in o)
    for fd in Path('/proc').glob('[0-9]*/fd/*'):
        try:
            if os.readlink(fd) == f'socket:[{inode}]': return int(fd.parts[2])
        except OSError: pass

@pytest.mark.slow
def test_a_worker_outlives_its_server(walks, lab, undisturbed):
    with serving_process('synth_lab.serve:create_app', dict(models=str(lab/'models'))) as url:
        client = LearningClient(url)
        folder = find_job(lab, client.jobs.create('sft', 'student', client.files.upload(walks).id, **LONG).id)
    until(lambda: folder.state == 'succeeded', 180)
    assert weights(lab, folder.status['fine_tuned_model']) == undisturbed[0] and kinds(folder.events()).count('job.resumed') == 0

def test_a_worker_that_dies_again_and_again_has_failed(lab, walks, monkeypatch):
    file = save_file(lab, 'w.jsonl', walks.read_bytes())
    job = create_job(lab, lab/'models', dict(kind='sft', model='student', training_file=file['id']))
    monkeypatch.setattr(worker.sys, 'executable', '/bin/false')
    for _ in range(5):
        start_job(job, lab, lab/'models')
        if job.state == 'failed': break
        until(lambda: worker_gone(job))
    assert 'died 3 times' in job.status['error']['message'] and kinds(job.events()) == ['job.created', 'job.started', 'job.resumed', 'job.resumed', 'job.failed']

def worker_gone(job):
    with worker._held(job) as fd: return fd is not None

def test_a_worker_that_cannot_be_started(lab, walks, monkeypatch):
    file = save_file(lab, 'w.jsonl', walks.read_bytes())
    job = create_job(lab, lab/'models', dict(kind='sft', model='student', training_file=file['id']))
    monkeypatch.setattr(worker.sys, 'executable', '/no/such/python')
    start_job(job, lab, lab/'models')
    assert job.state == 'failed' and 'could not be started' in job.status['error']['message']

def test_only_one_works_on_a_job(lab, walks):
    file = save_file(lab, 'w.jsonl', walks.read_bytes())
    job = create_job(lab, lab/'models', dict(kind='sft', model='student', training_file=file['id']))
    with worker._held(job) as fd:
        start_job(job, lab, lab/'models')
        assert fd is not None and job.state == 'queued' and len(job.events()) == 1

# --- the worker, with trainers of a few lines

@pytest.fixture
def made(lab, walks, monkeypatch):
    "A function that makes a job whose trainer is `train`, and works on it here"
    def make(train, **hyperparameters):
        def sft(dataset, models, *, base:str='student', epochs:int=3, lr:float=1e-3, on_update=None, state=None, job=None, extra=None):
            return train(on_update, models, f'ft:student:{job}', epochs)
        monkeypatch.setattr(worker, '_arguments', lambda kind: (sft, {k:o for k,o in worker.signature(sft).parameters.items() if k in ('epochs', 'lr')}, {}))
        worker._shape.cache_clear()
        file = save_file(lab, 'w.jsonl', walks.read_bytes())
        job = create_job(lab, lab/'models', dict(kind='sft', model='student', training_file=file['id'], hyperparameters=hyperparameters))
        work(job, lab, lab/'models')
        return job
    yield make
    worker._shape.cache_clear()

def finish(models, model): return Trained(model, save_checkpoint(models, model, init_weights(4)), dict(epoch=1, examples=2), [], {})

def test_what_a_trainer_tells_twice_is_kept_once(made):
    def train(tell, models, model, epochs):
        for i in (0, 1, 1, 0, 2): tell(dict(epoch=i, loss=float(i), note=None))
        return finish(models, model)
    job = made(train)
    assert [o['epoch'] for o in job.rows()] == [0, 1, 2] == [o['data']['epoch'] for o in job.events() if 'epoch' in o['data']]

def test_a_line_that_was_cut_never_happened(made):
    def train(tell, models, model, epochs): return finish(models, model)
    job = made(train)
    with open(job.path/'events.jsonl', 'ab') as f: f.write(b'{"seq": 99, "ty')
    assert [o['seq'] for o in job.events()] == [1, 2]
    worker._mend(job.path/'events.jsonl')
    assert (job.path/'events.jsonl').read_bytes().endswith(b'}\n')

@pytest.mark.parametrize('error, code, message, fix', [
    (LabError('no rows', 'write some'), 'LabError', 'no rows', 'write some'), (ValueError('of sk-proj-0123456789abcdef'), 'ValueError', 'ValueError: of sk[redacted]', 'worker.log')])
def test_a_failure_keeps_its_reason(made, error, code, message, fix, capsys):
    def train(*_): raise error
    job = made(train)
    found = job.status['error']
    assert (job.state, found['code'], found['message']) == ('failed', code, message) and fix in found['fix']
    assert job.events()[-1]['level'] == 'error' and job.events()[-1]['message'] == message
    assert '0123456789abcdef' not in capsys.readouterr().err

def test_an_end_that_was_told_stands(made):
    "Whoever dies between the last event and the status leaves an event that decides"
    job = made(lambda tell, models, model, epochs: finish(models, model))
    job.set(status='running', fine_tuned_model=None)
    job.end('cancelled', 'cancelled')
    assert job.state == 'succeeded' and job.status['fine_tuned_model'] == f'ft:student:{job.id}' and kinds(job.events()).count('job.completed') == 1

# --- failing and cancelling

def test_a_failed_job_is_an_error_with_its_reason(client, lab, walks, tmp_path):
    (tmp_path/'blind.jsonl').write_bytes(lines([dict(messages=[dict(role='user', content='Hello!'), dict(role='assistant', content='Hello!')])]))
    job = client.jobs.create('sft', 'student', client.files.upload(tmp_path/'blind.jsonl').id)
    with pytest.raises(JobFailed, match='no example|observation') as e: job.wait(120)
    assert e.value.fix and job.status == 'failed' and kinds(job.events())[-1] == 'job.failed'

def test_a_limit_on_time_is_kept_and_cancelling_is_prompt(client, walks, lab):
    job = client.jobs.create('sft', 'student', client.files.upload(walks).id, epochs=100_000)
    for wait in (job.wait, job.follow):
        began = time.monotonic()
        with pytest.raises(JobTimeout, match='goes on'): wait(timeout=.3)
        assert .3 <= time.monotonic()-began < 2
    until(lambda: len(find_job(lab, job.id).rows()) > 3)
    assert client.jobs.status(job.id) == 'running'
    began = time.monotonic()
    assert job.cancel().status == 'cancelled' and time.monotonic()-began < 4
    assert worker_gone(find_job(lab, job.id)) and len(job.metrics()) > 3 and numbered_once(job.events()) and kinds(job.events())[-1] == 'job.cancelled'
    with pytest.raises(JobCancelled): job.wait(5)
    assert client.jobs.cancel(job.id).status == 'cancelled' and client.jobs.start(job.id).status == 'cancelled'

def test_cancelling_what_never_began_and_what_is_over(client, walks, shared, tuned):
    job = client.jobs.create('sft', 'student', client.files.upload(walks).id, start=False)
    assert job.status == 'queued' == client.jobs.status(job.id) and job.cancel().status == 'cancelled'
    with pytest.raises(BadRequest, match='nothing to cancel'): tuned.cancel()

# --- what is refused

@pytest.mark.parametrize('asked, words', [
    (dict(n_epoch=3), 'n_epochs'), (dict(learning_rat=1), 'learning_rate'), (dict(epochs='many'), 'integer'), (dict(epochs=1, n_epochs=2), 'twice'),
    (dict(gamma=.9), "no hyperparameter 'gamma'")])
def test_hyperparameters_are_named(client, walks, asked, words, lab):
    with pytest.raises(BadRequest, match=words): client.jobs.create('sft', 'student', client.files.upload(walks).id, **asked)
    assert client.jobs.list() == []

def test_those_of_rl_are_its_recipes_too(client):
    with pytest.raises(BadRequest, match='did you mean `clip`'): client.jobs.create('rl', 'student', clipp=.1)
    with pytest.raises(BadRequest, match='did you mean `episodes_per_batch`'): client.jobs.create('rl', 'student', episodes_per_batchs=4)

@pytest.mark.parametrize('write', [lambda row: row, to_trl, to_synth])
def test_a_file_in_any_dialect(lab, write):
    file = save_file(lab, 'w.jsonl', lines(write(walk(i)) for i in range(3)))
    assert create_job(lab, lab/'models', dict(kind='sft', model='student', training_file=file['id'])).state == 'queued'

def test_a_bad_file_is_named_by_line_and_path(client, lab, tmp_path):
    (tmp_path/'bad.jsonl').write_bytes(lines([walk(0), dict(messages=[dict(role='user', content='Hello!'), dict(role='assistant', content=None)])]))
    file = client.files.upload(tmp_path/'bad.jsonl')
    with pytest.raises(BadRequest, match=r'line 2, messages\[1\]: says nothing'): client.jobs.create('sft', 'student', file.id)
    body = send(create_app(lab/'models'), 'POST', '/learning/jobs', dict(job_type='sft', model='student', training_file_id=file.id)).json()['error']
    assert body['param'] == 'training_file' and [(o['line'], o['path']) for o in body['problems']] == [(2, 'messages[1]')] and body['problems'][0]['fix']

@pytest.mark.parametrize('asked, error, words', [
    (dict(kind='sft', model='expert'), BadRequest, 'no weights'), (dict(kind='sft', model='ft:student:job_none'), ModelNotFoundError, 'job_none'),
    (dict(kind='dpo', model='student'), BadRequest, 'sft or rl'), (dict(kind='sft', model='student'), BadRequest, 'needs a file'),
    (dict(kind='sft', model='student', training_file='file-none'), NotFound, 'file-none'), (dict(kind='sft', model='student', training_file='../models'), NotFound, 'models'),
    (dict(kind='rl', model='student', suffix='a b'), BadRequest, 'suffix')])
def test_requests_that_cannot_be(client, asked, error, words, lab):
    with pytest.raises(error, match=words): client.jobs.create(**asked)
    assert client.jobs.list() == []

def send(app, method, path, body=None, **kw):
    async def go():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url='http://local') as http: return await http.request(method, path, json=body, **kw)
    return asyncio.run(go())

def test_unknown_jobs_and_files(client, lab):
    for call in (client.jobs.get, client.jobs.status, client.jobs.events, client.jobs.cancel, client.files.get):
        with pytest.raises(NotFound, match='job_x'): call('job_x')
    assert send(create_app(lab/'models'), 'GET', '/learning/jobs/..%2Fmodels').status_code == 404

def test_uploads_that_cannot_be(lab, monkeypatch, tmp_path, client):
    app = create_app(lab/'models')
    assert send(app, 'POST', '/files', dict(a=1)).json()['error']['param'] == 'file'
    assert send(app, 'POST', '/files', files=dict(data=b'1')).status_code == 400
    assert send(app, 'POST', '/files', files=dict(file=b'1'), data=dict(purpose='vision')).json()['error']['param'] == 'purpose'
    monkeypatch.setattr('synth_lab.serve.LARGEST', 1000)
    refused = send(app, 'POST', '/files', files=dict(file=b'1'*2000))
    assert (refused.status_code, refused.json()['error']['code']) == (413, 'file_too_large') and 'MB' in refused.json()['error']['message']
    with pytest.raises(LabError, match='cannot be read'): client.files.upload(tmp_path/'none.jsonl')
    assert client.files.list() == []

# --- one API, many paths

@pytest.mark.parametrize('root', ['/learning/jobs', '/api/learning/jobs', '/api/sft/jobs', '/v1/learning/jobs', '/api/v1/jobs', '/api/orchestration/jobs', '/rl/jobs'])
def test_the_paths_that_clients_call(lab, walks, root):
    app = create_app(lab/'models')
    file = send(app, 'POST', '/api/learning/files', files=dict(file=('w.jsonl', walks.read_bytes())), data=dict(purpose='fine-tune')).json()['id']
    assert send(app, 'GET', f'/files/{file}').json()['id'] == file and send(app, 'GET', f'/v1/files/{file}/content').content == walks.read_bytes()
    job = create_job(lab, lab/'models', dict(kind='sft', model='student', training_file=file)).id
    assert [o['job_id'] for o in send(app, 'GET', root).json()['jobs']] == [job]
    assert {send(app, 'GET', f'{root}/{job}{o}').status_code for o in ('', '/status', '/events', '/metrics', '/timeline', '/config')} == {200}
    assert [o['phase'] for o in send(app, 'GET', f'{root}/{job}/timeline').json()['events']] == ['queued']
    assert send(app, 'POST', f'{root}/{job}/cancel').json()['status'] == 'cancelled'

@pytest.mark.parametrize('path, body, kind, started', [
    ('/learning/jobs', dict(training_type='sft_offline'), 'sft', False), ('/api/sft/jobs', {}, 'sft', True), ('/api/rl/jobs', {}, 'rl', True),
    ('/rl/jobs', dict(job_type='rl', data=dict(base_model='student'), compute=dict(gpu_count=8), tags=dict(a='b'), model=None), 'rl', True)])
def test_requests_as_clients_send_them(lab, walks, path, body, kind, started, monkeypatch):
    spawned = []
    monkeypatch.setattr(worker, '_spawn', lambda *args: spawned.append(args))
    file = save_file(lab, 'w.jsonl', walks.read_bytes())
    body = {k:v for k,v in (dict(model='student', training_file_id=file['id'], hyperparameters=dict(batch_size=8)) | body).items() if v is not None}
    made = send(create_app(lab/'models'), 'POST', path, body).json()
    assert (made['job_type'], made['model'], made['status']) == (kind, 'student', 'running' if started else 'queued') and len(spawned) == started
    assert find_job(lab, made['job_id']).config['settings'] == dict(batch=8)
    if 'compute' in body: assert made['metadata'] == dict(compute=dict(gpu_count=8), tags=dict(a='b'))

def test_a_request_that_is_sent_twice_makes_one_job(lab, walks):
    file = save_file(lab, 'w.jsonl', walks.read_bytes())
    app,body = create_app(lab/'models'),dict(job_type='sft', model='student', training_file_id=file['id'])
    ids = [send(app, 'POST', '/learning/jobs', body, headers={'Idempotency-Key':k}).json()['job_id'] for k in ('a', 'a', 'b')]
    assert ids[0] == ids[1] != ids[2] and len(worker.list_jobs(lab)) == 2

# --- reading without losing or repeating

def test_states_of_other_servers():
    assert [state_of(o) for o in ('completed', 'canceled', 'error', 'FAILED', 'queued', 'no such word', None)] == ['succeeded', 'cancelled', 'failed', 'failed', 'queued', 'running', 'running']
    ends = ('sft.job.completed', 'rl.train.completed', 'rl.job.completed', 'workflow.completed', 'training.completed', 'sft.completed', 'sft.workflow.completed')
    assert {state_after(o) for o in ends} == {'succeeded'} and {state_after(o.replace('completed', 'failed')) for o in ends} == {'failed'}
    assert state_after('rl.job.canceled') == 'cancelled' and state_after('rl.checkpoint.completed') is None and state_after('completed') is None

class Slow:
    "A server of another make: its status lags, it sends events again, its pages end between two names of a step"
    def __init__(self): self.asked = 0
    async def __call__(self, scope, receive, send):
        query,path = dict(httpx.QueryParams(scope['query_string'].decode())),scope['path']
        self.asked += 'metrics' in path
        upto = 3*self.asked
        events = [dict(seq=i, type='rl.train.completed' if i == 9 else 'rl.step', message='') for i in range(1, 10)][:upto]
        points = [dict(name=n, step=i, value=i) for i in range(9) for n in ('loss', 'score')][:2*upto-1 if upto < 9 else None]
        if 'events' in path: body = dict(events=[o for o in events if o['seq'] >= int(query['since_seq'])])
        elif 'metrics' in path: body = dict(points=[o for o in points if o['step'] > int(query.get('after_step', -1))])
        else: body = dict(job_id='job_1', status='running')
        await send(dict(type='http.response.start', status=200, headers=[]))
        await send(dict(type='http.response.body', body=json.dumps(body).encode()))

def test_nothing_is_lost_or_repeated():
    async def go():
        job = client_module.AsyncJob(AsyncLearningClient(app=Slow()), dict(job_id='job_1'))
        updates = [o async for o in job._watch(20)]
        return [e['seq'] for o in updates for e in o.events],[(p['name'], p['step']) for o in updates for p in o.points],job.status
    seqs,points,status = asyncio.run(go())
    assert (seqs, status) == (list(range(1, 10)), 'succeeded')
    assert sorted(points) == sorted((n, i) for i in range(9) for n in ('loss', 'score')) and len(points) == 18

def test_pages_of_the_box(lab, walks, client):
    file = save_file(lab, 'w.jsonl', walks.read_bytes())
    job = create_job(lab, lab/'models', dict(kind='sft', model='student', training_file=file['id']))
    tell = job.teller()
    for i in range(210): tell(dict(epoch=i, loss=1., accuracy=0., val_loss=None))
    mine = client.jobs.get(job.id)
    assert [o['step'] for o in mine.metrics() if o['name'] == 'loss'] == list(range(210)) and len(mine.metrics()) == 420
    assert [o['seq'] for o in mine.events()] == list(range(1, 212)) and [o['seq'] for o in client.jobs.events(job.id, since=209)] == [210, 211]
    page = send(create_app(lab/'models'), 'GET', f'/learning/jobs/{job.id}/metrics?after_step=0&limit=3').json()['points']
    assert [(o['step'], o['name']) for o in page] == [(1, 'loss'), (1, 'accuracy'), (2, 'loss'), (2, 'accuracy')]
    assert send(create_app(lab/'models'), 'GET', f'/learning/jobs/{job.id}/metrics?limit=no').status_code == 400

# --- keys

def test_a_key_is_asked_for_and_never_kept(lab, walks, capfd, caplog, monkeypatch):
    monkeypatch.setenv('SYNTH_API_KEY', KEY)
    with serving_process('synth_lab.serve:create_app', dict(models=str(lab/'models'), key=KEY)) as url:
        for headers in ({}, dict(authorization='Bearer x'), dict(authorization=f'Bearer {KEY[:-1]}'), dict(authorization=f'Basic {KEY}')):
            for method,path in (('GET', '/v1/models'), ('POST', '/v1/chat/completions'), ('GET', '/api/learning/jobs'), ('GET', '/nowhere')):
                r = httpx.request(method, url.removesuffix('/v1') + path, headers=headers)
                assert r.status_code == 401 and r.json()['error']['code'] == 'invalid_api_key' and KEY[:4] not in r.text
        client = LearningClient(url)
        job = client.jobs.create('sft', 'student', client.files.upload(walks).id, epochs=2, hidden=8, metadata=dict(secret=KEY)).wait(120)
        assert client.chat.completions.create(model=job.fine_tuned_model, **ASK).choices
        with pytest.raises(AuthError, match='key') as e: LearningClient(url, api_key='another-key').jobs.list()
        assert KEY not in str(e.value) + repr(client) + repr(job)
    kept = b''.join(o.read_bytes() for o in lab.rglob('*') if o.is_file())
    assert KEY.encode() not in kept and b'[redacted]' in kept and KEY not in ''.join(capfd.readouterr()) + caplog.text

def test_the_worker_gets_no_keys(lab, walks, monkeypatch):
    seen = []
    monkeypatch.setenv('SYNTH_API_KEY', KEY)
    monkeypatch.setattr(worker.subprocess, 'Popen', lambda *a, **kw: seen.append((a, kw)) or type('P', (), dict(pid=1, wait=lambda self: 0))())
    file = save_file(lab, 'w.jsonl', walks.read_bytes())
    start_job(create_job(lab, lab/'models', dict(kind='sft', model='student', training_file=file['id'])), lab, lab/'models')
    assert len(seen) == 1 and KEY not in str(seen)

def test_an_empty_key_lets_nobody_in_by_mistake(lab):
    for key in ('', ' '):
        with pytest.raises(LabError, match='empty'): create_app(lab/'models', key=key)

def test_an_app_with_a_key_goes_to_another_process(lab):
    import pickle
    again = pickle.loads(pickle.dumps(create_app(lab/'models', key=KEY)))
    assert send(again, 'GET', '/models').status_code == 401 and send(again, 'GET', '/models', headers=dict(authorization=f'Bearer {KEY}')).status_code == 200

# --- where the API is

@pytest.mark.parametrize('base', ['http://127.0.0.1:9', 'http://127.0.0.1:9/v1', 'http://127.0.0.1:9/api', 'http://127.0.0.1:9/api/v1'])
def test_base_urls(base):
    import pickle
    client = AsyncLearningClient(base, KEY)
    assert client._root == 'http://127.0.0.1:9/api' == pickle.loads(pickle.dumps(client))._root and pickle.loads(pickle.dumps(client)).secrets == (KEY,)

def test_the_environment_says_where(monkeypatch, tmp_path):
    assert LearningClient().endpoint.in_process
    monkeypatch.setenv('SYNTH_BASE_URL', 'http://127.0.0.1:9/api')
    monkeypatch.setenv('SYNTH_API_KEY', KEY)
    client = LearningClient()
    assert client.endpoint.url == 'http://127.0.0.1:9/api' and client._client.secrets == (KEY,)
    with pytest.raises(EndpointDown): client.jobs.list()

def test_a_server_that_hangs_holds_nobody_longer(walks):
    async def hangs(scope, receive, send): await asyncio.sleep(30)
    job = client_module.Job(AsyncLearningClient(app=hangs), dict(job_id='job_1', status='running'))
    began = time.monotonic()
    with pytest.raises(JobTimeout): job.wait(timeout=.2)
    assert time.monotonic()-began < 2

def test_async(home, tuned):
    async def go():
        client = AsyncLearningClient(app=create_app(home/'models'))
        job = await client.jobs.get(tuned.id)
        assert await job.follow(timeout=60) is job and await job.wait() is job
        return job.status,tuned.fine_tuned_model in [o.id for o in await client.models.list()],(await job.chart())._repr_png_()[:4],await client.jobs.status(job.id)
    assert asyncio.run(go()) == ('succeeded', True, b'\x89PNG', 'succeeded')

def test_a_terminal_gets_a_line_an_event(shared, tuned, monkeypatch, capsys):
    shared.jobs.get(tuned.id).follow(60)
    assert capsys.readouterr() == ('', '')
    monkeypatch.setattr(client_module.sys.stderr, 'isatty', lambda: True, raising=False)
    shared.jobs.get(tuned.id).follow(60)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 7 == len(tuned.events()) and 'sft.epoch: epoch 2: loss' in said[3] and said[-1].endswith(tuned.fine_tuned_model)
