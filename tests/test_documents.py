"""The command lines of the two documents that people come from, in their order, with `synth-lab` for `uvx synth-ai`

What is elsewhere stays away: Modal is a dry run, models of Groq and of the learning API are played by those in the box, and servers that would stay are told to return.
The configurations hold the keys of the published ones.
"""
import json, os, re, shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from synth_lab.cli import app
from synth_lab.mock import mock
from synth_lab.serve import serving
from synth_lab.taskapp import create_task_app
from synth_lab.worker import work

SEEDS = Path(__file__).parents[2]/'shared/seeds'
CONFIGS = 'examples/blog_posts/warming_up_to_rl/configs'

EVAL = """[eval]
app_id = "grpo-crafter"
task_app_url = "https://your-app.modal.run"
model = "{model}"
seeds = [0, 1, 2]
max_turns = 10
concurrency = {concurrency}
env_name = "crafter"
policy_name = "crafter-react"
trace_format = "{trace}"
return_trace = true
[eval.policy_config]
provider = "{provider}"
model = "{model}"
temperature = 0.6
top_p = 0.95
max_tokens = 768
use_vision = false
image_only_mode = false
max_llm_calls = 10
[eval.env_config.env_params]
max_steps_per_episode = 10
"""
FILTER = """[filter]
db = "sqlite+libsql://http://127.0.0.1:8080"
output = "ft_data/crafter_blog_high_reward.jsonl"
min_official_score = 0.1
models = ["qwen/qwen3-32b", "openai/gpt-oss-120b"]
shuffle = true
shuffle_seed = 42
"""
SFT = """[algorithm]
type = "offline"
method = "sft"
variety = "fft"
[job]
model = "Qwen/Qwen3-4B"
data = "ft_data/crafter_blog_high_reward.jsonl"
poll_seconds = 1800
[compute]
gpu_type = "H100"
gpu_count = 4
[training]
mode = "full_finetune"
[hyperparameters]
n_epochs = 2
per_device_batch = 2
gradient_accumulation_steps = 64
learning_rate = 8e-6
"""
RL = """type = "rl"
[algorithm]
type = "online"
method = "policy_gradient"
variety = "gspo"
[services]
task_url = "https://your-app.modal.run"
[compute]
gpu_type = "H200"
gpu_count = 2
[topology]
type = "single_node_split"
gpus_for_vllm = 1
gpus_for_training = 1
[model]
source = "fft:Qwen/Qwen3-4B:job_x"
trainer_mode = "lora"
label = "crafter-rl"
[rollout]
env_name = "crafter"
policy_name = "crafter-react"
max_turns = 4
episodes_per_batch = 4
max_concurrent_rollouts = 4
[training]
num_epochs = 1
iterations_per_epoch = 1
max_turns = 4
batch_size = 2
group_size = 2
learning_rate = 5e-6
"""
SMOKE = """type = "rl"
[smoke]
task_app_name = "grpo-crafter"
task_app_port = 0
task_app_env_file = ".env"
task_app_force = true
sqld_auto_start = true
sqld_db_path = "./traces/local.db"
sqld_hrana_port = 8080
sqld_http_port = 8081
max_steps = 10
policy = "gpt-5-nano"
mock_backend = "synthetic"
return_trace = true
"""
FILES = {'eval_groq_qwen32b': EVAL.format(model='qwen/qwen3-32b', provider='groq', trace='full', concurrency=1),
    'eval_openai_gpt_oss_120b': EVAL.format(model='openai/gpt-oss-120b', provider='groq', trace='full', concurrency=1),
    'eval_ft_qwen4b': EVAL.format(model='fft:Qwen/Qwen3-4B:job_x', provider='synth', trace='compact', concurrency=4),
    'filter_high_reward_dataset': FILTER, 'train_sft_qwen4b': SFT, 'train_rl_from_sft': RL, 'smoke_test': SMOKE, 'my_config': SMOKE.replace('task_app_name = "grpo-crafter"\n', '')}

SMOKED = 'v3_traces=1/1 nonzero_returns=1/1'

