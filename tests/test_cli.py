"The commands, in process: what they print where, and how they end"
import json, os, shlex, signal, subprocess, sys, time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from synth_lab import Lab
from synth_lab.cli import app
from synth_lab.mock import mock
from synth_lab.serve import create_app, serving
from synth_lab.worker import work

SCRIPT = Path(sys.executable).with_name('synth-lab')


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    "A working folder with a lab; what commands put into the environment goes with it"
    before = dict(os.environ)
    monkeypatch.chdir(tmp_path)
    os.environ['SYNTH_LAB_PATH'] = str(tmp_path/'lab')
    yield tmp_path
    os.environ.clear()
    os.environ.update(before)


def sl(line, **how):
    r = CliRunner().invoke(app, shlex.split(line), prog_name='synth-lab', **how)
    if r.exception and not isinstance(r.exception, SystemExit): raise r.exception
    return r


def good(line, **how):
    r = sl(line, **how)
    assert r.exit_code == 0, f'{line}: {r.output}'
    return r.stdout


@pytest.fixture
def at_once(monkeypatch):
    "Jobs are worked on here, as they are made: a process of its own would first import all again"
    monkeypatch.setattr('synth_lab.worker._spawn', lambda job, lab, models, fd: work(job, lab, models))


@pytest.fixture(scope='module')
def played(tmp_path_factory):
    "A lab with a run of the expert, a dataset made of it, and a model that learned from that"
    lab = Lab(tmp_path_factory.mktemp('played')/'lab', 'local')
    lab.rollout_sync('expert', range(6), run_id='teacher', length=60, split='train')
    lab.filter(min_achievements=3).write(lab.path/'best.jsonl')
    with pytest.MonkeyPatch.context() as m:
        m.setattr('synth_lab.worker._spawn', lambda job, lab, models, fd: work(job, lab, models))
        lab.sft(lab.path/'best.jsonl', epochs=2)
    return lab


# --- errors and exit codes

@pytest.mark.parametrize('line, code, said', [
    ('', 2, 'Usage: synth-lab'),
    ('evl', 2, "No such command 'evl'"),
    ('status models get', 2, "Missing argument 'MODEL'"),
    ('inference --model expert', 2, "Missing option '--message'"),
    ('eval', 2, 'give --config FILE, or --model MODEL'),
    ('train', 2, 'give --type sft or --type rl'),
    ('deploy crafter --runtime docker', 2, "'docker' is no runtime"),
    ('eval --config nope.toml', 1, 'Error: nope.toml cannot be read: No such file'),
    ('eval crafter --model exprt --seeds 0', 1, 'did you mean `expert`?'),
    ('eval crafer --model expert --seeds 0', 1, 'did you mean `crafter`?'),
    ('eval crafter --model expert --seeds 0-x', 1, 'write seeds such as 0,1,2 or 0-9,12'),
    ('status models get nope', 1, 'no model `nope`'),
    ('status models --endpoint opnai', 1, 'did you mean `openai`?'),
    ('status jobs get job_0', 1, "there is no 'job_0'"),
    ('files upload nope.jsonl', 1, 'nope.jsonl cannot be read'),
    ('train --type sft --dataset nope.jsonl', 1, 'there is no file nope.jsonl'),
    ('replay run:0:0', 1, 'no episode `run:0:0`'),
    ('tune nope --pause', 1, "there is no run 'nope'"),
    ('tune nope', 1, 'nothing was asked of the run'),
    ('filter --output x.jsonl', 1, 'the lab has no episodes'),
    ('traces --env-file nope.env', 1, 'there is no file nope.env → synth-lab setup writes one'),
    ('pipeline', 1, 'in no clone of the repository'),
    ('smoke --config nope.toml', 2, 'nope.toml cannot be read'),
    ('serve --host 0.0.0.0', 1, 'set SYNTH_LAB_KEY'),
    ('deploy crafter --host 0.0.0.0', 1, 'set ENVIRONMENT_API_KEY'),
    ('deploy crafter --runtime modal --dry-run', 1, 'ENVIRONMENT_API_KEY is nowhere')])
def test_what_cannot_be_done_is_said_in_a_line(line, code, said):
    r = sl(line)
    assert r.exit_code == code and said in r.output
    if code == 1: assert len(r.stderr.strip().splitlines()) == 1 and r.stderr.startswith('Error: ')


def test_a_toml_file_is_refused_by_line_and_column(place):
    (place/'bad.toml').write_text('[eval]\nmodel = expert\n')
    assert 'bad.toml' in (r := sl('eval --config bad.toml')).stderr and 'line 2, column 9' in r.stderr and r.exit_code == 1


