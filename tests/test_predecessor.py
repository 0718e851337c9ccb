"""Our task app asked by the program that its users come from, synth-ai 0.2.19

SYNTH_AI names that program, such as `/path/to/venv/bin/synth-ai`; it needs an environment of its own, since its dependencies are older than ours. Without it these tests are skipped. To install it:
`pip install --no-deps synth-ai==0.2.19`, then what it imports: "click<8.2" python-dotenv httpx pydantic fastapi uvicorn numpy sqlalchemy aiosqlite greenlet libsql crafter toml requests pandas pillow openai
aiohttp rich tqdm jsonschema backoff pynacl networkx diskcache setuptools "modal<2" duckdb groq anthropic redis"""
import json, os, re, sqlite3, subprocess
from pathlib import Path

import pytest

from synth_lab.mock import mock_process
from synth_lab.serve import serving_process
from synth_lab.taskclient import TaskAppClient, validate

SYNTH_AI = os.environ.get('SYNTH_AI')
KEY = 'sk_env_of-the-tests-alone'
PLAYS = ['move_right', 'move_right', 'move_down', 'move_left', 'do'] # what its own mock server plays
pytestmark = pytest.mark.skipif(not SYNTH_AI, reason='set SYNTH_AI to the `synth-ai` of a virtual environment with synth-ai 0.2.19')

@pytest.fixture(scope='module')
def app(tmp_path_factory):
    "The URL of our task app, and that of a server that plays `PLAYS`"
    with serving_process('synth_lab.taskapp:create_task_app', dict(key=KEY, lab=str(tmp_path_factory.mktemp('lab')))) as url, mock_process(plays=PLAYS) as model:
        yield url.removesuffix('/v1'),model

def run(program, *args, cwd, code=0):
    "What a program of the old environment says"
    env = os.environ | dict(ENVIRONMENT_API_KEY=KEY, CI='true', HOME=str(cwd), SYNTH_TRACING_AUTO_YES='1')
    done = subprocess.run([program, *map(str, args)], cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout,done.stderr

def test_its_smoke_test_passes(app, tmp_path):
    out,err = run(SYNTH_AI, 'smoke', '--url', app[0], '--env-name', 'crafter', '--policy-name', 'crafter-react', '--max-steps', 10, '--policy', 'mock',
        '--mock-backend', 'synthetic', '--return-trace', cwd=tmp_path)
    assert out.endswith('✓ Smoke rollouts complete\n  successes=1/1 total_steps=10 v3_traces=1/1 nonzero_returns=1/1\n')
    assert '✓ 10 tool calls executed' in out and out.count(f'interact_many({json.dumps(dict(actions=PLAYS))})') == 10
    assert 'rollout[0:0] episodes=1 steps=10 mean_return=2.0000' in out and "achievements: ['collect_sapling', 'collect_wood']" in out
    assert 'validation warning' not in err and KEY not in out+err

EVAL = '''[eval]
app_id = "grpo-crafter"
model = "Qwen/Qwen3-4B"
seeds = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
concurrency = 5
env_name = "crafter"
policy_name = "crafter-react"
[eval.policy_config]
provider = "openai"
inference_url = "{}"
temperature = 0.6
max_tokens = 512
max_llm_calls = 10
[eval.env_config]
difficulty = "normal"
'''

def test_its_evaluation_completes(app, tmp_path):
    (tmp_path/'eval.toml').write_text(EVAL.format(app[1]))
    (tmp_path/'.env').write_text(f'ENVIRONMENT_API_KEY={KEY}\n')
    out,err = run(SYNTH_AI, 'eval', '--url', app[0], '--config', 'eval.toml', '--env-file', '.env', '--trace-db', 'eval.db', cwd=tmp_path)
    told = re.findall('^(?:seed=|Eval complete).*', out, re.M) # in the order in which they ended
    assert told[-1] == 'Eval complete: 10 ok, 0 failed; model=Qwen/Qwen3-4B, split=train', '\n'.join(told)
    assert sorted(o.split()[:2] for o in told[:-1]) == [[f'seed={i}', 'status=200'] for i in range(10)]
    db = sqlite3.connect(tmp_path/'eval.db')
    def count(table): return db.execute(f'SELECT count(*) FROM {table}').fetchone()[0]
    assert (count('session_traces'), count('session_timesteps'), count('events')) == (10, 100, 200) and count('messages') >= 200
    returns = dict(db.execute("SELECT session_id, sum(reward) FROM events WHERE event_type = 'environment' GROUP BY 1"))
    told = {o['run_id']:o['metrics']['mean_return'] for o in answers(out)}
    assert {k:v or 0 for k,v in returns.items()} == told and sum(told.values()) == 9

def answers(out):
    "The responses in what an evaluation printed"
    decoder = json.JSONDecoder()
    return [decoder.raw_decode(out, m.start())[0] for m in re.finditer('^\\{$', out, re.M)]

def test_its_validation_passes(app, tmp_path):
    out,_ = run(SYNTH_AI, 'task-app', 'validate', 'grpo-crafter', '--url', app[0], '--verbose', cwd=tmp_path)
    assert '✓ All validations passed!' in out and '✓ Found 15 task instances' in out and 'Environment: crafter' in out
    assert KEY[:6] not in out

ASK = '''
import asyncio, json, sys
from synth_ai.api.train.task_app import check_task_app_health
from synth_ai.cli.task_apps import _session_trace_from_dict
from synth_ai.task.client import TaskAppClient
from synth_ai.task.contracts import RolloutEnvSpec, RolloutPolicySpec, RolloutRecordConfig, RolloutRequest
from synth_ai.task.validators import validate_rollout_response_for_rl

def asked(mode, form, url):
    return RolloutRequest(run_id=f'{mode}-{form}', env=RolloutEnvSpec(env_name='crafter', seed=0), ops=['agent', 'env']*5, mode=mode,
        policy=RolloutPolicySpec(policy_name='react', config=dict(model='m', inference_url=url)), record=RolloutRecordConfig(return_trace=True, trace_format=form))

async def main(url, model, key):
    async with TaskAppClient(url, api_key=key, retries=1) as c:
        for form in ('compact', 'structured', 'full'):
            r = await c.rollout(asked('rl', form, f'{model}/chat/completions?cid=check'))
            validate_rollout_response_for_rl(r.model_dump())
            s = _session_trace_from_dict(r.trace.get('session_trace') or r.trace)
            print(json.dumps([form, r.metrics.mean_return, [len(t.steps) for t in r.trajectories], len(s.event_history), s.created_at.tzinfo is not None]))
        print(json.dumps([o.task.id for o in await c.task_info([0, 1])]))
    print(json.dumps([check_task_app_health(url, o).ok for o in (key, 'another')]))

asyncio.run(main(*sys.argv[1:]))
'''

def test_its_trainers_checks_pass(app, tmp_path):
    "Its RL validator raises where a trainer would miss something; its health check comes before a training"
    out,_ = run(Path(SYNTH_AI).parent/'python', '-c', ASK, *app, KEY, cwd=tmp_path)
    assert [json.loads(o) for o in out.splitlines() if o.startswith('[')] == [['compact', 2., [5], 0, True], ['structured', 2., [5], 10, True], ['full', 2., [5], 10, True],
        ['crafter', 'crafter'], [True, False]]

def test_our_own_checks_agree(app):
    found = validate(TaskAppClient(app[0], key=KEY), policy=dict(model='m', inference_url=app[1]))
    assert found.ok and len(found.rows) == 11 and all(o.ok for o in found.rows), found