# (a line of the first document, what is added to it here, what has to be seen, its exit code)
FIRST = [
    ('synth-ai setup', '', 'Wrote .env', 0),
    ('synth-ai deploy grpo-crafter --runtime modal --modal-mode serve --name crafter-blogpost --env-file .env', '--dry-run', 'modal serve crafter_blogpost_modal.py', 0),
    ('synth-ai deploy grpo-crafter --runtime uvicorn --port 8001 --trace traces/v3 --env-file .env', '', 'crafter at http://127.0.0.1:8001, rollouts are kept in traces/v3', 130),
    (f'synth-ai eval grpo-crafter --config {CONFIGS}/eval_groq_qwen32b.toml --trace-db "${{CRAFTER_TRACE_DB}}"', '--endpoint local', '`expert` plays in its place', 0),
    (f'synth-ai eval grpo-crafter --config {CONFIGS}/eval_openai_gpt_oss_120b.toml --trace-db "${{CRAFTER_TRACE_DB}}"', '--endpoint local', '3 worlds of train', 0),
    (f'synth-ai filter --config {CONFIGS}/filter_high_reward_dataset.toml', '', 'Wrote 60 rows of 6 episodes to ft_data/crafter_blog_high_reward.jsonl', 0),
    (f'synth-ai train --type sft --config {CONFIGS}/train_sft_qwen4b.toml --env-file .env --poll', '', 'succeeded → ft:student:job_', 0),
    ('synth-ai status models', '', 'ft:student:job_', 0),
    (f'synth-ai eval grpo-crafter --config {CONFIGS}/eval_ft_qwen4b.toml --trace-db "${{CRAFTER_TRACE_DB}}"', '--endpoint local', 'is not in the box: `ft:student:job_', 0),
    (f'synth-ai train --type rl --config {CONFIGS}/train_rl_from_sft.toml --env-file .env --poll', '', 'succeeded → rl:student:job_', 0),
    ('synth-ai status jobs', '', 'crafter-rl', 0),
    ('synth-ai files upload', 'ft_data/crafter_blog_high_reward.jsonl', 'file-', 0),
    ('synth-ai inference --model "peft:Qwen/Qwen3-0.6B:job_xxx" --message "Hello" --max-tokens 100', '', 'interact_many', 0),
    ('synth-ai status models get "peft:..."', '', 'Ready: yes', 0),
    ('synth-ai status models list', '', 'rl:student:job_', 0),
    ('synth-ai smoke --config configs/smoke_test.toml', '', SMOKED, 0),
    ('synth-ai smoke --config configs/my_config.toml --url http://localhost:8765', '', SMOKED, 0),
    ('synth-ai smoke --config configs/smoke_test.toml --max-steps 5', '', SMOKED, 0),
    ('synth-ai task-app serve grpo-crafter --port 8765 --env-file .env --force', '', 'crafter at http://127.0.0.1:8765', 130),
    ('synth-ai smoke --url http://localhost:8765 --env-name crafter --policy-name crafter-react --max-steps 10 --policy mock --mock-backend openai', '--return-trace', SMOKED, 0),
    ('synth-ai smoke --config configs/smoke_test.toml --model gpt-4o', '', SMOKED, 0),
    ('synth-ai task-app list', '', 'grpo-crafter', 0),
    ('synth-ai serve', '', 'http://127.0.0.1:8000', 130),
    ('synth-ai traces', '', 'expert', 0)]

MODEL = 'Qwen/Qwen3-4B-Instruct-2507'

# (a module of the second document's, the command in its place, what has to be seen)
SECOND = [
    ('run_crafter_qwen4b', f'eval crafter --model {MODEL} --seeds 0-9 --max-turns 10 --concurrency 5', '10 worlds of train'),
    ('filter_traces', 'filter --min-achievements 1 --output ft_data/qwen4b_crafter_sft.jsonl', 'to ft_data/qwen4b_crafter_sft.jsonl'),
    ('filter_traces_achievements', 'filter --require-any collect_wood --output ft_data/qwen4b_crafter_sft_collect_wood.jsonl', 'require_any'),
    ('sft_kickoff', f'train --type sft --model {MODEL} --dataset ft_data/qwen4b_crafter_sft_collect_wood.jsonl --poll', 'succeeded → ft:student:job_'),
    ('run_crafter_qwen4b', 'eval crafter --seeds 0-4 --max-turns 5 --concurrency 5', '5 worlds of train')]