def test_a_bug_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr('synth_lab.taskapp.find_task', lambda task: 1/0)
    monkeypatch.setenv('ENVIRONMENT_API_KEY', 'a-key')
    with pytest.raises(ZeroDivisionError): sl('deploy crafter --dry-run')


def test_ctrl_c_is_130(monkeypatch):
    def stop(self): raise KeyboardInterrupt
    monkeypatch.setattr('synth_lab.jobs.Models.list', stop)
    assert (r := sl('status models')).exit_code == 130 and 'What is done is kept' in r.stderr


def test_no_key_is_shown(place, monkeypatch):
    monkeypatch.setenv('OPENAI_API_KEY', 'sk-this-is-the-key-itself')
    with serving(mock(key='another-key-altogether')) as url:
        r = sl(f'inference --model gpt --message hello --endpoint {url}')
        named = sl(f'inference --model gpt --message hello --endpoint {url} --api-key my-own-secret-key')
    assert r.exit_code == 1 and 'answered 401' in r.stderr and 'OPENAI_API_KEY' in r.stderr
    assert 'sk-this' not in r.output and 'my-own-secret' not in named.output and named.exit_code == 1


# --- models, jobs, files

def test_models_have_an_endpoint_and_say_whether_they_can_be_asked(played):
    rows = json.loads(good(f'status models --lab {played.path} --json'))
    assert [(o['id'], o['endpoint'], o['ready']) for o in rows][:3] == [(o, 'local', True) for o in ('random', 'expert', 'student')]
    assert rows == json.loads(good(f'status models list --lab {played.path} --json'))
    said = good(f'status models get {played.newest("ft")} --lab {played.path}')
    assert 'Status: ready' in said and 'Base model: student' in said and 'Inference endpoint: this process' in said and 'Ready: yes' in said


def test_a_model_elsewhere_has_a_url(place):
    with serving(create_app(place/'m', place/'there')) as url: said = good(f'status models get expert --endpoint {url}')
    assert f'Inference endpoint: {url}/chat/completions' in said


def test_a_file_goes_up_once(played):
    first, again = (good(f'files upload {played.path}/best.jsonl').strip() for _ in range(2))
    assert first == again and first.startswith('file-')
    row, = json.loads(good('files list --json'))
    assert row['id'] == first and row['bytes'] == (played.path/'best.jsonl').stat().st_size
    assert 'File: ' + first in good(f'files get {first}') and 'best.jsonl' in good('files')


# --- training

def config(place, **more):
    (place/'sft.toml').write_text('\n'.join(['[algorithm]', 'type = "offline"', 'method = "sft"', 'variety = "fft"', '[job]', 'model = "student"', '[hyperparameters]', *(f'{k} = {v}' for k, v in more.items())]))


def test_training_is_followed_line_by_line_until_its_model(place, played, at_once):
    config(place, n_epochs=2)
    lines = good(f'train --type sft --config sft.toml --dataset {played.path}/best.jsonl --poll').splitlines()
    job, model = lines[0].removeprefix('job '), lines[-1].removeprefix('succeeded → ')
    assert [o.split(': ')[0].split()[-1] for o in lines[1:-1]] == ['sft.job.created', 'sft.job.started', 'sft.epoch', 'sft.epoch', 'sft.job.completed']
    row, = json.loads(good('status jobs --json'))
    assert (row['id'], row['status'], row['fine_tuned_model']) == (job, 'succeeded', model) and model in good('status models')
    assert model in good('status') and 'sft.job.completed' in good(f'status jobs get {job}')


def test_a_job_that_failed_ends_with_its_reason(place, at_once):
    row = dict(messages=[dict(role='user', content='hi'), dict(role='assistant', content='hello')])
    (place/'chat.jsonl').write_text(json.dumps(row) + '\n')
    r = sl('train --type sft --dataset chat.jsonl --poll')
    assert r.exit_code == 1 and 'failed: ' in r.stderr and len(r.stderr.strip().splitlines()) == 1
    job, = json.loads(good('status jobs --status failed --json'))
    assert 'Reason: ' in good(f'status jobs get {job["id"]}')