@pytest.fixture(scope='module')
def place(tmp_path_factory):
    "Where somebody follows the documents: a folder with their configurations, and their variables"
    before, here, there = dict(os.environ), Path.cwd(), tmp_path_factory.mktemp('documents')
    os.chdir(there)
    for folder in (CONFIGS, 'configs'):
        Path(folder).mkdir(parents=True)
        for name, text in FILES.items(): Path(folder, f'{name}.toml').write_text(text)
    os.environ |= dict(SYNTH_LAB_PATH=str(there/'lab'), CRAFTER_TRACE_DB='traces/v3/crafter_blog.db')
    with pytest.MonkeyPatch.context() as m:
        m.setattr('synth_lab.worker._spawn', lambda job, lab, models, fd: work(job, lab, models)) # a process of its own would first import all again
        yield there
    os.chdir(here)
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def stays(monkeypatch):
    "Servers that would stay say that they are ready, and return; one that runs beside a command is a thread"
    def serve(app, host, port, options=None, ready=None): ready(f'http://{host}:{port}/v1')
    for o in ('synth_lab.serve.serve', 'synth_lab.deploy.serve'): monkeypatch.setattr(o, serve)
    monkeypatch.setattr('synth_lab.smoke.serving_process', lambda app, options, port=0, **how: serving(create_task_app(**options), port=port))


def typed(line, more='', **env):
    "What happens when somebody types a line of the documents"
    words = shlex.split(os.path.expandvars(line)) + shlex.split(more)
    r = CliRunner().invoke(app, words[1:], prog_name='synth-lab', env=env)
    if r.exception and not isinstance(r.exception, SystemExit): raise r.exception
    return r


@pytest.mark.parametrize('line, more, seen, code', FIRST, ids=lambda o: str(o)[:60])
def test_the_first_document(place, stays, line, more, seen, code):
    if 'http://localhost:8765' in line:
        with serving(create_task_app('crafter')) as url: r = typed(line.replace('http://localhost:8765', url.removesuffix('/v1')), more)
    else: r = typed(line, more)
    assert seen in r.output, r.output
    assert r.exit_code == code, r.output


@pytest.mark.parametrize('line, endpoint, code', [
    (f'synth-ai eval grpo-crafter --config {CONFIGS}/eval_groq_qwen32b.toml --trace-db none', 'GROQ', 1),
    ('synth-ai smoke --config configs/smoke_test.toml --no-mock', 'SYNTH', 3)])
def test_a_model_elsewhere_without_its_key(place, stays, line, endpoint, code):
    with serving(mock(key='the-key-of-the-endpoint')) as url: r = typed(line, **{f'{endpoint}_BASE_URL': url})
    assert r.exit_code == code and f'set {endpoint}_API_KEY' in r.output, r.output


@pytest.mark.parametrize('module, line, seen', SECOND, ids=[o[0] for o in SECOND])
def test_the_second_document(place, module, line, seen):
    again = module == 'run_crafter_qwen4b' and '--model' not in line
    r = typed(f'synth-lab {line}', **(dict(CRAFTER_MODEL=f'ft:{MODEL}:ftjob-6cedf721e0ca4c80968834b71e2bdace') if again else {}))
    assert r.exit_code == 0 and seen in r.output, r.output
    if again: assert 'is not in the box: `ft:student:job_' in r.stderr


def test_each_episode_that_the_documents_play_is_in_their_traces(place):
    rows = json.loads(typed('synth-lab traces --json').stdout)
    assert [(o['model'].split(':')[0], o['episodes']) for o in rows] == [('ft', 5), ('expert', 10), ('ft', 3), ('expert', 3), ('expert', 3)]
    assert all(o['failed'] == 0 for o in rows)


COMMAND = re.compile(r'(?:uvx|uv run|`|\n|use ")\s*(synth-ai (?:[^`\n"]|"[^"\n]*"|\\\n)*)')


@pytest.mark.skipif(not SEEDS.is_dir(), reason='the documents are not here')
def test_no_command_line_of_the_documents_is_left_out():
    text = '\n'.join(p.read_text() for p in sorted(SEEDS.glob('*.txt')))
    text = re.sub(r'\\\n\+?\s*', ' ', re.sub(r'^\+', '', text, flags=re.M))
    def plain(line):
        for a, b in {CONFIGS: 'configs', '/path/.env': '.env', 'your_config': 'train_rl_from_sft', ' --no-mock': '', '\\': ''}.items(): line = line.replace(a, b)
        return ' '.join(line.split())
    known, found = {plain(o[0]) for o in FIRST}, {plain(o.split('  #')[0]) for o in COMMAND.findall(text)}
    assert len(found) > 20
    assert [o for o in found if not any(k.startswith(o) or o.startswith(k) for k in known)] == []