def test_the_time_to_look_is_kept_and_the_job_goes_on(place, played):
    config(place, n_epochs=100_000)
    line = f'train --config sft.toml --dataset {played.path}/best.jsonl --no-poll --idempotency once'
    r = sl(line)
    job = r.stdout.removeprefix('job ').strip()
    assert f'synth-lab status jobs follow {job}' in r.stderr and sl(line).stdout == r.stdout
    r = sl(f'status jobs follow {job} --poll-timeout 1')
    assert r.exit_code == 1 and r.stderr == f'Error: {job} is still running after 1 s, and goes on → synth-lab status jobs follow JOB looks again, synth-lab status jobs cancel JOB ends it\n'
    assert good(f'status jobs cancel {job}').splitlines() == [f'Job: {job}', 'Status: cancelled']
    assert (r := sl(f'status jobs follow {job}')).exit_code == 1 and 'was cancelled' in r.stderr


# --- asking, traces, replays, judges

def test_the_reply_is_alone_on_stdout():
    with serving(mock(plays=('do',))) as url:
        r = sl(f'inference --model gpt --message hello --endpoint {url} --max-tokens 20')
        whole = json.loads(good(f'inference --model gpt --message hello --endpoint {url} --json'))
        streamed = sl(f'inference --model gpt --message hello --endpoint {url} --stream')
    assert r.stdout == streamed.stdout and r.stdout.endswith('TOOL_CALL: interact_many({"actions":["do"]})\n') and 'tokens' in r.stderr
    assert whole['choices'][0]['message']['tool_calls'][0]['function']['name'] == 'interact_many'


def test_the_message_may_come_by_a_pipe():
    with serving(app_ := mock()) as url: good(f'inference --model gpt --message - --system short --endpoint {url}', input='from a pipe')
    assert [o['content'] for o in app_.calls[-1]['asked']['messages']] == ['short', 'from a pipe']


def test_a_model_in_the_box_is_shown_a_world():
    r = sl('inference --model expert --message hello')
    assert r.exit_code == 0 and '"interact_many"' in r.stdout and 'the beginning of world 0' in r.stderr
    from synth_lab.view import format, look
    from synth_lab.world import World
    r = sl(f'inference --model expert --message {shlex.quote(format(look(World(3), 200)))}')
    assert r.exit_code == 0 and 'Note' not in r.stderr


def test_traces_lists_runs_with_their_means(played):
    row, = json.loads(good(f'traces --lab {played.path} --json'))
    assert (row['run_id'], row['model'], row['split'], row['episodes'], row['failed']) == ('teacher', 'expert', 'train', 6, 0)
    assert row['achievements'] == played.episodes.n_achievements.mean()
    assert 'There are no traces' in good('traces')


def test_traces_are_found_where_the_variable_says(played, monkeypatch):
    monkeypatch.setenv('CRAFTER_TRACE_DB', str(played.path))
    assert 'teacher' in good('traces')
    assert 'There are no traces' in good('traces --lab elsewhere')


def test_a_replay_says_whether_it_is_exact(place, played):
    assert good(f'replay teacher:2:0 --lab {played.path} --gif film') == 'teacher:2:0: 60 of 60 steps, exactly as recorded\n'
    assert (place/'film.gif').read_bytes()[:4] == b'GIF8'
    assert json.loads(good(f'replay teacher:2:0 --lab {played.path} --json'))['exact']


def test_a_run_under_way_is_told_other_numbers(place):
    lab,said = Lab(place/'tuned', endpoint='local'),[]
    def tell(event):
        if not said: said.append(good('tune slow --concurrency 1 --token-limit 1000000 --lab tuned'))
    lab.rollout_sync('random', range(2), run_id='slow', length=20, on_turn=tell)
    assert said[0] == 'slow: concurrency 1, paused no, token_limit 1000000, cost_limit inf, time_limit inf\n'
    assert lab.controls('slow').concurrency.tolist()[:2] == [32, 1]
    assert 'is not being played now' in sl('tune slow --resume --lab tuned').stderr


def test_judges_of_a_configuration(place, played):
    (place/'j.py').write_text('def long(payload): return payload["metrics"]["num_steps"]/60\ndef none(payload): return None\n')
    (place/'j.toml').write_text('[eval.judge.long]\npath = "j.py"\nfunction = "long"\n')
    row, = json.loads(good(f'judge --config j.toml --lab {played.path} --json'))
    assert (row['judge'], row['n'], row['mean']) == ('long', 6, 1.)
    (place/'n.toml').write_text('[eval.judge.none]\npath = "j.py"\nfunction = "none"\n')
    r = sl(f'judge --config n.toml --lab {played.path}')
    assert r.exit_code == 1 and '6 without a score' in r.stderr
    assert sl(f'judge --config n.toml --lab {played.path} --allow-failures').exit_code == 0


# --- the pipeline's own steps

def test_evaluation_filter_and_training_close(place, at_once):
    r = sl('eval crafter --model expert --seeds 0-5 --max-turns 12 --split train --trace-db traces/v3')
    assert r.exit_code == 0 and '6 worlds of train' in r.stdout and len([o for o in r.stderr.splitlines() if o.startswith('seed=')]) == 6
    assert 'Wrote' in good('filter --trace-db traces/v3 --limit 40 --output ft_data/best.jsonl')
    config(place, n_epochs=1)
    model = good('train --config sft.toml --dataset ft_data/best.jsonl').splitlines()[-1].removeprefix('succeeded → ')
    rows = json.loads(good('eval --seeds 7,8 --max-turns 3 --trace-db traces/v3 --json', env=dict(CRAFTER_MODEL=model)))
    assert [(o['seed'], o['status']) for o in rows] == [(7, 'done'), (8, 'done')]
    assert {o['model'] for o in json.loads(good('traces --trace-db traces/v3 --json'))} == {'expert', model}


def test_a_filter_says_what_each_rule_removed(played, place):
    out = good(f'filter --lab {played.path} --require-any collect_wood --output w.jsonl')
    assert 'require_any' in out and f'Wrote {len((place/"w.jsonl").read_text().splitlines())} rows' in out
    r = sl(f'filter --lab {played.path} --min-return 99 --output none.jsonl')
    assert r.exit_code == 1 and 'min_return' in r.stderr and not (place/'none.jsonl').exists()


def test_failed_seeds_make_an_evaluation_fail(place):
    def run(more=''):
        with serving(mock(faults=[None, 'bad_request'])) as url: return sl(f'eval crafter --model gpt --seeds 0-2 --max-turns 1 --concurrency 1 --endpoint {url} {more}')
    r = run()
    assert r.exit_code == 1 and 'seed=1 status=error error: ' in r.stderr and 'Unrecognized request argument' in r.stdout
    assert run('--allow-failures').exit_code == 0


# --- servers and task apps

def test_tasks_are_listed_with_what_they_are_also_called():
    row, = json.loads(good('task-app list --json'))
    assert row['id'] == 'crafter' and 'grpo-crafter' in row['aliases']


def test_a_task_app_is_validated_in_process(monkeypatch):
    monkeypatch.setenv('ENVIRONMENT_API_KEY', 'the-key-of-the-task-app')
    rows = json.loads(good('task-app validate grpo-crafter --json'))
    assert all(o['ok'] is not False for o in rows) and 'refusal' in [o['name'] for o in rows]
    r = sl('task-app validate --url http://127.0.0.1:9')
    assert r.exit_code == 1 and 'does not answer' in r.stdout


def test_a_port_that_is_taken_is_named_with_its_holder():
    with serving(mock()) as url:
        port = url.rsplit(':')[-1].split('/')[0]
        for line in (f'serve --port {port}', f'deploy crafter --port {port}', f'task-app serve crafter --port {port}', f'task-app serve crafter --port {port} --force'):
            r = sl(line)
            assert r.exit_code == 1 and f'process {os.getpid()}' in r.stderr, r.output
            if 'force' in line: assert '--force ends nobody' in r.stderr


def test_a_file_for_modal_is_complete(place, monkeypatch):
    modal = pytest.importorskip('modal')
    (place/'my_task.py').write_text('from synth_lab.taskapp import Crafter\nclass Mine(Crafter): id = "mine"\n')
    good('setup --env-file my.env')
    for line, name in (('grpo-crafter --name crafter-blogpost', 'crafter-blogpost'), ('my_task.py:Mine', 'mine')):
        file = good(f'deploy {line} --runtime modal --env-file my.env --dry-run').splitlines()[0].removeprefix('Wrote ')
        scope = dict(__name__='made', __file__=file)
        exec(compile((place/file).read_text(), file, 'exec'), scope)
        assert isinstance(scope['app'], modal.App) and scope['app'].name == name and 'fastapi_app' in scope
        assert os.environ['ENVIRONMENT_API_KEY'] not in (place/file).read_text()


def test_modal_is_run_as_shown(place, monkeypatch):
    monkeypatch.setenv('ENVIRONMENT_API_KEY', 'the-key-of-the-task-app')
    ran = []
    monkeypatch.setattr('synth_lab.deploy.subprocess.run', lambda command: ran.append(command[1:]) or subprocess.CompletedProcess(command, len(ran) - 1))
    good('deploy grpo-crafter --runtime modal --modal-mode serve --name crafter-blogpost')
    assert ran == [['-m', 'modal', 'serve', 'crafter_blogpost_modal.py']]
    assert sl('deploy grpo-crafter --runtime modal --modal-mode sreve --name other').exit_code == 1 and not (place/'other_modal.py').exists()
    r = sl('deploy grpo-crafter --runtime modal')
    assert r.exit_code == 1 and '`modal deploy crafter_modal.py` ended with 1' in r.stderr


# --- keys

def test_setup_tries_each_key_and_writes_the_good_ones(place, monkeypatch):
    with serving(mock(key='the-right-key')) as url:
        for o in ('SYNTH', 'OPENAI', 'GROQ'): monkeypatch.setenv(f'{o}_BASE_URL', url)
        monkeypatch.setenv('SYNTH_API_KEY', 'the-right-key')
        monkeypatch.setenv('OPENAI_API_KEY', 'the-wrong-key')
        r = sl('setup --json')
    assert {o['variable']: o['state'] for o in json.loads(r.stdout)} == dict(SYNTH_API_KEY='accepted', OPENAI_API_KEY='refused', GROQ_API_KEY='missing', ENVIRONMENT_API_KEY='made')
    text = (place/'.env').read_text()
    assert 'the-right-key' in text and 'the-wrong-key' not in text and r.exit_code == 1 and 'the-' not in r.stdout
    assert (place/'.env').stat().st_mode & 0o777 == 0o600


def test_the_file_of_keys_is_read_and_wins_over_nothing(place, monkeypatch):
    (place/'.env').write_text('CRAFTER_TRACE_DB=from_the_file\nSYNTH_LAB_PATH=not_this_one\n')
    good('traces')
    assert os.environ['CRAFTER_TRACE_DB'] == 'from_the_file' and os.environ['SYNTH_LAB_PATH'] == str(place/'lab')


def test_the_task_app_s_key_is_tried_where_it_runs(place, monkeypatch):
    from synth_lab.taskapp import create_task_app
    monkeypatch.setenv('ENVIRONMENT_API_KEY', 'the-key-of-the-task-app')
    with serving(create_task_app('crafter', 'the-key-of-the-task-app')) as url: right = json.loads(good(f'setup --json --url {url.removesuffix("/v1")}'))[-1]
    with serving(create_task_app('crafter', 'another-key')) as url: r = sl(f'setup --json --url {url.removesuffix("/v1")}')
    assert right['state'] == 'accepted' and json.loads(r.stdout)[-1]['state'] == 'refused' and r.exit_code == 1


@pytest.mark.parametrize('command,option,said', [('train --type sft', '--backend', '--endpoint'), ('deploy --runtime local', '--task-app', 'behind the command'),
    ('train --type sft', '--examples', 'filter --limit N'), ('status', '--base-url', '--endpoint')])
def test_an_option_of_the_earlier_command_line_is_refused_with_what_to_type(place, command, option, said):
    r = sl(f'{command} {option} x')
    assert r.exit_code == 2 and f'No such option: {option}: ' in r.output and said in r.output


# --- the script itself

def test_help_imports_nothing_of_the_library(place):
    code = 'import sys; from typer.testing import CliRunner; from synth_lab.cli import app; r = CliRunner().invoke(app, ["--help"]); assert "pipeline" in r.output; ' \
        'print([m for m in sys.modules if m in ("rich", "numpy", "pydantic", "httpx", "dotenv") or m.startswith("synth_lab.")])'
    assert subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True).stdout.strip() == "['synth_lab.terminal', 'synth_lab.cli']"


def test_the_script_serves_until_it_is_interrupted(place):
    with subprocess.Popen([SCRIPT, 'serve', '--port', '0'], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as p:
        said = p.stdout.readline()
        p.send_signal(signal.SIGINT)
        assert p.wait(30) == 130
    assert said.startswith('lab at http://127.0.0.1:') and 'Ctrl-C ends it' in said


def test_the_pipeline_is_the_repository_s(place, monkeypatch):
    (place/'tools').mkdir(); (place/'nbs/pipeline').mkdir(parents=True); (place/'below').mkdir()
    (place/'tools/pipeline.py').write_text('import os, sys\nopen("said", "w").write(f"{os.environ.get(\'QUICK\')} {os.environ.get(\'LONG\')}")\nsys.exit(3)\n')
    monkeypatch.chdir(place/'below')
    monkeypatch.setenv('LONG', '1')
    assert sl('pipeline --quick').exit_code == 3 and (place/'below/said').read_text() == '1 None'
